/** The jest environment of the specs in a mutation run. One test that notices the change is enough, so no test runs after the first failure. */
import { TestEnvironment } from 'jest-environment-node';

/** Number of the change that a test of this process has noticed. One change is in force at a time. */
let noticed;

export default class FirstFailure extends TestEnvironment {
  handleTestEvent({ name, test }) {
    const change = process.env.__STRYKER_ACTIVE_MUTANT__;
    if (change === undefined) return;
    if (name === 'test_fn_failure') noticed = change;
    if (name === 'test_start' && noticed === change) test.mode = 'skip';
  }
}

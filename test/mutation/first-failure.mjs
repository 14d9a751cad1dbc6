/** The jest environment of specs in a mutation run. After the first failing test, it skips all later tests for the same change. */
import { TestEnvironment } from 'jest-environment-node';

/** The number of the change for which a test has failed. */
let noticed;

export default class FirstFailure extends TestEnvironment {
  handleTestEvent({ name, test }) {
    const change = process.env.__STRYKER_ACTIVE_MUTANT__;
    if (change === undefined) return;
    if (name === 'test_fn_failure') noticed = change;
    if (name === 'test_start' && noticed === change) test.mode = 'skip';
  }
}

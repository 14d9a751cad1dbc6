/** The environment of specs over changed code: one test that notices the change is enough, so nothing runs after the first that fails. */
import { TestEnvironment } from 'jest-environment-node';

/** Number of the change that a test of this process has noticed; one at a time is in force. */
let noticed;

export default class FirstFailure extends TestEnvironment {
  handleTestEvent({ name, test }) {
    const change = process.env.__STRYKER_ACTIVE_MUTANT__;
    if (change === undefined) return;
    if (name === 'test_fn_failure') noticed = change;
    if (name === 'test_start' && noticed === change) test.mode = 'skip';
  }
}

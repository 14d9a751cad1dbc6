/**
 * Starts the longest spec files first, so that no worker is left alone with one at the end. Jest knows durations only on a machine where the files ran
 * before; elsewhere it goes by the size of a file, which says little.
 */
import { createRequire } from 'node:module';

const { default: Sequencer } = createRequire(import.meta.url)('@jest/test-sequencer');

/** Files that take more than a minute on two cores while two other files run. Longest first. */
const LONGEST = [
  'test/e2e/startup.e2e',
  'test/e2e/staff.e2e',
  'test/e2e/processor-worker-crash.fault',
  'test/simulation/simulation.fault',
  'test/e2e/stopping.fault',
  'test/e2e/webhooks-kill.fault',
  'test/e2e/crash-failpoints.e2e',
  'test/e2e/demo.e2e',
  'test/e2e/alerts.e2e',
  'test/e2e/supervisor.fault',
  'test/storefaults/exchange.fault',
  'test/storefaults/postgres.fault',
  'test/e2e/processor-crash.fault',
  'test/e2e/merchant-accounts.e2e',
  'test/e2e/operator.e2e',
  'test/e2e/checkout-browser.e2e',
  'libs/eventstore/kurrentdb.fault',
  'test/e2e/processor-lost.e2e',
  'test/e2e/audit-verify.e2e',
  'test/upgrade/side-by-side.e2e',
  'test/e2e/webhooks.e2e',
  'test/e2e/one-client.e2e',
  'test/simulation/stores.unit',
  'test/e2e/audit-saturated.e2e',
  'test/e2e/checkout-crash.e2e',
  'test/reads/reads.e2e',
  'test/e2e/crash.e2e',
  'test/e2e/heads.e2e',
  'test/chaos/chaos.fault',
  'test/e2e/drift.e2e',
  'test/upgrade/frozen.e2e',
  'test/e2e/roles.e2e',
  'test/e2e/reconcile.fault',
  'apps/operator/merchant-check.int',
  'test/e2e/npm.fault',
];
const place = ({ path }) => {
  const found = LONGEST.findIndex((name) => path.endsWith(`/${name}.spec.ts`));
  return found < 0 ? LONGEST.length : found;
};

export default class LongestFirst extends Sequencer {
  sort(tests) {
    return super.sort(tests).sort((a, b) => place(a) - place(b));
  }
}

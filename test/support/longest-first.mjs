/**
 * Starts the longest spec files first, so that no worker is left alone with one at the end. Jest knows durations only on a machine where the files ran
 * before; elsewhere it goes by the size of a file, which says little.
 */
import { createRequire } from 'node:module';

const { default: Sequencer } = createRequire(import.meta.url)('@jest/test-sequencer');

/** Files that take more than a minute on two cores, longest first. */
const LONGEST = [
  'e2e/startup.e2e',
  'e2e/crash-failpoints.e2e',
  'e2e/supervisor.fault',
  'e2e/webhooks.e2e',
  'e2e/staff.e2e',
  'storefaults/postgres.fault',
  'storefaults/exchange.fault',
  'e2e/checkout-browser.e2e',
  'upgrade/side-by-side.e2e',
  'chaos/chaos.fault',
  'reads/reads.e2e',
  'e2e/one-client.e2e',
];
const place = ({ path }) => {
  const found = LONGEST.findIndex((name) => path.endsWith(`/test/${name}.spec.ts`));
  return found < 0 ? LONGEST.length : found;
};

export default class LongestFirst extends Sequencer {
  sort(tests) {
    return super.sort(tests).sort((a, b) => place(a) - place(b));
  }
}

/**
 * Every key is sent many times at once over both APIs. Each key must make one payment. All its stored answers, also later replays, must have the same
 * bytes.
 */
import type { Random } from '../../apps/demo/city.js';
import { CARD } from '../support/service.js';
import { startInstallation } from './installation.js';
import { bringToEnd, judge, type Verdict } from './judge.js';
import { inParallel, isStored, Partners } from './partners.js';

/** How many keys are sent at the same time. */
const KEYS_AT_ONCE = 4;
const PATIENCE_MS = 30_000;

export interface KeysReport extends Verdict {
  readonly keys: number;
  readonly hands: number;
  readonly paid: number;
  readonly inProgress: number;
  readonly unanswered: number;
}

export const proveKeys = async (
  random: Random,
  keys: number,
  hands: number,
  onProgress: (keys: number) => void = () => undefined,
): Promise<KeysReport> => {
  const installation = await startInstallation(random);
  try {
    const partners = new Partners(installation.urls, installation.apiKey, installation.portalId, 'keys', PATIENCE_MS);
    let [paid, inProgress, unanswered, done] = [0, 0, 0, 0];
    const charges = Array.from({ length: keys }, () => partners.beginCharge(random, CARD.approved));
    await inParallel(charges, KEYS_AT_ONCE, async ({ uses: [use] }) => {
      const replies = await Promise.all(Array.from({ length: hands }, (_, n) => partners.askOn(n % installation.urls.length, use!, random)));
      paid += replies.filter((reply) => reply !== null && isStored(reply)).length;
      inProgress += replies.filter((reply) => reply?.code === 'IDEMPOTENCY_IN_PROGRESS').length;
      unanswered += replies.filter((reply) => reply === null).length;
      onProgress((done += 1));
    });
    await bringToEnd(installation, partners, random);
    const verdict = await judge(installation, partners);
    partners.end();
    // Each key makes two charges: principal and fee. No fault happened, so a second payment is a violation.
    const charged = verdict.chargesAtBank === 2 * keys && verdict.payments === keys;
    const violations = [...installation.faults(), ...partners.violations, ...verdict.violations];
    if (!charged) violations.push(`${keys} keys made ${verdict.payments} payments and ${verdict.chargesAtBank} charges at the bank`);
    return { ...verdict, violations, keys, hands, paid, inProgress, unanswered };
  } finally {
    await installation.remove();
  }
};

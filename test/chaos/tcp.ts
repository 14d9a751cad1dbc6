/**
 * Every toxic on every link with every operation: 8 × 3 × 4 = 96 cases. Each operation begins while the toxic harms the link, and gets only a few
 * tries. Then the link heals, and the operation is repeated as the contract says. At the end the books are compared.
 */
import type { Random } from '../../apps/demo/city.js';
import { CARD } from '../support/service.js';
import { LINKS, type LinkName, startInstallation } from './installation.js';
import { bringToEnd, judge, type Verdict } from './judge.js';
import { type Charge, Partners } from './partners.js';
import { type Toxic, TOXICS } from './proxy.js';

export const OPERATIONS = ['create', 'refund', 'void', 'read'] as const;

/** Strong enough to break or delay a request of about a kilobyte. */
const HARD: Readonly<Record<Toxic['kind'], Toxic>> = {
  latency: { kind: 'latency', latencyMs: 300, jitterMs: 200 },
  bandwidth: { kind: 'bandwidth', bytesPerSecond: 2_000 },
  slicer: { kind: 'slicer', averageBytes: 40, delayMs: 5 },
  timeout: { kind: 'timeout' },
  reset_peer: { kind: 'reset_peer', afterMs: 30 },
  slow_close: { kind: 'slow_close', delayMs: 2_000 },
  limit_data: { kind: 'limit_data', bytes: 700 },
  down: { kind: 'down' },
};

/** How long a partner waits for one answer while the link is bad. */
const PATIENCE_MS = 4_000;
const TRIES_UNDER_TOXIC = 2;
const TRIES_AFTER = 6;

export interface TcpReport extends Verdict {
  readonly cases: number;
  /** Number of connections that a toxic has delayed, changed or ended. */
  readonly harmedConnections: number;
  readonly endedUnderToxic: number;
  readonly endedAfterHealing: number;
  readonly endedAfterRecovery: number;
}

/** `links` and `toxics`: the cases to run. Default: all. */
export const proveTcp = async (
  random: Random,
  options: { toxics?: readonly Toxic['kind'][]; links?: readonly LinkName[]; onProgress?: (cases: number) => void } = {},
): Promise<TcpReport> => {
  const { toxics = TOXICS, links = LINKS, onProgress = () => undefined } = options;
  const installation = await startInstallation(random);
  try {
    const partners = new Partners(installation.urls, installation.apiKey, installation.portalId, 'tcp', PATIENCE_MS);
    const ended = { underToxic: 0, afterHealing: 0, afterRecovery: 0 };
    const unread: Charge[] = [];
    let cases = 0;
    for (const link of links)
      for (const kind of toxics) {
        const [toRefund, toVoid, toRead] = await Promise.all([paid(partners, random), paid(partners, random), paid(partners, random)]);
        const proxies = installation.links[link];
        for (const proxy of proxies) proxy.poison(HARD[kind]);
        const create = partners.beginCharge(random, CARD.approved);
        const refund = partners.beginReturn(toRefund, random, 'refund');
        const reversal = partners.beginReturn(toVoid, random, 'void');
        const all = (tries: number) =>
          Promise.all([
            create.state === 'open' ? partners.pursueCharge(create, random, tries) : 'ended',
            refund.state === 'open' ? partners.pursueReturn(refund, random, tries) : 'ended',
            reversal.state === 'open' ? partners.pursueReturn(reversal, random, tries) : 'ended',
          ]);
        const count = (ends: readonly string[]) => ends.filter((end) => end === 'ended').length;
        const read = partners.read(toRead, random);
        const under = count(await all(TRIES_UNDER_TOXIC));
        const readUnder = await read;
        for (const proxy of proxies) proxy.heal();
        const after = count(await all(TRIES_AFTER));
        const readAfter = readUnder || (await partners.read(toRead, random));
        if (!readAfter) unread.push(toRead);
        ended.underToxic += under + Number(readUnder);
        ended.afterHealing += after - under + Number(readAfter && !readUnder);
        ended.afterRecovery += 3 - after + Number(!readAfter);
        cases += OPERATIONS.length;
        onProgress(cases);
      }
    const harmedConnections = LINKS.flatMap((link) => installation.links[link]).reduce((sum, proxy) => sum + proxy.harmed, 0);
    await installation.heal();
    await bringToEnd(installation, partners, random);
    for (const charge of unread)
      if (!(await partners.read(charge, random))) partners.violation(`${charge.intention}: could not be read after healing`);
    const verdict = await judge(installation, partners);
    partners.end();
    return {
      ...verdict,
      violations: [...installation.faults(), ...partners.violations, ...verdict.violations],
      cases,
      harmedConnections,
      endedUnderToxic: ended.underToxic,
      endedAfterHealing: ended.afterHealing,
      endedAfterRecovery: ended.afterRecovery,
    };
  } finally {
    await installation.remove();
  }
};

const paid = async (partners: Partners, random: Random): Promise<Charge> => {
  const charge = partners.beginCharge(random, CARD.approved);
  if ((await partners.pursueCharge(charge, random, 30)) !== 'ended' || charge.state !== 'paid')
    throw new Error('no payment although nothing is harmed');
  return charge;
};

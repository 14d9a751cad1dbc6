/** Fault 4: the majority of a cluster starts again with old disks. */
import { expect } from '@jest/globals';
import { setTimeout as sleep } from 'node:timers/promises';
import { eventually } from '../support/eventually.js';
import { anyKnows, judgeLogAt, paymentOf, resume, settled, type Traffic } from './exchange.js';
import { Installation } from './installation.js';
import { realCluster } from './nodes.js';
import { judgeMoney, Partner } from './partner.js';

export interface ClusterFigures {
  readonly requests: number;
  readonly paid: number;
  readonly charges: number;
  readonly secondCharges: number;
  /** Milliseconds from the first answer of the old majority until each process noticed. */
  readonly noticedMs: Readonly<Record<string, number>>;
}

const PAID_BEFORE = 10;

export const playOldMajority = async (traffic: Traffic): Promise<ClusterFigures> => {
  const cluster = await realCluster();
  const ends: (() => unknown)[] = [() => cluster.end()];
  try {
    await cluster.start(1, 2, 3);
    const installation = await Installation.start({ node: null, url: cluster.url });
    ends.push(() => installation.remove());
    const partner = new Partner(installation.partner);
    ends.push(() => partner.stop());
    for (let made = 0; made < 3; made++) await partner.create();
    await cluster.stop();
    const old = await cluster.save();
    await cluster.start(1, 2, 3);
    const before = partner.paid.length;
    partner.start();
    await eventually(() => partner.paid.length >= before + PAID_BEFORE);
    await partner.stop();
    await settled();
    if (traffic === 'under load') partner.start();

    await cluster.kill();
    const newest = await cluster.save();
    await old(1, 2);
    const from = Date.now();
    await cluster.start(1, 2);
    const answeredAt = Date.now();
    const tookMs = await installation.noticed(from);
    const noticedMs = Object.fromEntries(Object.entries(tookMs).map(([name, ms]) => [name, Math.max(0, ms - (answeredAt - from))]));
    // The third node has the newest events. When it joins, the majority makes it drop these events.
    await cluster.start(3);
    await sleep(5_000);
    await partner.stop();
    expect((await partner.create()).sent).toMatchObject([{ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' }]);
    for (const create of partner.paid) {
      expect(await partner.again(create)).toMatchObject({ status: 200, replayed: true });
      expect([200, 503]).toContain((await partner.find(paymentOf(create))).status);
    }
    expect((await installation.command('log', 'resume', '--by', 'Dana', '--reason', 'too early')).code).toBe(1);

    await cluster.kill();
    const to = Date.now();
    await newest(1, 2, 3);
    await cluster.start(1, 2, 3);
    const resumed = await resume(installation);
    expect(resumed).toMatchObject({ code: 0 });
    await eventually(async () => !(await anyKnows(installation)));
    await eventually(async () => (await partner.create()).sent.at(-1)!.status === 200);
    for (const create of partner.paid) expect((await partner.find(paymentOf(create))).status).toBe(200);
    const truth = await installation.bank.truth();
    const violations = [...judgeMoney(truth, partner, { from, to }), ...(await judgeLogAt(cluster.url, partner))];
    expect(violations).toEqual([]);
    return {
      requests: partner.sent.length,
      paid: partner.paid.length,
      charges: truth.filter(({ op, leg, result }) => op === 'charge' && leg !== 'fee' && result === 'approved').length,
      secondCharges: violations.length,
      noticedMs,
    };
  } finally {
    for (const end of ends.reverse()) await end();
  }
};

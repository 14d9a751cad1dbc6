/** Faults 1, 2 and 12: between two appends, another log starts to answer at the address of the event store. */
import { expect } from '@jest/globals';
import { setTimeout as sleep } from 'node:timers/promises';
import { inParallel } from '../chaos/partners.js';
import type { Position } from '#eventstore';
import { eventually } from '../support/eventually.js';
import { Installation } from './installation.js';
import { fillAsForeign, type Node, type Nodes, urlOf, withLog } from './nodes.js';
import { type Create, judgeAnswers, judgeMoney, Partner, type Sent } from './partner.js';

/** The time within which every process must notice the exchange, even an idle one. The limit is longer if other specs run at the same time. */
export const NOTICED_MS = {
  alone: 3_000,
  /** In a cluster, an event counts as missing only if it stays missing for 5 s: a leader that was deposed may still answer. */
  cluster: 8_000,
  besideOthers: 10_000,
} as const;

/** The time after which the slowest process noticed the exchange. */
export const slowest = (noticedMs: Readonly<Record<string, number>>): number => Math.max(...Object.values(noticedMs));

/** The duration of the traffic before the exchange, and of the traffic after it was noticed. */
const TRAFFIC_MS = 1_500;

const AT_ONCE = 8;

export type Replacement = 'an empty log' | 'an earlier copy' | 'a longer foreign log';
export type Traffic = 'under load' | 'idle';

export interface Figures {
  readonly requests: number;
  readonly paid: number;
  readonly charges: number;
  readonly secondCharges: number;
  readonly violations: readonly string[];
  readonly noticedMs: Readonly<Record<string, number>>;
}

/** Makes the other server. An earlier copy is made during the traffic. */
const prepare = async (nodes: Nodes, right: Node, replacement: Replacement): Promise<Node> => {
  if (replacement === 'an earlier copy') return (await nodes.copy(right)).start();
  const other = await nodes.empty();
  if (replacement === 'a longer foreign log') {
    const end = await withLog(urlOf(right.port), (store) => store.head());
    await fillAsForeign(other, end!);
  }
  return other;
};

export interface ExchangeOptions {
  /** Adds another worker, and another API without requests. */
  readonly idleOthers?: boolean;
}

export const playExchange = async (
  nodes: Nodes,
  replacement: Replacement,
  traffic: Traffic,
  { idleOthers = false }: ExchangeOptions = {},
): Promise<Figures> => {
  const right = await nodes.empty();
  const installation = await Installation.start({ node: right });
  const partner = new Partner(installation.partner);
  try {
    if (idleOthers) {
      await installation.add('api', 'the second API');
      await installation.add('worker', 'the second worker');
    }
    partner.start();
    await sleep(TRAFFIC_MS);
    await eventually(() => partner.paid.length >= 5);
    const other = await prepare(nodes, right, replacement);
    const end = await withLog(urlOf(other.port), (store) => store.head());
    const before = partner.paid.length;
    await eventually(() => partner.paid.length >= before + 5);
    if (traffic === 'idle') {
      await partner.stop();
      await settled();
    }
    const known = partner.paid.slice(0, 3);

    const exchangedAt = installation.exchange(other);
    const noticedMs = await installation.noticed(exchangedAt);
    const noticedAt = Date.now();

    // Old keys, new keys and reads must get the answers of C76.
    const asked: Sent[] = [];
    for (const create of known) {
      asked.push(await partner.again(create));
      const found = await partner.find(paymentOf(create));
      expect([200, 503]).toContain(found.status);
    }
    expect(asked.map(({ status, replayed }) => [status, replayed])).toEqual(known.map(() => [200, true]));
    expect((await partner.create()).sent).toMatchObject([{ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' }]);
    const absent = await partner.find('00000000-0000-7000-8000-000000000000');
    expect(absent.status).toBe(503);
    const refund = await partner.send('POST', `/api/partner/v1/payments/${paymentOf(known[0]!)}/refund`, {}, `refund-${known[0]!.key}`);
    expect(refund).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE' });
    await sleep(TRAFFIC_MS);
    await partner.stop();
    for (const id of partner.sent.flatMap(({ paymentId }) => paymentId ?? [])) expect((await partner.find(id)).status).not.toBe(404);

    // No command can end the incident before the right log is back.
    const tooEarly = await installation.command('log', 'resume', '--by', 'Dana', '--reason', 'too early');
    expect([tooEarly.code, tooEarly.stdout]).toEqual([1, '']);
    const status = await installation.command('log', 'status', '--json');
    expect(JSON.parse(status.stdout)).not.toMatchObject({ incident: null });

    const backAt = installation.exchange(right);
    const resumed = await resume(installation);
    expect(resumed).toMatchObject({ code: 0 });
    const window = { from: exchangedAt, to: backAt };
    await eventually(async () => !(await anyKnows(installation)));
    const violations = [
      ...judgeMoney(await installation.bank.truth(), partner, window),
      ...judgeAnswers(partner.sent, window, noticedAt),
      ...(await judgeLog(right, partner)),
      ...(await judgeOther(other, end)),
    ];
    expect(violations).toEqual([]);

    // Payments work again. No payment was lost, and no key charges twice.
    await eventually(async () => (await partner.create()).sent.at(-1)!.status === 200);
    for (const create of partner.paid) expect((await partner.find(paymentOf(create))).status).toBe(200);
    await inParallel(partner.creates, AT_ONCE, (create) => partner.again(create));
    const after = judgeMoney(await installation.bank.truth(), partner, window);
    expect(after).toEqual([]);
    const charges = await installation.bank.truth();
    return {
      requests: partner.sent.length,
      paid: partner.paid.length,
      charges: charges.filter(({ op, leg, result }) => op === 'charge' && leg !== 'fee' && result === 'approved').length,
      secondCharges: after.filter((line) => line.includes('was charged')).length,
      violations,
      noticedMs,
    };
  } finally {
    await partner.stop();
    await installation.remove();
  }
};

export const paymentOf = ({ sent }: Create): string => sent.find(({ status }) => status === 200)!.paymentId!;

/** Runs `payfold log resume`. The right store must be reachable again. */
export const resume = (installation: Installation) =>
  installation.command('log', 'resume', '--by', 'Dana', '--reason', 'a wrong address was put right');

export const anyKnows = async ({ witnesses }: Installation): Promise<boolean> =>
  (await Promise.all(witnesses.map((one) => one.knows()))).includes(true);

/** Waits long enough for every process to check the log and store its marks. */
export const settled = (): Promise<void> => sleep(2_500);

/** Returns one violation for each event in the other log after `end`, its head before the exchange. */
const judgeOther = (other: Node, end: Position | null): Promise<string[]> =>
  withLog(urlOf(other.port), async (store) => {
    const violations: string[] = [];
    for await (const batch of store.readAll(end)) for (const { type, stream } of batch) violations.push(`the other log got ${type} in ${stream}`);
    return violations;
  });

/** Every payment that was answered 200 must have its outcome in the right log. Returns the violations. */
export const judgeLog = (node: Node, partner: Partner): Promise<string[]> => judgeLogAt(urlOf(node.port), partner);

export const judgeLogAt = (url: string, partner: Partner): Promise<string[]> =>
  withLog(url, async (store) => {
    const violations: string[] = [];
    for (const create of partner.paid) {
      const types: string[] = [];
      for await (const { type } of store.read(`payment-${paymentOf(create)}`)) types.push(type);
      if (!types.includes('PaymentCreated')) violations.push(`${create.key}: was answered 200, and the log has ${types.join(', ') || 'nothing'}`);
    }
    return violations;
  });

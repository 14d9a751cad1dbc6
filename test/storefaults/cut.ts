/**
 * Fault 2: the event store is put back to an earlier copy. The copy was made between an intent and its outcome, and between a charge and its refund.
 * Also the starts of faults 1 and 5, which must be refused.
 */
import { expect } from '@jest/globals';
import { setTimeout as sleep } from 'node:timers/promises';
import { eventually } from '../support/eventually.js';
import { newKey } from '../support/processes.js';
import { PAYMENTS } from '../support/service.js';
import { anyKnows, judgeLog, paymentOf, resume, settled } from './exchange.js';
import { Installation } from './installation.js';
import { fill, fillAsForeign, type Nodes, urlOf, withLog } from './nodes.js';
import { judgeMoney, Partner } from './partner.js';

export interface CutOptions {
  /** `stopped`: the service is stopped before the store is put back, and started after it. */
  readonly service: 'running' | 'stopped';
  /** True: other events were appended to the earlier copy until it was longer than the right log. */
  readonly grown: boolean;
  /** How long the incident lasts. Recovery starts with payments that are a minute old. A longer incident shows that recovery does not run. */
  readonly incidentMs: number;
}

export interface CutFigures {
  readonly requests: number;
  readonly charges: number;
  readonly secondCharges: number;
  readonly noticedMs: Readonly<Record<string, number>>;
}

/** The bank holds its answer for this time, while the log is copied. */
const COPY_MS = 3_000;

export const playCut = async (nodes: Nodes, { service, grown, incidentMs }: CutOptions): Promise<CutFigures> => {
  const right = await nodes.empty();
  const installation = await Installation.start({ node: right });
  const partner = new Partner(installation.partner);
  try {
    for (let made = 0; made < 3; made++) await partner.create();
    const refunded = partner.creates[0]!;
    // The processor answers only after the copy is made.
    await installation.bank.arm({ match: { call: 'charge', leg: 'principal' }, delayAfterMs: COPY_MS });
    const holding = partner.create();
    const held = partner.creates.at(-1)!;
    // Wait until the bank has charged the payment. Then its intent is in the log.
    await eventually(async () => (await installation.bank.truth()).some(({ amountCents }) => amountCents === held.amountCents));
    const copy = await nodes.copy(right);
    await holding;
    expect(held.sent).toMatchObject([{ status: 200 }]);
    const refundKey = newKey('refund');
    const refund = () => partner.send('POST', `${PAYMENTS}/${paymentOf(refunded)}/refund`, {}, refundKey);
    expect(await refund()).toMatchObject({ status: 200 });
    for (let made = 0; made < 3; made++) await partner.create();
    await settled();
    const other = await copy.start();
    if (grown) await fill(other, (await withLog(urlOf(right.port), (store) => store.head()))!);

    if (service === 'stopped') await installation.stopService();
    const exchangedAt = installation.exchange(other);
    if (service === 'stopped') await installation.startService();
    const noticedMs = await installation.noticed(exchangedAt);

    // Stored answers are replayed. New payments and refunds are refused. A read may be refused, but must not report "not found".
    for (const create of partner.creates) {
      expect(await partner.again(create)).toMatchObject({ status: 200, replayed: true });
      expect([200, 503]).toContain((await partner.find(paymentOf(create))).status);
    }
    expect(await refund()).toMatchObject({ status: 200 });
    expect((await partner.create()).sent).toMatchObject([{ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' }]);
    const another = partner.send('POST', `${PAYMENTS}/${paymentOf(partner.creates[1]!)}/refund`, {}, newKey('refund'));
    expect(await another).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' });
    await sleep(incidentMs);
    const refused = await installation.command('log', 'resume', '--by', 'Dana', '--reason', 'too early');
    expect(refused).toMatchObject({ code: 1, stdout: '' });
    expect(refused.stderr).toContain('does not hold everything that it held');

    const window = { from: exchangedAt, to: installation.exchange(right) };
    expect(await resume(installation)).toMatchObject({ code: 0 });
    await eventually(async () => !(await anyKnows(installation)));
    expect(await judgeLog(right, partner)).toEqual([]);
    await eventually(async () => (await partner.create()).sent.at(-1)!.status === 200);
    for (const create of partner.paid) expect(await partner.again(create)).toMatchObject({ status: 200, replayed: true });
    const truth = await installation.bank.truth();
    const violations = judgeMoney(truth, partner, window);
    expect(violations).toEqual([]);
    return {
      requests: partner.sent.length,
      charges: truth.filter(({ op, leg, result }) => op === 'charge' && leg !== 'fee' && result === 'approved').length,
      secondCharges: violations.length,
      noticedMs,
    };
  } finally {
    await installation.remove();
  }
};

const UUID = '[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}';

/** Faults 1 and 5 at a start. The service must print one line with the ids, the variable and the host, end with exit code 1, and write nothing. */
export const playRefusedStarts = async (nodes: Nodes): Promise<void> => {
  const right = await nodes.empty();
  const installation = await Installation.start({ node: right });
  const partner = new Partner(installation.partner);
  try {
    await partner.create();
    await installation.stopService();
    const host = `the event store at KURRENTDB_URL \\(127\\.0\\.0\\.1:${installation.proxy!.port}\\)`;
    const refused = async (line: string) => {
      const ended = await installation.refusedStart();
      expect(ended).toMatchObject({ code: 1, stdout: '' });
      expect(ended.stderr.split('\n').filter((one) => one !== '' && !one.startsWith('{"level"'))).toEqual([expect.stringMatching(line)]);
    };

    const empty = await nodes.empty();
    installation.exchange(empty);
    await refused(`^${host} is not the log of installation ${UUID}: it is empty; nothing was changed$`);
    expect(await withLog(urlOf(empty.port), (store) => store.head())).toBeNull();

    const foreign = await nodes.empty();
    await fillAsForeign(foreign, (await withLog(urlOf(right.port), (store) => store.head()))!);
    const head = () => withLog(urlOf(foreign.port), (store) => store.head());
    const end = await head();
    installation.exchange(foreign);
    await refused(
      `^${host} belongs to installation ${UUID}, and this database to installation ${UUID}; set KURRENTDB_URL and DATABASE_URL to the stores of one installation; nothing was changed$`,
    );
    expect(await head()).toBe(end);

    // A new database with the old log.
    const late = await Installation.start({ node: right }).then(
      (started) => started.remove().then(() => 'started'),
      (error: Error) => error.message,
    );
    expect(late).toMatch(new RegExp(`belongs to installation ${UUID}, and this database to none yet`));

    installation.exchange(right);
    await installation.startService();
    expect((await partner.create()).sent).toMatchObject([{ status: 200 }]);
    for (const create of partner.creates) expect((await partner.find(paymentOf(create))).status).toBe(200);
  } finally {
    await installation.remove();
  }
};

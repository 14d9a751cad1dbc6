/** Statements of agencies, against the entries of the journal, and the exceptions that a scope sees. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { directoryModel, EVERYTHING, portalNotFound, type Scope } from '#accounts';
import { memoryEventStore, type Position, type Recorded } from '#eventstore';
import type { Clock } from '#kernel';
import { adjustBooks, closePeriod, JOURNAL_START, type JournalEntry, journalModel, journalPages, lineRegisterModel } from '#ledger';
import { createPool, type Pool, systemIds, transaction } from '#platform';
import { paymentEvents, type PaymentEvent, paymentListModel, paymentStream, type PaymentTerms } from '#payments';
import { exceptionModel, settlementEvents } from '#settlement';
import { charged, disputed, move, partRefunded, PORTAL, refundRequested, returned, separate, voided } from '../../test/support/given.js';
import { freshDatabase, makeTables } from '../../test/support/postgres.js';
import { exceptionsFor } from './exceptions.js';
import { type Statement, statementCsv, statementItems, statementOf } from './statement.js';

const OTHER = '018f0000-0000-7000-8000-00000000000e';
const QUIET = '018f0000-0000-7000-8000-00000000000f';
const OWNER = '018f0000-0000-7000-8000-0000000000a1';
const at = (text: string): number => Date.parse(text.length === 10 ? `${text}T00:00:00Z` : text);
/** Times around the begin of November and of December, in UTC and in Chicago. */
const EDGES = [
  '2026-10-05T12:00:00Z',
  '2026-10-31T23:59:59.999Z',
  '2026-11-01',
  '2026-11-01T04:59:59.999Z',
  '2026-11-01T05:00:00Z',
  '2026-11-15T12:00:00Z',
  '2026-11-30T23:59:59.999Z',
  '2026-12-01T00:00:00Z',
  '2026-12-01T05:59:59.999Z',
  '2026-12-01T06:00:00Z',
  '2026-12-02T12:00:00Z',
].map(at);

let now = EDGES[0]!;
const clock: Clock = {
  now: () => now,
  realNow: () => now,
  monotonic: () => performance.now(),
  sleep: (ms) => new Promise((wake) => setTimeout(wake, ms)),
};
const ids = systemIds(() => now);
const store = memoryEventStore({ now: () => now });
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
let applied: Position | null = null;

const follow = async () => {
  const events: Recorded[] = [];
  for await (const page of store.readAll(applied, { streamPrefixes: journalModel.streamPrefixes! })) events.push(...page);
  for (const model of [journalModel, lineRegisterModel]) if (events.length > 0) await transaction(pool, (client) => model.apply(client, events));
  applied = events.at(-1)?.position ?? applied;
};
const ports = () => ({ store, db: pool, clock, ids, journalReached: follow });
const record = (facts: readonly PaymentEvent[], id: string) =>
  store.append(
    paymentStream(id),
    'any',
    facts.map((fact) =>
      paymentEvents.write(fact, ids.uuid(), {
        recordedAt: new Date(now).toISOString(),
        actor: { type: 'system', id: 'spec' },
        correlationId: 'spec',
      }),
    ),
  );
/** A payment now, and what happens to it at once. */
const pay = async (portalId: string, cents: number, ...facts: readonly PaymentEvent[]) => {
  const terms: PaymentTerms = {
    ...separate,
    portalId,
    legs: separate.legs.map((leg) => (leg.leg === 'principal' ? { ...leg, principalCents: cents } : leg)),
  };
  await record([...charged(terms), ...facts], ids.uuid());
};
const adjust = (portalId: string, cents: number) =>
  adjustBooks(ports(), {
    adjustmentId: ids.uuid(),
    postings: [
      { account: `liabilities:agency:${portalId}:payable`, cents },
      { account: 'equity:adjustment', cents: -cents },
    ],
    effectiveAt: new Date(now).toISOString(),
    reason: 'spec',
    by: 'Dana',
  });
const statement = (
  change: { portalId?: string; period?: string; zone?: string; scope?: Scope; position?: string | null } = {},
): Promise<Statement> => {
  const { scope = EVERYTHING, position = applied, portalId = PORTAL, period = '2026-11', zone } = change;
  return statementOf({ store, db: pool, position }, scope, { portalId, period, zone });
};

beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'statement', max: 4 });
  for (const model of [journalModel, lineRegisterModel, directoryModel, paymentListModel, exceptionModel]) await makeTables(pool, model);
  for (const [portalId, name] of [
    [PORTAL, 'Water'],
    [OTHER, 'Parks'],
    [QUIET, 'Library'],
  ])
    await pool.query('insert into directory_portal (portal_id, revision, state) values ($1, 0, $2)', [
      portalId,
      { portalId, name, ownerAccountId: OWNER, access: {}, coding: [] },
    ]);
  // Earlier charges belong to the gateway that the portal had then.
  for (const portalId of [PORTAL, OTHER]) await store.append(`portal-${portalId}`, 'any', [gatewaySet(portalId, 'm'), gatewaySet(portalId, 'new')]);
  for (const [index, edge] of EDGES.entries()) {
    now = edge;
    const cents = 10_000 + 10 ** (index % 4);
    await pay(PORTAL, cents);
    await pay(PORTAL, 10_000, ...voided(ids.uuid()));
    await pay(PORTAL, cents, ...partRefunded(ids.uuid(), [index + 1, 2], 'refund'), ...feeRefunded(ids.uuid()));
    await pay(PORTAL, cents, disputed({ disputedAmountCents: 4_000 + index, status: 'lost', openedOn: new Date(edge).toISOString().slice(0, 10) }));
    await pay(PORTAL, cents, rejected());
    await pay(OTHER, 77_777);
    await remitted(PORTAL, 3_000 + index);
    await adjust(PORTAL, -(50 + index));
    await adjust(OTHER, 5);
    if (edge === at('2026-11-15T12:00:00Z')) {
      await settle(PORTAL, 10_000, 'bat_1');
      await settle(PORTAL, 10_000, 'bat_1');
      await settle(OTHER, 10_000, 'bat_1');
      await settle(OTHER, 10_000, 'bat_2');
      await fund('bat_1', '2026-11-01');
      await fund('bat_2', '2026-11-18');
    }
    if (edge === at('2026-12-02T12:00:00Z')) {
      await settle(PORTAL, 10_000, 'bat_3');
      await settle(PORTAL, 10_000, 'bat_4');
      await fund('bat_3', '2026-12-01');
    }
    await follow();
  }
}, 60_000);
const settle = (portalId: string, cents: number, batchId: string) =>
  pay(portalId, cents, {
    type: 'PaymentSettled',
    at: '',
    data: { leg: 'principal', batchId, closedAt: new Date(now).toISOString(), grossCents: cents, feeCents: 30 },
  });
const fund = (batchId: string, fundedOn: string) => {
  const data = { gateway: 'simulator', merchantAccount: 'm', batchId, fundedOn, netCents: 9_970 };
  const meta = { recordedAt: new Date(now).toISOString(), actor: { type: 'system', id: 'spec' } as const, correlationId: 'spec' };
  return store.append(`settlement-simulator-m-${batchId}`, 'any', [settlementEvents.write({ type: 'BatchFunded', at: '', data }, ids.uuid(), meta)]);
};
afterAll(async () => {
  await pool.end();
  await database.drop();
});
const gatewaySet = (portalId: string, merchantAccount: string) => ({
  id: ids.uuid(),
  type: 'PortalGatewaySet',
  v: 1,
  data: {
    portalId,
    gateway: { gateway: 'simulator', merchantAccount, feeMerchantAccount: 'm-fee', credentialsRef: 'sandbox', environment: 'sandbox' },
  },
  meta: { recordedAt: new Date(now).toISOString(), actor: { type: 'operator' as const, id: 'spec' }, correlationId: 'spec' },
});
const rejected = (): PaymentEvent => ({
  type: 'SettlementRejected',
  at: '',
  data: { leg: 'principal', batchId: 'bat_0', closedAt: new Date(now).toISOString() },
});
const feeRefunded = (attemptId: string): PaymentEvent[] => [
  refundRequested(attemptId, { legs: [move(attemptId, 'fee', 0, 108, 'refund')], lines: [[0, 108]] }),
  returned(attemptId, 'fee', 0, 108, 'refund'),
];
const remitted = (portalId: string, cents: number) =>
  store.append(`remittance-${portalId}`, 'any', [
    {
      id: ids.uuid(),
      type: 'AgencyRemitted',
      v: 1,
      data: {
        remittanceId: ids.uuid(),
        portalId,
        cents,
        reference: `W-${cents}`,
        on: new Date(now).toISOString().slice(0, 10),
        advance: false,
        by: 'Dana',
      },
      meta: { recordedAt: new Date(now).toISOString(), actor: { type: 'staff', id: 'Dana' }, correlationId: 'spec' },
    },
  ]);

const entries = async (): Promise<JournalEntry[]> => {
  const all: JournalEntry[] = [];
  for await (const page of journalPages(pool, JOURNAL_START, { from: null, to: null, until: null })) all.push(...page);
  return all;
};
/** The credits less the debits of an account, of entries that fit. */
const summed = (all: readonly JournalEntry[], accounts: readonly string[], rules: readonly string[] | null, from: number, to: number): number => {
  let sum = 0;
  for (const { rule, bookedAt, postings } of all)
    if (Date.parse(bookedAt) >= from && Date.parse(bookedAt) < to && (rules === null || rules.includes(rule)))
      for (const { account, cents } of postings) if (accounts.includes(account)) sum -= cents;
  return sum;
};

const MONTHS: readonly [period: string, zone: string, from: number, to: number][] = [
  ['2026-09', 'UTC', at('2026-09-01'), at('2026-10-01')],
  ['2026-10', 'UTC', at('2026-10-01'), at('2026-11-01')],
  ['2026-11', 'UTC', at('2026-11-01'), at('2026-12-01')],
  ['2026-12', 'UTC', at('2026-12-01'), at('2027-01-01')],
  ['2026-10', 'America/Chicago', at('2026-10-01T05:00:00Z'), at('2026-11-01T05:00:00Z')],
  ['2026-11', 'America/Chicago', at('2026-11-01T05:00:00Z'), at('2026-12-01T06:00:00Z')],
  ['2026-12', 'America/Chicago', at('2026-12-01T06:00:00Z'), at('2027-01-01T06:00:00Z')],
];

describe('a statement', () => {
  test.each(MONTHS)('%s in %s sums the entries of that month, each by its kind', async (period, zone, from, to) => {
    const all = await entries();
    const payable = (rules: readonly string[] | null, begin = from) => summed(all, [`liabilities:agency:${PORTAL}:payable`], rules, begin, to);
    const fee = (...rules: readonly string[]) =>
      summed(all, [`revenue:service_fee:${PORTAL}`, `revenue:service_fee_refunded:${PORTAL}`], rules, from, to);
    const expected: Statement = {
      portalId: PORTAL,
      name: 'Water',
      period,
      zone,
      from: new Date(from).toISOString(),
      to: new Date(to).toISOString(),
      openingCents: summed(all, [`liabilities:agency:${PORTAL}:payable`], null, 0, from),
      movements: {
        chargedCents: payable(['R1']),
        returnedCents: payable(['R3', 'R7']),
        disputedCents: payable(['R11', "R12'", "R12''"]),
        rejectedCents: payable(['R14']),
        adjustedCents: payable(['R16', 'R17']),
      },
      fees: {
        chargedCents: fee('R2'),
        voidedCents: fee('R3'),
        refundedCents: fee('R8'),
        otherCents: fee('R14', 'R16', 'R17'),
        netCents: fee('R2', 'R3', 'R8', 'R14', 'R16', 'R17'),
      },
      fundedCents: payable(["R6'"]),
      remittedCents: payable(['R20']),
      closingCents: payable(null, 0),
      deposits: expect.any(Array) as never,
      final: false,
      position: null,
      digest: null,
    };
    expect(await statement({ period, zone })).toEqual(expected);
    if (period === '2026-11')
      for (const cents of [
        ...Object.values(expected.movements),
        ...Object.values(expected.fees).slice(0, 3),
        expected.remittedCents,
        expected.openingCents,
      ])
        expect(cents).not.toBe(0);
  });
  test('of a portal without entries is all zeros', async () => {
    const { openingCents, closingCents, fees, movements, name } = await statement({ portalId: QUIET });
    expect([name, openingCents, closingCents, ...Object.values(fees), ...Object.values(movements)]).toEqual([
      'Library',
      ...Array<number>(12).fill(0),
    ]);
  });
  test.each([
    [{ zone: 'Nowhere/City' }, 'zone must be the name of a time zone, such as America/Chicago.'],
    [{ zone: 'Nowhere/City', period: 'x' }, 'zone must be the name of a time zone, such as America/Chicago.'],
    [{ period: '2026-13' }, 'period must be a month, such as 2026-11.'],
    [{ period: '2026-13', scope: { accounts: [], portals: [OTHER] } }, 'period must be a month, such as 2026-11.'],
  ])('%j is refused', async (change, message) => {
    const field = message.slice(0, message.indexOf(' '));
    await expect(statement(change)).rejects.toMatchObject({ code: 'VALIDATION_ERROR', status: 400, message, details: { errors: [{ field }] } });
  });
  test('is absent for an unknown portal, and for one out of scope', async () => {
    const absent = { ...portalNotFound(), message: 'Portal not found.' };
    const unknown = '018f0000-0000-7000-8000-00000000dead';
    await expect(statement({ portalId: unknown })).rejects.toMatchObject(absent);
    await expect(statement({ portalId: unknown, scope: { accounts: [], portals: [unknown] } })).rejects.toMatchObject(absent);
    await expect(statement({ scope: { accounts: [], portals: [OTHER] } })).rejects.toMatchObject(absent);
    for (const scope of [
      { accounts: [], portals: [PORTAL] },
      { accounts: [OWNER], portals: [] },
    ])
      expect(await statement({ scope })).toEqual(await statement());
  });
  const share = (payments: number) => ({
    principalCents: payments * 10_000,
    feeCents: 0,
    processorFeeCents: payments * -30,
    netCents: payments * 9_970,
  });
  test('names the deposits of its month, with its own share of each', async () => {
    const of = async (change: Parameters<typeof statement>[0]) =>
      (await statement(change)).deposits.map(({ depositId, ...deposit }) => {
        expect(depositId).toMatch(/^[0-9a-f-]{36}$/);
        return deposit;
      });
    const first = { depositedOn: '2026-11-01', merchantAccount: 'm', batchId: 'bat_1' };
    const second = { depositedOn: '2026-11-18', merchantAccount: 'm', batchId: 'bat_2' };
    expect(await of({})).toEqual([{ ...first, ...share(2) }]);
    // A day is a day of the bank, whatever the zone.
    expect(await of({ zone: 'America/Chicago' })).toEqual([{ ...first, ...share(2) }]);
    expect(await of({ portalId: OTHER })).toEqual([{ ...first, ...share(1) }, { ...second, ...share(1) }]); // prettier-ignore
    expect(await of({ period: '2026-10' })).toEqual([]);
    expect(await of({ portalId: QUIET })).toEqual([]);
    expect((await of({ period: '2026-12' })).map(({ batchId }) => batchId)).toEqual(['bat_3']);
  });
  test('as CSV has a line for each figure, and three for each deposit', async () => {
    const november = await statement();
    const [heading, ...lines] = statementCsv(november).split('\r\n');
    expect(heading).toBe('portal_id,period,zone,item,day,reference,cents,final,position,digest');
    expect(lines.pop()).toBe('');
    expect(lines).toEqual([
      ...statementItems(november).map(([item, cents]) => `${PORTAL},2026-11,UTC,${item},,,${cents},false,,`),
      `${PORTAL},2026-11,UTC,deposit_principal,2026-11-01,bat_1,20000,false,,`,
      `${PORTAL},2026-11,UTC,deposit_fee,2026-11-01,bat_1,0,false,,`,
      `${PORTAL},2026-11,UTC,deposit_processor_fee,2026-11-01,bat_1,-60,false,,`,
    ]);
    const { movements, fees } = november;
    expect(Object.fromEntries(statementItems(november))).toEqual({
      opening: november.openingCents,
      charged: movements.chargedCents,
      returned: movements.returnedCents,
      disputed: movements.disputedCents,
      rejected: movements.rejectedCents,
      adjusted: movements.adjustedCents,
      funded: november.fundedCents,
      remitted: november.remittedCents,
      closing: november.closingCents,
      fees_charged: fees.chargedCents,
      fees_voided: fees.voidedCents,
      fees_refunded: fees.refundedCents,
      fees_other: fees.otherCents,
      fees_net: fees.netCents,
    });
  });
  test('is final once the books are closed to its end, and then never changes', async () => {
    now = at('2026-12-03');
    const open = await statement();
    const first = await closePeriod(ports(), '2026-11-01T00:00:00.000Z', 'Dana');
    expect((await statement()).final).toBe(false);
    expect(await statement({ period: '2026-10' })).toMatchObject({ final: true, position: first.position, digest: first.digest });
    // The month of Chicago ends five hours later.
    expect(await statement({ period: '2026-10', zone: 'America/Chicago' })).toMatchObject({ final: false, position: null, digest: null });
    const second = await closePeriod(ports(), '2026-12-01T00:00:00.000Z', 'Dana');
    const closed = { ...open, final: true, position: second.position, digest: second.digest };
    expect(await statement()).toEqual(closed);
    expect(await statement({ period: '2026-10', zone: 'America/Chicago' })).toMatchObject({ final: true, position: second.position });
    expect(await statement({ period: '2026-10' })).toMatchObject({ position: first.position });
    // A late fact is booked in December, and a later closing changes no statement.
    now = at('2026-12-04');
    await adjustBooks(ports(), {
      adjustmentId: ids.uuid(),
      postings: [
        { account: `liabilities:agency:${PORTAL}:payable`, cents: -900 },
        { account: 'equity:adjustment', cents: 900 },
      ],
      effectiveAt: '2026-11-20T00:00:00.000Z',
      reason: 'late',
      by: 'Dana',
    });
    await fund('bat_4', '2026-11-30');
    await closePeriod(ports(), '2026-12-03T00:00:00.000Z', 'Dana');
    expect(await statement()).toEqual(closed);
    const december = (await statement({ period: '2026-12' })).deposits;
    expect(december.map(({ batchId, depositedOn }) => [batchId, depositedOn])).toEqual([
      ['bat_3', '2026-12-01'],
      ['bat_4', '2026-11-30'],
    ]);
    expect(statementCsv(closed).split('\r\n')[1]).toBe(
      `${PORTAL},2026-11,UTC,opening,,,${open.openingCents},true,${second.position},${second.digest}`,
    );
    // The journal is made anew, and has not reached the closing yet.
    expect((await statement({ position: null })).final).toBe(false);
    expect((await statement({ position: first.position })).final).toBe(false);
    expect((await statement({ position: second.position })).final).toBe(true);
  });
});

describe('exceptions', () => {
  const [MINE, THEIRS] = ['018f0000-0000-7000-8000-0000000000c1', '018f0000-0000-7000-8000-0000000000c2'];
  const QUERY = { status: null, now: at('2026-12-05') };
  beforeAll(async () => {
    for (const [paymentId, portalId] of [[MINE, PORTAL], [THEIRS, OTHER]]) // prettier-ignore
      await pool.query(`insert into payment_list (payment_id, account_id, portal_id, created_at, status, revision, state) values ($1, $2, $3, now(), 'succeeded', 1, '{}')`, [paymentId, OWNER, portalId]); // prettier-ignore
    for (const [index, [paymentId, kind]] of (
      [
        [MINE, 'LATE'],
        [MINE, 'WRONG_ACCOUNT'],
        [THEIRS, 'LATE'],
        [null, 'MISSING_HERE'],
      ] as const
    ).entries())
      // prettier-ignore
      await pool.query(
        `insert into settlement_case (exception_id, kind, status, gateway, merchant_account, batch_id, line, payment_id, suspense_cents, opened_at, changed_at,
           assigned_to, changed_by, reason)
         values (gen_random_uuid(), $1, 'assigned', 'simulator', 'mid', 'bat', $2, $3, 0, $4, $4, 'Robin', 'Dana', 'see there')`,
        [kind, index, paymentId, new Date(at('2026-12-01') + index).toISOString()],
      );
  });
  const shown = async (role: 'finance' | 'agency', scope: Scope) =>
    (await exceptionsFor(pool, { role, scope }, QUERY)).map(({ kind, line, merchantAccount, batchId, gateway, assignedTo, changedBy, reason }) => [
      kind, line, gateway, merchantAccount, batchId, assignedTo, changedBy, reason,
    ]); // prettier-ignore

  test('everything is shown without a scope', async () => {
    expect(await shown('finance', EVERYTHING)).toEqual([
      ['LATE', 0, 'simulator', 'mid', 'bat', 'Robin', 'Dana', 'see there'],
      ['WRONG_ACCOUNT', 1, 'simulator', 'mid', 'bat', 'Robin', 'Dana', 'see there'],
      ['LATE', 2, 'simulator', 'mid', 'bat', 'Robin', 'Dana', 'see there'],
      ['MISSING_HERE', 3, 'simulator', 'mid', 'bat', 'Robin', 'Dana', 'see there'],
    ]);
  });
  test('a scope shows those of its payments, without what tells of others', async () => {
    expect(await shown('finance', { accounts: [], portals: [PORTAL] })).toEqual([
      ['LATE', null, 'simulator', 'mid', 'bat', 'Robin', 'Dana', 'see there'],
      ['WRONG_ACCOUNT', null, 'simulator', null, null, 'Robin', 'Dana', 'see there'],
    ]);
    expect(await shown('finance', { accounts: [OWNER], portals: [] })).toHaveLength(3);
    expect(await shown('finance', { accounts: [], portals: [QUIET] })).toEqual([]);
  });
  test('an agency sees no staff', async () => {
    expect(await shown('agency', { accounts: [], portals: [PORTAL] })).toEqual([
      ['LATE', null, 'simulator', 'mid', 'bat', null, null, null],
      ['WRONG_ACCOUNT', null, 'simulator', null, null, null, null, null],
    ]);
  });
});

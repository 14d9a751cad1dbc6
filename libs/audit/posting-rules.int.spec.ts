/**
 * A posting rule gets a new version. Earlier entries keep every byte, and later entries follow the new version. All code that uses the rules agrees.
 */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { EVERYTHING } from '#accounts';
import {
  type Actor,
  checkpointOf,
  createSubscriber,
  memoryEventStore,
  type Position,
  postgresCheckpoint,
  prepareReadModels,
  type Projection,
  type ReadModel,
  rebuild,
  searchPathOf,
} from '#eventstore';
import { timestamp } from '#kernel';
import {
  applyJournal,
  changePostingRules,
  closePeriod,
  journalModel,
  PERIODS,
  type PeriodPorts,
  POSTING_RULES,
  type PostingRules,
  RULE_CHANGES,
  verifyPeriods,
} from '#ledger';
import { paymentEvents, paymentListModel, type PaymentEvent } from '#payments';
import { createPool, migrate, newKeyRing, type Pool, systemIds, uuidV5 } from '#platform';
import { MIGRATIONS, READ_MODELS } from '../../apps/services.js';
import { MovableClock } from '../../test/support/clock.js';
import { combined, created, initiated } from '../../test/support/given.js';
import { freshDatabase } from '../../test/support/postgres.js';
import { findDrift } from './drift.js';
import { writePack } from './pack.js';
import { timeline } from './replay.js';
import { logSeal } from './seal.js';

/** Version 2 of R4 posts nothing. Version 2 of R5 books the processor's fee against the service fees. */
const NEW_RULES: PostingRules = {
  ...POSTING_RULES,
  R4: [...POSTING_RULES.R4, () => ({ debits: [], credits: [] })],
  R5: [
    ...POSTING_RULES.R5,
    ({ mid, cents }) => ({
      debits: [{ account: 'revenue:service_fee:of-the-operator', cents }],
      credits: [{ account: `assets:processor:${mid}:in_transit`, cents }],
    }),
  ],
};
const ACTOR: Actor = { type: 'operator', id: 'spec' };
const VERIFIER = new URL('../../apps/operator/verify.mjs', import.meta.url).pathname;
const JANUARY_ENDS = '2026-02-01T00:00:00.000Z';

const clock = new MovableClock('2026-01-20T10:00:00.000Z');
const ids = systemIds(() => clock.now());
const store = memoryEventStore({ now: () => clock.now() });
let database: Awaited<ReturnType<typeof freshDatabase>>;
let pool: Pool;
const folder = mkdtempSync(join(tmpdir(), 'payfold-posting-rules-'));
beforeAll(async () => {
  database = await freshDatabase();
  pool = createPool(database.url, { name: 'posting-rules', max: 8, searchPath: searchPathOf(READ_MODELS) });
  await migrate(pool, MIGRATIONS);
  await prepareReadModels(pool, READ_MODELS, store);
});
afterAll(async () => {
  await pool.end();
  await database.drop();
  rmSync(folder, { recursive: true });
});

/** The journal of a release with these rules. */
const journalOf = (rules: PostingRules): ReadModel => ({ ...journalModel, apply: (client, events) => applyJournal(client, events, rules) });
const subscriber = (projection: Projection, checkpoint: string, log = store) =>
  createSubscriber(projection, { store: log, checkpoint: postgresCheckpoint(pool, checkpoint), clock });
const follow = async (model: ReadModel) => subscriber(model, checkpointOf(model)).runUntil((await store.head())!, { timeoutMs: 20_000 });
const periodPorts = (rules: PostingRules): PeriodPorts => ({ store, db: pool, clock, ids, journalReached: () => follow(journalOf(rules)) });
const origin = () => ({ actor: ACTOR, correlationId: ids.uuid() });

/** Appends a charged and settled payment. `settledBy`: id of its PaymentSettled event. */
const pay = async (): Promise<{ readonly paymentId: string; readonly settledBy: string }> => {
  const paymentId = ids.uuid();
  const at = timestamp(clock.now());
  const settled = { leg: 'combined', batchId: 'bat_1', closedAt: at, grossCents: 10_325, feeCents: 30 } as const;
  const history: PaymentEvent[] = [initiated(combined, at), created(combined, at), { type: 'PaymentSettled', at, data: settled }];
  const written = history.map((event) => paymentEvents.write(event, ids.uuid(), { recordedAt: at, ...origin() }));
  await store.append(`payment-${paymentId}`, 'no_stream', written);
  return { paymentId, settledBy: written.at(-1)!.id };
};

/** All journal rows up to this position, as text. */
const bytes = async (until: Position) => {
  const { rows } = await pool.query<{ text: string }>('select e::text as text from journal_entry e where position <= $1 order by position, number', [
    until,
  ]);
  return rows.map(({ text }) => text);
};
const postedBy = async (eventId: string) => {
  const { rows } = await pool.query<{ rule: string; entry_id: string; accounts: string[] }>(
    'select rule, entry_id, accounts from journal_entry where event_id = $1 order by number',
    [eventId],
  );
  return rows;
};

test('the new version counts from the event on: old entries and closed periods keep their bytes, also in a journal that is made again', async () => {
  // With the rules of the previous release: append a payment, close January, and append a second payment.
  const old = await pay();
  clock.advance(20 * 86_400_000);
  const closed = await closePeriod(periodPorts(POSTING_RULES), JANUARY_ENDS, 'Dana');
  expect(closed.entries).toBe(4);
  const late = await pay();
  await follow(journalOf(POSTING_RULES));
  const before = (await store.head())!;
  const kept = await bytes(before);

  // A release with new versions posts by the old versions until `changePostingRules` is called.
  const inBetween = await pay();
  await follow(journalOf(NEW_RULES));
  expect((await postedBy(inBetween.settledBy)).map(({ rule }) => rule)).toEqual(['R4', 'R5']);

  const changed = await changePostingRules({ store, clock, ids }, origin(), NEW_RULES);
  expect(changed).toEqual({ versions: { R4: 2, R5: 2 }, position: await store.head() });
  expect(await changePostingRules({ store, clock, ids }, origin(), NEW_RULES)).toEqual(changed);
  expect(await changePostingRules({ store, clock, ids }, origin(), POSTING_RULES)).toEqual(changed);
  const young = await pay();
  await follow(journalOf(NEW_RULES));
  const after = (await store.head())!;

  const check = async () => {
    expect(await bytes(before)).toEqual(kept);
    for (const { settledBy } of [old, late, inBetween])
      expect((await postedBy(settledBy)).map(({ entry_id: id }) => id)).toEqual([uuidV5(settledBy, 'R4.1'), uuidV5(settledBy, 'R5.1')]);
    expect(await postedBy(young.settledBy)).toEqual([
      { rule: 'R5', entry_id: uuidV5(young.settledBy, 'R5.2'), accounts: ['revenue:service_fee:of-the-operator', 'assets:processor:m:in_transit'] },
    ]);
    expect(await verifyPeriods(periodPorts(NEW_RULES))).toEqual({ name: 'periods', ok: true, detail: '1 closed periods are what they were' });
  };
  await check();
  const all = await bytes(after);
  await rebuild(journalOf(NEW_RULES), { store, pool, now: () => clock.now() });
  expect(await bytes(after)).toEqual(all);
  await check();

  // Check the other code that uses the rules: drift, timeline and pack.
  await follow(paymentListModel);
  const drift = await findDrift({ store, db: pool, now: () => clock.now(), rules: NEW_RULES });
  expect(drift.differences.filter(({ kind }) => kind !== 'settlement')).toEqual([]);
  const rulesOf = async ({ paymentId }: typeof old) => (await timeline(store, EVERYTHING, paymentId, {}, { rules: NEW_RULES })).at(-1)!.rules;
  expect(await rulesOf(inBetween)).toEqual(['R4', 'R5']);
  expect(await rulesOf(young)).toEqual(['R5']);
  await subscriber(logSeal, logSeal.name).runUntil(after, { timeoutMs: 20_000 });
  const ports = {
    store,
    db: pool,
    keys: newKeyRing(),
    folder: join(folder, 'heads'),
    now: () => clock.now(),
    rules: NEW_RULES,
    reached: async () => undefined,
  };
  // The pack of a later period also holds the closings and the rule changes. An auditor needs them to post the events.
  const pack = { from: '2026-03-01T00:00:00.000Z', to: '2026-04-01T00:00:00.000Z', out: join(folder, 'march'), version: '0', verifier: VERIFIER };
  await writePack(ports, pack);
  const packed = readFileSync(join(pack.out, 'other-events.ndjson'), 'utf8').trim().split('\n');
  expect(packed.map((line) => (JSON.parse(line) as { event: { stream: string } }).event.stream)).toEqual([
    PERIODS,
    PERIODS,
    RULE_CHANGES,
    RULE_CHANGES,
  ]);
});

test.each([
  ['a version', { rule: 'R4', version: 3 }, 'posting rule R4 counts in version 3, this program knows versions up to 2; a newer Payfold changed it'],
  ['a rule', { rule: 'R99', version: 2 }, 'posting rule R99 is unknown to this program; a newer Payfold changed it'],
])('%s that this release does not have stops the journal, drift and the timeline, and says so', async (_name, data, message) => {
  const log = memoryEventStore();
  const meta = { recordedAt: timestamp(clock.now()), ...origin() };
  const event = { id: ids.uuid(), type: 'PostingRuleChanged', v: 1, data, meta };
  await log.append(RULE_CHANGES, 'no_stream', [event]);
  const reached = subscriber(journalOf(NEW_RULES), `journal of ${data.rule}`, log).runUntil((await log.head())!, { timeoutMs: 20_000 });
  await expect(reached).rejects.toThrow(`stopped at PostingRuleChanged ${event.id}`);
  await expect(reached).rejects.toThrow(message);
  await expect(timeline(log, EVERYTHING, ids.uuid(), {}, { rules: NEW_RULES })).rejects.toThrow(message);
  // Insert the row of a newer release. This release does not know its version.
  const position = `99999999999999999999${data.version}`;
  await pool.query('insert into journal_rule (position, rule, version) values ($1, $2, $3)', [position, data.rule, data.version]);
  await expect(findDrift({ store, db: pool, now: () => clock.now(), rules: NEW_RULES })).rejects.toThrow(message);
  await pool.query('delete from journal_rule where position = $1', [position]);
});

/**
 * The line-item register: a read model with a row for each movement of money, by line of a payment. It follows the events only, and shares no code
 * with the journal (docs/decisions/0052-register-as-a-second-fold.md).
 */
import type { Load, ReadModel, Recorded } from '#eventstore';
import { copyInto, type Queryable } from '#platform';
import type { PaymentLines } from './line-movements.js';
import { addEvent, type Added, COLUMNS, nothingAdded, paymentsOf, type Remembered } from './line-rows.js';

const REGISTER_STREAMS = ['payment-', 'settlement-', 'exception-', 'adjustment-', 'remittance-'] as const;

// line_deposit: a funded batch, by the position of its BatchFunded. If its day was wrong, a second row with sign -1 takes it back, and a third one has the
// right day. line_deposit_portal: for each deposit, the sums by portal of the rows that were there when the batch was first funded. line_day: between which positions the rows of a day lie.
const TABLES = `
  create table line_movement (
    position text collate "C" not null, number int not null, line_number int, movement_id uuid not null, account_id uuid, portal_id uuid, payment_id uuid,
    line_id uuid, principal_cents bigint not null, fee_cents bigint not null, processor_fee_cents bigint not null, recorded_at timestamptz not null,
    effective_at timestamptz not null, booked_at timestamptz not null, movement text not null, family text not null, rule text not null, leg text,
    reference_id text, payment_reference_id text, coding json, gateway text, merchant_account text, ledger_account text,
    transaction_id text, auth_code text, brand text, last4 text, confirmation_number text, batch_id text, initiated_by text not null);
  create table line_payment (payment_id uuid not null primary key, revision bigint not null, state json);
  create table line_deposit (
    position text collate "C" not null primary key, deposit_id uuid not null, gateway text not null, merchant_account text not null, batch_id text not null,
    deposited_on date not null, sign int not null, recorded_at timestamptz not null);
  create table line_deposit_portal (
    position text collate "C" not null, portal_id uuid not null, principal_cents bigint not null, fee_cents bigint not null,
    processor_fee_cents bigint not null, primary key (position, portal_id));
  create table line_day (
    booked_on date not null, recorded_on date not null, first_position text collate "C" not null, last_position text collate "C" not null,
    primary key (booked_on, recorded_on));
  create table line_period (position text collate "C" not null primary key, closed_to timestamptz not null)`;
const INDEXES = `
  alter table line_movement add constraint line_movement_pkey primary key (position, number);
  create index line_movement_batch on line_movement (batch_id, position, number) where batch_id is not null;
  create index line_deposit_batch on line_deposit (batch_id, merchant_account, gateway, position);
  create index line_deposit_day on line_deposit (deposited_on, position)`;

/** How long the projection may gather events. An export first brings the register up to date. */
const GATHER_MS = 1_000;

// ------------------------------------------------------------------------------------------------------------------------------------
// Writing.

const applyLines = async (client: Queryable, events: readonly Recorded[]): Promise<void> => {
  const added = await addedAfter(client);
  await readPayments(client, events, added.payments);
  for (const recorded of events) addEvent(added, recorded);
  await writeRows(client, added.rows);
  await writePayments(client, [...added.payments]);
  await writeRest(client, added);
  await writeDepositSums(
    client,
    added.deposits.map(({ position }) => position),
  );
};

const addedAfter = async (client: Queryable): Promise<Added> => {
  const { rows } = await client.query<{ closed_to: Date | null }>('select max(closed_to) as closed_to from line_period');
  return nothingAdded(rows[0]?.closed_to?.toISOString() ?? null);
};

/** Number of payments whose states one statement of a load writes. */
const WRITTEN_AT_ONCE = 1_000;

/** Rows are copied. The states of a part's payments stay in memory until its end. The sums of deposits need the indexes. */
const loadLines: Load = {
  add: async (client, part) => {
    const added = await addedAfter(client);
    for await (const events of part) {
      await readPayments(client, events, added.payments);
      for (const recorded of events) addEvent(added, recorded);
      const copy = copyInto(client, 'line_movement', COLUMN_NAMES);
      for (const row of added.rows) await copy.write(row);
      await copy.end();
      added.rows.length = 0;
    }
    const payments = [...added.payments];
    for (let from = 0; from < payments.length; from += WRITTEN_AT_ONCE) await writePayments(client, payments.slice(from, from + WRITTEN_AT_ONCE));
    await writeRest(client, added);
    return 0;
  },

  addLate: async (client) => {
    const { rows } = await client.query<{ position: string }>(
      'select position from line_deposit d where not exists (select from line_deposit_portal p where p.position = d.position)',
    );
    await writeDepositSums(
      client,
      rows.map(({ position }) => position),
    );
    return 0;
  },
};

export const lineRegisterModel: ReadModel = {
  name: 'line-register',
  shape: 4,
  streamPrefixes: REGISTER_STREAMS,
  gatherMs: GATHER_MS,
  tables: ['line_movement', 'line_payment', 'line_deposit', 'line_deposit_portal', 'line_day', 'line_period'],
  createTables: TABLES,
  createIndexes: INDEXES,
  load: loadLines,
  apply: (client, events) => applyLines(client, events),
};

const writeRest = async (client: Queryable, added: Added): Promise<void> => {
  await writeDays(client, added.days);
  for (const { position, depositId, gateway, merchantAccount, batchId, depositedOn, sign, recordedAt } of added.deposits)
    await client.query(
      `insert into line_deposit (position, deposit_id, gateway, merchant_account, batch_id, deposited_on, sign, recorded_at)
       values ($1, $2, $3, $4, $5, $6, $7, $8)`,
      [position, depositId, gateway, merchantAccount, batchId, depositedOn, sign, recordedAt],
    );
  for (const { position, closedTo } of added.periods)
    await client.query('insert into line_period (position, closed_to) values ($1, $2)', [position, closedTo]);
};

/** Position of the first funding of the batch of `d`. A batch that is funded again has the same rows in its deposit. */
export const FIRST_FUNDING = `(
  select min(f.position) from line_deposit f where f.batch_id = d.batch_id and f.merchant_account = d.merchant_account and f.gateway = d.gateway)`;

/** A row of a batch that comes after its funding is in no deposit. So the sums never change. */
const writeDepositSums = async (client: Queryable, positions: readonly string[]): Promise<void> => {
  if (positions.length === 0) return;
  await client.query(
    `insert into line_deposit_portal (position, portal_id, principal_cents, fee_cents, processor_fee_cents)
     select d.position, l.portal_id, sum(d.sign * l.principal_cents), sum(d.sign * l.fee_cents), sum(d.sign * l.processor_fee_cents)
     from line_deposit d
     join line_movement l on l.batch_id = d.batch_id and l.merchant_account = d.merchant_account and l.gateway = d.gateway
       and l.position < ${FIRST_FUNDING}
     where d.position = any($1::text[]) and l.portal_id is not null group by d.position, l.portal_id`,
    [positions],
  );
};

/** Reads the states that are not there yet: of the payments that go on in these events, and of those that batches and exceptions name. */
const readPayments = async (client: Queryable, events: readonly Recorded[], payments: Map<string, Remembered>): Promise<void> => {
  const ids = new Set(events.flatMap(paymentsOf).filter((id) => !payments.has(id)));
  if (ids.size === 0) return;
  const { rows } = await client.query<{ payment_id: string; revision: string; state: PaymentLines | null }>({
    name: 'lines-read',
    text: 'select payment_id, revision, state from line_payment where payment_id = any($1::uuid[])',
    values: [[...ids]],
  });
  for (const { payment_id: id, revision, state } of rows) payments.set(id, { revision: BigInt(revision), payment: state });
};

const COLUMN_NAMES = COLUMNS.map(([name]) => name);
const WRITE_ROWS = `insert into line_movement (${COLUMN_NAMES.join(', ')}) select * from unnest(${COLUMNS.map(([, type], index) => `$${index + 1}::${type}[]`).join(', ')})`;

const writeRows = async (client: Queryable, rows: readonly (readonly (string | null)[])[]): Promise<void> => {
  if (rows.length === 0) return;
  await client.query({ name: 'lines-write', text: WRITE_ROWS, values: COLUMNS.map((_, index) => rows.map((row) => row[index])) });
};

const writePayments = async (client: Queryable, rows: readonly (readonly [string, Remembered])[]): Promise<void> => {
  if (rows.length === 0) return;
  await client.query({
    name: 'lines-payment',
    text: `
      insert into line_payment as p (payment_id, revision, state) select * from unnest($1::uuid[], $2::bigint[], $3::json[])
      on conflict (payment_id) do update set revision = excluded.revision, state = excluded.state where p.revision < excluded.revision`,
    values: [
      rows.map(([id]) => id),
      rows.map(([, { revision }]) => String(revision)),
      rows.map(([, { payment }]) => payment && JSON.stringify(payment)),
    ],
  });
};

/** A late row widens only the part of its own days. */
const writeDays = async (client: Queryable, days: Added['days']): Promise<void> => {
  if (days.size === 0) return;
  const rows = [...days.values()];
  await client.query({
    name: 'lines-day',
    text: `
      insert into line_day as d (booked_on, recorded_on, first_position, last_position)
      select * from unnest($1::date[], $2::date[], $3::text[], $4::text[])
      on conflict (booked_on, recorded_on) do update set last_position = excluded.last_position where d.last_position < excluded.last_position`,
    values: [
      rows.map(({ bookedOn }) => bookedOn),
      rows.map(({ recordedOn }) => recordedOn),
      rows.map(({ first }) => first),
      rows.map(({ last }) => last),
    ],
  });
};

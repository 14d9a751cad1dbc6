/**
 * Multiplies the payments of a small real history in the tables that reports, lists and loops read: read models, keys, counters and webhooks. The log
 * is not multiplied. So the copies have no events, and their journal entries have positions before the first event.
 */
import type pg from 'pg';

export interface MultiplyOptions {
  /** Number of copies. */
  readonly payments: number;
  /** The copies are spread over this number of days before `until`. */
  readonly days: number;
  /** RFC 3339. */
  readonly until: string;
}

/** Number of accounts among which the copies are divided. The first one is the account of the real history. */
export const ACCOUNTS = 20;
/** Number of copies with the same time. */
const TOGETHER = 4;
/** Copies of the newest days are not settled yet. */
const UNSETTLED_DAYS = 2;
/** One in ten copies repeats a payment that is not a plain success. */
const RARE = 10;
/** One in a hundred copies has a dispute, a settlement exception, or an action of staff. */
const RARER = 100;

/** `client` must have the `search_path` of the read models. Takes some seconds per 100,000 copies. */
export const multiply = async (client: Pick<pg.Client, 'query'>, { payments, days, until }: MultiplyOptions): Promise<void> => {
  const { rows: indexes } = await client.query<{ name: string; sql: string }>(INDEXES, [MANY_ROWS]);
  for (const { name } of indexes) await client.query(`drop index ${name}`);
  for (const sql of STATEMENTS)
    await client.query(
      sql
        .replaceAll('$payments', String(payments))
        .replaceAll('$until', `'${until}'::timestamptz`)
        .replaceAll('$span', `interval '${days} days'`)
        .replaceAll('$accounts', String(ACCOUNTS))
        .replaceAll('$unsettled', `interval '${UNSETTLED_DAYS} days'`)
        .replaceAll('$together', String(TOGETHER))
        .replaceAll('$rarer', String(RARER))
        .replaceAll('$rare', String(RARE)),
    );
  for (const { sql } of indexes) await client.query(sql);
};

/** Tables with a row or more for each copy. Their indexes are made after the rows, which is faster. */
const MANY_ROWS = ['payment_list', 'payment_trait', 'gateway_transaction', 'journal_entry', 'journal_payment', 'line_movement'];
const INDEXES = `
  select i.indexrelid::regclass::text as name, pg_get_indexdef(i.indexrelid) as sql from pg_index i
  where i.indrelid = any (select t::regclass from unnest($1::text[]) as t)
    and not exists (select from pg_constraint c where c.conindid = i.indexrelid)`;

const STATEMENTS = [
  `create temp table template as
     select payment_id, status, account_id, portal_id, row_number() over (partition by (status = 'succeeded') order by payment_id) - 1 as number,
       count(*) over (partition by (status = 'succeeded')) as count
     from payment_list where status not in ('pending', 'unknown') and open_since is null`,
  `create temp table account as
     select n, case n when 0 then (select account_id from template limit 1) else gen_random_uuid() end as account_id, gen_random_uuid() as endpoint_id,
       array[gen_random_uuid(), gen_random_uuid()] as portals
     from generate_series(0, $accounts - 1) as n`,
  `create temp table made as
     select c.n, t.payment_id as template_id, t.status, a.account_id, a.endpoint_id, a.portals[1 + c.n % 2] as portal_id, d.at as created_at,
       (lpad(to_hex((extract(epoch from d.at) * 1000)::bigint), 12, '0') || '7000' || substr(md5(c.n::text), 1, 16))::uuid as payment_id
     from generate_series(1, $payments) as c (n)
     cross join lateral (select date_trunc('milliseconds', $until - $span + c.n / $together * $together * ($span / $payments)) as at) as d
     join account a on a.n = c.n % $accounts
     join template t on (t.status <> 'succeeded') = (c.n % $rare = 0)
       and t.number = (c.n / $rare) % t.count`,
  'create index on made (template_id)',
  'analyze made',
  `insert into payment_list (payment_id, account_id, portal_id, created_at, status, revision, state)
     select m.payment_id, m.account_id, m.portal_id, m.created_at, m.status, l.revision, l.state
     from made m join payment_list l on l.payment_id = m.template_id order by m.n`,
  `insert into payment_trait (payment_id, created_at, account_id, portal_id, brand, last4, amount_cents, total_cents)
     select m.payment_id, m.created_at, m.account_id, m.portal_id, t.brand, case when m.n % 2 = 0 then t.last4 else lpad((m.n % 9973)::text, 4, '0') end,
       case when m.n % 3 = 0 then t.amount_cents else m.n end, case when m.n % 3 = 0 then t.total_cents else m.n + 300 end
     from made m join payment_trait t on t.payment_id = m.template_id order by m.n`,
  // Half of the copies have the names of their template. So a name has very many payments.
  `insert into payment_find (name_hash, payment_id)
     select f.name_hash, m.payment_id from made m join payment_find f on f.payment_id = m.template_id where m.n % 2 = 0`,
  `insert into gateway_transaction (ref, gateway, merchant_account, payment_id, leg, op, attempt_id, amount_cents, transaction_id, settled_batch_id,
       moved_at, voided_cents, rejected, auth_code, brand, last4, avs, cvv)
     select g.ref || '-' || m.n, g.gateway, g.merchant_account, m.payment_id, g.leg, g.op, g.attempt_id, g.amount_cents, g.transaction_id || '-' || m.n,
       case when g.moved_at is not null and m.created_at < $until - $unsettled then coalesce(g.settled_batch_id, 'bat') || '-' || m.created_at::date end,
       case when g.moved_at is not null then m.created_at + interval '1 second' end, g.voided_cents, g.rejected,
       g.auth_code, g.brand, g.last4, g.avs, g.cvv
     from made m join gateway_transaction g on g.payment_id = m.template_id order by m.n`,
  `insert into settlement_batch (gateway, merchant_account, batch_id, closed_at, funded_on, line_count, gross_cents, fee_cents, net_cents, listed_position,
       funded, recorded_at, funded_at, funded_cents)
     select b.gateway, b.merchant_account, b.batch_id || '-' || d::date, d + interval '1 day', d::date + 2, b.line_count, b.gross_cents, b.fee_cents, b.net_cents,
       b.listed_position, true, d + interval '1 day', d + interval '2 days', b.net_cents
     from settlement_batch b, generate_series(date_trunc('day', $until - $span), $until - $unsettled, interval '1 day') as d
     where b.batch_id in (select min(batch_id) from settlement_batch group by gateway, merchant_account)`,
  `create temp table excepted as
     select gen_random_uuid() as made_id, g.*, row_number() over () as line from made m join gateway_transaction g on g.payment_id = m.payment_id
     where m.n % $rarer = 0 and g.settled_batch_id is not null`,
  `insert into settlement_exception (exception_id, gateway, merchant_account, batch_id, line, kind, type, transaction_id, ref, payment_id, leg, gross_cents,
       expected_cents, suspense_cents, recorded_at, position)
     select made_id, gateway, merchant_account, settled_batch_id, line, 'LATE', 'sale', transaction_id, ref, payment_id, leg, amount_cents, amount_cents, 0,
       moved_at, '00000000000000000000:' || lpad(line::text, 20, '0') from excepted`,
  `insert into settlement_case (exception_id, kind, status, gateway, merchant_account, batch_id, line, transaction_id, ref, payment_id, leg, gross_cents,
       expected_cents, suspense_cents, opened_at, changed_at)
     select made_id, 'LATE', 'resolved', gateway, merchant_account, settled_batch_id, line, transaction_id, ref, payment_id, leg, amount_cents, amount_cents, 0,
       moved_at, moved_at from excepted`,
  `insert into dispute (dispute_id, payment_id, status, stage, reason_code, disputed_amount_cents, opened_on, due_date, updated_at)
     select gen_random_uuid(), payment_id, case when n % (3 * $rarer) = 0 then 'in_dispute' else 'recovered' end, 'chargeback', '10.4', 100,
       created_at::date, created_at::date + 20, created_at + interval '3 days' from made where n % $rarer = 0`,
  `insert into journal_entry (position, number, entry_id, event_id, rule, part, payment_id, recorded_at, effective_at, booked_at, accounts, cents)
     select '00000000000000000000:' || lpad(m.n::text, 20, '0'), e.number, gen_random_uuid(), e.event_id, e.rule, e.part, m.payment_id,
       m.created_at, m.created_at, m.created_at, e.accounts, e.cents
     from made m join (
       select payment_id, row_number() over (partition by payment_id order by position, number) as number, event_id, rule, part, accounts, cents
       from journal_entry where position not like '%:%') as e on e.payment_id = m.template_id
     order by m.n, e.number`,
  `insert into journal_payment (payment_id, revision, books) select m.payment_id, p.revision, p.books from made m join journal_payment p on p.payment_id = m.template_id`,
  `insert into journal_day (booked_on, recorded_on, first_position, last_position)
     select created_at::date, created_at::date, '00000000000000000000:' || lpad(min(n)::text, 20, '0'), '00000000000000000000:' || lpad(max(n)::text, 20, '0')
     from made group by created_at::date
     on conflict (booked_on, recorded_on) do update set first_position = excluded.first_position`,
  // The same positions, cents and portals as the entries of the journal, so both tie.
  `insert into line_movement (position, number, line_number, movement_id, account_id, portal_id, payment_id, line_id, principal_cents, fee_cents,
       processor_fee_cents, recorded_at, effective_at, booked_at, movement, family, rule, leg, reference_id, payment_reference_id, coding, gateway,
       merchant_account, ledger_account, transaction_id, auth_code, brand, last4, confirmation_number, batch_id, initiated_by)
     select '00000000000000000000:' || lpad(m.n::text, 20, '0'), l.seq, l.line_number, gen_random_uuid(), m.account_id, l.portal_id, m.payment_id, l.line_id,
       l.principal_cents, l.fee_cents, l.processor_fee_cents, m.created_at, m.created_at, m.created_at, l.movement, l.family, l.rule, l.leg, l.reference_id,
       l.payment_reference_id, l.coding, l.gateway, l.merchant_account, l.ledger_account, l.transaction_id || '-' || m.n, l.auth_code, l.brand,
       l.last4, l.confirmation_number, l.batch_id || '-' || m.created_at::date, l.initiated_by
     from made m join (
       select *, row_number() over (partition by payment_id order by position, number) as seq from line_movement where position not like '%:%') as l
       on l.payment_id = m.template_id
     order by m.n, l.seq`,
  `insert into line_day (booked_on, recorded_on, first_position, last_position)
     select booked_at::date, recorded_at::date, min(position), max(position) from line_movement where position like '%:%' group by 1, 2
     on conflict (booked_on, recorded_on) do update set first_position = excluded.first_position`,
  `insert into line_deposit (position, deposit_id, gateway, merchant_account, batch_id, deposited_on, sign, recorded_at)
     select '00000000000000000001:' || lpad(row_number() over (order by batch_id, merchant_account)::text, 20, '0'), gen_random_uuid(), gateway, merchant_account,
       batch_id, right(batch_id, 10)::date + 2, 1, right(batch_id, 10)::date + 2
     from (select distinct gateway, merchant_account, batch_id from line_movement where position like '%:%' and batch_id is not null) as b`,
  `insert into line_deposit_portal (position, portal_id, principal_cents, fee_cents, processor_fee_cents)
     select d.position, l.portal_id, sum(l.principal_cents), sum(l.fee_cents), sum(l.processor_fee_cents)
     from line_deposit d join line_movement l on l.batch_id = d.batch_id and l.merchant_account = d.merchant_account and l.gateway = d.gateway
     where d.position like '%:%' and l.portal_id is not null group by 1, 2`,
  `create temp table total as
     select p.account, e.rule, d.day, sum(d.count * greatest(p.cents, 0)) as debit, sum(d.count * greatest(-p.cents, 0)) as credit
     from (select template_id, created_at::date as day, count(*) as count from made group by 1, 2) as d
     join journal_entry e on e.payment_id = d.template_id cross join unnest(e.accounts, e.cents) as p (account, cents) group by 1, 2, 3`,
  `insert into journal_total as t (account, rule, recorded_on, effective_on, booked_on, debit_cents, credit_cents)
     select account, rule, day, day, day, debit, credit from total
     on conflict (account, rule, recorded_on, effective_on, booked_on) do update
       set debit_cents = t.debit_cents + excluded.debit_cents, credit_cents = t.credit_cents + excluded.credit_cents`,
  `insert into journal_balance as b (account, debit_cents, credit_cents) select account, sum(debit), sum(credit) from total group by account
     on conflict (account) do update set debit_cents = b.debit_cents + excluded.debit_cents, credit_cents = b.credit_cents + excluded.credit_cents`,
  `insert into idempotency_key (api_account_id, key_hash, operation, fp, fp_kid, state, payment_id, attempt_id, status, body, created_at, expires_at)
     select account_id, sha256(n::text::bytea), 'create', sha256(n::text::bytea), 'k', 'completed', payment_id, gen_random_uuid(), 200, repeat('x', 500),
       created_at, $until + interval '1 day' from made where n % $rare = 0`,
  `insert into velocity_entry (portal_id, scope, subject, kid, kind, entry_id, at, expires_at)
     select portal_id, 'case', sha256(n::text::bytea), 'k', 'attempt', gen_random_uuid(), created_at, $until + interval '1 day' from made where n % $rare = 0`,
  `insert into refused_attempt (refused_at, id, portal_id, code, reference_id, card_hash)
     select created_at, gen_random_uuid(), portal_id, 'VELOCITY_LIMIT', 'CASE-' || n % 10000, sha256(n::text::bytea) from made where n % $rare = 0`,
  `insert into webhook_endpoint (id, account_id, url, status, created_at, registered_at_position)
     select endpoint_id, account_id, 'https://hooks.example/' || n, 'enabled', $until - $span, '' from account`,
  `insert into webhook_endpoint_secret (id, endpoint_id, kid, ciphertext, hint, state, created_at)
     select gen_random_uuid(), endpoint_id, 'k', 'x', 'hint', 'active', $until - $span from account`,
  `insert into webhook_event (id, type, account_id, payment_id, payload, created_at, stream, revision)
     select 'evt_' || n, 'payment.refunded', account_id, payment_id, '{}', created_at, 'payment-' || payment_id, 1 from made where n % $rare = 0 order by n`,
  `insert into webhook_delivery (event_id, endpoint_id, state, attempts, delivered_at, held_at, created_at)
     select 'evt_' || n, endpoint_id, case when n % 5000 = 0 then 'held' else 'delivered' end, 1, created_at, case when n % 5000 = 0 then created_at end, created_at
     from made where n % $rare = 0 order by n`,
  `insert into webhook_attempt (delivery_id, round, attempt, started_at, duration_ms, outcome, status_code)
     select id, 1, 1, created_at, 20, 'ok', 200 from webhook_delivery`,
  `insert into staff_action (position, recorded_at, actor_type, actor, event, stream, reason, event_id)
     select '00000000000000000000:' || lpad(n::text, 20, '0'), created_at, 'staff', 'Dana', 'RefundRequested', 'payment-' || payment_id, 'billed twice',
       gen_random_uuid() from made where n % $rare = 0`,
  `insert into staff_task (payment_id, reason, raised_at) select payment_id, 'charge_cannot_be_undone', created_at from made where n % $rarer = 0`,
  'drop table template, account, excepted, total, made',
];

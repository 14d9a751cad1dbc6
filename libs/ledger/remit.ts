/** Records payments to agencies. Reads the balance and its funded part, then appends at the exact revision of the portal's stream. */
import { type EventStore, execute, load, type Position, retryOnConflict } from '#eventstore';
import { ServiceError, sumCents, timestamp } from '#kernel';
import { refuseClearText, staff } from '#payments';
import { onUnlimited, type Pool, type Queryable } from '#platform';
import { exceptionEvents } from '#settlement';
import { account } from './chart.js';
import { PERIODS_ID, PERIODS_STREAM, REMITTANCE_STREAM } from './events.js';
import type { PeriodPorts } from './periods.js';
import type { RemittanceEvent, Standing } from './remittance.js';

export interface RemitPorts extends PeriodPorts {
  readonly db: Pool;
  /** Brings the register of transactions and batches up to a position of the log. */
  readonly registerReached: (position: Position) => Promise<void>;
}

export interface RemitRequest {
  readonly remittanceId: string;
  readonly portalId: string;
  readonly cents: number;
  readonly reference: string;
  /** YYYY-MM-DD. null: today. */
  readonly on: string | null;
  readonly advance: boolean;
  readonly by: string;
  /** True: the day may be long ago ({@link OLDEST_DAYS}). */
  readonly old?: boolean;
}

export interface ReverseRemittanceRequest {
  readonly remittanceId: string;
  readonly portalId: string;
  readonly on: string | null;
  readonly reason: string;
  readonly by: string;
  readonly old?: boolean;
}

export type Remitted = Extract<RemittanceEvent, { type: 'AgencyRemitted' }>['data'] & Standing;
export type Reversed = Extract<RemittanceEvent, { type: 'AgencyRemittanceReversed' }>['data'];

/** Longest reference. The field of no bank is longer. */
const MAX_REFERENCE_CHARACTERS = 140;

/**
 * Records that the agency was paid, and returns the standing before the remittance. Throws VALIDATION_ERROR. Throws INVALID_STATE if a reference that
 * looks the same was used before, or the period is closed. The same if the amount is more than the funded part, without `advance`.
 */
export const remit = async (ports: RemitPorts, { old = false, ...request }: RemitRequest): Promise<Remitted> => {
  const { clock, ids } = ports;
  const origin = staff(request.by, ids.uuid());
  const reference = request.reference.trim();
  refuseClearText('reference', reference, MAX_REFERENCE_CHARACTERS);
  return retryOnConflict(async () => {
    // The stream is read before the head of the log. So the balance includes every remittance up to this revision.
    const before = await load(ports.store, REMITTANCE_STREAM, request.portalId);
    const standing = await standingOf(ports, request.portalId);
    const closedTo = await closedToOf(ports.store);
    const at = timestamp(clock.now());
    const remittance = { ...request, reference, on: request.on ?? at.slice(0, 10), by: origin.actor.id };
    const after = await execute(ports, REMITTANCE_STREAM, before, [{ type: 'Remit', at, remittance, standing, closedTo, old }], origin);
    await ports.journalReached(after.position!);
    return { ...remittance, ...standing };
  }, busy);
};

/** Takes a remittance back by a second entry. Throws INVALID_STATE if the portal has no such remittance, or if it was taken back already. */
export const reverseRemittance = async (ports: RemitPorts, request: ReverseRemittanceRequest): Promise<Reversed> => {
  const { portalId, remittanceId, reason, old = false } = request;
  const origin = staff(request.by, ports.ids.uuid());
  refuseClearText('reason', reason);
  return retryOnConflict(async () => {
    const before = await load(ports.store, REMITTANCE_STREAM, portalId);
    const closedTo = await closedToOf(ports.store);
    const at = timestamp(ports.clock.now());
    const reversal = { portalId, remittanceId, reason, on: request.on ?? at.slice(0, 10), by: origin.actor.id };
    const after = await execute(ports, REMITTANCE_STREAM, before, [{ type: 'Reverse', at, closedTo, old, ...reversal }], origin);
    await ports.journalReached(after.position!);
    return { ...reversal, cents: before.state.find((one) => one.remittanceId === remittanceId)!.cents };
  }, busy);
};

const busy = () => new ServiceError('INVALID_STATE', 'Another remittance of this agency is being recorded; try again.');

const closedToOf = async (store: EventStore): Promise<string | null> => (await load(store, PERIODS_STREAM, PERIODS_ID)).state.closedTo;

/**
 * The standing of an agency at the present end of the log, or later.
 *
 * Journal and register follow the log while this function reads. So the credits are read first, then the register, then the debits, each at the place
 * of the one before or at a later place. A charge that comes in between is not counted, but a refund is. So no part is too large.
 */
export const standingOf = async (ports: RemitPorts, portalId: string): Promise<Standing> => {
  const { db, store } = ports;
  const name = account.payable(portalId);
  const upTo = async (reach: (position: Position) => Promise<void>): Promise<void> => {
    const head = await store.head();
    if (head !== null) await reach(head);
  };
  await upTo(ports.journalReached);
  const { credit } = await balanceOf(db, name);
  await upTo(ports.registerReached);
  const { unsettled, unfunded, short, disputed } = await onUnlimited(db, (client) => heldBack(client, portalId));
  const adopted = await adoptedUnfunded(ports, portalId);
  await upTo(ports.journalReached);
  const { debit } = await balanceOf(db, name);
  const payableCents = credit - debit;
  const settledCents = payableCents - unsettled;
  return { payableCents, settledCents, fundedCents: settledCents - unfunded - short - disputed - adopted };
};

const balanceOf = async (db: Queryable, name: string): Promise<{ debit: number; credit: number }> => {
  const { rows } = await db.query<{ debit: string; credit: string }>(
    'select debit_cents as debit, credit_cents as credit from journal_balance where account = $1',
    [name],
  );
  return { debit: Number(rows[0]?.debit ?? 0), credit: Number(rows[0]?.credit ?? 0) };
};

/**
 * Principal of a portal that is charged and not funded. `unsettled`: in no batch. `unfunded`: in a batch that is not funded. `short`: missing,
 * because a batch settled less than the charge. `disputed`: in open disputes. If staff resolved a line's exception as `settles`, the line's batch
 * counts. Reads all charges that are not funded, those of other portals too.
 */
const heldBack = async (db: Queryable, portalId: string): Promise<Record<'unsettled' | 'unfunded' | 'short' | 'disputed', number>> => {
  const { rows } = await db.query<Record<'unsettled' | 'unfunded' | 'short' | 'disputed', string>>(
    `with settles as (
       select payment_id, leg, gateway, merchant_account, batch_id, gross_cents from settlement_exception
       where settles and type = 'sale' and not superseded and leg is not null),
     open_charge as (
       select payment_id, leg, true as waits from gateway_transaction
       where settled_batch_id is null and not rejected and moved_at is not null and amount_cents > voided_cents and op = 'charge'
         and not exists (select from settles e where e.payment_id = gateway_transaction.payment_id and e.leg = gateway_transaction.leg)
       union all
       select t.payment_id, t.leg, false
       from settlement_begun s
       left join settlement_batch b on b.gateway = s.gateway and b.merchant_account = s.merchant_account and b.batch_id = s.batch_id
       join gateway_transaction t on t.settled_batch_id = s.batch_id and t.gateway = s.gateway and t.merchant_account = s.merchant_account
       where b.funded is not true and t.op = 'charge'
       union all
       select e.payment_id, e.leg, false from settles e
       left join settlement_batch b on b.gateway = e.gateway and b.merchant_account = e.merchant_account and b.batch_id = e.batch_id
       where b.funded is not true),
     held as (
       select c.waits, (l->>'principalCents')::bigint - (l->>'voidedPrincipalCents')::bigint as cents
       from open_charge c join journal_payment p on p.payment_id = c.payment_id cross join json_array_elements(p.books->'legs') as l
       where p.books->>'portalId' = $1 and (p.books->>'charged')::bool and l->>'leg' = c.leg),
     -- While the batch is not funded, the whole principal is held back already.
     short as (
       select least(e.expected_cents - e.gross_cents, (l->>'principalCents')::bigint - (l->>'voidedPrincipalCents')::bigint) as cents
       from settlement_exception e
       join settlement_batch b on b.gateway = e.gateway and b.merchant_account = e.merchant_account and b.batch_id = e.batch_id and b.funded
       join journal_payment p on p.payment_id = e.payment_id cross join json_array_elements(p.books->'legs') as l
       where e.kind = 'AMOUNT_MISMATCH' and e.type = 'sale' and not e.superseded and e.expected_cents > e.gross_cents
         and p.books->>'portalId' = $1 and (p.books->>'charged')::bool and l->>'leg' = e.leg
       union all
       select least(t.amount_cents - t.voided_cents - e.gross_cents, (l->>'principalCents')::bigint - (l->>'voidedPrincipalCents')::bigint)
       from settles e
       join settlement_batch b on b.gateway = e.gateway and b.merchant_account = e.merchant_account and b.batch_id = e.batch_id and b.funded
       join gateway_transaction t on t.payment_id = e.payment_id and t.leg = e.leg and t.op = 'charge' and t.amount_cents - t.voided_cents > e.gross_cents
       join journal_payment p on p.payment_id = e.payment_id cross join json_array_elements(p.books->'legs') as l
       where p.books->>'portalId' = $1 and (p.books->>'charged')::bool and l->>'leg' = e.leg),
     taken as (
       select (s->>'principalCents')::bigint as cents
       from dispute d join journal_payment p on p.payment_id = d.payment_id
         cross join json_array_elements(p.books->'disputes'->(d.dispute_id::text)->'shares') as s
       where d.status <> 'recovered' and d.status <> 'lost' and p.books->>'portalId' = $1)
     select coalesce((select sum(cents) from held where waits), 0) as unsettled, coalesce((select sum(cents) from held where not waits), 0) as unfunded,
       coalesce((select sum(cents) from short), 0) as short, coalesce((select sum(cents) from taken), 0) as disputed`,
    [portalId],
  );
  const { unsettled, unfunded, short, disputed } = rows[0]!;
  return { unsettled: Number(unsettled), unfunded: Number(unfunded), short: Number(short), disputed: Number(disputed) };
};

/** Principal that staff adopted for the portal out of lines whose batch is not funded. */
const adoptedUnfunded = async ({ db, store }: RemitPorts, portalId: string): Promise<number> => {
  const { rows } = await db.query<{ id: string }>(
    `select x.exception_id as id from settlement_begun s
     left join settlement_batch b on b.gateway = s.gateway and b.merchant_account = s.merchant_account and b.batch_id = s.batch_id
     join settlement_exception x on x.batch_id = s.batch_id and x.gateway = s.gateway and x.merchant_account = s.merchant_account
     where b.funded is not true and x.resolved_cents > 0`,
  );
  const adopted: number[] = [];
  for (const { id } of rows)
    for await (const recorded of store.read(`exception-${id}`)) {
      const event = exceptionEvents.read(recorded);
      if (event.type === 'ExceptionResolved' && event.data.resolution === 'adopt' && event.data.portalId === portalId)
        adopted.push(event.data.suspenseCents - event.data.feeCents);
    }
  return sumCents(adopted, (cents) => cents);
};

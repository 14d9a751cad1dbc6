/**
 * Work after an incident of the event store. It finds rows and stored answers that contradict their streams. It also fences the streams of create
 * requests whose intents are not in the log (C64, C76).
 */
import { type EventStore, readStreams } from '#eventstore';
import { Deadline, timestamp } from '#kernel';
import type { Pool } from '#platform';
import { gatewayRef, type PaymentPorts } from './charge.js';
import { type GatewayAccount, LEGS } from './gateway/gateway.js';
import { finalizeReference } from './reverse.js';
import { paymentStream } from './stream.js';

/** Rows of one page of a comparison. */
const PAGE_ROWS = 500;

export interface Unborne {
  /** Payments whose row in the list has a higher revision than their stream. */
  readonly listRows: readonly string[];
  /** Payments with a stored answer whose attempt is not in the payment's stream. */
  readonly storedAnswers: readonly string[];
}

/** Compares every list row with its payment's stream, and every stored answer of HTTP status 200. Memory grows only with the contradictions. */
export const unborne = async (pool: Pool, store: EventStore): Promise<Unborne> => {
  const lastRevisions = async (paymentIds: readonly string[]) =>
    (await readStreams(store, paymentIds.map(paymentStream), { skipUnreadable: true })).map((events) => ({
      revision: events.at(-1)?.revision ?? -1n,
      // A key may have got the result of another attempt (C18, C38). Then only `toldAs` of a ReversalAcknowledged names the key's own attempt.
      attempts: new Set(events.flatMap(({ data }) => namedIn(data as { readonly attemptId?: string; readonly toldAs?: string | null }))),
    }));
  // Both tables may be missing if no API or worker has ever used this database.
  const { rows: tables } = await pool.query<{ found: boolean }>(
    `select to_regclass('payment_list') is not null and to_regclass('idempotency_key') is not null as found`,
  );
  if (!tables[0]!.found) return { listRows: [], storedAnswers: [] };
  const listRows: string[] = [];
  for (let after = '00000000-0000-0000-0000-000000000000'; ;) {
    const { rows } = await pool.query<{ payment_id: string; revision: string }>(
      'select payment_id, revision from payment_list where payment_id > $1 order by payment_id limit $2',
      [after, PAGE_ROWS],
    );
    const streams = await lastRevisions(rows.map((row) => row.payment_id));
    for (const [index, row] of rows.entries()) if (streams[index]!.revision < BigInt(row.revision)) listRows.push(row.payment_id);
    if (rows.length < PAGE_ROWS) break;
    after = rows.at(-1)!.payment_id;
  }
  const storedAnswers: string[] = [];
  for (let after: readonly [string, Buffer] = ['00000000-0000-0000-0000-000000000000', Buffer.alloc(0)]; ;) {
    const { rows } = await pool.query<{ api_account_id: string; key_hash: Buffer; operation: string; payment_id: string; attempt_id: string }>(
      `select api_account_id, key_hash, operation, payment_id, attempt_id from idempotency_key
       where state = 'completed' and status = 200 and (api_account_id, key_hash) > ($1, $2) order by api_account_id, key_hash limit $3`,
      [...after, PAGE_ROWS],
    );
    // The row of a create has its payment's id. The row of a refund or void names the payment in its operation.
    const paymentIds = rows.map(({ operation, payment_id: own }) => (operation === 'create' ? own : operation.slice(operation.indexOf(':') + 1)));
    const streams = await lastRevisions(paymentIds);
    for (const [index, row] of rows.entries()) if (!streams[index]!.attempts.has(row.attempt_id)) storedAnswers.push(paymentIds[index]!);
    const last = rows.at(-1);
    if (!last || rows.length < PAGE_ROWS) return { listRows, storedAnswers };
    after = [last.api_account_id, last.key_hash];
  }
};

/** A create with a key whose request has ended without an answer. */
export interface EndedCreate {
  readonly accountId: string;
  readonly paymentId: string;
  readonly attemptId: string;
  /** RFC 3339: when the key was claimed. The intent followed within seconds. */
  readonly claimedAt: string;
}

/** All ended creates: the key is reserved, or its lease has ended. */
export const endedCreates = async (pool: Pool): Promise<readonly EndedCreate[]> => {
  const { rows } = await pool.query<Omit<EndedCreate, 'claimedAt'> & { claimedAt: Date }>(
    `select api_account_id as "accountId", payment_id as "paymentId", attempt_id as "attemptId", created_at as "claimedAt" from idempotency_key
     where operation = 'create' and (state = 'reserved' or (state = 'in_progress' and lease_until < clock_timestamp())) order by created_at`,
  );
  return rows.map((row) => ({ ...row, claimedAt: row.claimedAt.toISOString() }));
};

/** An ended create without an intent in the log. Its intent went to another log, or its process died before it sent the intent. */
export interface EmptyCreate extends EndedCreate {
  /** True if every merchant account has a gateway here, and every gateway promised that no charge of this attempt will ever be executed. */
  readonly wasNeverCharged: boolean;
  /** When the gateway that could not promise it can tell, RFC 3339. null: it promised it, it charged, or it does not say when. */
  readonly until: string | null;
}

const FINALISE_MS = 60_000;

/**
 * The creates whose stream is empty. For each create, finalises the charge references that its attempt could have used at each merchant account. The
 * check of a create ends at the first reference that may have been executed.
 *
 * Call this only after the log was found whole.
 */
export const emptyCreates = async (
  ports: PaymentPorts,
  creates: readonly EndedCreate[],
  accounts: readonly GatewayAccount[],
): Promise<readonly EmptyCreate[]> => {
  const found: EmptyCreate[] = [];
  for (const create of creates) {
    if ((await ports.streams.load(create.paymentId)).revision !== null) continue;
    const deadline = new Deadline(ports.clock, FINALISE_MS);
    const { accountId, paymentId, attemptId, claimedAt } = create;
    found.push({ accountId, paymentId, attemptId, claimedAt, ...(await findCharge(ports, create, accounts, deadline)) });
  }
  return found;
};

/**
 * Fences the empty streams of these creates, so that their intents cannot arrive later. Their keys then get the answer that nothing was charged
 * (C64).
 */
export const abandon = async ({ streams, ids, clock }: PaymentPorts, creates: readonly EmptyCreate[]): Promise<void> => {
  const reason = 'the intent went to a log that was not ours';
  for (const { accountId, paymentId, attemptId } of creates) {
    const loaded = await streams.load(paymentId);
    if (loaded.revision !== null) continue;
    const origin = { actor: { type: 'recovery' as const, id: 'log-resume' }, correlationId: ids.uuid() };
    const command = { type: 'Abandon' as const, at: timestamp(clock.now()), attemptId, accountId, reason };
    await streams.execute(loaded, [command], origin, new Deadline(clock, FINALISE_MS));
  }
};

const findCharge = async (
  ports: PaymentPorts,
  { attemptId, claimedAt: begunAt }: EndedCreate,
  accounts: readonly GatewayAccount[],
  deadline: Deadline,
): Promise<Pick<EmptyCreate, 'wasNeverCharged' | 'until'>> => {
  for (const account of accounts) {
    const gateway = ports.gateways.find(account);
    if (!gateway) return { wasNeverCharged: false, until: null };
    for (const leg of LEGS) {
      const ref = gatewayRef(attemptId, leg, 'charge');
      // The intent is lost, and with it the amount.
      const call = { ref, op: 'charge', leg, account, begunAt, amountCents: 0, chargeTransactionId: null, last4: null } as const;
      const found = await finalizeReference(ports, gateway, call, deadline);
      if (found.kind !== 'never') return { wasNeverCharged: false, until: (found.kind === 'cannot_tell' && found.until) || null };
    }
  }
  return { wasNeverCharged: accounts.length > 0, until: null };
};

const namedIn = ({ attemptId, toldAs }: { readonly attemptId?: string; readonly toldAs?: string | null }) => [attemptId, toldAs];

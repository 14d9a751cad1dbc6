/**
 * Work after an incident of the event store. It finds rows and stored answers that contradict their streams. It also ends create
 * requests whose intents are not in the log (C64, C76).
 */
import { type EventStore, readStreams } from '#eventstore';
import type { Pool } from '#platform';
import type { PaymentPorts } from './charge.js';
import { attemptIn, type AttemptRow } from './keys/postgres.js';
import { type EmptyCreate, type Ended, finishIfEmpty } from './lost.js';
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

/** All creates with a key whose request has ended without an answer: the key is reserved, or its lease has ended. */
export const endedCreates = async (pool: Pool): Promise<readonly EmptyCreate[]> => {
  const { rows } = await pool.query<AttemptRow & { api_account_id: string }>(
    `select api_account_id, payment_id, attempt_id, created_at, begun from idempotency_key
     where operation = 'create' and (state = 'reserved' or (state = 'in_progress' and lease_until < clock_timestamp())) order by created_at`,
  );
  return rows.map((row) => ({ accountId: row.api_account_id, ...attemptIn(row) }));
};

const FINISH_MS = 60_000;

/**
 * Ends those creates whose streams are empty, so that their intents cannot arrive later (C64). Call this only after the log was found whole.
 */
export const finishEmptyCreates = async (ports: PaymentPorts, creates: readonly EmptyCreate[]): Promise<readonly Ended[]> => {
  const all: Ended[] = [];
  for (const create of creates) {
    const ended = await finishIfEmpty(ports, create, 'the intent went to a log that was not ours', 'log-resume', FINISH_MS);
    if (ended) all.push({ paymentId: create.paymentId, ended });
  }
  return all;
};

const namedIn = ({ attemptId, toldAs }: { readonly attemptId?: string; readonly toldAs?: string | null }) => [attemptId, toldAs];

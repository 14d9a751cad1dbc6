/**
 * Makes rows of keys again from the log, if the database has lost them. A keyed event names a key. It is either the intent of a request, or the event
 * that gives a key the result of another attempt (C18, C38).
 *
 * The subscriber compares each keyed event with its row. Its checkpoint is in the database of the keys and goes back with it. So after a restore, the
 * subscriber reads the later events again.
 *
 * If a row names the newest attempt of its key, the row needs no correction: a claim continues from the stream (T6 to T8). If a request gave its key
 * back, or the key has expired, no row is made.
 */
import { type EventStore, type Projection, readStreams, type Recorded, Unavailable } from '#eventstore';
import { type Clock, fold, type Personal } from '#kernel';
import { type Logger, type Migration, type OpenedKeys, type PersonalKeys, type Pool, transaction } from '#platform';
import { createResult } from '../commands.js';
import {
  attemptOf,
  type Charged,
  isVisible,
  type KeyedEvent,
  keysOfPayment,
  payment as decider,
  type PaymentEvent,
  type RecordedKey,
  type ReversalAttempt,
} from '../payment.js';
import { keyOfText } from '../personal.js';
import { rejectedVoid, reversalResult } from '../reverse.js';
import { type FoundKey, KEEP_HOURS, keyNameOf, type KeyRows, LEASE_SECONDS, type Operation, type RestoredKey } from './key-store.js';
import { type AnswerEncoder, type Result, toStore } from './once-by-key.js';
import { paymentEvents, paymentIdOf, paymentStream } from '../stream.js';
import { postgresKeyRows } from './postgres.js';

/** Name of the subscriber and of its checkpoint. */
export const KEYS_FROM_LOG = 'keys';

/** The subscriber gathers events for this long, so that one statement reads many rows. */
const GATHER_MS = 1_000;

/**
 * In an older installation, the subscriber begins at the lower checkpoint of `webhook-outbox` and `log-seal`. Both checkpoints are in the database of
 * the keys and as old as its rows. So no row is missing before them.
 */
export const keysFromLogMigration: Migration = {
  name: '0033-keys-from-log',
  sql: `
    insert into projection_checkpoint (name, position, epoch)
    select '${KEYS_FROM_LOG}', min(position), 0 from projection_checkpoint where name in ('webhook-outbox', 'log-seal') having count(*) = 2
    on conflict do nothing;
  `,
};

export interface KeysFromLogPorts {
  readonly store: Pick<EventStore, 'read' | 'readStreams'>;
  /** The encoder of the key store. The same result must give the same bytes. */
  readonly answers: AnswerEncoder;
  readonly personal: Pick<PersonalKeys, 'open'>;
  readonly clock: Clock;
  /** The hours for which the key store keeps rows. */
  readonly keepHours?: number;
}

export const keysFromLog = (ports: KeysFromLogPorts & { readonly log: Pick<Logger, 'warn'> }): Projection => ({
  name: KEYS_FROM_LOG,
  streamPrefixes: [paymentStream('')],
  gatherMs: GATHER_MS,
  apply: async (client, events) => {
    const { restored, corrected } = await compareKeys(ports, postgresKeyRows(client, ports.keepHours), events);
    if (restored + corrected > 0) ports.log.warn({ restored, corrected }, 'keys were made again from the log');
  },
});

/** `restored`: rows that were made. `corrected`: rows that were bound to another attempt. `unchanged`: rows that were right. */
export interface ComparedKeys {
  readonly restored: number;
  readonly corrected: number;
  readonly unchanged: number;
}

type LoggedKey = Pick<RestoredKey, 'key' | 'paymentId' | 'attemptId' | 'at'>;

/**
 * Makes the missing rows of these events' keys, and corrects rows that are older than the events. If a request still runs under a key whose row
 * differs, throws Unavailable and changes nothing.
 */
export const compareKeys = async (ports: KeysFromLogPorts, rows: KeyRows, events: readonly Recorded[]): Promise<ComparedKeys> => {
  const logged = newestOfEachKey(events);
  if (logged.length === 0) return { restored: 0, corrected: 0, unchanged: 0 };
  const found = await rows.find(logged.map(({ key }) => keyNameOf(key)));
  const suspects = logged.flatMap((one, index) => (found[index]?.attemptId === one.attemptId ? [] : [{ ...one, found: found[index] ?? null }]));
  if (suspects.length === 0) return { restored: 0, corrected: 0, unchanged: logged.length };

  // Each create has a payment of its own. So the row of another create is judged by the stream of that create's payment.
  const boundTo = ({ key, found: before, paymentId }: (typeof suspects)[number]) =>
    key.operation === 'create' && before ? before.paymentId : paymentId;
  const paymentIds = [...new Set(suspects.flatMap((one) => [one.paymentId, boundTo(one)]))];
  const read = await readStreams(ports.store as EventStore, paymentIds.map(paymentStream));
  const streams = new Map(paymentIds.map((paymentId, index) => [paymentId, read[index]!]));
  const opened = await ports.personal.open([...new Set(read.flatMap((stream) => keysOfPayment(fold(decider, stream.map(paymentEvents.read)))))]);
  const wrong = suspects.flatMap((suspect) => {
    const { found: before, ...one } = suspect;
    const row = rowOf(ports, one, streams.get(one.paymentId)!.map(paymentEvents.read), opened);
    if (!row || (before && (before.attemptId === row.attemptId || !isOlder(row, before, streams.get(boundTo(suspect))!)))) return [];
    return [{ row, replaces: before?.fence ?? null }];
  });
  const made = await rows.restore(wrong);
  if (made < wrong.length) throw new Unavailable('a key was claimed while its row was made from the log');
  const corrected = wrong.filter(({ replaces }) => replaces !== null).length;
  const restored = wrong.length - corrected;
  return { restored, corrected, unchanged: logged.length - wrong.length };
};

const newestOfEachKey = (events: readonly Recorded[]): readonly LoggedKey[] => {
  const newest = new Map<string, LoggedKey>();
  for (const recorded of events) {
    const one = loggedKey(recorded);
    if (one) newest.set(`${one.key.keySpace}/${one.key.keyHash}`, one);
  }
  return [...newest.values()];
};

const loggedKey = (recorded: Recorded): LoggedKey | null => {
  const key = keyOf(paymentEvents.read(recorded));
  return key && { ...key, paymentId: paymentIdOf(recorded.stream), at: recorded.meta.recordedAt };
};

/** The key that an event names, and the attempt that it binds the key to. */
const keyOf = (event: PaymentEvent): Pick<LoggedKey, 'key' | 'attemptId'> | null => {
  if (!('idempotency' in event.data) || event.data.idempotency === null) return null;
  const { type, data } = event as KeyedEvent;
  return { key: data.idempotency!, attemptId: type === 'ReversalAcknowledged' ? data.toldAs! : data.attemptId };
};

/** The row of the key according to the payment's stream. null: in ordinary operation the key has no row. */
const rowOf = (ports: KeysFromLogPorts, one: LoggedKey, events: readonly PaymentEvent[], opened: OpenedKeys): RestoredKey | null =>
  (one.key.operation === 'create' ? rowOfCreate : rowOfReversal)(ports, one, events, opened);

const isTooOld = ({ clock, keepHours = KEEP_HOURS }: KeysFromLogPorts, { at }: Pick<LoggedKey, 'at'>): boolean =>
  // Keys are kept by real time. In a sandbox whose time was moved, `at` may be in the real future. Then the key is kept for longer.
  clock.realNow() - Date.parse(at) > keepHours * HOUR_MS;

const rowOfCreate: typeof rowOf = (ports, one, events, opened) => {
  const row = (state: RestoredKey['state'], answer: RestoredKey['answer'] = null): RestoredKey => ({ ...one, state, answer });
  const result = createResult(one.paymentId, events, opened);
  const payment = fold(decider, events);
  if (isTooOld(ports, one) && payment.phase !== 'pending' && payment.phase !== 'unknown') return null;
  if (result) return row('completed', answerOf(ports, one, opened, result, isVisible(payment) ? payment.terms.personal : null));
  return row(events.length === 1 ? 'in_progress' : 'reserved');
};

/** The answer as its row holds it. `personal`: the text that the answer shows. */
const answerOf = (
  { answers }: KeysFromLogPorts,
  { key, paymentId }: LoggedKey,
  opened: OpenedKeys,
  result: { readonly view: unknown } | Extract<Result<unknown>, { readonly error: unknown }>,
  personal: Personal<unknown>,
) =>
  toStore('error' in result ? result : { view: result.view, key: keyOfText(opened, personal) }, answers, {
    paymentId,
    operation: key.operation as Operation,
  });

const rowOfReversal: typeof rowOf = (ports, one, events, opened) => {
  const { answers } = ports;
  const { key, paymentId } = one;
  // The newest event of a key makes its row. But two attempts come first: one that returned money, and a void that the gateway rejected, unless the
  // settlement of a leg was rejected. A process that stood still may record an intent long after the key was claimed anew. That intent gets no further.
  const payment = fold(decider, events);
  const settlementRejected = payment.phase === 'charged' && payment.legs.some((leg) => leg.settlementRejected);
  const own = events.filter((other) => isSameKey(keyOf(other)?.key, key));
  const hasResult = (event: PaymentEvent): boolean => {
    if (event.type === 'ReversalAcknowledged') return true;
    const attempt = attemptOf(payment, keyOf(event)!.attemptId);
    if (!attempt) return false;
    return attempt.returned.length > 0 || (attempt.operation === 'void' && attempt.ended?.outcome === 'rejected' && !settlementRejected);
  };
  const newest = own.findLast(hasResult) ?? own.at(-1);
  if (!newest) return null;
  const { attemptId } = keyOf(newest)!;
  const attempt = attemptOf(payment, attemptId);
  // The key is kept until its attempt has ended, and for as long again.
  const at = attempt?.ended && attempt.ended.at > one.at ? attempt.ended.at : one.at;
  const row = (state: RestoredKey['state'], answer: RestoredKey['answer'] = null): RestoredKey => ({ ...one, attemptId, at, state, answer });
  const isOld = isTooOld(ports, { at });
  const resultAfter = (last: PaymentEvent, told: string) => {
    const then = chargedAfter(events, last);
    const view = reversalResult(paymentId, then, told, opened);
    return answerOf(ports, one, opened, { view }, attemptOf(then, told)!.personal);
  };
  if (newest.type === 'ReversalAcknowledged') {
    const { attemptId: told } = newest.data;
    return isOld ? null : row('completed', resultAfter(newest, told));
  }
  if (payment.phase !== 'charged' || !attempt) return null;
  if (isOld && attempt.ended) return null;
  if (gaveKeyBack(attempt, settlementRejected)) return null;
  // The request got a 5xx, or vanished. A repeated request finds the result in the stream (C17).
  if (attempt.fenced || attempt.ended?.outcome === 'never_executed' || attempt.ended?.outcome === 'partial') return row('released');
  if (!attempt.ended) return row('in_progress');
  if (attempt.ended.outcome === 'rejected') return row('completed', answers.failure(rejectedVoid()));
  const end = events.find(({ type, data }) => type === 'ReversalEnded' && data.attemptId === attemptId)!;
  return row('completed', resultAfter(end, attemptId));
};

/** The payment as it was after the event `last`. */
const chargedAfter = (events: readonly PaymentEvent[], last: PaymentEvent): Charged => {
  const payment = fold(decider, events.slice(0, events.indexOf(last) + 1));
  if (payment.phase !== 'charged') throw new Error(`the payment is not charged after ${last.type}`);
  return payment;
};

const HOUR_MS = 3_600_000;

const isSameKey = (one: RecordedKey | undefined, other: RecordedKey): boolean => one?.keyHash === other.keyHash && one.keySpace === other.keySpace;

/** True if the request got a 422 and gave its key back: a refused refund, or a void that must be retried (C15). */
const gaveKeyBack = ({ operation, toldPartial, ended, fenced }: ReversalAttempt, settlementRejected: boolean): boolean =>
  operation === 'void'
    ? toldPartial || ended?.outcome === 'partial' || (ended?.outcome === 'rejected' && settlementRejected && !fenced)
    : ended?.outcome === 'rejected' && !fenced;

/**
 * True if the row is older than the log's event, because the database went back. False if a later request made the row. `stream`: the stream of the
 * payment to which the row is bound.
 *
 * Throws Unavailable while a request runs under the key: its new attempt may have no intent yet.
 */
const isOlder = ({ key, attemptId }: RestoredKey, before: FoundKey, stream: readonly Recorded[]): boolean => {
  if (before.isFree) return true;
  if (before.isLeased) throw new Unavailable(`the key of attempt ${attemptId} belongs to a running request`);
  // A stored answer is final.
  if (before.state === 'completed') return false;
  // If the create of the row has an intent too, the other intent is of a process that stood still.
  if (key.operation === 'create') return !stream.some((recorded) => isSameKey(keyOf(paymentEvents.read(recorded))?.key, key));
  if (before.state === 'in_progress') return true;
  // If the stream names the attempt of this row, the row is older. Otherwise that attempt never began: a later request made the row.
  return stream.some(({ data }) => {
    const { attemptId, toldAs } = data as { readonly attemptId?: string; readonly toldAs?: string };
    return attemptId === before.attemptId || toldAs === before.attemptId;
  });
};

/** How long a rebuild waits for a running request. A request with a key does not run longer than its lease. */
const WAIT_FOR_REQUEST_MS = LEASE_SECONDS * 1_000 + 5_000;
const LOOK_AGAIN_MS = 500;

/** `payfold keys rebuild`: compares every keyed event of the last `hours` hours. Each batch of events has a transaction of its own. */
export const rebuildKeys = async (ports: KeysFromLogPorts & { readonly store: EventStore }, pool: Pool, hours: number): Promise<ComparedKeys> => {
  const { clock } = ports;
  const total = { restored: 0, corrected: 0, unchanged: 0 };
  const since = new Date(clock.realNow() - hours * HOUR_MS).toISOString();
  const until = await ports.store.head();
  if (until === null) return total;
  const compare = async (events: readonly Recorded[]): Promise<ComparedKeys> => {
    for (const giveUpAt = clock.monotonic() + WAIT_FOR_REQUEST_MS; ; await clock.sleep(LOOK_AGAIN_MS))
      try {
        return await transaction(pool, (client) => compareKeys(ports, postgresKeyRows(client, ports.keepHours), events));
      } catch (error) {
        if (!(error instanceof Unavailable) || clock.monotonic() >= giveUpAt) throw error;
      }
  };
  for await (const events of ports.store.readAll(null, { until, streamPrefixes: [paymentStream('')] })) {
    const found = await compare(events.filter(({ meta }) => meta.recordedAt >= since));
    total.restored += found.restored;
    total.corrected += found.corrected;
    total.unchanged += found.unchanged;
  }
  return total;
};

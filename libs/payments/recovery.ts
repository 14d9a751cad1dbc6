/**
 * Recovery finishes attempts that a request left open. It fences the stream, finalises every reference of the attempt at the gateway, undoes an
 * executed charge, and records the result.
 *
 * An unknown payment becomes voided or failed, never succeeded (C29). Recovery never gives up: no number of tries decides an outcome.
 */
import { Conflict, type EventStore, type Origin, OutcomeUnknown, StoreIncident, Unavailable } from '#eventstore';
import { ageMs, Deadline, HOST_CLOCKS_DIFFER_MS, timestamp } from '#kernel';
import { type Migration, type Pool, purge, type Queryable } from '#platform';
import { aboutLeg, type PaymentPorts } from './charge.js';
import { callGateway } from './gateway/call.js';
import type { PaymentGateway } from './gateway/gateway.js';
import { type Awaiting, cents, type ChargeFinding, checksOf, openOf } from './payment.js';
import { type FoundCharge, noteLost } from './lost.js';
import { endOf, finalizeReference, resolveReversal, stillOpen, type StillOpen, UNREACHABLE } from './reverse.js';
import { raiseStaffTask, staffTaskEvidence } from './staff.js';

/** Recovery does not touch a younger attempt, since its request may still be running (C42). */
export const RECOVERY_STARTS_AFTER_MS = 60_000;
const MINUTE = 60_000;
/** The wait before the first try, the second try and so on. The last wait repeats for ever. */
export const RECOVERY_SCHEDULE_MS = [MINUTE, 2 * MINUTE, 5 * MINUTE, 15 * MINUTE, 60 * MINUTE, 6 * 60 * MINUTE, 24 * 60 * MINUTE];
/**
 * While the gateway shows no trace of a reference, the tries come this long after the attempt began. The try after 4 minutes is for a charge that
 * appears after three: it must be undone within two minutes.
 */
const WAITING_TRIES_MS = [MINUTE, 2 * MINUTE, 4 * MINUTE, 5 * MINUTE, 15 * MINUTE];
/** The pause between the later tries. A charge that still arrives can be voided only until its batch closes. */
const WAITING_PAUSE_MS = 60 * MINUTE;
/** Such tries count as at most this many. So an outage that follows has pauses of an hour first. */
const COUNTED_WHILE_WAITING = 3;
/** The last chance to find such a charge while it can be voided. */
const BEFORE_THE_BATCH_MS = 10 * MINUTE;
/** When the gateway can tell, it is asked this long after. */
const AFTER_UNTIL_MS = MINUTE;
/** If the gateway cannot tell this long after it should, staff get a task. */
const OVERDUE_AFTER_MS = 24 * 60 * MINUTE;
/** Time limit for one payment, which may need several gateway calls, one after the other. */
const RESOLUTION_MS = 40_000;
/** Payments that a round works on at the same time. */
const AT_ONCE = 8;
/**
 * After a payment is resolved, all other open payments become due, since the gateway probably answers again. This happens at most once in this time.
 */
const HURRY_EVERY_MS = MINUTE;
/** Reads of one open payment start at most one try in this time. */
const LOOK_AGAIN_MS = 30_000;
const REMEMBERED_LOOKS = 10_000;

export const recoveryMigration: Migration = {
  name: '0050-recovery',
  sql: `
    create table recovery_try (
      payment_id uuid not null, attempt_id uuid not null, tries int not null, next_try_at timestamptz not null, outcome text not null,
      primary key (payment_id, attempt_id));
  `,
};

/** Why the gateway cannot tell about an attempt, and by when it should ({@link decidedBy}). `until` null: not known. */
export const recoveryWhyMigration: Migration = {
  name: '0053-recovery-why',
  sql: 'alter table recovery_try add column why text, add column until timestamptz',
};

/** `staff`: the gateway holds money that recovery must not touch. A person decides, with the evidence in the staff task. */
export type Resolution = 'resolved' | 'open' | 'staff';

export interface Recovery {
  /** Resolves the open attempt of a payment, unless a request may still be working on it. */
  resolve(paymentId: string): Promise<Resolution>;
  /** Called when a request reads an open payment. Starts a try in the background, at most one in 30 s for each payment. */
  look(paymentId: string): void;
  /** Tries to resolve up to 50 payments that are due. Returns the number of payments that were due. Ends early when `stop` aborts. */
  round(stop?: AbortSignal): Promise<number>;
}

/** The result of one try. `still`: why the attempt is open. null: it is not, or our own store did not answer. */
interface Tried {
  readonly outcome: Resolution;
  readonly still: StillOpen | null;
}
const RESOLVED: Tried = { outcome: 'resolved', still: null };
const OPEN: Tried = { outcome: 'open', still: null };
const openBecause = (still: StillOpen): Tried => ({ outcome: 'open', still });

/**
 * When an attempt that is still open is tried next, in milliseconds since the epoch. `tries`: the tries so far, this one included. `begun`: when the
 * attempt began.
 */
export const nextTryAt = (now: number, tries: number, still: StillOpen | null, begun: number): number => {
  const planned = now + RECOVERY_SCHEDULE_MS[Math.min(tries, RECOVERY_SCHEDULE_MS.length - 1)]!;
  const until = still?.until === undefined ? Number.NaN : Date.parse(still.until);
  if (!still || !(now < until)) return planned;
  // The end of a scan at the gateway.
  if (still.why === 'in_flight') return Math.min(planned, until + 1_000);
  const lastLook = lastLookAt(still);
  const waiting = Math.min(nextWaitingTry(now, begun), until + AFTER_UNTIL_MS, lastLook > now ? lastLook : Number.POSITIVE_INFINITY);
  // One leg waits for its batch, and there was no answer about the other.
  return still.why === 'unreachable' ? Math.min(planned, waiting) : waiting;
};

/** A wrong clock may have dated the attempt in the future. */
const nextWaitingTry = (now: number, begun: number): number =>
  WAITING_TRIES_MS.map((ms) => Math.min(begun, now) + ms).find((at) => at > now) ?? now + WAITING_PAUSE_MS;

/** NaN: not known. */
const lastLookAt = ({ voidableUntil }: StillOpen): number =>
  voidableUntil === undefined ? Number.NaN : Date.parse(voidableUntil) - BEFORE_THE_BATCH_MS;

/**
 * By when the gateway should be able to tell about an attempt, RFC 3339: the earliest time that it named. A gateway whose batch is late names a later
 * time with each answer, so only the earliest shows that an outcome is overdue. `known`: the time so far. null: no time is known.
 */
export const decidedBy = (known: string | null, still: StillOpen | null): string | null => {
  // While an answer is under way, `until` is the end of a scan.
  const named = still === null || still.why === 'in_flight' ? null : (still.until ?? null);
  return known === null || (named !== null && named < known) ? named : known;
};

/**
 * The tries that count for later pauses. A gateway that says when it can tell has answered. So a wait for it does not lengthen the pauses of an outage
 * that follows.
 */
export const countedTries = (now: number, tries: number, still: StillOpen | null): number =>
  still?.until !== undefined && now < Date.parse(still.until) ? Math.min(tries, COUNTED_WHILE_WAITING) : tries;

export const createRecovery = (ports: PaymentPorts, store: EventStore, work: RecoveryWork, options: { startsAfterMs?: number } = {}): Recovery => {
  const { clock, ids, log } = ports;
  const startsAfterMs = options.startsAfterMs ?? RECOVERY_STARTS_AFTER_MS;

  const resolveOne = async (paymentId: string): Promise<Tried> => {
    const origin: Origin = { actor: { type: 'recovery', id: 'recovery' }, correlationId: ids.uuid() };
    const deadline = new Deadline(clock, RESOLUTION_MS);
    const { payment } = await ports.streams.load(paymentId);
    const old = (since: string) => ageMs(clock, since) >= startsAfterMs;
    const open = openOf(payment);
    if (!open) return RESOLVED;
    if (!old(open.since)) return OPEN;
    if (payment.phase !== 'charged') return resolveCharge(ports, store, payment as Awaiting, paymentId, origin, deadline);
    const found = await resolveReversal(ports, paymentId, open.attemptId, origin, deadline);
    return found === 'resolved' ? RESOLVED : openBecause(found);
  };

  /** The running tries of this process, by payment id. A payment has at most one. */
  const running = new Map<string, Promise<Tried>>();
  const attempt = (paymentId: string): Promise<Tried> => {
    const present = running.get(paymentId);
    if (present) return present;
    const begun = resolveOne(paymentId).finally(() => running.delete(paymentId));
    running.set(paymentId, begun);
    return begun;
  };

  let hurriedAt = Number.NEGATIVE_INFINITY;
  const hurry = async () => {
    if (clock.monotonic() - hurriedAt < HURRY_EVERY_MS) return;
    hurriedAt = clock.monotonic();
    await work.hurry(timestamp(clock.now()));
  };

  const looks = new Map<string, number>();
  return {
    resolve: async (paymentId) => (await attempt(paymentId)).outcome,
    look: (paymentId) => {
      const before = looks.get(paymentId);
      if (before !== undefined && clock.monotonic() - before < LOOK_AGAIN_MS) return;
      if (looks.size >= REMEMBERED_LOOKS) looks.clear();
      looks.set(paymentId, clock.monotonic());
      if (ports.ownLog.incident) return;
      void attempt(paymentId)
        .then(({ outcome }) => (outcome === 'resolved' ? hurry() : undefined))
        .catch((error: unknown) => log.warn({ paymentId, err: error }, 'recovery on reading failed'));
    },
    round: async (stop) => {
      const now = clock.now();
      const due = await work.due({
        begunBefore: timestamp(now - startsAfterMs),
        begunAfter: timestamp(now + HOST_CLOCKS_DIFFER_MS),
        nextTryBefore: timestamp(now),
        nextTryAfter: timestamp(now + RECOVERY_SCHEDULE_MS.at(-1)! + HOST_CLOCKS_DIFFER_MS),
      });
      let resolved = 0;
      const queue = due.values();
      const resolveNext = async () => {
        for (const { paymentId, attemptId, tries, since, until: known } of queue) {
          if (stop?.aborted) return;
          let failure: unknown;
          const { outcome, still } = await attempt(paymentId).catch((error: unknown): Tried => {
            failure = error;
            log.warn({ paymentId, err: error }, 'recovery could not resolve a payment');
            return OPEN;
          });
          if (outcome === 'resolved') resolved += 1;
          const why = still?.why ?? null;
          // `staff` without a reason: the gateway could tell.
          const until = outcome === 'open' || still !== null ? decidedBy(known, still) : null;
          log.info({ paymentId, attemptId, outcome, tries: tries + 1, ...(why !== null && { why }), ...(until !== null && { until }) }, 'recovery');
          // An outage of our own event store says nothing about the gateway, so it does not lengthen the pauses.
          const ours = failure instanceof Unavailable || failure instanceof OutcomeUnknown || failure instanceof StoreIncident;
          const next = ours ? clock.now() + RECOVERY_SCHEDULE_MS[0]! : nextTryAt(clock.now(), tries + 1, still, Date.parse(since));
          const counted = ours ? tries : countedTries(clock.now(), tries + 1, still);
          await work.record({ paymentId, attemptId, tries: counted, nextTryAt: timestamp(next), outcome, why, until });
          if (!ours && until !== null && clock.now() >= Date.parse(until) + OVERDUE_AFTER_MS) {
            const origin: Origin = { actor: { type: 'recovery', id: 'recovery' }, correlationId: ids.uuid() };
            await raiseStaffTask(ports, store, paymentId, 'outcome_overdue', { attemptId, why, until }, origin).catch((error: unknown) =>
              log.warn({ paymentId, err: error }, 'the task about an overdue outcome could not be recorded'),
            );
          }
        }
      };
      await Promise.all(Array.from({ length: AT_ONCE }, resolveNext));
      if (resolved > 0) await hurry();
      return due.length;
    },
  };
};

/** Asks the gateway about every leg of a charge, undoes each leg that was charged, and records the findings. */
const resolveCharge = async (
  ports: PaymentPorts,
  store: EventStore,
  { terms }: Awaiting,
  paymentId: string,
  origin: Origin,
  deadline: Deadline,
): Promise<Tried> => {
  const work = () => resolveWithSlot(ports, store, paymentId, origin, deadline);
  return (await ports.slots.inHouse(terms.legs[0]!.account.gateway, terms.accountId, deadline, work)) ?? OPEN;
};

const resolveWithSlot = async (ports: PaymentPorts, store: EventStore, paymentId: string, origin: Origin, deadline: Deadline): Promise<Tried> => {
  const { clock, streams } = ports;
  const at = () => timestamp(clock.now());
  // If this process stands still and goes on later, it sends nothing. Staff may have decided meanwhile that the charge stays.
  const notAfter = endOf(ports, deadline);
  let loaded = await streams.load(paymentId);
  if (loaded.payment.phase !== 'pending' && loaded.payment.phase !== 'unknown') return RESOLVED;
  try {
    loaded = await streams.execute(loaded, [{ type: 'StartReconciliation', at: at(), attemptId: loaded.payment.attemptId }], origin, deadline);
    const payment = loaded.payment as Awaiting;
    const findings: ChargeFinding[] = [];
    const kept: FoundCharge[] = [];
    // The gateway may be able to tell about a leg only when its batch has closed. A charge of another leg must be undone before that, so the loop goes on.
    let waits: StillOpen | null = null;
    const unanswered: { readonly still: StillOpen; readonly gateway: PaymentGateway }[] = [];
    for (const leg of payment.terms.legs) {
      if (unanswered.some((one) => mayHavePromised(one.gateway))) break;
      const gateway = ports.gateways.find(leg.account);
      if (!gateway) return OPEN;
      const found = await finalizeReference(ports, gateway, aboutLeg(payment, leg, 'charge'), deadline);
      if (found.kind === 'cannot_tell') {
        if (found.why === 'not_visible') waits = bothOf(waits, stillOpen(found), clock.now());
        else unanswered.push({ still: stillOpen(found), gateway });
        continue;
      }
      if (found.kind === 'undone') {
        findings.push({ leg: leg.leg, found: 'reversed', transactionId: found.transactionId });
        continue;
      }
      if (found.kind === 'never') {
        // The reference of the reversal is finalised, too. A process that resumes late then cannot reverse a charge that was never made (C61).
        const reversal = await finalizeReference(ports, gateway, aboutLeg(payment, leg, 'reversal'), deadline);
        if (reversal.kind === 'cannot_tell') {
          waits = bothOf(waits, stillOpen(reversal), clock.now());
          continue;
        }
        findings.push({ leg: leg.leg, found: 'never' });
      } else if (found.result.kind === 'approved' || found.result.kind === 'held') {
        const { transactionId } = found.result.kind === 'held' ? found.result : found.result.txn;
        // The gateway's answer for this reference is final, so the call is not repeated: staff decide about this money, and may have returned it already.
        const before = (await refusedBefore(store, paymentId)).find((one) => one.leg === leg.leg && one.transactionId === transactionId);
        if (before) {
          kept.push(before);
          continue;
        }
        // The caller may have been told that it succeeded, so only a person may undo it.
        if (payment.lost) {
          kept.push({ leg: leg.leg, transactionId, why: 'lost' });
          continue;
        }
        const undone = await callGateway(ports, deadline, null, (signal) =>
          gateway.void(
            {
              ref: leg.references.reversal,
              leg: leg.leg,
              account: leg.account,
              begunAt: payment.createdAt,
              chargeTransactionId: transactionId,
              amountCents: cents(leg),
              askedBy: 'reversal',
              notAfter,
            },
            signal,
          ),
        );
        if (undone.kind === 'approved') {
          const by = undone.txn.means === 'refund' ? { undone: { means: 'refund', chargeTransactionId: transactionId } as const } : {};
          findings.push({ leg: leg.leg, found: 'reversed', transactionId: undone.txn.transactionId, ...by });
        } else if (undone.kind === 'rejected') {
          kept.push({ leg: leg.leg, transactionId, why: undone.why });
          // `finalised`: the gateway has promised staff that this leg stays charged. Staff are about to resolve the payment as succeeded, so recovery
          // leaves the other legs to them. If staff send the leg back instead, the payment cannot succeed, and the other legs are undone.
          if (undone.why === 'finalised' && !payment.returns) break;
        } else if (undone.kind === 'not_processed' && undone.answered) kept.push({ leg: leg.leg, transactionId, why: 'not_processed' });
        else unanswered.push({ still: UNREACHABLE, gateway });
      } else if (found.result.kind === 'declined') {
        const { decline, transactionId = null } = found.result;
        findings.push({ leg: leg.leg, found: 'declined', code: decline.code, transactionId, ...checksOf(decline) });
      } else if (found.result.kind === 'unknown') unanswered.push({ still: UNREACHABLE, gateway });
      else findings.push({ leg: leg.leg, found: 'never' });
    }
    const [first] = unanswered;
    if (payment.lost && kept.length > 0) {
      await noteLost(ports, paymentId, payment.attemptId, kept, origin);
      return { outcome: 'staff', still: first?.still ?? waits };
    }
    if (first) return openBecause(first.still.why === 'in_flight' ? first.still : { ...waits, ...UNREACHABLE });
    if (kept.length > 0) {
      // A leg has settled, or cannot be voided. Only a person may decide about this money (C29). The payment stays unknown.
      await raiseStaffTask(ports, store, paymentId, 'charge_cannot_be_undone', { legs: kept }, origin);
      return { outcome: 'staff', still: waits };
    }
    if (waits) return openBecause(waits);
    await streams.execute(loaded, [{ type: 'RecordChargeFindings', at: at(), attemptId: payment.attemptId, findings }], origin, deadline);
    return RESOLVED;
  } catch (error) {
    if (error instanceof Conflict) return OPEN;
    throw error;
  }
};

/**
 * True if the gateway may have promised staff that a leg stays charged, because they are about to resolve the payment as succeeded. Its next answer
 * about the leg says so. Until then, recovery leaves the other legs alone.
 */
const mayHavePromised = ({ capabilities }: PaymentGateway): boolean => capabilities.finalize === 'at_once';

/** The legs for which an earlier try got a final refusal to undo. `finalised` is the promise to staff, and is asked for again. */
const refusedBefore = async (store: EventStore, paymentId: string): Promise<readonly FoundCharge[]> =>
  (await staffTaskEvidence(store, paymentId, 'charge_cannot_be_undone'))
    .flatMap(({ legs }) => legs as unknown as readonly FoundCharge[])
    .filter(({ why }) => why !== 'finalised');

/** Of two legs: the one that the gateway can tell about last, with the next time at which a charge of either leg can no longer be voided. */
export const bothOf = (one: StillOpen | null, other: StillOpen, now: number): StillOpen => {
  if (one === null) return other;
  const { voidableUntil: _, ...later } = other.until === undefined || (one.until !== undefined && one.until >= other.until) ? one : other;
  const [next] = [one, other].filter((still) => lastLookAt(still) > now).sort((a, b) => lastLookAt(a) - lastLookAt(b));
  return { ...later, ...(next?.voidableUntil !== undefined && { voidableUntil: next.voidableUntil }) };
};

/**
 * Limits for the times of open attempts, RFC 3339. `begunAfter` and `nextTryAfter` are in the future. Only a wrong clock can write a later time. An
 * attempt with such a time is due immediately.
 */
export interface Due {
  readonly begunBefore: string;
  readonly begunAfter: string;
  readonly nextTryBefore: string;
  readonly nextTryAfter: string;
}

/** An attempt that is due for a try. */
export interface DueAttempt {
  readonly paymentId: string;
  readonly attemptId: string;
  /** The tries so far. */
  readonly tries: number;
  /** RFC 3339: when the attempt began. */
  readonly since: string;
  /** As the tries so far have recorded it. */
  readonly until: string | null;
}

/** The port of recovery: it finds open attempts, and keeps the time of each next try. */
export interface RecoveryWork {
  /**
   * At most 50 open attempts, oldest first. They began before `begunBefore` or after `begunAfter`. Their next try is not planned yet, or not later
   * than `nextTryBefore`, or later than `nextTryAfter`.
   */
  due(when: Due): Promise<readonly DueAttempt[]>;
  record(tried: {
    paymentId: string;
    attemptId: string;
    tries: number;
    nextTryAt: string;
    outcome: Resolution;
    /** Why the gateway cannot tell. null: not known. */
    why: StillOpen['why'] | null;
    /** By when it should be able to ({@link decidedBy}), RFC 3339. null: not known. */
    until: string | null;
  }): Promise<void>;
  /**
   * Sets the next try of open attempts to `nextTryAt` if it is planned for later. Attempts that are left to staff do not change. Lowers `tries` by
   * one, so that the extra try does not lengthen the later waits.
   */
  hurry(nextTryAt: string): Promise<void>;
}

const ROUND_LIMIT = 50;

/** Finds open attempts in the rows of the list. Several workers may run at the same time, since the stream's revision guards each step. */
export const postgresRecoveryWork = (pool: Pool): RecoveryWork => ({
  due: async ({ begunBefore, begunAfter, nextTryBefore, nextTryAfter }) => {
    const { rows } = await pool.query<{ payment_id: string; attempt_id: string; tries: number; open_since: Date; until: Date | null }>(
      `select p.payment_id, p.open_attempt_id as attempt_id, coalesce(t.tries, 0) as tries, p.open_since, t.until
       from payment_list p left join recovery_try t on t.payment_id = p.payment_id and t.attempt_id = p.open_attempt_id
       where (p.open_since < $1 or p.open_since > $2) and (t.next_try_at is null or t.next_try_at <= $3 or t.next_try_at > $4)
       order by p.open_since, p.payment_id limit $5`,
      [begunBefore, begunAfter, nextTryBefore, nextTryAfter, ROUND_LIMIT],
    );
    return rows.map(({ payment_id: paymentId, attempt_id: attemptId, tries, open_since: since, until }) => ({
      paymentId,
      attemptId,
      tries,
      since: since.toISOString(),
      until: until?.toISOString() ?? null,
    }));
  },
  record: async ({ paymentId, attemptId, tries, nextTryAt, outcome, why, until }) => {
    if (outcome === 'resolved') {
      await pool.query('delete from recovery_try where payment_id = $1 and attempt_id = $2', [paymentId, attemptId]);
      return;
    }
    await pool.query(
      `insert into recovery_try (payment_id, attempt_id, tries, next_try_at, outcome, why, until) values ($1, $2, $3, $4, $5, $6, $7)
       on conflict (payment_id, attempt_id) do update set tries = excluded.tries, next_try_at = excluded.next_try_at, outcome = excluded.outcome,
         why = excluded.why, until = excluded.until`,
      [paymentId, attemptId, tries, nextTryAt, outcome, why, until],
    );
  },
  hurry: async (nextTryAt) => {
    await pool.query(`update recovery_try set next_try_at = $1, tries = greatest(tries - 1, 0) where outcome = 'open' and next_try_at > $1`, [
      nextTryAt,
    ]);
  },
});

/** Deletes the rows of attempts that are no longer open. */
export const purgeTries = (db: Queryable, stop?: AbortSignal): Promise<number> =>
  purge(async (limit) => {
    const { rowCount } = await db.query(
      `delete from recovery_try where ctid = any(array(
         select t.ctid from recovery_try t
         where not exists (select from payment_list p where p.payment_id = t.payment_id and p.open_attempt_id = t.attempt_id)
         limit $1 for update skip locked))`,
      [limit],
    );
    return rowCount ?? 0;
  }, stop);

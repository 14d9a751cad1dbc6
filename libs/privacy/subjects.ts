/** Decides of which payments personal data can be erased, and which keys that takes. */
import { checkout as checkoutDecider, checkoutEvents, type KnownCheckout } from '#checkout';
import { type EventStore, readStreams, type Recorded } from '#eventstore';
import { fold, isBox, type Personal } from '#kernel';
import {
  isVisible,
  openAttempt,
  payment as paymentDecider,
  paymentEvents,
  paymentIdOf,
  paymentStream,
  statusOf,
  type VisiblePayment,
} from '#payments';
import { postgresPersonalKeyRows, type Queryable } from '#platform';
import type { Subject } from './erasure.js';
import { CHECKOUTS, keysOf, usesOfKeys } from './personal-use.js';

/** Why personal data of a payment cannot be erased now, or ever. */
export const OBSTACLES = {
  not_found: 'There is no such payment',
  under_way: 'The payment is under way',
  unknown_outcome: 'The outcome of the payment is unknown',
  open_reversal: 'A refund or void of the payment is in progress',
  disputed: 'A dispute of the payment is not decided',
  open_checkout: 'The checkout of the payment is open',
  version_1: 'The payment was recorded before personal data was sealed, so its events hold it in clear',
} as const;
export type Obstacle = keyof typeof OBSTACLES;

export interface Judged {
  readonly paymentId: string;
  readonly obstacle: Obstacle | null;
  /** Every use of the keys that are not erased yet, in every stream. Empty with an obstacle. */
  readonly subjects: readonly Subject[];
}

export interface SubjectPorts {
  readonly store: EventStore;
  readonly db: Queryable;
}

/**
 * Judges payments, in the order given. A key may also be used by a checkout and by its other payments; then these must have no obstacle either.
 * `now`: business time, ms since the epoch.
 */
export const judge = async (ports: SubjectPorts, paymentIds: readonly string[], now: number): Promise<readonly Judged[]> => {
  const events = await paymentsRead(ports.store, paymentIds);
  const keyIds = [...new Set(paymentIds.flatMap((id) => keysOf(events.get(id)!)))];
  const uses = await usesOfKeys(ports.db, keyIds);
  const others = [...new Set(uses.map(({ stream }) => stream))].filter((stream) => stream.startsWith(CHECKOUTS) || !events.has(paymentIdOf(stream)));
  const obstacles = await obstaclesOf(ports.store, events, others, now);
  const kept = await keptKeys(ports.db, keyIds);
  return paymentIds.map((paymentId): Judged => {
    const stream = paymentStream(paymentId);
    const own = keysOf(events.get(paymentId)!);
    const shared = uses.filter(({ keyId }) => own.includes(keyId));
    // A payment shows its own obstacle first.
    const obstacle = [stream, ...shared.map((use) => use.stream)].map((one) => obstacles.get(one) ?? null).find((one) => one !== null) ?? null;
    if (obstacle !== null) return { paymentId, obstacle, subjects: [] };
    const subjects = new Map<string, Subject>();
    for (const use of [...own.map((keyId) => ({ stream, keyId })), ...shared])
      if (kept.has(use.keyId)) subjects.set(`${use.keyId} ${use.stream}`, use);
    return { paymentId, obstacle, subjects: [...subjects.values()] };
  });
};

const paymentsRead = async (store: EventStore, paymentIds: readonly string[]): Promise<Map<string, readonly Recorded[]>> => {
  const streams = await readStreams(store, paymentIds.map(paymentStream));
  return new Map(paymentIds.map((id, index) => [id, streams[index]!]));
};

/** Keys that are in the database and not erased. */
const keptKeys = async (db: Queryable, keyIds: readonly string[]): Promise<ReadonlySet<string>> => {
  const found = await postgresPersonalKeyRows(db).find(keyIds);
  return new Set(found.filter(({ key, erasedAt }) => key !== null && erasedAt === null).map(({ keyId }) => keyId));
};

/** The obstacle of each stream that has one. `others`: streams that share a key with the payments. */
const obstaclesOf = async (
  store: EventStore,
  payments: ReadonlyMap<string, readonly Recorded[]>,
  others: readonly string[],
  now: number,
): Promise<ReadonlyMap<string, Obstacle>> => {
  const read = await readStreams(store, others);
  const streams: readonly (readonly [string, readonly Recorded[]])[] = [
    ...[...payments].map(([id, events]) => [paymentStream(id), events] as const),
    ...others.map((stream, index) => [stream, read[index]!] as const),
  ];
  return new Map(
    streams.flatMap(([stream, events]): [string, Obstacle][] => {
      const obstacle = stream.startsWith(CHECKOUTS) ? checkoutObstacle(events, now) : paymentObstacle(events);
      return obstacle === null ? [] : [[stream, obstacle]];
    }),
  );
};

const paymentObstacle = (recorded: readonly Recorded[]): Obstacle | null => {
  const events = recorded.map(paymentEvents.read);
  const payment = fold(paymentDecider, events);
  if (!isVisible(payment)) return 'not_found';
  return obstacleIn(payment) ?? (events.some(({ data }) => 'personal' in data && isInClear(data.personal)) ? 'version_1' : null);
};

const isInClear = (personal: Personal<unknown>): boolean => personal !== null && !isBox(personal);

/** The obstacle in the state of a payment. */
export const obstacleIn = (payment: VisiblePayment): Obstacle | null => {
  const status = statusOf(payment);
  if (status === 'pending' || status === 'authorized') return 'under_way';
  if (status === 'unknown') return 'unknown_outcome';
  if (payment.phase !== 'charged') return null;
  if (openAttempt(payment)) return 'open_reversal';
  return payment.disputes.some((dispute) => dispute.status === 'debited' || dispute.status === 'in_dispute') ? 'disputed' : null;
};

const checkoutObstacle = (recorded: readonly Recorded[], now: number): Obstacle | null => {
  const checkout = fold(checkoutDecider, recorded.map(checkoutEvents.read));
  return checkout.phase !== 'none' && isCheckoutOpen(checkout, now) ? 'open_checkout' : null;
};

/** True while the payer may still pay, or the outcome of an attempt is not recorded. */
export const isCheckoutOpen = (checkout: KnownCheckout, now: number): boolean =>
  checkout.phase === 'processing' || checkout.phase === 'unknown' || (checkout.phase === 'open' && now < Date.parse(checkout.expiresAt));

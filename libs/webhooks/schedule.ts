/**
 * The times of a delivery's attempts (specification, Retries; C55). A round has five attempts. Each attempt begins 108–132 s after the end of the one
 * before. If the fifth attempt fails, the delivery is held for the operator.
 *
 * The worker computes the wait, and the database's clock decides when it is over. A wrong clock of a worker therefore has no effect.
 */

/** Attempts of one round. A redelivery by an operator begins another round. */
export const MAX_ATTEMPTS = 5;
/** About 2 minutes (specification, Retries 2). */
export const RETRY_SECONDS = 120;
/** Each wait is up to a tenth shorter or longer. Deliveries that failed together are then attempted at different times. */
export const RETRY_SPREAD = 0.1;
/** Time limit of an attempt: look-up, connection, TLS and answer together (specification, Retries 1). */
export const ATTEMPT_BUDGET_MS = 10_000;
/** A claimed delivery belongs to its worker for this time: 10 s for the attempt, and 5 s to record its end. */
export const LEASE_MS = 15_000;
/**
 * A worker ends a lease only after seeing it expired for this long by its own monotonic clock. This is longer than an attempt. If the database's
 * clock jumps, the running attempts can still end.
 */
export const LEASE_GRACE_MS = 12_000;
/** A delivery that has lost this many leases is held. Perhaps it crashes its workers. */
export const MAX_LEASE_LOSSES = 10;
/** After this many consecutive failures, an endpoint gets one attempt at a time until one succeeds. */
export const FAILING_AFTER = 10;

/** The next state of a delivery after an attempt. */
export type Fate = { readonly state: 'delivered' } | { readonly state: 'held' } | { readonly state: 'pending'; readonly waitMs: number };

/** `attempt` counts from 1 within the round. `chance` is a random number from [0, 1). */
export const fateOf = (
  { attempt, succeeded, chance }: { readonly attempt: number; readonly succeeded: boolean; readonly chance: number },
  retrySeconds: number = RETRY_SECONDS,
): Fate => {
  if (succeeded) return { state: 'delivered' };
  if (attempt >= MAX_ATTEMPTS) return { state: 'held' };
  return { state: 'pending', waitMs: Math.round(retrySeconds * 1000 * (1 - RETRY_SPREAD + chance * 2 * RETRY_SPREAD)) };
};

/**
 * When a delivery is tried again (specification, Retries; C55): five attempts in a round, each 108–132 s after the end of the one before. Then it is
 * held for the operator. The wait is computed here. The database's clock decides when it is over, so no worker's clock can send twice or never.
 */

/** Attempts of one round; a redelivery by staff begins another round. */
export const MAX_ATTEMPTS = 5;
/** About 2 minutes (specification, Retries 2). */
export const RETRY_SECONDS = 120;
/** Waits differ by up to a tenth either way, so deliveries that failed together are not tried together again. */
export const RETRY_SPREAD = 0.1;
/** An attempt has this long for look-up, connection, TLS and answer together (specification, Retries 1). */
export const ATTEMPT_BUDGET_MS = 10_000;
/** How long a worker owns a delivery that it claimed: an attempt, and half as much again to record it. */
export const LEASE_MS = 15_000;
/**
 * How long a lease must have run out before it is taken away. A living worker ends its attempt within that time by a monotonic clock. So a jump of
 * the database's clock takes no delivery away from a living worker.
 */
export const LEASE_GRACE_MS = 12_000;
/** A delivery that kills its workers is not tried for ever. */
export const MAX_LEASE_LOSSES = 10;
/** After this many failures in a row an endpoint gets one attempt at a time, until one succeeds. It is never switched off automatically. */
export const FAILING_AFTER = 10;

/** The next state of a delivery after an attempt. */
export type Fate = { readonly state: 'delivered' } | { readonly state: 'held' } | { readonly state: 'pending'; readonly waitMs: number };

/** `attempt` counts from 1 within the round; `chance` is from [0, 1). */
export const fateOf = (
  { attempt, succeeded, chance }: { readonly attempt: number; readonly succeeded: boolean; readonly chance: number },
  retrySeconds: number = RETRY_SECONDS,
): Fate => {
  if (succeeded) return { state: 'delivered' };
  if (attempt >= MAX_ATTEMPTS) return { state: 'held' };
  return { state: 'pending', waitMs: Math.round(retrySeconds * 1000 * (1 - RETRY_SPREAD + chance * 2 * RETRY_SPREAD)) };
};

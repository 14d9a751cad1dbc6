/**
 * The times of a delivery's attempts (specification, Retries; C55). A round has five attempts. Each attempt begins 108–132 s after the end of the
 * attempt before. If the fifth attempt fails, the delivery is held for the operator.
 *
 * The wait is computed here, and the database's clock decides when it is over. So if a worker's clock is wrong, a delivery is still attempted at the
 * right time.
 */

/** Attempts of one round; a redelivery by staff begins another round. */
export const MAX_ATTEMPTS = 5;
/** About 2 minutes (specification, Retries 2). */
export const RETRY_SECONDS = 120;
/** Each wait is up to a tenth shorter or longer. So deliveries that failed together are not attempted together again. */
export const RETRY_SPREAD = 0.1;
/** Time limit of an attempt, for look-up, connection, TLS and answer together (specification, Retries 1). */
export const ATTEMPT_BUDGET_MS = 10_000;
/** A claimed delivery belongs to its worker for this time: 10 s for the attempt, and 5 s to record how it ended. */
export const LEASE_MS = 15_000;
/**
 * A lease is taken away only if another worker has seen it expired for at least this long, by its own monotonic clock. A living worker ends its attempt
 * sooner. So a jump of the database's clock takes no delivery away from a living worker.
 */
export const LEASE_GRACE_MS = 12_000;
/** After its lease was lost this many times, a delivery is held. Otherwise a delivery that crashes its workers would be attempted for ever. */
export const MAX_LEASE_LOSSES = 10;
/** After this many failures in a row an endpoint gets one attempt at a time, until one succeeds. An endpoint is never disabled automatically. */
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

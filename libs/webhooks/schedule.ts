/**
 * When an endpoint is asked again (specification, Retries; C55): five attempts in a round, each 108–132 s after the end of the one before, then the operator
 * holds the event. How long to wait is decided here; *when* that is, the database's clock says, so that no worker's clock can send twice or never.
 */

/** Attempts of one round; a redelivery by staff begins another round. */
export const MAX_ATTEMPTS = 5;
/** About 2 minutes (specification, Retries 2). */
export const RETRY_SECONDS = 120;
/** Waits differ by up to a tenth either way, so that what failed together does not come back together. */
export const RETRY_SPREAD = 0.1;
/** An attempt has this long for look-up, connection, TLS and answer together (specification, Retries 1). */
export const ATTEMPT_BUDGET_MS = 10_000;
/** A claimed delivery is its worker's for this long: an attempt, and half as much again for writing it down. */
export const LEASE_MS = 15_000;
/**
 * A lease that has run out is looked at for this long before it is taken away. A living worker ends its attempt within that time by a clock that never jumps,
 * so a jump of the database's clock takes no delivery out of its hands.
 */
export const LEASE_GRACE_MS = 12_000;
/** A delivery that kills its workers does not go on for ever. */
export const MAX_LEASE_LOSSES = 10;
/** From so many failures in a row on an endpoint gets one attempt at a time, until one succeeds; it is never switched off by itself. */
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

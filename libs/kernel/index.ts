export { ageMs, type Clock, Deadline, HOST_CLOCKS_DIFFER_MS, isDay, orStopped, SandboxClock, systemClock, timestamp, within } from './clock.js';
export { type Decider, fold, unreachable } from './decider.js';
export { AuthenticationError, type ErrorCode, internalError, ServiceError, STATUS_OF } from './errors.js';
export { FairShare, type FairShareLimits, type Lane, LANES, type SlotRequest } from './fair-share.js';
export { type Ids, isUuid } from './ids.js';
export { canonicalJson, type Json } from './json.js';
export { type Cents, decimal, isCents, MAX_AMOUNT_CENTS, proRata, sumCents } from './money.js';
export { type Box, CLOSED, inClear, isBox, isSamePersonal, keysIn, type Personal, type Reveal } from './personal.js';
export { parseUrl } from './url.js';

export { type Chosen, type EraseRequest, erase, type ErasureAnswer, type ErasurePlan, hashOfMail, type PrivacyPorts, type Skipped } from './erase.js';
export { ERASURE_STREAMS, erasureEvents, erasureIdOf, erasureStream, MAX_SUBJECTS, REASON_CODES, type ReasonCode } from './erasure.js';
export { erasureFiles, readErasures } from './erasure-files.js';
export { erasureModel } from './erasures.js';
export { mailMac, ofMail, paymentsOfMail, personalUseModel } from './personal-use.js';
export { refuseRevivedKeys, type Replayed, replayErasures, type ReplayRequest } from './replay.js';
export { countOverdue, createRetention, MAX_COUNTED, type Retention } from './retention.js';

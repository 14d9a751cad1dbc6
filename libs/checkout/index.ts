export { MAX_ADDRESS_LENGTH, vetAddress } from './addresses.js';
export { Capabilities } from './capability.js';
export {
  checkout,
  type CheckoutContent,
  type CheckoutPayer,
  codeFor,
  type IntakeKind,
  type KnownCheckout,
  mayLeave,
  type View,
  viewOf,
} from './checkout.js';
export { type IntakeContent, type IntakeOutcome, takeIn } from './intake.js';
export { checkoutIntakeMigration, type IntakeRow, type IntakeRows, keyOfContent, MAX_CONTENT_BYTES, postgresIntakeRows } from './intake-rows.js';
export { assetNamed, assetsFor } from './pages/assets.js';
export type { Frame, Proof } from './pages/layout.js';
export {
  AttemptsUsedUp,
  Cancelled,
  CannotStart,
  Expired,
  Leave,
  Left,
  PaidBefore,
  Receipt,
  Refused,
  type RefusedRequest,
  Waiting,
} from './pages/outcome.js';
export { type Notice, Pay, type PayField, type PayPage } from './pages/pay.js';
export { render } from './pages/render.js';
export { type FieldFault, localeOf } from './pages/text.js';
export { type CheckoutPorts, followNow, pay, paymentOf, quoteOf } from './pay.js';
export { CHECKOUT_STREAMS, checkoutEvents, checkoutIdOf, CheckoutSessions, type Session } from './sessions.js';
export { signedAddress } from './signature.js';
export {
  applyUnfinished,
  checkoutUnfinishedModel,
  finishSessions,
  postgresUnfinishedRows,
  type UnfinishedPlace,
  type UnfinishedRows,
  type UnfinishedSession,
  unfinishedSessions,
} from './unfinished.js';
export { cancelAddress, cancellationOf, isAllowedNow, returnAddress } from './way-back.js';

/**
 * The error catalogue (specification, section "Errors"). A {@link ServiceError} tells the caller why a request failed. A fault of our own is a plain
 * `Error`, which the HTTP edge answers as INTERNAL_ERROR.
 */

/** Each error code with its HTTP status. */
export const STATUS_OF = {
  VALIDATION_ERROR: 400,
  PAYMENT_DECLINED: 402,
  PAYMENT_BLOCKED: 403,
  PORTAL_ACCESS_DENIED: 403,
  PAYMENT_NOT_FOUND: 404,
  PAYMENT_HELD: 409,
  DECLINE_BLOCKED: 409,
  IDEMPOTENCY_MISMATCH: 409,
  IDEMPOTENCY_IN_PROGRESS: 409,
  IDEMPOTENCY_RECONCILIATION_REQUIRED: 409,
  PAYMENT_NOT_ALLOWED: 422,
  INVALID_STATE: 422,
  VOID_FAILED: 422,
  VELOCITY_LIMIT: 429,
  RATE_LIMITED: 429,
  INTERNAL_ERROR: 500,
  CAPTURE_NOT_SUPPORTED: 501,
  VAULT_NOT_SUPPORTED: 501,
  PAYMENT_GATEWAY_ERROR: 502,
  PARTIAL_REFUND_PENDING: 502,
  GATEWAY_NOT_CONFIGURED: 503,
  IDEMPOTENCY_UNAVAILABLE: 503,
  PAYMENT_TIMEOUT: 504,
} as const;

export type ErrorCode = keyof typeof STATUS_OF;

/** A refusal that is sent to the caller. `details`: further fields of the answer. `retryAfterSeconds`: the answer's `Retry-After` header. */
export class ServiceError extends Error {
  constructor(
    readonly code: ErrorCode,
    message: string,
    readonly details: Readonly<Record<string, unknown>> = {},
    readonly options: { readonly retryAfterSeconds?: number; readonly status?: number } = {},
  ) {
    super(message);
    this.name = 'ServiceError';
  }

  /** The HTTP status. A refusal of the transport is a VALIDATION_ERROR with a status of its own (C65). */
  get status(): number {
    return this.options.status ?? STATUS_OF[this.code];
  }
}

/** The answer to a fault of ours. Only the log of the process has the details, under the request id. */
export const internalError = (): ServiceError => new ServiceError('INTERNAL_ERROR', 'An unexpected error occurred.');

/** The refusal while something that a payment needs cannot be written (C19, C77). */
export const nothingBegun = (): ServiceError =>
  new ServiceError(
    'IDEMPOTENCY_UNAVAILABLE',
    'Payments cannot be processed safely at the moment; nothing was charged or refunded by this request.',
    {},
    { retryAfterSeconds: 1 },
  );

/** A failed authentication: 401 or 403. The answer carries only a message (specification, Authentication 5). */
export class AuthenticationError extends Error {
  constructor(
    readonly status: 401 | 403,
    message: string,
  ) {
    super(message);
    this.name = 'AuthenticationError';
  }
}

/**
 * The error catalogue of the specification, section "Errors": a mistake of the caller, or something that could not be done. A fault of our own is a
 * plain `Error` and becomes INTERNAL_ERROR at the edge.
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

/** A refusal for the caller: code, message, further fields of `details`, and seconds for a `Retry-After` header. */
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

  /** HTTP status: the catalogue's, except for transport refusals that share VALIDATION_ERROR (C65). */
  get status(): number {
    return this.options.status ?? STATUS_OF[this.code];
  }
}

/** The caller learns no more than this about a fault of ours. The log has the rest, under the request id. */
export const internalError = (): ServiceError => new ServiceError('INTERNAL_ERROR', 'An unexpected error occurred.');

/** A 401, or a 403 of authentication: carries only a message (specification, Authentication 5). */
export class AuthenticationError extends Error {
  constructor(
    readonly status: 401 | 403,
    message: string,
  ) {
    super(message);
    this.name = 'AuthenticationError';
  }
}

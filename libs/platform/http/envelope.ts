/** The two envelopes (C1), made in one place and as text, so that what is stored for a key is byte for byte what was sent. */
import { AuthenticationError, type ErrorCode, ServiceError } from '#kernel';

/** An answer ready to send. `code`, `final` and `retryAfterSeconds` describe it to those who decide what to keep; they are not sent as such. */
export interface Answer {
  readonly status: number;
  readonly body: string;
  readonly code?: ErrorCode;
  /** A `VOID_FAILED` that no retry can change (C15). */
  readonly final?: boolean;
  readonly retryAfterSeconds?: number;
  readonly replayed?: boolean;
}

export const successAnswer = (data: unknown): Answer => ({ status: 200, body: JSON.stringify({ success: true, data }) });

export const errorAnswer = (error: ServiceError | AuthenticationError): Answer => {
  if (error instanceof AuthenticationError) return { status: error.status, body: JSON.stringify({ success: false, message: error.message }) };
  const { status, code, message, details, options } = error;
  const body = JSON.stringify({ success: false, message, details: { code, ...details } });
  const final = code === 'VOID_FAILED' && details.suggestedAction === 'refund';
  return { status, code, final, body, ...(options.retryAfterSeconds === undefined ? {} : { retryAfterSeconds: options.retryAfterSeconds }) };
};

/** What went wrong inside is in the log, under the request id, and nowhere else. */
export const internalErrorAnswer = (): Answer => errorAnswer(new ServiceError('INTERNAL_ERROR', 'An unexpected error occurred.'));

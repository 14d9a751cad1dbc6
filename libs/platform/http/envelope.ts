/** The two envelopes of an answer (C1). Only this file makes envelopes. They are text, so that every process writes the same bytes. */
import { AuthenticationError, type ErrorCode, internalError, ServiceError } from '#kernel';

/** An answer to send. `replayed` and `retryAfterSeconds` become headers. */
export interface Answer {
  readonly status: number;
  readonly body: string;
  readonly retryAfterSeconds?: number;
  readonly replayed?: boolean;
}

export const successAnswer = (data: unknown, message?: string): Answer => ({ status: 200, body: JSON.stringify({ success: true, data, message }) });

export const errorAnswer = (error: ServiceError | AuthenticationError): Answer => {
  if (error instanceof AuthenticationError) return { status: error.status, body: JSON.stringify({ success: false, message: error.message }) };
  const { status, code, message, details, options } = error;
  const body = JSON.stringify({ success: false, message, details: { code, ...details } });
  return { status, body, ...(options.retryAfterSeconds === undefined ? {} : { retryAfterSeconds: options.retryAfterSeconds }) };
};

/** The error code in an answer that this file made. null: a success, or a failed authentication, which has no code. */
export const codeOf = ({ body }: Pick<Answer, 'body'>): string | null =>
  (JSON.parse(body) as { readonly details?: { readonly code?: string } }).details?.code ?? null;

export const internalErrorAnswer = (): Answer => errorAnswer(internalError());

/** Reads the data of an answer that this file made earlier. If the answer is a refusal, throws it as a ServiceError. */
export const openAnswer = <Data>({ body }: Pick<Answer, 'body'>): Data => {
  const answer = JSON.parse(body) as
    | { readonly success: true; readonly data: Data }
    | { readonly success: false; readonly message: string; readonly details: { readonly code: ErrorCode } };
  if (answer.success) return answer.data;
  const { code, ...details } = answer.details;
  throw new ServiceError(code, answer.message, details);
};

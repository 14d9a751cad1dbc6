/** The only exception filter. It answers every error in the envelope of C1, without internal causes. */
import { type ArgumentsHost, Catch, type ExceptionFilter, HttpException, NotFoundException } from '@nestjs/common';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { AuthenticationError, nothingBegun, ServiceError } from '#kernel';
import type { Logger } from '../logging.js';
import { isReadOnly } from '../postgres/errors.js';
import { type Answer, codeOf, errorAnswer, internalErrorAnswer } from './envelope.js';

export const JSON_TYPE = 'application/json; charset=utf-8';

/** The error code of each reply with an error envelope, for metrics. null: the envelope has no code. */
const codes = new WeakMap<FastifyReply, string | null>();

/** undefined: the reply is no error envelope. */
export const errorCodeOf = (reply: FastifyReply): string | null | undefined => codes.get(reply);

export const sendAnswer = (reply: FastifyReply, answer: Answer): void => {
  if (answer.status >= 400) codes.set(reply, codeOf(answer));
  void reply.status(answer.status).header('content-type', JSON_TYPE);
  if (answer.replayed) void reply.header('idempotent-replayed', 'true');
  if (answer.retryAfterSeconds !== undefined) void reply.header('retry-after', String(answer.retryAfterSeconds));
  void reply.send(answer.body);
};

/** Maps any thrown value to an answer. Logs an error that the caller did not cause, with the fields that logging.ts allows. */
export const answerFor = (error: unknown, log: Logger, requestId: string): Answer => {
  if (error instanceof ServiceError || error instanceof AuthenticationError) return errorAnswer(error);
  const transport = transportError(error);
  if (transport) return errorAnswer(transport);
  if (isReadOnly(error)) {
    log.warn({ requestId, err: error }, 'a request was refused: the database takes no writes');
    return errorAnswer(nothingBegun());
  }
  log.error({ requestId, err: error }, 'a request failed inside');
  return internalErrorAnswer();
};

/** Converts a refusal of the framework into a ServiceError with its HTTP status (C65). null: the error is not a refusal. */
const transportError = (error: unknown): ServiceError | null => {
  const { statusCode, code } = error as { statusCode?: number; code?: string };
  const status = error instanceof HttpException ? error.getStatus() : statusCode;
  if (status === 404 || code === 'FST_ERR_BAD_URL') return new ServiceError('VALIDATION_ERROR', 'There is no such path.', {}, { status: 404 });
  if (status === 408) return new ServiceError('VALIDATION_ERROR', 'The request took too long to arrive.', {}, { status: 408 });
  if (status !== undefined && status >= 400 && status < 500)
    return new ServiceError('VALIDATION_ERROR', 'The request cannot be read.', {}, { status: status === 415 ? 400 : status });
  return null;
};

@Catch()
export class ErrorsFilter implements ExceptionFilter {
  /**
   * `routes`: all routes, so that a known path with another method answers 405. `challenge`: the `WWW-Authenticate` header of a 401. `pages`: error
   * pages for paths that people open in a browser.
   */
  constructor(
    private readonly log: Logger,
    private readonly routes: readonly Route[],
    private readonly challenge: string,
    private readonly pages: ErrorPages | null = null,
  ) {}

  catch(error: unknown, host: ArgumentsHost): void {
    const http = host.switchToHttp();
    const request = http.getRequest<FastifyRequest>();
    const reply = http.getResponse<FastifyReply>();
    // Fastify refuses QUERY without a content type before it looks for a route. No route has this method.
    const noRoute = request.method === 'QUERY' || (error instanceof HttpException && error.getStatus() === 404);
    if (noRoute) {
      const allowed = allowedMethods(this.routes, request.url.split('?')[0]!);
      if (allowed.length > 0) {
        void reply.header('allow', allowed.join(', '));
        if (this.pages?.covers(request, 405)) return this.pages.send(request, reply, 405);
        sendAnswer(reply, errorAnswer(new ServiceError('VALIDATION_ERROR', `This path allows ${allowed.join(', ')} only.`, {}, { status: 405 })));
        return;
      }
    }
    const answer = answerFor(noRoute ? new NotFoundException() : error, this.log, String(request.id));
    if (this.pages?.covers(request, answer.status)) return this.pages.send(request, reply, answer.status);
    if (answer.status === 401) void reply.header('www-authenticate', this.challenge);
    sendAnswer(reply, answer);
  }
}

/** Answers a browser with an error page instead of the envelope, with the same status. */
export interface ErrorPages {
  covers(request: FastifyRequest, status: number): boolean;
  send(request: FastifyRequest, reply: FastifyReply, status: number): void;
}

export interface Route {
  readonly method: string;
  readonly url: string;
}

/** Methods that the routes allow for a path. Empty: there is no such path. */
const allowedMethods = (routes: readonly Route[], path: string): string[] =>
  [...new Set(routes.filter(({ url }) => matches(url, path)).map(({ method }) => method))].sort();

const matches = (pattern: string, path: string): boolean => {
  const parts = pattern.split('/');
  const given = path.split('/');
  return parts.length === given.length && parts.every((part, index) => (part.startsWith(':') ? given[index] !== '' : part === given[index]));
};

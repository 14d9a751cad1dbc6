/** Sends pages in the right language, colours and status, and the refusals that every route may need. */
import { Inject, Injectable } from '@nestjs/common';
import type { FastifyReply, FastifyRequest } from 'fastify';
import type { Portal } from '#accounts';
import { assetsFor, CannotStart, type CheckoutContent, type Frame, localeOf, Refused, type RefusedRequest, render } from '#checkout';
import { type ErrorCode, ServiceError, STATUS_OF } from '#kernel';
import { holdsCardNumber } from '#platform';
import { CHECKOUT_SERVICES, type CheckoutServices, INTAKE_PATH, redirect, sendPage } from './http.js';
import { clientAddress } from './rate-limits.js';

const STATUS: Readonly<Record<RefusedRequest, number>> = {
  notFound: 404,
  otherBrowser: 403,
  notFromHere: 403,
  tooMany: 429,
  unavailable: 503,
  failedInside: 500,
};
/** After this time a payer may try again (C76). */
const UNAVAILABLE_RETRY_SECONDS = 60;
/** The path of a session's page, or a path below it. */
const SESSION_PATH = /^\/checkout\/(cs_[\w-]{32})(?:[/?]|$)/;
/** The form of a request id. */
const REFERENCE = /^[\w.:-]{1,64}$/;

/** The seconds to wait, if the error says that an account has too many requests waiting. Otherwise null. */
export const retryAfterOf = (error: unknown): number | null =>
  error instanceof ServiceError && error.code === 'RATE_LIMITED' ? (error.options.retryAfterSeconds ?? 1) : null;

@Injectable()
export class PayerPages {
  constructor(@Inject(CHECKOUT_SERVICES) private readonly services: CheckoutServices) {}

  /** The values that all pages of a portal share. The language is the partner's choice, else the portal's, else the browser's. */
  frame(request: FastifyRequest, portal: Portal | null, content: CheckoutContent | null = null): Frame {
    return {
      locale: localeOf(content?.locale, portal?.checkout.locale, request.headers['accept-language']),
      agency: portal ? (portal.checkout.agencyName ?? portal.name) : null,
      sandbox: this.services.sandbox,
      assets: assetsFor(portal?.checkout.colour ?? null),
    };
  }

  refuse(request: FastifyRequest, reply: FastifyReply, what: RefusedRequest, portal: Portal | null = null, status = STATUS[what]): void {
    // After a fault of ours or a refused form, the page links to the session's page. Only that page knows whether the payment was made.
    const checkoutId = what === 'failedInside' || what === 'notFromHere' ? (SESSION_PATH.exec(request.url)?.[1] ?? null) : null;
    sendPage(reply, status, render(Refused({ frame: this.frame(request, portal), what, reference: String(request.id), checkoutId })));
  }

  /** The path of the error page, for a refused intake without a usable `cancel_url`. */
  errorPath(code: ErrorCode, request: FastifyRequest): string {
    return `/checkout/error?code=${code}&ref=${encodeURIComponent(String(request.id))}`;
  }

  /** Shows the error page. Anybody can write its query, so the page repeats only a known error code and a well-formed request id. */
  cannotStart(request: FastifyRequest, reply: FastifyReply, code: string | undefined, reference: string | undefined): void {
    const known = code !== undefined && Object.hasOwn(STATUS_OF, code) ? (code as ErrorCode) : 'VALIDATION_ERROR';
    const shown = reference !== undefined && REFERENCE.test(reference) && !holdsCardNumber(reference) ? reference : null;
    sendPage(reply, 200, render(CannotStart({ frame: this.frame(request, null), code: known, reference: shown })));
  }

  /** The address for which the request counts. */
  address(request: FastifyRequest): string {
    const forwarded = request.headers['x-forwarded-for'];
    return clientAddress(request.socket.remoteAddress ?? '', Array.isArray(forwarded) ? forwarded.join(',') : forwarded, this.services.proxyHops);
  }

  /** The answer to a request that reached a rate limit (C65). */
  tooMany(request: FastifyRequest, reply: FastifyReply, retryAfterSeconds: number): void {
    void reply.header('retry-after', String(retryAfterSeconds));
    this.refuse(request, reply, 'tooMany');
  }

  /**
   * Answers a payer if the HTTP layer refuses the request or the service has a fault. The payer gets a page, and not the error envelope of the API.
   */
  failed(request: FastifyRequest, reply: FastifyReply, status: number): void {
    if (status === STATUS.unavailable) {
      void reply.header('retry-after', String(UNAVAILABLE_RETRY_SECONDS));
      return this.refuse(request, reply, 'unavailable');
    }
    const code: ErrorCode = status >= 500 ? 'INTERNAL_ERROR' : 'VALIDATION_ERROR';
    if (request.url.startsWith(INTAKE_PATH)) return redirect(reply, this.errorPath(code, request));
    this.refuse(request, reply, status >= 500 ? 'failedInside' : 'notFound', null, status);
  }
}

/** Reads a partner's request in the order E1 to E6: authentication, bytes, strict JSON, key, fields. Sends the answer as bytes. */
import {
  applyDecorators,
  type CanActivate,
  createParamDecorator,
  type ExecutionContext,
  HttpCode,
  Inject,
  Injectable,
  UseGuards,
} from '@nestjs/common';
import { ApiBody, ApiHeader, ApiResponse, ApiSecurity } from '@nestjs/swagger';
import type { FastifyReply } from 'fastify';
import { authenticate, type AuthenticationDeps, type Caller } from '#accounts';
import { AUTHENTICATION } from '#accounts/module';
import { canonicalJson } from '#kernel';
import { idempotencyUnavailable, keyUnreadable, type Received, type RequestText } from '#payments';
import { Convoy, DatabaseUnavailable, type Slot, type Slots } from '#platform';
import {
  type Fault,
  headerLines,
  IDEMPOTENCY_KEY_PATTERN,
  idempotencyKeyOf,
  MAX_KEY_LENGTH,
  type JsonObject,
  parseStrictJson,
  receiveBody,
  receivedBody,
  refuseOtherContentTypes,
  validationError,
} from '#platform/http';
import { LIST_SLOTS, SLOTS, takeSlot, type WithSlot } from '../slots.js';
import { FAILURES } from './examples.js';
import { type ENVELOPES, ErrorEnvelope } from './resources.js';

const LIST_ROUTE = '/api/partner/v1/payments';

export type AuthenticatedRequest = WithSlot & { caller?: Caller };

@Injectable()
export class AuthGuard implements CanActivate {
  constructor(
    @Inject(AUTHENTICATION) private readonly deps: AuthenticationDeps,
    @Inject(Convoy) private readonly convoy: Convoy,
    @Inject(SLOTS) private readonly slots: Slots,
  ) {}

  async canActivate(context: ExecutionContext): Promise<boolean> {
    const request = context.switchToHttp().getRequest<AuthenticatedRequest>();
    try {
      request.caller = await authenticate(headerLines(request.raw.rawHeaders, 'authorization'), this.deps);
    } catch (error) {
      // If the directory cannot be read, the idempotency keys probably cannot be read either. For a request with a key, a plain 500 would mean that
      // work may have begun (C16, C19).
      if (error instanceof DatabaseUnavailable && headerLines(request.raw.rawHeaders, 'idempotency-key').length > 0) throw idempotencyUnavailable();
      if (error instanceof DatabaseUnavailable && Object.hasOwn(request.query as object, 'idempotencyKey')) throw keyUnreadable();
      throw error;
    }
    const reply = context.switchToHttp().getResponse<FastifyReply>();
    // A body that arrives slowly must hold no slot.
    await receiveBody(request, reply);
    // Only authenticated callers take slots and enter the convoy. Other callers must not make their requests wait.
    const { slots } = this;
    const convoy = request.method === 'POST' ? this.convoy : null;
    const isList = request.method === 'GET' && request.routeOptions.url === LIST_ROUTE;
    await takeSlot({ slots, convoy }, request, reply, request.caller.accountId, 'partner', isList ? LIST_SLOTS : 1);
    return true;
  }
}

/** The authenticated caller. */
export const CallerOf = createParamDecorator(
  (_: unknown, context: ExecutionContext): Caller => context.switchToHttp().getRequest<AuthenticatedRequest>().caller!,
);

/**
 * A partner's request. Its key is bound to method, path and canonical body (C13). Ids in the path are in lower case, because an id in upper case
 * names the same payment.
 */
export interface PartnerRequest extends RequestText {
  readonly body: JsonObject;
  /** The faults by rules that are younger than the rows of keys. They are refused after the look at the key (E7, C63). */
  readonly later: Fault[];
  readonly idempotencyKey: string | null;
  readonly requestId: string;
  readonly slot: Slot | undefined;
}

interface BodyRules {
  readonly emptyIsObject?: boolean;
  /** For some fields, a value that means the same as an absent field. It does not enter the text of the key (C13). */
  readonly neutral?: Readonly<Record<string, string>>;
}

/** Reads the body as a JSON object (E3), then checks the syntax of `Idempotency-Key` (E4). */
export const RequestOf = createParamDecorator(({ emptyIsObject = false, neutral = {} }: BodyRules, context: ExecutionContext): PartnerRequest => {
  const request = context.switchToHttp().getRequest<AuthenticatedRequest>();
  const bytes = receivedBody(request);
  refuseOtherContentTypes(request.headers['content-type'], request.headers['content-encoding'], bytes);
  const later: Fault[] = [];
  const body = parseStrictJson(bytes, { emptyIsObject, later });
  return {
    body,
    later,
    idempotencyKey: idempotencyKeyOf(request.raw.rawHeaders),
    ...requestText(
      request.method,
      request.url.split('?')[0]!.toLowerCase(),
      Object.fromEntries(Object.entries(body).filter(([name, value]) => !Object.hasOwn(neutral, name) || neutral[name] !== value)),
    ),
    requestId: String(request.id),
    slot: request.slot,
  };
});

/**
 * The texts to which an idempotency key is bound (C13). `fingerprintText` holds the whole card number, `loggedText` only its last four digits.
 * Neither holds the cvv. Both texts are used only as input of keyed hashes.
 */
export const requestText = (method: string, path: string, body: JsonObject): RequestText => {
  const textOf = (canonical: JsonObject) => `${method}\n${path}\n${canonicalJson(canonical)}`;
  const { paymentMethod } = body;
  if (paymentMethod === null || typeof paymentMethod !== 'object') {
    const text = textOf(body);
    return { fingerprintText: text, loggedText: text };
  }
  const { cvv: _, cardNumber, ...instrument } = paymentMethod as JsonObject;
  const digits = typeof cardNumber === 'string' ? cardNumber.replaceAll(' ', '') : cardNumber;
  const withCard = (shown: unknown) => textOf({ ...body, paymentMethod: shown === undefined ? instrument : { ...instrument, cardNumber: shown } });
  return { fingerprintText: withCard(digits), loggedText: withCard(typeof digits === 'string' ? digits.slice(-CARD_DIGITS_IN_LOG) : undefined) };
};

/** PCI DSS 3.4.1 allows anybody to see the last four digits. */
const CARD_DIGITS_IN_LOG = 4;

/** The parts of the request that the idempotent commands need. Called after the fields are checked. */
export const receivedOf = ({ idempotencyKey, fingerprintText, loggedText, requestId, slot, later }: PartnerRequest): Received => ({
  idempotencyKey,
  fingerprintText,
  loggedText,
  requestId,
  ...(slot && { slot }),
  ...(later.length > 0 && { refusal: validationError(later) }),
});

/** The guard of all partner endpoints, and its documentation. */
export const Partner = (): MethodDecorator & ClassDecorator =>
  applyDecorators(UseGuards(AuthGuard), ApiSecurity('apiKey'), ApiSecurity('accessToken'));

const header = (description: string, schema: object = { type: 'string' }) => ({ description, schema });
const HEADERS = {
  'X-Request-Id': header('Names this request in our log; yours, where you sent one.'),
  'WWW-Authenticate': header('The schemes of credentials that are accepted.'),
  'Retry-After': header('Seconds to wait before the same request is sent again.', { type: 'integer', minimum: 1 }),
  'Idempotent-Replayed': header('`true`. Sent if this is the answer of an earlier request with the same key. Otherwise absent.'),
  'Ledger-Position': header('End of the log when the request arrived.'),
  'Ledger-Lag': header('`0`: the page shows everything that had happened when the request arrived. `unknown`: something may be missing.'),
} as const;
type Header = keyof typeof HEADERS;

/** The documented headers of an answer with this status. */
const headersOf = (status: number, keyed: boolean, more: readonly Header[] = []) => {
  const names: Header[] = ['X-Request-Id', ...more];
  if (status === 401) names.push('WWW-Authenticate');
  if (status === 409 || status === 429 || status === 503) names.push('Retry-After');
  if (keyed && (status === 200 || status === 402 || status === 422)) names.push('Idempotent-Replayed');
  return Object.fromEntries(names.map((name) => [name, HEADERS[name]]));
};

interface EndpointDocs {
  readonly result?: keyof typeof ENVELOPES;
  /** Headers of a successful answer. */
  readonly headers?: readonly Header[];
  readonly errors: readonly number[];
  readonly body?: new () => object;
  readonly keyed?: boolean;
}

/**
 * Documents an endpoint's answers: the success envelope, and each error status with the error envelope. Every success is a 200, also for a POST
 * (C71).
 */
export const Answers = ({ result, headers, errors, body, keyed = false }: EndpointDocs): MethodDecorator =>
  applyDecorators(
    HttpCode(200),
    ...(result
      ? [
          ApiResponse({
            status: 200,
            description: 'Done.',
            schema: { $ref: `#/components/schemas/${result}` },
            headers: headersOf(200, keyed, headers),
          }),
        ]
      : []),
    ...[...new Set([...errors, 400, 401, 403, 408, 413, 431, 500, 503])].sort().map((status) => {
      const { description, example } = FAILURES[status]!;
      return ApiResponse({ status, description, example, type: ErrorEnvelope, headers: headersOf(status, keyed) });
    }),
    ...(body ? [ApiBody({ type: body, required: !keyed || body.name === 'CreatePaymentRequest' })] : []),
    ...(keyed
      ? [
          ApiHeader({
            name: 'Idempotency-Key',
            required: false,
            description:
              'Send one with every request, and the same one when you send the request again. Then it is executed once. Without a key, a create that is sent again charges again. Kept for 24 hours.',
            schema: { type: 'string', minLength: 1, maxLength: MAX_KEY_LENGTH, pattern: IDEMPOTENCY_KEY_PATTERN },
          }),
        ]
      : []),
  );

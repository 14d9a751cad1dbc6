/**
 * Intake of hosted checkout (specification, Hosted checkout): a form, JSON, or a signed link. The answer is a 303 to the session, to `cancel_url` or
 * to the error page. A rate limit or an incident gives another status.
 */
import { Controller, Get, Inject, Post, Req, Res } from '@nestjs/common';
import { CommandBus } from '@nestjs/cqrs';
import { ApiBody, ApiOperation, ApiResponse, ApiTags } from '@nestjs/swagger';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { Capabilities, type IntakeKind, type IntakeOutcome } from '#checkout';
import { StartCheckout } from '#checkout/module';
import { StoreIncident } from '#eventstore';
import { ServiceError } from '#kernel';
import { storeIncident } from '#payments';
import {
  announcedBytes,
  type Fault,
  parseForm,
  parseFormBody,
  parseStrictJson,
  receiveBody,
  receivedBody,
  RepeatedParameter,
  validationError,
} from '#platform/http';
import { CHECKOUT_SERVICES, type CheckoutServices, INTAKE_PATH, isForm, isJson, LINK_PATH, redirect, setCookie } from './http.js';
import { takeSlot } from '../slots.js';
import { PayerPages, retryAfterOf } from './pages.js';
import { intakeContentOf, IntakeRequest, pairsOf } from './requests.js';

const Redirects = (what: string) =>
  ApiResponse({
    status: 303,
    description: `${what} On failure to \`cancel_url\` with \`result=failed&error=CODE\`, signed; to an error page of this service where \`portal_id\` or \`cancel_url\` is not good. The body names what was wrong.`,
    headers: { Location: { schema: { type: 'string', format: 'uri-reference' } } },
  });

const TooMany = ApiResponse({
  status: 429,
  description: 'Too many intakes from this address, or too many waiting requests of the owner of the portal. The body is a page.',
  content: { 'text/html': { schema: { type: 'string' } } },
  headers: { 'Retry-After': { description: 'Seconds.', schema: { type: 'integer' } } },
});

@ApiTags('Hosted checkout')
@Controller()
export class IntakeController {
  private readonly capabilities: Capabilities;

  constructor(
    @Inject(CHECKOUT_SERVICES) private readonly services: CheckoutServices,
    @Inject(PayerPages) private readonly pages: PayerPages,
    @Inject(CommandBus) private readonly commands: CommandBus,
  ) {
    this.capabilities = new Capabilities(services.keys);
  }

  @Post(INTAKE_PATH)
  @ApiOperation({
    summary: 'Start a checkout from the partner’s server',
    operationId: 'startCheckout',
    description:
      'Do not follow the redirect: hand its `Location` to the payer. A browser may post the same fields as a form (docs/checkout.md). Needs no API key: the settings of the portal authorise it.',
  })
  // Only JSON is documented. With two media types, generators of clients choose the form or fail.
  @ApiBody({ type: IntakeRequest })
  @Redirects('To the checkout page.')
  @TooMany
  async start(@Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const json = isJson(request);
    await this.answer(json ? 'json' : 'form', request, reply, () => {
      if (json) {
        const later: Fault[] = [];
        const fields = parseStrictJson(receivedBody(request), { later });
        return { ...pairsAndFields(fields), later };
      }
      if (!isForm(request)) throw new ServiceError('VALIDATION_ERROR', 'The body must be a form (application/x-www-form-urlencoded) or JSON.');
      return pairsAndFields(Object.fromEntries(parseFormBody(receivedBody(request))));
    });
  }

  @Get(LINK_PATH)
  @ApiOperation({
    summary: 'Start a checkout from a signed launch link',
    operationId: 'startCheckoutByLink',
    description:
      'The parameters of `POST /api/v1/payer/intake` as a query, with `exp`, `nonce` and `sig`. A link starts one checkout: opened again, it resumes that checkout, or shows that it is paid.',
  })
  @Redirects('To the checkout page, or to the page that says that it is paid.')
  @TooMany
  async link(@Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    await this.answer('link', request, reply, () => {
      const at = request.url.indexOf('?');
      return pairsAndFields(Object.fromEntries(parseForm(at < 0 ? '' : request.url.slice(at + 1))));
    });
  }

  private async answer(kind: IntakeKind, request: FastifyRequest, reply: FastifyReply, read: () => PairsAndFields): Promise<void> {
    const { publicUrl, limits } = this.services;
    const from = this.pages.address(request);
    const bytes = announcedBytes(request.raw);
    const seconds = limits.admit(from, bytes);
    if (seconds !== null) return this.pages.tooMany(request, reply, seconds);
    // Only now: a flood of large intakes must not cost the service their bodies.
    await receiveBody(request, reply, { isStranger: true });
    let received: PairsAndFields;
    let fault: ServiceError | null = null;
    try {
      received = read();
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      // A parameter was sent twice. If `cancel_url` is still known, the refusal leads there.
      if (!(error instanceof RepeatedParameter))
        return this.send(request, reply, kind, { to: 'error_page', code: error.code, message: error.message });
      received = pairsAndFields(Object.fromEntries(error.others));
      fault = error;
    }
    const { pairs, fields } = received;
    const admitUnsigned = (portalId: string) => limits.admitAt(from, portalId, 'unsigned intake', bytes);
    const address = publicUrl + (kind === 'link' ? LINK_PATH : INTAKE_PATH);
    const by = { actor: { type: 'payer' as const, id: 'intake' }, correlationId: String(request.id) };
    const content = () => {
      if (fault) throw fault;
      // The rule is younger than checkouts that a nonce resumes.
      if (received.later?.length) throw validationError(received.later);
      return intakeContentOf(kind, fields);
    };
    const admit = (accountId: string) => takeSlot(this.services, request, reply, accountId, 'payer');
    let outcome: IntakeOutcome;
    try {
      outcome = await this.commands.execute(new StartCheckout({ kind, address, pairs, content, admit, admitUnsigned }, by));
    } catch (error) {
      const seconds = retryAfterOf(error);
      if (seconds !== null) return this.pages.tooMany(request, reply, seconds);
      throw error instanceof StoreIncident ? storeIncident() : error;
    }
    this.send(request, reply, kind, outcome);
  }

  private send(request: FastifyRequest, reply: FastifyReply, kind: IntakeKind, outcome: IntakeOutcome): void {
    const { ports, publicUrl } = this.services;
    const { log, ids } = ports.payments;
    if (outcome.to === 'session') {
      const { checkoutId, checkout } = outcome.session;
      if (outcome.bound) setCookie(reply, publicUrl, checkoutId, this.capabilities.cookie(checkoutId, ids.uuid()));
      const path = `/checkout/${checkoutId}${checkout.phase === 'paid' ? '/paid' : ''}`;
      // A server needs the full address. A browser stays on the host that it used.
      return redirect(reply, kind === 'json' ? publicUrl + path : path);
    }
    if (outcome.to === 'too_many') return this.pages.tooMany(request, reply, outcome.retryAfterSeconds);
    const { code, message } = outcome;
    log.info({ requestId: String(request.id), code, message, to: outcome.to }, 'an intake was refused');
    const location = outcome.to === 'cancel_url' ? outcome.location : this.pages.errorPath(code, request);
    redirect(reply, location, `${code}: ${message}\n`);
  }
}

interface PairsAndFields {
  readonly pairs: ReadonlyMap<string, string>;
  readonly fields: Record<string, unknown>;
  readonly later?: readonly Fault[];
}

const pairsAndFields = (fields: Record<string, unknown>): PairsAndFields => ({ pairs: pairsOf(fields), fields });

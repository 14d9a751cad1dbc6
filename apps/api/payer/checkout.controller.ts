/** The pages of a checkout. Every route first reads the present state of the session. So the Back button or a second tab shows the right page. */
import { Controller, Get, HttpCode, Inject, Param, Post, Query, Req, Res, UseGuards } from '@nestjs/common';
import { CommandBus } from '@nestjs/cqrs';
import { ApiExcludeController } from '@nestjs/swagger';
import type { FastifyReply, FastifyRequest } from 'fastify';
import type { Portal } from '#accounts';
import {
  assetNamed,
  AttemptsUsedUp,
  cancelAddress,
  cancellationOf,
  Cancelled,
  Capabilities,
  codeFor,
  Expired,
  type Frame,
  isAllowedNow,
  Leave,
  Left,
  mayLeave,
  type Notice,
  PaidBefore,
  Pay,
  type PayPage,
  paymentOf,
  type Proof,
  quoteOf,
  Receipt,
  render,
  returnAddress,
  type Session,
  type View,
  viewOf,
  Waiting,
} from '#checkout';
import { ChangeCheckout, FollowCheckout, PayCheckout } from '#checkout/module';
import { Conflict, type Origin, ReadOnly, StoreIncident } from '#eventstore';
import { isUuid, ServiceError } from '#kernel';
import { type PaymentView, storeIncident } from '#payments';
import { bodyGuard, parseFormBody, receivedBody } from '#platform/http';
import { CHECKOUT_SERVICES, type CheckoutServices, cookiesOf, isForm, isFromOurPage, redirect, sendPage, setCookie } from './http.js';
import { takeSlot, type WithSlot } from '../slots.js';
import { PayerPages, retryAfterOf } from './pages.js';
import { payerIpOf } from './payer-ip.js';
import { payFormOf, type PayForm } from './requests.js';

/** The name of a file holds its hash, so browsers may keep the file for ever. */
const ASSET_CACHE = 'public, max-age=31536000, immutable';

/** A session, its portal, and whether this browser may act in it. */
interface Visit {
  readonly session: Session;
  readonly portal: Portal;
  /** The cookie of this session. null: the browser has none. */
  readonly cookie: string | null;
  readonly view: View;
  readonly frame: Frame;
}
type Bound = Visit & { readonly cookie: string };

@ApiExcludeController()
@UseGuards(bodyGuard)
@Controller('checkout')
export class CheckoutController {
  private readonly capabilities: Capabilities;

  constructor(
    @Inject(CHECKOUT_SERVICES) private readonly services: CheckoutServices,
    @Inject(PayerPages) private readonly pages: PayerPages,
    @Inject(CommandBus) private readonly commands: CommandBus,
  ) {
    this.capabilities = new Capabilities(services.keys);
  }

  @Get('error')
  error(@Query() query: Record<string, string | undefined>, @Req() request: FastifyRequest, @Res() reply: FastifyReply): void {
    this.pages.cannotStart(request, reply, query.code, query.ref);
  }

  @Get('assets/:name')
  asset(@Param('name') name: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): void {
    const asset = assetNamed(name);
    if (!asset) return this.pages.refuse(request, reply, 'notFound');
    void reply.header('content-type', asset.type).header('cache-control', ASSET_CACHE).send(asset.body);
  }

  @Get(':id')
  async page(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    let visit = await this.visit(id, request, reply);
    if (!visit) return;
    if (visit.view === 'pay') this.refuseInIncident();
    // If the partner's server started the session, the first browser that opens the page gets the cookie. If two browsers open the page at once, the
    // first append wins. A HEAD request gets no cookie.
    if (request.method === 'GET' && visit.cookie === null && visit.view === 'pay' && !visit.session.checkout.opened)
      visit = await this.open(visit, request, reply);
    if (!isBound(visit)) return this.showOutsider(visit, request, reply);
    const { frame, session, view } = visit;
    const { checkoutId } = session;
    switch (view) {
      case 'pay':
        return this.showForm(visit, reply, { status: 200, notice: refusedBefore(session) });
      case 'processing':
      case 'receipt':
        return redirect(reply, `/checkout/${checkoutId}/${view}`);
      case 'attempts_used_up':
        return sendPage(reply, 200, render(AttemptsUsedUp({ frame, checkoutId, proof: this.proof(visit) })));
      case 'cancelled':
        return this.showCancelled(visit, reply);
      case 'expired':
        return this.showExpired(visit, reply);
    }
  }

  @Post(':id/pay')
  @HttpCode(303)
  async pay(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    this.refuseInIncident();
    const posted = await this.posted(id, request, reply);
    if (!posted) return;
    const { visit, form } = posted;
    const { session, portal } = visit;
    // If the session is paid, in flight or over, show its present state.
    const { content } = session;
    if (visit.view !== 'pay' || content === null) return this.backToTruth(visit, reply);
    const attemptId = form.get('attempt_id') ?? '';
    if (session.checkout.attemptIds.includes(attemptId)) return this.backToTruth(visit, reply);
    if (!this.isOurForm(visit, form)) return this.showForm(visit, reply, { status: 403, notice: { kind: 'out_of_date' } });
    const { ports, limits } = this.services;
    const from = this.pages.address(request);
    const bytes = Buffer.byteLength(JSON.stringify(content));
    const seconds = limits.admit(from, bytes) ?? limits.admitAt(from, portal.portalId, 'submit', bytes);
    if (seconds !== null) return this.pages.tooMany(request, reply, seconds);
    const read = payFormOf(form, ports.payments.clock.now());
    if (read.instrument === null || Object.keys(read.faults).length > 0) return this.showForm(visit, reply, { status: 422, form: read });
    const { totalCents } = quoteOf(session.checkout.terms, portal);
    if (form.get('quoted_total_cents') !== String(totalCents))
      return this.showForm(visit, reply, { status: 409, form: read, notice: { kind: 'fee_changed' } });
    if (!portal.checkout.enabled)
      return this.showForm(visit, reply, {
        status: 403,
        form: read,
        notice: { kind: 'refused', refusal: { code: 'PORTAL_ACCESS_DENIED', declineCode: null } },
      });
    const { values, instrument } = read;
    const payer = {
      ...content.payer,
      firstName: values.first_name,
      lastName: values.last_name,
      email: values.email,
      zip: values.postal_code,
    };
    const gateway = portal.gateway?.gateway ?? null;
    const { slot } = request as WithSlot;
    const payerIp = payerIpOf(from);
    const paying = {
      attemptId,
      quotedTotalCents: totalCents,
      instrument,
      payer,
      gateway,
      ...(payerIp !== undefined && { payerIp }),
      ...(slot && { slot }),
    };
    let after: Session;
    try {
      after = await this.settled(session, () => this.commands.execute(new PayCheckout(session, paying, by(request, id))));
    } catch (error) {
      const seconds = retryAfterOf(error);
      if (seconds === null) throw error;
      void reply.header('retry-after', String(seconds));
      return this.showForm(visit, reply, {
        status: 429,
        form: read,
        notice: { kind: 'refused', refusal: { code: 'RATE_LIMITED', declineCode: null } },
      });
    }
    this.backToTruth({ ...visit, session: after, view: viewOf(after, ports.payments.clock.now()) }, reply);
  }

  @Post(':id/extend')
  @HttpCode(303)
  async extend(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    this.refuseInIncident();
    const posted = await this.posted(id, request, reply);
    if (!posted) return;
    const { visit, form } = posted;
    if (visit.view !== 'pay' || !this.isOurForm(visit, form)) return redirect(reply, `/checkout/${id}`);
    const { session } = visit;
    const extend = new ChangeCheckout(session, { type: 'Extend' }, by(request, id));
    const { expiresAt } = (await this.settled(session, () => this.commands.execute(extend))).checkout;
    if (request.headers.accept === 'application/json')
      void reply.status(200).header('content-type', 'application/json; charset=utf-8').send(JSON.stringify({ expiresAt }));
    else redirect(reply, `/checkout/${id}`);
  }

  @Get(':id/processing')
  async processing(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const before = await this.visit(id, request, reply);
    if (!before) return;
    if (!isBound(before)) return this.showOutsider(before, request, reply);
    const visit = await this.followed(before, request);
    if (visit.view !== 'processing') return this.backToTruth(visit, reply);
    const { checkout, checkoutId } = visit.session;
    const may = mayLeave(checkout, this.services.ports.payments.clock.now()) && wayBackOf(visit, 'returnUrl') !== null;
    const late = may ? { reference: checkout.attempt.paymentId, proof: this.proof(visit) } : null;
    void reply.header('checkout-stage', late ? 'late' : 'waiting');
    sendPage(reply, 200, render(Waiting({ frame: visit.frame, checkoutId, late })));
  }

  @Get(':id/receipt')
  async receipt(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const visit = await this.visit(id, request, reply);
    if (!visit) return;
    if (!isBound(visit)) return this.showOutsider(visit, request, reply);
    if (visit.view !== 'receipt') return redirect(reply, `/checkout/${id}`);
    this.renewCookie(visit, reply);
    const checkoutId = wayBackOf(visit, 'returnUrl');
    sendPage(reply, 200, render(Receipt({ frame: visit.frame, checkoutId, payment: await this.paymentOf(visit.session) })));
  }

  /** The page for a link whose checkout is already paid. */
  @Get(':id/paid')
  async paidBefore(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const visit = await this.visit(id, request, reply);
    if (!visit) return;
    if (visit.view !== 'receipt') return redirect(reply, `/checkout/${id}`);
    await this.showPaidBefore(visit, reply, true);
  }

  @Get(':id/done')
  async done(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const visit = await this.visit(id, request, reply);
    if (!visit) return;
    if (!isBound(visit)) return this.showOutsider(visit, request, reply);
    const { ports, keys } = this.services;
    const { session, portal } = visit;
    const { content, checkout } = session;
    const result = checkout.phase === 'paid' ? 'paid' : checkout.phase === 'unknown' && checkout.left ? 'unknown' : null;
    // Otherwise the page of the session shows its state, such as the receipt. The waiting page has the form to leave.
    if (content === null || wayBackOf(visit, 'returnUrl') === null || result === null) return redirect(reply, `/checkout/${id}`);
    const signedAtMs = ports.payments.clock.realNow();
    redirect(reply, returnAddress(keys, portal, id, content, result, await this.paymentOf(session), signedAtMs));
  }

  /** The payer goes back without an outcome. */
  @Post(':id/done')
  async leaveUnknown(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const posted = await this.posted(id, request, reply);
    if (!posted) return;
    const visit = await this.followed(posted.visit, request);
    const { session } = visit;
    const may = mayLeave(session.checkout, this.services.ports.payments.clock.now()) && wayBackOf(visit, 'returnUrl') !== null;
    if (!may || !this.isOurForm(visit, posted.form)) return this.backToTruth(visit, reply);
    const after = await this.settled(session, () => this.commands.execute(new ChangeCheckout(session, { type: 'Leave' }, by(request, id))));
    // The change is stored before the browser goes to the partner. After the change, this session takes no other card.
    if (after.checkout.phase !== 'unknown' || !after.checkout.left) return redirect(reply, `/checkout/${id}`);
    this.showLeft(visit, `/checkout/${id}/done`, reply);
  }

  @Get(':id/cancel')
  async cancel(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const visit = await this.visit(id, request, reply);
    if (!visit) return;
    const { ports, keys } = this.services;
    const { session, portal, view, frame } = visit;
    const { content, checkout } = session;
    // Any browser may leave a session that is over. Only the bound browser may leave an open one.
    if (!isOver(view)) {
      if (!isBound(visit)) return this.showOutsider(visit, request, reply);
      if (view === 'pay') return sendPage(reply, 200, render(Leave({ frame, checkoutId: id, proof: this.proof(visit) })));
      return this.backToTruth(visit, reply);
    }
    const told = content && cancellationOf(checkout, content);
    if (!told || wayBackOf(visit, 'cancelUrl') === null) return redirect(reply, `/checkout/${id}`);
    redirect(reply, cancelAddress(keys, portal, content.cancelUrl, told, ports.payments.clock.realNow()));
  }

  @Post(':id/cancel')
  async leave(@Param('id') id: string, @Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const visit = await this.fromOurPage(id, request, reply);
    if (!visit) return;
    const { session, view } = visit;
    if (session.content === null) return redirect(reply, `/checkout/${id}`);
    if (!isOver(view)) {
      const posted = this.ofBrowser(visit, request, reply);
      if (!posted) return;
      if (view === 'processing' || view === 'receipt') return this.backToTruth(posted.visit, reply);
      // The page has a new form.
      if (!this.isOurForm(posted.visit, posted.form)) return redirect(reply, `/checkout/${id}/cancel`);
    }
    const after = await this.settled(session, () =>
      this.commands.execute(new ChangeCheckout(session, { type: view === 'expired' ? 'Expire' : 'Cancel' }, by(request, id))),
    );
    if (!cancellationOf(after.checkout, session.content) || wayBackOf(visit, 'cancelUrl') === null) return redirect(reply, `/checkout/${id}`);
    this.showLeft(visit, `/checkout/${id}/cancel`, reply);
  }

  // ----------------------------------------------------------------------------------------------------------------------------------

  private async visit(id: string, request: FastifyRequest, reply: FastifyReply): Promise<Visit | null> {
    const { ports, publicUrl, limits } = this.services;
    const seconds = limits.admitPage(this.pages.address(request));
    if (seconds !== null) {
      this.pages.tooMany(request, reply, seconds);
      return null;
    }
    const session = await ports.sessions.load(id);
    const portal = session && (await ports.directory.portal(session.checkout.terms.portalId));
    if (!session || !portal) {
      // In an incident, the session may be in the lost part of the log. "Not found" could then be wrong. So the log is checked first.
      await ports.payments.ownLog.verified(null).catch((error: unknown) => {
        if (!(error instanceof StoreIncident)) throw error;
      });
      this.refuseInIncident();
      this.pages.refuse(request, reply, 'notFound');
      return null;
    }
    // The page counts as its portal's owner.
    try {
      await takeSlot(this.services, request, reply, session.checkout.terms.accountId, 'payer');
    } catch (error) {
      const wait = retryAfterOf(error);
      if (wait === null) throw error;
      this.pages.tooMany(request, reply, wait);
      return null;
    }
    const cookie = cookiesOf(request, publicUrl).find((value) => this.capabilities.holds(id, value)) ?? null;
    const view = viewOf(session, ports.payments.clock.now());
    return { session, portal, cookie, view, frame: this.pages.frame(request, portal, session.content) };
  }

  /** Reads a POST of our own form from the browser that holds the session's cookie. null: the request was already answered. */
  private async posted(
    id: string,
    request: FastifyRequest,
    reply: FastifyReply,
  ): Promise<{ visit: Bound; form: ReadonlyMap<string, string> } | null> {
    const visit = await this.fromOurPage(id, request, reply);
    return visit && this.ofBrowser(visit, request, reply);
  }

  private async fromOurPage(id: string, request: FastifyRequest, reply: FastifyReply): Promise<Visit | null> {
    if (isFromOurPage(request, this.services) && isForm(request)) return this.visit(id, request, reply);
    this.pages.refuse(request, reply, 'notFromHere');
    return null;
  }

  private ofBrowser(visit: Visit, request: FastifyRequest, reply: FastifyReply): { visit: Bound; form: ReadonlyMap<string, string> } | null {
    if (!isBound(visit)) {
      this.pages.refuse(request, reply, 'notFromHere', visit.portal);
      return null;
    }
    try {
      return { visit, form: parseFormBody(receivedBody(request)) };
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      this.pages.refuse(request, reply, 'notFromHere', visit.portal, 400);
      return null;
    }
  }

  private isOurForm({ session, cookie }: Bound, form: ReadonlyMap<string, string>): boolean {
    const attemptId = form.get('attempt_id');
    return isUuid(attemptId) && this.capabilities.isToken(session.checkoutId, cookie, attemptId, form.get('csrf') ?? '');
  }

  private async open(visit: Visit, request: FastifyRequest, reply: FastifyReply): Promise<Visit> {
    const { checkoutId } = visit.session;
    try {
      const session = await this.commands.execute(new ChangeCheckout(visit.session, { type: 'Open' }, by(request, checkoutId)));
      const opened = { ...visit, session };
      return { ...opened, cookie: this.renewCookie(opened, reply) };
    } catch (error) {
      if (error instanceof Conflict) return visit;
      throw error;
    }
  }

  /** Sets a new cookie. The browser then drops the page that it keeps for its Back button. That page may hold the card number. */
  private renewCookie({ session: { checkoutId } }: Visit, reply: FastifyReply): string {
    const cookie = this.capabilities.cookie(checkoutId, this.services.ports.payments.ids.uuid());
    setCookie(reply, this.services.publicUrl, checkoutId, cookie);
    return cookie;
  }

  /** Redirects to the page of the session's present state. The browser drops the page that may hold the card number. */
  private backToTruth(visit: Bound, reply: FastifyReply): void {
    this.renewCookie(visit, reply);
    const { view, session } = visit;
    redirect(reply, `/checkout/${session.checkoutId}${view === 'processing' || view === 'receipt' ? `/${view}` : ''}`);
  }

  /** Throws while an incident of the event store is open. No page may ask for a card then (C76). */
  private refuseInIncident(): void {
    if (this.services.ports.payments.ownLog.incident) throw storeIncident();
  }

  /** Returns the session after `change`. If another request, the session's phase, an incident or a read-only log prevents the change, returns the present session. */
  private async settled(session: Session, change: () => Promise<Session>): Promise<Session> {
    try {
      return await change();
    } catch (error) {
      const isRefused =
        error instanceof Conflict ||
        error instanceof StoreIncident ||
        error instanceof ReadOnly ||
        (error instanceof ServiceError && error.code === 'INVALID_STATE');
      if (!isRefused) throw error;
      return (await this.services.ports.sessions.load(session.checkoutId)) ?? session;
    }
  }

  private async followed(visit: Bound, request: FastifyRequest): Promise<Bound> {
    const { ports } = this.services;
    const session = await this.settled(visit.session, () =>
      this.commands.execute(new FollowCheckout(visit.session, by(request, visit.session.checkoutId))),
    );
    return { ...visit, session, view: viewOf(session, ports.payments.clock.now()) };
  }

  private async paymentOf({ checkout }: Session): Promise<PaymentView> {
    const payment = checkout.phase === 'paid' || checkout.phase === 'unknown' ? await paymentOf(this.services.ports, checkout.attempt) : null;
    if (!payment) throw new Error('a checkout without its payment');
    return payment;
  }

  private showForm(visit: Bound, reply: FastifyReply, shown: { status: number; form?: PayForm; notice?: Notice | null }): void {
    const { session, portal, frame } = visit;
    const { terms, expiresAt } = session.checkout;
    if (session.content === null) return this.showExpired(visit, reply);
    const { lineItems, payer } = session.content;
    const { amountCents, serviceFeeCents } = quoteOf(terms, portal);
    const { firstName = '', lastName = '', email = '', zip = '' } = payer;
    const page: PayPage = {
      checkoutId: session.checkoutId,
      lines: lineItems,
      amountCents,
      serviceFeeCents,
      proof: this.proof(visit),
      expiresAt,
      values: shown.form?.values ?? { first_name: firstName, last_name: lastName, email, postal_code: zip },
      faults: shown.form?.faults ?? {},
      notice: shown.notice ?? null,
    };
    sendPage(reply, shown.status, render(Pay({ frame, page })));
  }

  private proof({ session: { checkoutId }, cookie }: Bound): Proof {
    const attemptId = this.services.ports.payments.ids.uuid();
    return { attemptId, token: this.capabilities.token(checkoutId, cookie, attemptId) };
  }

  /** Leads on to `href`, a GET of ours that redirects to the partner. Only that GET decides whether the address is still allowed. */
  private showLeft({ frame }: Visit, href: string, reply: FastifyReply): void {
    sendPage(reply, 200, render(Left({ frame, href })));
  }

  private showExpired(visit: Visit, reply: FastifyReply): void {
    sendPage(reply, 200, render(Expired({ frame: visit.frame, checkoutId: wayBackOf(visit, 'cancelUrl') })));
  }

  private showCancelled(visit: Visit, reply: FastifyReply): void {
    sendPage(reply, 200, render(Cancelled({ frame: visit.frame, checkoutId: wayBackOf(visit, 'cancelUrl') })));
  }

  /** Shows a browser without the cookie a page with nothing of the payer, and with no action that moves money. */
  private async showOutsider(visit: Visit, request: FastifyRequest, reply: FastifyReply): Promise<void> {
    const { view, portal } = visit;
    if (view === 'receipt') return this.showPaidBefore(visit, reply, false);
    if (view === 'cancelled') return this.showCancelled(visit, reply);
    if (view === 'expired') return this.showExpired(visit, reply);
    this.pages.refuse(request, reply, 'otherBrowser', portal);
  }

  private async showPaidBefore({ session, frame, cookie }: Visit, reply: FastifyReply, byLink: boolean): Promise<void> {
    const { confirmationNumber } = await this.paymentOf(session);
    const { checkoutId } = session;
    sendPage(reply, 200, render(PaidBefore({ frame, checkoutId, confirmationNumber: confirmationNumber ?? '', bound: cookie !== null, byLink })));
  }
}

const isOver = (view: View): boolean => view === 'cancelled' || view === 'expired';
const isBound = (visit: Visit): visit is Bound => visit.cookie !== null;

/** The id of the session, if its browser may be sent to this address of the partner now. Otherwise null: the page has no way back. */
const wayBackOf = ({ session: { checkoutId, content }, portal }: Visit, which: 'returnUrl' | 'cancelUrl'): string | null =>
  content !== null && isAllowedNow(portal, content[which]) ? checkoutId : null;

const by = (request: FastifyRequest, checkoutId: string): Origin => ({ actor: { type: 'payer', id: checkoutId }, correlationId: String(request.id) });

const refusedBefore = ({ checkout: { lastRefusal, terms } }: Session): Notice | null =>
  lastRefusal && { kind: 'refused', refusal: { ...lastRefusal, code: codeFor(terms, lastRefusal.code) } };

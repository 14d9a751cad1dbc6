/**
 * The world outside of the service: partners, staff, the bank's nightly settlement, and cardholders who dispute. Partners follow the specification:
 * they repeat a key, obey `Retry-After`, and read a payment before they charge again. They never crash, but their messages may get lost.
 */
import { canonicalJson, type Cents, timestamp } from '#kernel';
import type { DisputeTerms } from '#settlement';
import { type ChargeRequest, NO_FILTERS, type ResolveRequest, Secret } from '#payments';
import { type CardKind, CARDS } from './bank.js';
import { CVV, type Exchange, type Intention, type Oracle, PLANTED, told, type Told } from './oracle.js';
import { type Ask, merchantAccounts, type PortalTerms, type Reply, type World } from './service.js';

/** How long a client waits for an answer. */
const CLIENT_TIMEOUT_MS = 45_000;
const NETWORK_MS = 10;
/** How many times a client sends a request under one key, and how many keys it may use for one intention. */
const TRIES = 8;
const KEYS = 3;
/** How long a client waits before it repeats a request without a key. Meanwhile the service can record the first outcome (C18). */
const KEYLESS_REPEAT_MS = [150_000, 300_000] as const;
/** The pauses of a client that polls a payment without an outcome: about an hour in all. */
const LOOKS_MS = [2_000, 5_000, 10_000, 20_000, 30_000, 60_000, 60_000, 120_000, 300_000, 600_000, 1_200_000, 1_200_000] as const;

const THINKS_AGAIN_MS = [5_000, 40_000] as const;

export interface Wish {
  readonly accountId: string;
  readonly portal: PortalTerms;
  readonly lines: readonly Cents[];
  readonly card: CardKind;
  readonly key: string | null;
  /** The reference id of the payment. It is fixed, so that a repeated request has the same body. */
  readonly reference: string;
  /** The client sends each request with a key twice at once. */
  readonly doubles?: boolean;
  /** After a final answer, the client sends the request again and must get the same answer. */
  readonly asksAgain?: boolean;
  /** How many times the client polls a payment without an outcome. */
  readonly looks?: number;
}

export interface Paid {
  readonly paymentId: string;
  readonly accountId: string;
  readonly amountCents: Cents;
}

export interface Return {
  readonly operation: 'refund' | 'void';
  readonly amountCents: Cents | null;
  readonly includeFee: boolean;
  readonly key: string | null;
  readonly actor: 'partner' | 'staff';
  readonly asksAgain?: boolean;
  readonly tries?: number;
  /** The client sends nothing while the whole service is down, and sends its request again as soon as it is up. */
  readonly waits?: boolean;
}

/** How often a client that waits looks whether the service is up. Recovery's first round comes later. */
const LOOKS_UP_MS = 5_000;
/** An hour. A log that is lost for good never shows the payment. */
const LOOKS_AT_MOST = 720;

export class Outside {
  private requests = 0;

  constructor(
    readonly world: World,
    readonly oracle: Oracle,
  ) {}

  // ---- the wire

  /** Sends one request to a random replica. If no answer comes, `reply` is null. */
  async send(intention: Intention | null, ask: Ask): Promise<Exchange> {
    const { sim, replicas } = this.world;
    const requestId = `request-${++this.requests}`;
    const exchange: Exchange = { requestId, intention, ask, sentAt: sim.now, answeredAt: Number.POSITIVE_INFINITY, reply: null };
    this.oracle.sent(exchange);
    const replica = sim.rng.pick(replicas);
    const who = intention?.name ?? ask.kind;
    sim.note('client', `${who} asks ${replica.process.id}: ${described(ask)} (${requestId})`);
    const reply = await new Promise<Reply | null>((resolve) => {
      let ended = false;
      const end = (answer: Reply | null) => {
        if (ended) return;
        ended = true;
        resolve(answer);
      };
      const reset = () => sim.at(NETWORK_MS, () => end(null));
      const lostOnTheWay = sim.faultsOn && sim.rng.chance(sim.faults.network);
      const lostOnTheWayBack = sim.faultsOn && sim.rng.chance(sim.faults.network);
      sim.at(CLIENT_TIMEOUT_MS, () => end(null));
      sim.at(sim.rng.int(1, NETWORK_MS), () => {
        const { process } = replica;
        if (lostOnTheWay) return;
        if (!process.up) return end(null);
        const { incarnation } = process;
        replica.connections.add(reset);
        // A paused process reads the request when it is resumed.
        void sim
          .clock(process)
          .sleep(0)
          .then(() => replica.serve(ask, requestId))
          .then((answer) => {
            sim.at(sim.rng.int(1, NETWORK_MS), () => {
              replica.connections.delete(reset);
              if (process.incarnation === incarnation && !lostOnTheWayBack) end(answer);
            });
          });
      });
    });
    exchange.reply = reply;
    exchange.answeredAt = sim.now;
    const answer = reply && told(reply);
    sim.note('client', `${who} ← ${answer ? `${answer.status} ${answer.code}${reply.replayed ? ' (replayed)' : ''}` : 'no answer'} (${requestId})`);
    this.oracle.answered(exchange);
    return exchange;
  }

  private isUp(): boolean {
    return this.world.replicas.some(({ process }) => process.up);
  }

  /** Waits until a replica is up. */
  async untilUp(): Promise<void> {
    while (!this.isUp()) await this.wait(LOOKS_UP_MS);
  }

  private wait(ms: number): Promise<void> {
    return this.world.sim.wait(ms);
  }

  private pause(reply: Reply | null): Promise<void> {
    return this.wait(reply?.retryAfterSeconds ? reply.retryAfterSeconds * 1000 : this.world.sim.rng.int(100, 6_000));
  }

  // ---- paying

  /** Pays once, with several requests and keys if necessary. Charges again only if the earlier charge certainly took no money (C29, C64). */
  async pay(wish: Wish): Promise<{ intention: Intention; paid: Paid | null }> {
    const amountCents = wish.lines.reduce((sum, cents) => sum + cents, 0);
    const intention = this.oracle.intend({
      kind: 'charge',
      actor: 'partner',
      accountId: wish.accountId,
      paymentId: null,
      asked: { amountCents, includeFee: true },
    });
    const request = chargeRequest(wish);
    for (let round = 1; round <= KEYS; round++) {
      const key = wish.key === null ? null : round === 1 ? wish.key : `${wish.key} again ${round}`;
      const outcome = await this.payUnder(intention, { kind: 'create', request, key, fingerprint: chargeFingerprint(request) }, wish);
      if (outcome.kind === 'again') {
        intention.belief = 'not paid';
        continue;
      }
      intention.belief = outcome.kind === 'paid' ? 'paid' : outcome.kind === 'not paid' ? 'not paid' : null;
      if (outcome.kind !== 'paid') break;
      intention.paymentId = outcome.id;
      return { intention, paid: { paymentId: outcome.id, accountId: wish.accountId, amountCents } };
    }
    return { intention, paid: null };
  }

  private async payUnder(
    intention: Intention,
    ask: Extract<Ask, { kind: 'create' }>,
    { doubles = false, asksAgain = false, looks = LOOKS_MS.length }: Wish,
  ): Promise<{ kind: 'paid'; id: string } | { kind: 'not paid' | 'again' | 'cannot tell' }> {
    const { rng } = this.world.sim;
    let final: { kind: 'paid'; id: string } | { kind: 'not paid' } | null = null;
    for (let tries = 1; tries <= TRIES; tries++) {
      const second = doubles && ask.key !== null ? this.send(intention, ask) : null;
      const { reply } = await this.send(intention, ask);
      await second;
      const answer = reply && told(reply);
      if (final && (!answer || answer.status >= 500)) return final;
      if (!answer) {
        if (ask.key === null) return { kind: 'cannot tell' };
      } else if (answer.status === 200) {
        final = { kind: 'paid', id: answer.data.id as string };
        if (!asksAgain || ask.key === null) return final;
      } else if (answer.code === 'PAYMENT_DECLINED') {
        final = { kind: 'not paid' };
        if (!asksAgain || ask.key === null) return final;
      } else if (answer.code === 'PAYMENT_GATEWAY_ERROR') {
        // No money was charged. The same key would only get "reconciliation required".
        if (ask.key === null || rng.chance(0.5)) return { kind: 'again' };
      } else if (answer.code === 'IDEMPOTENCY_RECONCILIATION_REQUIRED') {
        if (answer.details.id === undefined) return { kind: 'again' };
        const seen = await this.look(ask.request.accountId, answer.details.id as string, looks);
        if (seen.kind !== 'absent') return seen;
      } else if (answer.code === 'PAYMENT_TIMEOUT') {
        if (ask.key === null || rng.chance(0.5)) {
          const seen = await this.look(ask.request.accountId, answer.details.id as string, looks);
          if (seen.kind !== 'absent') return seen;
          if (ask.key === null) return { kind: 'again' };
        }
      } else if (answer.status === 500) {
        if (ask.key === null) return { kind: 'cannot tell' };
      } else if (answer.code === 'RATE_LIMITED') {
        // Nothing was begun, and the key was given back (C65).
        if (rng.chance(0.3)) return { kind: 'cannot tell' };
      } else if (answer.code === 'PORTAL_ACCESS_DENIED') {
        // The request was refused before a payment began, and its key was given back (C15). So the client may use the key again later.
        if (rng.chance(0.3)) return { kind: 'cannot tell' };
        await this.wait(rng.int(...THINKS_AGAIN_MS));
      } else if (answer.code !== 'IDEMPOTENCY_IN_PROGRESS' && answer.code !== 'IDEMPOTENCY_UNAVAILABLE') {
        return { kind: 'cannot tell' };
      }
      if (final && tries >= 3) return final;
      await this.pause(reply);
    }
    return final ?? { kind: 'cannot tell' };
  }

  /**
   * Errors, rule 1: read the payment to learn its outcome. `absent`: there is no such payment. A client with a key then sends the same request again:
   * another copy may have been executed as another payment, or may be later.
   */
  private async look(
    accountId: string,
    paymentId: string,
    looks: number,
  ): Promise<{ kind: 'paid'; id: string } | { kind: 'again' } | { kind: 'absent' } | { kind: 'cannot tell' }> {
    for (const ms of LOOKS_MS.slice(0, looks)) {
      const { reply } = await this.send(null, { kind: 'get', accountId, paymentId });
      const answer = reply && told(reply);
      // The payment was abandoned before it began (C64), or its intent was never recorded.
      if (answer?.status === 404) return { kind: 'absent' };
      const status = answer?.status === 200 ? (answer.data.status as string) : 'pending';
      if (status === 'failed' || status === 'voided') return { kind: 'again' };
      if (status !== 'pending' && status !== 'unknown') return { kind: 'paid', id: paymentId };
      await this.wait(ms);
    }
    return { kind: 'cannot tell' };
  }

  // ---- giving back

  /** Returns money once, with several requests if necessary. */
  async giveBack({ paymentId, accountId }: Paid, wanted: Return): Promise<Intention> {
    const { operation, amountCents, includeFee, key, actor } = wanted;
    const asked = { amountCents, includeFee };
    const intention = this.oracle.intend({ kind: operation, actor, accountId, paymentId, asked });
    // The oracle finds the intention of an attempt by its `reason`.
    const common = { operation, paymentId, amountCents, includeFee, reason: intention.name };
    const fingerprint = `POST\n/api/partner/v1/payments/${paymentId}/${operation}\n${canonicalJson({ ...asked, reason: intention.name })}`;
    const ask: Ask =
      actor === 'staff'
        ? { kind: 'staff', request: { ...common, by: 'staff' }, key }
        : { kind: 'reverse', request: { ...common, accountId, initiatedBy: 'partner' }, key, fingerprint };
    let done = false;
    for (let tries = 1; tries <= (wanted.tries ?? TRIES); tries++) {
      if (wanted.waits && !this.isUp()) {
        if (done) return intention;
        // The key of a return that ended more than a day ago is forgotten. So the client, which has asked for no other return, reads the payment first.
        if ((await this.cameBack(accountId, paymentId)) !== false) return intention;
      }
      const { reply } = await this.send(intention, ask);
      const answer = reply && told(reply);
      const last = await this.afterReturn(answer, key !== null);
      if (last === 'stop') return intention;
      if (last === 'done') {
        if (done || !wanted.asksAgain || key === null) return intention;
        done = true;
      }
      await (key === null ? this.wait(this.world.sim.rng.int(...KEYLESS_REPEAT_MS)) : this.pause(reply));
    }
    return intention;
  }

  /** Waits until the service is up, and reads whether money of a payment came back. null: the log is lost, and the client has given up. */
  private async cameBack(accountId: string, paymentId: string): Promise<boolean | null> {
    for (let looks = 1; looks <= LOOKS_AT_MOST; looks++) {
      await this.untilUp();
      const answer = await this.readPayment(accountId, paymentId);
      if (answer?.status === 200) return (answer.data.refundedAmountCents as number) > 0;
      await this.wait(LOOKS_UP_MS);
    }
    return null;
  }

  private async afterReturn(answer: Told | null, keyed: boolean): Promise<'done' | 'stop' | 'again'> {
    const { rng } = this.world.sim;
    if (!answer) return keyed ? 'again' : 'stop';
    if (answer.status === 200) return 'done';
    if (answer.status >= 500 || answer.details.retryable === true) return 'again';
    if (answer.code === 'IDEMPOTENCY_IN_PROGRESS' || answer.code === 'RATE_LIMITED') return 'again';
    // INVALID_STATE may mean that the payment is being reconciled, or that another return is in progress. Some clients try again.
    return answer.code === 'INVALID_STATE' && rng.chance(0.3) ? 'again' : 'stop';
  }

  // ---- reading

  /** The whole list of an account, page by page. */
  async readList(accountId: string, limit: number | null = null): Promise<string[]> {
    const seen: string[] = [];
    for (let cursor: string | null = null; ;) {
      const { reply } = await this.send(null, { kind: 'list', accountId, filters: NO_FILTERS, cursor, limit });
      if (reply?.status !== 200) return seen;
      const page = told(reply).data as unknown as { payments: { id: string }[]; nextCursor: string | null };
      for (const { id } of page.payments) {
        this.world.check(!seen.includes(id), 'C45: a payment stands on two pages');
        seen.push(id);
      }
      if (page.nextCursor === null) return seen;
      cursor = page.nextCursor;
    }
  }

  async readPayment(accountId: string, paymentId: string): Promise<Told | null> {
    const { reply } = await this.send(null, { kind: 'get', accountId, paymentId });
    return reply && told(reply);
  }

  // ---- the bank's side, and staff

  /** The bank's nightly run: closes the batches of a portal's merchant accounts. */
  settle(portal: PortalTerms): void {
    const { bank, sim } = this.world;
    const closed = merchantAccounts(portal).flatMap((account) => bank.closeBatch(account) ?? []);
    if (closed.length > 0) sim.note('bank', `closes ${closed.join(' and ')}`);
  }

  /** The operator revokes the access to a portal for `ms`. New requests are refused, but stored answers are still replayed (C47, contract 2). */
  async revoke({ portalId }: PortalTerms, ms: number): Promise<void> {
    const { sim, directoryChanges } = this.world;
    sim.note('operator', `revokes ${portalId}`);
    directoryChanges.revoked.add(portalId);
    await this.wait(ms);
    directoryChanges.revoked.delete(portalId);
    sim.note('operator', `grants ${portalId} again`);
  }

  /** Opens a dispute, and later changes its status. */
  async dispute({ paymentId, amountCents }: Paid, disputedAmountCents = amountCents): Promise<void> {
    const { sim } = this.world;
    const day = timestamp(sim.now).slice(0, 10);
    const disputeId = sim.ids().uuid();
    const dispute: DisputeTerms = { disputeId, status: 'debited', stage: 'chargeback', reasonCode: '10.4', reason: PLANTED.dispute, disputedAmountCents, openedOn: day, dueDate: day }; // prettier-ignore
    await this.persist({ kind: 'open dispute', paymentId, dispute });
    await this.wait(sim.rng.int(5_000, 120_000));
    await this.persist({ kind: 'update dispute', disputeId, status: sim.rng.pick(['lost', 'recovered', 'in_dispute'] as const) });
  }

  /** Staff resolve a payment that waits for them (C29, C69). The decision may be untrue. */
  async resolve(paymentId: string, as: ResolveRequest['as'], transactions: ResolveRequest['transactions'], force: boolean): Promise<Told | null> {
    return this.persist({ kind: 'resolve', request: { paymentId, as, evidence: 'the statement of the bank', by: 'staff', force, transactions } });
  }

  /** Staff resolve some of the payments with an unknown outcome. If the bank can tell what happened, an untrue decision must be refused (C69). */
  async decideWhatWaits(): Promise<void> {
    const { rng } = this.world.sim;
    for (const { paymentId, charged, canTell } of await this.oracle.waiting()) {
      if (rng.chance(0.3)) continue;
      const complete = charged.every(({ transactionId }) => transactionId !== null);
      const transactions = Object.fromEntries(charged.map(({ leg, transactionId }) => [leg, transactionId])) as ResolveRequest['transactions'];
      if (canTell && rng.chance(0.5)) {
        const lie = await this.resolve(paymentId, complete ? 'failed' : 'succeeded', transactions, rng.chance(0.5));
        this.world.check(lie?.status !== 200, 'C69: resolved against what the bank shows');
      }
      if (complete) await this.resolve(paymentId, 'succeeded', transactions, !canTell);
    }
  }

  /** Repeats a command of staff while the answer is a 5xx or missing, at most TRIES times. */
  async persist(ask: Ask): Promise<Told | null> {
    let answer: Told | null = null;
    for (let tries = 1; tries <= TRIES; tries++) {
      const { reply } = await this.send(null, ask);
      answer = reply && told(reply);
      if (answer && answer.status < 500) break;
      await this.pause(reply);
    }
    return answer;
  }
}

/** One request to pay. */
export const chargeAsk = (wish: Wish): Extract<Ask, { kind: 'create' }> => {
  const request = chargeRequest(wish);
  return { kind: 'create', request, key: wish.key, fingerprint: chargeFingerprint(request) };
};

const chargeRequest = ({ accountId, portal, lines, card, reference: referenceId }: Wish): ChargeRequest => ({
  accountId,
  portalId: portal.portalId,
  referenceId,
  amountCents: lines.reduce((sum, cents) => sum + cents, 0),
  lineItems: lines.map((cents, index) => ({
    amountCents: cents,
    referenceId: `INV-${index + 1}`,
    description: index === 1 ? PLANTED.description : null,
    metadata: null,
  })),
  // Some payments have no text, and so no key.
  payer: card === 'approved' ? { firstName: PLANTED.name, email: PLANTED.email } : null,
  instrument: { type: 'card', number: new Secret(CARDS[card]), expiry: { month: 12, year: 2040 }, cvv: new Secret(CVV) },
});

/** The fingerprint of a create, as in the HTTP layer: with the card number, without the security code (C13). */
const chargeFingerprint = ({ instrument, ...request }: ChargeRequest): string =>
  `POST\n/api/partner/v1/payments\n${canonicalJson({ ...request, card: instrument.type === 'card' ? instrument.number.reveal() : '' })}`;

const described = (ask: Ask): string => {
  switch (ask.kind) {
    case 'create':
      return `pay ${ask.request.amountCents} under key ${ask.key ?? '-'}`;
    case 'reverse':
    case 'staff': {
      const { operation, amountCents, includeFee, paymentId } = ask.request;
      const what = operation === 'void' ? 'void' : `refund ${amountCents ?? 'all'}${includeFee ? ' with the fee' : ''}`;
      return `${what} of ${paymentId}${ask.kind === 'staff' ? ' by staff' : ''} under key ${ask.key ?? '-'}`;
    }
    case 'get':
      return `GET ${ask.paymentId}`;
    case 'resolve':
      return `resolve ${ask.request.paymentId} as ${ask.request.as}${ask.request.force ? ' by force' : ''}`;
    case 'open dispute':
      return `dispute of ${ask.paymentId} over ${ask.dispute.disputedAmountCents}`;
    case 'update dispute':
      return `dispute ${ask.disputeId} ${ask.status}`;
    case 'list':
    case 'endpoints':
    case 'redeliver held':
      return ask.kind;
    case 'add endpoint':
      return `endpoint ${ask.url} of ${ask.accountId}`;
    case 'change endpoint':
      return `${ask.verb} endpoint ${ask.endpointId}`;
    case 'stage secret':
    case 'activate secret':
      return `${ask.kind} of ${ask.endpointId}`;
    case 'check out':
      return `begin checkout ${ask.nonce} over ${ask.lines.reduce((sum, cents) => sum + cents, 0)}`;
    case 'submit':
      return `pay in ${ask.checkoutId} by form ${ask.attemptId}`;
    case 'look':
    case 'leave':
    case 'cancel':
      return `${ask.kind} ${ask.checkoutId}`;
  }
};

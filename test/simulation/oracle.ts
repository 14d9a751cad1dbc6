/**
 * The oracle: the rules that must hold. They come from the specification and the contract, not from the code.
 *
 * Each answer is checked as it arrives, against a *set* of allowed answers (during faults 409, 502 and 504 are all allowed). The books are compared
 * at the end, after all faults: the bank with the log, the log with the answers, the read model with a replay. Rules are named A1–A12 (invariants)
 * and C… (contract).
 */
import { CHECKOUT_STREAMS, checkoutUnfinishedModel, checkoutIdOf } from '#checkout';
import { checkpointOf, type Recorded } from '#eventstore';
import { CLOSED, fold, type Personal, type Reveal, ServiceError } from '#kernel';
import {
  chargeAnswer,
  gatewayRef,
  isVisible,
  KEYS_FROM_LOG,
  type Payment,
  payment as decider,
  paymentView,
  paymentListModel,
  paymentIdOf,
  paymentEvents,
} from '#payments';
import { WEBHOOK_OUTBOX } from '#webhooks';
import { errorAnswer, type OpenedKeys, successAnswer } from '#platform';
import { auditLedger, auditNotifications } from './audits.js';
import { type BankCharge, batchOf, CAPABILITIES, CARDS, type GatewayName } from './bank.js';
import { auditSessions, auditUnfinished, isSessionQuiet, PageJudge, sessionOf } from './checkout.js';
import { type Ask, clearText, loggedKeyName, PORTALS, type Reply, RING, type World } from './service.js';
import { collect } from './stores.js';
import { areDeliveriesQuiet, auditDeliveries, WEBHOOK_ANSWERS } from './webhooks.js';

/** One intention of a client, for example one charge. It may need several requests. */
export interface Intention {
  readonly name: string;
  readonly kind: 'charge' | 'refund' | 'void';
  readonly actor: 'partner' | 'staff';
  readonly accountId: string;
  readonly exchanges: Exchange[];
  /** Only for a charge: the client's belief at the end. null: the client does not know the outcome. */
  belief: 'paid' | 'not paid' | null;
  /** For a charge: the payment that the client believes it made. For a reversal: the reversed payment. */
  paymentId: string | null;
  readonly asked: { readonly amountCents: number | null; readonly includeFee: boolean };
}

export interface Exchange {
  readonly requestId: string;
  readonly intention: Intention | null;
  readonly ask: Ask;
  readonly sentAt: number;
  answeredAt: number;
  /** null: no answer came. */
  reply: Reply | null;
}

interface View {
  readonly id: string;
  readonly status: string;
  readonly capturedAmountCents: number;
  readonly refundedAmountCents: number;
  readonly remainingRefundableAmountCents: number;
  readonly settlement: { readonly status: string; readonly settledAt: string | null } | null;
  readonly createdAt: string;
  readonly portalId: string;
  readonly referenceId: string | null;
}

export interface Told {
  readonly status: number;
  readonly code: string;
  readonly data: Record<string, unknown>;
  readonly details: Record<string, unknown>;
}

const DAY_MS = 86_400_000;
/** Recovery starts after a minute, and then looks after 1 and 2 minutes. Its rounds come a little later. */
const LOOKED_AT_AFTER_MS = 60_000;
const FOUND_WITHIN_MS = 6 * 60_000;
/** Settlement waits for an open reversal at most this long. */
const HELD_UP_MS = 3_600_000;
/** The largest difference between the wall clocks of two replicas, in any seed. */
const CLOCKS_DIFFER_MS = 240_000;
/** Lines are sent to the log at most this long after their payments were read. */
const JUDGED_FOR_MS = 60_000;

const read = new WeakMap<Reply, Told>();

export const told = (reply: Reply): Told => {
  const before = read.get(reply);
  if (before) return before;
  const answer = readAnswer(reply);
  read.set(reply, answer);
  return answer;
};

const readAnswer = (reply: Reply): Told => {
  const { success, data, details } = JSON.parse(reply.body) as { success: boolean; data?: object; details?: Record<string, unknown> };
  return {
    status: reply.status,
    code: success ? 'OK' : ((details?.code as string | undefined) ?? ''),
    data: (data ?? {}) as Record<string, unknown>,
    details: details ?? {},
  };
};

/** True for a 504 that says no payment id. */
const namesNoPayment = ({ status, details }: Told) => status === 504 && typeof details.id !== 'string';
const isFiveHundred = ({ status }: Told) => status === 500 || status === 502 || status === 504;

/** Answers that the specification allows, by operation. */
const ALLOWED: Readonly<Record<'refund' | 'void' | Exclude<Ask['kind'], 'reverse' | 'staff'>, readonly string[]>> = {
  create: ['OK', 'RATE_LIMITED', 'PAYMENT_DECLINED', 'PORTAL_ACCESS_DENIED', 'IDEMPOTENCY_MISMATCH', 'IDEMPOTENCY_IN_PROGRESS', 'IDEMPOTENCY_RECONCILIATION_REQUIRED', 'IDEMPOTENCY_UNAVAILABLE', 'PAYMENT_GATEWAY_ERROR', 'PAYMENT_TIMEOUT', 'INTERNAL_ERROR'], // prettier-ignore
  refund: ['OK', 'RATE_LIMITED', 'INVALID_STATE', 'VALIDATION_ERROR', 'PAYMENT_NOT_FOUND', 'IDEMPOTENCY_MISMATCH', 'IDEMPOTENCY_IN_PROGRESS', 'IDEMPOTENCY_UNAVAILABLE', 'PARTIAL_REFUND_PENDING', 'PAYMENT_GATEWAY_ERROR', 'PAYMENT_TIMEOUT', 'INTERNAL_ERROR'], // prettier-ignore
  void: ['OK', 'RATE_LIMITED', 'INVALID_STATE', 'VOID_FAILED', 'PAYMENT_NOT_FOUND', 'IDEMPOTENCY_MISMATCH', 'IDEMPOTENCY_IN_PROGRESS', 'IDEMPOTENCY_UNAVAILABLE', 'PAYMENT_GATEWAY_ERROR', 'PAYMENT_TIMEOUT', 'INTERNAL_ERROR'], // prettier-ignore
  get: ['OK', 'PAYMENT_NOT_FOUND', 'INTERNAL_ERROR'],
  list: ['OK', 'PORTAL_ACCESS_DENIED', 'INTERNAL_ERROR'],
  resolve: ['OK', 'INVALID_STATE', 'VALIDATION_ERROR', 'INTERNAL_ERROR'],
  // The reason of a dispute needs a key of personal data. Without one, nothing is recorded.
  'open dispute': ['OK', 'INVALID_STATE', 'IDEMPOTENCY_UNAVAILABLE', 'INTERNAL_ERROR'],
  'update dispute': ['OK', 'INVALID_STATE', 'VALIDATION_ERROR', 'INTERNAL_ERROR'],
  'check out': ['OK', 'PORTAL_ACCESS_DENIED', 'INTERNAL_ERROR'],
  look: ['OK', 'INTERNAL_ERROR'],
  submit: ['OK', 'RATE_LIMITED', 'INTERNAL_ERROR'],
  leave: ['OK', 'INTERNAL_ERROR'],
  cancel: ['OK', 'INTERNAL_ERROR'],
  ...WEBHOOK_ANSWERS,
};

const READS: readonly Ask['kind'][] = ['get', 'list', 'look', 'endpoints'];

/**
 * True if another request of the intention was in flight at the same time, or an earlier one got no answer. Such requests may continue the same
 * attempt. So one answer does not show the whole result.
 */
const overlaps = (exchange: Exchange, { exchanges }: Intention): boolean =>
  exchanges.some((other) => other !== exchange && other.sentAt < exchange.answeredAt && (other.reply === null || other.answeredAt > exchange.sentAt));

/** The legs that a payment may have charged: those of its intent, or those that are left of a lost one. */
const chargesOf = (events: readonly Recorded[]): readonly Pick<Intent['legs'][number], 'leg' | 'references'>[] => {
  const { legs } = events[0]!.data as unknown as Partial<Intent>;
  const lost = events.find(({ type }) => type === 'PaymentLost')?.data as { readonly references: Intent['legs'] } | undefined;
  return legs ?? lost!.references;
};

/** Statuses that may follow each status (States and transitions; C29). */
const NEXT: Readonly<Record<string, readonly string[]>> = {
  pending: ['pending', 'succeeded', 'failed', 'unknown', 'voided', 'partially_refunded', 'refunded'],
  unknown: ['unknown', 'voided', 'failed'],
  succeeded: ['succeeded', 'voided', 'partially_refunded', 'refunded'],
  partially_refunded: ['partially_refunded', 'refunded'],
  refunded: ['refunded'],
  voided: ['voided'],
  failed: ['failed'],
};

/** Settlements that may follow each settlement of a payment (C73). No run withdraws a settlement. null: not charged. */
const NEXT_SETTLEMENT: Readonly<Record<string, readonly string[]>> = {
  null: ['null', 'unsettled', 'settled', 'rejected'],
  unsettled: ['unsettled', 'settled', 'rejected'],
  settled: ['settled', 'rejected'],
  rejected: ['rejected'],
};
const settlementStatus = ({ settlement }: View): string => settlement?.status ?? 'null';

interface KeyHistory {
  readonly firstSentAt: number;
  /** Requests with the same key text whose key has expired after 24 h. */
  readonly earlier: readonly Exchange[];
  readonly exchanges: Exchange[];
}

/** The fee of C32, computed by independent code. */
const feeOf = (amountCents: number, { flatCents, percentBps, minCents, maxCents }: (typeof PORTALS)[number]['fee']): number => {
  const fee = flatCents + Number((BigInt(amountCents) * BigInt(percentBps) + 5_000n) / 10_000n);
  return Math.min(Math.max(fee, minCents), maxCents ?? Number.MAX_SAFE_INTEGER);
};

export class Oracle {
  readonly intentions: Intention[] = [];
  readonly answers: Record<string, number> = {};
  private readonly byRequest = new Map<string, Exchange>();
  private readonly keys = new Map<string, KeyHistory>();
  /** For each payment, the newest view that a client has read, and when. */
  private readonly read = new Map<string, { at: number; view: View }>();
  /** Payments that an answer has named, and when. */
  private readonly named = new Map<string, { at: number; accountId: string }>();
  /** Payments that staff have resolved, or tried to resolve. */
  private readonly resolved = new Set<string>();
  /** Returned money that a client knows of, by payment and transaction. */
  private readonly returned = new Map<string, Map<string, { at: number; cents: number }>>();
  private readonly pages = new PageJudge();

  constructor(private readonly world: World) {}

  private check(holds: boolean, rule: string): void {
    this.world.check(holds, rule);
  }

  intend(intention: Omit<Intention, 'exchanges' | 'belief' | 'name'>): Intention {
    const made: Intention = { ...intention, exchanges: [], belief: null, name: `${intention.kind} ${this.intentions.length + 1}` };
    this.intentions.push(made);
    return made;
  }

  // ---- answers, as they arrive

  sent(exchange: Exchange): void {
    const { ask, intention } = exchange;
    this.byRequest.set(exchange.requestId, exchange);
    intention?.exchanges.push(exchange);
    if (ask.kind === 'resolve') this.resolved.add(ask.request.paymentId);
    if (!isKeyed(ask)) return;
    const name = keyName(ask);
    const before = this.keys.get(name);
    // A key is kept for 24 h from its first use. After that, the same text is a new key.
    if (!before || exchange.sentAt - before.firstSentAt >= DAY_MS)
      this.keys.set(name, {
        firstSentAt: exchange.sentAt,
        earlier: before?.exchanges ?? [],
        exchanges: [exchange],
      });
    else before.exchanges.push(exchange);
  }

  answered(exchange: Exchange): void {
    const { ask, reply } = exchange;
    if (!reply) return;
    const answer = told(reply);
    const code = reply.replayed ? `${answer.code} (replayed)` : answer.code;
    this.answers[code] = (this.answers[code] ?? 0) + 1;
    const operation = isReversal(ask) ? ask.request.operation : ask.kind;
    const { watch } = this.world;
    // An incident of the event store (C76).
    const isRefused = watch !== null && answer.code === 'IDEMPOTENCY_UNAVAILABLE';
    // Until a process knows of the incident, it uses the wrong log and may answer PAYMENT_NOT_FOUND. Only a GET of a payment checks the log before
    // this answer.
    const isLost = watch?.overlaps(exchange.sentAt, exchange.answeredAt) === true;
    const isUnseen = (isLost || watch?.isTold === true) && answer.code === 'PAYMENT_NOT_FOUND' && ask.kind !== 'get';
    if (isLost && answer.status === 200 && !reply.replayed && !READS.includes(ask.kind)) watch.isTold = true;
    this.check(ALLOWED[operation].includes(answer.code) || isRefused || isUnseen, `${operation} answered ${answer.status} ${answer.code}`);
    if (answer.code === 'IDEMPOTENCY_IN_PROGRESS')
      this.check((reply.retryAfterSeconds ?? 0) >= 1 && (reply.retryAfterSeconds ?? 9) <= 5, 'C19: in progress without Retry-After of 1 to 5 s');
    if (ask.kind === 'create' || isReversal(ask)) this.judgeKey(exchange, answer);
    if (ask.kind === 'create') this.judgeCreate(exchange, answer);
    if (isReversal(ask) && answer.status === 200) this.noteReturned(exchange, answer);
    if (ask.kind === 'get' && !(isLost && answer.status === 200)) this.judgeRead(exchange, answer);
    if (ask.kind === 'list' && answer.status === 200 && !isLost) this.judgeList(exchange, reply, answer);
    if (isPayers(ask) && !isLost) this.pages.judge(exchange, this.check.bind(this));
    const id = answer.details.id ?? (ask.kind === 'create' ? answer.data.id : undefined);
    // The answer "reconciliation required" may name a payment that is abandoned later (C64).
    if (
      typeof id === 'string' &&
      !this.named.has(id) &&
      (ask.kind === 'create' || ask.kind === 'reverse' || ask.kind === 'get') &&
      answer.code !== 'IDEMPOTENCY_RECONCILIATION_REQUIRED' &&
      // During a loss, the payment may exist only in the wrong log.
      !isLost
    )
      this.named.set(id, { at: exchange.answeredAt, accountId: accountOf(ask) });
  }

  /** Payments that an answer named, and their accounts. */
  namedPayments(): (readonly [paymentId: string, accountId: string])[] {
    return [...this.named].map(([paymentId, { accountId }]) => [paymentId, accountId]);
  }

  /** When a request was sent. 0: no client sent this request. */
  sentAt(requestId: string): number {
    return this.byRequest.get(requestId)?.sentAt ?? 0;
  }

  /** The first request under every key. Keys that their client has replaced are left out if the service may have forgotten them. */
  firstUses(): Exchange[] {
    const first = new Map<string, Exchange>();
    const replaced = new Set<string>();
    for (const { exchanges, belief } of this.intentions)
      for (const exchange of exchanges) {
        const { ask } = exchange;
        if (!isKeyed(ask)) continue;
        const name = keyName(ask);
        if (!first.has(name)) first.set(name, exchange);
        const isReplaced = belief === 'not paid' || exchanges.some(({ ask: other }) => isKeyed(other) && keyName(other) !== name);
        if (isReplaced && this.mayBeForgotten(exchange)) replaced.add(name);
      }
    return [...first].flatMap(([name, exchange]) => (replaced.has(name) ? [] : [exchange]));
  }

  /** Idempotency rules 1–5, and C15–C19. */
  private judgeKey(exchange: Exchange, answer: Told): void {
    const { ask, reply, sentAt } = exchange;
    if (!isKeyed(ask)) {
      this.check(!reply!.replayed, 'a replay without a key');
      return;
    }
    const history = this.keys.get(keyName(ask))!;
    if (exchange.sentAt < history.firstSentAt) return;
    const last = history.earlier.at(-1);
    // The key of a refund or void is kept until its attempt has ended, and then for 24 h (C72). An answer shows that it has ended.
    const endedAt = last && (ask.kind === 'create' ? last.sentAt : last.answeredAt);
    if (endedAt !== undefined && exchange === history.exchanges[0] && sentAt - endedAt >= DAY_MS)
      this.check(!reply!.replayed, 'C20: a key that expired was replayed');
    const others = history.exchanges.filter((one) => one !== exchange && one.reply !== null);
    const before = others.filter(({ answeredAt }) => answeredAt <= sentAt).map((one) => ({ one, answer: told(one.reply!) }));
    const same = (one: Exchange) => bodyOf(one.ask) === bodyOf(ask);
    const transient = answer.code === 'IDEMPOTENCY_UNAVAILABLE' || answer.code === 'IDEMPOTENCY_IN_PROGRESS';
    const isFinal = (one: Told) =>
      one.status === 200 || one.code === 'PAYMENT_DECLINED' || (one.code === 'VOID_FAILED' && one.details.retryable === false);

    if (answer.code === 'IDEMPOTENCY_MISMATCH') {
      this.check(
        [...history.earlier, ...history.exchanges].some((one) => !same(one)),
        'rule 2: mismatch although every request with this key was the same',
      );
      return;
    }
    const bound = before.some(
      ({ one, answer: earlier }) =>
        !this.mayBeForgotten(one) && !same(one) && (isFinal(earlier) || isFiveHundred(earlier)) && earlier.code !== 'IDEMPOTENCY_MISMATCH',
    );
    if (bound)
      this.check(answer.code === 'IDEMPOTENCY_UNAVAILABLE', `rule 2: another body under a used key was answered ${answer.status} ${answer.code}`);
    if (isFinal(answer))
      for (const other of others)
        if (same(other) && isFinal(told(other.reply!)) && !this.mayBeForgotten(exchange) && !this.mayBeForgotten(other))
          this.check(other.reply!.body === reply!.body, `A7: a key was answered in two ways: ${other.reply!.body} / ${reply!.body}`);

    for (const { one, answer: earlier } of before) {
      if (!same(one) || this.mayBeForgotten(one)) continue;
      if (isFinal(earlier)) {
        // If the ending of a refund's key was lost, the service answers from the log after the lease. If it cannot read the log, the answer is a 5xx.
        const again = ask.kind !== 'create' && isFiveHundred(answer);
        // Only the row of the key holds the refusal "the batch has settled". If the row was not written, the service decides again.
        const anew = earlier.code === 'VOID_FAILED' && one.reply!.body.includes('batch has settled') && answer.code === 'INVALID_STATE';
        this.check(
          isFinal(answer) || transient || again || anew,
          `rule 1: after ${earlier.status} the same key was answered ${answer.status} ${answer.code}`,
        );
      }
      if (ask.kind !== 'create') continue;
      if (earlier.code === 'IDEMPOTENCY_RECONCILIATION_REQUIRED')
        this.check(
          // If its row is made again from the log, the key has the answer that the log holds (T13).
          transient || answer.code === earlier.code || (this.mayBeLost(one) && isFinal(answer) && reply!.replayed === true),
          `C16: after reconciliation required the key was answered ${answer.status} ${answer.code}`,
        );
      if (isFiveHundred(earlier))
        this.check(
          transient || answer.code === 'IDEMPOTENCY_RECONCILIATION_REQUIRED' || (isFinal(answer) && reply!.replayed === true),
          `A12: after ${earlier.status} ${earlier.code} the key executed again: ${answer.status} ${answer.code}`,
        );
    }
  }

  /** True if the keys' database may have lost what this request wrote. */
  private mayBeLost({ sentAt, answeredAt }: Exchange): boolean {
    const { keyLoss } = this.world;
    return keyLoss !== null && answeredAt > keyLoss.copiedAt && sentAt <= keyLoss.wentBackAt;
  }

  /**
   * True if the keys' database may have lost what this request wrote, and the log cannot give it back. Either no event of that time names the key: then
   * no gateway was called, and the key is free again (T13). Or the request was refused without an event, since the batch had settled. Every other key
   * has to keep its answer.
   */
  private mayBeForgotten(exchange: Exchange): boolean {
    const { ask, reply } = exchange;
    if (!isKeyed(ask) || !this.mayBeLost(exchange)) return false;
    const hash = RING.mac('idempotency-key', ask.key!, RING.kids[0]).toString('hex');
    const logged = this.world.loggedKeys.get(loggedKeyName('accountId' in ask.request ? ask.request.accountId : null, hash));
    const { wentBackAt } = this.world.keyLoss!;
    // A request that was sent before may append its intent later.
    const isLogged = logged !== undefined && (logged.at <= wentBackAt || this.sentAt(logged.requestId) <= wentBackAt);
    return !isLogged || reply?.body.includes('batch has settled') === true;
  }

  private judgeCreate(exchange: Exchange, answer: Told): void {
    if (exchange.ask.kind !== 'create') return;
    const { request } = exchange.ask;
    if (answer.status === 200) {
      const portal = PORTALS.find(({ portalId }) => portalId === request.portalId)!;
      const fee = feeOf(request.amountCents, portal.fee);
      const { amountCents, serviceFeeCents, totalChargedCents, lineItems } = answer.data as Record<string, number> & { lineItems: never };
      this.check(amountCents === request.amountCents && serviceFeeCents === fee && totalChargedCents === request.amountCents + fee, 'C32: another charge than was asked'); // prettier-ignore
      const shares = (lineItems as readonly { serviceFeeCents: number }[]).reduce((sum, line) => sum + line.serviceFeeCents, 0);
      this.check(shares === fee, 'the lines’ fees do not sum to the fee');
      const view = answer.data as unknown as View;
      this.checkMoney(view);
      this.checkSettlement(view);
      this.check(settlementStatus(view) === 'unsettled', `C73: a create was answered with a settlement that is ${settlementStatus(view)}`);
    }
    // A 504 may lack it if the intent has no known outcome (C19). Then the bank has heard of nothing, see auditCharges.
    if (answer.status === 502) this.check(typeof answer.details.id === 'string', 'C43: a 502 without the payment id');
  }

  private noteReturned(exchange: Exchange, answer: Told): void {
    const { id, amountCents, gateway } = answer.data as { id: string; amountCents: number; gateway: { transactionId: string } };
    const known = this.returned.get(id) ?? new Map<string, { at: number; cents: number }>();
    this.returned.set(id, known);
    const before = known.get(gateway.transactionId);
    if (!before || before.cents < amountCents) known.set(gateway.transactionId, { at: exchange.answeredAt, cents: amountCents });
  }

  private checkMoney(view: View): void {
    const { capturedAmountCents, refundedAmountCents, remainingRefundableAmountCents } = view;
    this.check(capturedAmountCents === refundedAmountCents + remainingRefundableAmountCents, 'contract 4: captured is not refunded plus remaining');
  }

  /** C73: a charged payment has a settlement, no other payment has one, and it says only what a batch of the bank says. */
  private checkSettlement({ settlement, capturedAmountCents }: View): void {
    this.check((settlement !== null) === capturedAmountCents > 0, 'C73: a settlement without a charge, or a charge without a settlement');
    if (settlement === null) return;
    const { status, settledAt } = settlement;
    const sales = this.world.bank.lines.filter(({ type }) => type === 'sale');
    this.check(status === 'rejected' || (status === 'settled') === (settledAt !== null), `C73: ${status} at ${settledAt}`);
    this.check(
      settledAt === null || sales.some(({ accepted, closedAt }) => accepted && closedAt === settledAt),
      `C73: settled at ${settledAt}, when no batch of the bank closed`,
    );
    this.check(status !== 'rejected' || sales.some(({ accepted }) => !accepted), 'C73: rejected, and the bank has rejected nothing');
  }

  private judgeRead(exchange: Exchange, answer: Told): void {
    if (exchange.ask.kind !== 'get') return;
    const { paymentId, accountId } = exchange.ask;
    const named = this.named.get(paymentId);
    const mine = named?.accountId === accountId;
    if (answer.status === 404) {
      this.check(!(mine && named.at <= exchange.sentAt), 'C48: a payment that an answer named is not found');
      return;
    }
    if (answer.status !== 200) return;
    this.check(mine || named === undefined, 'C7: another account reads the payment');
    const view = answer.data as unknown as View;
    this.checkMoney(view);
    this.checkSettlement(view);
    const last = this.read.get(paymentId);
    if (last && last.at <= exchange.sentAt) {
      const byPerson = this.resolved.has(paymentId) && (last.view.status === 'unknown' || last.view.status === 'pending');
      this.check(byPerson || NEXT[last.view.status]?.includes(view.status) === true, `C29: read ${last.view.status}, then ${view.status}`);
      this.check(view.refundedAmountCents >= last.view.refundedAmountCents, 'money that had come back is gone again');
      const [before, now] = [settlementStatus(last.view), settlementStatus(view)];
      this.check(NEXT_SETTLEMENT[before]!.includes(now), `C73: read a settlement that is ${before}, then ${now}`);
    }
    if (!last || last.at < exchange.answeredAt) this.read.set(paymentId, { at: exchange.answeredAt, view });
    const back = [...(this.returned.get(paymentId)?.values() ?? [])].filter(({ at }) => at <= exchange.sentAt);
    const toldCents = back.reduce((sum, { cents }) => sum + cents, 0);
    this.check(view.refundedAmountCents >= toldCents, `A3: told that ${toldCents} came back, then read ${view.refundedAmountCents}`);
  }

  private judgeList(exchange: Exchange, reply: Reply, answer: Told): void {
    if (exchange.ask.kind !== 'list') return;
    const { accountId, filters, cursor, limit } = exchange.ask;
    const { payments, nextCursor } = answer.data as unknown as { payments: View[]; nextCursor: string | null };
    this.check(
      payments.every((view, index) => index === 0 || view.createdAt <= payments[index - 1]!.createdAt),
      'C45: the list is not newest first',
    );
    this.check(payments.length <= (limit ?? 25), 'C44: more payments than asked for');
    for (const view of payments) {
      this.checkMoney(view);
      this.checkSettlement(view);
      const named = this.named.get(view.id);
      this.check(named === undefined || named.accountId === accountId, 'C7: a list shows another account’s payment');
      this.check(filters.status === null || view.status === filters.status, 'C44: a list shows another status');
      this.check(filters.portalId === null || view.portalId === filters.portalId, 'C44: a list shows another portal');
    }
    if (!reply.complete || cursor !== null || nextCursor !== null || filters.status !== null || filters.portalId !== null || filters.from !== null)
      return;
    for (const [id, { at, accountId: owner }] of this.named)
      if (owner === accountId && at <= exchange.sentAt)
        this.check(
          payments.some((view) => view.id === id),
          'C48: a list that is complete misses a payment that an answer named',
        );
  }

  // ---- the books, after everything was healed

  /** True if the service has no work left. Payments that wait for staff may be open. */
  async isQuiet(): Promise<boolean> {
    const { world } = this;
    const { sim } = world;
    if (world.marks.incident) return false;
    if (sim.underway > 0 || world.replicas.some(({ process }) => !process.up || process.pausedUntil > sim.now)) return false;
    // The sweeper finishes the keys of crashed creates. The key of a refund is finished only when its client sends it again. So it does not count as
    // work after its lease.
    if ([...world.keys.rows.values()].some((row) => row.state === 'in_progress' && (row.operation === 'create' || row.leaseUntil! > sim.now)))
      return false;
    const head = await world.log.head();
    const isBehind = (projection: string, { checkpoints } = world.tables) => head !== null && (checkpoints.get(projection)?.position ?? '') < head;
    if (world.losesKeys && (isBehind(KEYS_FROM_LOG, world.keyTables) || !world.replicas.every(({ claimsAreOpen }) => claimsAreOpen))) return false;
    if (isBehind(checkpointOf(paymentListModel))) return false;
    if ((await this.settlementLines()).length < world.bank.lines.length) return false;
    const phases = new Map<string, string>();
    for (const [stream, events] of await this.streams()) {
      const state = this.folded(events);
      if (!state) continue;
      phases.set(paymentIdOf(stream), state.phase);
      if (state.phase === 'pending' || (state.phase === 'unknown' && !(state.fenced && this.waitsForAPerson(events)))) return false;
      if (state.phase === 'charged' && state.attempts.some(({ ended }) => ended === null)) return false;
    }
    if (world.hasWebhooks && (isBehind(WEBHOOK_OUTBOX) || !areDeliveriesQuiet(world.tables.webhooks))) return false;
    if (!world.hasCheckout) return true;
    if (isBehind(checkpointOf(checkoutUnfinishedModel))) return false;
    const sessions = [...(await this.checkouts()).values()].map((events) => sessionOf(events, this.check.bind(this)));
    return sessions.every((session) => session === null || isSessionQuiet(session, (paymentId) => phases.get(paymentId)));
  }

  /** True if no process crashed or was paused. Then the log shows every 5xx, and the service recognises a repeat without a key (C18). */
  private get undisturbed(): boolean {
    const { crashes, pauses } = this.world.sim.statistics;
    return crashes + pauses === 0;
  }

  /**
   * True if a process stood still between its claim and its intent, and lost its key meanwhile. The intent may be in the log, but the bank must never
   * have heard of it.
   */
  private wentNoFurther(exchange: Exchange, { chargeRefs }: Book): boolean {
    return this.mayBeLost(exchange) && chargeRefs.every((ref) => !this.world.bank.sent.has(ref));
  }

  private async streams(prefix = 'payment-'): Promise<Map<string, Recorded[]>> {
    const streams = new Map<string, Recorded[]>();
    for (const events of await collect(this.world.log.readAll(null, { streamPrefixes: [prefix] })))
      for (const event of events) {
        const known = streams.get(event.stream);
        if (known) known.push(event);
        else streams.set(event.stream, [event]);
      }
    return streams;
  }

  /** The events of all checkouts, by checkout id. */
  private async checkouts(): Promise<Map<string, Recorded[]>> {
    return new Map([...(await this.streams(CHECKOUT_STREAMS[0]))].map(([stream, events]) => [checkoutIdOf(stream), events]));
  }

  /** The product's fold of a stream. null: the product refuses the events as impossible. */
  private folded(events: readonly Recorded[]): Payment | null {
    try {
      return fold(decider, events.map(paymentEvents.read));
    } catch (error) {
      this.check(false, `A6: ${(error as Error).message}`);
      return null;
    }
  }

  private async settlementLines(): Promise<SettlementLine[]> {
    const recorded = (await collect(this.world.log.readAll(null, { streamPrefixes: ['settlement-'] }))).flat();
    return recorded.flatMap(({ type, data, meta }) =>
      type === 'SettlementLinesRecorded'
        ? (data as unknown as { lines: Omit<SettlementLine, 'at'>[] }).lines.map((line) => ({ ...line, at: Date.parse(meta.recordedAt) }))
        : [],
    );
  }

  /** True if the bank cannot say whether it charged, or if no void can undo the charge any more. Then only staff may decide (C29). */
  private waitsForAPerson(events: readonly Recorded[]): boolean {
    const isLost = events.some(({ type }) => type === 'PaymentLost');
    const intent = events[0]!.data as unknown as Intent;
    return chargesOf(events).some(({ references }) => {
      const executed = this.world.bank.answers.get(references.charge);
      if (executed?.cannotTell) return true;
      const charge = this.chargeUnder(references.charge);
      // The log has lost the end of the create. Its caller may have been told that it succeeded, so the charge is never undone by itself.
      if (isLost && charge !== undefined) return this.world.bank.remaining(charge) > 0;
      if (charge === undefined || this.abilityOf(intent).voids === 'none') return false;
      return charge.batchId !== null || charge.card === 'voidRejected';
    });
  }

  private abilityOf({ portalId }: Pick<Intent, 'portalId'>): (typeof CAPABILITIES)[GatewayName] {
    return CAPABILITIES[PORTALS.find((portal) => portal.portalId === portalId)!.gateway];
  }

  /** The payments with an unknown outcome, and the bank's state of each leg. */
  async waiting(): Promise<{ paymentId: string; canTell: boolean; charged: { leg: string; transactionId: string | null }[] }[]> {
    const found = [];
    for (const [stream, events] of await this.streams()) {
      if (this.folded(events)?.phase !== 'unknown') continue;
      const legs = chargesOf(events);
      const { bank } = this.world;
      const canTell = legs.every(({ references }) => !bank.answers.get(references.charge)?.cannotTell);
      const charged = legs.map(({ leg, references }) => {
        const charge = this.chargeUnder(references.charge);
        return { leg, transactionId: charge && bank.remaining(charge) > 0 ? charge.transactionId : null };
      });
      found.push({ paymentId: paymentIdOf(stream), canTell, charged });
    }
    return found;
  }

  private chargeUnder(ref: string): BankCharge | undefined {
    const result = this.world.bank.answers.get(ref)?.result;
    if (result?.kind === 'held') return this.world.bank.charges.get(result.transactionId);
    return result?.kind === 'approved' ? this.world.bank.charges.get(result.txn.transactionId) : undefined;
  }

  async audit(): Promise<void> {
    const streams = await this.streams();
    const books = [...streams].map(([stream, events]) => this.bookOf(paymentIdOf(stream), events));
    const claimed = new Set(books.flatMap(({ chargeRefs }) => chargeRefs));
    for (const charge of this.world.bank.charges.values())
      this.check(claimed.has(charge.ref), `A2: the bank charged ${charge.amountCents} cents for no payment`);
    this.auditCharges(books);
    this.auditReversals(books);
    await this.auditSettlement(books);
    const bookOf = new Map(books.map((book) => [book.paymentId, book]));
    const check = this.check.bind(this);
    const settlement = (await collect(this.world.log.readAll(null, { streamPrefixes: ['settlement-'] }))).flat();
    auditLedger(streams, settlement, (id) => (bookOf.get(id)?.phase === 'charged' ? bookOf.get(id)!.netCents : null), check);
    const staffReturned = (id: string) => this.staffReturned(bookOf.get(id)!);
    auditNotifications(streams, staffReturned, check);
    auditDeliveries(this.world, streams, staffReturned, check);
    this.auditKeys(streams);
    this.auditList(streams);
    const sessions = await this.checkouts();
    this.auditLost(streams, sessions);
    auditSessions(sessions, bookOf, (requestId) => this.sessionOfRequest(requestId), this.world.bank, this.world.tables.intakes, check);
    auditUnfinished(sessions, this.world.tables.unfinished, check);
    this.auditCardData(streams, sessions);
  }

  /**
   * C64: a payment counts as lost only if the log has lost the intent of its request. A checkout has no row that tells whether a call began. So if its
   * attempt never began, it may count as lost until a bank can tell that tells late.
   */
  private auditLost(streams: ReadonlyMap<string, readonly Recorded[]>, sessions: ReadonlyMap<string, readonly Recorded[]>): void {
    const { watch, bank } = this.world;
    const ofCheckouts = new Set([...sessions.values()].flat().map(({ data }) => (data as { readonly paymentId?: string }).paymentId));
    for (const [stream, events] of streams) {
      const lost = events.find(({ type }) => type === 'PaymentLost');
      if (!lost) continue;
      const refs = chargesOf([lost]).map(({ references }) => references.charge);
      // An intent that was appended again has another request.
      const requests = refs.flatMap((ref) => watch?.requestOf.get(ref) ?? []).filter((id) => this.byRequest.has(id));
      const wasLost = watch?.loss && requests.some((id) => id !== events[0]!.meta.correlationId);
      const neverBegan =
        ofCheckouts.has(paymentIdOf(stream)) &&
        this.abilityOf(lost.data as unknown as Intent).finalize === 'after_batch' &&
        refs.every((ref) => !bank.sent.has(ref));
      this.check(!!wasLost || neverBegan, 'C64: a payment counts as lost, and the log lost nothing of it');
    }
  }

  /** The session of a payer's request. null: it was another request. */
  private sessionOfRequest(requestId: string): string | null {
    const ask = this.byRequest.get(requestId)?.ask;
    return ask?.kind === 'submit' ? ask.checkoutId : null;
  }

  /** The cents that the bank returned under the references of staff's attempts. */
  private staffReturned(book: Book): number {
    const refs = new Set<string>();
    for (const { request } of book.attempts.values())
      if (this.byReason(request)?.actor === 'staff') for (const { references } of request.legs) refs.add(references.void).add(references.refund);
    return [...this.world.bank.reversals.values()].reduce((sum, { ref, amountCents }) => (refs.has(ref) ? sum + amountCents : sum), 0);
  }

  /** Compares one stream with the bank: A2, A4, A5, A6, A9, C61. */
  private bookOf(paymentId: string, events: readonly Recorded[]): Book {
    const { world } = this;
    const { bank } = world;
    const book: Book = {
      paymentId,
      phase: 'none',
      intent: null,
      requestId: events[0]!.meta.correlationId,
      chargeRefs: [],
      attempts: new Map(),
      netCents: 0,
      resolved: false,
      voidedAt: Number.NEGATIVE_INFINITY,
    };
    const legs = new Map<string, { charged: number; back: number; transactionId: string }>();
    let open: BookAttempt | null = null;
    let fenced = false;
    const chargedAs = (charged: readonly ChargedLeg[]) => {
      for (const { leg, transactionId } of charged) {
        const terms = book.intent!.legs.find((one) => one.leg === leg)!;
        legs.set(leg, { charged: terms.principalCents + terms.feeCents, back: 0, transactionId });
      }
    };
    const must = (holds: boolean, what: string) => this.check(holds, `A6: ${what} in ${book.phase}`);
    for (const event of events) {
      const data = event.data as Record<string, unknown>;
      const phase = book.phase;
      switch (event.type) {
        case 'PaymentInitiated': {
          must(phase === 'none', event.type);
          book.phase = 'pending';
          book.intent = event.data as unknown as Intent;
          this.checkIntent(book.intent);
          book.chargeRefs = book.intent.legs.map(({ references }) => references.charge);
          break;
        }
        case 'PaymentAbandoned':
          must(phase === 'none', event.type);
          book.phase = 'abandoned';
          break;
        case 'PaymentLost': {
          must(phase === 'none' || phase === 'pending', event.type);
          book.phase = 'unknown';
          fenced = true;
          if (!book.intent) book.chargeRefs = chargesOf(events).map(({ references }) => references.charge);
          break;
        }
        case 'PaymentCreated':
          must(phase === 'pending', event.type);
          book.phase = 'charged';
          chargedAs(data.legs as readonly ChargedLeg[]);
          break;
        case 'PaymentDeclined':
          must(phase === 'pending' || (phase === 'unknown' && fenced), event.type);
          book.phase = 'failed';
          break;
        case 'PaymentFailed':
          must(phase === 'pending', event.type);
          book.phase = 'failed';
          break;
        case 'PaymentOutcomeUnknown':
          must(phase === 'pending', event.type);
          book.phase = 'unknown';
          break;
        case 'ReconciliationStarted':
          if (phase === 'charged') {
            const attempt = book.attempts.get(data.attemptId as string);
            must(attempt !== undefined, event.type);
            if (attempt && !attempt.ended) {
              attempt.fenced = true;
              // C72: only the call of this leg may be sent again.
              attempt.underWay = attempt.request.legs.find(({ leg }) => !attempt.returned.some((part) => part.leg === leg))?.leg ?? null;
            }
          } else {
            must(phase === 'pending' || phase === 'unknown', event.type);
            book.phase = 'unknown';
            fenced = true;
          }
          break;
        case 'VoidRequested':
        case 'RefundRequested': {
          must(phase === 'charged' && open === null, event.type);
          const data = event.data as unknown as BookAttempt['request'];
          const request = { ...data, context: `${event.stream}/reason:${data.attemptId}` };
          open = { request, operation: event.type === 'VoidRequested' ? 'void' : 'refund', requestId: event.meta.correlationId, requestedAt: Date.parse(event.meta.recordedAt), fenced: false, underWay: null, ended: null, endedAt: Number.POSITIVE_INFINITY, returned: [], remainingAfter: 0 }; // prettier-ignore
          book.attempts.set(request.attemptId, open);
          break;
        }
        case 'PaymentVoided':
        case 'PaymentRefunded':
        case 'FeeRefunded': {
          if (phase !== 'charged') {
            must((phase === 'unknown' && fenced) || phase === 'voided', event.type);
            book.phase = 'voided';
            book.voidedAt = Date.parse(event.meta.recordedAt) + this.world.clocksDifferMs;
            break;
          }
          const returned = event.data as unknown as Returned;
          const leg = legs.get(returned.leg);
          must(open !== null && open.request.attemptId === returned.attemptId && leg !== undefined, event.type);
          const cents = returned.principalCents + returned.feeCents;
          if (leg) leg.back += cents;
          this.check(leg !== undefined && leg.back <= leg.charged, 'A5: more came back on a leg than was charged');
          open?.returned.push(returned);
          const atBank = bank.reversals.get(returned.transactionId);
          const op = event.type === 'PaymentVoided' ? 'void' : 'refund';
          this.check(
            atBank !== undefined && atBank.op === op && atBank.amountCents === cents && atBank.charge.transactionId === leg?.transactionId,
            `A2: the log says that ${cents} cents came back by ${op}, the bank says ${atBank ? `${atBank.amountCents} by ${atBank.op}` : 'nothing'}`,
          );
          break;
        }
        case 'ReversalEnded': {
          must(open !== null, event.type);
          if (!open) break;
          open.ended = data.outcome as string;
          open.endedAt = Date.parse(event.meta.recordedAt);
          open.remainingAfter = [...legs.values()].reduce((sum, leg) => sum + leg.charged - leg.back, 0);
          const moved = open.returned.reduce((sum, part) => sum + part.principalCents + part.feeCents, 0);
          this.check(data.amountCents === moved, 'A4: an attempt ended with another sum than it returned');
          this.check(data.initiatedBy === open.request.initiatedBy, 'C56: an attempt ended as somebody else’s');
          open = null;
          break;
        }
        case 'ReversalAcknowledged':
        case 'PaymentSettled':
        case 'SettlementRejected':
        case 'SettlementWithdrawn':
        case 'PaymentDisputed':
          must(phase === 'charged', event.type);
          break;
        case 'PaymentResolved': {
          must(phase === 'unknown' && fenced, event.type);
          const { as, charge } = event.data as unknown as { as: 'succeeded' | 'voided' | 'failed'; charge: { legs: ChargedLeg[] } | null };
          book.phase = as === 'succeeded' ? 'charged' : as;
          book.resolved = true;
          chargedAs(charge?.legs ?? []);
          break;
        }
        default:
          this.check(false, `A6: an event that nobody knows: ${event.type}`);
      }
    }
    if (open) this.check(false, `A9: a ${open.operation} is still open when everything runs again`);

    const taken = (book.intent?.legs ?? []).map(({ leg, references }) => ({ leg, charge: this.chargeUnder(references.charge) }));
    for (const { leg, charge } of taken) {
      const here = legs.get(leg);
      const live = charge ? bank.remaining(charge) : 0;
      if (book.phase === 'charged') {
        const netHere = here ? here.charged - here.back : -1;
        this.check(
          charge?.transactionId === here?.transactionId && charge?.amountCents === here?.charged,
          'A2: a charge in the log is not the bank’s',
        );
        this.check(live === netHere, `A2: the bank keeps ${live} cents of a ${leg} leg, the log ${netHere}`);
        this.check(charge?.card !== 'held', `A2: a ${leg} leg counts as charged, and the bank holds it for review`);
        book.netCents += live;
      } else if (book.phase === 'failed' || book.phase === 'voided')
        this.check(live === 0, `A2: a ${book.phase} payment, and the bank keeps ${live} cents of its ${leg} leg`);
    }
    if (book.phase === 'pending' || book.phase === 'unknown')
      this.check(book.phase === 'unknown' && this.waitsForAPerson(events), `A9: a payment is still ${book.phase} when everything runs again`);
    if (book.phase === 'abandoned') {
      const { attemptId } = events[0]!.data as unknown as { attemptId: string };
      for (const leg of ['principal', 'fee', 'combined'] as const)
        this.check(this.chargeUnder(gatewayRef(attemptId, leg, 'charge')) === undefined, 'C64: an abandoned payment was charged');
    }
    // C61: when recovery has ended an attempt, each of its references is executed or finalised. So a paused process cannot execute one later.
    // A bank without tombstones promises it by its batches, and knows no reference of a void. A bank without voids takes none.
    const ability = book.intent && this.abilityOf(book.intent);
    const tells = ability?.finalize === 'at_once';
    const answered = (ref: string) => !tells || bank.answers.has(ref) || bank.tombstones.has(ref);
    if (fenced && !book.resolved && !tells && book.phase === 'voided')
      for (const { references } of book.intent?.legs ?? []) {
        const at = events.find(({ type }) => type === 'PaymentVoided')!.meta.recordedAt;
        if (!bank.answers.has(references.charge))
          this.check(
            Date.parse(at) >= batchOf(events[0]!.meta.recordedAt).listedAt - CLOCKS_DIFFER_MS,
            'C61: a charge was given up before its batch was listed',
          );
      }
    if (fenced && !book.resolved && (book.phase === 'voided' || book.phase === 'failed'))
      for (const { references } of book.intent?.legs ?? []) {
        this.check(answered(references.charge), 'C61: a charge was given up although its reference may still be executed');
        if (!bank.answers.has(references.charge)) this.check(answered(references.reversal), 'C61: a reversal’s reference may still be executed');
      }
    if (fenced && !book.resolved && book.phase === 'voided') this.auditSoon(book, Date.parse(events[0]!.meta.recordedAt));
    for (const attempt of book.attempts.values())
      if (attempt.fenced && attempt.ended !== null)
        for (const { leg, references } of attempt.request.legs)
          this.check(
            attempt.returned.some((part) => part.leg === leg) ||
              ((ability?.voids === 'none' || answered(references.void)) && (attempt.operation === 'void' || answered(references.refund))),
            `C61: the ${leg} leg of an ended ${attempt.operation} may still be executed`,
          );
    for (const { operation, request, underWay } of book.attempts.values())
      for (const { leg, references } of request.legs) {
        const { repeated } = this.world;
        if (repeated.has(references.void) || repeated.has(references.refund))
          this.check(leg === underWay, `C72: recovery sent the ${leg} leg, which was not under way at the fence`);
        if (operation === 'void') this.check(!bank.sent.has(references.refund), 'C72: a void was sent as a refund');
      }
    return book;
  }

  /**
   * A charge that arrives while recovery waits for the batch is undone soon: it must not settle. Judged only where nothing else disturbs recovery.
   * `begunAt`: the time of the intent.
   */
  private auditSoon({ chargeRefs }: Book, begunAt: number): void {
    const { sim, bank, watch, keyLoss } = this.world;
    const { drops, lost, outages, crashes, pauses } = sim.statistics;
    if (drops + lost + outages + crashes + pauses > 0 || watch !== null || keyLoss !== null) return;
    for (const ref of chargeRefs) {
      const charge = this.chargeUnder(ref);
      const undone = [...bank.reversals.values()].find((one) => one.charge === charge && one.askedBy === 'reversal');
      if (!charge || !undone) continue;
      const seenAt = Math.max(charge.at, begunAt + LOOKED_AT_AFTER_MS);
      this.check(undone.at <= seenAt + FOUND_WITHIN_MS, 'P7: a charge that had arrived was undone late');
    }
  }

  private checkIntent(intent: Intent): void {
    const portal = PORTALS.find(({ portalId }) => portalId === intent.portalId)!;
    const fee = feeOf(intent.amountCents, portal.fee);
    const sum = (items: readonly number[]) => items.reduce((total, item) => total + item, 0);
    this.check(intent.serviceFeeCents === fee, 'C32: an intent with another fee');
    this.check(sum(intent.lineItems.map((line) => line.serviceFeeCents)) === fee, 'A4: the lines’ fees do not sum to the fee');
    this.check(sum(intent.lineItems.map((line) => line.amountCents)) === intent.amountCents, 'A4: the lines do not sum to the principal');
    this.check(
      sum(intent.legs.map((leg) => leg.principalCents + leg.feeCents)) === intent.amountCents + fee,
      'A4: the legs do not sum to the charge',
    );
    this.check(this.world.velocity.attempts.get(intent.attemptId) === 1, 'an attempt was not counted once');
  }

  /** C65: a request that was refused for its account's share has begun nothing. `exchange`: a request whose intent is in the log. */
  private checkBegan(exchange: Exchange | undefined): void {
    if (exchange?.reply) this.check(told(exchange.reply).code !== 'RATE_LIMITED', 'C65: a request that had begun was answered RATE_LIMITED');
  }

  /** Compares the intentions of clients with their payments: A1, A2, A3, A12. */
  private auditCharges(books: readonly Book[]): void {
    const byIntention = new Map<Intention, Book[]>();
    const byKey = new Map<string, number>();
    for (const book of books) {
      const exchange = this.byRequest.get(book.requestId);
      if (!exchange?.intention || !book.intent) continue;
      this.checkBegan(exchange);
      if (exchange.reply && exchange.ask.kind === 'create' && namesNoPayment(told(exchange.reply)))
        this.check(
          book.chargeRefs.every((ref) => !this.world.bank.sent.has(ref)),
          'C42: a 504 without the payment id, and the bank was called',
        );
      byIntention.set(exchange.intention, [...(byIntention.get(exchange.intention) ?? []), book]);
      if (exchange.ask.kind === 'create' && exchange.ask.key !== null && !this.wentNoFurther(exchange, book)) {
        const history = [...this.keys.values()].find(({ exchanges }) => exchanges.includes(exchange));
        const name = `${keyName(exchange.ask)} ${history?.firstSentAt ?? 'before'}`;
        byKey.set(name, (byKey.get(name) ?? 0) + 1);
      }
    }
    this.auditKeptKeys(books);
    for (const times of byKey.values()) this.check(times === 1, `A12: a key was executed ${times} times`);
    for (const intention of this.intentions) {
      if (intention.kind !== 'charge') continue;
      const mine = byIntention.get(intention) ?? [];
      const charged = mine.filter(({ phase }) => phase === 'charged');
      this.check(charged.length <= 1, `A1: ${intention.name} was charged ${charged.length} times`);
      if (intention.belief === 'paid')
        this.check(charged[0]?.paymentId === intention.paymentId, `A3: ${intention.name} was told that it had paid, and it has not`);
      if (intention.belief === 'not paid')
        this.check(
          charged.length === 0 && mine.every(({ netCents }) => netCents === 0),
          `A1: ${intention.name} was told that it had not paid, and it has`,
        );
      for (const { ask, reply, sentAt, answeredAt } of intention.exchanges) {
        if (!reply || isPayers(ask)) continue;
        const answer = told(reply);
        const id = answer.data.id ?? answer.details.id;
        const book = books.find(({ paymentId }) => paymentId === id);
        if (answer.status === 200) this.check(book?.phase === 'charged', 'A3: a 200 without its outcome in the log');
        if (answer.code === 'PAYMENT_DECLINED' || answer.code === 'PAYMENT_GATEWAY_ERROR') {
          // The wrong log may have taken the outcome. A create whose intent the right log lacks is abandoned when the incident is closed. If its
          // intent was kept, it is lost instead, and recovery voids it when the gateway says that it never charged (C64).
          const wasLost = answer.code === 'PAYMENT_GATEWAY_ERROR' && this.world.watch?.overlaps(sentAt, answeredAt) === true;
          this.check(
            book?.phase === 'failed' || (wasLost && (book?.phase === 'abandoned' || (book?.phase === 'voided' && book.netCents === 0))),
            `C43: ${answer.status}, and the payment is ${book?.phase ?? 'nowhere'}`,
          );
        }
      }
    }
  }

  /**
   * C18: a repeat without a key gets the result of the request that it repeats. Equal intentions cannot be told apart, so they are counted together:
   * the principal comes back at most once for each of them. An intention with an unanswered request is left out.
   */
  private auditRepeats(begun: ReadonlyMap<Intention, readonly { attempt: BookAttempt }[]>): void {
    const alike = new Map<string, Intention[]>();
    for (const intention of this.intentions) {
      const { kind, actor, paymentId, asked, exchanges } = intention;
      if (kind === 'charge' || exchanges.some(({ ask, reply }) => isKeyed(ask) || reply === null)) continue;
      const name = JSON.stringify([kind, actor, paymentId, asked]);
      alike.set(name, [...(alike.get(name) ?? []), intention]);
    }
    for (const intentions of alike.values()) {
      const times = intentions
        .flatMap((one) => begun.get(one) ?? [])
        .filter(({ attempt }) => attempt.returned.some((part) => part.principalCents > 0)).length;
      this.check(times <= intentions.length, `C18: ${intentions.map(({ name }) => name).join(', ')}: principal came back ${times} times`);
    }
  }

  /** C16: a key is kept as long as the outcome of its payment is unknown. */
  private auditKeptKeys(books: readonly Book[]): void {
    const undecided = books.filter((book) => book.phase === 'unknown' || book.resolved);
    for (const { requestId } of undecided) {
      const first = this.byRequest.get(requestId);
      if (!first || !isKeyed(first.ask)) continue;
      const name = keyName(first.ask);
      for (const later of books) {
        const exchange = this.byRequest.get(later.requestId);
        if (exchange && exchange !== first && isKeyed(exchange.ask) && keyName(exchange.ask) === name && exchange.sentAt > first.sentAt)
          this.check(false, 'C16: a key was executed again although nobody knows what became of its payment');
      }
    }
  }

  private byReason(request: BookAttempt['request']): Intention | undefined {
    const reason = this.world.opened.content(request.personal, request.context)?.reason;
    return this.intentions.find(({ name }) => name === reason);
  }

  /** Compares requested returns with returned money and with answers. Each return happens at most once (C17, C18, C38). */
  private auditReversals(books: readonly Book[]): void {
    const begun = new Map<Intention, { book: Book; attempt: BookAttempt }[]>();
    const byTransaction = new Map<string, { book: Book; attempt: BookAttempt }>();
    for (const book of books)
      for (const attempt of book.attempts.values()) {
        const intention = this.byReason(attempt.request);
        if (!intention) {
          this.check(false, 'a reversal that nobody asked for');
          continue;
        }
        const { asked, initiatedBy } = attempt.request;
        this.checkBegan(this.byRequest.get(attempt.requestId));
        this.check(
          attempt.operation === intention.kind && initiatedBy === intention.actor && book.paymentId === intention.paymentId,
          'an attempt is not what was asked for',
        );
        if (intention.kind === 'refund')
          this.check(
            asked.amountCents === intention.asked.amountCents && asked.includeFee === intention.asked.includeFee,
            'an attempt asks for something else',
          );
        begun.set(intention, [...(begun.get(intention) ?? []), { book, attempt }]);
        for (const part of attempt.returned) byTransaction.set(part.transactionId, { book, attempt });
      }
    const tellings = new Map<BookAttempt, Intention[]>();
    for (const intention of this.intentions) {
      if (intention.kind === 'charge') continue;
      const own = begun.get(intention) ?? [];
      const principal = own.filter(({ attempt }) => attempt.returned.some((part) => part.principalCents > 0));
      const answers = intention.exchanges.filter(({ reply }) => reply !== null).map((exchange) => ({ exchange, answer: told(exchange.reply!) }));
      const keyed = intention.exchanges.every(({ ask }) => isKeyed(ask));
      const alone = keyed || intention.exchanges.length === 1;
      if (alone) this.check(principal.length <= 1, `${intention.name}: its principal came back ${principal.length} times`);
      const cents = principal[0]?.attempt.returned.reduce((sum, part) => sum + part.principalCents, 0) ?? 0;
      if (intention.asked.amountCents !== null)
        this.check(cents <= intention.asked.amountCents, `C23: ${cents} cents came back, fewer were asked for`);
      const moved = own.some(({ attempt }) => attempt.returned.length > 0);
      const refusedOnly = answers.length === intention.exchanges.length && answers.every(({ answer }) => answer.status >= 400 && answer.status < 500 && answer.details.retryable !== true); // prettier-ignore
      if (refusedOnly && answers.length > 0) this.check(!moved, `${intention.name} was refused, and money came back`);

      for (const { exchange, answer } of answers)
        if (answer.code === 'PAYMENT_GATEWAY_ERROR' && !overlaps(exchange, intention)) {
          // A later request of the intention may have continued the attempt and returned the money.
          const goesOn = intention.exchanges.some(({ sentAt }) => sentAt >= exchange.answeredAt);
          const wasTrue = ({ transactionId }: Returned) => goesOn && this.world.bank.reversals.get(transactionId)!.at > exchange.answeredAt;
          this.check(
            own.every(({ attempt }) => attempt.requestId !== exchange.requestId || attempt.returned.every(wasTrue)),
            'C62: told that nothing was returned, and it was',
          );
        }
      for (const { exchange, answer } of answers.filter(({ answer: one }) => one.status === 200)) {
        const { id, amountCents, gateway, remainingRefundableAmountCents } = answer.data as { id: string; amountCents: number; gateway: { transactionId: string }; remainingRefundableAmountCents?: number }; // prettier-ignore
        const source = byTransaction.get(gateway.transactionId);
        this.check(id === intention.paymentId && source?.book.paymentId === id, 'A3: a reversal was told that is not in the log');
        if (!source) continue;
        const parts = partsOf(source.book, source.attempt);
        const returned = parts.flatMap((attempt) => attempt.returned).reduce((sum, part) => sum + part.principalCents + part.feeCents, 0);
        this.check(amountCents === returned, `C38: told ${amountCents} cents, ${returned} came back`);
        if (remainingRefundableAmountCents !== undefined)
          this.check(remainingRefundableAmountCents === parts.at(-1)!.remainingAfter, 'the result names another remainder than the log');
        if (parts.some((attempt) => own.some((one) => one.attempt === attempt))) continue;
        // The result belongs to an attempt of another intention, its owner. This is allowed if a request without a key repeats a request that got a
        // 5xx (C18). It is also allowed if a request completes a partial return whose rest the bank had already returned (C27, C38).
        const owner = this.byReason(source.attempt.request)!;
        const ownerToldError = owner.exchanges.some(
          ({ reply }) => reply !== null && (isFiveHundred(told(reply)) || told(reply).details.retryable === true),
        );
        const vanished = owner.exchanges.some(({ reply }) => reply === null);
        const sameAsked = source.attempt.operation === intention.kind && source.attempt.request.initiatedBy === intention.actor;
        const partial = intention.asked.includeFee || intention.kind === 'void';
        this.check(sameAsked, 'C18: told the result of another kind of request');
        this.check(!keyed || partial, 'C18: a request with a key was told another request’s result');
        this.check(ownerToldError || vanished, 'C18: told the result of a request that knew its own');
        // A replay repeats the answer to the first request with the key. The owner of the attempt must not have known its result before that request was sent.
        const { sentAt } = exchange.reply!.replayed ? intention.exchanges[0]! : exchange;
        const known = owner.exchanges.some(({ reply, answeredAt }) => reply?.status === 200 && answeredAt <= sentAt);
        this.check(!known, 'C18: told a result that its owner had been told by then');
        if (!partial) this.check(source.attempt.request.asked.amountCents === intention.asked.amountCents, 'C18: told the result of another amount');
        const others = tellings.get(source.attempt) ?? [];
        if (!others.includes(intention)) tellings.set(source.attempt, [...others, intention]);
      }
    }
    if (this.undisturbed) this.auditRepeats(begun);
    for (const intentions of tellings.values())
      this.check(intentions.length === 1, `C18: one reversal was told to ${intentions.length} other requests`);
  }

  /**
   * Every line of the bank is recorded once, for its payment. A line may mismatch only if staff decide about its payment, or if a reversal was open
   * for too long.
   */
  private async auditSettlement(books: readonly Book[]): Promise<void> {
    const recorded = new Map<string, SettlementLine>();
    for (const line of await this.settlementLines()) {
      const name = `${line.type} ${line.transactionId}`;
      this.check(!recorded.has(name), 'a settlement line was recorded twice');
      recorded.set(name, line);
    }
    for (const { type, transactionId, ref, accepted } of this.world.bank.lines) {
      const line = recorded.get(`${type} ${transactionId}`);
      if (!line) {
        this.check(false, 'a settlement line was not recorded');
        continue;
      }
      const book = books.find((one) => one.chargeRefs.includes(ref!) || one.intent?.legs.some(({ references }) => references.reversal === ref) || [...one.attempts.values()].some((attempt) => attempt.request.legs.some((leg) => leg.references.refund === ref))); // prettier-ignore
      this.check(line.paymentId === book?.paymentId, 'a settlement line was recorded for another payment');
      // A batch may close before recovery has undone an unknown charge by a refund. The line was judged by the payment as it was up to a minute before.
      const wasUnknown =
        book !== undefined && line.at - JUDGED_FOR_MS < book.voidedAt && book.intent !== null && this.abilityOf(book.intent).voids === 'none';
      const undecided = book?.phase === 'unknown' || book?.resolved === true || wasUnknown;
      // After an hour, a batch no longer waits for an open reversal. The line is then compared with the present state of the payment, and may
      // mismatch.
      const heldUp = [...(book?.attempts.values() ?? [])].some(
        ({ requestedAt, endedAt }) => line.at - requestedAt >= HELD_UP_MS - CLOCKS_DIFFER_MS && endedAt >= line.at - CLOCKS_DIFFER_MS,
      );
      // The processor rejected a sale that recovery had undone by a refund: the refund stands alone.
      const isRejected = !accepted && book?.phase === 'voided';
      this.check(
        line.result === 'MATCHED' || (line.result === 'STATUS_MISMATCH' && (undecided || heldUp || isRejected)),
        `a settlement line is ${line.result} of a payment that is ${book?.phase}`,
      );
    }
    for (const book of books) if (book.phase === 'charged' && !book.resolved) this.auditSettled(book, recorded);
  }

  /** C73: the list shows the settlement that the bank's own books make. Lines that mismatch are for staff. */
  private auditSettled({ paymentId, chargeRefs }: Book, recorded: ReadonlyMap<string, SettlementLine>): void {
    const { bank } = this.world;
    const charges = chargeRefs.flatMap((ref) => this.chargeUnder(ref) ?? []);
    const lines = charges.flatMap(({ transactionId }) => bank.lines.filter((line) => line.type === 'sale' && line.transactionId === transactionId));
    if (lines.some(({ transactionId }) => recorded.get(`sale ${transactionId}`)?.result !== 'MATCHED')) return;
    const standing = lines.filter(({ transactionId }) => {
      const charge = bank.charges.get(transactionId)!;
      return charge.voidedCents < charge.amountCents;
    });
    const closed = standing.filter(({ accepted }) => accepted).map(({ closedAt }) => closedAt);
    const status = standing.some(({ accepted }) => !accepted) ? 'rejected' : closed.length > 0 ? 'settled' : 'unsettled';
    const row = this.world.tables.list.get(paymentId);
    this.check(row !== undefined, `C73: the list has no row of the settled payment ${paymentId}`);
    if (!row) return;
    const shown = paymentView(paymentId, JSON.parse(row.state), CLOSED).settlement;
    const settledAt = closed.sort()[0] ?? null;
    this.check(
      shown?.status === status && shown.settledAt === settledAt,
      `C73: the bank says ${status} at ${settledAt}, the list shows ${shown?.status} at ${shown?.settledAt}`,
    );
  }

  private auditKeys(streams: ReadonlyMap<string, readonly Recorded[]>): void {
    const { opened } = this.world;
    for (const row of this.world.keys.rows.values()) {
      if (row.operation === 'create') this.check(row.state !== 'in_progress', 'A9: the key of a create is in progress when everything runs again');
      else this.check(row.state !== 'in_progress' || row.leaseUntil! <= this.world.sim.now, 'A9: a lease runs when everything runs again');
      if (row.operation !== 'create' || row.state !== 'completed') continue;
      const events = (streams.get(`payment-${row.paymentId}`) ?? []).slice(0, 2).map(paymentEvents.read);
      const body = boxedBody(opened, row.body!, `payment-${row.paymentId}/answer:${row.paymentId}:create`);
      this.check(body === rebuilt(row.paymentId, events, opened), 'A7: a stored answer is not the one that its events make');
    }
  }

  /** A8: the list has one row for each visible payment, equal to the fold of its stream. It has no other rows. */
  private auditList(streams: ReadonlyMap<string, readonly Recorded[]>): void {
    const { list } = this.world.tables;
    let visible = 0;
    for (const [stream, events] of streams) {
      const state = this.folded(events);
      if (!state || !isVisible(state)) continue;
      visible += 1;
      const row = list.get(paymentIdOf(stream));
      this.check(row?.state === JSON.stringify(state) && row.revision === events.at(-1)!.revision, 'A8: the list is not what its events make');
    }
    this.check(list.size === visible, 'A8: the list has rows that no events make');
  }

  /** A11: no stored text, answer or log line contains a card. */
  private auditCardData(...all: readonly ReadonlyMap<string, readonly Recorded[]>[]): void {
    if (this.world.sim.seed % 8 !== 0) return;
    const kept = JSON.stringify(all.flatMap((streams) => [...streams.values()].flat()).map(({ data, meta }) => [data, meta]));
    const bodies = [...this.world.tables.webhooks.events.values()].map(({ payload }) => payload.toString());
    const rows = JSON.stringify([...bodies, ...[...this.world.keys.rows.values()].map(({ body, operation }) => [body, operation])]);
    const said = this.world.sim.lines.join('\n');
    for (const number of Object.values(CARDS)) this.check(![kept, rows, said].some((text) => text.includes(number)), 'A11: a card number was kept');
    this.check(![kept, rows, said].some((text) => text.includes(CVV)), 'A11: a security code was kept');
    for (const text of Object.values(PLANTED)) this.check(![kept, rows, said].some((one) => one.includes(text)), `A11: ${text} stands in clear`);
  }
}

/** The security code of every card. This text occurs nowhere else in a run. */
export const CVV = '!73!';

/** Texts about payers. They occur nowhere in clear. */
export const PLANTED = {
  name: '!Ada!',
  email: 'ada!@example.org',
  description: '!water of Ada!',
  dispute: '!Ada says no!',
} as const;

type Keyed = Extract<Ask, { kind: 'create' | 'reverse' | 'staff' }>;
export const isKeyed = (ask: Ask): ask is Keyed => (ask.kind === 'create' || ask.kind === 'reverse' || ask.kind === 'staff') && ask.key !== null;
/** A key with its scope. Keys of staff have a scope of their own. */
export const keyName = (ask: Keyed) => `${ask.kind === 'staff' ? 'staff' : ask.request.accountId} ${ask.key}`;
const isPayers = ({ kind }: Ask) => kind === 'check out' || kind === 'look' || kind === 'submit' || kind === 'leave' || kind === 'cancel';
const bodyOf = (ask: Ask) => ('fingerprint' in ask ? ask.fingerprint : JSON.stringify(ask));
const isReversal = (ask: Ask): ask is Extract<Ask, { kind: 'reverse' | 'staff' }> => ask.kind === 'reverse' || ask.kind === 'staff';
/** The account whose client gets the answer to this request. */
const accountOf = (ask: Ask): string =>
  'accountId' in ask ? ask.accountId : 'request' in ask && 'accountId' in ask.request ? (ask.request.accountId ?? '') : '';

/** The text of a box. null: the box was changed. */
const boxedBody = (opened: OpenedKeys, body: string, context: string): string | null => {
  try {
    return clearText(opened, body, context);
  } catch {
    return null;
  }
};

/** Makes the answer to a create again, from the first two events of its payment. */
const rebuilt = (paymentId: string, events: readonly ReturnType<typeof paymentEvents.read>[], reveal: Reveal): string | null => {
  try {
    return successAnswer(chargeAnswer(paymentId, fold(decider, events), reveal)).body;
  } catch (error) {
    return error instanceof ServiceError ? errorAnswer(error).body : null;
  }
};

interface Intent {
  readonly attemptId: string;
  readonly portalId: string;
  readonly amountCents: number;
  readonly serviceFeeCents: number;
  readonly lineItems: readonly { readonly amountCents: number; readonly serviceFeeCents: number }[];
  readonly legs: readonly {
    readonly leg: string;
    readonly principalCents: number;
    readonly feeCents: number;
    readonly references: { readonly charge: string; readonly reversal: string };
  }[];
}

interface ChargedLeg {
  readonly leg: string;
  readonly transactionId: string;
}

interface SettlementLine {
  readonly type: string;
  readonly transactionId: string;
  readonly paymentId: string | null;
  readonly result: string;
  /** When it was recorded. */
  readonly at: number;
}

interface Returned {
  readonly attemptId: string;
  readonly leg: string;
  readonly principalCents: number;
  readonly feeCents: number;
  readonly transactionId: string;
}

interface BookAttempt {
  readonly request: {
    readonly attemptId: string;
    /** The box of the name of the intention, which clients send as the reason. */
    readonly personal: Personal<{ readonly reason: string }>;
    readonly context: string;
    readonly initiatedBy: 'partner' | 'staff';
    readonly asked: { readonly amountCents: number | null; readonly includeFee: boolean };
    readonly completes: string | null;
    readonly legs: readonly { readonly leg: string; readonly references: { readonly void: string; readonly refund: string } }[];
  };
  readonly operation: 'refund' | 'void';
  /** Id of the request that began the attempt. */
  readonly requestId: string;
  readonly requestedAt: number;
  fenced: boolean;
  /** The leg that was under way when the attempt was fenced. null: none, or not fenced. */
  underWay: string | null;
  ended: string | null;
  endedAt: number;
  readonly returned: Returned[];
  remainingAfter: number;
}

interface Book {
  readonly paymentId: string;
  phase: 'none' | 'pending' | 'unknown' | 'charged' | 'failed' | 'voided' | 'abandoned';
  intent: Intent | null;
  readonly requestId: string;
  chargeRefs: readonly string[];
  readonly attempts: Map<string, BookAttempt>;
  /** Money at the bank. */
  netCents: number;
  /** True if staff have resolved the payment. */
  resolved: boolean;
  /** The latest time at which recovery can have undone the charge, by any clock of the run. −Infinity: it did not. */
  voidedAt: number;
}

/** The attempts of one refund or void: the first one, and the one that completed it (C38). */
const partsOf = (book: Book, attempt: BookAttempt): BookAttempt[] => {
  const first = (attempt.request.completes && book.attempts.get(attempt.request.completes)) || attempt;
  const completion = [...book.attempts.values()].find(({ request, ended }) => request.completes === first.request.attemptId && ended === 'completed');
  return completion ? [first, completion] : [first];
};

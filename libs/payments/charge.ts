/**
 * Creates a payment in four steps: checks and refusals (E7 to E11), the intent, the gateway calls, the outcome. The intent is durable before money
 * moves. A success is answered only after its outcome is durable. If the outcome is uncertain, recovery undoes the charge.
 */
import { type ChargeTerms, type Directory, type Portal, type PortalGateway, restrictionInForce } from '#accounts';
import { Conflict, type LogGate, type Origin, OutcomeUnknown, type Position, StoreIncident, Unavailable } from '#eventstore';
import {
  type Cents,
  type Clock,
  CLOSED,
  type Deadline,
  type Ids,
  type Json,
  MAX_AMOUNT_CENTS,
  type Reveal,
  ServiceError,
  timestamp,
  unreachable,
} from '#kernel';
import {
  brandOf,
  crockford,
  type Logger,
  OpenedKeys,
  type PersonalKey,
  type PersonalKeys,
  type SandboxTime,
  type Slot,
  type Waiting,
} from '#platform';
import { createHash } from 'node:crypto';
import { codingOf } from './coding.js';
import { feeByLine, serviceFee } from './fee.js';
import { beginning, callGateway } from './gateway/call.js';
import type { GatewaySlots } from './gateway/slots.js';
import type { HoldsKey } from './keys/key-store.js';
import type {
  ChargeTxn,
  DeclineCode,
  GatewayAccount,
  Gateways,
  Leg,
  Op,
  Outcome,
  PaymentGateway,
  PaymentInstrument,
  Ref,
  ReferenceCall,
} from './gateway/gateway.js';
import {
  type Awaiting,
  cents,
  type ChargeOutcome,
  checksOf,
  type Intent,
  isVisible,
  type LegTerms,
  type LineItem,
  type Payer,
  type Payment,
  type PaymentTerms,
  type PaymentTexts,
  type TakenBack,
  termsContext,
} from './payment.js';
import { type PaymentView, paymentView } from './payment.view.js';
import { noPersonalKey } from './personal.js';
import { INTENT, type LoadedPayment, type PaymentStreams } from './stream.js';
import type { Refusals } from './refusals.js';
import type { Velocity, VelocitySubject } from './velocity.js';

/** The ports of every payment command. The simulation passes its own. */
export interface PaymentPorts {
  readonly clock: Clock;
  /** Absent: the time never moves, as in production. */
  readonly sandboxTime?: Pick<SandboxTime, 'run' | 'isOpen'>;
  readonly ids: Ids;
  readonly streams: PaymentStreams;
  /** Says whether the log is ours and whole. */
  readonly ownLog: LogGate;
  readonly gateways: Gateways;
  readonly slots: GatewaySlots;
  /** Surrounds a wait for a slot. Default: nothing. */
  readonly during?: Waiting;
  readonly directory: Directory;
  readonly velocity: Velocity;
  readonly refusals: Refusals;
  readonly personal: PersonalKeys;
  readonly log: Logger;
}

export interface ChargeRequest {
  readonly accountId: string;
  readonly portalId: string;
  readonly referenceId: string | null;
  readonly amountCents: Cents;
  readonly lineItems: readonly {
    readonly amountCents: Cents;
    readonly referenceId: string;
    readonly description: string | null;
    readonly metadata: Readonly<Record<string, Json>> | null;
  }[];
  readonly payer: Payer | null;
  readonly instrument: PaymentInstrument;
  /** The total that the payer agreed to. If the total differs now, no charge begins. Default: no check (C49). */
  readonly quotedTotalCents?: Cents;
  /** The payer's public IPv4 address, for the gateway's check of fraud. Hosted checkout only. It is in no event, row, log or answer. */
  readonly payerIp?: string;
}

/** The ids of the attempt. For a request with a key, they are drawn when the key is claimed. */
export interface ChargeAttempt extends Intent {
  readonly paymentId: string;
  readonly holds?: HoldsKey | null;
  /** A slot at the gateway that is reserved already. The charge releases it. */
  readonly slot?: Slot | null;
  /** The key that seals the texts: that of the checkout. Default: a new key, if there are texts. */
  readonly personalKey?: PersonalKey | null;
}

/** `key` seals the answer where it is stored. null: the answer has no personal data. */
export interface ChargeDone {
  readonly view: PaymentView;
  readonly key: PersonalKey | null;
}

/** Our reference of one money movement: 20 characters of Crockford base32 from a hash of attempt, leg and operation (docs/contract.md#gateway). */
export const gatewayRef = (attemptId: string, leg: Leg, op: Op): Ref =>
  crockford(createHash('sha256').update(`${attemptId}:${leg}:${op}`).digest(), 20);

/** The call that asks about the charge of a leg, or about the reversal of that charge. `chargeTransactionId` null: it is not known. */
export const aboutLeg = (
  { createdAt: begunAt, terms: { paymentMethod } }: Pick<Awaiting, 'createdAt' | 'terms'>,
  { leg, account, references, ...part }: LegTerms,
  op: 'charge' | 'reversal',
  chargeTransactionId: string | null = null,
): ReferenceCall => ({
  ref: references[op],
  op,
  leg,
  account,
  begunAt,
  amountCents: cents(part),
  chargeTransactionId,
  last4: paymentMethod.last4 || null,
});

/**
 * Charges the card. Returns the Payment. Throws the specification's errors, with the payment id if there is one. If no key for personal data can be
 * had, throws IDEMPOTENCY_UNAVAILABLE before anything begins.
 */
export const charge = async (
  ports: PaymentPorts,
  request: ChargeRequest,
  attempt: ChargeAttempt,
  origin: Origin,
  deadline: Deadline,
): Promise<ChargeDone> => {
  const { clock, directory, streams, velocity } = ports;
  refuseExpiredCard(request.instrument, clock.now());
  const terms = await directory.chargeTerms(request.accountId, request.portalId, request.referenceId);
  await loadGateways(ports, terms);
  const subject = { portalId: request.portalId, referenceId: request.referenceId, instrument: request.instrument };
  const { gateways, plan: unsealed, limits } = await admitted(ports, request, attempt, terms, subject);
  // If nothing has begun, this is no attempt (C70).
  const notBegun = async (error: unknown): Promise<never> => {
    await velocity
      .withdraw(subject, limits, attempt.attemptId)
      .catch((withdrawal: unknown) => ports.log.warn({ err: withdrawal }, 'an attempt that did not begin stays counted'));
    throw error;
  };
  const slot = attempt.slot ?? (await reserved(ports, request.accountId, terms, origin, deadline).catch(notBegun));

  const at = () => timestamp(clock.now());
  const begunAt = at();
  const { attemptId, idempotency } = attempt;
  const texts = textsOf(request);
  let key: PersonalKey | null;
  let loaded: LoadedPayment;
  let outcome: ChargeOutcome | { kind: 'too_late' };
  try {
    // While the process has a key ready, this takes no time.
    key = texts && (attempt.personalKey ?? (await ports.personal.take().catch((error: unknown) => notBegun(noPersonalKey(ports.log, error)))));
    const plan: PaymentTerms = { ...unsealed, personal: key && key.seal(texts, termsContext(attempt.paymentId)) };
    try {
      const none: LoadedPayment = { paymentId: attempt.paymentId, payment: { phase: 'none' }, revision: null, readAt: clock.realNow() };
      loaded = await streams.execute(none, [{ type: 'Initiate', at: begunAt, attemptId, idempotency, terms: plan }], origin, deadline, INTENT);
    } catch (error) {
      // A takeover of this request's key has fenced the stream, so this request must not begin (docs/contract.md#streams-and-appends).
      if (error instanceof Conflict) throw reconciliationRequired(attempt.paymentId, { phase: 'none' });
      // The intent was sent, and the log may hold it. If it does not, there is no payment to name (C48). In an incident, a payment that is not found is
      // no 404 (C76).
      if (error instanceof OutcomeUnknown) throw timeout(ports.ownLog.incident ? attempt.paymentId : null);
      if (error instanceof Unavailable) return await notBegun(error);
      throw error;
    }
    const intent = { position: loaded.appendedAt ?? null, begunAt };
    const kept = { type: 'PaymentInitiated', at: begunAt, data: { attemptId, idempotency, ...plan, personal: null } } as const;
    const calls = beginning(ports, { paymentId: attempt.paymentId, intent: kept }, attempt.holds ?? null);
    outcome = await moveMoney(calls, gateways, plan, attempt, intent, request, deadline).catch((error: unknown) => {
      // Either the intent may be lost, or a leg may be charged already (C76). In both cases the outcome is unknown.
      throw error instanceof StoreIncident ? timeout(attempt.paymentId) : error;
    });
  } finally {
    slot.release();
  }
  if (outcome.kind === 'too_late') throw timeout(attempt.paymentId);
  try {
    loaded = await streams.execute(loaded, [{ type: 'RecordChargeOutcome', at: at(), attemptId: attempt.attemptId, outcome }], origin, deadline);
  } catch (error) {
    // Another process fenced the stream, or the append has no known outcome. Recovery resolves the attempt.
    ports.log.warn({ paymentId: attempt.paymentId, err: error }, 'the outcome of a charge could not be recorded; recovery resolves it');
    throw timeout(attempt.paymentId);
  }
  // The decline is recorded before it is counted. A missing count does less harm than a missing outcome. A token that names no card was no try of one.
  if (outcome.kind === 'declined')
    await velocity[outcome.code === 'invalid_token' ? 'withdraw' : 'recordDecline'](subject, limits, attempt.attemptId).catch((error: unknown) =>
      ports.log.warn({ paymentId: attempt.paymentId, err: error }, 'a decline could not be counted; limits know nothing of it'),
    );
  return { view: chargeAnswer(attempt.paymentId, loaded.payment, key ? new OpenedKeys(new Map([[key.id, key]])) : CLOSED), key };
};

/** null: the request has no text about a person. */
const textsOf = ({ payer, lineItems }: Pick<ChargeRequest, 'payer' | 'lineItems'>): PaymentTexts | null => {
  const lines = lineItems.map(({ description, metadata }) => ({ description, metadata }));
  return payer === null && lines.every(({ description, metadata }) => description === null && metadata === null) ? null : { payer, lines };
};

/** The checks E8 to E11, and the plan. Counts the attempt, or notes its refusal. Throws the refusal. */
const admitted = async (
  ports: PaymentPorts,
  request: ChargeRequest,
  attempt: ChargeAttempt,
  terms: ChargeTerms,
  subject: VelocitySubject,
): Promise<ReturnType<typeof refuseOrPlan> & { limits: Portal['limits'] }> => {
  try {
    const planned = refuseOrPlan(ports, request, attempt, terms);
    const { limits } = terms.portal!;
    await ports.velocity.admit(subject, limits, attempt.attemptId);
    return { ...planned, limits };
  } catch (error) {
    if (error instanceof ServiceError) ports.refusals.note(subject, error.code);
    throw error;
  }
};

/** Reserves a slot at the gateway of the portal. Throws RATE_LIMITED (E11). */
const reserved = (
  { slots, during }: PaymentPorts,
  accountId: string,
  { portal }: ChargeTerms,
  { actor }: Origin,
  deadline: Deadline,
): Promise<Slot> => slots.reserve(portal!.gateway!.gateway, accountId, actor.type === 'payer' ? 'payer' : 'partner', deadline, during);

/** The answer that follows from a payment's state. A takeover makes the same bytes from the stream (T7). */
export const chargeAnswer = (paymentId: string, payment: Payment, reveal: Reveal): PaymentView => {
  if (!isVisible(payment)) throw new Error('no payment to answer with');
  switch (payment.phase) {
    case 'charged':
      return paymentView(paymentId, payment, reveal);
    case 'failed':
      throw payment.declineCode
        ? new ServiceError('PAYMENT_DECLINED', DECLINE_MESSAGES[payment.declineCode], { id: paymentId, declineCode: payment.declineCode })
        : new ServiceError('PAYMENT_GATEWAY_ERROR', 'The gateway did not process the payment; nothing was charged.', { id: paymentId });
    case 'pending':
    case 'unknown':
    case 'voided':
      throw timeout(paymentId);
    default:
      return unreachable(payment);
  }
};

const DECLINE_MESSAGES: Record<DeclineCode, string> = {
  generic_decline: 'The card was declined.',
  insufficient_funds: 'The card was declined: insufficient funds.',
  card_limit_exceeded: 'The card was declined: card limit exceeded.',
  expired_card: 'The card was declined: the issuer reports it as expired.',
  cvv_mismatch: 'The card was declined: the security code does not match.',
  postal_code_mismatch: 'The card was declined: the postal code does not match.',
  invalid_token: 'The card token is unknown, expired or used; ask for the card again.',
};

/** `id` null: it is not known whether there is a payment (specification, Errors). */
const timeout = (id: string | null) =>
  new ServiceError('PAYMENT_TIMEOUT', 'The outcome of the payment is unknown; check it before charging again.', id === null ? {} : { id });

/** The answer for a key whose create has no certain outcome (C16, C64, C74). `payment` null: the stream cannot be read now. */
export const reconciliationRequired = (paymentId: string, payment: Payment | null): ServiceError =>
  payment === null || isVisible(payment)
    ? new ServiceError(
        'IDEMPOTENCY_RECONCILIATION_REQUIRED',
        `Read payment ${paymentId}. Charge again with a new key only if it reads failed or voided.`,
        { id: paymentId },
      )
    : new ServiceError('IDEMPOTENCY_RECONCILIATION_REQUIRED', 'Nothing was charged. Use a new key.');

/** A card is valid until its month has ended in the last time zone on earth (C5). */
const EXPIRY_ZONE_MS = 12 * 3_600_000;
export const refuseExpiredCard = (instrument: PaymentInstrument, now: number): void => {
  if (instrument.type !== 'card') return;
  const today = new Date(now - EXPIRY_ZONE_MS);
  const { year, month } = instrument.expiry;
  if (year * 12 + month < today.getUTCFullYear() * 12 + today.getUTCMonth() + 1)
    throw new ServiceError('VALIDATION_ERROR', 'paymentMethod.expirationDate lies in the past.', {
      errors: [{ field: 'paymentMethod.expirationDate', message: 'lies in the past' }],
    });
};

/** A leg of a charge, its amounts, and the gateway of its merchant account. */
interface PlannedLeg {
  readonly leg: Leg;
  readonly principalCents: Cents;
  readonly feeCents: Cents;
  readonly account: GatewayAccount;
  readonly gateway: PaymentGateway;
}

/** Reads merchant accounts of the portal that this process does not know yet. One may have been added a moment ago. */
export const loadGateways = async ({ gateways }: Pick<PaymentPorts, 'gateways'>, { portal, merchantAccounts }: ChargeTerms): Promise<void> => {
  if (!gateways.load || !portal?.gateway) return;
  for (const account of gatewayAccountsOf(portal.gateway))
    if (merchantAccounts[account.merchantAccount] === 'active' && !gateways.find(account)) await gateways.load(account);
};

/** The checks E8 to E10, which need no card: account, portal, gateway of each leg, amount and case. Throws the refusal. */
export const refuseByTerms = (
  { gateways, clock }: Pick<PaymentPorts, 'gateways' | 'clock'>,
  amountCents: Cents,
  { accountStatus, access, portal, restrictions, merchantAccounts }: ChargeTerms,
): { portal: Portal; serviceFeeCents: Cents; legs: readonly PlannedLeg[] } => {
  // If the account that owns a hosted checkout is deactivated, the answer is the same as without access (C66).
  if (!portal || access !== 'granted' || accountStatus !== 'active')
    throw new ServiceError('PORTAL_ACCESS_DENIED', 'The portal is unknown or may not be used by this account.');
  const portalGateway = portal.gateway;
  if (!portalGateway) throw new ServiceError('GATEWAY_NOT_CONFIGURED', 'The portal has no payment gateway.');
  const serviceFeeCents = serviceFee(amountCents, portal.fee);
  const legs = partsOf(portal.fee.chargeMode, amountCents, serviceFeeCents).map((part): PlannedLeg => {
    const account = accountOf(portalGateway, part.leg);
    const isOpen = (merchantAccounts[account.merchantAccount] ?? 'active') === 'active';
    const gateway = isOpen ? gateways.find(account) : null;
    // One message for all legs: a partner cannot change the accounts of a portal.
    if (!gateway) throw new ServiceError('GATEWAY_NOT_CONFIGURED', 'The portal has no payment gateway.');
    if (gateway.mayCharge?.() === false)
      throw new ServiceError('GATEWAY_NOT_CONFIGURED', 'The payment gateway of the portal takes no new charges at present.');
    return { ...part, account, gateway };
  });

  const inForce = restrictionInForce(restrictions, clock.now());
  if (inForce?.kind === 'blocked') throw new ServiceError('PAYMENT_BLOCKED', 'Payments for this case are blocked.');
  if (inForce?.kind === 'held')
    throw new ServiceError('PAYMENT_HELD', 'Payments for this case are on hold; try later.', inForce.until ? { retryAt: inForce.until } : {});
  const { minCents, maxCents } = portal.rules;
  if (minCents !== null && amountCents < minCents) throw notAllowed(`This portal accepts payments from ${minCents} cents.`);
  if (maxCents !== null && amountCents > maxCents) throw notAllowed(`This portal accepts payments up to ${maxCents} cents.`);
  return { portal, serviceFeeCents, legs };
};

/** The legs of a charge. Principal and fee are one charge, or two. */
const partsOf = (
  chargeMode: Portal['fee']['chargeMode'],
  principalCents: Cents,
  feeCents: Cents,
): Pick<PlannedLeg, 'leg' | 'principalCents' | 'feeCents'>[] =>
  chargeMode === 'combined'
    ? [{ leg: 'combined', principalCents, feeCents }]
    : [{ leg: 'principal', principalCents, feeCents: 0 }, ...(feeCents > 0 ? [{ leg: 'fee' as const, principalCents: 0, feeCents }] : [])];

const notAllowed = (message: string, details = {}) => new ServiceError('PAYMENT_NOT_ALLOWED', message, details);

/** Runs the checks E8 to E10, then plans the charge: fee, lines, legs, and every reference that the attempt may use. */
const refuseOrPlan = (
  ports: PaymentPorts,
  request: ChargeRequest,
  { attemptId }: ChargeAttempt,
  terms: ChargeTerms,
): { gateways: ReadonlyMap<Leg, PaymentGateway>; plan: Omit<PaymentTerms, 'personal'> } => {
  const { portal, serviceFeeCents, legs } = refuseByTerms(ports, request.amountCents, terms);
  const method = methodOf(request.instrument);
  const { brands } = portal.rules;
  if (brands !== null && !brands.some((brand) => brand === method.brand)) throw notAllowed('This portal does not accept this card brand.');

  if (request.quotedTotalCents !== undefined && request.amountCents + serviceFeeCents !== request.quotedTotalCents)
    throw notAllowed('The service fee has changed since it was shown.', { reason: 'fee_changed' });
  const { chargeMode } = portal.fee;
  if (chargeMode === 'combined' && request.amountCents + serviceFeeCents > MAX_AMOUNT_CENTS)
    throw notAllowed(`Amount and service fee exceed ${MAX_AMOUNT_CENTS} cents together.`);
  for (const leg of legs) refuseByLimits(request.instrument, leg, legs.length);

  const shares = feeByLine(
    serviceFeeCents,
    request.lineItems.map((line) => line.amountCents),
  );
  const plan: Omit<PaymentTerms, 'personal'> = {
    accountId: request.accountId,
    portalId: request.portalId,
    referenceId: request.referenceId,
    amountCents: request.amountCents,
    serviceFeeCents,
    feeVersion: portal.feeVersion,
    chargeMode,
    lineItems: request.lineItems.map((line, index): LineItem => ({
      id: ports.ids.uuid(),
      amountCents: line.amountCents,
      serviceFeeCents: shares[index]!,
      referenceId: line.referenceId,
      coding: codingOf(line.metadata, portal.coding),
    })),
    paymentMethod: method,
    legs: legs.map(({ leg, principalCents, feeCents, account }) => ({
      leg,
      principalCents,
      feeCents,
      account,
      references: { charge: gatewayRef(attemptId, leg, 'charge'), reversal: gatewayRef(attemptId, leg, 'reversal') },
    })),
  };
  return { gateways: new Map(legs.map(({ leg, gateway }) => [leg, gateway])), plan };
};

/** Refuses a charge that the leg's gateway cannot make. `charges`: the number of charges of this payment method. */
const refuseByLimits = (instrument: PaymentInstrument, { gateway, ...part }: PlannedLeg, charges: number): void => {
  const { rawCard, cardToken, tokenReusable, maxCardDigits, minAmountCents, maxAmountCents } = gateway.capabilities;
  if (instrument.type === 'card' ? !rawCard : !cardToken || (charges > 1 && !tokenReusable))
    throw notAllowed("This portal's gateway cannot charge this kind of payment method.");
  if (instrument.type === 'card' && instrument.number.reveal().length > maxCardDigits)
    throw notAllowed(`This portal's gateway takes card numbers of at most ${maxCardDigits} digits.`);
  if (cents(part) < minAmountCents) throw notAllowed(`This portal's gateway makes charges from ${minAmountCents} cents.`);
  if (cents(part) > maxAmountCents) throw notAllowed(`This portal's gateway makes charges up to ${maxAmountCents} cents.`);
};

/** The fee leg is charged to the operator's own merchant account. */
const accountOf = (
  { merchantAccount, feeMerchantAccount, credentialsRef, feeCredentialsRef = credentialsRef, ...account }: PortalGateway,
  leg: Leg,
): GatewayAccount =>
  leg === 'fee'
    ? { ...account, merchantAccount: feeMerchantAccount, credentialsRef: feeCredentialsRef }
    : { ...account, merchantAccount, credentialsRef };

/** The merchant accounts that the charges of a portal with this gateway may use. */
export const gatewayAccountsOf = (gateway: PortalGateway): readonly GatewayAccount[] => [accountOf(gateway, 'principal'), accountOf(gateway, 'fee')];

const methodOf = (instrument: PaymentInstrument): PaymentTerms['paymentMethod'] => {
  // Only the processor knows the card behind a token.
  if (instrument.type === 'card_token') return { type: 'card_token', brand: 'unknown', last4: '' };
  const digits = instrument.number.reveal();
  return { type: 'card', brand: brandOf(digits), last4: digits.slice(-4) };
};

/** The intent of a charge: its position in the log, and its time. */
interface SentIntent {
  readonly position: Position | null;
  readonly begunAt: string;
}

/** Charges the principal first. The fee is charged only if the principal was approved. If the fee fails, the principal is taken back (C41). */
const moveMoney = async (
  ports: PaymentPorts,
  gateways: ReadonlyMap<Leg, PaymentGateway>,
  plan: Pick<PaymentTerms, 'legs'>,
  { attemptId }: ChargeAttempt,
  intent: SentIntent,
  request: ChargeRequest,
  deadline: Deadline,
): Promise<ChargeOutcome | { kind: 'too_late' }> => {
  const approved: (Made & { readonly txn: ChargeTxn })[] = [];
  const { position, begunAt } = intent;
  const { instrument, payer, payerIp } = request;
  for (const leg of plan.legs) {
    const call = {
      ref: leg.references.charge,
      leg: leg.leg,
      account: leg.account,
      begunAt,
      amountCents: cents(leg),
      instrument,
      ...(payer !== null && { payer }),
      ...(payerIp !== undefined && { payerIp }),
    };
    const outcome = await callGateway(ports, deadline, position, (signal) => gateways.get(leg.leg)!.charge(call, signal));
    if (outcome.kind === 'approved') {
      approved.push({ leg, txn: outcome.txn });
      continue;
    }
    // Recovery finalised the reference before this call and owns the attempt now. So nothing is recorded here (docs/contract.md#gateway).
    if (outcome.kind === 'rejected' && outcome.why === 'finalised') return { kind: 'too_late' };
    if (outcome.kind === 'unknown') return { kind: 'unknown', leg: leg.leg, cause: outcome.cause };
    if (outcome.kind === 'held') {
      // Nothing may wait for a person at the gateway, and no part of an amount may stay: the API has no such status. So the charge is undone, and the
      // answer is a decline.
      const { transactionId, why = 'review', raw } = outcome;
      const takenBack = await takeBack(ports, gateways, [...approved, { leg, txn: { transactionId } }], intent, deadline);
      if (!takenBack) return { kind: 'unknown', leg: leg.leg, cause: MUST_NOT_STAND[why].cause };
      const declined = { kind: 'declined', leg: leg.leg, code: 'generic_decline', transactionId, ...checksOf({}) } as const;
      return { ...declined, raw: `${MUST_NOT_STAND[why].text}${raw === undefined ? '' : `: ${raw}`}`, takenBack };
    }
    const takenBack = await takeBack(ports, gateways, approved, intent, deadline);
    if (!takenBack) return { kind: 'unknown', leg: leg.leg, cause: 'an approved leg could not be taken back' };
    return { ...definiteFailure(leg.leg, outcome), takenBack };
  }
  const confirmationNumber = ports.ids.confirmationNumber();
  ports.log.debug({ attemptId }, 'charged');
  return {
    kind: 'charged',
    confirmationNumber,
    legs: approved.map(({ leg, txn }) => ({
      leg: leg.leg,
      transactionId: txn.transactionId,
      authCode: txn.authCode,
      ...checksOf(txn),
      ...(txn.card && { card: txn.card }),
    })),
  };
};

const definiteFailure = (
  leg: Leg,
  outcome: Exclude<Outcome<ChargeTxn>, { kind: 'approved' | 'held' | 'unknown' }>,
): Extract<ChargeOutcome, { kind: 'declined' | 'failed' }> => {
  switch (outcome.kind) {
    case 'declined': {
      const { decline, transactionId = null } = outcome;
      return { kind: 'declined', leg, code: decline.code, transactionId, raw: decline.raw ?? null, ...checksOf(decline) };
    }
    case 'rejected':
      return { kind: 'failed', reason: `rejected by the gateway: ${outcome.why}` };
    case 'not_processed':
      return { kind: 'failed', reason: outcome.raw ?? 'not processed' };
    default:
      return unreachable(outcome);
  }
};

/** A charge that the gateway has made. */
interface Made {
  readonly leg: LegTerms;
  readonly txn: Pick<ChargeTxn, 'transactionId'>;
}

/** A charge that must not stand: what its decline says, and the cause of an unknown outcome if the void had no certain one. */
const MUST_NOT_STAND = {
  review: { cause: 'held_for_review', text: 'held for review' },
  partial: { cause: 'approved_in_part', text: 'approved in part' },
} as const;

/** Undoes the charges. null: a call failed, or its outcome is unknown. */
const takeBack = async (
  ports: PaymentPorts,
  gateways: ReadonlyMap<Leg, PaymentGateway>,
  made: readonly Made[],
  { position, begunAt }: SentIntent,
  deadline: Deadline,
): Promise<TakenBack[] | null> => {
  const takenBack: TakenBack[] = [];
  for (const { leg, txn } of made) {
    const amountCents = cents(leg);
    const call = {
      ref: leg.references.reversal,
      leg: leg.leg,
      account: leg.account,
      begunAt,
      chargeTransactionId: txn.transactionId,
      amountCents,
      askedBy: 'reversal' as const,
    };
    const outcome = await callGateway(ports, deadline, position, (signal) => gateways.get(leg.leg)!.void(call, signal));
    if (outcome.kind !== 'approved') return null;
    const { transactionId: voidTransactionId, means } = outcome.txn;
    takenBack.push({ leg: leg.leg, amountCents, transactionId: txn.transactionId, voidTransactionId, ...(means && { means }) });
  }
  return takenBack;
};

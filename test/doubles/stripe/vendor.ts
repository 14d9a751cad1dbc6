/** The business of the double: intents, charges, refunds, payouts and disputes of a few accounts, in a file that survives the process. */
import { type Change, ChangeFile } from './file.js';
import { textOf } from './form.js';
import { complete, isKind } from './members.js';
import { onceMethod, type PaymentMethod, TEST_METHODS } from './tokens.js';

export type Fields = Record<string, unknown>;
/** An object of the API. `created`: seconds since the epoch. */
export interface Thing extends Fields {
  id: string;
  object: string;
  created: number;
}
export interface Answer {
  readonly status: number;
  readonly body: Fields;
  /** False: the execution did not begin, so nothing is stored under the key. */
  readonly begun: boolean;
}
export interface StoredKey {
  readonly endpoint: string;
  readonly parameters: string;
  readonly atMs: number;
  readonly status: number;
  readonly body: Fields;
  readonly requestId: string;
}

export const DAY_MS = 86_400_000;
const SECONDS = 1_000;
const TABLES = ['account', 'payment_intent', 'charge', 'refund', 'balance_transaction', 'payout', 'dispute', 'method', 'key', 'double'] as const;
export type Table = (typeof TABLES)[number];

/** Members that an answer never shows. */
const HIDDEN = ['_payout', '_processing', '_method', '_seeded'];

export const ok = (body: Fields): Answer => ({ status: 200, body, begun: true });
export const refusal = (status: number, error: Fields, begun = true): Answer => ({
  status,
  body: { error: { type: 'invalid_request_error', ...error } },
  begun,
});
const missing = (kind: string, id: string, param: string, status = 404) =>
  refusal(status, { code: 'resource_missing', message: `No such ${kind}: '${id}'`, param });

/** The vendor's fee of a charge: 2.9 % and 30 cents. */
const feeOf = (cents: number) => Math.round(cents * 0.029) + 30;

/** One account of the vendor. */
class Books {
  readonly tables = new Map<Table, Map<string, unknown>>(TABLES.map((name) => [name, new Map()]));
}

export class Vendor {
  private readonly accounts = new Map<string, Books>();
  private readonly file: ChangeFile;
  private aheadMs = 0;
  private drawn = 0;

  constructor(path: string) {
    this.file = new ChangeFile(path, (change) => this.load(change));
  }

  get ahead(): number {
    return this.aheadMs;
  }
  get nowMs(): number {
    return Date.now() + this.aheadMs;
  }
  private get nowSeconds(): number {
    return Math.floor(this.nowMs / SECONDS);
  }

  /** Moves the clock to this distance from the host's. It never goes back. */
  moveTo(aheadMs: number): void {
    if (aheadMs <= this.aheadMs) return;
    this.aheadMs = aheadMs;
    this.file.add({ account: '', table: 'double', id: 'ahead', value: aheadMs });
    this.file.write();
  }

  close(): void {
    this.file.close();
  }

  /** Ends a request: everything that it changed is in the file. */
  commit(): void {
    this.file.write();
  }

  // ---- Accounts -----------------------------------------------------------------------------------------------------------------

  /** Adds an account, or changes one. `keys`: its secret keys. */
  setAccount(id: string, keys: readonly string[], changes: Fields = {}): void {
    const before = this.find<Fields>(id, 'account', id);
    const fresh = {
      id,
      object: 'account',
      created: this.nowSeconds,
      type: 'standard',
      country: 'US',
      default_currency: 'usd',
      business_profile: { name: `Business ${id}` },
      capabilities: { card_payments: 'active', transfers: 'active' },
      charges_enabled: true,
      payouts_enabled: true,
      details_submitted: true,
      settings: {
        dashboard: { display_name: `Display ${id}`, timezone: 'America/New_York' },
        payouts: { schedule: { delay_days: 2, interval: 'daily' }, debit_negative_balances: true },
      },
    };
    this.put(id, 'account', { ...(before ?? fresh), ...changes, _keys: keys } as unknown as Thing);
    this.commit();
  }

  /** The account that a secret key belongs to. null: none. */
  accountOf(secretKey: string): string | null {
    for (const [id] of this.accounts) if ((this.find<{ _keys: string[] }>(id, 'account', id)?._keys ?? []).includes(secretKey)) return id;
    return null;
  }

  private isLive(account: string): boolean {
    return (this.find<{ _keys: string[] }>(account, 'account', account)?._keys ?? []).some((key) => /^[sr]k_live_/.test(key));
  }

  get accountIds(): string[] {
    return [...this.accounts.keys()].filter((id) => id !== '');
  }

  account(account: string): Fields {
    const { _keys, ...shown } = this.find<Fields>(account, 'account', account)!;
    return shown;
  }

  balance(account: string): Fields {
    const open = this.all(account, 'balance_transaction').filter((txn) => txn._payout === undefined);
    const sum = open.reduce((total, txn) => total + (txn.net as number), 0);
    return {
      object: 'balance',
      livemode: this.isLive(account),
      available: [{ amount: 0, currency: 'usd', source_types: { card: 0 } }],
      pending: [{ amount: sum, currency: 'usd', source_types: { card: sum } }],
    };
  }

  // ---- Payment intents ----------------------------------------------------------------------------------------------------------

  createIntent(account: string, body: Fields): Answer {
    const amount = Number(body.amount);
    if (!Number.isSafeInteger(amount)) return refusal(400, { code: 'parameter_invalid_integer', param: 'amount', message: 'Invalid integer' }, false);
    if (body.currency !== 'usd') return refusal(400, { param: 'currency', message: 'Invalid currency' }, false);
    if (amount < 50) return refusal(400, { code: 'amount_too_small', param: 'amount', message: 'Amount must be at least $0.50 usd' });
    if (amount > 99_999_999) return refusal(400, { code: 'amount_too_large', param: 'amount', message: 'Amount must be no more than $999,999.99' });
    const id = this.draw('pi');
    const intent: Thing = {
      id,
      object: 'payment_intent',
      amount,
      amount_capturable: 0,
      amount_received: 0,
      canceled_at: null,
      cancellation_reason: null,
      capture_method: body.capture_method ?? 'automatic_async',
      client_secret: `${id}_secret_${this.draw('cs')}`,
      confirmation_method: 'automatic',
      created: this.nowSeconds,
      currency: 'usd',
      customer: null,
      last_payment_error: null,
      latest_charge: null,
      livemode: this.isLive(account),
      metadata: body.metadata ?? {},
      next_action: null,
      payment_method: null,
      payment_method_types: body.payment_method_types ?? ['card'],
      processing: null,
      status: 'requires_payment_method',
    };
    this.put(account, 'payment_intent', intent);
    return ok(intent);
  }

  confirmIntent(account: string, id: string, body: Fields, processingMs: number | null): Answer {
    const intent = this.intent(account, id);
    if (!intent) return missing('payment_intent', id, 'intent');
    if (!['requires_payment_method', 'requires_confirmation'].includes(String(intent.status))) return this.unexpected(intent, 'confirm');
    const methodId = textOf(body.payment_method);
    const method = this.method(account, methodId);
    if (!method) return missing('PaymentMethod', methodId, 'payment_method', 400);
    if (method.once && this.find(account, 'double', `used ${methodId}`) !== undefined)
      return refusal(400, { message: 'The provided PaymentMethod was used before without a Customer. It may not be used again.' });
    if (method.once) this.file.add({ account, table: 'double', id: `used ${methodId}`, value: this.remember(account, `used ${methodId}`) });
    const shownId = method.once ? methodId : this.draw('pm');
    if (processingMs !== null) {
      const waiting = { ...intent, status: 'processing', payment_method: shownId, _processing: this.nowMs + processingMs, _method: methodId };
      this.put(account, 'payment_intent', waiting);
      return ok(waiting);
    }
    return this.attempt(account, intent, method, shownId);
  }

  private attempt(account: string, intent: Thing, method: PaymentMethod, shownId: string): Answer {
    const amount = intent.amount as number;
    const { decline } = method;
    const charge: Thing = {
      id: this.draw('ch'),
      object: 'charge',
      created: this.nowSeconds,
      amount,
      amount_captured: decline ? 0 : amount,
      amount_refunded: 0,
      balance_transaction: null,
      billing_details: { address: { postal_code: null }, name: null },
      captured: !decline,
      currency: 'usd',
      disputed: false,
      failure_code: decline?.code ?? null,
      livemode: this.isLive(account),
      // The vendor copies the metadata of an intent to its charges.
      metadata: { ...(intent.metadata as Fields) },
      outcome: { network_status: decline ? 'declined_by_network' : 'approved_by_network', type: decline ? 'issuer_declined' : 'authorized' },
      paid: !decline,
      payment_intent: intent.id,
      payment_method: shownId,
      payment_method_details: {
        type: 'card',
        card: {
          amount_authorized: decline ? null : amount,
          authorization_code: decline ? null : String(100_000 + (this.drawn % 900_000)),
          brand: method.brand,
          checks: { address_line1_check: null, address_postal_code_check: method.zip, cvc_check: method.cvc },
          country: 'US',
          exp_month: 12,
          exp_year: 2034,
          funding: 'credit',
          last4: method.last4,
          network: method.brand,
        },
      },
      refunded: false,
      status: decline ? 'failed' : 'succeeded',
      _method: method.id,
    };
    if (decline) {
      const error = {
        charge: charge.id,
        code: decline.code,
        ...(decline.decline_code !== null && { decline_code: decline.decline_code }),
        message: 'Your card was declined.',
        type: 'card_error',
      };
      const after = { ...intent, latest_charge: charge.id, payment_method: null, status: 'requires_payment_method', last_payment_error: error };
      this.put(account, 'charge', charge);
      this.put(account, 'payment_intent', after);
      return { status: 402, body: { error: { ...error, payment_intent: shown(after) } }, begun: true };
    }
    const fee = feeOf(amount);
    const txn = this.book(account, { type: 'charge', reporting_category: 'charge', amount, fee, source: charge.id });
    this.put(account, 'charge', { ...charge, balance_transaction: txn.id });
    const after = {
      ...intent,
      status: 'succeeded',
      amount_received: amount,
      latest_charge: charge.id,
      payment_method: shownId,
      last_payment_error: null,
    };
    this.put(account, 'payment_intent', after);
    return ok(after);
  }

  cancelIntent(account: string, id: string): Answer {
    const intent = this.intent(account, id);
    if (!intent) return missing('payment_intent', id, 'intent');
    if (['succeeded', 'canceled', 'processing'].includes(String(intent.status))) return this.unexpected(intent, 'cancel');
    const after = { ...intent, status: 'canceled', canceled_at: this.nowSeconds };
    this.put(account, 'payment_intent', after);
    return ok(after);
  }

  updateIntent(account: string, id: string, body: Fields): Answer {
    const intent = this.intent(account, id);
    if (!intent) return missing('payment_intent', id, 'intent');
    const after = { ...intent, metadata: { ...(intent.metadata as Fields), ...((body.metadata as Fields | undefined) ?? {}) } };
    this.put(account, 'payment_intent', after);
    return ok(after);
  }

  /** An intent that was processing for long enough has succeeded or failed. */
  intent(account: string, id: string): Thing | undefined {
    const intent = this.find<Thing>(account, 'payment_intent', id);
    if (intent?.status !== 'processing' || (intent._processing as number) > this.nowMs) return intent;
    const method = this.method(account, String(intent._method))!;
    this.attempt(account, { ...intent, _processing: undefined }, method, String(intent.payment_method));
    this.commit();
    return this.find<Thing>(account, 'payment_intent', id);
  }

  private unexpected(intent: Thing, verb: string): Answer {
    return refusal(400, {
      code: 'payment_intent_unexpected_state',
      message: `You cannot ${verb} this PaymentIntent because it has a status of ${String(intent.status)}.`,
      payment_intent: shown(intent),
    });
  }

  // ---- Refunds ------------------------------------------------------------------------------------------------------------------

  /** `exceeds`: more than what is left is refunded, too. */
  createRefund(account: string, body: Fields, exceeds = false): Answer {
    const intentId = typeof body.payment_intent === 'string' ? body.payment_intent : null;
    const intent = intentId === null ? undefined : this.intent(account, intentId);
    if (intentId !== null && !intent) return missing('payment_intent', intentId, 'payment_intent', 400);
    if (intent && intent.status !== 'succeeded')
      return refusal(400, { code: 'payment_intent_unexpected_state', message: 'This PaymentIntent does not have a successful charge to refund.' });
    const chargeId = intent ? String(intent.latest_charge) : textOf(body.charge);
    const charge = this.find<Thing>(account, 'charge', chargeId);
    if (!charge) return missing('charge', chargeId, 'charge', 400);
    const left = (charge.amount as number) - (charge.amount_refunded as number);
    if (charge.disputed === true) return refusal(400, { code: 'charge_disputed', message: `Charge ${charge.id} has been charged back.` });
    if (left === 0 && !exceeds) return refusal(400, { code: 'charge_already_refunded', message: `Charge ${charge.id} has already been refunded.` });
    const amount = body.amount === undefined ? left : Number(body.amount);
    if (!Number.isSafeInteger(amount) || amount < 1)
      return refusal(400, { code: 'parameter_invalid_integer', param: 'amount', message: 'Invalid integer' });
    if (amount > left && !exceeds)
      return refusal(400, { param: 'amount', message: `Refund amount (${amount}) is greater than unrefunded amount on charge (${left})` });
    const method = this.method(account, String(charge._method));
    const id = this.draw('re');
    const txn = this.book(account, { type: 'refund', reporting_category: 'refund', amount: -amount, fee: 0, source: id });
    const refund: Thing = {
      id,
      object: 'refund',
      created: this.nowSeconds,
      amount,
      balance_transaction: txn.id,
      charge: charge.id,
      currency: 'usd',
      destination_details: { card: { type: 'refund' }, type: 'card' },
      metadata: body.metadata ?? {},
      payment_intent: charge.payment_intent,
      reason: body.reason ?? null,
      status: method?.refunds === 'pending' || method?.refunds === 'requires_action' ? method.refunds : 'succeeded',
    };
    this.put(account, 'refund', refund);
    this.put(account, 'charge', { ...charge, amount_refunded: (charge.amount_refunded as number) + amount, refunded: left === amount });
    return ok(refund);
  }

  /** A refund fails later: its money comes back to the balance of the account. */
  failRefund(account: string, id: string): Thing | null {
    const refund = this.find<Thing>(account, 'refund', id);
    if (!refund || refund.status === 'failed') return null;
    const amount = refund.amount as number;
    const txn = this.book(account, { type: 'refund_failure', reporting_category: 'refund_failure', amount, fee: 0, source: id });
    const charge = this.find<Thing>(account, 'charge', String(refund.charge))!;
    this.put(account, 'charge', { ...charge, amount_refunded: (charge.amount_refunded as number) - amount, refunded: false });
    const after = { ...refund, status: 'failed', failure_reason: 'expired_or_canceled_card', failure_balance_transaction: txn.id };
    this.put(account, 'refund', after);
    this.commit();
    return after;
  }

  // ---- Payouts ------------------------------------------------------------------------------------------------------------------

  /** Pays out everything that is not paid out yet. null: there is nothing. `not_applicable`: a manual payout, which names no transactions. */
  payOut(
    account: string,
    { status = 'completed', currency = 'usd' }: { status?: 'completed' | 'in_progress' | 'not_applicable'; currency?: string },
  ): Thing | null {
    const open = this.all(account, 'balance_transaction').filter((txn) => txn._payout === undefined);
    if (open.length === 0) return null;
    const amount = open.reduce((sum, txn) => sum + (txn.net as number), 0);
    return this.payout(account, amount, open, status, currency);
  }

  private payout(account: string, amount: number, members: readonly Thing[], status: string, currency: string, seeded?: Fields): Thing {
    const id = this.draw('po');
    for (const txn of members) this.put(account, 'balance_transaction', { ...txn, status: 'available', _payout: id });
    const own = this.book(account, { type: 'payout', reporting_category: 'payout', amount: -amount, fee: 0, source: id });
    this.put(account, 'balance_transaction', { ...own, status: 'available', _payout: id });
    const payout: Thing = {
      id,
      object: 'payout',
      created: this.nowSeconds,
      amount,
      arrival_date: Math.floor((this.nowMs + DAY_MS) / DAY_MS) * (DAY_MS / SECONDS),
      automatic: status !== 'not_applicable',
      balance_transaction: own.id,
      currency,
      failure_balance_transaction: null,
      failure_code: null,
      livemode: this.isLive(account),
      metadata: {},
      method: 'standard',
      reconciliation_status: status,
      source_type: 'card',
      status: 'paid',
      type: 'bank_account',
      ...(seeded && { _seeded: seeded }),
    };
    this.put(account, 'payout', payout);
    this.commit();
    return payout;
  }

  changePayout(account: string, id: string, changes: Fields): Thing | null {
    const payout = this.find<Thing>(account, 'payout', id);
    if (!payout) return null;
    if (changes.status === 'failed') {
      const txn = this.book(account, {
        type: 'payout_failure',
        reporting_category: 'payout_reversal',
        amount: payout.amount as number,
        fee: 0,
        source: id,
      });
      changes = { ...changes, failure_balance_transaction: txn.id, failure_code: 'account_closed' };
    }
    this.put(account, 'payout', { ...payout, ...changes });
    this.commit();
    return this.find<Thing>(account, 'payout', id)!;
  }

  /** A payout of many sales that are made up when they are listed. Their references are `label` and a number, 20 characters in all. */
  seed(account: string, count: number, amountCents: number, label: string): Thing {
    return this.payout(account, count * (amountCents - feeOf(amountCents)), [], 'completed', 'usd', { count, amountCents, label });
  }

  /** The `index`-th line of a seeded payout. */
  private seededLine(payout: Thing, index: number): Thing {
    const { amountCents, label } = payout._seeded as { amountCents: number; label: string };
    const fee = feeOf(amountCents);
    const number = String(index).padStart(7, '0');
    const ref = `${label}${number.padStart(20 - label.length, '0')}`;
    const source = { id: `ch_${payout.id}_${number}`, object: 'charge', payment_intent: `pi_${payout.id}_${number}`, metadata: { payfold_ref: ref } };
    return {
      id: `txn_${payout.id}_${number}`,
      object: 'balance_transaction',
      created: payout.created,
      available_on: payout.created,
      balance_type: 'payments',
      fee_details: [{ amount: fee, currency: 'usd', type: 'stripe_fee' }],
      amount: amountCents,
      currency: 'usd',
      fee,
      net: amountCents - fee,
      reporting_category: 'charge',
      source,
      status: 'available',
      type: 'charge',
    };
  }

  /** A page of the transactions of a payout, newest first. `after`: the id that the page before ended with. */
  linesOfPayout(account: string, payoutId: string, after: string | null, limit: number): { data: Thing[]; more: boolean } | null {
    const payout = this.find<Thing>(account, 'payout', payoutId);
    if (!payout || payout.reconciliation_status === 'not_applicable') return null;
    const own = this.all(account, 'balance_transaction')
      .filter((txn) => txn._payout === payoutId)
      .reverse();
    const seeded = (payout._seeded as { count: number } | undefined)?.count ?? 0;
    const prefix = `txn_${payoutId}_`;
    const from =
      after === null
        ? 0
        : after.startsWith(prefix)
          ? own.length + Number(after.slice(prefix.length)) + 1
          : own.findIndex(({ id }) => id === after) + 1;
    const data: Thing[] = [];
    for (let place = from; place < own.length + seeded && data.length < limit; place += 1)
      data.push(place < own.length ? own[place]! : this.seededLine(payout, place - own.length));
    return { data, more: from + data.length < own.length + seeded };
  }

  // ---- Disputes -----------------------------------------------------------------------------------------------------------------

  /** Opens a dispute of a charge. A `warning_…` moves no money. */
  openDispute(account: string, intentId: string, given: Fields): Thing | null {
    const intent = this.intent(account, intentId);
    const charge = intent && this.find<Thing>(account, 'charge', String(intent.latest_charge));
    if (!charge) return null;
    const dispute: Thing = {
      id: this.draw('du'),
      object: 'dispute',
      created: this.nowSeconds,
      amount: charge.amount,
      balance_transactions: [],
      charge: charge.id,
      currency: 'usd',
      enhanced_eligibility_types: [],
      evidence: {},
      evidence_details: { due_by: this.nowSeconds + 7 * 86_400, has_evidence: false, past_due: false, submission_count: 0 },
      is_charge_refundable: false,
      livemode: this.isLive(account),
      metadata: {},
      payment_intent: intentId,
      payment_method_details: { card: { brand: 'visa', case_type: 'chargeback', network_reason_code: '10.4' }, type: 'card' },
      reason: 'fraudulent',
      status: 'needs_response',
      ...given,
    };
    this.put(account, 'dispute', dispute);
    this.moveDispute(account, dispute.id, {});
    return this.find<Thing>(account, 'dispute', dispute.id)!;
  }

  /** Changes a dispute. Its money leaves with the first status that is no warning, and comes back with `won`. */
  moveDispute(account: string, id: string, changes: Fields): Thing | null {
    const before = this.find<Thing>(account, 'dispute', id);
    if (!before) return null;
    const dispute: Thing = { ...before, ...changes };
    const amount = dispute.amount as number;
    const moved = dispute.balance_transactions as unknown[];
    const isWarning = String(dispute.status).startsWith('warning_') || dispute.status === 'prevented';
    if (!isWarning && moved.length === 0) {
      moved.push(shown(this.book(account, { type: 'adjustment', reporting_category: 'dispute', amount: -amount, fee: 1_500, source: id })));
      const charge = this.find<Thing>(account, 'charge', String(dispute.charge))!;
      this.put(account, 'charge', { ...charge, disputed: true });
    }
    if (dispute.status === 'won' && moved.length === 1)
      moved.push(shown(this.book(account, { type: 'adjustment', reporting_category: 'dispute_reversal', amount, fee: -1_500, source: id })));
    this.put(account, 'dispute', dispute);
    this.commit();
    return dispute;
  }

  /** A transaction that somebody else caused, such as a fee of the vendor. */
  bookForeign(account: string, given: Fields): Thing {
    const txn = this.book(account, given as Parameters<Vendor['book']>[1]);
    this.commit();
    return txn;
  }

  private book(
    account: string,
    { amount, fee, ...given }: { type: string; reporting_category: string; amount: number; fee: number; source: string | null },
  ): Thing {
    const txn: Thing = {
      id: this.draw('txn'),
      object: 'balance_transaction',
      created: this.nowSeconds,
      available_on: this.nowSeconds + 2 * 86_400,
      balance_type: 'payments',
      currency: 'usd',
      description: null,
      exchange_rate: null,
      fee_details: fee === 0 ? [] : [{ amount: fee, currency: 'usd', type: 'stripe_fee' }],
      status: 'pending',
      amount,
      fee,
      net: amount - fee,
      ...given,
    };
    this.put(account, 'balance_transaction', txn);
    return txn;
  }

  // ---- Methods, keys, objects ---------------------------------------------------------------------------------------------------

  addMethod(account: string, given: Fields): PaymentMethod {
    const method = onceMethod(this.draw('pm'), given);
    this.put(account, 'method', method as unknown as Thing);
    this.commit();
    return method;
  }

  private method(account: string, id: string): PaymentMethod | undefined {
    const test = TEST_METHODS[id];
    return test ? { id, ...test } : this.find<PaymentMethod>(account, 'method', id);
  }

  /** undefined: the key was never used, or at least 24 hours ago. */
  key(account: string, key: string): StoredKey | undefined {
    const stored = this.find<StoredKey>(account, 'key', key);
    return stored && this.nowMs - stored.atMs < DAY_MS ? stored : undefined;
  }

  storeKey(account: string, key: string, stored: StoredKey): void {
    this.books(account).tables.get('key')!.set(key, stored);
    this.file.add({ account, table: 'key', id: key, value: stored });
  }

  find<T>(account: string, table: Table, id: string): T | undefined {
    return this.accounts.get(account)?.tables.get(table)?.get(id) as T | undefined;
  }

  /** In the order of creation. */
  all(account: string, table: Table): Thing[] {
    return [...(this.accounts.get(account)?.tables.get(table)?.values() ?? [])] as Thing[];
  }

  /** The object that an expanded member names. */
  byId(account: string, id: string): Thing | undefined {
    for (const table of ['charge', 'refund', 'dispute', 'payout', 'balance_transaction', 'payment_intent'] as const) {
      const found = this.find<Thing>(account, table, id);
      if (found) return found;
    }
    return undefined;
  }

  private put(account: string, table: Table, value: Thing): void {
    this.books(account).tables.get(table)!.set(value.id, value);
    this.file.add({ account, table, id: value.id, value });
  }

  private remember(account: string, id: string): true {
    this.books(account).tables.get('double')!.set(id, true);
    return true;
  }

  private books(account: string): Books {
    const known = this.accounts.get(account);
    if (known) return known;
    const made = new Books();
    this.accounts.set(account, made);
    return made;
  }

  private load({ account, table, id, value }: Change): void {
    if (account === '') {
      if (id === 'ahead') this.aheadMs = value as number;
      if (id === 'drawn') this.drawn = value as number;
      return;
    }
    this.books(account)
      .tables.get(table as Table)!
      .set(id, value);
  }

  private draw(prefix: string): string {
    this.drawn += 1;
    this.file.add({ account: '', table: 'double', id: 'drawn', value: this.drawn });
    return `${prefix}_3Double${String(this.drawn).padStart(9, '0')}`;
  }
}

/** An object as answers show it. */
export const shown = (value: Fields): Fields => {
  const kind = String(value.object);
  const whole = isKind(kind) ? complete(kind, value) : value;
  return Object.fromEntries(Object.entries(whole).filter(([name]) => !HIDDEN.includes(name)));
};

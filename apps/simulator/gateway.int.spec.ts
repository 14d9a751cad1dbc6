/** Tests the adapter of libs/payments against the real simulator: the gateway contract, the fixture cards, and faults. */
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { passesLuhn } from '#platform';
import { Secret, type GatewayAccount, type Leg, type PaymentInstrument, type ReferenceCall } from '#payments';
import { createSimulatorGateway, type SimulatorGateway, type SimulatorGatewayOptions } from '#gateways';
import { systemClock } from '#kernel';
import { drawRef, gatewayContract } from '../../test/contract/gateway.js';
import { eventually } from '../../test/support/eventually.js';
import { listedLines } from '../../test/support/listed-lines.js';
import { createSimulatorControl, type SimulatorControl } from './control.js';
import { CARDS } from './fixtures.js';
import { startSimulator, type Simulator, type SimulatorOptions } from './server.js';

const soon = () => AbortSignal.timeout(20_000);
const accountOf = (merchantAccount: string): GatewayAccount => ({
  gateway: 'simulator',
  merchantAccount,
  credentialsRef: 'sandbox',
  environment: 'sandbox',
});
const card = (number: string): PaymentInstrument => ({
  type: 'card',
  number: new Secret(number.replaceAll(' ', '')),
  expiry: { month: 12, year: 2030 },
  cvv: new Secret('987'),
});
const token = (text: string): PaymentInstrument => ({ type: 'card_token', token: new Secret(text) });

interface Running {
  readonly simulator: Simulator;
  readonly gateway: SimulatorGateway;
  readonly control: SimulatorControl;
  readonly directory: string;
  readonly logged: string[];
  readonly stop: () => Promise<void>;
}

const gatewayAt = ({ url: endpoint }: Pick<Simulator, 'url'>, account: GatewayAccount, options: Partial<SimulatorGatewayOptions> = {}) =>
  createSimulatorGateway({ endpoint, account, clock: systemClock, ...options });
const begunAt = () => new Date().toISOString();
const about = (ref: string, account: GatewayAccount): ReferenceCall => ({
  ref,
  op: 'charge',
  leg: 'principal',
  account,
  begunAt: begunAt(),
  amountCents: 10_000,
  chargeTransactionId: null,
  last4: null,
});

const run = async (options: Partial<SimulatorOptions> = {}): Promise<Running> => {
  const directory = await mkdtemp(join(tmpdir(), 'payfold-simulator-'));
  const logged: string[] = [];
  const simulator = await startSimulator({ directory, onLog: (line) => logged.push(line), ...options });
  const { partialVoid, refundUnsettled } = options;
  const gateway = gatewayAt(simulator, accountOf('contract'), {
    ...(partialVoid !== undefined && { partialVoid }),
    ...(refundUnsettled !== undefined && { refundUnsettled }),
  });
  const stop = async () => {
    gateway.close();
    await simulator.close();
    await rm(directory, { recursive: true, force: true });
  };
  return { simulator, gateway, control: createSimulatorControl(simulator.url, simulator.controlKey), directory, logged, stop };
};

const contractAgainst = (name: string, options: { readonly partialVoid?: boolean; readonly refundUnsettled?: boolean }) => {
  const { capabilities } = gatewayAt({ url: 'http://127.0.0.1' }, accountOf('contract'), options);
  gatewayContract(name, capabilities, { namesTransactions: true }, async () => {
    const { gateway, simulator, stop } = await run(options);
    const account = accountOf('contract');
    const another = gatewayAt(simulator, accountOf('another'));
    return {
      gateway,
      account,
      another,
      approved: () => card('4242424242424242'),
      declined: () => card('4000000000000002'),
      last4: '4242',
      now: Date.now,
      passBatch: () => gateway.closeBatch(soon()),
      close: () => {
        another.close();
        return stop();
      },
    };
  });
};

contractAgainst('simulator', {});
contractAgainst('simulator, voids whole only, refunds before settlement', { partialVoid: false, refundUnsettled: true });

describe('the fixture cards', () => {
  let running: Running;
  let gateway: SimulatorGateway;
  beforeAll(async () => {
    running = await run();
    ({ gateway } = running);
  });
  afterAll(() => running.stop());

  const chargeWith = (instrument: PaymentInstrument, account: GatewayAccount, leg: Leg = 'principal', ref = drawRef(), amountCents = 10_000) =>
    gateway.charge({ ref, leg, account, begunAt: begunAt(), amountCents, instrument }, soon());
  const approvedWith = async (number: string, account: GatewayAccount, leg: Leg = 'principal', ref = drawRef()) => {
    const outcome = await chargeWith(card(number), account, leg, ref);
    if (outcome.kind !== 'approved') throw new Error(`not approved: ${JSON.stringify(outcome)}`);
    return { ref, leg, account, chargeTransactionId: outcome.txn.transactionId };
  };
  type Charged = Awaited<ReturnType<typeof approvedWith>>;
  const voidOf = ({ leg, account, chargeTransactionId }: Charged, askedBy: 'void' | 'refund' | 'reversal' = 'void') =>
    gateway.void({ ref: drawRef(), leg, account, begunAt: begunAt(), chargeTransactionId, askedBy }, soon());
  const refundOf = ({ leg, account, chargeTransactionId }: Charged, amountCents = 10_000) =>
    gateway.refund({ ref: drawRef(), leg, account, begunAt: begunAt(), chargeTransactionId, amountCents, last4: '4242' }, soon());
  const linesOf = (account: GatewayAccount) => listedLines(gatewayAt(running.simulator, account), null, soon());
  const lookupOf = ({ ref, account }: { ref: string; account: GatewayAccount }) => gateway.lookup(about(ref, account), soon());
  const finalizeOf = ({ ref, account }: { ref: string; account: GatewayAccount }) => gateway.finalize(about(ref, account), soon());

  let accounts = 0;
  const freshAccount = () => accountOf(`fixtures-${++accounts}`);

  test('are valid numbers, none of them one that is public under another meaning', () => {
    for (const number of Object.keys(CARDS)) expect([number, passesLuhn(number)]).toEqual([number, true]);
    for (const taken of ['4000000000000036', '4000000000000010', '4000000000000119', '4000000000000259']) expect(CARDS).not.toHaveProperty(taken);
  });

  test.each([
    ['Visa', '4242 4242 4242 4242'],
    ['Visa, the other', '4111 1111 1111 1111'],
    ['Mastercard', '5555 5555 5555 4444'],
    ['Amex', '3782 822463 10005'],
    ['Discover', '6011 1111 1111 1117'],
    ['19 digits', '4000 0077 7000 0000 205'],
    ['19 digits, UnionPay', '6205 5000 0000 0000 004'],
  ])('approved: %s', async (_, number) => {
    const account = freshAccount();
    const charged = await approvedWith(number, account);
    expect(await lookupOf(charged)).toMatchObject({ found: true, state: 'approved', amountCents: 10_000 });
    expect((await voidOf(charged)).kind).toBe('approved');
  });

  test.each([
    ['general decline', '4000 0000 0000 0002', 'generic_decline'],
    ['insufficient funds', '4000 0000 0000 9995', 'insufficient_funds'],
    ['card limit exceeded', '4000 0000 0000 6975', 'card_limit_exceeded'],
    ['issuer-reported expired', '4000 0000 0000 0069', 'expired_card'],
    ['security code mismatch', '4000 0000 0000 0127', 'cvv_mismatch'],
    ['postal code mismatch', '4000 0077 7000 4619', 'postal_code_mismatch'],
  ])('declined: %s', async (_, number, code) => {
    const account = freshAccount();
    const ref = drawRef();
    const outcome = await chargeWith(card(number), account, 'combined', ref);
    expect(outcome).toMatchObject({ kind: 'declined', decline: { code } });
    if (code === 'cvv_mismatch') expect(outcome).toMatchObject({ decline: { cvv: 'no_match' } });
    if (code === 'postal_code_mismatch') expect(outcome).toMatchObject({ decline: { avs: 'no_match' } });
    expect(await lookupOf({ ref, account })).toMatchObject({ found: true, state: 'declined' });
  });

  test.each([
    ['a valid number that is no fixture', card('4000 0000 0000 0077')],
    ['another brand that is no fixture', card('5105 1051 0510 5100')],
    ['a token that is no fixture', token('tok_live_something')],
    ['a token that is called like a property', token('constructor')],
  ])('declined, "not a sandbox fixture card": %s', async (_, instrument) => {
    expect(await chargeWith(instrument, freshAccount())).toMatchObject({
      kind: 'declined',
      decline: { code: 'generic_decline', raw: 'not a sandbox fixture card' },
    });
  });

  test('gateway server error: not processed, answered', async () => {
    expect(await chargeWith(card('4000 0077 7000 5020'), freshAccount())).toMatchObject({ kind: 'not_processed', answered: true });
  });

  test('delayed gateway failure: the same after 3 s', async () => {
    const start = performance.now();
    expect(await chargeWith(card('4000 0077 7000 5129'), freshAccount())).toMatchObject({ kind: 'not_processed', answered: true });
    expect(performance.now() - start).toBeGreaterThan(2_900);
  });

  test('slow approval: after 5 s, as one charge for two calls in flight; the fee is not slow', async () => {
    const account = freshAccount();
    const ref = drawRef();
    const start = performance.now();
    const [first, second] = await Promise.all([
      chargeWith(card('4000 0077 7000 2050'), account, 'principal', ref),
      chargeWith(card('4000 0077 7000 2050'), account, 'principal', ref),
    ]);
    expect(performance.now() - start).toBeGreaterThan(4_900);
    expect(first.kind).toBe('approved');
    expect(second).toEqual(first);
    await chargeWith(card('4000 0077 7000 2050'), account, 'fee');
    expect(performance.now() - start).toBeLessThan(9_000);
    expect((await gatewayAt(running.simulator, account).closeBatch(soon()))!.count).toBe(2);
  });

  test('unreadable, reversal works: unknown, then finalize knows the charge and a void takes it back', async () => {
    const account = freshAccount();
    const ref = drawRef();
    expect(await chargeWith(card('4000 0077 7000 5046'), account, 'principal', ref)).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
    const finalized = await finalizeOf({ ref, account });
    if (finalized.kind !== 'executed' || finalized.result.kind !== 'approved') throw new Error(JSON.stringify(finalized));
    const chargeTransactionId = finalized.result.txn.transactionId;
    expect((await voidOf({ ref, leg: 'principal', account, chargeTransactionId }, 'reversal')).kind).toBe('approved');
    expect(await lookupOf({ ref, account })).toMatchObject({ found: true, state: 'voided' });
  });

  test('unreadable, cannot be resolved: no one can tell, for ever, and the charge settles all the same', async () => {
    const account = freshAccount();
    const ref = drawRef();
    const charge = () => chargeWith(card('4000 0077 7000 5145'), account, 'principal', ref);
    expect(await charge()).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
    for (let round = 0; round < 3; round++) {
      expect(await finalizeOf({ ref, account })).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
      expect(await lookupOf({ ref, account })).toEqual({ found: 'cannot_tell' });
      expect(await charge()).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
    }
    await gatewayAt(running.simulator, account).closeBatch(soon());
    expect(await linesOf(account)).toMatchObject([{ ref, type: 'sale', grossCents: 10_000, accepted: true }]);
    expect(await finalizeOf({ ref, account })).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
  });

  test('unreadable, never reached the processor: unknown, then never', async () => {
    const account = freshAccount();
    const ref = drawRef();
    const charge = () => chargeWith(card('4000 0077 7000 5244'), account, 'principal', ref);
    expect(await charge()).toMatchObject({ kind: 'unknown', cause: 'unreadable' });
    expect(await lookupOf({ ref, account })).toEqual({ found: false });
    expect(await finalizeOf({ ref, account })).toEqual({ kind: 'never' });
    expect(await charge()).toMatchObject({ kind: 'rejected', why: 'finalised' });
    expect(await gatewayAt(running.simulator, account).closeBatch(soon())).toBeNull();
  });

  test('void rejected: being captured, so a void is refused as settled and a refund works (C24)', async () => {
    const account = freshAccount();
    const charged = await approvedWith('4000 0077 7000 4221', account);
    expect(await lookupOf(charged)).toMatchObject({ state: 'settling' });
    expect(await voidOf(charged)).toMatchObject({ kind: 'rejected', why: 'already_settled' });
    expect(await voidOf(charged, 'reversal')).toMatchObject({ kind: 'rejected', why: 'already_settled' });
    expect((await refundOf(charged, 4_000)).kind).toBe('approved');
    await gatewayAt(running.simulator, account).closeBatch(soon());
    expect((await linesOf(account)).map(({ grossCents }) => grossCents)).toEqual([10_000, -4_000]);
    expect((await refundOf(charged, 6_000)).kind).toBe('approved');
  });

  test('fee leg declined: the principal is approved', async () => {
    const account = freshAccount();
    await approvedWith('4000 0077 7000 4023', account, 'principal');
    await approvedWith('4000 0077 7000 4023', account, 'combined');
    expect(await chargeWith(card('4000 0077 7000 4023'), account, 'fee')).toMatchObject({ kind: 'declined', decline: { code: 'generic_decline' } });
  });

  test('fee void fails once, for each charge; not for a principal, a refund or a reversal', async () => {
    const account = freshAccount();
    for (let round = 0; round < 2; round++) {
      const principal = await approvedWith('4000 0077 7000 4320', account, 'principal');
      const fee = await approvedWith('4000 0077 7000 4320', account, 'fee');
      expect((await voidOf(principal)).kind).toBe('approved');
      expect(await voidOf(fee)).toMatchObject({ kind: 'not_processed', answered: true });
      expect((await voidOf(fee)).kind).toBe('approved');
    }
    expect((await voidOf(await approvedWith('4000 0077 7000 4320', account, 'combined'))).kind).toBe('approved');
    expect((await voidOf(await approvedWith('4000 0077 7000 4320', account, 'fee'), 'reversal')).kind).toBe('approved');
    expect((await voidOf(await approvedWith('4000 0077 7000 4320', account, 'fee'), 'refund')).kind).toBe('approved');
  });

  test('the first reversal of the fee leg that a refund asks for fails, void or refund alike', async () => {
    const account = freshAccount();
    const unsettled = await approvedWith('4000 0077 7000 7026', account, 'fee');
    expect(await voidOf(unsettled, 'refund')).toMatchObject({ kind: 'not_processed', answered: true });
    expect((await voidOf(unsettled, 'refund')).kind).toBe('approved');

    const settled = await approvedWith('4000 0077 7000 7026', account, 'fee');
    const principal = await approvedWith('4000 0077 7000 7026', account, 'principal');
    await gatewayAt(running.simulator, account).closeBatch(soon());
    expect((await refundOf(principal)).kind).toBe('approved');
    expect(await refundOf(settled)).toMatchObject({ kind: 'not_processed', answered: true });
    expect((await refundOf(settled)).kind).toBe('approved');

    expect((await voidOf(await approvedWith('4000 0077 7000 7026', account, 'fee'), 'void')).kind).toBe('approved');
  });

  test('settles at once, in a batch of its own', async () => {
    const account = freshAccount();
    const charged = await approvedWith('4000 0077 7000 2001', account);
    expect(await lookupOf(charged)).toMatchObject({ state: 'settled' });
    expect(await voidOf(charged)).toMatchObject({ kind: 'rejected', why: 'already_settled' });
    expect((await refundOf(charged)).kind).toBe('approved');
    expect(await linesOf(account)).toMatchObject([{ ref: charged.ref, type: 'sale', grossCents: 10_000 }]);
    await gatewayAt(running.simulator, account).closeBatch(soon());
    const [sale, refund] = await linesOf(account);
    expect(refund).toMatchObject({ type: 'refund', grossCents: -10_000 });
    expect(refund!.batchId).not.toBe(sale!.batchId);
  });

  test('settlement rejected: its batch says so, and nothing moves afterwards (C67)', async () => {
    const account = freshAccount();
    const rejected = await approvedWith('4000 0077 7000 4304', account);
    const other = await approvedWith('4242 4242 4242 4242', account);
    const closed = await gatewayAt(running.simulator, account).closeBatch(soon());
    expect(closed).toMatchObject({ count: 2, amountCents: 10_000 });
    expect(await linesOf(account)).toMatchObject([
      { ref: rejected.ref, accepted: false, grossCents: 10_000, feeCents: 0, netCents: 0 },
      { ref: other.ref, accepted: true, grossCents: 10_000, feeCents: 230, netCents: 9_770 },
    ]);
    expect(await lookupOf(rejected)).toMatchObject({ state: 'settlement_rejected' });
    expect(await voidOf(rejected)).toMatchObject({ kind: 'rejected', why: 'settlement_rejected' });
    expect(await refundOf(rejected)).toMatchObject({ kind: 'rejected', why: 'settlement_rejected' });
  });

  test('dispute after settlement: one per payment; the operator sees it and moves it on', async () => {
    const account = freshAccount();
    const principal = await approvedWith('4000 0077 7000 9006', account, 'principal');
    await approvedWith('4000 0077 7000 9006', account, 'fee');
    const own = async () => (await running.control.disputes()).filter(({ merchantAccount }) => merchantAccount === account.merchantAccount);
    expect(await own()).toEqual([]);
    await gatewayAt(running.simulator, account).closeBatch(soon());
    const [dispute, ...more] = await own();
    expect(more).toEqual([]);
    expect(dispute).toMatchObject({ ref: principal.ref, amountCents: 10_000, status: 'debited', stage: 'chargeback' });
    await running.control.changeDispute(dispute!.disputeId, { status: 'in_dispute', stage: 'representment' });
    expect(await own()).toMatchObject([{ status: 'in_dispute', stage: 'representment' }]);
  });

  test('tokens: approved (again and again), gateway error, incomplete response', async () => {
    const account = freshAccount();
    expect((await chargeWith(token('tok_sandbox_approved'), account, 'principal')).kind).toBe('approved');
    expect((await chargeWith(token('tok_sandbox_approved'), account, 'fee')).kind).toBe('approved');
    expect(await chargeWith(token('tok_sandbox_gateway_error'), account)).toMatchObject({ kind: 'not_processed', answered: true });
    const ref = drawRef();
    expect(await chargeWith(token('tok_sandbox_incomplete_response'), account, 'principal', ref)).toMatchObject({
      kind: 'unknown',
      cause: 'unreadable',
    });
    expect(await finalizeOf({ ref, account })).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
  });

  test('a reference belongs to its merchant account', async () => {
    const ref = drawRef();
    const [mine, theirs] = [freshAccount(), freshAccount()];
    const charged = await approvedWith('4242 4242 4242 4242', mine, 'principal', ref);
    expect(await lookupOf({ ref, account: theirs })).toEqual({ found: false });
    expect(await voidOf({ ...charged, account: theirs })).toMatchObject({ kind: 'rejected', why: 'not_found' });
  });

  test('a finalize for another operation than the reference was used for cannot tell', async () => {
    const { ref, account } = await approvedWith('4242 4242 4242 4242', freshAccount());
    expect(await gateway.finalize({ ...about(ref, account), op: 'refund' }, soon())).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    expect(await finalizeOf({ ref, account })).toMatchObject({ kind: 'executed' });
  });

  test('batches of many lines are read whole, page by page', async () => {
    const account = freshAccount();
    const refs = Array.from({ length: 450 }, drawRef);
    await Promise.all(refs.map((ref) => chargeWith(card('4242424242424242'), account, 'combined', ref)));
    for (let single = 0; single < 120; single++) await chargeWith(card('4000007770002001'), account, 'combined');
    await gatewayAt(running.simulator, account).closeBatch(soon());
    const lines = await linesOf(account);
    expect(lines).toHaveLength(570);
    expect(new Set(lines.slice(120).map(({ ref }) => ref))).toEqual(new Set(refs));
    expect(new Set(lines.map(({ batchId }) => batchId)).size).toBe(121);
  });

  test('no card number and no security code stands in the books or the log', async () => {
    const files = await readdir(join(running.directory, 'books'));
    const books = (await Promise.all(files.map((file) => readFile(join(running.directory, 'books', file), 'latin1')))).join('');
    expect(books.length).toBeGreaterThan(10_000);
    expect(books).toContain('"last4":"4242"');
    for (const number of Object.keys(CARDS)) expect(books).not.toContain(number);
    expect(books).not.toMatch(/cvv":"?987/);
    expect(running.logged).toEqual([]);
  });
});

describe('faults on demand', () => {
  let running: Running;
  let gateway: SimulatorGateway;
  let control: SimulatorControl;
  const account = accountOf('faults');
  beforeAll(async () => {
    running = await run();
    ({ gateway, control } = running);
  });
  afterAll(() => running.stop());

  const charge = (ref = drawRef(), signal = soon(), leg: Leg = 'principal') =>
    gateway.charge({ ref, leg, account, begunAt: begunAt(), amountCents: 500, instrument: card('4242424242424242') }, signal);
  const finalize = (ref: string) => gateway.finalize(about(ref, account), soon());

  test.each([
    ['cut', 'disconnected'],
    ['not_json', 'unreadable'],
    ['missing_fields', 'unreadable'],
    ['other_reference', 'unreadable'],
    ['oversized', 'unreadable'],
    ['bare_500', 'http_5xx'],
  ] as const)('%s is %s, with and without an effect; finalize says which', async (answer, cause) => {
    for (const effect of [true, false]) {
      const ref = drawRef();
      await control.arm({ match: { call: 'charge', ref }, answer, effect });
      expect(await charge(ref)).toMatchObject({ kind: 'unknown', cause });
      expect((await finalize(ref)).kind).toBe(effect ? 'executed' : 'never');
    }
  });

  test('a drip that outlasts the deadline is a timeout, with the effect', async () => {
    const ref = drawRef();
    await control.arm({ match: { ref }, answer: 'drip' });
    expect(await charge(ref, AbortSignal.timeout(700))).toMatchObject({ kind: 'unknown', cause: 'timeout' });
    expect((await finalize(ref)).kind).toBe('executed');
  });

  test('a charge that wakes after its reference was finalised charges nothing', async () => {
    const ref = drawRef();
    await control.arm({ match: { ref, call: 'charge' }, delayBeforeMs: 600 });
    expect(await charge(ref, AbortSignal.timeout(200))).toMatchObject({ kind: 'unknown', cause: 'timeout' });
    expect(await finalize(ref)).toEqual({ kind: 'never' });
    const truth = await control.truth();
    expect(truth.filter((entry) => entry.ref === ref)).toMatchObject([{ op: 'tombstone' }]);
    await control.arm({ match: { ref, call: 'charge' }, delayBeforeMs: 400 });
    expect(await charge(ref)).toMatchObject({ kind: 'rejected', why: 'finalised' });
  });

  test('a delay after the execution: a timeout with an effect', async () => {
    const ref = drawRef();
    await control.arm({ match: { ref }, delayAfterMs: 600 });
    expect(await charge(ref, AbortSignal.timeout(200))).toMatchObject({ kind: 'unknown', cause: 'timeout' });
    expect((await finalize(ref)).kind).toBe('executed');
  });

  test('processing disabled: clearly refused, nothing stored, and back again', async () => {
    await control.setProcessing(false);
    const ref = drawRef();
    expect(await charge(ref)).toMatchObject({ kind: 'not_processed', answered: false });
    expect(await finalize(ref)).toEqual({ kind: 'cannot_tell', why: 'unreachable' });
    await expect(gateway.lookup(about(ref, account), soon())).rejects.toThrow('did not answer');
    await control.setProcessing(true);
    expect((await charge(ref)).kind).toBe('approved');
  });

  test('faults fit calls by kind, leg, card and asker, for so many calls after so many', async () => {
    await control.arm({ match: { call: 'charge', leg: 'fee', last4: '4242' }, answer: 'disabled', skip: 1, times: 2 });
    const kinds = async (leg: Leg) => (await charge(drawRef(), soon(), leg)).kind;
    expect(await kinds('principal')).toBe('approved');
    expect([await kinds('fee'), await kinds('fee'), await kinds('fee'), await kinds('fee')]).toEqual([
      'approved',
      'not_processed',
      'not_processed',
      'approved',
    ]);
    await control.arm({ match: { call: 'void', askedBy: 'reversal' }, answer: 'cut', effect: false, times: null });
    const outcome = await charge();
    if (outcome.kind !== 'approved') throw new Error(outcome.kind);
    const voidAs = (askedBy: 'void' | 'reversal') =>
      gateway.void(
        { ref: drawRef(), leg: 'principal', account, begunAt: begunAt(), chargeTransactionId: outcome.txn.transactionId, amountCents: 1, askedBy },
        soon(),
      );
    expect((await voidAs('reversal')).kind).toBe('unknown');
    expect((await voidAs('reversal')).kind).toBe('unknown');
    expect((await voidAs('void')).kind).toBe('approved');
    await control.clearFaults();
    expect((await voidAs('reversal')).kind).toBe('approved');
    expect(await control.harmedCalls()).toBeGreaterThan(4);
  });

  test('the true state lists every execution once, with its later changes', async () => {
    const from = (await control.truth()).length;
    const ref = drawRef();
    await Promise.all([charge(ref), charge(ref)]);
    const outcome = await charge(ref);
    if (outcome.kind !== 'approved') throw new Error(outcome.kind);
    const chargeTransactionId = outcome.txn.transactionId;
    const voidRef = drawRef();
    await gateway.void(
      { ref: voidRef, leg: 'principal', account, begunAt: begunAt(), chargeTransactionId, amountCents: 200, askedBy: 'refund' },
      soon(),
    );
    const never = drawRef();
    await finalize(never);
    expect(await control.truth(from)).toMatchObject([
      { ref, op: 'charge', result: 'approved', amountCents: 500, state: 'approved', voidedCents: 200, card: { brand: 'visa', last4: '4242' } },
      { ref: voidRef, op: 'void', result: 'approved', amountCents: 200, chargeTransactionId, askedBy: 'refund' },
      { ref: never, op: 'tombstone' },
    ]);
    await control.closeBatches();
    expect((await control.truth(from))[0]).toMatchObject({ state: 'settled' });
  });

  test('a malformed call, a wrong key and an unknown path are refused without an effect', async () => {
    const send = (path: string, body: string, authorization = 'Sandbox faults:sk_sandbox_faults') =>
      fetch(new URL(path, running.simulator.url), { method: 'POST', body, headers: { authorization, 'content-type': 'application/json' } });
    const before = (await control.truth()).length;
    const whole = { ref: 'REF', leg: 'principal', amountCents: 1, instrument: { token: 'tok_sandbox_approved' } };
    expect((await send('/v1/charges', JSON.stringify(whole), 'Sandbox faults:sk_sandbox_other')).status).toBe(401);
    expect((await send('/v1/charges', JSON.stringify(whole), '')).status).toBe(401);
    for (const authorization of [
      'Sandbox faults:sk_sandbox_faults',
      'Sandbox operator:sk_sandbox_operator',
      'Control',
      'Control ',
      `Control ${'x'.repeat(43)}`,
      '',
    ])
      expect((await send('/control/faults', '{}', authorization)).status).toBe(401);
    expect((await fetch(new URL('/control/charges', running.simulator.url))).status).toBe(401);
    expect((await send('/v1/charges', JSON.stringify(whole), `Control ${running.simulator.controlKey}`)).status).toBe(401);
    expect((await send('/v1/nothing', '{}')).status).toBe(404);
    for (const wrong of [
      { ref: 'a b' },
      { leg: 'both' },
      { amountCents: 0 },
      { amountCents: 1.5 },
      { amountCents: '1' },
      { instrument: null },
      { instrument: { number: '42' } },
    ])
      expect((await send('/v1/charges', JSON.stringify({ ...whole, ...wrong }))).status).toBe(400);
    const broken = await send('/v1/charges', '{"number":"4242424242424242"');
    expect(broken.status).toBe(400);
    expect(await broken.text()).not.toContain('4242');
    expect((await control.truth()).length).toBe(before);
  });
});

test('without controls (production) the operator is not served', async () => {
  const { simulator, stop } = await run({ controls: false });
  const answer = await fetch(new URL('/control/charges', simulator.url), { headers: { authorization: `Control ${simulator.controlKey}` } });
  expect(answer.status).toBe(404);
  const merchant = await fetch(new URL('/control/charges', simulator.url), { headers: { authorization: 'Sandbox a:sk_sandbox_a' } });
  expect(merchant.status).toBe(404);
  await stop();
});

test('closing drops calls that wait, without an effect, and a start on the same directory knows everything else', async () => {
  const { simulator, gateway, control, directory, stop } = await run();
  const account = accountOf('restart');
  const charge = (ref: string, through: SimulatorGateway = gateway) =>
    through.charge({ ref, leg: 'principal', account, begunAt: begunAt(), amountCents: 700, instrument: card('4242424242424242') }, soon());
  const [waiting, done] = [drawRef(), drawRef()];
  const outcome = await charge(done);
  await control.arm({ match: { ref: waiting }, delayBeforeMs: 60_000 });
  const dropped = charge(waiting);
  // The fault is counted when the call arrives.
  await eventually(async () => (await control.harmedCalls()) === 1);
  await simulator.close();
  expect(await dropped).toMatchObject({ kind: 'unknown', cause: 'disconnected' });

  const again = await startSimulator({ directory });
  const after = gatewayAt(again, account);
  expect(await charge(done, after)).toEqual(outcome);
  expect(await after.finalize(about(waiting, account), soon())).toEqual({ kind: 'never' });
  after.close();
  await again.close();
  await stop();
});

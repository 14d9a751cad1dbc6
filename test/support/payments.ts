/**
 * The functions of libs/payments with real parts: the simulator over a socket, keys and velocity in Postgres, and a directory made from events. Only
 * the event store is in memory. Store and gateway are wrapped, so that a spec can run code between any two steps.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Administration, type FeeConfig, MemoryDirectory, NO_FEE } from '#accounts';
import { type EventStore, memoryEventStore, OutcomeUnknown, type Position, ReadOnly, type Recorded, Unavailable } from '#eventstore';
import { Deadline, type Ids, ServiceError } from '#kernel';
import {
  charge,
  chargeOnce,
  type ChargeRequest,
  type Claims,
  createRecovery,
  GATEWAY_SLOTS,
  type GatewayAccount,
  type GatewaySlotLimits,
  GatewaySlots,
  idempotencyMigrations,
  type Leg,
  openPayment,
  type Payment,
  type PaymentGateway,
  type PaymentPorts,
  type PaymentServices,
  paymentStream,
  PaymentStreams,
  paymentView,
  type PaymentView,
  postgresIdempotency,
  postgresListRows,
  postgresRefusals,
  postgresVelocity,
  type Received,
  type Recovery,
  type DueAttempt,
  type RecoveryWork,
  type RefundView,
  refusalMigration,
  REQUEST_DEADLINE_MS,
  type Resolution,
  reverse,
  reverseOnce,
  type ReverseRequest,
  Secret,
  velocityMigration,
  type VoidView,
  isVisible,
} from '#payments';
import { createSimulatorGateway, createTransport } from '#gateways';
import {
  type Answer,
  createLogger,
  createPersonalKeys,
  createPool,
  type KeyRing,
  migrate,
  newKeyRing,
  personalKeyMigration,
  type Pool,
  postgresPersonalKeyRows,
  systemIds,
} from '#platform';
import { answerEncoder } from '../../apps/answers.js';
import { createSimulatorControl, type SimulatorControl } from '../../apps/simulator/control.js';
import type { Truth } from '../../apps/simulator/processor.js';
import { type Simulator, type SimulatorOptions, startSimulator } from '../../apps/simulator/server.js';
import { sent } from './answers.js';
import { ownLogOver } from './mark-book.js';
import { MovableClock } from './clock.js';
import { freshDatabase } from './postgres.js';

/** Claims that are always open, as in a process that has compared its keys with the log. */
export const OPEN_CLAIMS: Claims = { isOpen: true, mayBeLost: false, begun: async () => undefined };

type Step = () => unknown;

/**
 * Steps that a spec adds before or after calls of a port, by the name of the call. A step runs at the next call of this name, or at the next `times`
 * calls.
 */
export class Interposed {
  private readonly steps: { readonly when: 'before' | 'after'; readonly name: string; readonly step: Step; left: number }[] = [];

  before(name: string, step: Step, times = 1): void {
    this.steps.push({ when: 'before', name, step, left: times });
  }
  after(name: string, step: Step, times = 1): void {
    this.steps.push({ when: 'after', name, step, left: times });
  }
  /** The call fails before it arrives. */
  failBefore(name: string, error: () => Error, times = Number.POSITIVE_INFINITY): void {
    this.before(name, () => Promise.reject(error()), times);
  }
  /** The call is executed, but its caller gets the error instead of the answer. */
  failAfter(name: string, error: () => Error, times = Number.POSITIVE_INFINITY): void {
    this.after(name, () => Promise.reject(error()), times);
  }
  clear(): void {
    this.steps.length = 0;
  }

  async around<T>(names: readonly string[], call: () => Promise<T>): Promise<T> {
    await this.take('before', names);
    const result = await call();
    await this.take('after', names);
    return result;
  }

  private async take(when: 'before' | 'after', names: readonly string[]): Promise<void> {
    const found = this.steps.find((one) => one.when === when && one.left > 0 && names.includes(one.name));
    if (!found) return;
    found.left -= 1;
    await found.step();
  }
}

/** Errors for failBefore and failAfter. `away`: nothing was appended. `unheard`: the events were appended, but the answer was lost. */
export const away = () => new Unavailable('the store is away');
export const unheard = () => new OutcomeUnknown('the answer was lost');
/** The store takes no writes: nothing was appended. */
export const readOnly = () => new ReadOnly('the store takes no writes');

const watchedStore = (store: EventStore, steps: Interposed): EventStore => ({
  ...store,
  append: (stream, expected, events, options) =>
    steps.around([...events.map(({ type }) => type), 'append'], () => store.append(stream, expected, events, options)),
});

/** Names of calls: `charge.principal`, `void.fee`, `refund.combined`, `finalize.charge`. */
const watchedGateway = (gateway: PaymentGateway, steps: Interposed): PaymentGateway => ({
  capabilities: gateway.capabilities,
  charge: (call, signal) => steps.around([`charge.${call.leg}`], () => gateway.charge(call, signal)),
  void: (call, signal) => steps.around([`void.${call.leg}`], () => gateway.void(call, signal)),
  refund: (call, signal) => steps.around([`refund.${call.leg}`], () => gateway.refund(call, signal)),
  finalize: (call, signal) => steps.around([`finalize.${call.op}`, 'finalize'], () => gateway.finalize(call, signal)),
  lookup: (call, signal) => gateway.lookup(call, signal),
  ...(gateway.transaction && {
    transaction: (transactionId, signal) => steps.around(['transaction'], () => gateway.transaction!(transactionId, signal)),
  }),
  settlements: (cursor, signal) => gateway.settlements(cursor, signal),
  describe: (signal) => gateway.describe(signal),
  close: () => gateway.close(),
});

export const CARDS = {
  approved: '4242424242424242',
  declined: '4000000000000002',
  insufficientFunds: '4000000000009995',
  cvvMismatch: '4000000000000127',
  gatewayError: '4000007770005020',
  unreadable: '4000007770005046',
  cannotTell: '4000007770005145',
  neverReached: '4000007770005244',
  voidRejected: '4000007770004221',
  feeDeclined: '4000007770004023',
  feeVoidFailsOnce: '4000007770004320',
  feeRefundFailsOnce: '4000007770007026',
  settlesAtOnce: '4000007770002001',
  settlementRejected: '4000007770004304',
  slow: '4000007770002050',
} as const;

/** A fee of 50 cents and 2.75 %, which is 3.25 on 100.00: the example of C32. */
export const FEE: FeeConfig = { ...NO_FEE, flatCents: 50, percentBps: 275 };
export const COMBINED: FeeConfig = { ...FEE, chargeMode: 'combined' };

/** The parts that all tests of a file share. */
export interface Ground {
  readonly pool: Pool;
  readonly keys: KeyRing;
  readonly simulator: Simulator;
  readonly bank: SimulatorControl;
  readonly simulatorOptions: Partial<SimulatorOptions>;
  /** Runs when the ground is closed. */
  atEnd(step: () => unknown): void;
  close(): Promise<void>;
}

export const openGround = async (simulatorOptions: Partial<SimulatorOptions> = {}): Promise<Ground> => {
  const database = await freshDatabase();
  const pool = createPool(database.url, { name: 'spec', max: 12, statementTimeoutMs: 5_000, lockTimeoutMs: 5_000 });
  await migrate(pool, [...idempotencyMigrations, velocityMigration, refusalMigration, personalKeyMigration]);
  const directory = await mkdtemp(join(tmpdir(), 'payfold-bank-'));
  const simulator = await startSimulator({ directory, ...simulatorOptions });
  const ends: (() => unknown)[] = [];
  return {
    pool,
    keys: newKeyRing(),
    simulator,
    bank: createSimulatorControl(simulator.url, simulator.controlKey),
    simulatorOptions,
    atEnd: (step) => void ends.push(step),
    close: async () => {
      await Promise.all(ends.map((end) => end()));
      await simulator.close();
      await rm(directory, { recursive: true, force: true });
      await pool.end();
      await database.drop();
    },
  };
};

export interface Asked {
  readonly card?: string;
  readonly token?: string;
  readonly lines?: readonly number[];
  readonly referenceId?: string;
  readonly expiry?: { readonly month: number; readonly year: number };
  readonly zip?: string;
  readonly portalId?: string;
}

export interface Refusal {
  readonly code: string;
  readonly status: number;
  readonly message: string;
  readonly details: Readonly<Record<string, unknown>>;
}

/** Waits for an error of the catalogue. Any other outcome fails the spec. */
export const refused = async (call: Promise<unknown>): Promise<Refusal> => {
  const outcome = await call.then(
    (value) => ({ value }),
    (error: unknown) => error,
  );
  if (outcome instanceof ServiceError) return { code: outcome.code, status: outcome.status, message: outcome.message, details: outcome.details };
  throw outcome instanceof Error ? outcome : new Error(`not refused: ${JSON.stringify(outcome)}`);
};

/** One account with its own portal, and the payment functions on them. */
export interface House {
  readonly clock: MovableClock;
  readonly ids: Ids;
  readonly store: EventStore;
  readonly appends: Interposed;
  readonly calls: Interposed;
  readonly ports: PaymentPorts;
  readonly services: PaymentServices;
  readonly recovery: Recovery;
  /** The recovery of another process. */
  anotherWorker(): Recovery;
  readonly tries: { readonly paymentId: string; readonly tries: number; readonly nextTryAt: string; readonly outcome: Resolution }[];
  readonly administration: Administration;
  readonly accountId: string;
  readonly portalId: string;
  readonly logged: string[];
  /** Applies changes of accounts, portals and cases to the directory. */
  project(): Promise<void>;
  request(asked?: Asked): ChargeRequest;
  /** A received request with a key. Equal `text` means an equal body. */
  received(idempotencyKey: string, text: unknown): Received;
  /** Sets whether the gateway knows the credentials of this portal's accounts (C68). */
  setCredentials(present: boolean): void;
  /** Charges without a key. The caller may choose the id of the payment. */
  charge(asked?: Asked, paymentId?: string): Promise<PaymentView>;
  chargeWithKey(key: string, asked?: Asked): Promise<Answer>;
  refund(paymentId: string, asked?: Partial<ReverseRequest>): Promise<RefundView>;
  void(paymentId: string, asked?: Partial<ReverseRequest>): Promise<VoidView>;
  refundWithKey(key: string, paymentId: string, asked?: Partial<ReverseRequest>): Promise<Answer>;
  voidWithKey(key: string, paymentId: string, asked?: Partial<ReverseRequest>): Promise<Answer>;
  state(paymentId: string): Promise<Payment>;
  view(paymentId: string): Promise<PaymentView>;
  /** Types of the payment's events, in order. */
  history(paymentId: string): Promise<string[]>;
  events(paymentId: string): Promise<Recorded[]>;
  /** The bank's records of this portal, tombstones included. */
  truth(): Promise<Truth[]>;
  /** Money at the bank in cents: charged minus voided minus refunded. */
  balance(): Promise<number>;
  /** Closes the batches at the bank, and records this in the stream of `paymentId`, if given. */
  settle(paymentId?: string): Promise<void>;
  key(): string;
}

let drawn = 0;

export const openHouse = async (ground: Ground, fee: FeeConfig = FEE, startAt?: string, slots: GatewaySlotLimits = GATEWAY_SLOTS): Promise<House> => {
  const clock = new MovableClock(startAt);
  const ids = systemIds(() => clock.now());
  const appends = new Interposed();
  const calls = new Interposed();
  const bare = memoryEventStore({ now: () => clock.now() });
  const store = watchedStore(bare, appends);
  const { partialVoid, refundUnsettled } = ground.simulatorOptions;
  const transport = createTransport({ endpoint: ground.simulator.url, clock, maxConnections: 64 });
  const gatewayOf = (account: GatewayAccount): PaymentGateway =>
    watchedGateway(
      createSimulatorGateway({
        endpoint: ground.simulator.url,
        account,
        clock,
        transport,
        ...(partialVoid !== undefined && { partialVoid }),
        ...(refundUnsettled !== undefined && { refundUnsettled }),
      }),
      calls,
    );
  ground.atEnd(() => {
    transport.close();
    // A request that a spec left unfinished may still sleep on this clock. Moving the clock ends every such sleep.
    clock.advance(365 * 86_400_000);
  });
  let credentials = true;
  const directory = new MemoryDirectory();
  const logged: string[] = [];
  const log = createLogger('debug', 'spec', { write: (line) => logged.push(line) });
  const streams = new PaymentStreams(store, clock, ids, log);
  const ownLog = await ownLogOver(bare, clock);
  const refusals = postgresRefusals(ground.pool, ground.keys, clock, ids, log);
  ground.atEnd(() => refusals.stop());
  const personal = createPersonalKeys(postgresPersonalKeyRows(ground.pool), { keys: ground.keys, ids, clock, log });
  const ports: PaymentPorts = {
    clock,
    ids,
    streams,
    ownLog,
    gateways: { find: (account) => (credentials ? gatewayOf(account) : null) },
    slots: new GatewaySlots(clock, slots),
    directory,
    velocity: postgresVelocity(ground.pool, ground.keys, clock),
    refusals,
    personal,
    log,
  };

  const administration = new Administration({
    store: bare,
    clock,
    ids,
    keys: ground.keys,
    personal,
    environment: 'sandbox',
    cardInTextCheck: true,
    actor: { type: 'operator', id: 'spec' },
  });
  let seen: Position | null = null;
  const project = async () => {
    for await (const events of bare.readAll(seen, { streamPrefixes: ['account-', 'portal-', 'case-', 'merchant-account-'] })) {
      directory.apply(events);
      seen = events.at(-1)!.position;
    }
  };
  const { accountId } = (await administration.createAccount('City')).state;
  const { portalId, gateway: accounts } = (await administration.createPortal({ accountIds: [accountId], name: 'Water', gateway: 'simulator', fee }))
    .state;
  const merchantAccounts = [accounts!.merchantAccount, accounts!.feeMerchantAccount];
  await project();

  // The port of recovery. It reads all payment streams, with the same result as the rows of the list.
  const tries: { paymentId: string; tries: number; nextTryAt: string; outcome: Resolution; until: string | null }[] = [];
  const work: RecoveryWork = {
    due: async ({ begunBefore, begunAfter }) => {
      const found = new Map<string, DueAttempt>();
      for await (const events of bare.readAll(null, { streamPrefixes: ['payment-'] }))
        for (const { stream } of events) {
          const paymentId = stream.slice('payment-'.length);
          const { payment } = await streams.load(paymentId);
          const open =
            payment.phase === 'pending' || payment.phase === 'unknown'
              ? { attemptId: payment.attemptId, since: payment.createdAt }
              : payment.phase === 'charged'
                ? payment.attempts.filter(({ ended }) => !ended).map(({ attemptId, requestedAt }) => ({ attemptId, since: requestedAt }))[0]
                : undefined;
          const last = tries.filter((one) => one.paymentId === paymentId).at(-1);
          if (open && (open.since < begunBefore || open.since > begunAfter) && !(last && Date.parse(last.nextTryAt) > clock.now()))
            found.set(paymentId, { paymentId, ...open, tries: last?.tries ?? 0, until: last?.until ?? null });
        }
      return [...found.values()];
    },
    record: async (tried) => void tries.push(tried),
    hurry: async (nextTryAt) => {
      for (const paymentId of new Set(tries.map((tried) => tried.paymentId))) {
        const last = tries.filter((tried) => tried.paymentId === paymentId).at(-1)!;
        if (last.outcome === 'open' && last.nextTryAt > nextTryAt) tries.push({ ...last, tries: Math.max(0, last.tries - 1), nextTryAt });
      }
    },
  };
  const recovery = createRecovery(ports, store, work);
  const services: PaymentServices = {
    ports,
    idempotency: postgresIdempotency(ground.pool, ground.keys, ids),
    claims: OPEN_CLAIMS,
    answers: answerEncoder,
    // Lists are tested in their own spec.
    list: { rows: postgresListRows(ground.pool), ownLog, keys: ground.keys, directory, personal, head: () => store.head(), caughtUpTo: async () => true }, // prettier-ignore
    recovery,
    log,
  };

  const owner = () => ({ actor: { type: 'partner' as const, id: accountId }, correlationId: ids.uuid() });
  const deadline = () => new Deadline(clock, REQUEST_DEADLINE_MS);
  const request = ({ card, token, lines = [10_000], referenceId, expiry, zip, portalId: asked }: Asked = {}): ChargeRequest => ({
    accountId,
    portalId: asked ?? portalId,
    referenceId: referenceId ?? null,
    amountCents: lines.reduce((sum, amount) => sum + amount, 0),
    lineItems: lines.map((amountCents, index) => ({ amountCents, referenceId: `INV-${index + 1}`, description: null, metadata: null })),
    payer: zip === undefined ? null : { address: { zip } },
    instrument:
      token === undefined
        ? { type: 'card', number: new Secret(card ?? CARDS.approved), expiry: expiry ?? { month: 12, year: 2040 }, cvv: new Secret('987') }
        : { type: 'card_token', token: new Secret(token) },
  });
  const reverseRequest = (operation: 'refund' | 'void', paymentId: string, asked: Partial<ReverseRequest>) => ({
    operation,
    paymentId,
    accountId,
    initiatedBy: 'partner' as const,
    amountCents: null,
    includeFee: operation === 'void',
    reason: null,
    ...asked,
  });
  const received = (idempotencyKey: string, text: unknown): Received => ({
    idempotencyKey,
    fingerprintText: JSON.stringify(text),
    loggedText: JSON.stringify(text),
    requestId: ids.uuid(),
  });
  const reverseWithKey = (operation: 'refund' | 'void', key: string, paymentId: string, asked: Partial<ReverseRequest>) => {
    const wanted = { ...reverseRequest(operation, paymentId, asked), accountId };
    return sent(reverseOnce(services, wanted, received(key, wanted)));
  };
  const truth = async () => (await ground.bank.truth()).filter(({ merchantAccount }) => merchantAccounts.includes(merchantAccount));
  const events = (paymentId: string) => streams.events(paymentId);
  const state = async (paymentId: string) => (await streams.load(paymentId)).payment;

  return {
    clock,
    ids,
    store,
    appends,
    calls,
    ports,
    services,
    recovery,
    anotherWorker: () => createRecovery(ports, store, work),
    tries,
    administration,
    accountId,
    portalId,
    logged,
    project,
    request,
    received,
    setCredentials: (present) => {
      credentials = present;
    },
    charge: async (asked, paymentId = ids.uuid()) =>
      (await charge(ports, request(asked), { paymentId, attemptId: ids.uuid(), idempotency: null }, owner(), deadline())).view,
    chargeWithKey: (key, asked = {}) => sent(chargeOnce(services, request(asked), received(key, asked))),
    refund: async (paymentId, asked = {}) =>
      (await reverse(ports, reverseRequest('refund', paymentId, asked), null, owner(), deadline())).view as RefundView,
    void: async (paymentId, asked = {}) =>
      (await reverse(ports, reverseRequest('void', paymentId, asked), null, owner(), deadline())).view as VoidView,
    refundWithKey: (key, paymentId, asked = {}) => reverseWithKey('refund', key, paymentId, asked),
    voidWithKey: (key, paymentId, asked = {}) => reverseWithKey('void', key, paymentId, asked),
    state,
    view: async (paymentId) => {
      const payment = await state(paymentId);
      if (!isVisible(payment)) throw new Error(`no payment: ${payment.phase}`);
      return paymentView(paymentId, payment, await openPayment(ports, payment));
    },
    history: async (paymentId) => (await events(paymentId)).map(({ type }) => type),
    events,
    truth,
    balance: async () =>
      (await truth()).reduce(
        (sum, { op, result, amountCents = 0, voidedCents = 0, refundedCents = 0 }) =>
          op === 'charge' && result === 'approved' ? sum + amountCents - voidedCents - refundedCents : sum,
        0,
      ),
    settle: async (paymentId) => {
      await ground.bank.closeBatches();
      if (paymentId === undefined) return;
      const loaded = await streams.load(paymentId);
      if (loaded.payment.phase !== 'charged') throw new Error('not charged');
      const at = new Date(clock.now()).toISOString();
      const settlement = (leg: Leg) =>
        ({ type: 'RecordSettlement', at, leg, batchId: 'bat', closedAt: at, accepted: true, grossCents: 1, feeCents: 0 }) as const;
      await streams.execute(loaded, loaded.payment.legs.map(({ leg }) => settlement(leg)), { actor: { type: 'system', id: 'settlement' }, correlationId: ids.uuid() }, deadline()); // prettier-ignore
    },
    key: () => `key-${++drawn}`,
  };
};

/** All references in a payment's events. A spec can ask the bank for each (C61). */
export const referencesIn = (events: readonly Recorded[]): string[] => [
  ...new Set(JSON.stringify(events.map(({ data }) => data)).match(/(?<="(?:charge|reversal|void|refund)":")[0-9A-Z]{20}(?=")/g) ?? []),
];

export { paymentStream };

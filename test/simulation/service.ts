/**
 * The service under simulation: the product's own handlers, recovery, keys, sweeper, purge and list projection, over simulated ports. It is assembled
 * as in `apps/services.ts` and `apps/worker`. Two replicas share the stores. After a crash, a replica starts with new memory.
 */
import { type FeeConfig, MemoryDirectory, type PortalEvent } from '#accounts';
import { applyUnfinished, type CheckoutPorts, CheckoutSessions, checkoutUnfinishedModel, finishSessions, type IntakeRows } from '#checkout';
import {
  checkpointOf,
  createSubscriber,
  type EventStore,
  type LogGate,
  type MarkBook,
  memoryEventStore,
  OwnLog,
  type Position,
  type Projection,
  type Subscriber,
  watchProjection,
} from '#eventstore';
import { type Clock, type Ids, type Json, ServiceError } from '#kernel';
import {
  applyPaymentList,
  chargeOnce,
  type ChargeRequest,
  type Claims,
  type ClaimsDatabase,
  ClaimsGate,
  compareKeys,
  createRecovery,
  type DisputeStatus,
  findPayment,
  type GatewaySlotLimits,
  GatewaySlots,
  type GatewayAccount,
  type IdempotencyStore,
  keysFromLog,
  KEYS_FROM_LOG,
  listPayments,
  type ListRequest,
  type PaymentGateway,
  paymentListModel,
  type PaymentPorts,
  type PaymentServices,
  PaymentStreams,
  purgeKeys,
  type Received,
  type RecoveryWork,
  type ResolveRequest,
  resolvePayment,
  reverseByStaff,
  reverseOnce,
  type RecordedKey,
  type ReverseRequest,
  staff,
  type StaffReverseRequest,
  sweepKeys,
} from '#payments';
import { type DisputeTerms, openDispute, recordSettlements, type SettlementPorts, updateDispute } from '#settlement';
import {
  type Answer,
  boxInText,
  createPersonalKeys,
  type DatabasePlace,
  errorAnswer,
  internalErrorAnswer,
  KeyRing,
  type Logger,
  OpenedKeys,
  PersonalKey,
  type PersonalKeyRows,
  type PersonalKeys,
  successAnswer,
} from '#platform';
import { answerEncoder, answerOf } from '../../apps/answers.js';
import { OPEN_CLAIMS } from '../support/payments.js';
import { playRound } from '../../apps/worker/worker.js';
import { applyOutbox, type Deliveries, WEBHOOK_OUTBOX, webhookOutbox } from '#webhooks';
import { INSTALLATION, Marks, writeInstallation } from '../support/mark-book.js';
import type { KeyLoss } from './key-loss.js';
import { LossWatch } from './loss.js';
import { Bank, bankGateway, type GatewayName, simulatedWire } from './bank.js';
import { type PayerAsk, servePayer } from './checkout.js';
import { simulatedOutboxRows, simulatedStaffTables } from './deliveries.js';
import { type Process, Rng, type Simulator } from './simulator.js';
import {
  comparedStatement,
  type DirectoryChanges,
  KeyTable,
  memoryIdempotency,
  simulatedClaims,
  simulatedDirectory,
  simulatedKeyRows,
  simulatedLog,
  simulatedMarkBook,
  simulatedRecoveryWork,
  simulatedRegister,
  simulatedStatement,
  type Statement,
  VelocityCounts,
  FeedNotes,
} from './stores.js';
import {
  Database,
  type Run,
  simulatedCheckpoint,
  simulatedIntakeRows,
  simulatedListRows,
  simulatedPersonalKeyRows,
  simulatedUnfinishedRows,
  Tables,
} from './tables.js';
import { type Receiver, serveWebhooks, type SimulatedSender, startDispatcher, type WebhookAsk, type WebhookPorts } from './webhooks.js';

/** The places where a canary plants its bug. Each wraps a port of every replica, or changes state that the replicas share. */
export interface Seams {
  log?(log: EventStore, world: World): EventStore;
  /** The guard of the log. `book` wraps the store of marks, and `gate` wraps the guard's answers. */
  book?(book: MarkBook, world: World): MarkBook;
  gate?(gate: LogGate, world: World): LogGate;
  /** Replaces the ports of recovery. `bare`: the log without its guard. */
  recovery?(ports: PaymentPorts, bare: EventStore, world: World): PaymentPorts;
  recoveryWork?(work: RecoveryWork, world: World): RecoveryWork;
  keys?(keys: IdempotencyStore, world: World): IdempotencyStore;
  gateway?(gateway: PaymentGateway, world: World): PaymentGateway;
  streams?(streams: PaymentStreams, world: World): PaymentStreams;
  ids?(ids: Ids, world: World): Ids;
  /** The gate before claims: `claims` wraps its answers, and `claimsDatabase` wraps the database that it asks. */
  claims?(claims: Claims, world: World): Claims;
  claimsDatabase?(database: ClaimsDatabase, world: World): ClaimsDatabase;
  /** Wraps each read of the place of the keys' database, also those over new connections. */
  place?(place: ClaimsDatabase['place']): ClaimsDatabase['place'];
  intakes?(rows: IntakeRows, world: World): IntakeRows;
  personal?(rows: PersonalKeyRows, world: World): PersonalKeyRows;
  deliveries?(deliveries: Deliveries, world: World): Deliveries;
  sender?(sender: SimulatedSender, world: World): SimulatedSender;
  world?(world: World): void;
}

/** The text of a column that may hold a box. */
export const clearText = (opened: OpenedKeys, text: string, context: string): string => {
  const box = boxInText(text);
  return box ? opened.key(box.key)!.openText(box, context) : text;
};

/** Few, so that runs write many blocks while stores fail. */
const KEYS_IN_BLOCK = 4;

export const RING = new KeyRing('k1', new Map([['k1', Buffer.alloc(32, 7)]]));

export interface PortalTerms {
  readonly portalId: string;
  readonly gateway: GatewayName;
  readonly fee: FeeConfig;
}

const fee = (chargeMode: FeeConfig['chargeMode'], flatCents: number, percentBps: number): FeeConfig => ({
  flatCents,
  percentBps,
  minCents: 0,
  maxCents: null,
  chargeMode,
});

/** The portals of most seeds end here. The others charge at banks that tell late, or have no voids. */
export const USUAL_PORTALS = 6;

/** Both charge modes, with and without a fee, over each kind of gateway. */
export const PORTALS: readonly PortalTerms[] = (
  [
    ['bank-lowering', fee('separate', 50, 275)],
    ['bank-plain', fee('separate', 50, 275)],
    ['bank-refunding', fee('separate', 0, 300)],
    ['bank-lowering', fee('combined', 50, 275)],
    ['bank-refunding', fee('combined', 30, 250)],
    ['bank-lowering', fee('separate', 0, 0)],
    ['bank-after-batch', fee('separate', 50, 275)],
    ['bank-after-batch', fee('combined', 50, 275)],
    ['bank-refund-only', fee('combined', 30, 250)],
  ] as const
).map(([gateway, terms], index) => ({ portalId: `00000000-0000-7000-8000-0000000001${String(index).padStart(2, '0')}`, gateway, fee: terms }));

export const ACCOUNTS = ['00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000002'] as const;

export const merchantAccounts = ({ portalId }: PortalTerms) => [`m-${portalId.slice(-2)}`, `f-${portalId.slice(-2)}`] as const;

/** The site from which payers come. Every portal allows it. */
export const AGENCY = 'https://agency.example';
const CHECKOUT_TERMS = { enabled: true, allow: [AGENCY], requireSignedIntake: false, agencyName: null };

/** The same for every seed, so it is made only once. */
export const DIRECTORY = ((): MemoryDirectory => {
  const directory = new MemoryDirectory();
  let position = 0;
  const feed = (stream: string, facts: readonly { readonly type: string; readonly data: object }[]) =>
    directory.apply(
      facts.map(({ type, data }, revision) => ({
        id: `00000000-0000-7000-8000-${String(++position).padStart(12, '0')}`,
        type,
        v: 1,
        data: data as Json,
        meta: { recordedAt: '2026-01-01T00:00:00.000Z', actor: { type: 'operator', id: 'simulation' }, correlationId: 'set-up' },
        stream,
        revision: BigInt(revision),
        position: String(position).padStart(20, '0') as never,
        storedAt: new Date(0),
      })),
    );
  for (const accountId of ACCOUNTS) feed(`account-${accountId}`, [{ type: 'AccountCreated', data: { accountId, name: 'City' } }]);
  for (const portal of PORTALS) {
    const { portalId } = portal;
    const [merchantAccount, feeMerchantAccount] = merchantAccounts(portal);
    const gateway = { gateway: portal.gateway, merchantAccount, feeMerchantAccount, credentialsRef: 'simulated', environment: 'sandbox' } as const;
    const created: PortalEvent = {
      type: 'PortalCreated',
      data: {
        portalId,
        name: 'Water',
        ownerAccountId: ACCOUNTS[0],
        gateway,
        feeVersion: 1,
        fee: portal.fee,
        // Sealed in the same way as by `Administration`.
        signingSecret: RING.seal('psec_simulated', `portal-${portalId}/signingSecret`),
      },
    };
    const checkout = { type: 'PortalCheckoutConfigured', data: { portalId, checkout: CHECKOUT_TERMS } };
    feed(`portal-${portalId}`, [created, checkout, ...ACCOUNTS.map((accountId) => ({ type: 'PortalAccessGranted', data: { portalId, accountId } }))]);
  }
  return directory;
})();

/** A request of a client or of staff to a replica. */
export type Ask =
  | { readonly kind: 'create'; readonly request: ChargeRequest; readonly key: string | null; readonly fingerprint: string }
  | {
      readonly kind: 'reverse';
      readonly request: ReverseRequest & { readonly accountId: string };
      readonly key: string | null;
      readonly fingerprint: string;
    }
  | { readonly kind: 'staff'; readonly request: StaffReverseRequest; readonly key: string | null }
  | { readonly kind: 'resolve'; readonly request: ResolveRequest }
  | { readonly kind: 'open dispute'; readonly paymentId: string; readonly dispute: DisputeTerms }
  | { readonly kind: 'update dispute'; readonly disputeId: string; readonly status: DisputeStatus }
  | { readonly kind: 'get'; readonly accountId: string; readonly paymentId: string }
  | ({ readonly kind: 'list' } & ListRequest)
  | PayerAsk
  | WebhookAsk;

export interface Reply extends Answer {
  /** Only for a list: true if its read model had caught up with the log. */
  readonly complete?: boolean;
}

const receivedOf = ({ key, fingerprint }: { readonly key: string | null; readonly fingerprint: string }, requestId: string): Received => ({
  idempotencyKey: key,
  fingerprintText: fingerprint,
  loggedText: `${fingerprint} as logged`,
  requestId,
});

/** The pauses between two rounds of a worker's loop. The product's 5 s would make most of the simulation polling. */
const LOOPS_EVERY_MS = { busy: [15_000, 25_000], quiet: [50_000, 70_000] } as const;
const PURGE_EVERY_MS = 600_000;
/** The pause between two checks of the log. The product's 1 s would make most of the simulation checks. Gateway calls make their own checks. */
export const CHECK_EVERY_MS = 30_000;
/** How often a process compares the keys' database, while claims are open and while they are closed. New connections are compared in any case. */
const CLAIMS_EVERY_MS = { open: 20_000, closed: 5_000 } as const;
const PROJECTION_LEASE_MS = 120_000;
/** One slot, so that requests wait for one and are refused. */
const FEW = { slots: 1, waitingAlone: 1, waitingShared: 2, refusal: 'too many', retryAfterSeconds: 5 } as const;
export const SLOTS: GatewaySlotLimits = { partners: FEW, house: FEW };

/** Everything that outlives a process: the stores, the bank, the replicas. */
export class World {
  readonly log: EventStore;
  /** Checks the gateway calls while the log is exchanged. null: this run does not exchange its log. */
  readonly watch: LossWatch | null;
  readonly bank: Bank;
  readonly keys: KeyTable;
  /** The checkpoint of the subscriber `keys`. It is in the keys' database. */
  readonly keyTables: Tables;
  readonly tables: Tables;
  readonly marks: Marks;
  readonly velocity = new VelocityCounts();
  readonly feeds = new FeedNotes();
  readonly directoryChanges: DirectoryChanges = { revoked: new Set() };
  readonly replicas: readonly Replica[];
  /** The rules that were broken. */
  readonly violations: string[] = [];
  private readonly unwrapped = new Map<string, PersonalKey>();
  private readonly chance: Rng;
  /** Makes keys. Equal runs make equal keys. */
  readonly randomBytes = (count: number): Buffer => Buffer.from(Array.from({ length: count }, () => this.chance.int(0, 255)));
  checks = 0;
  /** Set when the keys' database has gone back. */
  keyLoss: KeyLoss | null = null;
  /** When the log first named a key, and for which request, by {@link loggedKeyName}. Only these keys can be made from the log. */
  readonly loggedKeys = new Map<string, { readonly at: number; readonly requestId: string }>();
  /** References of which the gateway has just told recovery that it shows no trace. */
  readonly unseen = new Set<string>();
  /** References that recovery has sent again (C72). */
  readonly repeated = new Set<string>();
  hasCheckout = false;
  hasWebhooks = false;
  /** Partners' servers, by URL. */
  readonly receivers = new Map<string, Receiver>();

  /** The largest difference between the clocks of two replicas in this run. */
  get clocksDifferMs(): number {
    const skews = this.processes.map(({ skewMs }) => skewMs);
    return Math.max(...skews) - Math.min(...skews);
  }

  constructor(
    readonly sim: Simulator,
    private readonly processes: readonly Process[],
    readonly seams: Seams = {},
    /** True if this run exchanges its log. */
    isExchanged = false,
    /** True if the keys' database will go back in this run. In any other run, comparing it with the log would only cost time. */
    readonly losesKeys = false,
    /** The portals of this run. No other has ever charged. */
    readonly portals: readonly PortalTerms[] = PORTALS,
  ) {
    this.chance = new Rng(sim.seed ^ 0x51ed270b);
    const log = losesKeys ? this.notingKeys(memoryEventStore({ now: () => sim.now })) : memoryEventStore({ now: () => sim.now });
    this.watch = isExchanged ? new LossWatch(this, log) : null;
    this.log = this.watch?.log ?? log;
    this.bank = new Bank(() => sim.now);
    this.keys = new KeyTable(() => sim.now);
    this.keyTables = new Tables(sim);
    this.tables = new Tables(sim);
    this.marks = new Marks({ now: () => sim.now }, () =>
      [...this.tables.checkpoints].map(([name, { position, event }]) => ({ name, position: position as Position, event })),
    );
    void writeInstallation(this.log, { now: () => sim.now });
    seams.world?.(this);
    this.replicas = processes.map((process) => new Replica(this, process));
  }

  /** The keys of personal data that the tables hold now. */
  get opened(): OpenedKeys {
    for (const [keyId, key] of this.tables.personalKeys) if (!this.unwrapped.has(keyId)) this.unwrapped.set(keyId, PersonalKey.unwrap(RING, key));
    return new OpenedKeys(this.unwrapped);
  }

  /** Called when a run has payers. From then on every replica also does the work for checkout sessions. */
  openCheckout(): void {
    if (this.hasCheckout) return;
    this.hasCheckout = true;
    for (const replica of this.replicas) if (replica.process.up) replica.startCheckout();
  }

  /** Called when a receiver is registered. From then on every replica has an outbox and a dispatcher. */
  openWebhooks(): void {
    if (this.hasWebhooks) return;
    this.hasWebhooks = true;
    for (const replica of this.replicas) if (replica.process.up) replica.startWebhooks();
  }

  /** Makes a copy of the keys' database. The returned function puts the copy in place of the database (`KeyTable.copied`). */
  copiedKeys(): ReturnType<KeyTable['copied']> {
    const { keys, keyTables, replicas } = this;
    const goBack = keys.copied();
    const checkpoint = keyTables.checkpoints.get(KEYS_FROM_LOG);
    const copy = checkpoint && { ...checkpoint };
    return (how) => {
      for (const replica of replicas) replica.breakKeyConnections();
      goBack(how);
      if (copy) keyTables.checkpoints.set(KEYS_FROM_LOG, copy);
      else keyTables.checkpoints.delete(KEYS_FROM_LOG);
    };
  }

  private notingKeys(log: EventStore): EventStore {
    return {
      ...log,
      append: async (stream, expected, events, options) => {
        const appended = await log.append(stream, expected, events, options);
        for (const { data, meta } of events) {
          const { idempotency: key } = data as { readonly idempotency?: RecordedKey | null };
          const name = key && loggedKeyName(key.keySpace, key.keyHash);
          if (name && !this.loggedKeys.has(name)) this.loggedKeys.set(name, { at: this.sim.now, requestId: meta.correlationId });
        }
        return appended;
      },
    };
  }

  check(holds: boolean, rule: string): void {
    this.checks += 1;
    if (holds) return;
    this.violations.push(rule);
    this.sim.note('ORACLE', `VIOLATION ${rule}`);
  }
}

/** The name of a key of the log. Keys of staff have one space of their own. */
export const loggedKeyName = (keySpace: string | null, keyHash: string): string =>
  `${(ACCOUNTS as readonly (string | null)[]).includes(keySpace) ? keySpace : 'staff'} ${keyHash}`;

export class Replica {
  ownLog!: OwnLog;
  /** The check of the log at the start of a process. Requests wait for it. */
  private begun!: Promise<void>;
  private services!: PaymentServices;
  private recoveryPorts!: PaymentPorts;
  private settlement!: SettlementPorts;
  private checkout!: CheckoutPorts;
  private intakes!: IntakeRows;
  private database!: Database;
  private clock!: Clock;
  private ids!: Ids;
  private subscriber!: Subscriber;
  private keyDatabase: Database | null = null;
  /** The place of the keys' database as the process's file holds it. It outlives the process. */
  private keptPlace: DatabasePlace | null = null;
  /** Connections of clients: a crash resets them. */
  readonly connections = new Set<() => void>();

  constructor(
    private readonly world: World,
    readonly process: Process,
  ) {
    process.onStart = () => this.start();
    process.onCrash = () => {
      this.database.breakConnections();
      this.breakKeyConnections();
      for (const reset of this.connections) reset();
      this.connections.clear();
    };
  }

  private start(): void {
    const { world, process } = this;
    const { sim, seams } = world;
    const clock = sim.clock(process);
    const drawn = sim.ids(process);
    const ids = seams.ids?.(drawn, world) ?? drawn;
    const logged = logger(sim, process);
    const bare = simulatedLog(sim, process, world.log, (time) => world.watch?.inUseAt(time) ?? world.log);
    const store = seams.log?.(bare, world) ?? bare;
    const book = simulatedMarkBook(world.marks, process, simulatedStatement(sim, process, 'tables'));
    const ownLog = new OwnLog({
      store,
      book: seams.book?.(book, world) ?? book,
      installationId: INSTALLATION,
      clock,
      log: logged,
      appendsProve: false,
      checkEveryMs: CHECK_EVERY_MS,
    });
    this.begun = ownLog.begin().catch(() => undefined);
    void ownLog.run(new AbortController().signal);
    const log: EventStore = ownLog;
    const planted = seams.gate?.(ownLog, world) ?? ownLog;
    const gate = world.watch?.gate(process, planted) ?? planted;
    const plain = new PaymentStreams(log, clock, ids);
    const streams = seams.streams?.(plain, world) ?? plain;
    const gateways = (role: string) => {
      const made = new Map<string, PaymentGateway>();
      const make = (account: GatewayAccount): PaymentGateway => {
        const bare = bankGateway(world.bank, account, simulatedWire(sim, process, role), () => clock.now());
        const gateway = role === '' ? bare : asRecoveryMayUseIt(bare, world);
        const faulty = seams.gateway?.(gateway, world) ?? gateway;
        return world.watch?.gateway(process, faulty) ?? faulty;
      };
      const find = (account: GatewayAccount): PaymentGateway => {
        const name = `${account.gateway} ${account.merchantAccount}`;
        const gateway = made.get(name) ?? make(account);
        made.set(name, gateway);
        return gateway;
      };
      return { find };
    };
    const statement = simulatedStatement(sim, process, 'tables');
    const database = new Database(sim, process, world.tables);
    const bareRows = simulatedPersonalKeyRows(world.tables, database.run);
    const personal = createPersonalKeys(seams.personal?.(bareRows, world) ?? bareRows, {
      keys: RING,
      ids,
      clock,
      log: logged,
      block: KEYS_IN_BLOCK,
      random: world.randomBytes,
      onMissing: () => world.violations.push('a key of personal data is missing'),
    });
    const ports: PaymentPorts = {
      clock,
      ids,
      streams,
      ownLog: gate,
      gateways: gateways(''),
      slots: new GatewaySlots(clock, SLOTS),
      directory: simulatedDirectory(DIRECTORY, simulatedStatement(sim, process, 'directory'), world.directoryChanges),
      velocity: world.velocity.port(statement),
      // Rows of refused attempts are written behind the answer, and nothing reads them to decide.
      refusals: { note: () => undefined },
      personal,
      log: logged,
    };
    const compared = world.losesKeys ? this.compareKeys(log, personal, clock, ownLog, logged) : null;
    const bareKeys = memoryIdempotency(world.keys, RING, ids, compared?.statement ?? simulatedStatement(sim, process, 'keys'));
    const keys = seams.keys?.(bareKeys, world) ?? bareKeys;
    const guarded = { ...ports, gateways: gateways('recovery ') };
    this.recoveryPorts = seams.recovery?.(guarded, store, world) ?? guarded;
    const bareWork = simulatedRecoveryWork(world.tables, statement);
    const recovery = createRecovery(this.recoveryPorts, log, seams.recoveryWork?.(bareWork, world) ?? bareWork);
    const list: Projection<Run> = {
      ...paymentListModel,
      apply: (run, events, log) => applyPaymentList(simulatedListRows(world.tables, run), events, log),
    };
    const checkpoint = simulatedCheckpoint(database, checkpointOf(paymentListModel));
    const subscriber = createSubscriber(list, { store: log, checkpoint, clock, ownLog, leaseMs: PROJECTION_LEASE_MS });
    const watch = watchProjection(checkpoint, clock);
    this.services = {
      ports,
      idempotency: keys,
      claims: compared?.claims ?? OPEN_CLAIMS,
      answers: answerEncoder,
      list: {
        rows: simulatedListRows(world.tables, database.run),
        ownLog: gate,
        keys: RING,
        directory: ports.directory,
        personal,
        head: () => log.head(),
        caughtUpTo: (position, timeoutMs) => (subscriber.state === 'active' ? subscriber : watch).caughtUpTo(position, timeoutMs),
      },
      recovery,
      log: logged,
    };
    this.settlement = { payments: ports, store: log, register: simulatedRegister(log, gate), feeds: world.feeds.port(statement) };
    const bareIntakes = simulatedIntakeRows(world.tables, database.run);
    this.intakes = seams.intakes?.(bareIntakes, world) ?? bareIntakes;
    const sessions = new CheckoutSessions({ store: log, ownLog: gate, rows: this.intakes, personal, clock, ids, log: logged });
    this.checkout = { payments: ports, sessions, directory: ports.directory };
    [this.clock, this.ids, this.subscriber, this.database, this.ownLog] = [clock, ids, subscriber, database, ownLog];
    this.startWorker();
    if (world.hasCheckout) this.startCheckout();
    if (world.hasWebhooks) this.startWebhooks();
  }

  /** Starts the subscriber that makes keys from the log, and the gate before claims. */
  private compareKeys(
    log: EventStore,
    personal: PersonalKeys,
    clock: Clock,
    ownLog: OwnLog,
    logged: Logger,
  ): { readonly statement: Statement; readonly claims: Claims } {
    const { world, process } = this;
    const { sim, seams } = world;
    const database = (this.keyDatabase = new Database(sim, process, world.keyTables));
    const placeOf = (place: ClaimsDatabase['place']) => seams.place?.(place) ?? place;
    const statement = comparedStatement(world.keys, simulatedStatement(sim, process, 'keys'), (place) => gate.verify(placeOf(place)));
    const checkpoint = simulatedCheckpoint(database, KEYS_FROM_LOG);
    const rows = simulatedKeyRows(world.keys, statement);
    const ports = { store: log, answers: answerEncoder, personal, clock, log: logged };
    const projection: Projection<Run> = {
      ...keysFromLog(ports),
      apply: async (_run, events) => {
        await compareKeys(ports, rows, events);
      },
    };
    const keys = createSubscriber(projection, { store: log, checkpoint, clock, ownLog, leaseMs: PROJECTION_LEASE_MS });
    const claimsDatabase = simulatedClaims(world.keys, statement, () => checkpoint.position());
    const asked = seams.claimsDatabase?.(claimsDatabase, world) ?? claimsDatabase;
    const gate = new ClaimsGate({
      database: { ...asked, place: placeOf(() => asked.place()) },
      kept: { read: () => this.keptPlace, write: async (place) => void (this.keptPlace = place) },
      store: log,
      keys,
      ownLog,
      clock,
      log: logged,
      lookEveryMs: CLAIMS_EVERY_MS,
    });
    keys.start();
    void gate.begun();
    return { statement, claims: seams.claims?.(gate, world) ?? gate };
  }

  breakKeyConnections(): void {
    this.keyDatabase?.breakConnections();
  }

  get claimsAreOpen(): boolean {
    return this.services.claims.isOpen;
  }

  private get webhooks(): WebhookPorts {
    return { tables: simulatedStaffTables(this.database), store: this.settlement.store, clock: this.clock, ids: this.ids, keys: RING };
  }

  startWebhooks(): void {
    const { world, webhooks, database, clock } = this;
    const { store } = webhooks;
    const { personal } = this.services.ports;
    const outbox: Projection<Run> = {
      ...webhookOutbox(store, personal),
      apply: (run, events) => applyOutbox(simulatedOutboxRows(world.tables, run), { store, personal }, events),
    };
    const checkpoint = simulatedCheckpoint(database, WEBHOOK_OUTBOX);
    createSubscriber(outbox, { store, checkpoint, clock, ownLog: this.ownLog, leaseMs: PROJECTION_LEASE_MS }).start();
    startDispatcher(world, database, webhooks, { store, personal }, this.ownLog, this.services.log);
  }

  /** Starts the projection of unfinished sessions, the loop that finishes them, and the purge of contents. */
  startCheckout(): void {
    const { checkout, database, clock } = this;
    const { store } = this.settlement;
    const { tables } = this.world;
    const unfinished: Projection<Run> = {
      ...checkoutUnfinishedModel,
      apply: (run, events) => applyUnfinished(simulatedUnfinishedRows(tables, run), events),
    };
    const checkpoint = simulatedCheckpoint(database, checkpointOf(checkoutUnfinishedModel));
    createSubscriber(unfinished, { store, checkpoint, clock, ownLog: this.ownLog, leaseMs: PROJECTION_LEASE_MS }).start();
    void this.loop('checkout finisher', () => finishSessions(checkout, simulatedUnfinishedRows(tables, database.run)));
    void this.loop(
      'intake purge',
      () => checkout.sessions.purge(clock.now()),
      () => PURGE_EVERY_MS,
    );
  }

  /** Starts the loops of `apps/worker`, with other intervals. */
  private startWorker(): void {
    const { services: payments } = this;
    this.subscriber.start();
    void this.loop('recovery', () => payments.recovery.round(), undefined, this.recoveryPorts.ownLog);
    void this.loop('key sweeper', () => sweepKeys(payments));
    // This signal never aborts: a simulated process is only killed, never stopped.
    const never = new AbortController();
    void this.loop(
      'settlement',
      () => recordSettlements(this.settlement, never.signal),
      () => 3 * this.pace(),
    );
    void this.loop(
      'key purge',
      () => purgeKeys(payments),
      () => PURGE_EVERY_MS,
    );
  }

  private pace(): number {
    const { sim } = this.world;
    return sim.faultsOn ? sim.rng.int(...LOOPS_EVERY_MS.busy) : sim.rng.int(...LOOPS_EVERY_MS.quiet);
  }

  private async loop(
    name: string,
    run: () => Promise<unknown>,
    every: () => number = () => this.pace(),
    ownLog: Pick<LogGate, 'incident'> = this.ownLog,
  ): Promise<void> {
    const { clock, services } = this;
    for (;;) {
      await clock.sleep(every());
      await playRound({ name, run }, ownLog, services.log);
    }
  }

  get projection(): Subscriber {
    return this.subscriber;
  }

  /** The work of the HTTP layer after it has validated a request. */
  async serve(ask: Ask, requestId: string): Promise<Reply> {
    try {
      return await this.answer(ask, requestId);
    } catch (error) {
      if (error instanceof ServiceError) return errorAnswer(error);
      this.services.log.error({ err: error }, 'a request failed inside');
      return internalErrorAnswer();
    }
  }

  private async answer(ask: Ask, requestId: string): Promise<Reply> {
    await this.begun;
    const { services } = this;
    switch (ask.kind) {
      case 'create':
        return answerOf(await chargeOnce(services, ask.request, receivedOf(ask, requestId)));
      case 'reverse':
        return answerOf(await reverseOnce(services, ask.request, receivedOf(ask, requestId)));
      case 'staff':
        return answerOf(await reverseByStaff(services, ask.request, ask.key));
      case 'resolve':
        return successAnswer(await resolvePayment(services.ports, this.settlement.register, ask.request));
      case 'open dispute':
        return successAnswer(await openDispute(services.ports, ask.paymentId, ask.dispute, staff('staff', requestId)));
      case 'update dispute': {
        const change = { status: ask.status, stage: null };
        return successAnswer(await updateDispute(services.ports, this.settlement.register, ask.disputeId, change, staff('staff', requestId)));
      }
      case 'get':
        return successAnswer(await findPayment(services, ask.accountId, ask.paymentId));
      case 'list': {
        const { page, ledger } = await listPayments(services.list, ask);
        return { ...successAnswer(page), complete: ledger.lag === '0' };
      }
      case 'add endpoint':
      case 'endpoints':
      case 'change endpoint':
      case 'stage secret':
      case 'activate secret':
      case 'redeliver held':
        return successAnswer(await serveWebhooks(this.webhooks, ask));
      default:
        return successAnswer(await servePayer(this.checkout, RING, ask, requestId));
    }
  }
}

/** A gateway for recovery. Checks that recovery sends no charge, void or refund, except the reversal of an unknown charge (C61). */
const asRecoveryMayUseIt = (gateway: PaymentGateway, world: World): PaymentGateway => ({
  ...gateway,
  charge: (call, signal) => {
    world.check(false, 'C61: recovery charges a card');
    return gateway.charge(call, signal);
  },
  void: (call, signal) => {
    if (call.askedBy !== 'reversal') checkRepeat(gateway, world, 'void', call);
    return gateway.void(call, signal);
  },
  refund: (call, signal) => {
    checkRepeat(gateway, world, 'refund', call);
    return gateway.refund(call, signal);
  },
  finalize: async (call, signal) => {
    const found = await gateway.finalize(call, signal);
    if (found.kind === 'cannot_tell' && found.why === 'not_visible') world.unseen.add(call.ref);
    else world.unseen.delete(call.ref);
    return found;
  },
});

/**
 * C72: recovery may send a void or refund again only under a reference of which the gateway has just shown no trace, and only while the gateway
 * takes it once. A gateway without voids refuses them without a call. The oracle checks which leg it was.
 */
const checkRepeat = (
  { capabilities: { repeatSafeMs, voids } }: PaymentGateway,
  world: World,
  means: 'void' | 'refund',
  { ref, begunAt }: { readonly ref: string; readonly begunAt: string },
): void => {
  if (means === 'void' && voids === 'none') return;
  world.check(world.unseen.has(ref), `C61: recovery starts a ${means} that nobody sent`);
  world.check(world.sim.now - Date.parse(begunAt) <= repeatSafeMs[means] + CLOCKS_DIFFER_MS, `C72: recovery repeats a ${means} that is too old`);
  world.repeated.add(ref);
};
const CLOCKS_DIFFER_MS = 240_000;

/** Warnings become lines of the story. */
export const logger = (sim: Simulator, process: Process): Logger => {
  const write = (fields: { err?: unknown } & object, message: string) => {
    const { err, ...rest } = fields;
    const reason = err instanceof Error ? ` (${err.name}: ${err.message})` : '';
    sim.note(process.id, `log: ${message}${reason} ${JSON.stringify(rest)}`);
  };
  const silent = () => undefined;
  const logger = { debug: silent, info: silent, trace: silent, warn: write, error: write, fatal: write, child: () => logger } as unknown as Logger;
  return logger;
};

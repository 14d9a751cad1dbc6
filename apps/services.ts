/** Puts the modules of a process together, and collects the parts that HTTP, the command line and the loops use. */
import { NestFactory } from '@nestjs/core';
import { CommandBus, CqrsModule, QueryBus } from '@nestjs/cqrs';
import { Module } from '@nestjs/common';
import { apiKeyUseMigration, type AuthenticationDeps, chargeStopMigration, directoryModel, type Directory } from '#accounts';
import { AccountsModule, AUTHENTICATION, DIRECTORY } from '#accounts/module';
import {
  auditKeyModel,
  driftAgainMigration,
  driftFollowMigration,
  driftMigration,
  driftPassMigration,
  logSealMigration,
  paymentFindModel,
  type ProvePorts,
  sealedEnd,
  signedEnd,
  verifyPassMigration,
} from '#audit';
import { AuditModule, SEAL, SEALER } from '#audit/module';
import { checkoutIntakeMigration, type CheckoutPorts, checkoutUnfinishedModel } from '#checkout';
import { CHECKOUT_PORTS, CheckoutModule } from '#checkout/module';
import {
  dropReadModelsOf010,
  type EventStore,
  eventStoreMigrations,
  type OwnLog,
  type ReadModel,
  ReadModels,
  searchPathOf,
  type Subscriber,
  withAddress,
} from '#eventstore';
import { Appends, type CountedPersonalKeys, EVENT_STORE, EventStoreModule, LOG_GATE, PERSONAL_KEYS, POOL } from '#eventstore/module';
import { GatewaysModule } from '#gateways/module';
import { type Clock, type Ids, orStopped, within } from '#kernel';
import { journalModel, lineRegisterModel, type PeriodPorts } from '#ledger';
import { LedgerModule, PERIOD_PORTS } from '#ledger/module';
import {
  type Claims,
  claimsMigration,
  GatewayCalls,
  idempotencyMigrations,
  keysFromLogMigration,
  paymentListModel,
  type PaymentServices,
  recoveryMigration,
  recoveryWhyMigration,
  refusalMigration,
  staffWorkModel,
  transactionClaimMigration,
  velocityMigration,
} from '#payments';
import { KEYS, PAYMENT_SERVICES, PaymentsModule } from '#payments/module';
import {
  type Config,
  isMigrated,
  type KeyRing,
  type Logger,
  type Migration,
  type Pool,
  processMigration,
  type SandboxTime,
  sandboxTimeMigration,
  type Openings,
  personalKeyMigration,
  postgresOpenings,
  requireOwnFolderOrNone,
  Slots,
} from '#platform';
import { createRetention, erasureModel, personalUseModel, type PrivacyPorts, refuseRevivedKeys, type Retention } from '#privacy';
import { PRIVACY_PORTS, PrivacyModule } from '#privacy/module';
import { type Places, PlatformModule, ProcessContext, type ProcessOptions } from '#platform/module';
import { exceptionModel, gatewayFeedMigration, paymentRegisterModel, type SettlementPorts } from '#settlement';
import { OPEN_EXCEPTIONS, type OpenExceptions, SETTLEMENT_PORTS, SettlementModule } from '#settlement/module';
import { webhookMigrations } from '#webhooks';
import { OUTBOX, Webhooks, WebhooksModule } from '#webhooks/module';
import { answerEncoder } from './answers.js';
import { SERVICE_SLOTS } from './api/slots.js';
import { AUDIT_POOL_CONNECTIONS } from './audit/limits.js';

export const MIGRATIONS: readonly Migration[] = [
  ...eventStoreMigrations,
  processMigration,
  sandboxTimeMigration,
  apiKeyUseMigration,
  ...idempotencyMigrations,
  keysFromLogMigration,
  claimsMigration,
  velocityMigration,
  refusalMigration,
  recoveryMigration,
  recoveryWhyMigration,
  transactionClaimMigration,
  checkoutIntakeMigration,
  personalKeyMigration,
  ...webhookMigrations,
  logSealMigration,
  driftMigration,
  driftPassMigration,
  driftFollowMigration,
  driftAgainMigration,
  verifyPassMigration,
  gatewayFeedMigration,
  chargeStopMigration,
  dropReadModelsOf010,
];

/** Every read model of the service. A worker builds them in this order. Two of them need settings to apply events ({@link readModelsWith}). */
export const READ_MODELS: readonly ReadModel[] = [
  directoryModel,
  auditKeyModel,
  checkoutUnfinishedModel,
  paymentListModel,
  staffWorkModel,
  paymentRegisterModel,
  exceptionModel,
  journalModel,
  lineRegisterModel,
  paymentFindModel,
  personalUseModel(null),
  erasureModel(null),
];

/** The read models with the settings of a process, for code that applies events. */
export const readModelsWith = (keys: KeyRing, { erasuresDir }: Pick<Config, 'erasuresDir'>): readonly ReadModel[] => {
  const models = [personalUseModel(keys), erasureModel(erasuresDir)];
  return READ_MODELS.map((model) => models.find(({ name }) => name === model.name) ?? model);
};

/** The root module of a process, with all modules of the service. Each HTTP listener is a separate Nest application. */
@Module({})
class ServicesModule {}

/** The parts of the modules that HTTP, the command line and the loops use. */
export interface Services {
  readonly config: Config;
  readonly log: Logger;
  readonly clock: Clock;
  /** null: production, whose time never moves. */
  readonly sandboxTime: SandboxTime | null;
  readonly ids: Ids;
  readonly keys: KeyRing;
  /** HTTP and the command line change state by commands and read by queries. */
  readonly commands: CommandBus;
  readonly queries: QueryBus;
  readonly pool: Pool;
  /** The keys of personal data. */
  readonly personal: CountedPersonalKeys;
  /** Notes the readings of personal data. */
  readonly openings: Openings;
  /** The connections of the audit listener. */
  readonly auditPool: Pool;
  readonly store: EventStore;
  /** The guard of the log. During an incident no loop runs and nothing is appended (C76). */
  readonly ownLog: OwnLog;
  readonly directory: Directory;
  readonly authentication: AuthenticationDeps;
  readonly payments: PaymentServices;
  readonly claims: Claims;
  /** The calls of gateways, for metrics. */
  readonly gatewayCalls: GatewayCalls;
  /** The slots of this process, for requests of partners and payers. */
  readonly slots: Slots;
  readonly checkout: CheckoutPorts;
  readonly settlement: SettlementPorts;
  readonly openExceptions: OpenExceptions;
  readonly periods: PeriodPorts;
  readonly readModels: ReadModels;
  /** Reactors: subscribers that are never rebuilt. */
  readonly reactors: { readonly webhookOutbox: Subscriber; readonly logSeal: Subscriber; readonly keys: Subscriber };
  readonly webhooks: Webhooks;
  readonly privacy: PrivacyPorts;
  readonly retention: Retention;
  readonly seal: ProvePorts & { readonly db: Pool };
  /** Readiness checks by name. A check throws if payments cannot use the part that it checks. */
  readonly readiness: Readonly<Record<string, () => Promise<void>>>;
  close(): Promise<void>;
}

/** The newest signed head of an installation, from its database and its folder. */
const signedEndOf = ({ config, keys, clock }: ProcessContext, db: Pool) => signedEnd({ db, keys, folder: config.headsDir, now: () => clock.now() });

/** After a failed append, the process is not ready for this long. */
const APPEND_FAILURE_WINDOW_MS = 10_000;

/** A stopped start waits at most this long for its resources to close. */
const STOPPED_CLOSE_MS = 5_000;

export interface ServicesOptions extends ProcessOptions {
  /** True: opens a restored database that still has erased keys, for a command that erases them again. */
  readonly mends?: boolean;
}

/**
 * Starts the modules. If a store cannot be opened, throws an error with a one-line message. If `stop` aborts, throws its reason immediately. If
 * the database has erased keys again, as after a restore, throws an error of one line. In all cases, everything that was opened is closed.
 */
export const openServices = async (
  config: Config,
  places: Places,
  keys: KeyRing,
  log: Logger,
  { mends = false, ...options }: ServicesOptions = {},
): Promise<Services> => {
  for (const folder of [config.headsDir, config.marksDir, config.erasuresDir]) requireOwnFolderOrNone(folder);
  const context = new ProcessContext(config, places, keys, log, options);
  const imports = [
    PlatformModule.of(context),
    EventStoreModule.of({ migrations: MIGRATIONS, readModels: readModelsWith(keys, config), sealedEnd, signedEnd: signedEndOf }),
    AccountsModule,
    GatewaysModule,
    PaymentsModule.of(answerEncoder),
    SettlementModule,
    LedgerModule,
    AuditModule,
    CheckoutModule,
    WebhooksModule,
    PrivacyModule,
    CqrsModule.forRoot(),
  ];
  try {
    const app = await orStopped(
      NestFactory.createApplicationContext({ module: ServicesModule, imports }, { logger: false, abortOnError: false }),
      options.stop,
    );
    const { clock, ids } = context;
    const [store, ownLog] = [app.get<EventStore>(EVENT_STORE), app.get<OwnLog>(LOG_GATE)];
    const [pool, readModels, appends] = [app.get<Pool>(POOL), app.get(ReadModels), app.get(Appends)];
    const payments = app.get<PaymentServices>(PAYMENT_SERVICES);
    const privacy = app.get<PrivacyPorts>(PRIVACY_PORTS);
    if (!mends) await orStopped(refuseRevivedKeys(privacy, ownLog), options.stop);
    return {
      config,
      log,
      clock,
      sandboxTime: context.sandboxTime,
      ids,
      keys,
      commands: app.get(CommandBus),
      queries: app.get(QueryBus),
      pool,
      personal: app.get(PERSONAL_KEYS),
      openings: postgresOpenings(pool, { ids, log }),
      auditPool: context.pool({ name: 'audit', max: AUDIT_POOL_CONNECTIONS, searchPath: searchPathOf(READ_MODELS) }),
      store,
      ownLog,
      directory: app.get(DIRECTORY),
      authentication: app.get(AUTHENTICATION),
      payments,
      claims: payments.claims,
      gatewayCalls: app.get(GatewayCalls),
      slots: new Slots(clock, SERVICE_SLOTS),
      checkout: app.get(CHECKOUT_PORTS),
      settlement: app.get(SETTLEMENT_PORTS),
      openExceptions: app.get(OPEN_EXCEPTIONS),
      periods: app.get(PERIOD_PORTS),
      readModels,
      reactors: { webhookOutbox: app.get(OUTBOX), logSeal: app.get(SEALER), keys: app.get(KEYS) },
      webhooks: app.get(Webhooks),
      privacy,
      retention: createRetention(privacy, log),
      seal: app.get(SEAL),
      readiness: {
        idempotency: async () => {
          if (!(await payments.idempotency.ping())) throw new Error('keys cannot be written');
        },
        readModels: async () => {
          // Once the read models are built, the API stays ready even without a worker.
          if (!(await readModels.areBuilt())) throw new Error('read models are being built');
        },
        schema: async () => {
          if (!(await isMigrated(pool, MIGRATIONS))) throw new Error('the schema is not ours');
        },
        eventStore: async () => {
          // In an incident the process stays ready. Otherwise the load balancer would answer partners, and not the API with the answers of C76.
          if (ownLog.incident) return;
          await store.head();
          if (clock.monotonic() - appends.failedAt < APPEND_FAILURE_WINDOW_MS) throw new Error('an append failed just now');
        },
      },
      close: () => app.close(),
    };
  } catch (error) {
    const closed = context.close().catch(() => undefined);
    await (options.stop?.aborted ? within(context.clock, STOPPED_CLOSE_MS, closed, () => new Error('still open')).catch(() => undefined) : closed);
    throw withAddress(error, config.kurrentdbUrl, places.databaseUrl);
  }
};

/** Returns the addresses of the services that a role needs and does not start. */
export const requirePlaces = ({ databaseUrl, simulatorUrl, environment }: Config): Places => {
  const missing = [databaseUrl ? null : 'DATABASE_URL', simulatorUrl || environment === 'production' ? null : 'SIMULATOR_URL'].filter(Boolean);
  if (!databaseUrl || missing.length > 0) throw new Error(`this role needs ${missing.join(' and ')}; npm start runs everything in one process tree`);
  return { databaseUrl, simulatorUrl };
};

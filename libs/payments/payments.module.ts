/** Payments, and the commands and queries of the buses, for Nest (`#payments/module`). */
import { type DynamicModule, Global, Module } from '@nestjs/common';
import { Command, Query } from '@nestjs/cqrs';
import type { Directory } from '#accounts';
import { DIRECTORY } from '#accounts/module';
import { checkpointOf, type EventStore, type LogGate, postgresCheckpoint, ReadModels, type Subscriber, watchProjection } from '#eventstore';
import { EVENT_STORE, LOG_GATE, type OpenReactor, PERSONAL_KEYS, POOL, REACTOR } from '#eventstore/module';
import type { PersonalKeys, Pool } from '#platform';
import { commandHandler, ProcessContext, queryHandler } from '#platform/module';
import type { ChargeRequest, PaymentPorts } from './charge.js';
import {
  chargeOnce,
  effectByStaff,
  type FeeQuote,
  findPayment,
  type PaymentServices,
  type QuoteRequest,
  quoteFee,
  type Received,
  reverseByStaff,
  reverseOnce,
  type StaffReverseRequest,
} from './commands.js';
import type { Gateways } from './gateway/gateway.js';
import { GatewaySlots } from './gateway/slots.js';
import { openClaims } from './keys/claims.js';
import { keysFromLog } from './keys/from-log.js';
import type { AnswerEncoder, Answered } from './keys/once-by-key.js';
import { postgresIdempotency } from './keys/postgres.js';
import { type FoundByKey, lookUpKey } from './keys/look-up.js';
import { type ListedPage, listPayments, type ListRequest, paymentListModel, postgresListRows } from './list.js';
import type { PaymentView, ReversalView } from './payment.view.js';
import { createRecovery, postgresRecoveryWork } from './recovery.js';
import type { ReversalEffect, ReverseRequest } from './reverse.js';
import { postgresRefusals } from './refusals.js';
import { PaymentStreams } from './stream.js';
import { postgresVelocity } from './velocity.js';

/** Keys have a few connections of their own, so that list requests cannot take all connections. */
const KEY_POOL = { max: 6, statementTimeoutMs: 2_000, lockTimeoutMs: 1_000, byKey: true } as const;
/** Charges of one case or card wait for each other in transactions. Velocity has connections of its own, so that other requests do not wait, too. */
const VELOCITY_POOL_CONNECTIONS = 4;
/** Refused attempts are written one transaction after the other. A row may be lost, so its commit does not wait for the disk. */
const REFUSALS_POOL = { name: 'refusals', max: 1, byKey: true, synchronousCommit: 'off' } as const;

/** Token of the {@link Gateways}, which the module of the gateways provides. */
export const GATEWAYS = Symbol('gateways');
export const PAYMENT_PORTS = Symbol('payment ports');
export const PAYMENT_SERVICES = Symbol('payment services');
/** The subscriber that makes lost keys again from the log. */
export const KEYS = Symbol('keys from the log');

/** Charges a partner's request, once for its key. */
export class ChargePayment extends Command<Answered<PaymentView>> {
  constructor(
    readonly request: ChargeRequest,
    readonly received: Received,
  ) {
    super();
  }
}

/** Refunds or voids for a partner, once for its key. */
export class ReversePayment extends Command<Answered<ReversalView>> {
  constructor(
    readonly request: ReverseRequest & { readonly accountId: string },
    readonly received: Received,
  ) {
    super();
  }
}

/** Refunds or voids for staff, once for its key (C56). */
export class ReverseByStaff extends Command<Answered<ReversalView>> {
  constructor(
    readonly request: StaffReverseRequest,
    readonly idempotencyKey: string | null,
  ) {
    super();
  }
}

/** What {@link ReverseByStaff} would do now. */
export class EffectByStaff extends Query<ReversalEffect> {
  constructor(
    readonly request: StaffReverseRequest,
    readonly idempotencyKey: string | null,
  ) {
    super();
  }
}

export class FindPayment extends Query<PaymentView> {
  constructor(
    readonly accountId: string,
    readonly paymentId: string,
  ) {
    super();
  }
}

export class ListPayments extends Query<ListedPage> {
  constructor(readonly request: ListRequest) {
    super();
  }
}

/** What a key of a create has made (C44). */
export class FindByKey extends Query<FoundByKey> {
  constructor(
    readonly accountId: string,
    readonly key: string,
  ) {
    super();
  }
}

export class QuoteFee extends Query<FeeQuote> {
  constructor(readonly request: QuoteRequest) {
    super();
  }
}

const HANDLERS = [
  commandHandler(ChargePayment, PAYMENT_SERVICES, (services: PaymentServices, { request, received }) => chargeOnce(services, request, received)),
  commandHandler(ReversePayment, PAYMENT_SERVICES, (services: PaymentServices, { request, received }) => reverseOnce(services, request, received)),
  commandHandler(ReverseByStaff, PAYMENT_SERVICES, (services: PaymentServices, { request, idempotencyKey }) =>
    reverseByStaff(services, request, idempotencyKey),
  ),
  queryHandler(EffectByStaff, PAYMENT_SERVICES, (services: PaymentServices, { request, idempotencyKey }) =>
    effectByStaff(services, request, idempotencyKey),
  ),
  queryHandler(FindPayment, PAYMENT_SERVICES, (services: PaymentServices, { accountId, paymentId }) => findPayment(services, accountId, paymentId)),
  queryHandler(ListPayments, PAYMENT_SERVICES, ({ list }: PaymentServices, { request }) => listPayments(list, request)),
  queryHandler(FindByKey, PAYMENT_SERVICES, (services: PaymentServices, { accountId, key }) => lookUpKey(services, accountId, key)),
  queryHandler(QuoteFee, PAYMENT_SERVICES, (services: PaymentServices, { request }) => quoteFee(services, request)),
];

@Global()
@Module({})
export class PaymentsModule {
  /** `answers`: must be the same encoder in every process. The API may replay an answer that a worker stored. */
  static of(answers: AnswerEncoder): DynamicModule {
    const providers = [
      {
        provide: PAYMENT_PORTS,
        inject: [ProcessContext, EVENT_STORE, LOG_GATE, DIRECTORY, GATEWAYS, PERSONAL_KEYS],
        useFactory: (
          context: ProcessContext,
          store: EventStore,
          ownLog: LogGate,
          directory: Directory,
          gateways: Gateways,
          personal: PersonalKeys,
        ): PaymentPorts => {
          const { clock, ids, keys, log } = context;
          const velocityPool = context.pool({ name: 'velocity', max: VELOCITY_POOL_CONNECTIONS, byKey: true });
          const refusals = postgresRefusals(context.pool(REFUSALS_POOL), keys, clock, ids, log);
          context.atEnd(() => refusals.stop());
          return {
            clock,
            ...(context.sandboxTime && { sandboxTime: context.sandboxTime }),
            ids,
            log,
            ownLog,
            gateways,
            slots: new GatewaySlots(clock),
            directory,
            streams: new PaymentStreams(store, clock, ids, log),
            velocity: postgresVelocity(velocityPool, keys, clock),
            refusals,
            personal,
          };
        },
      },
      {
        provide: PAYMENT_SERVICES,
        inject: [ProcessContext, PAYMENT_PORTS, EVENT_STORE, POOL, ReadModels, KEYS],
        useFactory: (context: ProcessContext, ports: PaymentPorts, store: EventStore, pool: Pool, readModels: ReadModels, keys: Subscriber) =>
          paymentServices(context, ports, store, pool, readModels, keys, answers),
      },
      {
        provide: KEYS,
        inject: [ProcessContext, REACTOR, EVENT_STORE, PERSONAL_KEYS],
        useFactory: ({ clock, log }: ProcessContext, reactor: OpenReactor, store: EventStore, personal: PersonalKeys) =>
          reactor(keysFromLog({ store, answers, personal, clock, log })),
      },
      ...HANDLERS,
    ];
    return { module: PaymentsModule, providers, exports: [PAYMENT_PORTS, PAYMENT_SERVICES, KEYS] };
  }
}

const paymentServices = (
  context: ProcessContext,
  ports: PaymentPorts,
  store: EventStore,
  pool: Pool,
  readModels: ReadModels,
  subscriber: Subscriber,
  answers: AnswerEncoder,
): PaymentServices => {
  const { config, keys, ids, clock, log } = context;
  const {
    claims,
    pool: keyPool,
    completions: completionPool,
  } = openClaims(
    // A claim must survive a crash of Postgres. Without the claim, a repeat under the key could charge again. A completion may be lost, since a
    // takeover makes it again from the stream (T7).
    (which, verify) =>
      which === 'claims'
        ? context.pool({ name: 'keys', ...KEY_POOL, verify })
        : context.pool({ name: 'keys, completed', ...KEY_POOL, synchronousCommit: 'off', verify }),
    config.marksDir,
    { store, keys: subscriber, ownLog: ports.ownLog, clock, log, isWithLog: config.kurrentdbUrl === null },
  );
  context.atEnd(() => claims.stop());
  // A process that runs the list's projection learns its progress at once. Any other process polls the checkpoint.
  const list = readModels.of(paymentListModel);
  const watch = watchProjection(postgresCheckpoint(pool, checkpointOf(paymentListModel)), clock);
  return {
    ports,
    idempotency: context.guarded(postgresIdempotency(keyPool, keys, ids, { completions: completionPool })),
    answers,
    claims,
    list: {
      rows: postgresListRows(pool),
      ownLog: ports.ownLog,
      keys,
      directory: ports.directory,
      personal: ports.personal,
      head: () => store.head(),
      caughtUpTo: (position, timeoutMs) => (list.state === 'active' ? list : watch).caughtUpTo(position, timeoutMs),
    },
    recovery: createRecovery(ports, store, postgresRecoveryWork(pool)),
    log,
  };
};

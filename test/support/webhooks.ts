/**
 * Webhooks with real parts. Payments use the simulator (support/payments.ts). The outbox and any number of dispatchers use one Postgres. Receivers
 * listen with real TLS on loopback. A test name server resolves each receiver's own host name.
 */
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createSubscriber, eventStoreMigrations, postgresCheckpoint, type Subscriber } from '#eventstore';
import { Deadline } from '#kernel';
import { type Dispute, idempotencyMigrations, type PaymentCommand, refusalMigration, velocityMigration } from '#payments';
import { createLogger, createPool, migrate, type Pool, readConfig } from '#platform';
import {
  createDispatcher,
  createResolve,
  createSender,
  type Dispatcher,
  type DispatcherOptions,
  type DispatcherPorts,
  Endpoints,
  type EndpointSecret,
  type Outcome,
  postgresDeliveries,
  postgresDueSignal,
  postgresStaffTables,
  type StaffDeps,
  WEBHOOK_OUTBOX,
  webhookMigrations,
  webhookOutbox,
} from '#webhooks';
import { MovableClock } from './clock.js';
import { type NameServer, startNameServer } from './name-server.js';
import { type Ground, type House, openGround, openHouse } from './payments.js';
import { type Behaviour, createAuthority, type Receiver, startReceiver } from './receiver.js';

/** The parts that all tests of a file share: Postgres, simulator, name server, certificate authority. */
export interface WebhookGround {
  readonly ground: Ground;
  readonly names: NameServer;
  readonly authority: Awaited<ReturnType<typeof createAuthority>>;
  readonly caFile: string;
  close(): Promise<void>;
}

export const openWebhookGround = async (): Promise<WebhookGround> => {
  const ground = await openGround();
  await migrate(ground.pool, [...eventStoreMigrations, ...idempotencyMigrations, velocityMigration, refusalMigration, ...webhookMigrations]);
  const directory = await mkdtemp(join(tmpdir(), 'payfold-webhooks-'));
  const authority = await createAuthority();
  const caFile = join(directory, 'ca.pem');
  await writeFile(caFile, authority.cert);
  const names = await startNameServer();
  return {
    ground,
    names,
    authority,
    caFile,
    close: async () => {
      names.close();
      await rm(directory, { recursive: true, force: true });
      await ground.close();
    },
  };
};

export interface Registered {
  readonly endpointId: string;
  readonly secret: string;
  readonly url: string;
  readonly receiver: Receiver;
}

/** One worker: a dispatcher, and its counters. */
export interface Worker {
  readonly dispatcher: Dispatcher;
  readonly outcomes: Outcome[];
  readonly lost: { count: number };
  /** The clock of this worker. */
  readonly clock: MovableClock;
}

export interface WebhookStage {
  readonly house: House;
  readonly pool: Pool;
  readonly staff: StaffDeps;
  readonly endpoints: Endpoints;
  readonly outbox: Subscriber;
  readonly logged: string[];
  /** Another writer of the same outbox. */
  anotherOutbox(): Subscriber;
  /** Starts a receiver with its own host name, and registers it. Default: for the default account. */
  register(options?: { readonly accountId?: string; readonly behave?: Behaviour }): Promise<Registered>;
  /** Makes a worker on the same tables, not started yet. */
  worker(options?: DispatcherOptions & Partial<Pick<DispatcherPorts, 'retrySeconds' | 'deliveries'>>): Worker;
  /** Runs the outbox to the end of the log. */
  tell(): Promise<void>;
  /** Makes a charge and refunds it as staff. Returns the payment's id. */
  refunded(amountCents?: number): Promise<string>;
  dispute(paymentId: string, change?: Partial<Dispute>): Promise<void>;
  rows(): Promise<Row[]>;
  query<T extends object = Record<string, never>>(sql: string, values?: unknown[]): Promise<T[]>;
  close(): Promise<void>;
}

export interface Row {
  readonly id: string;
  readonly event_id: string;
  readonly endpoint_id: string;
  readonly state: string;
  readonly round: number;
  readonly attempts: number;
  readonly lease_losses: number;
  readonly due_at: Date;
  readonly last_error: string | null;
}

let numbered = 0;

export const openWebhookStage = async ({ ground, names, authority, caFile }: WebhookGround): Promise<WebhookStage> => {
  const house = await openHouse(ground);
  const pool = createPool(new URL(process.env.TEST_POSTGRES_URL!).toString().replace(/\/[^/]*$/, `/${await databaseOf(ground.pool)}`), {
    name: 'webhook stage',
    max: 30,
  });
  await pool.query(
    'truncate webhook_attempt, webhook_delivery, webhook_event, webhook_endpoint_secret, webhook_endpoint, webhook_purged, projection_checkpoint',
  );
  const closers: (() => Promise<unknown>)[] = [];
  const logged: string[] = [];
  const log = createLogger('debug', 'spec', { write: (line) => logged.push(line) });
  const privateTargets: string[] = [];
  // Each new receiver adds to `privateTargets`, so compute the settings at each use.
  const settings = () =>
    readConfig({ WEBHOOK_PRIVATE_TARGETS: privateTargets.join(','), WEBHOOK_EXTRA_CA_FILE: caFile, WEBHOOK_DNS_SERVERS: names.address }).webhooks;
  const sender = (clock: MovableClock) => createSender({ settings: settings(), resolve: createResolve([names.address], clock), clock });
  const { store, ids } = house;
  const newOutbox = () => {
    const subscriber = createSubscriber(webhookOutbox(store, house.ports.personal), { store, checkpoint: postgresCheckpoint(pool, WEBHOOK_OUTBOX) });
    closers.push(() => subscriber.stop());
    return subscriber;
  };
  const outbox = newOutbox();
  const staff: StaffDeps = { tables: postgresStaffTables(pool), store, clock: house.clock, ids, actor: { type: 'staff', id: 'spec' } };
  const endpoints = new Endpoints({ ...staff, keys: ground.keys, sender: { vet: (url) => sender(new MovableClock()).vet(url) } });
  const dispute = async (paymentId: string, change: Partial<Dispute>) => {
    const loaded = await house.ports.streams.load(paymentId);
    if (loaded.payment.phase !== 'charged') throw new Error('not charged');
    const at = new Date(house.clock.now()).toISOString();
    const before = loaded.payment.disputes.at(-1);
    const command: PaymentCommand = before
      ? { type: 'UpdateDispute', at, disputeId: before.disputeId, status: change.status ?? null, stage: change.stage ?? null }
      : { type: 'OpenDispute', at, dispute: { ...FIRST_DISPUTE, ...change } };
    const owner = { actor: { type: 'staff' as const, id: 'spec' }, correlationId: ids.uuid() };
    await house.ports.streams.execute(loaded, [command], owner, new Deadline(house.clock, 5_000));
  };

  return {
    house,
    pool,
    staff,
    endpoints,
    outbox,
    logged,
    anotherOutbox: newOutbox,
    register: async ({ accountId = house.accountId, behave } = {}) => {
      const host = `r${++numbered}.receiver.test`;
      names.answer(host, ['127.0.0.1']);
      const receiver = await startReceiver(await authority.issue(host));
      closers.push(() => receiver.close());
      privateTargets.push(`${host}:${receiver.port}=127.0.0.1/32`);
      const { endpointId, secret, url } = await endpoints.add(accountId, `https://${host}:${receiver.port}/hook`);
      receiver.accept(secret);
      if (behave) receiver.behave(behave);
      return { endpointId, secret, url, receiver };
    },
    worker: ({ retrySeconds = 120, deliveries, ...options } = {}) => {
      const clock = new MovableClock();
      const outcomes: Outcome[] = [];
      const lost = { count: 0 };
      const dispatcher = createDispatcher(
        {
          deliveries: deliveries ?? postgresDeliveries(pool, ids.uuid()),
          sender: sender(clock),
          due: postgresDueSignal(pool),
          payloads: { store, personal: house.ports.personal },
          keys: ground.keys,
          clock,
          log,
          watch: { attempted: ({ outcome }) => outcomes.push(outcome), leaseLost: () => (lost.count += 1) },
          retrySeconds,
        },
        options,
      );
      closers.push(() => dispatcher.stop());
      return { dispatcher, outcomes, lost, clock };
    },
    tell: async () => {
      const head = await store.head();
      if (head !== null) await outbox.runUntil(head, { timeoutMs: 10_000 });
    },
    refunded: async (amountCents) => {
      const { id } = await house.charge();
      await house.refund(id, { initiatedBy: 'staff', reason: 'duplicate', ...(amountCents === undefined ? { includeFee: true } : { amountCents }) });
      return id;
    },
    dispute: (paymentId, change = {}) => dispute(paymentId, change),
    rows: async () => (await pool.query<Row>('select * from webhook_delivery order by id')).rows,
    query: async <T extends object>(sql: string, values: unknown[] = []) => (await pool.query<T>(sql, values)).rows,
    close: async () => {
      for (const close of closers.reverse()) await close();
      await pool.end();
    },
  };
};

const databaseOf = async (pool: Pool): Promise<string> => (await pool.query<{ name: string }>('select current_database() as name')).rows[0]!.name;

export const FIRST_DISPUTE: Dispute = {
  disputeId: '0190c1f2-8f52-7b3e-9c61-2f0d8a6b7c11',
  status: 'debited',
  stage: 'chargeback',
  reasonCode: '10.4',
  personal: { clear: { reason: 'fraud' } },
  disputedAmountCents: 1_000,
  openedOn: '2026-11-01',
  dueDate: '2026-11-21',
};

export type { EndpointSecret };

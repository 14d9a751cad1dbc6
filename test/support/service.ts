/**
 * The whole service for a spec file, in this process but over real sockets. It has its own database, the sandbox processor, the worker and API
 * instances. Its client checks every answer against the served OpenAPI document.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { connect, createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import pg from 'pg';
import request from 'supertest';
import { Administration, directoryModel, type Done, type FeeConfig, NO_FEE } from '#accounts';
import type { Subscriber } from '#eventstore';
import { type Clock, systemClock } from '#kernel';
import type { PaymentStatus, PaymentView, RefundView, VoidView } from '#payments';
import { createLogger, newKeyRing, readConfig, type Slots } from '#platform';
import type { ServerOptions } from '#platform/http';
import { type Api, createApi } from '../../apps/api/api.js';
import { Health } from '../../apps/health.js';
import { openServices, type Services } from '../../apps/services.js';
import { createSimulatorControl, type SimulatorControl } from '../../apps/simulator/control.js';
import { startSimulator } from '../../apps/simulator/server.js';
import { startWorker } from '../../apps/worker/worker.js';
import { eventually } from './eventually.js';
import { createOpenApiJudge, type OpenApiJudge } from './openapi.js';
import { freshKurrentDb } from './kurrentdb-server.js';
import { freshDatabase } from './postgres.js';

export const PARTNER = '/api/partner/v1';
export const PAYMENTS = `${PARTNER}/payments`;

// ------------------------------------------------------------------------------------------------------------------------------------
// The client.

export interface Answer<Data> {
  readonly status: number;
  readonly headers: Readonly<Record<string, string | undefined>>;
  /** The body, byte for byte. */
  readonly text: string;
  /** The data of a success. An error has no data, so reading a field then fails the spec. */
  readonly data: Data;
  /** `details.code` of an error. */
  readonly code: string | undefined;
  readonly message: string | undefined;
  readonly details: Readonly<Record<string, unknown>> | undefined;
}

export interface Sent {
  /** `Idempotency-Key`. */
  readonly key?: string;
  /** A list of values is sent as one header line for each value. */
  readonly headers?: Readonly<Record<string, string | string[]>>;
  /** The API instance that gets the request. Default: the first one. */
  readonly instance?: number;
}

export interface PaymentPage {
  readonly payments: readonly PaymentView[];
  readonly nextCursor: string | null;
}

/** The body of a request. An object is sent as JSON, text and bytes are sent unchanged. */
export type Body = object | string | Buffer | undefined;

export class Client {
  constructor(
    private readonly urls: readonly string[],
    private readonly judge: OpenApiJudge,
    /** The `Authorization` header; null sends none. */
    readonly authorization: string | null,
  ) {}

  as(authorization: string | null): Client {
    return new Client(this.urls, this.judge, authorization);
  }

  async send<Data = unknown>(method: string, path: string, body?: Body, { key, headers = {}, instance = 0 }: Sent = {}): Promise<Answer<Data>> {
    const url = this.urls[instance]!;
    const test = request(url)[method.toLowerCase() as 'get'](path).redirects(0).buffer(true);
    // Set the content type here. Superagent's default would hide how the service treats a body without one.
    if (body !== undefined && headers['content-type'] === undefined) void test.set('content-type', 'application/json');
    if (this.authorization !== null && headers.authorization === undefined) void test.set('authorization', this.authorization);
    if (key !== undefined) void test.set('idempotency-key', key);
    // Superagent passes lists to Node, which writes one line for each value. Superagent's types do not allow lists.
    for (const [name, value] of Object.entries(headers)) void test.set(name, value as string);
    const bytes = body === undefined || typeof body === 'string' || Buffer.isBuffer(body) ? body : JSON.stringify(body);
    void test.serialize((raw: unknown) => raw as string);
    // Accept every status as an answer. Only a missing answer is an error.
    const answered = await (bytes === undefined ? test : test.send(bytes as string)).ok(() => true);
    const text = answered.text ?? '';
    const received = answered.headers as Record<string, string | undefined>;
    if (method !== 'HEAD')
      this.judge.check({ method, path, status: answered.status, contentType: received['content-type'], headers: received, text });
    const parsed = (text === '' ? {} : JSON.parse(text)) as { data: Data; message?: string; details?: Record<string, unknown> & { code: string } };
    const { data, message, details } = parsed;
    return { status: answered.status, headers: received, text, data, code: details?.code, message, details };
  }

  get<Data = unknown>(path: string, sent?: Sent): Promise<Answer<Data>> {
    return this.send<Data>('GET', path, undefined, sent);
  }
  post<Data = unknown>(path: string, body?: Body, sent?: Sent): Promise<Answer<Data>> {
    return this.send<Data>('POST', path, body, sent);
  }

  create(body: Body, sent?: Sent): Promise<Answer<PaymentView>> {
    return this.post(PAYMENTS, body, sent);
  }
  /** Makes a payment, which must succeed. */
  async created(body: Body, sent?: Sent): Promise<PaymentView> {
    const answer = await this.create(body, sent);
    if (answer.status !== 200) throw new Error(`no payment: ${answer.status} ${answer.text}`);
    return answer.data;
  }
  find(id: string, sent?: Sent): Promise<Answer<PaymentView>> {
    return this.get(`${PAYMENTS}/${id}`, sent);
  }
  async status(id: string): Promise<PaymentStatus> {
    return (await this.find(id)).data.status;
  }
  list(query: Readonly<Record<string, string | number>> = {}, sent?: Sent): Promise<Answer<PaymentPage>> {
    const search = new URLSearchParams(Object.entries(query).map(([name, value]): [string, string] => [name, String(value)])).toString();
    return this.get(search === '' ? PAYMENTS : `${PAYMENTS}?${search}`, sent);
  }
  refund(id: string, body?: Body, sent?: Sent): Promise<Answer<RefundView>> {
    return this.post(`${PAYMENTS}/${id}/refund`, body, sent);
  }
  void(id: string, body?: Body, sent?: Sent): Promise<Answer<VoidView>> {
    return this.post(`${PAYMENTS}/${id}/void`, body, sent);
  }
}

// ------------------------------------------------------------------------------------------------------------------------------------
// Bodies.

/** The sandbox cards, by their effect. */
export const CARD = {
  approved: '4242 4242 4242 4242',
  declined: '4000 0000 0000 0002',
  gatewayError: '4000 0077 7000 5020',
  unreadable: '4000 0077 7000 5046',
  unresolvable: '4000 0077 7000 5145',
  neverReached: '4000 0077 7000 5244',
  voidRejected: '4000 0077 7000 4221',
  feeDeclined: '4000 0077 7000 4023',
  feeVoidFailsOnce: '4000 0077 7000 4320',
  feeRefundFailsOnce: '4000 0077 7000 7026',
  settlesAtOnce: '4000 0077 7000 2001',
  settlementRejected: '4000 0077 7000 4304',
  slow: '4000 0077 7000 2050',
} as const;

/** The expiry date `MM/YY`, `months` from now. A negative number gives a past month. */
export const expiryIn = (months: number, now = Date.now()): string => {
  const date = new Date(now);
  const month = date.getUTCFullYear() * 12 + date.getUTCMonth() + months;
  return `${String((month % 12) + 1).padStart(2, '0')}/${String(Math.floor(month / 12) % 100).padStart(2, '0')}`;
};

export const card = (cardNumber: string = CARD.approved, overrides: object = {}) => ({
  type: 'card',
  cardNumber,
  expirationDate: expiryIn(36),
  cvv: '946',
  ...overrides,
});

/** The body of an approved create. `lines`: the amounts of its line items. */
export const paymentOf = (
  portalId: string,
  { lines = [10_000], number, ...overrides }: { lines?: number[]; number?: string; [field: string]: unknown } = {},
) => ({
  portalId,
  amountCents: lines.reduce((sum, amount) => sum + amount, 0),
  currency: 'USD',
  paymentMethod: card(number),
  lineItems: lines.map((amountCents, index) => ({ amountCents, referenceId: `INV-${index + 1}` })),
  ...overrides,
});

// ------------------------------------------------------------------------------------------------------------------------------------
// The service.

/** A clock that specs can move forward. Only the wall clock moves. Timers and deadlines use real time. */
export class MovableClock implements Clock {
  private aheadMs = 0;
  private frozen: number | null = null;
  now = () => this.frozen ?? systemClock.now() + this.aheadMs;
  realNow = () => this.now();
  monotonic = () => systemClock.monotonic();
  sleep = (ms: number, signal?: AbortSignal) => systemClock.sleep(ms, signal);
  advance(ms: number): void {
    this.aheadMs += ms;
  }
  /** Stops this clock while `work` runs. */
  async frozenDuring<T>(work: () => Promise<T>): Promise<T> {
    this.frozen = this.now();
    try {
      return await work();
    } finally {
      this.frozen = null;
    }
  }
}

/** 2.5 % + 50 cents. */
export const FEE: FeeConfig = { ...NO_FEE, flatCents: 50, percentBps: 250 };

export interface TestAccount {
  readonly accountId: string;
  readonly apiKey: string;
  readonly client: Client;
}

export interface ServiceOptions {
  /** The number of API instances. Each has its own stores on the same database. */
  readonly instances?: number;
  readonly timeouts?: NonNullable<ServerOptions['timeouts']>;
  /** The address for payers. Default: the product's default. */
  readonly publicUrl?: string;
  /** The slots of the API instances. Default: the product's. */
  readonly slots?: Slots;
  /** More settings, by environment variable. */
  readonly env?: Readonly<Record<string, string>>;
  /** Puts a proxy in front of Postgres. A spec can then make the database unreachable. */
  readonly cuttable?: boolean;
}

export interface LogLine {
  readonly level: number;
  readonly msg: string;
  readonly [field: string]: unknown;
}

export interface Service {
  readonly urls: readonly string[];
  readonly apis: readonly Api[];
  readonly services: Services;
  readonly admin: Administration;
  readonly simulator: SimulatorControl;
  readonly clock: MovableClock;
  /** All lines of the service's log, at level debug. */
  readonly log: readonly string[];
  readonly judge: OpenApiJudge;
  readonly database: DatabaseProxy | null;
  /** Lets the database take writes, or not. A session keeps what was in force when it began. Before writes stop, all sessions are ended. */
  takesWrites(may: boolean): Promise<void>;
  /** The sandbox processor. After `stop`, `start` uses the same address. */
  readonly bank: { stop(): Promise<void>; start(): Promise<void> };
  /** A client without credentials. */
  readonly anonymous: Client;
  account(name?: string): Promise<TestAccount>;
  portal(account: TestAccount, options?: { fee?: Partial<FeeConfig>; gateway?: 'simulator' | 'none' }): Promise<string>;
  /** Runs an administrative command, and waits until requests see the change. */
  readonly administer: <State, Extra extends Done<State>>(change: Promise<Extra>) => Promise<Extra>;
  /** Runs recovery of this payment now, as the worker would after a minute. Moves the clock by 61 s. */
  recover(paymentId: string): Promise<void>;
  logLines(): LogLine[];
  /** Stops the worker for the rest of the spec file. Projections go on only in {@link Subscriber.runUntil}. */
  stopWorker(): Promise<void>;
  stop(): Promise<void>;
}

const PROJECTED_MS = 10_000;
const RECOVERY_AGE_MS = 61_000;

export const startService = async (options: ServiceOptions = {}): Promise<Service> => {
  const stops: (() => Promise<unknown>)[] = [];
  const stop = async () => {
    for (const one of stops.splice(0).reverse()) await one();
  };
  try {
    const database = await freshDatabase();
    stops.push(() => database.drop());
    const kurrentDb = await freshKurrentDb();
    stops.push(() => kurrentDb.stop());
    const directory = await mkdtemp(join(tmpdir(), 'payfold-e2e-'));
    stops.push(() => rm(directory, { recursive: true, force: true }));
    const proxy = options.cuttable ? await proxyOf(database.url) : null;
    if (proxy) stops.push(() => proxy.close());
    const bankDirectory = join(directory, 'simulator');
    const clock = new MovableClock();
    // The bank lives on the day of the service. Otherwise its batches would close before their payments. It forgets by real time.
    const bankClock: Clock = { ...systemClock, now: clock.now };
    let bank = await startSimulator({ directory: bankDirectory, clock: bankClock });
    stops.push(() => bank.close());
    const { url: bankUrl } = bank;

    const places = { databaseUrl: proxy?.url ?? database.url, simulatorUrl: bankUrl };
    const config = readConfig({
      ...options.env,
      ...kurrentDb.env,
      DATABASE_URL: places.databaseUrl,
      SIMULATOR_URL: places.simulatorUrl,
      DATA_DIR: directory,
      PUBLIC_URL: options.publicUrl,
    });
    const keys = newKeyRing();
    const log: string[] = [];
    const logger = createLogger('debug', 'spec', { write: (line) => log.push(line) });

    const all: Services[] = [];
    const apis: Api[] = [];
    const urls: string[] = [];
    let worker: ReturnType<typeof startWorker>;
    for (let instance = 0; instance < (options.instances ?? 1); instance++) {
      const services = await openServices(config, places, keys, logger, { clock });
      stops.push(() => services.close());
      all.push(services);
      if (instance === 0) {
        worker = startWorker(services);
        stops.push(() => worker.stop());
      }
      const api = await createApi({
        ...services,
        health: new Health(services),
        publicUrl: config.publicUrl,
        ...(options.slots ? { slots: options.slots } : {}),
        ...(options.timeouts ? { timeouts: options.timeouts } : {}),
      });
      stops.push(() => api.close());
      apis.push(api);
      urls.push(await api.listen(0, '127.0.0.1'));
    }
    const [services] = all as [Services];
    const { store, ids, personal, readModels } = services;
    // Until the worker has built the read models, the API refuses all requests except health checks.
    await eventually(() => readModels.areBuilt());
    const document = await (await fetch(`${urls[0]}/openapi.json`)).json();
    const judge = createOpenApiJudge(document as Parameters<typeof createOpenApiJudge>[0]);
    const anonymous = new Client(urls, judge, null);
    const admin = new Administration({
      store,
      clock,
      ids,
      keys,
      personal,
      environment: config.environment,
      cardInTextCheck: true,
      actor: { type: 'system', id: 'spec' },
    });
    const administer = async <State, Extra extends Done<State>>(change: Promise<Extra>): Promise<Extra> => {
      const done = await change;
      if (done.position) await readModels.of(directoryModel).runUntil(done.position, { timeoutMs: PROJECTED_MS });
      return done;
    };

    return {
      urls,
      apis,
      services,
      admin,
      simulator: createSimulatorControl(bankUrl, bank.controlKey),
      clock,
      log,
      judge,
      database: proxy,
      takesWrites: async (may) => {
        const admin = new pg.Client({ connectionString: process.env.TEST_POSTGRES_URL! });
        await admin.connect();
        const name = new URL(database.url).pathname.slice(1);
        await admin.query(`alter database ${name} ${may ? 'reset default_transaction_read_only' : 'set default_transaction_read_only = on'}`);
        if (!may) await admin.query('select pg_terminate_backend(pid) from pg_stat_activity where datname = $1', [name]);
        await admin.end();
      },
      bank: {
        stop: () => bank.close(),
        start: async () => void (bank = await startSimulator({ directory: bankDirectory, clock: bankClock, port: Number(new URL(bankUrl).port) })),
      },
      anonymous,
      administer,
      account: async (name = 'Partner') => {
        const { accountId } = (await admin.createAccount(name)).state;
        const { apiKey } = await administer(admin.issueKey(accountId));
        return { accountId, apiKey, client: anonymous.as(`ApiKey ${apiKey}`) };
      },
      portal: async ({ accountId }, { fee = FEE, gateway = 'simulator' } = {}) => {
        const made = await administer(admin.createPortal({ accountIds: [accountId], name: 'Portal', gateway, fee: { ...NO_FEE, ...fee } }));
        return made.state.portalId;
      },
      recover: async (paymentId) => {
        clock.advance(RECOVERY_AGE_MS);
        await services.payments.recovery.resolve(paymentId);
      },
      logLines: () => log.map((line) => JSON.parse(line) as LogLine),
      stopWorker: () => worker.stop(),
      stop: async () => {
        await stop();
        // No log line may contain a card or an API key (docs/contract.md#card-data). A masked card shows that code tried to log one.
        const caught = log.filter((line) => line.includes('[card]') || line.includes('pc_test_'));
        if (caught.length > 0) throw new Error(`secrets were about to be logged:\n${caught.join('')}`);
      },
    };
  } catch (error) {
    await stop().catch(() => undefined);
    throw error;
  }
};

// ------------------------------------------------------------------------------------------------------------------------------------
// A proxy that can make the database unreachable.

export interface DatabaseProxy {
  readonly url: string;
  /** Breaks every connection and refuses new ones until {@link restore}. */
  cut(): void;
  restore(): void;
  close(): Promise<void>;
}

const proxyOf = async (databaseUrl: string): Promise<DatabaseProxy> => {
  const target = new URL(databaseUrl);
  const sockets = new Set<Socket>();
  let open = true;
  const drop = () => {
    for (const socket of sockets) socket.destroy();
  };
  const server = createServer((inbound) => {
    if (!open) {
      inbound.resetAndDestroy();
      return;
    }
    const outbound = connect(Number(target.port), target.hostname);
    for (const [socket, other] of [
      [inbound, outbound],
      [outbound, inbound],
    ] as const) {
      sockets.add(socket);
      socket.on('error', () => other.destroy());
      socket.on('close', () => {
        sockets.delete(socket);
        other.destroy();
      });
      socket.pipe(other);
    }
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const url = new URL(databaseUrl);
  url.hostname = '127.0.0.1';
  url.port = String((server.address() as { port: number }).port);
  return {
    url: url.toString(),
    cut: () => {
      open = false;
      drop();
    },
    restore: () => (open = true),
    close: () =>
      new Promise((resolve) => {
        drop();
        server.close(() => resolve());
      }),
  };
};

/** All subscribers of the log. */
export const everySubscriber = ({ readModels, reactors }: Services): readonly Subscriber[] => [...readModels.all(), ...Object.values(reactors)];

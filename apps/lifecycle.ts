/** How a process starts, serves metrics, and ends: the same for every role (security.md 4). */
import { existsSync, readFileSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import client from 'prom-client';
import { Unavailable } from '#eventstore';
import { driftFigures, unsignedEvents } from '#audit';
import { suspenseCents } from '#ledger';
import { type Config, ConfigError, createLogger, type Logger, maskedLines, readConfig } from '#platform';
import { deliveryFigures } from '#webhooks';
import type { Services } from './services.js';

/** In-flight requests get longer than their own deadline of 28 s. */
const DRAIN_MS = 35_000;
const FORCE_AFTER_MS = 50_000;
/** A load balancer needs a moment to see that we are not ready; a laptop has none. */
const PRE_STOP_MS = { production: 5_000, sandbox: 0 } as const;
/** Clients that keep connections get this long to come for an answer that tells them to leave. */
export const LINGER_MS = 1_000;

export interface Running {
  /** Called first: from now on not ready. */
  drain?(): void;
  /** Stops everything, in order. */
  stop(): Promise<void>;
}

/**
 * Runs a role: reads the configuration, starts it, and stops it on SIGTERM, SIGINT or SIGHUP (a closed terminal). What keeps it from starting is one clear line
 * and exit code 1. A second signal, or a shutdown that takes longer than 50 s, ends the process at once.
 */
export const runRole = (name: string, start: (config: Config, log: Logger) => Promise<Running>): void => {
  const run = async (): Promise<void> => {
    const config = readConfig();
    if (config.environment === 'production') refuseMemoryDumps();
    const log = createLogger(config.logLevel, name);
    let starting: Promise<Running | null> = Promise.resolve(null);
    let stopping = false;
    const stop = (code: number) => {
      if (stopping) process.exit(1);
      stopping = true;
      setTimeout(() => process.exit(1), FORCE_AFTER_MS).unref();
      const finish = async () => {
        // What is just being started must first be there to be stopped: a database that is left behind would outlive us.
        const running = await starting.catch(() => null);
        running?.drain?.();
        await new Promise((wake) => setTimeout(wake, running ? PRE_STOP_MS[config.environment] : 0));
        await running?.stop();
      };
      finish().then(
        () => process.exit(code),
        (error: unknown) => {
          log.error({ err: error }, 'the shutdown failed');
          process.exit(1);
        },
      );
    };
    for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => stop(0));
    // A fault of ours: the state is not to be trusted any more, but what is in flight may still finish, and what we started must not stay behind.
    for (const fault of ['unhandledRejection', 'uncaughtException'] as const)
      process.on(fault, (error: unknown) => {
        log.fatal({ err: error, fault }, 'an error that nobody caught');
        if (!stopping) stop(1);
      });
    // Whoever read our output may be gone; payments go on.
    for (const output of [process.stdout, process.stderr]) output.on('error', () => undefined);
    starting = start(config, log);
    await starting;
  };
  run().catch((error: unknown) => {
    process.stderr.write(`${clearLine(error)}\n`);
    process.exit(1);
  });
};

/** What is in memory may be a card number: in production nothing may write memory to disk or show it (security.md 1). */
const refuseMemoryDumps = (): void => {
  const flag = process.execArgv.find((argument) => /^--(inspect|heapsnapshot|heap-prof|report)/.test(argument));
  if (flag) throw new Error(`${flag} is refused in production: it can show card data that is in memory`);
  const limits = existsSync('/proc/self/limits') ? readFileSync('/proc/self/limits', 'utf8') : '';
  if (/^Max core file size +(?!0 )/m.test(limits)) throw new Error('core dumps are on; production needs a core file size limit of 0 (ulimit -c 0)');
};

/** A fault of the surroundings is its message; one of ours comes with its stack. */
const clearLine = (error: unknown): string => {
  if (error instanceof ConfigError) return error.message;
  // One for each address of a name that was tried.
  if (error instanceof AggregateError && error.errors.length > 0) return clearLine(error.errors[0]);
  if (!(error instanceof Error)) return String(error);
  const { code, syscall, address, port } = error as NodeJS.ErrnoException & { address?: string; port?: number };
  if (code === 'EADDRINUSE') return `port ${port} of ${address} is in use; set PORT, AUDIT_PORT, METRICS_PORT or SIMULATOR_PORT to a free one`;
  if (code !== undefined && syscall !== undefined) return error.message;
  // Five characters are an SQLSTATE: the database's own words are clear enough, as are those of a store that is away.
  if (error.constructor === Error || error instanceof Unavailable || /^[0-9A-Z]{5}$/.test(code ?? '')) return error.message;
  return error.stack ?? error.message;
};

export interface Metrics {
  readonly answered: (request: { method: string; route: string; status: number; seconds: number }) => void;
  /** Serves `/metrics` on loopback. */
  listen(port: number): Promise<Server>;
}

const LATENCY_BUCKETS_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30];
const LOOPBACK = '127.0.0.1';

/** Prometheus metrics of a process. Labels are routes and codes, never ids or anything that a caller wrote. */
export const createMetrics = (services: Services): Metrics => {
  const registry = new client.Registry();
  client.collectDefaultMetrics({ register: registry });
  const seconds = new client.Histogram({
    name: 'payfold_http_request_duration_seconds',
    help: 'Time to answer, by method, route and status',
    labelNames: ['method', 'route', 'status'],
    buckets: LATENCY_BUCKETS_SECONDS,
    registers: [registry],
  });
  new client.Gauge({
    name: 'payfold_log_lines_masked_total',
    help: 'Log lines in which something like a card number had to be masked; any is a fault',
    registers: [registry],
    collect() {
      this.set(maskedLines.count);
    },
  });
  new client.Gauge({
    name: 'payfold_projection_lag_milliseconds',
    help: 'Age of the oldest event that a projection has not applied',
    labelNames: ['projection'],
    registers: [registry],
    async collect() {
      for (const projection of [...services.readModels.all(), ...Object.values(services.reactors)])
        this.set({ projection: projection.name }, (await projection.status()).lagMs);
    },
  });
  new client.Gauge({
    name: 'payfold_open_attempts',
    help: 'Charges and reversals without an outcome, and the age of the oldest in seconds',
    labelNames: ['figure'],
    registers: [registry],
    async collect() {
      const { rows } = await services.pool.query<{ count: string; oldest: string | null }>(
        'select count(*) as count, extract(epoch from now() - min(open_since)) as oldest from payment_list where open_since is not null',
      );
      this.set({ figure: 'count' }, Number(rows[0]!.count));
      this.set({ figure: 'oldest_seconds' }, Number(rows[0]!.oldest ?? 0));
    },
  });
  addWebhookMetrics(registry, services);
  addLedgerMetrics(registry, services);
  new client.Gauge({
    name: 'payfold_checkout_unfinished',
    help: 'Hosted checkouts whose attempt has no outcome yet, and the age of the oldest in seconds',
    labelNames: ['figure'],
    registers: [registry],
    async collect() {
      const { rows } = await services.pool.query<{ count: string; oldest: string | null }>(
        'select count(*) as count, extract(epoch from now() - min(since)) as oldest from checkout_unfinished',
      );
      this.set({ figure: 'count' }, Number(rows[0]!.count));
      this.set({ figure: 'oldest_seconds' }, Number(rows[0]!.oldest ?? 0));
    },
  });
  return {
    answered: ({ method, route, status, seconds: took }) => seconds.observe({ method, route, status: String(status) }, took),
    listen: (port) =>
      new Promise((resolve, reject) => {
        const server = createServer((request, response) => {
          if (request.method !== 'GET' || request.url !== '/metrics') {
            response.writeHead(404).end();
            return;
          }
          registry.metrics().then(
            (text) => response.writeHead(200, { 'content-type': registry.contentType }).end(text),
            () => response.writeHead(503).end(),
          );
        });
        server.once('error', reject).listen(port, LOOPBACK, () => resolve(server));
      }),
  };
};

const ATTEMPT_BUCKETS_SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10];

const addWebhookMetrics = (registry: client.Registry, { webhooks, reactors, pool }: Services): void => {
  const registers = [registry];
  const attempts = new client.Counter({
    name: 'payfold_webhook_attempts_total',
    help: 'Attempts to deliver a webhook, by outcome',
    labelNames: ['outcome'],
    registers,
  });
  const seconds = new client.Histogram({
    name: 'payfold_webhook_attempt_seconds',
    help: 'Duration of attempts to deliver a webhook',
    buckets: ATTEMPT_BUCKETS_SECONDS,
    registers,
  });
  const leases = new client.Counter({
    name: 'payfold_webhook_lease_lost_total',
    help: 'Webhook deliveries whose worker was lost, or ended too late',
    registers,
  });
  webhooks.watch({
    attempted: ({ outcome, seconds: took }) => {
      attempts.inc({ outcome });
      seconds.observe(took);
    },
    leaseLost: () => leases.inc(),
  });
  // One look for the three of a scrape.
  let look: ReturnType<typeof deliveryFigures> | null = null;
  const figures = () => (look ??= deliveryFigures(pool).finally(() => (look = null)));
  new client.Gauge({
    name: 'payfold_webhook_oldest_due_seconds',
    help: 'How long the oldest webhook delivery has been due that its endpoint could have had',
    registers,
    async collect() {
      this.set((await figures()).oldestDueSeconds);
    },
  });
  new client.Gauge({
    name: 'payfold_webhook_held',
    help: 'Webhook deliveries that wait for staff',
    registers,
    async collect() {
      this.set((await figures()).open.held);
    },
  });
  new client.Gauge({
    name: 'payfold_webhook_deliveries',
    help: 'Webhook deliveries that are open, by state',
    labelNames: ['state'],
    registers,
    async collect() {
      for (const [state, count] of Object.entries((await figures()).open)) this.set({ state }, count);
    },
  });
  new client.Gauge({
    name: 'payfold_webhook_outbox_lag_events',
    help: 'Events of all streams that the webhook outbox has not looked at; absent where positions do not count events',
    registers,
    async collect() {
      const { lagEvents } = await reactors.webhookOutbox.status();
      if (lagEvents === null) this.remove();
      else this.set(lagEvents);
    },
  });
};

const addLedgerMetrics = (registry: client.Registry, { reactors, pool }: Services): void => {
  const registers = [registry];
  let look: ReturnType<typeof driftFigures> | null = null;
  const figures = () => (look ??= driftFigures(pool).finally(() => (look = null)));
  new client.Gauge({
    name: 'payfold_drift_differences',
    help: 'Payments, by kind, that are shown otherwise than their events say; any is a fault, or tampering',
    registers,
    async collect() {
      this.set((await figures()).differences);
    },
  });
  new client.Gauge({
    name: 'payfold_drift_last_run_seconds',
    help: 'How long ago the continuous comparison last came to the end of all payments; absent before the first time',
    registers,
    async collect() {
      const { lastRunSeconds } = await figures();
      if (lastRunSeconds === null) this.remove();
      else this.set(lastRunSeconds);
    },
  });
  new client.Gauge({
    name: 'payfold_seal_lag_seconds',
    help: 'Age of the oldest event that is not in the sealed log',
    registers,
    async collect() {
      this.set((await reactors.logSeal.status()).lagMs / 1_000);
    },
  });
  new client.Gauge({
    name: 'payfold_seal_unsigned_events',
    help: 'Sealed events that no signed head covers yet',
    registers,
    async collect() {
      this.set(await unsignedEvents(pool));
    },
  });
  new client.Gauge({
    name: 'payfold_suspense_cents',
    help: 'Settled money that nobody has explained yet, in cents, of all merchant accounts',
    registers,
    async collect() {
      this.set(await suspenseCents(pool));
    },
  });
};

/** Waits for `work`, but no longer than requests in flight may take. */
export const drained = (work: Promise<unknown>): Promise<unknown> => Promise.race([work, new Promise((wake) => setTimeout(wake, DRAIN_MS).unref())]);

/** Start, metrics endpoint and stop of a process, for every role. */
import { setMaxListeners } from 'node:events';
import { createServer, type Server } from 'node:http';
import client, { type MetricObjectWithValues, type MetricValue, type Registry } from 'prom-client';
import { Unavailable } from '#eventstore';
import { type Config, ConfigError, createLogger, type Logger, maskedLines, NotOurs, readConfig, DatabaseUnavailable } from '#platform';
import type { Health, HealthReport } from './health.js';
import { refuseMemoryDumps, takeInspectorSignal } from './memory-guard.js';
import { whenNpmIsGone } from './npm-parent.js';

/** At a stop, requests in flight may take this long. Their own deadline is 28 s. */
const DRAIN_MS = 35_000;
/** At a stop, loops and connections may take this long. A database that does not answer would hold each statement for its time limit. */
const CLOSE_MS = 5_000;
const FORCE_AFTER_MS = 50_000;
/** The wait before a stop, in which a load balancer sees that the process is not ready. The sandbox has no load balancer. */
const PRE_STOP_MS = { production: 5_000, sandbox: 0 } as const;
/** At a stop, clients with open connections have this long to receive one more answer, which asks them to close the connection. */
export const CLOSE_GRACE_MS = 1_000;

/** The addresses of a role. */
export interface Addresses {
  readonly url: string;
  readonly auditUrl: string;
}

export interface Running {
  /** Undefined for a worker. */
  readonly addresses?: Addresses;
  /** The metrics of this process. It serves them on `METRICS_PORT`, or sends them to its parent process. */
  readonly metrics?: { readonly own: Registry; readonly shared: Registry };
  /** Only for a worker: makes the sandbox's first account if there is none. */
  readonly firstAccount?: () => Promise<FirstAccount | null>;
  /** Its answers stand beside the metrics. Before `stop`, it is made to report that the process is not ready. */
  readonly health?: Health;
  /** Stops everything, in order. */
  stop(): Promise<void>;
}

/** The first account, as `npm start` shows it. */
export interface FirstAccount {
  readonly apiKey: string;
  readonly portalId: string;
  /** Signs hosted checkout. null: an earlier start, which was interrupted, made the portal. */
  readonly signingSecret: string | null;
}

/** The argument that `npm start` gives to its child processes begins with this text. The parent's id follows. */
export const SUPERVISED = '--supervised=';
type Figures = readonly MetricObjectWithValues<MetricValue<string>>[];
/** Questions that a parent process may ask a role. */
export interface Answers {
  ownMetrics: Figures;
  sharedMetrics: Figures;
  firstAccount: FirstAccount | null;
  ready: HealthReport;
  /** As `ready`, also before `open`. */
  checked: HealthReport;
  /** Tells the role that the start of the service is complete. A supervised API reports that it is ready only after this. */
  open: null;
}
export interface Question {
  readonly id: number;
  readonly ask: keyof Answers;
}
export interface Answer {
  readonly id: number;
  readonly answer?: unknown;
  readonly error?: string;
}
/**
 * Messages of a role to its parent, over the channel of `fork`. The first message says that the role is ready, or why it did not start. All later
 * messages answer questions.
 */
export type FromChild = { readonly ready: Partial<Addresses> } | { readonly refused: string } | Answer;

export interface StartOptions {
  /** The id of the parent. null: the role runs by itself. */
  readonly supervisor: string | null;
  /** Aborts when the role must end. A start that is under way then stops everything that it has started. */
  readonly stop: AbortSignal;
}

/**
 * Runs a role: reads the configuration, starts the role, and stops it on SIGTERM, SIGINT or SIGHUP (a closed terminal), or when the
 * npm that runs it has ended. If the start fails, the
 * process prints one line and ends with code 1. A second signal, or a shutdown of more than 50 s, ends the process at once.
 *
 * With {@link SUPERVISED}, the role ends only if its parent sends SIGTERM or is gone. It ignores Ctrl-C, because the parent stops its children in
 * order. The role's output and metrics go to the parent.
 */
export const runRole = (name: string, start: (config: Config, log: Logger, options: StartOptions) => Promise<Running>): void => {
  const supervisor = process.argv.find((argument) => argument.startsWith(SUPERVISED))?.slice(SUPERVISED.length) ?? null;
  const supervised = supervisor !== null;
  let stopping = false;
  const stopStart = new AbortController();
  // Each wait of a start may add a listener to this signal.
  setMaxListeners(0, stopStart.signal);
  const run = async (): Promise<void> => {
    const config = readConfig();
    const log = createLogger(config.logLevel, name);
    if (config.environment === 'production') {
      takeInspectorSignal(log);
      refuseMemoryDumps();
    }
    let starting: Promise<Running | null> = Promise.resolve(null);
    const stop = (code: number) => {
      if (stopping && supervised) return;
      if (stopping) process.exit(1);
      stopping = true;
      setTimeout(() => process.exit(1), FORCE_AFTER_MS).unref();
      stopStart.abort();
      const finish = async () => {
        // A start that is under way stops everything that it has started, such as a database.
        const running = await starting.catch(() => null);
        running?.health?.drain();
        const orphaned = supervised && !process.connected;
        await new Promise((wake) => setTimeout(wake, running?.addresses && !orphaned ? PRE_STOP_MS[config.environment] : 0));
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
    process.on('SIGTERM', () => stop(0));
    for (const signal of ['SIGINT', 'SIGHUP'] as const) process.on(signal, () => supervised || stop(0));
    if (supervised) process.on('disconnect', () => stop(0));
    else whenNpmIsGone(() => stopping || stop(0));
    // After an uncaught error, the state of the process cannot be trusted. The process finishes the requests in flight and ends.
    for (const fault of ['unhandledRejection', 'uncaughtException'] as const)
      process.on(fault, (error: unknown) => {
        log.fatal({ err: error, fault }, 'an error that nobody caught');
        if (!stopping) stop(1);
      });
    // If the reader of our output is gone, writing fails. This failure must not stop payments.
    for (const output of [process.stdout, process.stderr]) output.on('error', () => undefined);
    // The parent may be gone already.
    if (supervised && !process.connected) return stop(0);
    const begun = start(config, log, { supervisor, stop: stopStart.signal });
    starting = begun;
    const running = await begun;
    if (supervised) return answerParent(running);
    const { metrics, health, addresses } = running;
    if (metrics && health)
      await serveMetrics(config.metricsPort, {
        metrics: async () => client.Registry.merge([metrics.own, metrics.shared]),
        live: () => health.live(),
        ready: () => health.ready(),
      });
    process.stdout.write(`ready ${addresses?.url ?? name}\n`);
  };
  run().catch((error: unknown) => {
    // The start failed because of a requested stop. This is no fault.
    if (stopping) return;
    const line = clearLine(error);
    if (supervised) return tellParent({ refused: line }, () => process.exit(1));
    process.stderr.write(`${line}\n`);
    process.exit(1);
  });
};

/** If the parent is gone, sends nothing. The event `disconnect` then ends the process. */
const tellParent = (message: FromChild, done: () => void = () => undefined): void => {
  if (process.connected) process.send!(message, undefined, undefined, done);
  else done();
};

const answerParent = ({ addresses, metrics, health, firstAccount }: Running): void => {
  const known: { readonly [Name in keyof Answers]: (() => Promise<Answers[Name]>) | undefined } = {
    ownMetrics: metrics && (() => metrics.own.getMetricsAsJSON()),
    sharedMetrics: metrics && (() => metrics.shared.getMetricsAsJSON()),
    firstAccount,
    ready: health && (() => health.ready()),
    checked: health && (() => health.checked()),
    open: async () => (health?.open(), null),
  };
  process.on('message', ({ id, ask }: Question) => {
    known[ask]!().then(
      (answer) => tellParent({ id, answer }),
      (error: unknown) => tellParent({ id, error: error instanceof Error ? error.message : String(error) }),
    );
  });
  tellParent({ ready: addresses ?? {} });
};

/** The text for an error that ended the start: the message of an outside error, such as a port in use, or the stack of our own fault. */
const clearLine = (error: unknown): string => {
  if (error instanceof ConfigError || error instanceof NotOurs) return error.message;
  // The error holds one error for each address that was tried.
  if (error instanceof AggregateError && error.errors.length > 0) return clearLine(error.errors[0]);
  if (!(error instanceof Error)) return String(error);
  const { code, syscall, address, port } = error as NodeJS.ErrnoException & { address?: string; port?: number };
  if (code === 'EADDRINUSE') return `port ${port} of ${address} is in use; set PORT, AUDIT_PORT, METRICS_PORT or SIMULATOR_PORT to a free one`;
  if (code !== undefined && syscall !== undefined) return error.message;
  // A code of five characters is an SQLSTATE. Errors of the database and of an unreachable event store are clear without a stack.
  if (error.constructor === Error || error instanceof Unavailable || error instanceof DatabaseUnavailable || /^[0-9A-Z]{5}$/.test(code ?? ''))
    return error.message;
  return error.stack ?? error.message;
};

/** Counts the log lines of this process in which a card number was masked. Each such line is a fault. */
export const countMaskedLines = (registry: Registry): void => {
  new client.Gauge({
    name: 'payfold_log_lines_masked_total',
    help: 'Log lines in which something like a card number had to be masked; any is a fault',
    registers: [registry],
    collect() {
      this.set(maskedLines.count);
    },
  });
};

const LOOPBACK = '127.0.0.1';

/** What the metrics listener answers. */
export interface Watched {
  metrics(): Promise<Registry>;
  live(): HealthReport;
  ready(): Promise<HealthReport>;
}

/**
 * Serves `/metrics`, `/healthz` and `/readyz` on loopback. Clients of the API cannot fill this listener. Answers 503 if the figures or the report
 * cannot be made.
 */
export const serveMetrics = (port: number, watched: Watched): Promise<Server> => {
  const report = (health: HealthReport) => ({ status: health.ok ? 200 : 503, type: 'application/json; charset=utf-8', text: JSON.stringify(health) });
  const answers: Readonly<Record<string, () => Promise<{ status: number; type: string; text: string }>>> = {
    '/metrics': async () => {
      const registry = await watched.metrics();
      return { status: 200, type: registry.contentType, text: await registry.metrics() };
    },
    '/healthz': async () => report(watched.live()),
    '/readyz': async () => report(await watched.ready()),
  };
  return new Promise((resolve, reject) => {
    const server = createServer((request, response) => {
      // A proxy may take the first of two, and this process the last (RFC 9112, 3.2).
      if ((request.headersDistinct.host?.length ?? 0) > 1) {
        response.writeHead(400, { connection: 'close' }).end();
        return;
      }
      const answer = request.method === 'GET' && Object.hasOwn(answers, request.url!) ? answers[request.url!]! : null;
      if (!answer) {
        response.writeHead(404).end();
        return;
      }
      answer().then(
        ({ status, type, text }) => response.writeHead(status, { 'content-type': type }).end(text),
        () => response.writeHead(503).end(),
      );
    });
    server.once('error', reject).listen(port, LOOPBACK, () => resolve(server));
  });
};

/** Waits for `work`, but at most `ms`. */
const atMost = async (work: Promise<unknown>, ms: number): Promise<void> => {
  await Promise.race([work, new Promise((wake) => setTimeout(wake, ms).unref())]);
};

/** Waits for requests in flight, but at most {@link DRAIN_MS}. */
export const drained = (work: Promise<unknown>): Promise<void> => atMost(work, DRAIN_MS);

/** Waits for loops and connections that end, but at most {@link CLOSE_MS}. What is left is abandoned, as with `kill -9`: the next process goes on. */
export const closed = (work: Promise<unknown>): Promise<void> => atMost(work, CLOSE_MS);

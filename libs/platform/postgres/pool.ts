/** Connections to Postgres: makes pools, and runs transactions. */
import pg from 'pg';
import { systemClock } from '#kernel';
import { isReadOnly, typedError } from './errors.js';
import { databaseAnswered } from './outage.js';

export type Pool = pg.Pool;
export type Client = pg.PoolClient;
/** Anything that runs a statement: a pool, or a client inside a transaction. */
export type Queryable = Pick<pg.Pool, 'query'>;

const STATEMENT_TIMEOUT_MS = 10_000;
const LOCK_TIMEOUT_MS = 10_000;
const IDLE_IN_TRANSACTION_MS = 60_000;

/** For `types` of a query: every column arrives as the text that Postgres sends, without the cost of parsing. */
export const ALL_AS_TEXT = { getTypeParser: () => (value: string) => value } as unknown as pg.CustomTypesConfig;

/** A server that hangs does not enforce the statement timeout. Our own timer ends the wait this long after that timeout. */
const QUERY_TIMEOUT_MARGIN_MS = 1_000;

/** The longest wait for a connection, including the time in the pool's queue. After this time the database counts as unavailable. */
const CONNECT_TIMEOUT_MS = 3_000;

export interface PoolOptions {
  /** Shown in `pg_stat_activity`. */
  readonly name: string;
  readonly max: number;
  /** Time limit of one statement. 0: none. Default 10 s. */
  readonly statementTimeoutMs?: number;
  readonly lockTimeoutMs?: number;
  /** Schemas in which tables are looked up, in order. Default `public`. Never pass names from a request. */
  readonly searchPath?: readonly string[];
  /**
   * `off`: a commit does not wait for the disk, and a crash of the database may lose the commit. Only for data that can be made again. Default `on`.
   */
  readonly synchronousCommit?: 'on' | 'off';
  /**
   * True: turns off scans of whole tables, because every statement on this pool finds its rows through an index. A connection keeps the plan of a
   * statement. A plan from the time when the table was empty would scan the whole table later.
   */
  readonly byKey?: boolean;
  /** True: a connection only waits for notifications. So it may end at any time. */
  readonly listens?: boolean;
  /** Runs on each new connection before its first use. If it throws, the connection is closed and the caller gets the error. */
  readonly verify?: (connection: Queryable) => Promise<void>;
}

/** The kinds of scans and joins that a pool with `byKey` does without. */
const BY_KEY = ['enable_seqscan', 'enable_hashjoin', 'enable_mergejoin'];

/** Makes a pool. A bigint arrives as text, so cents and positions stay exact. JIT is off, because it costs milliseconds on short statements. */
export const createPool = (url: string, options: PoolOptions): Pool => {
  const { statementTimeoutMs = STATEMENT_TIMEOUT_MS, verify } = options;
  const settings = [
    '-c jit=off',
    `-c statement_timeout=${statementTimeoutMs}`,
    `-c lock_timeout=${options.lockTimeoutMs ?? LOCK_TIMEOUT_MS}`,
    `-c synchronous_commit=${options.synchronousCommit ?? 'on'}`,
    `-c idle_in_transaction_session_timeout=${IDLE_IN_TRANSACTION_MS}`,
    '-c timezone=UTC',
    ...(options.searchPath ? [`-c search_path=${options.searchPath.join(',')}`] : []),
    ...(options.byKey ? BY_KEY.map((setting) => `-c ${setting}=off`) : []),
  ];
  const pool = new pg.Pool({
    connectionString: url,
    application_name: `payfold ${options.name}`,
    max: options.max,
    connectionTimeoutMillis: CONNECT_TIMEOUT_MS,
    ...(statementTimeoutMs > 0 ? { query_timeout: statementTimeoutMs + QUERY_TIMEOUT_MARGIN_MS } : {}),
    options: settings.join(' '),
    keepAlive: true,
    ...(verify && { verify: (client, done) => void verify(client).then(() => done(), done) }),
  });
  // Without a listener, an idle connection that dies would end the process. The next query replaces the connection.
  pool.on('error', () => undefined);
  pool.on('remove', (client) => connections.delete(client));
  pool.on('connect', (client) => {
    connections.set(client, { pool, url, openedAt: systemClock.monotonic(), listens: options.listens === true });
    // A connection in use needs a listener too. After its statement has failed, a broken connection may emit another error.
    client.on('error', () => undefined);
    client.query = withTypedErrors(client.query.bind(client), (error) => {
      if (!isReadOnly(error)) return;
      void client.end();
      replaceConnections(url);
    });
  });
  // The pool drops an ended client at its release.
  pool.on('release', (_, client) => isStale(client) && void client.end());
  pool.connect = withTypedErrors(pool.connect.bind(pool));
  pool.query = withTypedErrors(pool.query.bind(pool), (error) => isReadOnly(error) && replaceConnections(url));
  return pool;
};

interface Connection {
  readonly pool: Pool;
  readonly url: string;
  /** On the monotonic clock, as all times here. */
  readonly openedAt: number;
  readonly listens: boolean;
}

/** All open connections of this process. */
const connections = new Map<Client, Connection>();

/** Ends every connection of the pool. The pool opens new ones. */
export const endConnections = (pool: Pool): void => {
  for (const [client, connection] of connections) if (connection.pool === pool) void client.end();
};

/** When a server last refused a write because it only reads, by address. */
const readOnlySince = new Map<string, number>();
/** Connections are replaced at most once in this time. Otherwise each read would open a new connection while the server takes no writes. */
const REPLACE_EVERY_MS = 1_000;
/** A failover may end this long after the last refused write. Connections that were opened meanwhile are replaced after this time. */
const FAILOVER_ENDS_MS = 5_000;

/**
 * Replaces all connections to the address, also those that only read. They lead to a server that takes no writes, and the address may lead to another
 * server now. A connection in use is replaced at its release.
 */
const replaceConnections = (url: string): void => {
  const now = systemClock.monotonic();
  if (now - (readOnlySince.get(url) ?? Number.NEGATIVE_INFINITY) < REPLACE_EVERY_MS) return;
  readOnlySince.set(url, now);
  const all = [...connections].filter(([, connection]) => connection.url === url);
  for (const [client, { listens }] of all) if (listens) void client.end();
  for (const pool of new Set(all.map(([, connection]) => connection.pool)))
    for (let { idleCount } = pool; idleCount > 0; idleCount--)
      pool.connect().then(
        (client) => client.release(),
        () => undefined,
      );
};

/** True if the connection may lead to the former server of a failover. */
const isStale = (client: Client): boolean => {
  const { url, openedAt } = connections.get(client)!;
  const since = readOnlySince.get(url) ?? Number.NEGATIVE_INFINITY;
  const endsAt = since + FAILOVER_ENDS_MS;
  return openedAt <= since || (openedAt <= endsAt && systemClock.monotonic() > endsAt);
};

/**
 * Wraps a function so that its promise rejects with the error types of `errors.ts`. Returns a result that is not a promise, such as a stream,
 * unchanged.
 */
const withTypedErrors = <Call>(call: Call & ((...given: unknown[]) => unknown), onError?: (error: unknown) => void): Call =>
  ((...given: unknown[]) => {
    const result = call(...given);
    if (!(result instanceof Promise)) return result;
    return result.then(
      (answer: unknown) => {
        databaseAnswered();
        return answer;
      },
      (error: unknown) => {
        onError?.(error);
        throw typedError(error);
      },
    );
  }) as Call;

/**
 * Prepares a connection for work over the whole history: no time limit of a statement or of a pause within a transaction, neither in the server nor in
 * the driver, and every kind of scan and join. Close the connection after use with `release(true)`, so that no other user gets it.
 */
export const withoutLimits = async (client: Client): Promise<void> => {
  (client as unknown as { connectionParameters: { query_timeout: number } }).connectionParameters.query_timeout = 0;
  await client.query(
    `set statement_timeout = 0; set idle_in_transaction_session_timeout = 0; ${BY_KEY.map((setting) => `set ${setting} = on`).join('; ')}`,
  );
};

/** Runs `work` on a connection {@link withoutLimits}, and closes it. For commands of staff only: no API request may run without a time limit. */
export const onUnlimited = async <T>(pool: Pool, work: (client: Client) => Promise<T>): Promise<T> => {
  const client = await pool.connect();
  try {
    await withoutLimits(client);
    return await work(client);
  } finally {
    client.release(true);
  }
};

/** Runs `work` in one transaction. Commits if `work` returns, and rolls back if it throws. A broken connection is closed. */
export const transaction = async <T>(pool: Pool, work: (client: Client) => Promise<T>): Promise<T> => {
  const client = await pool.connect();
  let broken: Error | undefined;
  const onError = (error: Error) => (broken = error);
  client.on('error', onError);
  try {
    return await transactionOn(client, work, onError);
  } finally {
    client.off('error', onError);
    client.release(broken);
  }
};

/** As {@link transaction}, on a connection of the caller. `onError` gets the error if the rollback fails. */
export const transactionOn = async <T>(client: Client, work: (client: Client) => Promise<T>, onError?: (error: Error) => void): Promise<T> => {
  try {
    await client.query('begin');
    const result = await work(client);
    // If a statement failed and `work` did not throw, Postgres rolls back at the commit and reports no error.
    if ((await client.query('commit')).command === 'ROLLBACK')
      throw new Error('the error of a statement was swallowed: the transaction was rolled back');
    return result;
  } catch (error) {
    await client.query('rollback').catch((failure: Error) => onError?.(failure));
    throw error;
  }
};

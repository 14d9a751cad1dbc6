/**
 * Event stores that can be exchanged, emptied and put back to an earlier copy: the double in this process, or real servers.
 *
 * `KURRENTDB_NODE` is a shell command that runs a real node in the foreground until SIGTERM. Its arguments are a folder, the number of the node (from
 * 1), and the ports of all nodes of its cluster. The node keeps everything in that folder, under `node` and its number.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { copyFile, cp, mkdir, mkdtemp, readdir, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { basename, dirname, join, relative } from 'node:path';
import { type EventStore, INSTALLATION_STREAM, installationEvents, openEventStore, type Position } from '#eventstore';
import { freePort } from '#platform';
import { eventually } from '../support/eventually.js';
import { KurrentDbDouble } from '../support/kurrentdb-double.js';

const { KURRENTDB_NODE } = process.env;
/** False: no command for a real server is set. Specs that need one do not run. */
export const hasRealNodes = KURRENTDB_NODE !== undefined;

/** One server with its own log. */
export interface Node {
  readonly port: number;
  /** `kill -9`. */
  stop(): Promise<void>;
}

/** The log of a node at one moment. */
export interface Copy {
  /** Starts a new server that has this log. */
  start(): Promise<Node>;
}

export interface Nodes {
  readonly name: string;
  empty(): Promise<Node>;
  /** Copies the log of a running node. */
  copy(node: Node): Promise<Copy>;
  end(): Promise<void>;
}

export const urlOf = (...ports: readonly number[]): string =>
  `kurrentdb://${ports.map((port) => `127.0.0.1:${port}`).join(',')}?tls=false&tlsVerifyCert=false`;

const silent = { warn: () => undefined, error: () => undefined };

/** Opens a log without the checks of OwnLog, and closes it after `work`. */
export const withLog = async <T>(url: string, work: (store: EventStore) => Promise<T>): Promise<T> => {
  const store = await openEventStore(url, '', silent);
  try {
    return await work(store);
  } finally {
    await store.close();
  }
};

const metaOf = () => ({ recordedAt: new Date().toISOString(), actor: { type: 'system', id: 'another' } as const, correlationId: randomUUID() });

/** Writes the log of another installation into the node, until the log is longer than `end`. */
export const fillAsForeign = async (node: Node, end: Position): Promise<void> => {
  await withLog(urlOf(node.port), async (store) => {
    const installationId = randomUUID();
    const meta = metaOf();
    const created = { type: 'InstallationCreated', data: { installationId, createdAt: meta.recordedAt } } as const;
    await store.append(INSTALLATION_STREAM, 'no_stream', [installationEvents.write(created, installationId, meta)]);
  });
  await fill(node, end);
};

const FILLED_AT_ONCE = 100;

/** Appends events to the log of a node until it is longer than `end`. */
export const fill = (node: Node, end: Position): Promise<void> =>
  withLog(urlOf(node.port), async (store) => {
    for (let head = await store.head(); head === null || head <= end; head = await store.head())
      await store.append(
        `payment-${randomUUID()}`,
        'no_stream',
        Array.from({ length: FILLED_AT_ONCE }, () => ({ id: randomUUID(), type: 'Filler', v: 1, data: { text: 'x'.repeat(500) }, meta: metaOf() })),
      );
  });

// ------------------------------------------------------------------------------------------------------------------------------------

/**
 * The difference in bytes per event between two doubles. The first two values, 137 and 151, are primes, so few positions of the two logs are equal.
 */
const BYTES_APART = 14;

export const doubles = (): Nodes => {
  const started: KurrentDbDouble[] = [];
  const begin = async (double: KurrentDbDouble): Promise<DoubleNode> => {
    started.push(await double.start());
    return { double, port: double.port, stop: async () => double.kill() };
  };
  return {
    name: 'the double',
    empty: () => {
      const double = new KurrentDbDouble();
      // As with real servers, positions of one log are not valid in another one.
      double.bytesPerEvent += started.length * BYTES_APART;
      return begin(double);
    },
    copy: async (node) => {
      const frozen = (node as DoubleNode).double.copy();
      return { start: () => begin(frozen.copy()) };
    },
    end: async () => {
      for (const double of started) double.kill();
    },
  };
};

interface DoubleNode extends Node {
  readonly double: KurrentDbDouble;
}

/** A node usually starts within seconds. A busy machine may need a minute. */
const STARTED_MS = 120_000;

const launchNode = (folder: string, number: number, ports: readonly number[]): ChildProcess =>
  spawn('sh', ['-c', `exec ${KURRENTDB_NODE} "$@"`, 'node', folder, String(number), ...ports.map(String)], { stdio: 'ignore' });

const endOf = async (server: ChildProcess, signal: NodeJS.Signals): Promise<void> => {
  if (server.exitCode !== null || server.signalCode !== null) return;
  const gone = once(server, 'exit');
  server.kill(signal);
  await gone;
};

export const realNodes = (): Nodes => {
  const folders: string[] = [];
  const servers: ChildProcess[] = [];
  const launch = (folder: string, port: number) => {
    const server = launchNode(folder, 1, [port]);
    servers.push(server);
    return server;
  };
  const folderOf = async () => {
    const folder = await mkdtemp(join(tmpdir(), 'payfold-node-'));
    folders.push(folder);
    return folder;
  };
  const begin = async (folder: string): Promise<RealNode> => {
    const port = await freePort();
    const node: RealNode = { port, folder, server: launch(folder, port), stop: () => endOf(node.server, 'SIGKILL') };
    await answering(urlOf(port));
    return node;
  };
  return {
    name: 'a real node',
    empty: async () => begin(await folderOf()),
    copy: async (one) => {
      const node = one as RealNode;
      const folder = await folderOf();
      await backUp(node.folder, folder);
      return {
        start: async () => {
          const mine = await folderOf();
          await cp(folder, mine, { recursive: true });
          // A node that truncates its log at a start ends then.
          await once(launch(mine, await freePort()), 'exit');
          return begin(mine);
        },
      };
    },
    end: async () => {
      for (const server of servers) await endOf(server, 'SIGKILL');
      for (const folder of folders) await rm(folder, { recursive: true, force: true });
    },
  };
};

interface RealNode extends Node {
  readonly folder: string;
  readonly server: ChildProcess;
}

/** The order in which the manual of EventStoreDB copies the files of a running node. */
const BACKUP_ORDER = [/\/index\/.*\.chk$/, /\/index\//, /\.chk$/, /./];

const backUp = async (from: string, to: string): Promise<void> => {
  const files = (await readdir(from, { recursive: true, withFileTypes: true }))
    .filter((file) => file.isFile() && file.name !== 'truncate.chk')
    .map((file) => join(file.parentPath, file.name));
  const rank = (file: string) => BACKUP_ORDER.findIndex((pattern) => pattern.test(file));
  for (const file of files.sort((one, other) => rank(one) - rank(other))) {
    const copy = join(to, relative(from, file));
    await mkdir(dirname(copy), { recursive: true });
    await copyFile(file, copy);
    // The node that starts with the copy truncates its log here.
    if (basename(file) === 'chaser.chk') await copyFile(copy, join(dirname(copy), 'truncate.chk'));
  }
};

const answering = async (url: string): Promise<void> => {
  await eventually(() => withLog(url, async (store) => (await store.head(), true)), { timeoutMs: STARTED_MS, everyMs: 500 });
};

/** Three real nodes of one cluster. The disk of a stopped node can be copied and put back. */
export interface Cluster {
  readonly url: string;
  start(...numbers: readonly number[]): Promise<void>;
  stop(): Promise<void>;
  /** `kill -9` of all nodes. */
  kill(): Promise<void>;
  save(): Promise<(...numbers: readonly number[]) => Promise<void>>;
  end(): Promise<void>;
}

/** Makes a cluster without starting its nodes. */
export const realCluster = async (): Promise<Cluster> => {
  const folder = await mkdtemp(join(tmpdir(), 'payfold-cluster-'));
  const ports = [await freePort(), await freePort(), await freePort()];
  const servers = new Map<number, ChildProcess>();
  const saved: string[] = [];
  const endAll = async (signal: NodeJS.Signals) => {
    await Promise.all([...servers.values()].map((server) => endOf(server, signal)));
  };
  const url = urlOf(...ports);
  return {
    url,
    start: async (...numbers) => {
      for (const number of numbers) servers.set(number, launchNode(folder, number, ports));
      await answering(url);
    },
    stop: () => endAll('SIGTERM'),
    kill: () => endAll('SIGKILL'),
    save: async () => {
      const copy = await mkdtemp(join(tmpdir(), 'payfold-cluster-'));
      saved.push(copy);
      await cp(folder, copy, { recursive: true });
      return async (...numbers) => {
        for (const number of numbers) {
          await rm(join(folder, `node${number}`), { recursive: true, force: true });
          await cp(join(copy, `node${number}`), join(folder, `node${number}`), { recursive: true });
        }
      };
    },
    end: async () => {
      await endAll('SIGKILL');
      for (const one of [folder, ...saved]) await rm(one, { recursive: true, force: true });
    },
  };
};

/**
 * Postgres loses its last transactions: its folder is put back to an earlier copy, or an asynchronous standby is promoted. With the events in
 * Postgres this is fault 7, an incident. With the events in KurrentDB it is fault 3: no event is lost, and the keys are made again from the log.
 */
import { expect } from '@jest/globals';
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { appendFileSync, readdirSync, readFileSync, readlinkSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import pg from 'pg';
import type { Mark } from '#eventstore';
import { freePort, startEmbeddedPostgres } from '#platform';
import { Random } from '../../apps/demo/city.js';
import { startProxy } from '../chaos/proxy.js';
import { eventually } from '../support/eventually.js';
import { kill } from '../support/processes.js';
import { anyKnows, paymentOf, settled } from './exchange.js';
import { Installation } from './installation.js';
import type { Nodes } from './nodes.js';
import { type Create, judgeMoney, Partner } from './partner.js';

/** Copies a folder with the owners and rights of its files. */
const copyFolder = (from: string, to: string): void => {
  rmSync(to, { recursive: true, force: true });
  const { status, stderr } = spawnSync('cp', ['-a', from, to], { encoding: 'utf8' });
  if (status !== 0) throw new Error(stderr);
};

const chargesOf = (truth: Awaited<ReturnType<Installation['bank']['truth']>>): number =>
  truth.filter(({ op, leg, result }) => op === 'charge' && leg !== 'fee' && result === 'approved').length;

/** Fault 7: Postgres is put back to an earlier copy. Five lost creates are sent again under their keys and are not charged again. */
export const playPutBack = async (): Promise<void> => {
  const installation = await Installation.start({ node: null, database: false });
  const partner = new Partner(installation.partner);
  const folder = join(installation.dataDir.data, 'postgres');
  const [earlier, newest] = ['earlier', 'newest'].map((name) => join(installation.dataDir.path, name)) as [string, string];
  try {
    await partner.create();
    await installation.stopService();
    copyFolder(folder, earlier);
    await installation.startService();
    for (let made = 0; made < 5; made++) await partner.create();
    expect(partner.paid).toHaveLength(6);
    await installation.stopService();
    copyFolder(folder, newest);

    copyFolder(earlier, folder);
    const from = Date.now();
    await installation.startService();
    await installation.noticed(from);
    for (const create of partner.creates.slice(1)) {
      expect(await partner.again(create)).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' });
      expect((await partner.find(paymentOf(create))).status).toBe(503);
    }
    expect(await partner.again(partner.creates[0]!)).toMatchObject({ status: 200, replayed: true });
    expect(judgeMoney(await installation.bank.truth(), partner, { from, to: Date.now() })).toEqual([]);
    const refused = await installation.command('log', 'resume', '--by', 'Dana', '--reason', 'too early');
    expect(refused).toMatchObject({ code: 1, stdout: '' });
    expect(refused.stderr).toContain('does not hold everything that it held');
    await installation.stopService();

    // With the newest copy, all payments and keys are there again.
    copyFolder(newest, folder);
    await installation.startService();
    expect(await anyKnows(installation)).toBe(false);
    for (const create of partner.creates) expect(await partner.again(create)).toMatchObject({ status: 200, replayed: true });
    expect(chargesOf(await installation.bank.truth())).toBe(6);
  } finally {
    await installation.remove();
  }
};

const PUT_BACK_TRIES = 20;

/** True if a check had found the intent of the payment before the end. Then the log may be used again only with it. */
const wasConfirmed = (folder: string, paymentId: string): boolean => {
  const texts = (extension: string) =>
    readdirSync(folder).flatMap((name) => (name.endsWith(extension) ? readFileSync(join(folder, name), 'utf8') : []));
  const kept = texts('.intents').flatMap((text) => text.split('\n').filter((line) => line.includes(paymentId)));
  if (kept.length === 0) return true;
  const { mark } = JSON.parse(kept[0]!) as { mark: Mark };
  return texts('.json').some((text) => ((JSON.parse(text) as { confirmed: Mark | null }).confirmed?.position ?? '') >= mark.position);
};

/**
 * Postgres is put back to a copy from before one create, and the marks stay. Only the kept intent tells about the create: the worker stands still, and
 * everything is killed as soon as the create is answered, before a check. Staff close the incident. Then the key names its payment and never charges
 * again.
 */
export const playPutBackAtOnce = async (): Promise<void> => {
  const installation = await Installation.start({ node: null, database: false });
  const partner = new Partner(installation.partner);
  const folder = join(installation.dataDir.data, 'postgres');
  const earlier = join(installation.dataDir.path, 'earlier');
  try {
    await partner.create();
    const all = installation.service.children();
    const isWorker = ({ args }: { readonly args: string }) => args.includes('worker/main.js');
    const signal = (name: NodeJS.Signals, among = all) => among.forEach(({ pid }) => kill(pid, name));
    let lost: Create | null = null;
    // A check may come before everything stands still. Then the next create is tried.
    for (let tries = 1; !lost; tries++) {
      expect(tries).toBeLessThanOrEqual(PUT_BACK_TRIES);
      signal('SIGSTOP', installation.service.children());
      copyFolder(folder, earlier);
      signal(
        'SIGCONT',
        installation.service.children().filter((one) => !isWorker(one)),
      );
      const create = await partner.create();
      signal('SIGSTOP');
      expect(create.sent).toMatchObject([{ status: 200 }]);
      if (!wasConfirmed(join(installation.dataDir.data, 'marks'), paymentOf(create))) lost = create;
    }
    await installation.service.killTree();
    copyFolder(earlier, folder);
    const from = Date.now();
    await installation.startService();
    await installation.noticed(from);
    expect(await partner.again(lost)).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' });
    expect((await partner.find(paymentOf(lost))).status).toBe(503);

    const id = paymentOf(lost);
    const resumed = await installation.command('log', 'resume', '--by', 'Dana', '--reason', 'there is no newer copy', '--json', '--yes');
    expect(resumed).toMatchObject({ code: 0, stderr: '' });
    expect(JSON.parse(resumed.stdout)).toMatchObject({ abandoned: [], lost: [id] });
    await eventually(async () => !(await anyKnows(installation)));
    for (let again = 0; again < 2; again++)
      expect(await partner.again(lost)).toMatchObject({ status: 409, code: 'IDEMPOTENCY_RECONCILIATION_REQUIRED', paymentId: id });
    expect(JSON.parse((await partner.find(id)).text)).toMatchObject({ data: { id, status: 'unknown', amountCents: lost.amountCents } });
    const truth = await installation.bank.truth();
    expect(chargesOf(truth)).toBe(partner.creates.length);
    expect(judgeMoney(truth, partner, { from, to: Date.now() })).toEqual([]);
  } finally {
    await installation.remove();
  }
};

/** Starts a standby of `primary` on a copy of its folder. */
const startStandby = async (folder: string, port: number, primary: { pid: number; port: number; password: string }): Promise<ChildProcess> => {
  const { uid, gid } = statSync(join(folder, 'PG_VERSION'));
  writeFileSync(join(folder, 'standby.signal'), '');
  spawnSync('chown', [`${uid}:${gid}`, join(folder, 'standby.signal')]);
  appendFileSync(
    join(folder, 'postgresql.auto.conf'),
    `primary_conninfo = 'host=127.0.0.1 port=${primary.port} user=payfold password=${primary.password}'\n`,
  );
  const settings = { listen_addresses: '127.0.0.1', unix_socket_directories: '', max_connections: '200', wal_retrieve_retry_interval: '100ms' };
  const args = ['-D', folder, '-p', String(port), ...Object.entries(settings).flatMap(([name, value]) => ['-c', `${name}=${value}`])];
  return spawn(readlinkSync(`/proc/${primary.pid}/exe`), args, { uid, gid, cwd: tmpdir(), stdio: 'ignore' });
};

const ask = async (url: string, sql: string): Promise<unknown> => {
  const client = new pg.Client({ connectionString: url });
  await client.connect();
  try {
    const { rows } = await client.query<{ found: unknown }>(sql);
    return rows[0]?.found;
  } finally {
    await client.end();
  }
};

interface Pair {
  /** The address of the primary. After {@link promote}, the standby has this address. */
  readonly databaseUrl: string;
  /** Cuts the standby off from new data. The primary does not wait for the standby. */
  fallBehind(): void;
  /** Kills the primary and promotes the standby. Returns the time of the promotion. */
  promote(): Promise<number>;
  end(): Promise<void>;
}

/** Starts a primary and its asynchronous standby. */
const startPair = async (): Promise<Pair> => {
  const place = await mkdtemp(join(tmpdir(), 'payfold-standby-'));
  spawnSync('chmod', ['711', place]);
  const [first, second] = [join(place, 'first'), join(place, 'second')];
  const ends: (() => unknown)[] = [() => rm(place, { recursive: true, force: true })];
  const end = async () => {
    for (const one of ends.splice(0).reverse()) await one();
  };
  try {
    const begun = await startEmbeddedPostgres(first);
    await begun.stop();
    copyFolder(first, second);
    const primary = await startEmbeddedPostgres(first, { port: begun.port });
    ends.push(() => primary.stop());
    const password = decodeURIComponent(new URL(primary.adminUrl).password);
    const stream = await startProxy(primary.port, new Random(1));
    ends.push(() => stream.close());
    const port = await freePort();
    const standby = await startStandby(second, port, { pid: primary.pid, port: stream.port, password });
    const gone = once(standby, 'exit');
    ends.push(async () => {
      standby.kill('SIGQUIT');
      await gone;
    });
    const standbyUrl = primary.adminUrl.replace(`:${primary.port}/`, `:${port}/`);
    await eventually(() => ask(standbyUrl, 'select pg_is_in_recovery() as found'));
    await eventually(() => ask(primary.adminUrl, 'select count(*)::int as found from pg_stat_replication'));
    const address = await startProxy(primary.port, new Random(1));
    ends.push(() => address.close());
    return {
      databaseUrl: primary.url.replace(`:${primary.port}/`, `:${address.port}/`),
      fallBehind: () => stream.poison({ kind: 'timeout' }),
      promote: async () => {
        kill(primary.pid);
        await primary.exited;
        stream.heal();
        expect(await ask(standbyUrl, 'select pg_promote() as found')).toBe(true);
        address.leadTo(port);
        return Date.now();
      },
      end,
    };
  } catch (error) {
    await end();
    throw error;
  }
};

export interface PromotionFigures {
  readonly requests: number;
  readonly charges: number;
  readonly secondCharges: number;
  /** Fault 7: the time until each process noticed. Fault 3: the time until every known key was answered again. */
  readonly tookMs: Readonly<Record<string, number>>;
}

/** Fault 7: the primary is killed, and a standby that has fallen behind takes its place. */
export const playPromotion = async (): Promise<PromotionFigures> => {
  const pair = await startPair();
  const ends = [() => pair.end()];
  try {
    const installation = await Installation.start({ node: null, databaseUrl: pair.databaseUrl });
    ends.push(() => installation.remove());
    const partner = new Partner(installation.partner);
    const lost = await fallBehindUnder(partner, pair);
    const from = Date.now();
    const promotedAt = await pair.promote();
    const retrying = Promise.all(lost.map((create) => partner.again(create)));
    const tookMs = await installation.noticed(promotedAt);
    await retrying;
    for (const create of lost) {
      expect(await partner.again(create)).toMatchObject({ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' });
      expect((await partner.find(paymentOf(create))).status).toBe(503);
    }
    expect((await partner.create()).sent).toMatchObject([{ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' }]);
    const truth = await installation.bank.truth();
    const violations = judgeMoney(truth, partner, { from, to: Date.now() });
    expect(violations).toEqual([]);
    return { requests: partner.sent.length, charges: chargesOf(truth), secondCharges: violations.length, tookMs };
  } finally {
    for (const end of ends.reverse()) await end();
  }
};

/** Makes five payments, cuts the standby off, and makes five more. Returns the last five. */
const fallBehindUnder = async (partner: Partner, pair: Pair): Promise<Create[]> => {
  for (let made = 0; made < 5; made++) await partner.create();
  await settled();
  pair.fallBehind();
  for (let made = 0; made < 5; made++) await partner.create();
  await settled();
  expect(partner.paid).toHaveLength(10);
  return partner.creates.slice(5);
};

/** Sends known keys again and again, until each gets a 200 with its first payment. Before that, only the answers of an outage are allowed. */
const retryUntilAnswered = async (partner: Partner, creates: readonly Create[]): Promise<void> => {
  const open = new Set(creates);
  await eventually(
    async () => {
      for (const create of open) {
        const sent = await partner.again(create);
        if (sent.status === 200) {
          expect(sent.paymentId).toBe(paymentOf(create));
          open.delete(create);
        } else expect([null, 409, 503]).toContain(sent.status);
      }
      return open.size === 0;
    },
    { timeoutMs: ANSWERED_MS, everyMs: 200 },
  );
};

/** If the database of a running service is put back, claims stay closed for the lease of a key (60 s). This time limit is longer. */
const ANSWERED_MS = 180_000;

/** Fault 3 with a promotion: known keys are sent again all the time, and staff run no command. */
export const playPromotionUnderKurrentDb = async (nodes: Nodes): Promise<PromotionFigures> => {
  const pair = await startPair();
  const ends = [() => pair.end()];
  try {
    const installation = await Installation.start({ node: await nodes.empty(), databaseUrl: pair.databaseUrl });
    ends.push(() => installation.remove());
    const partner = new Partner(installation.partner);
    await fallBehindUnder(partner, pair);
    const from = Date.now();
    await pair.promote();
    await retryUntilAnswered(partner, partner.creates);
    const tookMs = { answered: Date.now() - from };
    return { ...(await wholeAfter(installation, partner, from)), tookMs };
  } finally {
    for (const end of ends.reverse()) await end();
  }
};

/** Fault 3 at a start: only the database is put back to an earlier copy. Known keys are sent from the first moment. */
export const playPutBackUnderKurrentDb = async (nodes: Nodes): Promise<PromotionFigures> => {
  const installation = await Installation.start({ node: await nodes.empty(), database: false });
  const partner = new Partner(installation.partner);
  const folder = join(installation.dataDir.data, 'postgres');
  const earlier = join(installation.dataDir.path, 'earlier');
  try {
    await partner.create();
    await installation.stopService();
    copyFolder(folder, earlier);
    await installation.startService();
    for (let made = 0; made < 5; made++) await partner.create();
    expect(partner.paid).toHaveLength(6);
    await installation.stopService();
    copyFolder(earlier, folder);
    const from = Date.now();
    await installation.startService();
    await retryUntilAnswered(partner, partner.creates);
    const tookMs = { answered: Date.now() - from };
    return { ...(await wholeAfter(installation, partner, from)), tookMs };
  } finally {
    await installation.remove();
  }
};

/** Checks that there is no incident, that payments work, and that no key was charged twice. */
const wholeAfter = async (installation: Installation, partner: Partner, from: number) => {
  expect(await anyKnows(installation)).toBe(false);
  await eventually(async () => (await partner.create()).sent.at(-1)!.status === 200);
  for (const create of partner.paid) expect((await partner.find(paymentOf(create))).status).toBe(200);
  const truth = await installation.bank.truth();
  // The window is empty. No event was lost, so new requests may be charged at any time.
  const violations = judgeMoney(truth, partner, { from, to: from });
  expect(violations).toEqual([]);
  return { requests: partner.sent.length, charges: chargesOf(truth), secondCharges: violations.length };
};

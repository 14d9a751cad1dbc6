/** Fault 7: events in Postgres. The embedded one is put back to an earlier copy (its folder alone), and an asynchronous standby is promoted. */
import { expect } from '@jest/globals';
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { appendFileSync, readlinkSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import pg from 'pg';
import { freePort, startEmbeddedPostgres } from '#platform';
import { Random } from '../../apps/demo/city.js';
import { startProxy } from '../chaos/proxy.js';
import { eventually } from '../support/eventually.js';
import { kill } from '../support/processes.js';
import { anyKnows, NOTICED_MS, paymentOf, settled } from './exchange.js';
import { Installation } from './installation.js';
import { judgeMoney, Partner } from './partner.js';

/** With owners and rights. */
const copyFolder = (from: string, to: string): void => {
  rmSync(to, { recursive: true, force: true });
  const { status, stderr } = spawnSync('cp', ['-a', from, to], { encoding: 'utf8' });
  if (status !== 0) throw new Error(stderr);
};

const chargesOf = (truth: Awaited<ReturnType<Installation['bank']['truth']>>): number =>
  truth.filter(({ op, leg, result }) => op === 'charge' && leg !== 'fee' && result === 'approved').length;

/** D7. Five acknowledged creates are sent again under their keys: no second charge. */
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

    // With the newest copy everything is there again.
    copyFolder(newest, folder);
    await installation.startService();
    expect(await anyKnows(installation)).toBe(false);
    for (const create of partner.creates) expect(await partner.again(create)).toMatchObject({ status: 200, replayed: true });
    expect(chargesOf(await installation.bank.truth())).toBe(6);
  } finally {
    await installation.remove();
  }
};

/** A server on the folder of another one, which follows it as a standby. */
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

/** The primary is killed under load, and a standby that has fallen behind takes its place. */
export const playPromotion = async (): Promise<Readonly<Record<string, unknown>>> => {
  const place = await mkdtemp(join(tmpdir(), 'payfold-standby-'));
  spawnSync('chmod', ['711', place]);
  const [first, second] = [join(place, 'first'), join(place, 'second')];
  const ends: (() => unknown)[] = [() => rm(place, { recursive: true, force: true })];
  try {
    const begun = await startEmbeddedPostgres(first);
    await begun.stop();
    copyFolder(first, second);
    const primary = await startEmbeddedPostgres(first, { port: begun.port });
    ends.push(() => primary.stop());
    const password = decodeURIComponent(new URL(primary.url).password);
    const stream = await startProxy(primary.port, new Random(1));
    ends.push(() => stream.close());
    const port = await freePort();
    const standby = await startStandby(second, port, { pid: primary.pid, port: stream.port, password });
    const gone = once(standby, 'exit');
    ends.push(async () => {
      standby.kill('SIGQUIT');
      await gone;
    });
    const standbyUrl = primary.url.replace(`:${primary.port}/`, `:${port}/`);
    await eventually(() => ask(standbyUrl, 'select pg_is_in_recovery() as found'));
    await eventually(() => ask(primary.url, 'select count(*)::int as found from pg_stat_replication'));

    const address = await startProxy(primary.port, new Random(1));
    ends.push(() => address.close());
    const installation = await Installation.start({ node: null, databaseUrl: primary.url.replace(`:${primary.port}/`, `:${address.port}/`) });
    ends.push(() => installation.remove());
    const partner = new Partner(installation.partner);
    ends.push(() => partner.stop());
    partner.start();
    await eventually(() => partner.paid.length >= 5);
    // From here on the standby gets nothing more. Nobody waits for it.
    stream.poison({ kind: 'timeout' });
    const before = partner.paid.length;
    await eventually(() => partner.paid.length >= before + 10);
    await partner.stop();
    await settled();
    const lost = partner.paid.slice(before + 5);

    const from = Date.now();
    kill(primary.pid);
    await primary.exited;
    stream.heal();
    expect(await ask(standbyUrl, 'select pg_promote() as found')).toBe(true);
    const exchangedAt = Date.now();
    address.leadTo(port);
    // New connections of every pool lead to the standby.
    const retrying = Promise.all(lost.map((create) => partner.again(create)));
    const noticedMs = await installation.noticed(from);
    expect(Math.max(...Object.values(noticedMs)) - (exchangedAt - from)).toBeLessThan(NOTICED_MS);
    await retrying;
    for (const create of lost) {
      const { status, replayed } = await partner.again(create);
      expect([503, status === 200 && replayed ? 200 : 503]).toContain(status);
      expect([200, 503]).toContain((await partner.find(paymentOf(create))).status);
    }
    expect((await partner.create()).sent).toMatchObject([{ status: 503, code: 'IDEMPOTENCY_UNAVAILABLE', retryAfter: '60' }]);
    const violations = judgeMoney(await installation.bank.truth(), partner, { from, to: Date.now() });
    expect(violations).toEqual([]);
    return { requests: partner.sent.length, charges: chargesOf(await installation.bank.truth()), secondCharges: violations.length, noticedMs };
  } finally {
    for (const end of ends.reverse()) await end();
  }
};

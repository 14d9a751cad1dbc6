/** The rights of the service in the embedded Postgres, and attacks by another user of the machine through its files. */
import { execFileSync, spawnSync } from 'node:child_process';
import { existsSync, readFileSync, readlinkSync } from 'node:fs';
import { chmod, chown, mkdir, mkdtemp, readdir, readFile, rename, rm, stat, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { MIGRATIONS } from '../../../apps/services.js';
import { createPool, type EmbeddedPostgres, migrate, NotOurs, startEmbeddedPostgres } from '../index.js';

const isRoot = process.getuid?.() === 0;
const asRoot = isRoot ? test : test.skip;
const START_MS = 60_000;

/** Nobody but us may enter this folder, as a checkout under /root. */
let closed: string;
let cluster: string;
beforeAll(async () => {
  closed = await mkdtemp(join(tmpdir(), 'payfold-cluster-'));
  await chmod(closed, 0o700);
  cluster = join(closed, 'postgres');
  await writeFile(join(closed, 'master.key'), 'a secret', { mode: 0o600 });
});
afterAll(() => rm(closed, { recursive: true, force: true }));

const ask = async (url: string, sql: string): Promise<Record<string, unknown>[]> => {
  const pool = createPool(url, { name: 'spec', max: 1 });
  try {
    return (await pool.query<Record<string, unknown>>(sql)).rows;
  } finally {
    await pool.end();
  }
};
const codeOf = (url: string, sql: string): Promise<unknown> => ask(url, sql).then(() => 'allowed', (error: unknown) => (error as { code?: string }).code); // prettier-ignore
const withServer = async <T>(work: (server: EmbeddedPostgres) => Promise<T>, folder = cluster): Promise<T> => {
  const server = await startEmbeddedPostgres(folder);
  try {
    return await work(server);
  } finally {
    await server.stop();
  }
};

describe('the role of the service', () => {
  let server: EmbeddedPostgres;
  beforeAll(async () => {
    server = await startEmbeddedPostgres(cluster);
  }, START_MS);
  afterAll(() => server.stop());

  test.each([
    ['a program of the host', `copy (select 1) to program 'true'`],
    ['a file of the host, written', `copy (select 1) to '/tmp/payfold-spec-leak'`],
    ['a file of the host, read', `select pg_read_file('postgresql.conf')`],
    ['a folder of the host', `select pg_ls_dir('.')`],
    ['a large object of a file', `select lo_import('/etc/hostname')`],
    ['a role', 'create role another'],
    ['a database', 'create database another'],
    ['a setting of the server', `alter system set log_statement = 'all'`],
    ['to be the superuser', 'set role payfold'],
    ['the passwords of roles', 'select rolpassword from pg_authid'],
    ['a language that reaches files', 'create extension file_fdw'],
  ])('is refused %s', async (_, sql) => expect(['42501', '58P01', '0A000']).toContain(await codeOf(server.url, sql)));
  test('reaches no other database', async () => expect(await codeOf(server.url.replace(/\/payfold$/, '/postgres'), 'select')).toBe('42501'));
  test('has no attribute, and owns its database', async () => {
    const roles = `select rolsuper or rolcreaterole or rolcreatedb or rolreplication or rolbypassrls as more, pg_get_userbyid(datdba) = rolname as owner
      from pg_roles, pg_database where rolname = current_user and datname = current_database()`;
    expect(await ask(server.url, roles)).toEqual([{ more: false, owner: true }]);
    expect(await codeOf(server.url, 'create schema made; create table made.up (id int); drop schema made cascade')).toBe('allowed');
  });
  test('Postgres has no capability, though it may not enter the folder of its data', async () => {
    const status = existsSync(`/proc/${server.pid}/status`) ? readFileSync(`/proc/${server.pid}/status`, 'utf8') : '';
    if (status !== '') for (const set of ['CapInh', 'CapPrm', 'CapEff', 'CapAmb']) expect(status).toMatch(new RegExp(`^${set}:\\t0+$`, 'm'));
    expect((await stat(closed)).mode & 0o777).toBe(0o700);
  });
  asRoot('even its superuser cannot read the master key beside the data', async () =>
    expect(await codeOf(server.adminUrl, `select pg_read_file('${join(closed, 'master.key')}')`)).toBe('42501'),
  );
});

test(
  'a cluster whose service was the superuser is taken over: all that it holds belongs to the role',
  async () => {
    await withServer(async ({ adminUrl }) => {
      const admin = createPool(adminUrl, { name: 'spec', max: 1 });
      await admin.query('alter database payfold owner to payfold; drop owned by payfold_service; drop role payfold_service');
      await migrate(admin, MIGRATIONS);
      await admin.query(`
      create type mood as enum ('good'); create domain cents as bigint; create view seen as select 1 as one; create sequence loose;
      create table with_identity (id bigint generated always as identity, at serial)`);
      await admin.end();
    });
    await withServer(async ({ url }) => {
      const left = `select count(*)::int as left from (
      select relnamespace as place, relowner as owner from pg_class union all select pronamespace, proowner from pg_proc
      union all select typnamespace, typowner from pg_type union all select oid, nspowner from pg_namespace) as all_objects
      join pg_namespace n on n.oid = place where n.nspname !~ '^pg_' and n.nspname not in ('information_schema', 'public') and owner <> current_user::regrole
      or n.nspname = 'public' and owner not in (current_user::regrole, 'pg_database_owner'::regrole)`;
      expect(await ask(url, left)).toEqual([{ left: 0 }]);
      const pool = createPool(url, { name: 'spec', max: 1 });
      await migrate(pool, MIGRATIONS);
      await pool.query(`alter table with_identity add column more int; alter type mood add value 'better'; drop view seen; select nextval('loose')`);
      await pool.end();
    });
  },
  START_MS,
);

const onLinux = process.platform === 'linux' ? test : test.skip;
onLinux(
  'a session that outlives its killed server does not hold up the next start',
  async () => {
    const server = await startEmbeddedPostgres(cluster);
    const pool = createPool(server.url, { name: 'spec', max: 1 });
    const { rows } = await pool.query<{ pid: number }>('select pg_backend_pid() as pid');
    // A stopped process does not notice the end of its server, like a session that waits for a lock of a killed one.
    process.kill(rows[0]!.pid, 'SIGSTOP');
    process.kill(server.pid, 'SIGKILL');
    await server.exited;
    await withServer(async ({ url }) => expect(await ask(url, 'select 1 as one')).toEqual([{ one: 1 }]));
    expect(() => readlinkSync(`/proc/${rows[0]!.pid}/cwd`)).toThrow();
    await pool.end();
  },
  START_MS,
);

describe('what may lie in place of our files', () => {
  const pidFile = () => join(cluster, 'postmaster.pid');
  const victim = () => join(closed, 'victim');
  /** Each must be one line, and must come at once. */
  const refused = async (pattern: RegExp, folder = cluster) => {
    const error: unknown = await startEmbeddedPostgres(folder).then((server) => server.stop(), (failure: unknown) => failure); // prettier-ignore
    expect(error).toBeInstanceOf(NotOurs);
    expect((error as Error).message).toMatch(pattern);
    expect((error as Error).message).not.toContain('\n');
  };

  test('a link as postmaster.pid: nothing is written through it', async () => {
    // The pid of a living process that is no Postgres: the file would be written.
    const text = `${process.pid}\nuntouched\n`;
    await writeFile(victim(), text);
    await symlink(victim(), pidFile());
    await refused(/postmaster\.pid is a link/);
    expect(await readFile(victim(), 'utf8')).toBe(text);
    await rm(pidFile());
  });
  test('a pipe as postmaster.pid: the start does not wait for it', async () => {
    execFileSync('mkfifo', [pidFile()]);
    await refused(/postmaster\.pid is not a file/);
    await rm(pidFile());
  });
  test('a link as PG_VERSION: what it leads to is not repeated', async () => {
    const version = join(cluster, 'PG_VERSION');
    await rename(version, `${version}.kept`);
    await symlink(join(closed, 'master.key'), version);
    await refused(/PG_VERSION is a link/);
    await rm(version);
    await rename(`${version}.kept`, version);
  });
  test('a link as the password', async () => {
    const password = `${cluster}.password`;
    await rename(password, `${password}.kept`);
    await symlink(`${password}.kept`, password);
    await refused(/postgres\.password is a link/);
    await rm(password);
    await rename(`${password}.kept`, password);
  });
  test('a link as the folder of the cluster', async () => {
    const other = join(closed, 'other');
    await symlink(cluster, other);
    await writeFile(`${other}.password`, await readFile(`${cluster}.password`), { mode: 0o600 });
    await refused(/other is a link or no folder/, other);
  });
  test('a link to an empty folder, at a first start: nothing is made', async () => {
    const [empty, linked] = [join(closed, 'empty'), join(closed, 'linked')];
    await mkdir(empty);
    await symlink(empty, linked);
    await refused(/linked is a link/, linked);
    expect((await readdir(closed)).filter((name) => name.startsWith('linked'))).toEqual(['linked']);
  });
  asRoot('a cluster, a password or a folder of another user', async () => {
    const { uid } = await stat(cluster);
    await chown(cluster, 54_321, 54_321);
    await refused(/postgres belongs to uid 54321/);
    await chown(cluster, uid, uid);
    await chown(`${cluster}.password`, 54_321, 54_321);
    await refused(/postgres\.password belongs to another user/);
    await chown(`${cluster}.password`, uid, uid);
    await chown(closed, 54_321, 54_321);
    await refused(/belongs to another user \(uid 54321\)/);
    await chown(closed, 0, 0);
  });
  test(
    'the first start writes the password through no link, and gives nobody the file behind it',
    async () => {
      const first = join(closed, 'first');
      await mkdir(first);
      await writeFile(victim(), 'untouched');
      // A start that was killed leaves a draft. So the password file may be there.
      await mkdir(join(first, 'postgres.new-00000000'));
      await symlink(victim(), join(first, 'postgres.password'));
      await withServer(async ({ url }) => expect(await ask(url, 'select 1 as one')).toEqual([{ one: 1 }]), join(first, 'postgres'));
      expect([await readFile(victim(), 'utf8'), (await stat(victim())).uid]).toEqual(['untouched', process.getuid?.() ?? 0]);
    },
    START_MS,
  );
  asRoot(
    'a draft of a killed start is emptied without following its links',
    async () => {
      const draft = join(closed, 'postgres.new-11111111');
      await mkdir(draft);
      await writeFile(victim(), 'untouched');
      await symlink(closed, join(draft, 'base'));
      spawnSync('chown', ['-hR', 'postgres', draft]);
      await withServer(async () => undefined);
      expect([existsSync(draft), await readFile(victim(), 'utf8')]).toEqual([false, 'untouched']);
    },
    START_MS,
  );
});

/**
 * The Dockerfile and the compose file must agree with the code. No container runs here. The spec compares each name in these files with its
 * definition in the code.
 */
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from '@jest/globals';
import { parse } from 'yaml';
import { readConfig } from '#platform';

const ROOT = new URL('..', import.meta.url).pathname;
const read = (file: string) => readFileSync(join(ROOT, file), 'utf8');

interface Instruction {
  readonly name: string;
  readonly text: string;
}
/** The instructions of a Dockerfile, with continued lines joined and comments removed. */
const instructions = (file: string): Instruction[] =>
  read(file)
    .replace(/^\s*#.*\n/gm, '')
    .replace(/\\\n/g, ' ')
    .split('\n')
    .filter((line) => line.trim() !== '')
    .map((line) => /^(\S+)\s+(.*)$/.exec(line.trim())!)
    .map(([, name, text]) => ({ name: name!.toUpperCase(), text: text! }));

interface Service {
  readonly image?: string;
  readonly build?: { readonly context: string; readonly dockerfile: string };
  readonly command?: readonly string[];
  readonly environment?: Readonly<Record<string, string>>;
  readonly ports?: readonly string[];
  readonly volumes?: readonly string[];
  readonly healthcheck?: object;
  readonly stop_grace_period?: string;
  readonly depends_on?: Readonly<Record<string, { readonly condition: string }>>;
}

const dockerfile = instructions('docker/Dockerfile');
const compose = parse(read('docker/compose.yaml'), { merge: true }) as {
  readonly services: Readonly<Record<string, Service>>;
  readonly volumes: Readonly<Record<string, unknown>>;
};
const ours = Object.entries(compose.services).filter(([, { build }]) => build !== undefined);

const imageEnvironment = Object.fromEntries(
  dockerfile.filter(({ name }) => name === 'ENV').flatMap(({ text }) => text.split(/\s+/).map((pair) => pair.split('=') as [string, string])),
);
const one = (name: string): string => {
  const found = dockerfile.filter((instruction) => instruction.name === name);
  expect(found).toHaveLength(1);
  return found[0]!.text;
};
/** The names of all settings that readConfig reads, collected from a real call. */
const knownNames = (() => {
  const names = new Set<string>();
  readConfig(new Proxy({}, { get: (_, name) => (names.add(String(name)), undefined) }));
  return names;
})();
const isKnown = (name: string) => knownNames.has(name) || name.startsWith('NODE_');
/** The role in a `payfold run` command. */
const roleOf = (command: readonly string[]) => {
  const role = command.at(-1)!;
  // The API has the flags of `npm run start:api`.
  const flags = role === 'api' ? ['--max-semi-space-size=32'] : [];
  expect(command.slice(0, -1)).toEqual(['node', ...flags, 'apps/operator/payfold.mjs', 'run']);
  return role;
};
const isBuilt = (role: string) => existsSync(join(ROOT, `dist/apps/${role}/main.js`));
const config = (name: string) => readConfig({ ...imageEnvironment, ...compose.services[name]!.environment });
const secondsOf = (period: string) => Number(/^(\d+)s$/.exec(period)![1]);

describe('the image', () => {
  test('is built from and runs on Node 24 LTS', () => {
    const bases = dockerfile.filter(({ name }) => name === 'FROM').map(({ text }) => text);
    expect(bases).toHaveLength(2);
    for (const base of bases) expect(base).toMatch(/^node:24-bookworm-slim( AS build)?$/);
  });

  test('runs not as root, and owns its data directory', () => {
    expect(one('USER')).toBe('node');
    const run = dockerfile.findIndex(({ name, text }) => name === 'RUN' && text.includes('chown node:node /data'));
    expect(run).toBeGreaterThan(dockerfile.findLastIndex(({ name }) => name === 'FROM'));
    expect(run).toBeLessThan(dockerfile.findIndex(({ name }) => name === 'USER'));
    expect([one('VOLUME'), imageEnvironment.DATA_DIR]).toEqual(['/data', '/data']);
  });

  test('has a program that the service cannot change', () => {
    expect(dockerfile.filter(({ name, text }) => name === 'COPY' && text.includes('--chown'))).toEqual([]);
  });

  test('is healthy while the address beside the metrics answers', () => {
    const [, command] = /CMD (\[.*\])$/.exec(one('HEALTHCHECK'))!;
    expect((JSON.parse(command!) as string[]).slice(0, 2)).toEqual(['node', '-e']);
    expect(command).toContain('${process.env.METRICS_PORT}/healthz');
    expect(Object.keys(imageEnvironment)).toContain('METRICS_PORT');
    for (const [name, { healthcheck }] of ours) expect([name, healthcheck !== undefined]).toEqual([name, name === 'simulator']);
    expect(JSON.stringify(compose.services.simulator!.healthcheck)).toContain(`:${config('simulator').simulatorPort}/healthz`);
  });

  test('sets only settings that exist, and listens at the address that it names', () => {
    expect(Object.keys(imageEnvironment).filter((name) => !isKnown(name))).toEqual([]);
    expect(imageEnvironment).toMatchObject({ NODE_ENV: 'production', HOST: '0.0.0.0' });
    expect(one('EXPOSE')).toBe(imageEnvironment.PORT);
    expect(() => readConfig(imageEnvironment)).not.toThrow();
  });

  test('copies only existing files, and every file that its command and the command line need', () => {
    for (const { text } of dockerfile.filter(({ name, text }) => name === 'COPY' && !text.startsWith('--from')))
      for (const source of text.split(' ').slice(0, -1)) expect([source, existsSync(join(ROOT, source))]).toEqual([source, true]);
    const copied = dockerfile.filter(({ name, text }) => name === 'COPY' && text.startsWith('--from')).map(({ text }) => text.split(' ').at(-1));
    expect(copied).toEqual([
      './',
      './node_modules',
      './dist/apps',
      './dist/libs',
      './dist/node_modules',
      './apps/operator/payfold.mjs',
      './apps/operator/verify.mjs',
    ]);
    const { bin } = JSON.parse(read('package.json')) as { bin: { payfold: string } };
    expect(copied).toContain(`./${bin.payfold}`);
    for (const { text } of dockerfile.filter(({ name, text }) => name === 'COPY' && text.startsWith('--from')))
      expect([text, existsSync(join(ROOT, text.split(' ').at(-2)!.replace('/app/', '')))]).toEqual([text, true]);
    expect(isBuilt(roleOf(JSON.parse(one('CMD')) as string[]))).toBe(true);
  });

  test('leaves host builds, data and history out of the context', () => {
    const ignored = read('.dockerignore').split('\n');
    for (const name of ['node_modules', 'dist', '.git', '.payfold']) expect(ignored).toContain(name);
  });

  test('keeps the client of KurrentDB, which npm would leave out as a peer that is optional', () => {
    const { peerDependenciesMeta } = JSON.parse(read('package.json')) as { peerDependenciesMeta: Record<string, { optional: boolean }> };
    const { text } = dockerfile.find((instruction) => instruction.name === 'RUN' && instruction.text.includes('npm prune --omit=dev'))!;
    const beforePruning = text.slice(0, text.indexOf('npm prune'));
    for (const peer of Object.keys(peerDependenciesMeta)) {
      expect(beforePruning).toContain(`npm pkg set "dependencies.${peer}=`);
      expect(beforePruning).toContain(`npm pkg delete 'devDependencies.${peer}'`);
    }
  });

  test('has no files of its own in the way of a stop: Node is process 1 and gets SIGTERM', () => {
    expect(one('STOPSIGNAL')).toBe('SIGTERM');
    expect((JSON.parse(one('CMD')) as string[])[0]).toBe('node');
    expect(dockerfile.filter(({ name }) => name === 'ENTRYPOINT' || name === 'SHELL')).toEqual([]);
  });
});

describe('the compose file', () => {
  test('has each role once, and no other of ours', () => {
    expect(ours.map(([name, { command }]) => [name, roleOf(command!)]).sort()).toEqual(['api', 'simulator', 'worker'].map((role) => [role, role]));
  });

  test.each(ours)('%s: its command is built, its environment is known and valid', (_, { command, environment, build }) => {
    expect(isBuilt(roleOf(command!))).toBe(true);
    expect(existsSync(join(ROOT, 'docker', build!.context, build!.dockerfile))).toBe(true);
    expect(Object.keys(environment!).filter((name) => !isKnown(name))).toEqual([]);
    // YAML also has numbers and booleans, but environment values must be strings.
    for (const value of Object.values(environment!)) expect(typeof value).toBe('string');
    expect(() => readConfig({ ...imageEnvironment, ...environment })).not.toThrow();
  });

  test.each(ours)('%s: may take as long to stop as its requests and its own last resort', (_, { stop_grace_period }) => {
    // The process ends itself after at most 50 s (lifecycle.ts).
    expect(secondsOf(stop_grace_period!)).toBeGreaterThan(50);
  });

  test('api and worker share stores, processor and key file', () => {
    const [api, worker] = [config('api'), config('worker')];
    for (const field of ['databaseUrl', 'kurrentdbUrl', 'simulatorUrl', 'dataDir', 'masterKeyFile', 'environment', 'publicUrl'] as const)
      expect(worker[field]).toEqual(api[field]);
    expect(compose.services.worker!.volumes).toEqual(compose.services.api!.volumes);
    expect(compose.services.api!.volumes).toEqual([`payfold:${api.dataDir}`]);
  });

  test('every address is that of a service which listens there', () => {
    const api = config('api');
    const bank = new URL(api.simulatorUrl!);
    expect([bank.hostname, Number(bank.port), config('simulator').host]).toEqual(['simulator', config('simulator').simulatorPort, '0.0.0.0']);
    const database = new URL(api.databaseUrl!);
    const { POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB } = compose.services.postgres!.environment!;
    expect([database.hostname, database.port]).toEqual(['postgres', '5432']);
    expect([database.username, database.password, database.pathname.slice(1)]).toEqual([POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB]);
    const events = new URL(api.kurrentdbUrl!);
    expect([events.hostname, events.port]).toEqual(['kurrentdb', compose.services.kurrentdb!.environment!.KURRENTDB_NODE_PORT]);
  });

  test('publishes the API alone, on loopback, where the API listens and says that it is', () => {
    const published = Object.entries(compose.services).flatMap(([name, { ports = [] }]) => ports.map((port) => [name, port]));
    const { host, port, publicUrl } = config('api');
    expect(published).toEqual([['api', `127.0.0.1:${new URL(publicUrl).port}:${port}`]]);
    expect(host).toBe('0.0.0.0');
  });

  test('waits for its dependencies, and names every volume', () => {
    for (const role of ['api', 'worker'])
      for (const [name, { condition }] of Object.entries(compose.services[role]!.depends_on!))
        expect([name, condition]).toEqual([name, compose.services[name]!.healthcheck ? 'service_healthy' : 'service_started']);
    const used = Object.values(compose.services).flatMap(({ volumes = [] }) => volumes.map((volume) => volume.split(':')[0]!));
    expect([...new Set(used)].sort()).toEqual(Object.keys(compose.volumes).sort());
  });

  test('Postgres keeps parameters of failed statements out of its log (docs/contract.md#card-data)', () => {
    expect(compose.services.postgres!.command).toEqual(
      expect.arrayContaining(['log_min_error_statement=panic', 'log_parameter_max_length_on_error=0']),
    );
  });
});

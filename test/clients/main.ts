/**
 * `npm run clients`: generates clients from the documents of a started sandbox, compiles them strictly, and plays a partner's scenario with each:
 * quote, create, replay, all pages, refund, void, a decline, 400, 401, 404. The generators are installed into a temporary folder. A generator whose
 * tools are not on this machine is skipped by name. Exit 1 if a client fails, or if no TypeScript client was tried.
 */
import { spawnSync } from 'node:child_process';
import { cpSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { DataDir, start, welcomeOf } from '../support/processes.js';
import { writeReport } from '../support/report.js';

const PACKAGES = [
  'openapi-typescript@7.13.0',
  'openapi-fetch@0.17.0',
  '@hey-api/openapi-ts@0.95.0',
  'orval@7.21.0',
  'swagger-typescript-api@13.13.0',
  '@redocly/cli@2.77.0',
  '@stoplight/spectral-cli@6.16.3',
];
/** Its package has the generator itself. Later packages load it from elsewhere. */
const OPENAPI_GENERATOR = '@openapitools/openapi-generator-cli@1.0.18-4.3.1';
/** One step of a generator, in milliseconds. */
const STEP_TIMEOUT_MS = 300_000;

const folder = mkdtempSync(join(tmpdir(), 'payfold-clients-'));
const run = (command: string, args: readonly string[], env: Readonly<Record<string, string>> = {}): string => {
  const { status, stdout, stderr, error } = spawnSync(command, args, {
    cwd: folder,
    env: { ...process.env, ...env },
    encoding: 'utf8',
    timeout: STEP_TIMEOUT_MS,
  });
  if (status !== 0) throw new Error(`${command} ${args.join(' ')}: ${error?.message ?? `exit ${status}`}\n${stdout}\n${stderr}`);
  return stdout;
};
const has = (command: string, args: readonly string[]): boolean => spawnSync(command, args, { stdio: 'ignore' }).status === 0;
const tool = (name: string) => join(folder, 'node_modules', '.bin', name);

interface Generator {
  readonly name: string;
  /** The tool that is missing on this machine. null: none. */
  readonly missing: () => string | null;
  readonly play: (env: Readonly<Record<string, string>>) => void;
}

const typescript = (program: string, generate: () => void) => (env: Readonly<Record<string, string>>) => {
  const config = {
    compilerOptions: {
      strict: true,
      noUncheckedIndexedAccess: true,
      target: 'es2022',
      lib: ['es2023', 'dom', 'dom.iterable'],
      module: 'nodenext',
      outDir: program,
      types: ['node'],
      typeRoots: [join(process.cwd(), 'node_modules', '@types')],
    },
    files: [`${program}.ts`],
  };
  writeFileSync(join(folder, 'tsconfig.json'), JSON.stringify(config));
  // @hey-api/openapi-ts reads the module system from this file.
  generate();
  run(process.execPath, [join(process.cwd(), 'node_modules', 'typescript', 'bin', 'tsc')]);
  run(process.execPath, [join(program, `${program}.js`)], env);
};

const GENERATORS: readonly Generator[] = [
  {
    name: 'redocly lint, spectral:oas',
    missing: () => null,
    play: () => {
      writeFileSync(join(folder, 'rules.yaml'), 'extends: spectral:oas\n');
      for (const document of ['openapi.json', 'openapi-3.0.json']) {
        run(tool('redocly'), ['lint', '--extends', 'recommended', document]);
        run(tool('spectral'), ['lint', '-r', 'rules.yaml', document]);
      }
    },
  },
  {
    name: 'openapi-typescript, openapi-fetch',
    missing: () => null,
    play: typescript('openapi-fetch', () => run(tool('openapi-typescript'), ['openapi.json', '-o', 'generated/openapi.d.ts'])),
  },
  {
    name: '@hey-api/openapi-ts',
    missing: () => null,
    play: typescript('hey-api', () => run(tool('openapi-ts'), ['-i', 'openapi.json', '-o', 'generated/hey'])),
  },
  {
    name: 'orval',
    missing: () => null,
    play: typescript('orval', () => {
      const output = { target: './generated/orval.ts', client: 'fetch' };
      writeFileSync(join(folder, 'orval.config.mjs'), `export default ${JSON.stringify({ payfold: { input: './openapi.json', output } })};\n`);
      run(tool('orval'), ['--config', 'orval.config.mjs']);
    }),
  },
  {
    name: 'swagger-typescript-api',
    missing: () => null,
    play: typescript('swagger-typescript-api', () =>
      run(tool('swagger-typescript-api'), ['generate', '-p', 'openapi.json', '-o', 'generated', '-n', 'swagger-typescript-api.ts']),
    ),
  },
  {
    name: 'openapi-generator 4.3.1, Python',
    missing: () => {
      if (!has('java', ['-version'])) return 'java';
      if (!has('python3', ['-c', 'import urllib3, six, dateutil, certifi'])) return 'python3 with urllib3, six, dateutil and certifi';
      return null;
    },
    play: (env) => {
      run('npm', ['install', '--no-audit', '--no-fund', '--ignore-scripts', '--prefix', 'jar', OPENAPI_GENERATOR]);
      const jar = 'jar/node_modules/@openapitools/openapi-generator-cli/bin/openapi-generator.jar';
      const opens = ['lang', 'util'].flatMap((name) => ['--add-opens', `java.base/java.${name}=ALL-UNNAMED`]);
      run('java', [...opens, '-jar', jar, 'generate', '-g', 'python', '-i', 'openapi-3.0.json', '-o', 'python', '--package-name', 'payfold_client']);
      run('python3', ['openapi_generator.py'], { ...env, PYTHONPATH: join(folder, 'python') });
    },
  },
];

const dataDir = await DataDir.create();
const results: Record<string, string> = {};
try {
  const service = await start('standalone', dataDir);
  const { apiKey, portalId } = welcomeOf(service.stdout())!;
  cpSync(join(process.cwd(), 'test', 'clients', 'programs'), folder, { recursive: true });
  mkdirSync(join(folder, 'generated'));
  for (const name of ['openapi.json', 'openapi-3.0.json']) writeFileSync(join(folder, name), await (await fetch(`${service.url}/${name}`)).text());
  writeFileSync(join(folder, 'package.json'), JSON.stringify({ private: true, type: 'module' }));
  run('npm', ['install', '--no-audit', '--no-fund', '--ignore-scripts', ...PACKAGES]);
  for (const { name, missing, play } of GENERATORS) {
    const absent = missing();
    if (absent !== null) results[name] = `skipped: no ${absent}`;
    else
      try {
        play({ BASE: service.url, API_KEY: apiKey, PORTAL: portalId });
        results[name] = 'passed';
      } catch (error) {
        results[name] = 'failed';
        console.error((error as Error).message);
      }
    console.log(`${name}: ${results[name]}`);
  }
} finally {
  await dataDir.remove();
  rmSync(folder, { recursive: true, force: true });
}
if (Object.values(results).includes('failed') || Object.keys(results).length === 0) process.exitCode = 1;
writeReport('clients', { results });

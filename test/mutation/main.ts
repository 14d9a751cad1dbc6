/**
 * `npm run mutate -- [--only money,auth,…]`: Stryker changes the code one small step at a time, and the specs must notice each change.
 *
 * The code is divided into groups with their own specs. The share of noticed changes and all unnoticed changes go to `reports/`. `docs/proof.md`
 * explains the changes that no spec can notice. Exit 1 if the share is below the floor.
 */
import { existsSync } from 'node:fs';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import type { MutantResult } from '@stryker-mutator/api/core';
import { Stryker } from '@stryker-mutator/core';
import { startEmbeddedPostgres } from '#platform';
import { writeReport } from '../support/report.js';

/** The files to change, and the specs that must notice each change. All these specs run for every change, so a part should have few. */
interface Part {
  readonly mutate: readonly string[];
  readonly specs: readonly string[];
}

const GROUPS: Readonly<Record<string, readonly Part[]>> = {
  money: [
    { mutate: ['libs/kernel/money.ts'], specs: ['libs/kernel/kernel.unit.spec.ts', 'libs/payments/fee.unit.spec.ts'] },
    { mutate: ['libs/payments/fee.ts'], specs: ['libs/payments/fee.unit.spec.ts'] },
    // The spec with random histories is left out. The examples, which name a rule, must notice each change alone.
    { mutate: ['libs/payments/payment.ts', 'libs/payments/payment.view.ts'], specs: ['libs/payments/payment.unit.spec.ts'] },
    { mutate: ['libs/settlement/batch.ts'], specs: ['libs/settlement/batch.unit.spec.ts'] },
  ],
  ledger: [{ mutate: ['libs/ledger/postings.ts', 'libs/ledger/chart.ts'], specs: ['libs/ledger/postings.unit.spec.ts'] }],
  // Random histories tie the register to the journal; examples name the rows of each movement.
  lines: [
    {
      mutate: ['libs/ledger/line-movements.ts', 'libs/ledger/line-postings.ts', 'libs/ledger/line-rows.ts'],
      specs: ['libs/ledger/line-register.unit.spec.ts'],
    },
  ],
  // The journal under the same histories: a mistake in it must break the tie, too.
  'journal-tie': [{ mutate: ['libs/ledger/postings.ts'], specs: ['libs/ledger/line-register.unit.spec.ts'] }],
  tie: [{ mutate: ['libs/audit/tie.ts', 'libs/audit/line-reports.ts'], specs: ['libs/audit/line-reports.int.spec.ts'] }],
  books: [{ mutate: ['libs/ledger/books.ts', 'libs/ledger/days.ts', 'libs/ledger/sums.ts'], specs: ['libs/ledger/books.int.spec.ts'] }],
  idempotency: [
    { mutate: ['libs/payments/keys/once-by-key.ts', 'libs/payments/keys/postgres.ts'], specs: ['libs/payments/keys/keys.int.spec.ts'] },
    { mutate: ['libs/platform/http/envelope.ts'], specs: ['libs/platform/platform.unit.spec.ts'] },
  ],
  auth: [
    {
      mutate: ['libs/accounts/access-token.ts', 'libs/accounts/api-key.ts'],
      specs: ['libs/accounts/access-token.unit.spec.ts', 'libs/accounts/account.unit.spec.ts'],
    },
  ],
  scope: [
    { mutate: ['libs/accounts/scope.ts'], specs: ['libs/accounts/scope.int.spec.ts'] },
    { mutate: ['libs/audit/audit-key.ts'], specs: ['libs/audit/audit-key.int.spec.ts'] },
    { mutate: ['libs/audit/cursor.ts'], specs: ['libs/audit/cursor.unit.spec.ts'] },
    { mutate: ['libs/audit/exceptions.ts', 'libs/audit/statement.ts'], specs: ['libs/audit/statement.int.spec.ts'] },
    { mutate: ['libs/audit/month.ts'], specs: ['libs/audit/month.unit.spec.ts'] },
  ],
  personal: [
    { mutate: ['libs/platform/personal.ts'], specs: ['libs/platform/personal.unit.spec.ts', 'libs/platform/personal.int.spec.ts'] },
    { mutate: ['libs/payments/personal.ts'], specs: ['libs/payments/personal.int.spec.ts'] },
  ],
  // Slow: most of these changes are noticed on a real Postgres only.
  erasure: [
    {
      mutate: ['erase', 'erasure', 'erasures', 'erasure-files', 'replay', 'retention', 'subjects', 'personal-use'].map(
        (name) => `libs/privacy/${name}.ts`,
      ),
      specs: ['libs/privacy/privacy.int.spec.ts', 'libs/privacy/erasure.unit.spec.ts'],
    },
  ],
  cursor: [{ mutate: ['libs/payments/cursor.ts'], specs: ['libs/payments/cursor.unit.spec.ts'] }],
  signature: [
    { mutate: ['libs/webhooks/signature.ts'], specs: ['libs/webhooks/notification.unit.spec.ts'] },
    { mutate: ['libs/checkout/signature.ts'], specs: ['libs/checkout/signature.unit.spec.ts'] },
    { mutate: ['libs/platform/http/strict-json.ts'], specs: ['libs/platform/http/strict-json.unit.spec.ts'] },
    { mutate: ['libs/platform/card-text.ts'], specs: ['libs/platform/card-text.unit.spec.ts'] },
  ],
};
/** The lowest allowed share of noticed changes, in per cent of the changes that a spec can reach. */
const FLOOR = 85;
/** Groups with a higher floor. */
const FLOORS: Readonly<Record<string, number>> = { lines: 95, tie: 95, scope: 95, personal: 95, erasure: 95, books: 95 };

const { values } = parseArgs({ options: { only: { type: 'string' }, concurrency: { type: 'string', default: '2' } } });
const names = values.only?.split(',') ?? Object.keys(GROUPS);
const unknown = names.filter((name) => !(name in GROUPS));
if (unknown.length > 0) throw new Error(`no such group: ${unknown.join(', ')}; there are ${Object.keys(GROUPS).join(', ')}`);

const moved = Object.values(GROUPS)
  .flatMap((parts) => parts.flatMap(({ mutate, specs }) => [...mutate, ...specs]))
  .filter((file) => !existsSync(file));
if (moved.length > 0) throw new Error(`no such file: ${moved.join(', ')}`);

const directory = await mkdtemp(join(tmpdir(), 'payfold-mutation-'));
const postgres = await startEmbeddedPostgres(join(directory, 'postgres'), { settings: { fsync: 'off' } });
process.env.TEST_POSTGRES_URL = postgres.adminUrl;
const { default: jestConfig } = (await import(new URL('../../../jest.config.mjs', import.meta.url).href)) as { default: object };

const run = ({ mutate, specs }: Part): Promise<MutantResult[]> =>
  new Stryker({
    mutate: [...mutate],
    testRunner: 'jest',
    testRunnerNodeArgs: ['--experimental-vm-modules', '--no-warnings'],
    plugins: ['@stryker-mutator/jest-runner'],
    coverageAnalysis: 'perTest',
    jest: {
      projectType: 'custom',
      config: {
        ...jestConfig,
        testRegex: specs.map((spec) => `/${spec.replaceAll('.', String.raw`\.`)}$`),
        testEnvironment: join(process.cwd(), 'test/mutation/first-failure.mjs'),
        setupFiles: ['<rootDir>/test/mutation/one-seed.mjs'],
        globalSetup: null,
        globalTeardown: null,
      },
      enableFindRelatedTests: false,
    },
    concurrency: Number(values.concurrency),
    // Changes of texts are left out, because most texts are messages for people. Specs check the texts that programs read.
    mutator: { excludedMutations: ['StringLiteral'] },
    ignoreStatic: true,
    ignorePatterns: ['docs', 'bench', 'reports', 'examples', '.payfold'],
    reporters: process.stderr.isTTY ? ['progress'] : [],
    tempDirName: join(directory, 'sandbox'),
    // The modules of each run stay in memory. After this many runs, a new process is faster.
    maxTestRunnerReuse: 50,
    timeoutMS: 20_000,
    dryRunTimeoutMinutes: 10,
  }).runMutationTest();

try {
  for (const name of names) {
    const begun = performance.now();
    const results: MutantResult[] = [];
    for (const part of GROUPS[name]!) results.push(...(await run(part)));
    const count = (...statuses: string[]) => results.filter(({ status }) => statuses.includes(status)).length;
    const noticed = count('Killed', 'Timeout');
    const survivors = results.filter(({ status }) => status === 'Survived' || status === 'NoCoverage');
    const percent = (100 * noticed) / Math.max(1, noticed + survivors.length);
    console.log(`${name}: ${noticed} of ${noticed + survivors.length} noticed, ${percent.toFixed(1)} %`);
    writeReport('mutation', {
      group: name,
      seconds: Math.round((performance.now() - begun) / 1_000),
      noticed,
      survived: count('Survived'),
      notReached: count('NoCoverage'),
      percent: Number(percent.toFixed(1)),
    });
    const lines = survivors.map(({ fileName, location, mutatorName, replacement = '', status }) => {
      const place = `${fileName.replace(/^.*\/(?=libs\/)/, '')}:${location.start.line}:${location.start.column}`;
      return `${place} ${mutatorName} ${status === 'NoCoverage' ? '(not reached) ' : ''}→ ${replacement.replaceAll(/\s+/g, ' ').slice(0, 120)}`;
    });
    await writeFile(join('reports', `survivors-${name}.txt`), `${lines.sort().join('\n')}\n`);
    if (percent < (FLOORS[name] ?? FLOOR)) process.exitCode = 1;
  }
} finally {
  await postgres.stop();
  await rm(directory, { recursive: true, force: true });
}

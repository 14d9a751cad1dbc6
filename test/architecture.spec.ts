/** The walls of the house (docs/architecture.md): which lib may import which, one door per lib, and files that must stay pure. */
import { describe, expect, test } from '@jest/globals';
import { readdirSync, readFileSync } from 'node:fs';
import { dirname, join, relative, resolve } from 'node:path';

const ROOT = resolve(import.meta.dirname, '..');

const filesBelow = (folder: string): string[] =>
  readdirSync(join(ROOT, folder), { recursive: true, encoding: 'utf8' })
    .filter((name) => /\.tsx?$/.test(name) && !/\.spec\.tsx?$/.test(name))
    .map((name) => join(folder, name));

const importsOf = (file: string): string[] =>
  [
    ...readFileSync(join(ROOT, file), 'utf8').matchAll(
      /(?:^|\n)\s*(?:import|export)\b[^'";]*?from\s+'([^']+)'|import\('([^']+)'\)|(?:^|\n)import\s+'([^']+)'/g,
    ),
  ].map((match) => (match[1] ?? match[2] ?? match[3])!);

/** Each lib, and what it may import of the others. */
const ARROWS: Readonly<Record<string, readonly string[]>> = {
  kernel: [],
  platform: ['kernel'],
  eventstore: ['kernel', 'platform'],
  accounts: ['kernel', 'platform', 'eventstore'],
  payments: ['kernel', 'platform', 'eventstore', 'accounts'],
  webhooks: ['kernel', 'platform', 'eventstore', 'accounts', 'payments'],
  checkout: ['kernel', 'platform', 'eventstore', 'accounts', 'payments'],
  ledger: ['kernel', 'platform', 'eventstore', 'accounts', 'payments'],
};

describe('arrows between libs', () => {
  test('every lib is known here', () => {
    const libs = readdirSync(join(ROOT, 'libs'));
    expect(libs.sort()).toEqual(Object.keys(ARROWS).sort());
  });

  test.each(Object.entries(ARROWS))('%s imports only what lies below it, through its door', (lib, allowed) => {
    const wrong = filesBelow(`libs/${lib}`).flatMap((file) =>
      importsOf(file)
        .filter((specifier) => {
          if (specifier.startsWith('#')) return !allowed.includes(specifier.slice(1).split('/')[0]!);
          return specifier.startsWith('.') && relative(join(ROOT, 'libs', lib), resolve(ROOT, dirname(file), specifier)).startsWith('..');
        })
        .map((specifier) => `${file} → ${specifier}`),
    );
    expect(wrong).toEqual([]);
  });

  test('apps reach libs through their doors only', () => {
    const wrong = filesBelow('apps').flatMap((file) =>
      importsOf(file)
        .filter((specifier) => specifier.includes('libs/'))
        .map((specifier) => `${file} → ${specifier}`),
    );
    expect(wrong).toEqual([]);
  });

  test('no lib is entered past its door', () => {
    const wrong = [...filesBelow('libs'), ...filesBelow('apps')].flatMap((file) =>
      importsOf(file).filter((specifier) => /^#\w+\//.test(specifier) && specifier !== '#platform/http'),
    );
    expect(wrong).toEqual([]);
  });
});

describe('who may import what from outside', () => {
  const ONLY: readonly [string, RegExp, string[]][] = [
    ['the KurrentDB client', /^@kurrent\//, ['libs/eventstore/']],
    ['pg', /^pg(-copy-streams)?$/, ['libs/platform/']],
    ['pino', /^pino$/, ['libs/platform/']],
    ['commander', /^commander$/, ['apps/operator/']],
  ];
  test.each(ONLY)('%s', (_name, pattern, places) => {
    const wrong = [...filesBelow('libs'), ...filesBelow('apps')].filter(
      (file) => importsOf(file).some((specifier) => pattern.test(specifier)) && !places.some((place) => file.startsWith(place)),
    );
    expect(wrong).toEqual([]);
  });

  test('the environment is read in one place', () => {
    const wrong = filesBelow('libs').filter((file) => /process\.env/.test(readFileSync(join(ROOT, file), 'utf8')));
    // The database's child process inherits ours.
    expect(wrong.sort()).toEqual(['libs/platform/config.ts', 'libs/platform/postgres/embedded.ts']);
  });
});

describe('pure files', () => {
  const PURE = [
    ...filesBelow('libs/kernel'),
    ...['payment.ts', 'payment.view.ts', 'fee.ts'].map((name) => `libs/payments/${name}`),
    ...['account.ts', 'portal.ts', 'case-restriction.ts'].map((name) => `libs/accounts/${name}`),
    ...['notification.ts', 'schedule.ts'].map((name) => `libs/webhooks/${name}`),
    ...['chart.ts', 'postings.ts', 'adjustment.ts', 'exception.ts'].map((name) => `libs/ledger/${name}`),
    ...['checkout.ts', 'addresses.ts'].map((name) => `libs/checkout/${name}`),
    ...['text.ts', 'format.ts', 'layout.tsx', 'pay.tsx', 'outcome.tsx'].map((name) => `libs/checkout/pages/${name}`),
  ];
  /** Events of a payment are facts; a file that takes nothing but their types knows nothing of how they came about. */
  const onlyTypes = (file: string, specifier: string) =>
    [...readFileSync(join(ROOT, file), 'utf8').matchAll(/import (type )?[^;]*? from '([^']+)'/g)].every(
      ([, type, from]) => from !== specifier || type !== undefined,
    );
  /** Types of the gateway port are facts, not a way to it. */
  const isPure = (specifier: string, file: string) =>
    specifier === '#kernel' ||
    (specifier === '#payments' && onlyTypes(file, specifier)) ||
    // A page is a function of its properties; the types of its elements are no way to anything.
    (specifier === 'preact' && file.endsWith('.tsx')) ||
    (specifier.startsWith('.') &&
      (['.ts', '.tsx'].some((ending) => PURE.includes(join(dirname(file), specifier.replace(/\.js$/, ending)))) ||
        specifier === './gateway/gateway.js'));

  test.each(PURE)('%s knows the kernel and other pure files only', (file) => {
    expect(importsOf(file).filter((specifier) => !isPure(specifier, file))).toEqual([]);
  });

  test.each(PURE.filter((file) => file !== 'libs/kernel/clock.ts'))('%s reads no clock and rolls no dice', (file) => {
    expect(readFileSync(join(ROOT, file), 'utf8')).not.toMatch(
      /Date\.now\(|new Date\(\)|Math\.random\(|randomUUID|setTimeout|setInterval|performance\.|process\.|fetch\(/,
    );
  });

  test('below apps only the clock reads the time', () => {
    const readers = filesBelow('libs').filter((file) => /Date\.now\(|new Date\(\)|performance\.now\(/.test(readFileSync(join(ROOT, file), 'utf8')));
    expect(readers).toEqual(['libs/kernel/clock.ts']);
  });
});

test('the error catalogue is the specification’s, and two of our own', () => {
  const codes = readFileSync(join(ROOT, 'libs/kernel/errors.ts'), 'utf8')
    .match(/^ {2}([A-Z_]+): \d{3},$/gm)!
    .map((line) => line.trim().split(':')[0]);
  expect(codes).toHaveLength(23); // 22 of the specification, RATE_LIMITED of C65
});

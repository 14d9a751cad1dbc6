/**
 * The rules of the architecture (docs/architecture.md): which lib may import which, imports only through index.ts, and which files must stay pure.
 */
import { describe, expect, test } from '@jest/globals';
import { readdirSync, readFileSync } from 'node:fs';
import { dirname, join, relative, resolve } from 'node:path';
import { PURE_FILES } from '../pure-files.mjs';

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

/** A file without its comments. */
const codeOf = (file: string): string => readFileSync(join(ROOT, file), 'utf8').replace(/\/\*[^]*?\*\/|(?<=^|\s)\/\/.*/g, '');

const BELOW_PAYMENTS = ['kernel', 'platform', 'eventstore', 'accounts'];

/** For each lib, the other libs that it may import. */
const ARROWS: Readonly<Record<string, readonly string[]>> = {
  kernel: [],
  platform: ['kernel'],
  eventstore: ['kernel', 'platform'],
  accounts: ['kernel', 'platform', 'eventstore'],
  payments: BELOW_PAYMENTS,
  settlement: [...BELOW_PAYMENTS, 'payments'],
  ledger: [...BELOW_PAYMENTS, 'payments', 'settlement'],
  audit: [...BELOW_PAYMENTS, 'payments', 'settlement', 'ledger', 'checkout', 'webhooks', 'privacy'],
  gateways: ['kernel', 'platform', 'eventstore', 'accounts', 'payments'],
  checkout: [...BELOW_PAYMENTS, 'payments'],
  webhooks: [...BELOW_PAYMENTS, 'payments'],
  privacy: [...BELOW_PAYMENTS, 'payments', 'checkout', 'webhooks'],
};

describe('arrows between libs', () => {
  test('every lib is known here', () => {
    const libs = readdirSync(join(ROOT, 'libs'));
    expect(libs.sort()).toEqual(Object.keys(ARROWS).sort());
  });

  test.each(Object.entries(ARROWS))('%s imports only libs below it, through their doors', (lib, allowed) => {
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

  test.each(Object.keys(ARROWS))('the door of %s names its exports', (lib) => {
    const door = readFileSync(join(ROOT, 'libs', lib, 'index.ts'), 'utf8');
    expect(door).not.toMatch(/export \*/);
  });

  test('no lib is entered past its door', () => {
    const wrong = [...filesBelow('libs'), ...filesBelow('apps')].flatMap((file) =>
      importsOf(file).filter((specifier) => /^#\w+\//.test(specifier) && !/^#(platform\/http|\w+\/module)$/.test(specifier)),
    );
    expect(wrong).toEqual([]);
  });
});

describe('the line-item register and the journal prove each other', () => {
  const files = filesBelow('libs/ledger').filter((file) => /\/line-[^/]+$/.test(file));
  /** Declarations of events, and types. Nothing of them decides how money is booked. */
  const SHARED = ['#kernel', '#eventstore', '#payments', '#platform', '#settlement', './events.js'];
  const TYPES_ONLY = ['./adjustment.js', './remittance.js'];

  test('the register imports no code of the journal', () => {
    expect(files.length).toBe(4);
    const wrong = files.flatMap((file) =>
      importsOf(file)
        .filter((specifier) => !SHARED.includes(specifier) && !/^\.\/line-[a-z-]+\.js$/.test(specifier))
        .filter((specifier) => !(TYPES_ONLY.includes(specifier) && new RegExp(`import type [^;]* from '${specifier}'`).test(codeOf(file))))
        .map((specifier) => `${file} → ${specifier}`),
    );
    expect(wrong).toEqual([]);
  });

  test('the register reads no table of the journal, and the journal none of the register', () => {
    expect(files.filter((file) => /journal_/.test(codeOf(file)))).toEqual([]);
    const journal = ['journal', 'postings', 'chart', 'books', 'sums', 'days', 'periods'].map((name) => `libs/ledger/${name}.ts`);
    expect(journal.filter((file) => /line_(movement|payment|deposit|day|period)|\.\/line-/.test(codeOf(file)))).toEqual([]);
  });
});

describe('HTTP and payments know nothing of each other', () => {
  test('no lib but platform knows HTTP', () => {
    const wrong = filesBelow('libs').filter((file) => !file.startsWith('libs/platform/') && importsOf(file).includes('#platform/http'));
    expect(wrong).toEqual([]);
  });

  test('platform knows no payments', () => {
    // Names of released migrations never change.
    const words = (file: string) => codeOf(file).replace(/'\d{4}-[a-z-]+'/g, '');
    const wrong = filesBelow('libs/platform').filter((file) => /payment|refund|charge|settlement|VOID_/i.test(words(file)));
    expect(wrong).toEqual([]);
  });
});

describe('imports from outside', () => {
  const ONLY: readonly [string, RegExp, string[]][] = [
    ['the KurrentDB client', /^@kurrent\//, ['libs/eventstore/']],
    ['pg', /^pg(-copy-streams)?$/, ['libs/platform/']],
    ['pino', /^pino$/, ['libs/platform/']],
    ['commander', /^commander$/, ['apps/operator/']],
    ['stripe', /^stripe(\/|$)/, ['libs/gateways/stripe/']],
  ];
  test.each(ONLY)('%s', (_name, pattern, places) => {
    const wrong = [...filesBelow('libs'), ...filesBelow('apps')].filter(
      (file) => importsOf(file).some((specifier) => pattern.test(specifier)) && !places.some((place) => file.startsWith(place)),
    );
    expect(wrong).toEqual([]);
  });

  test('the package of Stripe is loaded only when an adapter is made: it takes longer to load than the rest of the gateways', () => {
    const wrong = filesBelow('libs/gateways').filter((file) => /^(?:import|export) (?!type )[^;]*? from 'stripe/m.test(codeOf(file)));
    expect(wrong).toEqual([]);
  });

  test('Nest stands in modules and at the edge of HTTP: code without it starts in half the time', () => {
    const wrong = filesBelow('libs').filter(
      (file) =>
        !/\.module\.ts$|^libs\/platform\/http\//.test(file) && importsOf(file).some((specifier) => /^@nestjs\/|^#\w+\/module$/.test(specifier)),
    );
    expect(wrong).toEqual([]);
  });

  test('a command loads the heavy libs only when it runs: a command of accounts starts in a fifth of the time', () => {
    const LIGHT = ['#kernel', '#platform', '#eventstore', '#accounts', '../data-dir.js', '../npm-parent.js', '../simulator/control.js'];
    const wrong = filesBelow('apps/operator')
      .filter((file) => file !== 'apps/operator/upgrade-context.ts')
      .flatMap((file) =>
        [...readFileSync(join(ROOT, file), 'utf8').matchAll(/^import (?!type )[^;]*? from '((?:#|\.\.)[^']+)'/gm)]
          .map(([, specifier]) => specifier!)
          .filter((specifier) => !LIGHT.includes(specifier))
          .map((specifier) => `${file} → ${specifier}`),
      );
    expect(wrong).toEqual([]);
  });

  test('the environment is read in one place', () => {
    const wrong = filesBelow('libs').filter((file) => /process\.env/.test(readFileSync(join(ROOT, file), 'utf8')));
    // The embedded Postgres inherits our environment.
    expect(wrong.sort()).toEqual(['libs/platform/config.ts', 'libs/platform/postgres/embedded.ts']);
  });
});

describe('pure files', () => {
  const PURE: readonly string[] = PURE_FILES;

  test('every file of the kernel is listed', () => {
    expect(PURE).toEqual(expect.arrayContaining(filesBelow('libs/kernel')));
  });

  /** Names that the index.ts of a lib exports from pure files. */
  const pureNamesOf = (lib: string): ReadonlySet<string> =>
    new Set(
      [...readFileSync(join(ROOT, 'libs', lib, 'index.ts'), 'utf8').matchAll(/export (?:type )?\{([^}]*)\} from '\.\/([^']+)\.js'/g)]
        .filter(([, , file]) => PURE.includes(`libs/${lib}/${file}.ts`))
        .flatMap(([, names]) => names!.split(',').map((name) => name.replace('type ', '').trim())),
    );
  /** A type does nothing at run time, so its import is always allowed. A value must come from a pure file. */
  const takesOnlyPure = (file: string, specifier: string): boolean =>
    [...readFileSync(join(ROOT, file), 'utf8').matchAll(/import (type )?\{([^}]*)\} from '([^']+)'/g)]
      .filter(([, type, , from]) => from === specifier && type === undefined)
      .flatMap(([, , names]) => names!.split(',').map((name) => name.trim()))
      .filter((name) => name !== '' && !name.startsWith('type '))
      .every((name) => pureNamesOf(specifier.slice(1)).has(name));
  /** Allows the file of the gateway port too, because pure files need its types. */
  const isPure = (specifier: string, file: string) =>
    specifier === '#kernel' ||
    (/^#(payments|settlement)$/.test(specifier) && takesOnlyPure(file, specifier)) ||
    // Pages (.tsx) may import `preact`. A page is a pure function of its properties.
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

/** docs/decisions/0048-two-clocks.md has the same table. Every other file takes business time. */
describe('two clocks', () => {
  const all = [...filesBelow('libs'), ...filesBelow('apps')].sort();
  const filesWith = (pattern: RegExp): string[] => all.filter((file) => pattern.test(codeOf(file)));
  const DRAWS_IDS = 'ids';
  const MEASURES = 'durations and lag';
  const AGE_OF_A_LOADED_STREAM = 'age of a loaded stream';
  /** The files that take the host's time, and for what. */
  const REAL: Readonly<Record<string, string>> = {
    'libs/kernel/clock.ts': 'defines it',
    'libs/eventstore/streams.ts': AGE_OF_A_LOADED_STREAM,
    'libs/payments/stream.ts': AGE_OF_A_LOADED_STREAM,
    'libs/payments/charge.ts': AGE_OF_A_LOADED_STREAM,
    'libs/payments/commands.ts': AGE_OF_A_LOADED_STREAM,
    'libs/settlement/record.ts': AGE_OF_A_LOADED_STREAM,
    'libs/platform/postgres/sandbox-time.ts': 'adds to it',
    'libs/gateways/transport/clocks.ts': 'difference from the clock of the processor',
    'libs/payments/keys/from-log.ts': 'age of an idempotency key',
    'libs/payments/reverse.ts': 'age of a repeat without a key (C18)',
    'libs/payments/velocity.ts': 'velocity windows',
    'libs/accounts/access-token.ts': 'access tokens',
    'libs/accounts/key-use.ts': 'last use of an API key',
    'libs/checkout/intake.ts': 'exp of signed links, and signed addresses',
    'apps/api/payer/checkout.controller.ts': 'signed addresses',
    'libs/checkout/sessions.ts': 'retention of contents',
    'apps/worker/worker.ts': 'retention of contents',
    'libs/webhooks/listen.ts': 'signatures of webhooks',
    'libs/audit/scheduled-passes.ts': 'plan of the verification passes',
    'libs/eventstore/marks.ts': 'marks and incidents',
    'libs/eventstore/own-log.ts': 'marks and incidents',
    'apps/simulator/server.ts': 'retention of the processor’s books',
    'libs/eventstore/subscriber.ts': MEASURES,
    'libs/eventstore/read-model.ts': MEASURES,
    'apps/operator/projections.ts': MEASURES,
    'libs/platform/platform.module.ts': DRAWS_IDS,
    'apps/api/api.ts': DRAWS_IDS,
    'apps/audit/audit.ts': DRAWS_IDS,
    'apps/operator/context.ts': DRAWS_IDS,
    'apps/operator/log.ts': DRAWS_IDS,
    'apps/operator/upgrade-context.ts': DRAWS_IDS,
    'apps/operator/upgrade.ts': DRAWS_IDS,
  };
  /** The files of {@link REAL} that take business time too, for the times of events. */
  const BOTH = [
    'apps/api/payer/checkout.controller.ts',
    'apps/simulator/server.ts',
    'apps/worker/worker.ts',
    'libs/checkout/intake.ts',
    'libs/checkout/sessions.ts',
    'libs/eventstore/streams.ts',
    'libs/kernel/clock.ts',
    'libs/payments/charge.ts',
    'libs/payments/commands.ts',
    'libs/payments/reverse.ts',
    'libs/platform/postgres/sandbox-time.ts',
    'libs/settlement/record.ts',
  ];

  test('the host’s time is taken in these files only', () => expect(filesWith(/\brealNow\b/)).toEqual(Object.keys(REAL).sort()));

  test('of them, only these take business time, too', () => {
    expect(filesWith(/\.now\(\)/).filter((file) => file in REAL)).toEqual(BOTH);
  });

  test('keys, their leases and limits know no business time', () => {
    const wrong = filesWith(/\.now\(\)/).filter((file) => /^libs\/payments\/keys\/(?!sweep)|rate-limits|libs\/platform\/slots/.test(file));
    expect(wrong).toEqual([]);
  });

  test('no file takes the business time of a clock that does not follow the sandbox', () => expect(filesWith(/systemClock\.now\(/)).toEqual([]));

  test('SQL reads the database’s clock, which never moves, in these files only', () => {
    /** Texts with a word of SQL, without the values that are put into them. */
    const sqlOf = (file: string) =>
      [...codeOf(file).matchAll(/`[^`]*`|'[^'\n]*'/g)]
        .map(([text]) => text.replace(/\$\{[^}]*\}/g, ''))
        .filter((text) => /\b(select|update|insert|delete|create|alter|where|interval)\b/i.test(text));
    const isRead = (file: string) => sqlOf(file).some((text) => /\bclock_timestamp\(\)|\bcurrent_(date|timestamp)\b|\bnow\(\)/.test(text));
    expect(all.filter(isRead)).toEqual([
      // The age of an event that is not sealed, by the time at which it was stored.
      'libs/audit/alerts.ts',
      // Compares days of the journal with today. If business time is ahead, it reads more than it needs.
      'libs/audit/check-books.ts',
      // The plan and the leases of verification.
      'libs/audit/drift.ts',
      'libs/audit/scheduled-passes.ts',
      // Leases of subscribers, and times of storage.
      'libs/eventstore/checkpoint.ts',
      'libs/eventstore/installation.ts',
      'libs/eventstore/marks.ts',
      'libs/eventstore/postgres.ts',
      'libs/eventstore/read-model.ts',
      // Keys and velocity.
      'libs/payments/incident.ts',
      'libs/payments/keys/claims.ts',
      'libs/payments/keys/postgres.ts',
      'libs/payments/velocity.ts',
      // When keys of personal data were made, and who has read them when.
      'libs/platform/personal.ts',
      // Heartbeats of processes, and applied migrations.
      'libs/platform/postgres/processes.ts',
      'libs/platform/postgres/schema.ts',
      // When a feed of a processor is read next.
      'libs/settlement/feeds.ts',
      // Deliveries: `sandbox advance` moves their due times (`bringForward`). Their leases stay.
      'libs/webhooks/deliveries.ts',
      'libs/webhooks/staff-rows.ts',
    ]);
  });
});

test('the error catalogue is the specification’s, and two of our own', () => {
  const codes = readFileSync(join(ROOT, 'libs/kernel/errors.ts'), 'utf8')
    .match(/^ {2}([A-Z_]+): \d{3},$/gm)!
    .map((line) => line.trim().split(':')[0]);
  expect(codes).toHaveLength(23); // 22 codes of the specification, and RATE_LIMITED (C65)
});

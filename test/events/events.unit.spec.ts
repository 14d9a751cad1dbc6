/** Every version of every event type must have a schema and a golden file. A type may change only with a new version (docs/events.md). */
import { beforeAll, describe, expect, test } from '@jest/globals';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { findings } from './findings.js';
import { type DeclaredEvent, declaredEvents, goldenFile, schemaFile } from './schemas.js';

let declared: readonly DeclaredEvent[];
const committed = new Map<string, unknown>();
beforeAll(async () => {
  declared = await declaredEvents();
  for (const folder of readdirSync('libs').map((lib) => `libs/${lib}/events`))
    if (existsSync(folder))
      for (const name of readdirSync(folder)) committed.set(`${folder}/${name}`, JSON.parse(readFileSync(`${folder}/${name}`, 'utf8')));
});

test('every declaration of events was found', () => {
  const sources = readdirSync('libs', { recursive: true, encoding: 'utf8' }).filter((name) => name.endsWith('.ts') && !name.endsWith('.spec.ts'));
  const declaring = sources.filter((name) => /= defineEvents</.test(readFileSync(`libs/${name}`, 'utf8'))).map((name) => `libs/${name}`);
  expect([...new Set(declared.map(({ file }) => file))].sort()).toEqual(declaring.sort());
  expect(new Set(declared.map(({ type }) => type)).size).toBe(declared.length);
});

test('every type and version has a schema and a golden file, and they agree', () => {
  expect(findings(declared, committed)).toEqual([]);
});

describe('it is found and said if', () => {
  const event = (type: string) => declared.find((one) => one.type === type)!;
  /** The new findings after a change of one event and some files. A file with the content undefined is removed. */
  const found = (change: Partial<DeclaredEvent> & Pick<DeclaredEvent, 'type'>, files: Readonly<Record<string, unknown>> = {}) => {
    const changed = new Map([...committed, ...Object.entries(files)]);
    for (const [file, content] of Object.entries(files)) if (content === undefined) changed.delete(file);
    const before = findings(declared, committed);
    return findings(
      declared.map((one) => (one.type === change.type ? { ...one, ...change } : one)),
      changed,
    ).filter((finding) => !before.includes(finding));
  };
  const golden = (type: string, version: number) => committed.get(goldenFile(event(type), version)) as { stored: object; read: object };

  test('a type changed and its version did not', () => {
    const { schema } = event('PaymentFailed');
    const wider = { ...schema, properties: { ...(schema.properties as object), note: { type: 'string' } } };
    expect(found({ type: 'PaymentFailed', schema: wider })).toEqual([
      'PaymentFailed changed and its version did not: raise it to 3 in libs/payments/stream.ts as docs/changing.md#a-new-version-of-an-event says. ' +
        'If no release has written version 2 yet, run npm run events:schemas instead',
    ]);
  });
  test('a version has no schema, or no golden file', () => {
    expect(found({ type: 'PaymentFailed', version: 3 })).toEqual([
      'PaymentFailed has no schema of version 3: run npm run events:schemas',
      'PaymentFailed has no golden file of version 3: add libs/payments/events/PaymentFailed.v3.json as docs/changing.md#a-new-version-of-an-event says',
    ]);
    expect(found({ type: 'PortalCheckoutConfigured' }, { [schemaFile(event('PortalCheckoutConfigured'), 1)]: undefined })).toEqual([
      'PortalCheckoutConfigured has no schema of version 1: bring it back, it is never deleted',
    ]);
  });
  test('a golden file breaks the schema of its version, or differs from the data that readers get', () => {
    const { type } = event('PortalCheckoutConfigured');
    const [file, { stored, read }] = [goldenFile(event(type), 1), golden(type, 1)];
    expect(found({ type }, { [file]: { stored: read, read } })).toEqual([
      `${file}: \`stored\` breaks the schema of its version: data/checkout must NOT have additional properties`,
    ]);
    expect(found({ type }, { [file]: { stored } })).toEqual([
      `${file}: \`read\` breaks the schema of the newest version: data/checkout must have required property 'colour'`,
      expect.stringMatching(/^libs.*: readers make \{"portalId".*"colour":null,"locale":null\}\} of `stored`, not `read`$/),
    ]);
  });
  test('a file belongs to no type', () => {
    expect(found({ type: 'PaymentFailed' }, { 'libs/payments/events/PaymentForgotten.v1.json': {} })).toEqual([
      'libs/payments/events/PaymentForgotten.v1.json belongs to no event type and version',
    ]);
  });
});

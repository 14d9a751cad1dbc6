/** Every field of every version of every event type has a decision whether the feed shows it. What is hidden does not leave. */
import { describe, expect, test } from '@jest/globals';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import type { Json } from '#kernel';
import { DECISIONS, isEventType, pathsIn, publicData } from './public-data.js';

interface Schema {
  readonly type?: string | readonly string[];
  readonly properties?: Readonly<Record<string, Schema>>;
  readonly items?: Schema;
  readonly anyOf?: readonly Schema[];
  readonly additionalProperties?: boolean | Schema;
  readonly definitions?: Readonly<Record<string, Schema>>;
  readonly $ref?: string;
}
interface EventFile {
  readonly type: string;
  readonly version: number;
  readonly schema: Schema;
  readonly stored: Json;
}

const json = <T>(file: string): T => JSON.parse(readFileSync(file, 'utf8')) as T;
/** test/events/events.unit.spec.ts holds that there is a schema and a golden file of each version of each type. */
const files: readonly EventFile[] = readdirSync('libs')
  .map((lib) => `libs/${lib}/events`)
  .filter((folder) => existsSync(folder))
  .flatMap((folder) =>
    readdirSync(folder)
      .filter((name) => name.endsWith('.schema.json'))
      .map((name) => {
        const [type, version] = name.split('.') as [string, string];
        const { stored } = json<{ stored: Json }>(`${folder}/${type}.${version}.json`);
        return { type, version: Number(version.slice(1)), schema: json<Schema>(`${folder}/${name}`), stored };
      }),
  );

/** `open`: its content is not known by its type. `open` fields may only be shown if they are in this list. */
const SHOWN_OPEN = ['lineItems.coding'];

/** The leaves of a schema by their paths. */
const leavesOf = (
  schema: Schema,
  root: Schema = schema,
  path = '',
  leaves = new Map<string, 'plain' | 'open'>(),
): ReadonlyMap<string, 'plain' | 'open'> => {
  const { properties, items, anyOf, additionalProperties, $ref } = schema;
  if ($ref !== undefined) {
    const name = $ref.split('/').at(-1)!;
    return name === 'Json' ? leaves.set(path, 'open') : leavesOf(root.definitions![name]!, root, path, leaves);
  }
  for (const one of anyOf ?? []) leavesOf(one, root, path, leaves);
  for (const [name, one] of Object.entries(properties ?? {})) leavesOf(one, root, path === '' ? name : `${path}.${name}`, leaves);
  if (items) leavesOf(items, root, path, leaves);
  if (typeof additionalProperties === 'object' && path !== '') leaves.set(path, 'open');
  const isObject = properties !== undefined || items !== undefined || anyOf !== undefined || schema.type === 'object';
  if (!isObject && schema.type !== 'null') leaves.set(path, 'plain');
  return leaves;
};

const missingDecisions = (events: readonly EventFile[]): string[] => {
  const found: string[] = [];
  for (const type of new Set([...events.map((event) => event.type), ...Object.keys(DECISIONS)])) {
    const versions = events.filter((event) => event.type === type);
    const decision = DECISIONS[type];
    if (!decision || versions.length !== decision[0]) {
      found.push(`${type}: ${versions.length} versions, of which ${decision?.[0] ?? 0} have a decision`);
      continue;
    }
    const { shown, hidden } = pathsIn(decision[1]);
    const leaves = new Map(versions.flatMap(({ schema }) => [...leavesOf(schema)]));
    const used = new Set<string>();
    for (const [path, kind] of leaves) {
      const hides = hidden.filter((one) => path === one || path.startsWith(`${one}.`));
      const shows = shown.filter((one) => path === one && (kind === 'plain' || SHOWN_OPEN.includes(path)));
      if (hides.length + shows.length !== 1) found.push(`${type}.${path}: ${hides.length + shows.length} decisions`);
      for (const one of [...hides, ...shows]) used.add(one);
    }
    for (const one of [...shown, ...hidden]) if (!used.has(one)) found.push(`${type}.${one}: there is no such field, or it may not be shown`);
  }
  return found;
};

test('every field of every event has a decision, and no other field has one', () => {
  expect(files.length).toBeGreaterThan(80);
  expect(missingDecisions(files)).toEqual([]);
});

describe('it is found if', () => {
  const [initiated] = files.filter(({ type, version }) => type === 'PaymentInitiated' && version === 3) as [EventFile];
  const with_ = (properties: Readonly<Record<string, Schema>>) => [
    ...files.filter((file) => file !== initiated),
    { ...initiated, schema: { ...initiated.schema, properties: { ...initiated.schema.properties, ...properties } } },
  ];
  test('a type is new', () => {
    expect(missingDecisions([...files, { ...initiated, type: 'PaymentMoved', version: 1 }])).toEqual([
      'PaymentMoved: 1 versions, of which 0 have a decision',
    ]);
  });
  test('a version is new', () => {
    expect(missingDecisions([...files, { ...initiated, version: 5 }])).toEqual(['PaymentInitiated: 5 versions, of which 4 have a decision']);
  });
  test.each<[string, Readonly<Record<string, Schema>>, string]>([
    ['a field', { note: { type: 'string' } }, 'note'],
    ['a field of a list', { notes: { type: 'array', items: { type: 'object', properties: { text: { type: 'string' } } } } }, 'notes.text'],
    ['a field that may be null', { note: { anyOf: [{ type: 'object', properties: { text: { type: 'string' } } }, { type: 'null' }] } }, 'note.text'],
    ['an open field', { notes: { type: 'object', additionalProperties: { type: 'string' } } }, 'notes'],
  ])('%s is new', (_, properties, path) => {
    expect(missingDecisions(with_(properties))).toEqual([`PaymentInitiated.${path}: 0 decisions`]);
  });
  test('a field that is shown becomes an object', () => {
    expect(missingDecisions(with_({ portalId: { type: 'object', properties: { owner: { type: 'string' } } } }))).toEqual([
      'PaymentInitiated.portalId.owner: 0 decisions',
    ]);
  });
});

describe('the public part', () => {
  /** All plain values below a path. */
  const valuesAt = (value: Json, names: readonly string[]): Json[] => {
    if (Array.isArray(value)) return value.flatMap((one) => valuesAt(one, names));
    if (value === null || typeof value !== 'object') return names.length === 0 ? [value] : [];
    const [name, ...rest] = names;
    if (name === undefined) return Object.values(value).flatMap((one) => valuesAt(one, []));
    return name in value ? valuesAt(value[name]!, rest) : [];
  };
  test.each(files.map((file): [string, EventFile] => [`${file.type} ${file.version}`, file]))(
    'of %s is what is shown, and nothing else',
    (_, file) => {
      const { type, version: v, stored } = file;
      const { shown, hidden } = pathsIn(DECISIONS[type]![1]);
      const data = publicData({ type, v, data: stored })!;
      for (const path of shown) expect([path, valuesAt(data, path.split('.'))]).toEqual([path, valuesAt(stored, path.split('.'))]);
      for (const path of hidden) expect([path, valuesAt(data, path.split('.'))]).toEqual([path, []]);
      const leaves = [...leavesOf(file.schema).keys()].filter((path) => shown.includes(path));
      const isThere = (value: Json) => value !== null;
      const all = leaves.flatMap((path) => valuesAt(data, path.split('.')));
      expect(valuesAt(data, []).filter(isThere).length).toBe(all.filter(isThere).length);
    },
  );
  test('has no field that this release does not know', () => {
    const [file] = files.filter(({ type }) => type === 'PaymentVoided') as [EventFile];
    const data = { ...(file.stored as Record<string, Json>), note: 'secret' };
    expect(publicData({ ...file, v: 1, data })).toEqual(file.stored);
  });
  test('of a type or version of a newer release there is none', () => {
    expect(publicData({ type: 'PaymentMoved', v: 1, data: {} })).toBeNull();
    expect(publicData({ type: 'PaymentVoided', v: 3, data: {} })).toBeNull();
    expect([isEventType('PaymentVoided'), isEventType('constructor'), isEventType('PaymentMoved')]).toEqual([true, false, false]);
  });
});

/**
 * Makes values that an OpenAPI schema allows, and values that it forbids. A forbidden value differs from an allowed one in a single step. The same
 * seed makes the same values.
 */
import fc from 'fast-check';

export interface Schema {
  readonly $ref?: string;
  readonly type?: string;
  readonly format?: string;
  readonly enum?: readonly unknown[];
  readonly minimum?: number;
  readonly maximum?: number;
  readonly minLength?: number;
  readonly maxLength?: number;
  readonly minItems?: number;
  readonly maxItems?: number;
  readonly items?: Schema;
  readonly properties?: Readonly<Record<string, Schema>>;
  readonly required?: readonly string[];
  readonly additionalProperties?: boolean | Schema;
  readonly oneOf?: readonly Schema[];
  readonly anyOf?: readonly Schema[];
}

export type Resolve = (schema: Schema) => Schema;

export const resolverOf =
  (schemas: Readonly<Record<string, Schema>>): Resolve =>
  (schema) => {
    let found = schema;
    while (found.$ref) {
      const name = found.$ref.split('/').at(-1)!;
      if (!schemas[name]) throw new Error(`the document has no ${found.$ref}`);
      found = schemas[name];
    }
    return found;
  };

/** Ordinary text: letters of all scripts and emoji. It has no NUL, no lone surrogate, and no digits that look like a card. */
const text = (minLength: number, maxLength: number) =>
  fc.string({ unit: 'grapheme', minLength, maxLength: Math.max(minLength, Math.min(maxLength, 40)) }).map((value) => {
    const safe = value.replaceAll('\0', ' ').replace(/\d{6,}/g, '12345');
    // Lengths count UTF-16 units. The cut must not leave half of a surrogate pair.
    const cut = safe.slice(0, maxLength);
    return /[\ud800-\udbff]$/.test(cut) ? cut.slice(0, -1) : cut;
  });

/** Field names that often break programs. `__proto__` is left out and filtered below, because the service refuses this name (C8). */
const NAMES = ['constructor', 'toString', 'hasOwnProperty', 'then', 'length', 'valueOf', 'note', 'Ω', '', ' ', 'a.b', '$where', 'prototype'];

const fieldName = () => fc.oneof(fc.constantFrom(...NAMES), text(1, 10)).filter((name) => name !== '__proto__');

const json = (): fc.Arbitrary<unknown> =>
  fc.letrec((tie) => ({
    value: fc.oneof(
      { maxDepth: 2 },
      fc.boolean(),
      fc.constant(null),
      fc.integer(),
      text(0, 20),
      fc.array(tie('value'), { maxLength: 3 }),
      tie('object'),
    ),
    object: fc.dictionary(fieldName(), tie('value'), { maxKeys: 4 }),
  })).value;

/** Values that a schema allows. Optional fields are present half of the time. `unknown`: unknown fields are added (C3). */
export const allowed = (schema: Schema, resolve: Resolve, unknown = true): fc.Arbitrary<unknown> => {
  const known = resolve(schema);
  const variants = known.oneOf ?? known.anyOf;
  if (variants) return fc.oneof(...variants.map((one) => allowed(one, resolve, unknown)));
  if (known.enum) return fc.constantFrom(...known.enum);
  switch (known.type) {
    case 'string':
      if (known.format === 'uuid') return fc.uuid();
      if (known.format === 'email') return fc.constantFrom('maria@example.com', 'a@b.co', 'x.y+z@sub.example.org');
      return text(known.minLength ?? 0, known.maxLength ?? 60);
    case 'integer': {
      const { minimum = -1_000, maximum = 1_000_000 } = known;
      return fc.oneof(
        { weight: 8, arbitrary: fc.integer({ min: minimum, max: Math.min(maximum, minimum + 50_000) }) },
        fc.constantFrom(minimum, maximum),
      );
    }
    case 'number':
      return fc.double({ min: known.minimum ?? 0, max: known.maximum ?? 1e6, noNaN: true });
    case 'boolean':
      return fc.boolean();
    case 'array':
      return fc.array(allowed(known.items ?? {}, resolve, unknown), { minLength: known.minItems ?? 0, maxLength: Math.min(known.maxItems ?? 4, 4) });
    case 'object': {
      const { properties } = known;
      if (!properties) return fc.dictionary(fieldName(), json(), { maxKeys: 4 });
      const fields = fc.record(Object.fromEntries(Object.entries(properties).map(([name, one]) => [name, allowed(one, resolve, unknown)])), {
        requiredKeys: [...(known.required ?? [])],
      });
      if (!unknown || known.additionalProperties === false) return fields;
      const extra = fc.dictionary(fc.constantFrom('x_extra', 'Amount', 'amountCent', 'créé'), json(), { maxKeys: 1 });
      return fc.tuple(fields, fc.option(extra, { freq: 8, nil: {} })).map(([known_, added]) => ({ ...added, ...known_ }));
    }
    default:
      return json();
  }
};

export interface Mutation {
  /** The change, for the report. */
  readonly name: string;
  /** The whole changed body, which may not be JSON. */
  readonly body: string | Buffer;
}

type Path = readonly (string | number)[];

const setAt = (value: unknown, path: Path, change: (before: unknown) => unknown): unknown => {
  const [first, ...rest] = path;
  if (first === undefined) return change(value);
  if (Array.isArray(value)) return value.map((item, index) => (index === first ? setAt(item, rest, change) : (item as unknown)));
  const object = value as Record<string, unknown>;
  return { ...object, [first]: setAt(object[first], rest, change) };
};
const without = (value: unknown, path: Path): unknown =>
  setAt(value, path.slice(0, -1), (parent) => {
    const copy = { ...(parent as Record<string, unknown>) };
    delete copy[path.at(-1) as string];
    return copy;
  });

const WRONG: Readonly<Record<string, readonly unknown[]>> = {
  string: [1, true, null, ['x'], { x: 1 }],
  integer: ['100', 1.5, -1, true, null, [1], { x: 1 }, Number.MAX_SAFE_INTEGER, 1e21, -0.5],
  boolean: ['true', 1, null],
  array: ['x', 1, null, { 0: 'x' }],
  object: ['x', 1, null, []],
};

/** Texts that replace a number in the body. Some of them are not valid JSON. */
const RAW_NUMBERS = ['-0', '1e400', '01', '+1', '0x10', 'NaN', 'Infinity', '1.', '.5', '9007199254740993', '-1e-7'];

/**
 * All one-step changes of an allowed body that must be refused with 400. Examples: a required field is left out, a type is wrong, a bound is exceeded
 * by one, `amount` stands outside metadata, or the text is not JSON.
 */
export const forbidden = (schema: Schema, resolve: Resolve, value: unknown): Mutation[] => {
  const found: Mutation[] = [];
  const put = (name: string, changed: unknown) => found.push({ name, body: JSON.stringify(changed) });
  const named = (path: Path) => path.join('.') || '(body)';

  const visit = (raw: Schema, at: unknown, path: Path): void => {
    const known = resolve(raw);
    const replace = (name: string, other: unknown) =>
      put(
        `${named(path)}: ${name}`,
        setAt(value, path, () => other),
      );
    for (const wrong of WRONG[known.type ?? ''] ?? []) replace(`${JSON.stringify(wrong)} for ${known.type}`, wrong);
    if (known.enum) replace('a word that is not in the list', 'not-in-the-list');
    if (known.type === 'integer') {
      if (known.minimum !== undefined) replace('one below the minimum', known.minimum - 1);
      if (known.maximum !== undefined) replace('one above the maximum', known.maximum + 1);
      const marker = '"\u0001number\u0001"';
      const around = JSON.stringify(setAt(value, path, () => '\u0001number\u0001')).replace(JSON.stringify('\u0001number\u0001'), marker);
      for (const number of RAW_NUMBERS) found.push({ name: `${named(path)}: ${number}`, body: around.replace(marker, number) });
    }
    if (known.type === 'string' && !known.enum) {
      if (known.maxLength !== undefined) replace('one character too long', 'x'.repeat(known.maxLength + 1));
      if ((known.minLength ?? 0) > 0) replace('empty', '');
      if (known.format === 'uuid')
        for (const no of ['', 'x', '018f0000-0000-7000-8000-00000000000', `${String(at)} `, `{${String(at)}}`]) replace(`${no} is no UUID`, no);
      if (known.format === 'email')
        for (const no of ['', 'x', 'a@', '@b.co', 'a@b', 'a b@c.de', 'a@b..co', `${'x'.repeat(250)}@example.com`]) replace('no e-mail address', no);
      replace('a NUL', 'a\0b');
      const lone = JSON.stringify(setAt(value, path, () => '\u0001')).replace('\\u0001', '\\ud800');
      found.push({ name: `${named(path)}: a lone surrogate`, body: lone });
    }
    if (known.type === 'array') {
      const items = at as readonly unknown[];
      if ((known.minItems ?? 0) > 0) replace('too few items', items.slice(0, (known.minItems ?? 0) - 1));
      if (known.maxItems !== undefined)
        replace(
          'too many items',
          Array.from({ length: known.maxItems + 1 }, () => items[0]),
        );
      items.forEach((item, index) => {
        if (index === 0 && known.items) visit(known.items, item, [...path, index]);
      });
    }
    if (known.type === 'object' && known.properties) {
      const object = at as Readonly<Record<string, unknown>>;
      for (const name of known.required ?? []) put(`${named([...path, name])}: left out`, without(value, [...path, name]));
      put(
        `${named(path)}: a field named amount`,
        setAt(value, path, () => ({ ...object, amount: 100 })),
      );
      found.push({
        name: `${named(path)}: __proto__`,
        body: JSON.stringify(setAt(value, path, () => ({ ...object, '\u0001': 1 }))).replace('"\\u0001"', '"__proto__"'),
      });
      const [first] = Object.keys(object);
      if (first !== undefined) {
        const twice = JSON.stringify(setAt(value, path, () => ({ '\u0001': 1, ...object }))).replace('"\\u0001"', JSON.stringify(first));
        found.push({ name: `${named([...path, first])}: twice`, body: twice });
      }
      for (const [name, one] of Object.entries(known.properties)) if (object[name] !== undefined) visit(one, object[name], [...path, name]);
    }
  };
  visit(schema, value, []);

  const whole = JSON.stringify(value);
  // Leave out a change without effect.
  const add = (name: string, body: string | Buffer) => body === whole || found.push({ name: `(body): ${name}`, body });
  add('cut off', whole.slice(0, Math.max(1, Math.floor(whole.length / 2))));
  add('followed by more', `${whole}{}`);
  add('a list', `[${whole}]`);
  add('a text', '"x"');
  add('null', 'null');
  add('deeper than any sense', `{"x_extra":${'['.repeat(100_000)}${']'.repeat(100_000)}}`);
  add('deeper than allowed', `{"x_extra":${'['.repeat(17)}${']'.repeat(17)},${whole.slice(1)}`);
  add('invalid UTF-8', Buffer.concat([Buffer.from('{"x_extra":"'), Buffer.from([0xff, 0xc0, 0xaf]), Buffer.from('"}')]));
  add('a byte order mark', Buffer.concat([Buffer.from([0xef, 0xbb, 0xbf]), Buffer.from(whole)]));
  add('single quotes', whole.replaceAll('"', "'"));
  add('a comment', `/* x */${whole}`);
  add('a comma at the end', whole.replace(/\}$/, ',}'));
  return found;
};

import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { ServiceError } from '#kernel';
import { MAX_BODY_BYTES, parseExactly, parseStrictJson } from './strict-json.js';

const bytes = (text: string) => new TextEncoder().encode(text);
const parse = (text: string) => parseStrictJson(bytes(text));
const refusal = (body: Uint8Array, options?: { emptyIsObject?: boolean }) => {
  try {
    parseStrictJson(body, options);
  } catch (error) {
    if (error instanceof ServiceError) return error;
    throw error;
  }
  throw new Error('it was accepted');
};
const nested = (depth: number, open = '{"a":', close = '}') => `${open.repeat(depth - 1)}{}${close.repeat(depth - 1)}`;

describe('refused (C8), each with VALIDATION_ERROR', () => {
  test.each([
    ['no JSON', '{"a":', /not valid JSON/],
    ['a trailing comma', '{"a":1,}', /not valid JSON/],
    ['a comment', '{"a":1/**/}', /not valid JSON/],
    ['two values', '{}{}', /not valid JSON/],
    ['a byte order mark', '\ufeff{}', /not valid JSON/],
    ['an array', '[]', /must be a JSON object/],
    ['a string', '"a"', /must be a JSON object/],
    ['null', 'null', /must be a JSON object/],
    ['a key twice', '{"a":1,"a":1}', /duplicate key/],
    ['a key twice, once escaped', String.raw`{"amountCents":1,"amount\u0043ents":2}`, /duplicate key/],
    ['a key twice, far apart', '{"a":1,"b":{"a":2},"c":[1,{"d":1}],"a":3}', /duplicate key/],
    ['a key twice, deep inside', '{"a":[{"b":{"c":1,"c":2}}]}', /duplicate key/],
    ['an empty key twice', '{"":1,"":2}', /duplicate key/],
    ['a numeric key twice', '{"1":1,"2":2,"1":3}', /duplicate key/],
    ['__proto__', '{"__proto__":{}}', /__proto__/],
    ['__proto__, escaped', String.raw`{"\u005f_proto__":1}`, /__proto__/],
    ['__proto__, deep inside', '{"metadata":{"a":{"__proto__":null}}}', /__proto__/],
    ['17 levels of objects', nested(17), /deeper than 16/],
    ['17 levels of arrays', `{"a":${'['.repeat(16)}${']'.repeat(16)}}`, /deeper than 16/],
    ['100,000 levels', `{"a":${'['.repeat(100_000)}${']'.repeat(100_000)}}`, /deeper than 16|not valid JSON/],
    ['NUL, escaped', String.raw`{"a":"x\u0000"}`, /NUL or a lone surrogate/],
    ['NUL in a key', String.raw`{"\u0000":1}`, /NUL or a lone surrogate/],
    ['a lone high surrogate', String.raw`{"a":"\ud83d"}`, /NUL or a lone surrogate/],
    ['a lone low surrogate', String.raw`{"a":"\ude00x"}`, /NUL or a lone surrogate/],
    ['surrogates the wrong way round', String.raw`{"a":"\ude00\ud83d"}`, /NUL or a lone surrogate/],
    ['a lone surrogate in a key', String.raw`{"\ud83d":1}`, /NUL or a lone surrogate/],
    ['2^53', '{"a":9007199254740992}', /number that is too large/],
    ['−2^53', '{"a":[-9007199254740992]}', /number that is too large/],
    ['1e400', '{"a":1e400}', /number that is too large/],
    ['1e21', '{"amountCents":1e21}', /number that is too large/],
  ])('%s', (_, text, message) =>
    expect(refusal(bytes(text))).toMatchObject({ code: 'VALIDATION_ERROR', status: 400, message: expect.stringMatching(message) }),
  );

  test.each([
    ['a continuation byte alone', [0x80]],
    ['a sequence cut short', [0xe2, 0x82]],
    ['an overlong slash', [0xc0, 0xaf]],
    ['a surrogate as UTF-8', [0xed, 0xa0, 0xbd]],
    ['beyond U+10FFFF', [0xf4, 0x90, 0x80, 0x80]],
  ])('invalid UTF-8: %s', (_, wrong) =>
    expect(refusal(Uint8Array.from([...bytes('{"a":"'), ...wrong, ...bytes('"}')])).message).toMatch(/not valid UTF-8/),
  );

  test('UTF-16 is not UTF-8', () => expect(refusal(Buffer.from('{"a":1}', 'utf16le')).code).toBe('VALIDATION_ERROR'));

  test('the message never repeats the body: it may hold a card', () => {
    for (const text of [
      '{"cardNumber":"4242424242424242"',
      '{"4242424242424242":1,"4242424242424242":2}',
      '4242424242424242',
      String.raw`{"4242424242424242":"\u0000"}`,
    ]) {
      const error = refusal(bytes(text));
      expect(JSON.stringify([error.message, error.details, error.stack, error.cause])).not.toContain('42424242');
    }
  });

  test('nothing is no body, unless nothing stands for {} (C65)', () => {
    expect(refusal(bytes('')).message).toMatch(/needs a JSON body/);
    expect(parseStrictJson(bytes(''), { emptyIsObject: true })).toEqual({});
    expect(refusal(bytes(' '), { emptyIsObject: true }).message).toMatch(/not valid JSON/);
  });
});

describe('numbers that would not come back as they were sent', () => {
  test.each([
    '1000.00000000000000001',
    '999.99999999999999999',
    '1e-400',
    '-1e-400',
    '9007199254740991.4',
    '-4503599627370497.51',
    '0.123456789012345678',
    '1.00000000000000001e1',
  ])('%s is refused, or left to the caller', (number) => {
    const text = `{"amountCents":1,"metadata":{"n":[${number}]}}`;
    expect(refusal(bytes(text)).message).toMatch(/would not come back/);
    const later: unknown[] = [];
    expect(parseStrictJson(bytes(text), { later })).toEqual(JSON.parse(text));
    expect(later).toEqual([{ field: 'body', message: expect.stringMatching(/would not come back/) }]);
  });
  test.each(['9007199254740992', '1e16', '9007199254740993.0'])('%s is refused at once', (number) => {
    expect(() => parseStrictJson(bytes(`{"n":${number}}`), { later: [] })).toThrow(/too large/);
  });
  test.each([
    ...['0', '-0', '0.0', '0e5', '0.1', '-0.10', '1000.0', '1e3', '1.50e1', '12e-1', '120e-1', '9007199254740991', '-9007199254740991', '5e-324'],
    ...['12345678901234567e-1', '0.12345678901234567', '1.00000000000000000000', '0.00000000000000000000001', '1.7976931348623157e-300'],
  ])('%s passes', (number) => expect(parse(`{"n":${number},"x":"1e-400","1e-400":[${number}]}`).n).toBe(Number(number)));
});

describe('accepted', () => {
  test.each([
    ['16 levels', nested(16)],
    ['16 levels of arrays', `{"a":${'['.repeat(15)}${']'.repeat(15)}}`],
    ['keys of every object', '{"constructor":1,"toString":2,"then":3,"length":4,"hasOwnProperty":5,"prototype":6}'],
    ['one key in several objects', '{"a":{"a":{"a":1}},"b":[{"a":1},{"a":2}]}'],
    ['colons and braces in texts', String.raw`{"a":":{}[],\"b\":1","b:":"\\","c\\\":":"\\\\\":"}`],
    ['the largest safe integers', '{"a":9007199254740991,"b":-9007199254740991}'],
    ['100.0 and 1e2 are 100 (C4)', '{"a":100.0,"b":1e2}'],
    ['pairs of surrogates, written out or escaped', String.raw`{"a":"😀","b":"\ud83d\ude00"}`],
    ['white space', '\r\n\t {"a" : [ 1 , { } ] } \n'],
    ['U+2028, U+FEFF and U+FFFE inside', '{"a":"\u2028\ufeff\ufffe"}'],
  ])('%s', (_, text) => expect(parse(text)).toEqual(JSON.parse(text)));

  test('keys keep their place, and none of them touches a prototype', () => {
    const body = parse('{"metadata":{"constructor":{"prototype":{"polluted":true}},"b":1,"a":2}}');
    expect(Object.keys(body.metadata as object)).toEqual(['constructor', 'b', 'a']);
    expect(({} as { polluted?: boolean }).polluted).toBeUndefined();
  });

  test('the largest body that a request may have, many times over', () => {
    const lines = Array.from({ length: 3_000 }, (_, index) => ({ [`k${index}`]: `:"\\${'x'.repeat(50)}` }));
    const text = JSON.stringify({ lines });
    expect(text.length).toBeLessThan(MAX_BODY_BYTES);
    for (let round = 0; round < 50; round++) expect(Object.keys(parse(text))).toEqual(['lines']);
  });
});

describe('for any JSON', () => {
  const text = fc.string({ unit: 'grapheme', maxLength: 12 }).filter((value) => !value.includes('\0'));
  const key = text.filter((value) => value !== '__proto__');
  const number = fc.oneof(
    fc.maxSafeInteger(),
    fc.double({ noNaN: true, noDefaultInfinity: true }).filter((value) => !Number.isInteger(value) || Number.isSafeInteger(value)),
  );
  const { object } = fc.letrec<{ value: unknown; object: Record<string, unknown> }>((tie) => ({
    value: fc.oneof(
      { depthSize: 'small', maxDepth: 6 },
      fc.constant(null),
      fc.boolean(),
      number,
      text,
      fc.array(tie('value'), { maxLength: 4 }),
      tie('object'),
    ),
    object: fc.dictionary(key, tie('value'), { maxKeys: 5, noNullPrototype: true }),
  }));

  test('an accepted text equals JSON.parse, in any spelling', () =>
    fc.assert(
      fc.property(object, fc.constantFrom(undefined, 1, '\t'), fc.boolean(), (value, indent, escaped) => {
        const plain = JSON.stringify(value, null, indent);
        const spelled = escaped ? plain.replace(/[^\0-\x7f]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`) : plain;
        expect(parse(spelled)).toEqual(JSON.parse(plain));
      }),
      { numRuns: 500 },
    ));

  test('a member repeated anywhere is noticed', () =>
    fc.assert(
      fc.property(object, fc.nat(), fc.boolean(), (value, pick, escaped) => {
        // Inserts a second member with the same key before one member of the text.
        const plain = JSON.stringify(value);
        const members: { at: number; name: string }[] = [];
        JSON.stringify(value, function (this: unknown, name, inner: unknown) {
          if (!Array.isArray(this) && name !== '') members.push({ at: members.length, name });
          return inner;
        });
        fc.pre(members.length > 0);
        const name = JSON.stringify(members[pick % members.length]!.name);
        const at = plain.indexOf(`${name}:`);
        fc.pre(at > 0 && '{,'.includes(plain[at - 1]!));
        const first = [...(JSON.parse(name) as string)][0]!;
        const spelled = escaped && first.length === 1 && /[\x20-\x7e]/.test(first) ? `"\\u${first.charCodeAt(0).toString(16).padStart(4, '0')}${JSON.stringify((JSON.parse(name) as string).slice(1)).slice(1)}` : name; // prettier-ignore
        const doubled = `${plain.slice(0, at)}${spelled}:0,${plain.slice(at)}`;
        let valid: boolean;
        try {
          JSON.parse(doubled);
          valid = true;
        } catch {
          valid = false;
        }
        // The insertion may be inside a string. The doubled text has a repeated key only if its value is unchanged.
        if (valid && JSON.stringify(JSON.parse(doubled)) === plain) expect(() => parse(doubled)).toThrow(/duplicate key/);
      }),
      { numRuns: 500 },
    ));

  test('any bytes at all are accepted or refused, never a fault', () =>
    fc.assert(
      fc.property(fc.oneof(fc.uint8Array({ maxLength: 60 }), fc.string({ maxLength: 60 }).map(bytes), fc.json().map(bytes)), (body) => {
        try {
          parseStrictJson(body);
        } catch (error) {
          expect(error).toBeInstanceOf(ServiceError);
        }
      }),
      { numRuns: 1_000 },
    ));
});

test('JSON of a processor: a number that would become another one stays a text', () => {
  expect(parseExactly(String.raw`{"a":1000.00000000000000001,"b":[1e-400,2.5],"c":"1e-400 \"1e-400","d":-9007199254740991.4}`)).toEqual({
    a: '1000.00000000000000001',
    b: ['1e-400', 2.5],
    c: '1e-400 "1e-400',
    d: '-9007199254740991.4',
  });
  expect(() => parseExactly('{"a":')).toThrow(SyntaxError);
});

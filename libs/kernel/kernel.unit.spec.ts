import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import {
  canonicalJson,
  Deadline,
  decimal,
  fold,
  isCents,
  isUuid,
  lookAlike,
  MAX_AMOUNT_CENTS,
  parseUrl,
  ServiceError,
  STATUS_OF,
  sumCents,
  systemClock,
  timestamp,
  unreachable,
  within,
  wrongDate,
} from './index.js';

describe('cents (C4)', () => {
  test.each([1, 100, MAX_AMOUNT_CENTS, 100.0, 1e2])('%p are', (value) => expect(isCents(value)).toBe(true));
  test.each([0, -0, -1, 1.5, MAX_AMOUNT_CENTS + 1, 1e21, Number.NaN, Number.POSITIVE_INFINITY, '100', null, undefined, true, [1]])(
    '%p are not',
    (value) => expect(isCents(value)).toBe(false),
  );
  test('sums are exact, or a fault', () => {
    expect(sumCents([1, 2, 3], (one) => one)).toBe(6);
    expect(sumCents([], () => 1)).toBe(0);
    expect(() => sumCents([Number.MAX_SAFE_INTEGER, 1], (one) => one)).toThrow(/safe integer/);
  });
  test.each([
    [0, '0.00'],
    [5, '0.05'],
    [1_234, '12.34'],
    [-7, '-0.07'],
    [-1_234, '-12.34'],
    [9_007_199_254_740_991, '90071992547409.91'],
  ])('%d reads %s', (cents, text) => expect(decimal(cents)).toBe(text));
});

describe('canonical JSON (RFC 8785)', () => {
  test('keys by UTF-16 units, ECMAScript numbers, no white space', () => {
    // The example of RFC 8785, 3.2.3. Its keys are sorted by code units, not by code points.
    const value = { '\u20ac': 'Euro', '\r': 'CR', '\ufb33': 'Dalet', '1': 'One', '\ud83d\ude00': 'Smiley', '\u0080': 'Control', '\u00f6': 'o' };
    expect(Object.values(JSON.parse(canonicalJson(value)) as object)).toHaveLength(7);
    expect(canonicalJson(value)).toBe(
      '{"\\r":"CR","1":"One","\u0080":"Control","\u00f6":"o","\u20ac":"Euro","\ud83d\ude00":"Smiley","\ufb33":"Dalet"}',
    );
    expect(canonicalJson([1e21, 0.000001, 1e-7, -0, 100.0, 'é"\n'])).toBe('[1e+21,0.000001,1e-7,0,100,"é\\"\\n"]');
  });
  test('absent fields are absent', () => expect(canonicalJson({ a: undefined, b: null })).toBe('{"b":null}'));
  test('one meaning, one text; another meaning, another text', () =>
    fc.assert(
      fc.property(fc.jsonValue(), fc.jsonValue(), (a, b) => {
        expect(JSON.parse(canonicalJson(a))).toEqual(JSON.parse(JSON.stringify(a)));
        const shuffle = (value: unknown): unknown =>
          value !== null && typeof value === 'object' && !Array.isArray(value)
            ? Object.fromEntries(
                Object.entries(value)
                  .reverse()
                  .map(([key, one]) => [key, shuffle(one)]),
              )
            : Array.isArray(value)
              ? value.map(shuffle)
              : value;
        expect(canonicalJson(shuffle(a))).toBe(canonicalJson(a));
        expect(canonicalJson(a) === canonicalJson(b)).toBe(JSON.stringify(sorted(a)) === JSON.stringify(sorted(b)));
      }),
    ));
  /** Turns each object into an array of sorted pairs, without the function under test. */
  const sorted = (value: unknown): unknown => {
    if (Array.isArray(value)) return ['array', value.map(sorted)];
    if (value === null || typeof value !== 'object') return value;
    return ['object', Object.entries(value).sort(([a], [b]) => Buffer.compare(Buffer.from(a, 'utf16le').swap16(), Buffer.from(b, 'utf16le').swap16())).map(([key, one]) => [key, sorted(one)])]; // prettier-ignore
  };
});

describe('the clock', () => {
  test('timestamps are UTC with milliseconds (C2)', () => expect(timestamp(Date.UTC(2026, 0, 31, 12))).toBe('2026-01-31T12:00:00.000Z'));
  test('sleep ends by itself, or at once when aborted', async () => {
    const before = systemClock.monotonic();
    await systemClock.sleep(20);
    expect(systemClock.monotonic() - before).toBeGreaterThanOrEqual(18);
    const abort = new AbortController();
    const sleeping = systemClock.sleep(60_000, abort.signal);
    abort.abort();
    await sleeping;
    await systemClock.sleep(60_000, abort.signal);
  });
  test('within: the result, the failure, or the error when it takes too long', async () => {
    const late = () => new Error('late');
    expect(await within(systemClock, 1_000, Promise.resolve(1), late)).toBe(1);
    await expect(within(systemClock, 1_000, Promise.reject(new Error('own')), late)).rejects.toThrow('own');
    await expect(within(systemClock, 5, new Promise(() => undefined), late)).rejects.toThrow('late');
  });
  test('a deadline counts down with the clock that never jumps', () => {
    let monotonic = 5;
    const clock = { ...systemClock, now: () => 0, monotonic: () => monotonic };
    const deadline = new Deadline(clock, 100);
    monotonic = 65;
    expect(deadline.leftMs).toBe(40);
    monotonic = 200;
    expect(deadline.leftMs).toBe(-95);
  });
});

describe('the rest', () => {
  test('uuids', () => {
    expect(isUuid('018f0000-0000-7000-8000-000000000001')).toBe(true);
    expect(isUuid('018F0000-0000-7000-8000-00000000000A')).toBe(true);
    for (const not of [
      '',
      '018f0000',
      '018f0000-0000-7000-8000-00000000000g',
      '018f0000-0000-7000-8000-0000000000011',
      ' 018f0000-0000-7000-8000-000000000001',
      '018f0000-0000-7000-8000-000000000001\n',
      7,
      null,
    ])
      expect(isUuid(not)).toBe(false);
  });
  test('folding starts at the beginning', () => expect(fold({ initial: 1, evolve: (sum, one: number) => sum + one }, [2, 3])).toBe(6));
  test('an error of the catalogue knows its status, unless the transport has one of its own (C65)', () => {
    for (const [code, status] of Object.entries(STATUS_OF)) expect(new ServiceError(code as keyof typeof STATUS_OF, 'x').status).toBe(status);
    expect(new ServiceError('VALIDATION_ERROR', 'x', {}, { status: 413 }).status).toBe(413);
  });
  test('an impossible branch names the value that reached it', () => expect(() => unreachable({ a: 1 } as never)).toThrow('unhandled case: {"a":1}'));
});

test('a URL with letters beyond ASCII can be read however often', () => {
  for (let time = 0; time < 20_000; time++) expect(parseUrl('https://münchen.example/')?.hostname).toBe('xn--mnchen-3ya.example');
  expect(parseUrl('münchen')).toBeNull();
});

describe('references that look alike', () => {
  test.each<[what: string, one: string, other: string]>([
    ['composed and not composed', 'CASE-\u00C9', 'CASE-E\u0301'],
    ['upper and lower case', 'WIRE-9', 'wire-9'],
    ['sharp s in all its cases', 'STRASSE', 'straße'],
    ['a capital sharp s', 'STRA\u1E9EE', 'strasse'],
    ['a final sigma', 'ΟΔΟΣ', 'οδος'],
    ['a blank at the end, and one at the begin', 'WIRE-9', ' WIRE-9 '],
    ['two blanks', 'CASE 7', 'CASE  7'],
    ['a blank that does not break', 'CASE 7', 'CASE\u00A07'],
    ['a tab and the next line', 'CASE 7', 'CASE\t\u00857'],
    ['an ideographic blank', 'CASE 7', 'CASE\u30007'],
    ['a blank of Braille', 'CASE 7', 'CASE\u28007'],
    ['a hyphen that does not break', 'WIRE-9', 'WIRE\u20119'],
    ['a dash', 'WIRE-9', 'WIRE\u20139'],
    ['a minus', 'WIRE-9', 'WIRE\u22129'],
    ['a heavy minus', 'WIRE-9', 'WIRE\u27969'],
    ['a blank without width', 'WIRE-9', 'WI\u200BRE-9'],
    ['a soft hyphen', 'WIRE-9', 'WIRE\u00AD-9'],
    ['a word joiner', 'WIRE-9', 'WIRE-\u20609'],
    ['a byte order mark', 'WIRE-9', '\uFEFFWIRE-9'],
    ['a mark of direction', 'WIRE-9', 'WIRE-9\u202E'],
    ['a variation selector', 'WIRE-9', 'WIRE-9\uFE0F'],
    ['a variation selector of another plane', 'WIRE-9', 'WIRE\u{E0101}-9'],
    ['a tag character', 'WIRE-9', 'WIRE-9\u{E0041}'],
    ['a filler of Hangul', 'WIRE-9', 'WIRE\u3164-9'],
    ['a control character', 'WIRE-9', 'WIRE\u0007-9'],
    ['full width', 'WIRE-9', 'ＷＩＲＥ－９'],
    ['a circled digit', 'WIRE-9', 'WIRE-\u2468'],
    ['an invisible character between a letter and its accent', 'CASE-\u00C9', 'case-e\u034F\u0301'],
  ])('%s', (_, one, other) => {
    expect(one).not.toBe(other);
    expect(lookAlike(other)).toBe(lookAlike(one));
  });
  test.each([
    ['WIRE-9', 'WIRE9'],
    ['WIRE-9', 'WIRE 9'],
    ['CASE 7', 'CASE7'],
    ['CASE-E', 'CASE-É'],
    ['WIRE-9', 'WIRE-09'],
    ['A-1', 'Α-1'], // Greek
  ])('%s and %s are two', (one, other) => expect(lookAlike(one)).not.toBe(lookAlike(other)));
  test('the normal form is its own normal form', () => {
    fc.assert(
      fc.property(fc.string({ unit: 'binary', maxLength: 40 }), (text) => expect(lookAlike(lookAlike(text))).toBe(lookAlike(text))),
      { numRuns: 2_000 },
    );
  });
});

describe('dates from outside', () => {
  const now = Date.parse('2026-11-29T23:00:00.000Z');
  const paid = { notBefore: { date: '2026-11-20T00:30:00.000Z', what: 'the payment' } };
  test.each<[string, Parameters<typeof wrongDate>[2], RegExp | null]>([
    ['2026-11-29', {}, null],
    ['2026-11-30', {}, null],
    ['2026-11-30T23:59:59.999Z', {}, null],
    ['2026-12-01', {}, /^2026-12-01 lies in the future$/],
    ['2026-12-01T00:00:00.000Z', {}, /in the future/],
    ['2226-11-01', {}, /in the future/],
    ['2026-12-13', { aheadDays: 14 }, null],
    ['2026-12-14', { aheadDays: 14 }, /lies more than 14 days in the future$/],
    ['2025-10-25', {}, null],
    ['2025-10-24', {}, /^2025-10-24 lies more than 400 days back; --old allows that$/],
    ['2025-10-24', { old: true }, null],
    ['1999-01-01', { old: true }, null],
    ['2026-11-19', paid, null],
    ['2026-11-18', paid, /^2026-11-18 lies before the payment, 2026-11-20T00:30:00.000Z$/],
    ['2019-11-18', { ...paid, old: true }, /before the payment/],
    ['2026-12-01', { ...paid, old: true }, /in the future/],
  ])('%s with %j', (date, limits, why) => {
    if (why === null) expect(wrongDate(date, now, limits)).toBeNull();
    else expect(wrongDate(date, now, limits)).toMatch(why);
  });
});

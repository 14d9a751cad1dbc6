/**
 * All parsers of text from outside, with the errors that each may throw and the rules for accepted input. If another way gives the result (the
 * platform's JSON.parse, a slower check, the inverse), both results must agree.
 */
import { isIP } from 'node:net';
import { AccessTokens, authenticate, MemoryDirectory, newApiKey } from '#accounts';
import { AuthenticationError, ServiceError, systemClock } from '#kernel';
import { NO_FILTERS, openCursor } from '#payments';
import { brandOf, holdsCardNumber, maskCardNumbers, newKeyRing, passesLuhn } from '#platform';
import { idempotencyKeyOf, parseStrictJson } from '#platform/http';
import { checkUrl, Refused } from '#webhooks';
import { chargeRequestOf, instantOf, listRequestOf, refuseAmount } from '../../apps/api/partner/requests.js';
import { moment } from '../../apps/operator/terminal.js';
import { Broken, type FuzzTarget } from './coverage.js';

const keys = newKeyRing();
const ACCOUNT = '018f0000-0000-7000-8000-0000000000aa';

const demand = (right: boolean, message: string): void => {
  if (!right) throw new Broken(message);
};
/** Runs a parser that may throw one kind of error. null: the parser threw that error. */
const refusing = <T>(kind: abstract new (...args: never[]) => Error, parse: () => T): T | null => {
  try {
    return parse();
  } catch (error) {
    if (error instanceof kind) {
      // The message of a refusal is short. It must not repeat a long input.
      demand(error.message.length < 300, `a long refusal: ${error.message}`);
      return null;
    }
    throw error;
  }
};
const stable = (value: unknown): string => JSON.stringify(value);

/**
 * The number of key–value pairs of an object and of all objects in it. The count is slow and simple, so that it does not repeat mistakes of the
 * tested scanner.
 */
const members = (value: unknown): number =>
  value === null || typeof value !== 'object'
    ? 0
    : Object.values(value).reduce<number>((sum, item) => sum + members(item), 0) + (Array.isArray(value) ? 0 : Object.keys(value).length);

const strictJson: FuzzTarget = {
  name: 'strict JSON',
  files: ['platform/http/strict-json.js'],
  seeds: ['{"a":1}', '{"a":{"b":[1,"x",null,true,-0.5e3]}}', '{"\\u0041":"\\ud83d\\ude00"}', '{}', '{"a":1,"a":2}'],
  dictionary: [
    '"',
    ':',
    ',',
    '{',
    '}',
    '[',
    ']',
    '\\',
    '\\u',
    '\\ud800',
    '\\u0000',
    '"__proto__":1',
    'null',
    'true',
    '1e309',
    '9007199254740993',
    '-0',
    '  ',
    '\ufeff',
    '"a":',
  ],
  run: (input) => {
    const found = refusing(ServiceError, () => parseStrictJson(input));
    if (found === null) return;
    const text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(input);
    demand(stable(found) === stable(JSON.parse(text)), 'another value than JSON.parse');
    for (const one of textsIn(found)) demand(!one.includes('\0') && Buffer.from(one).toString() === one, 'a NUL or half a character came through');
    demand(pairsIn(text) === members(found), 'a key was there twice, and one of its values is lost');
  },
};
const textsIn = (value: unknown): string[] => {
  if (typeof value === 'string') return [value];
  return value !== null && typeof value === 'object' ? [...Object.keys(value), ...Object.values(value).flatMap(textsIn)] : [];
};
/** The number of key–value pairs in a text, counted after its strings are removed. */
const pairsIn = (text: string): number => text.replace(/"(?:[^"\\]|\\.)*"/g, '').split(':').length - 1;

const create = (paymentMethod: unknown, more: object = {}) => ({
  portalId: ACCOUNT,
  amountCents: 100,
  lineItems: [{ amountCents: 100, referenceId: 'x' }],
  paymentMethod,
  ...more,
});

const card: FuzzTarget = {
  name: 'card, expiry and security code',
  files: ['api/partner/requests.js', 'platform/card-text.js'],
  seeds: ['4242 4242 4242 4242|12/30|123', '4000007770000000205|0131|0000', '378282246310005|01/99|1234'],
  dictionary: ['|', ' ', '/', '0', '4242424242424242', '12/30', '00/00', '13/30', '１２', '\u2007', '\t'],
  run: (input) => {
    const [cardNumber = '', expirationDate = '', cvv = ''] = input.toString('utf8').split('|');
    const request = refusing(ServiceError, () => chargeRequestOf(ACCOUNT, create({ type: 'card', cardNumber, expirationDate, cvv })));
    if (request === null) return;
    const { instrument } = request;
    demand(instrument.type === 'card', 'no card');
    if (instrument.type !== 'card') return;
    const digits = instrument.number.reveal();
    demand(/^\d{12,19}$/.test(digits) && passesLuhn(digits) && digits === cardNumber.replaceAll(' ', ''), 'a number that is none');
    demand(
      instrument.expiry.month >= 1 && instrument.expiry.month <= 12 && instrument.expiry.year >= 2000 && instrument.expiry.year <= 2099,
      'an expiry that is none',
    );
    demand(/^\d{3,4}$/.test(instrument.cvv.reveal()), 'a security code that is none');
    demand(!stable(request).includes(digits), 'the number shows in the request');
  },
};

const body: FuzzTarget = {
  name: 'create request',
  files: ['api/partner/requests.js', 'platform/http/fields.js', 'platform/card-text.js'],
  seeds: [
    stable(
      create(
        { type: 'card_token', token: 'tok_sandbox_approved' },
        { payer: { email: 'a@b.co', address: { zip: '1' } }, referenceId: 'r', metadata: { a: [1] } },
      ),
    ),
  ],
  dictionary: [
    '"amount":1',
    '"metadata":{"amount":1}',
    '"capture":"auth"',
    '"captureMode":"sale"',
    '"type":"vault"',
    'null',
    '[]',
    '{}',
    '"4242424242424242"',
    '4242424242424242',
    '99999999',
    '1.5',
    '"payer":',
    '"lineItems":',
  ],
  run: (input) => {
    const parsed = refusing(ServiceError, () => parseStrictJson(input));
    if (parsed === null) return;
    const request = refusing(ServiceError, () => chargeRequestOf(ACCOUNT, parsed));
    if (request === null) return;
    demand(request.lineItems.reduce((sum, line) => sum + line.amountCents, 0) === request.amountCents, 'the lines do not sum to the amount');
    demand(request.lineItems.length >= 1 && request.lineItems.length <= 50, 'a number of lines');
    for (const { amountCents } of request.lineItems)
      demand(Number.isSafeInteger(amountCents) && amountCents >= 1 && amountCents <= 99_999_999, 'an amount');
    const { instrument: _, ...rest } = request;
    demand(!holdsCardNumber(stable({ ...rest, lineItems: rest.lineItems.map(({ metadata: __, ...line }) => line) })), 'a card number in free text');
    demand(refusing(ServiceError, () => refuseAmount(parsed)) !== null, 'a field named amount');
  },
};

const cursor: FuzzTarget = {
  name: 'cursor',
  files: ['payments/cursor.js'],
  seeds: ['AgAAAZqu0000', 'A'.repeat(55), ...[1, 2].map((version) => Buffer.alloc(41, version).toString('base64url'))],
  dictionary: ['=', '-', '_', '+', '/', 'AQ', 'Ag', '\n'],
  run: (input) => {
    const text = input.toString('utf8');
    // The fuzzer does not have the key. So every cursor that opens is a forged one.
    if (refusing(ServiceError, () => openCursor(keys, ACCOUNT, NO_FILTERS, text)) !== null) throw new Broken('a forged cursor opened');
  },
};

const directory = new MemoryDirectory();
const { apiKey } = newApiKey(ACCOUNT, 'test', keys);
const deps = { directory, keys, environment: 'sandbox' as const, tokens: new AccessTokens(keys, 'sandbox', systemClock) };
/**
 * The parser is asynchronous, because it looks keys up in `directory`, which is empty. Its result comes after `run` has returned. So a later call of
 * `run` throws the failure.
 */
const authorization: FuzzTarget = {
  name: 'authorization header and access token',
  files: ['accounts/access-token.js', 'accounts/api-key.js'],
  seeds: [
    `ApiKey ${apiKey}`,
    apiKey,
    'Bearer a.b.c',
    `Bearer ${Buffer.from('{"alg":"EdDSA","typ":"at+jwt","kid":"x"}').toString('base64url')}.e30.AA`,
  ],
  dictionary: [
    'ApiKey ',
    'Bearer ',
    'pc_test_',
    'pc_live_',
    '.',
    ' ',
    '\t',
    '=',
    Buffer.from('{"alg":"none"}').toString('base64url'),
    Buffer.from('{"alg":"HS256","typ":"at+jwt","kid":"x"}').toString('base64url'),
  ],
  run: (input) => {
    const lines = input.toString('latin1').split('\n');
    void authenticate(lines, deps).then(
      () => failed.push('somebody was let in'),
      (error: unknown) => {
        if (!(error instanceof AuthenticationError) || error.status !== 401) failed.push(String(error));
      },
    );
    if (failed.length > 0) throw new Broken(failed[0]);
  },
};
const failed: string[] = [];

const cardText: FuzzTarget = {
  name: 'card numbers in text',
  files: ['platform/card-text.js'],
  seeds: ['pay 4242 4242 4242 4242 now', '4242424242424242', '3782-822463-10005', 'INV-1766000000123', '6205500000000000004', '٤٢٤٢٤٢٤٢٤٢٤٢٤٢٤٢'],
  dictionary: [
    ...['4242424242424242', ' ', '-', '4', '0000', 'ａ', '٣', 'x', '5555 5555 5555 4444', '+', '\u200b', '４２４２', '⑯', '½', ' - '],
    '01a1fe14-55ea-7d72-9ef7-b67d168fcaac',
  ],
  run: (input) => {
    const text = input.toString('utf8');
    const masked = maskCardNumbers(text);
    demand(holdsCardNumber(text) === (masked !== text), 'found and masked disagree');
    demand(!holdsCardNumber(masked), 'a card number survived its mask');
    // An independent version of C9: groups of digits with at most three other characters between them. For plain text only.
    if (/[^ -~]/.test(text)) return;
    const known = (digits: string) => brandOf(digits) !== 'unknown' && passesLuhn(digits);
    for (const chain of text
      .replaceAll(/(?<![\da-z])[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}(?![\da-z])/gi, 'x')
      .split(/[^\d]*[A-Za-z][^\d]*|[^\dA-Za-z]{4,}/)) {
      const groups = chain.match(/\d+/g) ?? [];
      for (let from = 0; from < groups.length; from++)
        for (let to = from + 1; to <= groups.length; to++) {
          const digits = groups.slice(from, to).join('');
          if (digits.length > 19) break;
          // 13 digits may be a telephone number.
          if (digits.length > 13 && known(digits)) demand(holdsCardNumber(text), 'a card number was passed over');
        }
    }
  },
};

const idempotencyKey: FuzzTarget = {
  name: 'idempotency key',
  files: ['platform/http/headers.js'],
  seeds: ['order-1', 'k'.repeat(255), ''],
  dictionary: ['\n', '\t', '\x7f', ' ', 'é'],
  run: (input) => {
    const values = input.toString('latin1').split('\n');
    const key = refusing(ServiceError, () => idempotencyKeyOf(values.flatMap((value) => ['Idempotency-Key', value])));
    if (key === null) return;
    demand(values.length === 1 && key === values[0] && /^[ -~]{1,255}$/.test(key), 'a key that is none');
  },
};

const instants: FuzzTarget = {
  name: 'instants',
  files: ['api/partner/requests.js', 'operator/terminal.js'],
  seeds: ['2026-01-31', '2026-01-31T12:00:00Z', '2026-02-29T23:59:59.999999999+14:00', '0000-00-00'],
  dictionary: ['T', 'Z', '+', '-', ':', '.', '00', '24', '60', '2024-02-29', '9999-12-31'],
  run: (input) => {
    const text = input.toString('utf8');
    const epochMs = instantOf(text);
    if (epochMs !== null) {
      const again = new Date(epochMs).toISOString();
      demand(/^\d{4}-/.test(again) && instantOf(again) === epochMs, `${text} is ${again}, and back it is not`);
      if (/^\d{4}-\d{2}-\d{2}$/.test(text)) demand(again === `${text}T00:00:00.000Z`, `${text} became ${again}`);
    }
    void refusing(ServiceError, () => listRequestOf(ACCOUNT, { from: text, to: '2026-01-01' }));
    try {
      const written = moment(text);
      demand(new Date(written).toISOString() === written, 'a moment that is none');
    } catch (error) {
      if ((error as Error).name !== 'InvalidArgumentError' && (error as { code?: string }).code !== 'commander.invalidArgument') throw error;
    }
  },
};

const webhookUrl: FuzzTarget = {
  name: 'webhook addresses',
  files: ['webhooks/target.js'],
  seeds: [
    'https://hooks.example.com/a?b=c',
    'https://user@host.example/',
    'https://127.0.0.1/',
    'https://[::1]/',
    'https://0x7f.1/',
    'https://example.com:8443/',
  ],
  dictionary: [
    'https://',
    'http://',
    '@',
    ':',
    '#',
    '\\',
    '%2e',
    '。',
    '①',
    '0x',
    'localhost',
    '.internal',
    '[',
    ']',
    '::ffff:',
    ':443',
    '\t',
    '..',
    'xn--',
  ],
  run: (input) => {
    const text = input.toString('utf8');
    const target = refusing(Refused, () => checkUrl(text, { privateTargets: [], ports: [443, 8443], blockedNetworks: [] }));
    if (target === null) return;
    const url = new URL(target.href);
    demand(url.protocol === 'https:' && url.username === '' && url.password === '' && url.hash === '', 'a URL that is refused by rule');
    demand(isIP(url.hostname.replace(/^\[|\]$/g, '')) === 0, `${url.hostname} is an address`);
    demand(target.hostname.includes('.') && !/(^|\.)localhost$|\.internal$|\.local$/.test(target.hostname), `${target.hostname} came through`);
    demand([443, 8443].includes(target.port), 'a port');
  },
};

/** Shows that guidance by coverage works. Random inputs alone do not pass the four nested conditions before the bug. */
export const plantedTarget: FuzzTarget = {
  name: 'planted',
  files: ['fuzz/parsers.js'],
  seeds: ['hello'],
  dictionary: [],
  run: (input) => {
    if (input[0] === 0x46) {
      if (input[1] === 0x55) {
        if (input[2] === 0x5a) {
          if (input[3] === 0x5a) throw new Broken('found');
        }
      }
    }
  },
};

export const PARSERS: readonly FuzzTarget[] = [strictJson, card, body, cursor, authorization, cardText, idempotencyKey, instants, webhookUrl];

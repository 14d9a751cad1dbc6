import { expect, test } from '@jest/globals';
import { comparableEmail, isEmail, unseenInEmail } from './email.js';

test.each([
  'ada@example.org',
  'A.d+a@sub.example.co',
  'ada@xn--bcher-kva.example',
  'ada@bücher.example',
  'ada@Bücher.EXAMPLE',
  'ада@почта.рф',
  '山田@例え。テスト',
  'ada@faß.de',
  `${'a'.repeat(64)}@example.org`,
])('%s is accepted', (address) => expect([isEmail(address), unseenInEmail(address)]).toEqual([true, null]));

test.each([
  '',
  'ada',
  'ada@',
  '@example.org',
  'ada@example',
  'ada@@example.org',
  'a b@example.org',
  'ada@exa mple.org',
  'ada@ex%61mple.org',
  'ada@bücher%2eexample',
  'ada@bücher.example/x',
  'ada@bücher.example:80',
  'ada@１27.0.0.1',
  'ada@ᵃ\u0338.\u2260\ufffd',
  `ada@${'ü'.repeat(64)}.example`,
  `${'a'.repeat(65)}@example.org`,
  `a@${'ü.'.repeat(40)}example`,
])('%j is refused', (address) => expect(isEmail(address)).toBe(false));

test.each(['\u00ad', '\u200b', '\u200d', '\u2060', '\u202e', '\u3164', '\ufe0f', '\u{e0001}', '\u034f', '\u0007', '\u007f', '\u0085'])(
  'an address with %j is refused, and compares equal to the one that people see',
  (unseen) => {
    for (const address of [`a${unseen}da@example.org`, `ada@exa${unseen}mple.org`, `ada@example.org${unseen}`]) {
      expect(isEmail(address) && unseenInEmail(address) === null).toBe(false);
      expect(comparableEmail(address)).toBe('ada@example.org');
    }
  },
);

test.each([
  [' Ada@Example.ORG ', 'ada@example.org'],
  ['ada@Bücher.example', 'ada@xn--bcher-kva.example'],
  ['ada@bu\u0308cher.example', 'ada@xn--bcher-kva.example'],
  ['ada@XN--bcher-kva.example', 'ada@xn--bcher-kva.example'],
  ['山田@例え。テスト', '山田@xn--r8jz45g.xn--zckzah'],
  ['no domain', '@no domain'],
])('%j is compared as %j', (address, form) => expect(comparableEmail(address)).toBe(form));

/** Rate limits of hosted checkout (C65). */
import { expect, test } from '@jest/globals';
import { readConfig } from '#platform';
import { clientAddress, createRateLimits, type LoweredBy, LOWERED_MS, type RateLimitOptions } from './rate-limits.js';

const OFF = { perAddress: null, unsignedPerPortal: null, declinesPerPortal: null };
const made = (options: Partial<RateLimitOptions>) => {
  let now = 0;
  const lowered: [portalId: string, by: LoweredBy][] = [];
  const limits = createRateLimits({ ...OFF, onLowered: (portalId, by) => void lowered.push([portalId, by]), ...options }, { monotonic: () => now });
  return { ...limits, alarms: lowered, pass: (ms: number) => void (now += ms) };
};
/** The number of the first `count` requests that are admitted. */
const admitted = (count: number, ask: () => number | null) => Array.from({ length: count }, ask).filter((seconds) => seconds === null).length;

test('they are on in production, off in the sandbox, and can be set', () => {
  const limitsOf = (env: Readonly<Record<string, string>>) => {
    const { checkoutRatePerAddress, checkoutUnsignedPerPortal, checkoutDeclinesPerPortal } = readConfig(env);
    return [checkoutRatePerAddress, checkoutUnsignedPerPortal, checkoutDeclinesPerPortal];
  };
  const production = {
    ENVIRONMENT: 'production',
    MASTER_KEY_FILE: '/k',
    DATA_DIR: '/d',
    DATABASE_URL: 'postgres://h/d',
    PUBLIC_URL: 'https://pay.example',
  };
  expect(limitsOf({})).toEqual([null, null, null]);
  expect(limitsOf({ ...production, PROXY_HOPS: '0' })).toEqual([60, 300, 30]);
  expect(limitsOf({ ...production, CHECKOUT_RATE_PER_ADDRESS: '0', CHECKOUT_UNSIGNED_PER_PORTAL: '7' })).toEqual([null, 7, 30]);
  expect(() => limitsOf(production)).toThrow(/PROXY_HOPS: required in production/);
  expect(() => limitsOf({ CHECKOUT_RATE_PER_PORTAL: '5' })).toThrow(/See CHECKOUT_UNSIGNED_PER_PORTAL/);
});

test('off: everything is let in', () => {
  const limits = made({});
  expect(admitted(10_000, () => limits.admit('a'))).toBe(10_000);
  expect(admitted(10_000, () => limits.admitAt('a', 'p', 'unsigned intake'))).toBe(10_000);
  for (let decline = 0; decline < 10_000; decline++) limits.declined('p');
  expect([limits.lowered(), limits.alarms]).toEqual([0, []]);
});

test('pages have a number of their own: twenty for each request of an address', () => {
  const limits = made({ perAddress: 6 });
  expect(admitted(6, () => limits.admit('a'))).toBe(6);
  expect(admitted(200, () => limits.admitPage('a'))).toBe(120);
  expect(limits.admitPage('b')).toBeNull();
  expect(admitted(10_000, () => made({}).admitPage('a'))).toBe(10_000);
});

test('so many a minute per address, then as the minute passes', () => {
  const limits = made({ perAddress: 6 });
  expect(admitted(6, () => limits.admit('a'))).toBe(6);
  expect(limits.admit('a')).toBe(10);
  expect(limits.admit('b')).toBeNull();
  limits.pass(9_999);
  expect(limits.admit('a')).toBe(1);
  limits.pass(1);
  expect(limits.admit('a')).toBeNull();
  expect(limits.admit('a')).toBe(10);
});

test('a submission counts once for each started 8 KiB of its content, and never for more than a minute', () => {
  const submitsOf = (bytes: number, perAddress = 60) => {
    const limits = made({ perAddress });
    return admitted(100, () => limits.admit('a', bytes));
  };
  expect([0, 1, 8_192, 8_193, 62_000].map((bytes) => submitsOf(bytes))).toEqual([60, 60, 60, 30, 7]);
  const small = made({ perAddress: 6, declinesPerPortal: 1 });
  expect(small.admit('a', 62_000)).toBeNull();
  expect(small.admit('a', 62_000)).toBe(60);
  expect(small.admit('a')).toBe(10);
  small.pass(60_000);
  expect(small.admit('a', 62_000)).toBeNull();
  const lowered = made({ perAddress: 60, declinesPerPortal: 1 });
  for (let decline = 0; decline < 2; decline++) lowered.declined('p');
  expect(admitted(10, () => lowered.admitAt('a', 'p', 'submit', 20_000))).toBe(2);
  expect(admitted(10, () => lowered.admitAt('b', 'p', 'submit', 62_000))).toBe(1);
});

test.each([
  ['unsigned intakes', { unsignedPerPortal: 30 }],
  ['declines', { declinesPerPortal: 30 }],
] as const)('too many %s at a portal lower the limits by address there to a tenth, and nowhere else; they never close it', (by, limit) => {
  const limits = made({ perAddress: 60, ...limit });
  const flood = (count: number) => {
    for (let one = 0; one < count; one++)
      if (by === 'declines') limits.declined('p');
      else limits.admitAt(`stranger ${one}`, 'p', 'unsigned intake');
  };
  flood(30);
  expect(limits.lowered()).toBe(0);
  expect(admitted(60, () => limits.admitAt('a', 'p', 'submit'))).toBe(60);
  flood(1);
  expect([limits.lowered(), limits.alarms]).toEqual([1, [['p', by]]]);
  expect(admitted(60, () => limits.admitAt('a', 'p', 'submit'))).toBe(6);
  expect(limits.admitAt('a', 'p', 'unsigned intake')).toBe(10);
  // Every other address still reaches the portal, and every address reaches other portals.
  expect(admitted(6, () => limits.admitAt('b', 'p', 'unsigned intake'))).toBe(6);
  expect(admitted(60, () => limits.admitAt('a', 'q', 'unsigned intake'))).toBe(by === 'declines' ? 60 : 37);
});

test('lowered limits come back some time after the number was last exceeded; an alarm comes once a minute for each reason', () => {
  const limits = made({ perAddress: 60, declinesPerPortal: 1, unsignedPerPortal: 1 });
  limits.declined('p');
  for (let decline = 0; decline < 100; decline++) limits.declined('p');
  expect(limits.alarms).toEqual([['p', 'declines']]);
  limits.pass(30_000);
  limits.declined('p');
  limits.pass(LOWERED_MS - 1);
  expect([limits.lowered(), limits.alarms.length]).toEqual([1, 1]);
  limits.pass(1);
  expect(limits.lowered()).toBe(0);
  expect(admitted(60, () => limits.admitAt('a', 'p', 'submit'))).toBe(60);
  for (let second = 0; second < 180; second++) {
    limits.declined('p');
    limits.declined('p');
    limits.pass(1_000);
  }
  expect(limits.alarms).toHaveLength(4);
  for (let intake = 0; intake < 3; intake++) limits.admitAt('b', 'p', 'unsigned intake');
  expect(limits.alarms.at(-1)).toEqual(['p', 'unsigned intakes']);
});

test('so many addresses that the oldest are forgotten: those in use stay counted', () => {
  const limits = made({ perAddress: 2 });
  limits.admit('a');
  for (let other = 0; other < 99_999; other++) limits.admit(`other ${other}`);
  expect(limits.admit('a')).toBeNull();
  limits.admit('one more');
  expect(limits.admit('a')).not.toBeNull();
});

test('the client’s address is the one that our own proxies saw, never one that it wrote itself', () => {
  expect(clientAddress('10.0.0.1', '6.6.6.6, 1.2.3.4', 0)).toBe('10.0.0.1');
  expect(clientAddress('10.0.0.1', '6.6.6.6, 1.2.3.4', 1)).toBe('1.2.3.4');
  expect(clientAddress('10.0.0.1', '6.6.6.6, 1.2.3.4, 10.0.0.2', 2)).toBe('1.2.3.4');
  expect(clientAddress('10.0.0.1', undefined, 1)).toBe('10.0.0.1');
  expect(clientAddress('10.0.0.1', '1.2.3.4', 3)).toBe('10.0.0.1');
});

test.each([
  ['2001:db8:1:2:3:4:5:6', '2001:db8:1:2::/64'],
  ['2001:DB8:1:2::9', '2001:db8:1:2::/64'],
  ['2001:db8::1', '2001:db8:0:0::/64'],
  ['::1', '0:0:0:0::/64'],
  ['1::', '1:0:0:0::/64'],
  ['fe80::1%eth0', 'fe80:0:0:0::/64'],
  ['[2001:db8:1:2::9]:443', '2001:db8:1:2::/64'],
  ['::ffff:192.0.2.1', '192.0.2.1'],
  ['::ffff:c000:201', '192.0.2.1'],
  ['192.0.2.1:4711', '192.0.2.1'],
  ['192.0.2.1', '192.0.2.1'],
  ['unknown', 'unknown'],
])('%s counts as %s', (address, counted) => {
  expect(clientAddress(address, undefined, 0)).toBe(counted);
  expect(clientAddress('10.0.0.1', address, 1)).toBe(counted);
});

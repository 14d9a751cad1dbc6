/** Rate limits of hosted checkout (C65): off unless an operator turns them on. */
import { expect, test } from '@jest/globals';
import { clientAddress, createRateLimits } from './rate-limits.js';

const clock = () => {
  let now = 0;
  return { monotonic: () => now, pass: (ms: number) => void (now += ms) };
};
const P = { address: 'a', portalId: 'p' };

test('off: everything is let in', () => {
  const limits = createRateLimits({ perAddress: null, perPortal: null }, clock());
  for (let request = 0; request < 10_000; request++) expect(limits.admit(P)).toBeNull();
});
test('so many a minute per address, then as the minute passes', () => {
  const time = clock();
  const limits = createRateLimits({ perAddress: 6, perPortal: null }, time);
  for (let request = 0; request < 6; request++) expect(limits.admit(P)).toBeNull();
  expect(limits.admit(P)).toBe(10);
  expect(limits.admit({ ...P, address: 'b' })).toBeNull();
  time.pass(9_999);
  expect(limits.admit(P)).toBe(1);
  time.pass(1);
  expect(limits.admit(P)).toBeNull();
  expect(limits.admit(P)).toBe(10);
});
test('a portal’s limit counts all addresses, and one that is refused costs the other bucket nothing', () => {
  const limits = createRateLimits({ perAddress: 2, perPortal: 3 }, clock());
  expect([limits.admit(P), limits.admit(P), limits.admit(P)]).toEqual([null, null, 30]);
  expect(limits.admit({ ...P, address: 'b' })).toBeNull();
  expect(limits.admit({ ...P, address: 'c' })).toBe(20);
  expect(limits.admit({ address: 'c', portalId: null })).toBeNull();
});
test('a request that is refused by address leaves no trace of its portals', () => {
  const limits = createRateLimits({ perAddress: 1, perPortal: 1 }, clock());
  expect(limits.admit({ address: 'a', portalId: 'p1' })).toBeNull();
  expect(limits.admit({ address: 'a', portalId: 'p2' })).toBe(60);
  expect(limits.admit({ address: 'b', portalId: 'p2' })).toBeNull();
});
test('the client’s address is the one that our own proxies saw, never one that it wrote itself', () => {
  expect(clientAddress('10.0.0.1', '6.6.6.6, 1.2.3.4', 0)).toBe('10.0.0.1');
  expect(clientAddress('10.0.0.1', '6.6.6.6, 1.2.3.4', 1)).toBe('1.2.3.4');
  expect(clientAddress('10.0.0.1', '6.6.6.6, 1.2.3.4, 10.0.0.2', 2)).toBe('1.2.3.4');
  expect(clientAddress('10.0.0.1', undefined, 1)).toBe('10.0.0.1');
  expect(clientAddress('10.0.0.1', '1.2.3.4', 3)).toBe('10.0.0.1');
});

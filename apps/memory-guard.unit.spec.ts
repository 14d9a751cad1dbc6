/** Flags that show memory are found in every spelling that Node reads. */
import { expect, test } from '@jest/globals';
import { memoryFlag } from './memory-guard.js';

test.each([
  ['--heapsnapshot-signal=SIGUSR2', '--heapsnapshot-signal=SIGUSR2'],
  ['--heapsnapshot_signal=SIGUSR2', '--heapsnapshot-signal=SIGUSR2'],
  ['"--heapsnapshot-signal=SIGUSR2"', '--heapsnapshot-signal=SIGUSR2'],
  ['"--heap\\snapshot-signal=SIGUSR2"', '--heapsnapshot-signal=SIGUSR2'],
  ['--max-old-space-size=100  --he"ap"-prof', '--heap-prof'],
  ['--title="a b\\" c" --inspect', '--inspect'],
  ['--tls-keylog=F', '--tls-keylog=F'],
  ['"--tls\\_keylog=F"', '--tls-keylog=F'],
  ['--trace-tls', '--trace-tls'],
])('NODE_OPTIONS=%s', (options, flag) => {
  expect(memoryFlag([], options)).toBe(flag);
  expect(memoryFlag(['--enable-source-maps', flag], '')).toBe(flag);
});

test('other flags, and such words within one, are let through', () => {
  expect(memoryFlag(['--enable-source-maps'], '--max-old-space-size=100 "--title=a --inspect"')).toBeUndefined();
  expect(memoryFlag([], '')).toBeUndefined();
});

import { expect, test } from '@jest/globals';
import { nextPass } from './scheduled-passes.js';

test.each([
  ['incremental', '2026-03-04T01:59:59.999Z', '2026-03-04T02:00:00.000Z'],
  ['incremental', '2026-03-04T02:00:00.000Z', '2026-03-05T02:00:00.000Z'],
  ['incremental', '2026-12-31T23:00:00.000Z', '2027-01-01T02:00:00.000Z'],
  ['full', '2026-03-04T12:00:00.000Z', '2026-03-08T03:00:00.000Z'],
  ['full', '2026-03-08T02:59:59.999Z', '2026-03-08T03:00:00.000Z'],
  ['full', '2026-03-08T03:00:00.000Z', '2026-03-15T03:00:00.000Z'],
] as const)('the %s pass after %s is due at %s', (pass, now, due) => {
  expect(nextPass(pass, Date.parse(now)).toISOString()).toBe(due);
});

/** When the absence of a charge can be decided, also on the days on which the clocks change. */
import { expect, test } from '@jest/globals';
import { cutOffAfter, decidedBy } from './cut-off.js';

const PACIFIC = { time: '16:00', timeZone: 'America/Los_Angeles' };
const at = (text: string) => Date.parse(text);
const shown = (ms: number) => new Date(ms).toISOString();

test.each([
  ['in winter', '2026-01-15T12:00:00Z', '2026-01-16T00:00:00.000Z'],
  ['in summer', '2026-07-15T12:00:00Z', '2026-07-15T23:00:00.000Z'],
  ['at the cut-off itself, the next one', '2026-07-15T23:00:00Z', '2026-07-16T23:00:00.000Z'],
  ['the evening before the clocks go forward', '2026-03-08T01:00:00Z', '2026-03-08T23:00:00.000Z'],
  ['on the day on which the clocks go forward', '2026-03-08T12:00:00Z', '2026-03-08T23:00:00.000Z'],
  ['the evening before the clocks go back', '2026-11-01T00:00:00Z', '2026-11-02T00:00:00.000Z'],
  ['on the day on which the clocks go back', '2026-11-01T12:00:00Z', '2026-11-02T00:00:00.000Z'],
])('the first cut-off after a time: %s', (_, from, expected) => {
  expect(shown(cutOffAfter(PACIFIC, at(from)))).toBe(expected);
});

test('a cut-off that the change of the clocks skips is not lost, and one that comes twice is one', () => {
  expect(shown(cutOffAfter({ time: '02:30', timeZone: 'America/Los_Angeles' }, at('2026-03-08T09:00:00Z')))).toMatch(/^2026-03-08T(09|10):30/);
  expect(shown(cutOffAfter({ time: '01:30', timeZone: 'America/Los_Angeles' }, at('2026-11-01T07:00:00Z')))).toMatch(/^2026-11-01T0[89]:30/);
});

test.each(['Asia/Kolkata', 'Pacific/Auckland', 'Pacific/Honolulu', 'UTC'])('in %s, each cut-off of a year is at the time of the day', (timeZone) => {
  for (let ms = at('2026-01-01T00:00:00Z'); ms < at('2027-01-01T00:00:00Z'); ms += 7 * 3_600_000) {
    const next = cutOffAfter({ time: '16:00', timeZone }, ms);
    expect(next).toBeGreaterThan(ms);
    expect(next - ms).toBeLessThanOrEqual(25 * 3_600_000);
    expect(new Date(next).toLocaleTimeString('en-GB', { timeZone })).toBe('16:00:00');
  }
});

test('a charge less than 10 minutes before a cut-off may be in the next batch; a batch is settled within 6 hours', () => {
  expect(shown(decidedBy(PACIFIC, at('2026-07-15T22:49:00Z')).untilMs)).toBe('2026-07-16T05:00:00.000Z');
  expect(shown(decidedBy(PACIFIC, at('2026-07-15T22:51:00Z')).untilMs)).toBe('2026-07-17T05:00:00.000Z');
});

test('without a known cut-off, 48 hours pass', () => {
  expect(shown(decidedBy(null, at('2026-07-15T12:00:00Z')).untilMs)).toBe('2026-07-17T12:00:00.000Z');
});

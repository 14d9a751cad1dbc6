/** Tests the months of statements: they meet without a gap, and begin when a clock in the zone shows the first day. */
import { describe, expect, test } from '@jest/globals';
import { isZone, monthOf } from './month.js';

test.each([
  ['2026-11', 'UTC', '2026-11-01T00:00:00.000Z', '2026-12-01T00:00:00.000Z'],
  ['2026-02', 'UTC', '2026-02-01T00:00:00.000Z', '2026-03-01T00:00:00.000Z'],
  ['2026-12', 'UTC', '2026-12-01T00:00:00.000Z', '2027-01-01T00:00:00.000Z'],
  // November 2026 begins in summer time and ends in winter time.
  ['2026-11', 'America/Chicago', '2026-11-01T05:00:00.000Z', '2026-12-01T06:00:00.000Z'],
  ['2026-07', 'America/Phoenix', '2026-07-01T07:00:00.000Z', '2026-08-01T07:00:00.000Z'],
  ['2026-11', 'Pacific/Honolulu', '2026-11-01T10:00:00.000Z', '2026-12-01T10:00:00.000Z'],
  ['2026-11', 'Pacific/Kiritimati', '2026-10-31T10:00:00.000Z', '2026-11-30T10:00:00.000Z'],
  ['2026-11', 'Asia/Kathmandu', '2026-10-31T18:15:00.000Z', '2026-11-30T18:15:00.000Z'],
  // Midnight of the first comes twice: the clock goes back from 01:00 to 00:00.
  ['2026-11', 'America/Havana', '2026-11-01T04:00:00.000Z', '2026-12-01T05:00:00.000Z'],
  // There is no midnight: the clock goes from 00:00 to 01:00.
  ['2017-10', 'America/Asuncion', '2017-10-01T04:00:00.000Z', '2017-11-01T03:00:00.000Z'],
])('%s in %s', (period, zone, from, to) => {
  expect(monthOf(period, zone)).toMatchObject({ from, to });
});

test('the days are those of the calendar, whatever the zone', () => {
  for (const zone of ['UTC', 'America/Chicago', 'Pacific/Kiritimati'])
    expect(monthOf('2026-12', zone)).toMatchObject({ firstDay: '2026-12-01', nextFirstDay: '2027-01-01' });
});

describe('of every zone', () => {
  const months = ['2026-03', '2026-04', '2026-10', '2026-11', '2026-12'];
  test('months meet, and begin at the first instant of their first day', () => {
    for (const zone of Intl.supportedValuesOf('timeZone')) {
      const day = new Intl.DateTimeFormat('en-CA', { timeZone: zone, year: 'numeric', month: '2-digit' });
      for (const [index, period] of months.entries()) {
        const month = monthOf(period, zone)!;
        const begin = Date.parse(month.from);
        expect([zone, day.format(begin), day.format(begin - 1) === period]).toEqual([zone, period, false]);
        if (index > 0 && period !== '2026-10') expect([zone, monthOf(months[index - 1]!, zone)!.to]).toEqual([zone, month.from]);
      }
    }
  });
});

test.each(['2026-13', '2026-00', '2026-1', '1999-12', '2100-01', '2026-11-01', ' 2026-11', '2026-11\n', '', 'now'])('%j is no month', (period) => {
  expect(monthOf(period, 'UTC')).toBeNull();
});

test.each(['', 'EST5EDT4', 'Chicago', 'america/chicago', '+05:00', 'UTC+3', 'America/Nowhere', "UTC'"])('%j is no zone', (zone) => {
  expect(isZone(zone)).toBe(false);
  expect(monthOf('2026-11', zone)).toBeNull();
});

import { describe, expect, test } from '@jest/globals';
import { levelOfLine } from './embedded.js';

describe('the level of a line of the embedded Postgres', () => {
  test.each([
    ['00000 LOG:  checkpoint complete: wrote 3 buffers', 'debug'],
    ['01000 WARNING:  there is no transaction in progress', 'warn'],
    ['57P03 FATAL:  the database system is starting up', 'warn'],
    ['XX000 PANIC:  could not locate a valid checkpoint record', 'error'],
    ['53100 ERROR:  could not extend file "base/5/2608": No space left on device', 'error'],
    ['XX001 ERROR:  invalid page in block 7 of relation base/5/2608', 'error'],
    ['58P01 LOG:  could not open file "pg_wal/000000010000000000000001"', 'error'],
    ['23505 ERROR:  duplicate key value violates unique constraint "events_pkey"', 'debug'],
    ['57014 ERROR:  canceling statement due to statement timeout', 'debug'],
    // These lines may repeat values of a row.
    ['53100 DETAIL:  Failing row contains (Robin Smith, robin@example.com).', 'debug'],
    ['53100 CONTEXT:  COPY payer, line 1: "WARNING:  text"', 'debug'],
  ])('%s: %s', (text, level) => {
    expect(levelOfLine(`2026-11-24 23:00:00.000 UTC [123] ${text}`)).toBe(level);
  });

  test('a further line of a message is logged at debug, also if it names an error', () => {
    expect(levelOfLine('\tPANIC:  text of a statement')).toBe('debug');
    expect(levelOfLine('')).toBe('debug');
  });
});

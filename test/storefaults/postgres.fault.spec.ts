/**
 * The short version of the proof: Postgres is put back to an earlier state. This is fault 7 with the events in Postgres, and fault 3 with the events
 * in KurrentDB.
 */
import { afterEach, expect, test } from '@jest/globals';
import { NOTICED_MS, slowest } from './exchange.js';
import { doubles } from './nodes.js';
import { playPromotion, playPutBack, playPutBackAtOnce, playPutBackUnderKurrentDb } from './postgres.js';

const TEST_MS = 300_000;

const nodes = doubles();
afterEach(() => nodes.end());

test('the embedded Postgres is put back to an earlier copy: known keys are not charged again', playPutBack, TEST_MS);

test('it is put back to a copy from just before a create: the key names the payment, and is not charged again', playPutBackAtOnce, TEST_MS);

test(
  'an asynchronous standby that has fallen behind is promoted: known keys are not charged again',
  async () => {
    const figures = await playPromotion();
    expect(figures).toMatchObject({ secondCharges: 0 });
    expect(slowest(figures.tookMs)).toBeLessThan(NOTICED_MS.besideOthers);
  },
  TEST_MS,
);

test(
  'under KurrentDB the database is put back: known keys are made again from the log',
  async () => {
    expect(await playPutBackUnderKurrentDb(nodes)).toMatchObject({ secondCharges: 0 });
  },
  TEST_MS,
);

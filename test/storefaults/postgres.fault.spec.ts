/** Events in Postgres, which goes back (fault 7). */
import { expect, test } from '@jest/globals';
import { playPromotion, playPutBack } from './postgres.js';

const TEST_MS = 300_000;

test('the embedded Postgres is put back to an earlier copy: known keys are not charged again', playPutBack, TEST_MS);

test(
  'an asynchronous standby that has fallen behind is promoted: known keys are not charged again',
  async () => {
    const figures = await playPromotion();
    console.log(JSON.stringify(figures));
    expect(figures).toMatchObject({ secondCharges: 0 });
  },
  TEST_MS,
);

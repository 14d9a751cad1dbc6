/**
 * Postgres is put back to an earlier state. This is fault 7 with the events in Postgres, and fault 3 with the events in KurrentDB. In fault 3, known
 * keys are sent again all the time.
 */
import { afterEach, describe, expect, test } from '@jest/globals';
import { writeReport } from '../support/report.js';
import { NOTICED_MS, slowest } from './exchange.js';
import { doubles, hasRealNodes, realNodes } from './nodes.js';
import { playPromotion, playPromotionUnderKurrentDb, playPutBackUnderKurrentDb } from './postgres.js';

const TEST_MS = 600_000;

describe.each([doubles(), ...(hasRealNodes ? [realNodes()] : [])])('under $name', (nodes) => {
  afterEach(() => nodes.end());

  test.each([
    ['a standby is promoted', playPromotionUnderKurrentDb],
    ['the database is put back', playPutBackUnderKurrentDb],
  ])(
    '%s',
    async (what, play) => {
      const figures = await play(nodes);
      writeReport('storefaults', { fault: 3, on: nodes.name, what, ...figures });
      expect(figures).toMatchObject({ secondCharges: 0 });
    },
    TEST_MS,
  );
});

test(
  'with the events in it: a standby is promoted',
  async () => {
    const figures = await playPromotion();
    writeReport('storefaults', { fault: 7, what: 'a standby is promoted', ...figures });
    expect(figures).toMatchObject({ secondCharges: 0 });
    expect(slowest(figures.tookMs)).toBeLessThan(NOTICED_MS.alone);
  },
  TEST_MS,
);

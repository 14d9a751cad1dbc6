/** The majority of a real cluster starts again with old disks (fault 4). Needs `KURRENTDB_NODE`. */
import { describe, expect, test } from '@jest/globals';
import { writeReport } from '../support/report.js';
import { playOldMajority } from './cluster.js';
import { NOTICED_MS, slowest, type Traffic } from './exchange.js';
import { hasRealNodes } from './nodes.js';

const TEST_MS = 900_000;

(hasRealNodes ? describe : describe.skip)('three real nodes', () => {
  test.each<Traffic>(['under load', 'idle'])(
    'two of them come back from an old disk, %s',
    async (traffic) => {
      const figures = await playOldMajority(traffic);
      writeReport('storefaults', { fault: 4, on: 'three real nodes', traffic, ...figures });
      expect(figures).toMatchObject({ secondCharges: 0 });
      expect(slowest(figures.noticedMs)).toBeLessThan(NOTICED_MS.cluster);
    },
    TEST_MS,
  );
});

/** Another log answers at the address of the event store (faults 1, 2 and 12), on the double and on real servers, under load and idle. */
import { afterEach, describe, expect, test } from '@jest/globals';
import { writeReport } from '../support/report.js';
import { playExchange, type Replacement, type Traffic } from './exchange.js';
import { doubles, hasRealNodes, realNodes } from './nodes.js';

const TEST_MS = 600_000;

describe.each([doubles(), ...(hasRealNodes ? [realNodes()] : [])])('on $name', (nodes) => {
  afterEach(() => nodes.end());

  test.each<[Replacement, Traffic]>([
    ['an empty log', 'under load'],
    ['an empty log', 'idle'],
    ['an earlier copy', 'under load'],
    ['an earlier copy', 'idle'],
    ['a longer foreign log', 'under load'],
    ['a longer foreign log', 'idle'],
  ])(
    '%s, %s',
    async (replacement, traffic) => {
      const figures = await playExchange(nodes, replacement, traffic);
      writeReport('storefaults', { fault: 12, on: nodes.name, replacement, traffic, ...figures });
      expect(figures).toMatchObject({ secondCharges: 0, violations: [] });
    },
    TEST_MS,
  );
});

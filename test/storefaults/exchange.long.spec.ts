/**
 * Another log answers at the address of the event store (faults 1, 2 and 12). The tests use the double of KurrentDB. With `KURRENTDB_NODE` they also
 * use real servers.
 */
import { afterEach, describe, expect, test } from '@jest/globals';
import { writeReport } from '../support/report.js';
import { type CutOptions, playCut, playRefusedStarts } from './cut.js';
import { NOTICED_MS, playExchange, slowest, type Replacement, type Traffic } from './exchange.js';
import { doubles, hasRealNodes, realNodes } from './nodes.js';

const TEST_MS = 600_000;
/** Longer than a minute, because recovery starts with payments that are a minute old. */
const UNTIL_RECOVERY_MS = 75_000;

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
      expect(slowest(figures.noticedMs)).toBeLessThan(NOTICED_MS.alone);
    },
    TEST_MS,
  );

  test(
    'one of four processes finds it, and the three others are idle',
    async () => {
      const figures = await playExchange(nodes, 'a longer foreign log', 'under load', { idleOthers: true });
      writeReport('storefaults', { fault: 6, on: nodes.name, ...figures });
      expect(figures).toMatchObject({ secondCharges: 0, violations: [] });
      expect(Object.keys(figures.noticedMs)).toHaveLength(4);
      expect(slowest(figures.noticedMs)).toBeLessThan(NOTICED_MS.alone);
    },
    TEST_MS,
  );

  test.each<CutOptions>([
    { service: 'running', grown: false, incidentMs: UNTIL_RECOVERY_MS },
    { service: 'running', grown: true, incidentMs: 0 },
    { service: 'stopped', grown: false, incidentMs: UNTIL_RECOVERY_MS },
    { service: 'stopped', grown: true, incidentMs: 0 },
  ])(
    'an earlier copy, service $service, grown $grown',
    async (options) => {
      const figures = await playCut(nodes, options);
      writeReport('storefaults', { fault: 2, on: nodes.name, ...options, ...figures });
      expect(figures).toMatchObject({ secondCharges: 0 });
      if (options.service === 'running') expect(slowest(figures.noticedMs)).toBeLessThan(NOTICED_MS.alone);
    },
    TEST_MS,
  );

  test('starts on a log that is empty or another one are refused', () => playRefusedStarts(nodes), TEST_MS);
});

/**
 * The short version of the proof: another log answers at the address of the event store (faults 1, 2 and 12). `npm run storefaults` plays all cases,
 * also on real servers.
 */
import { afterEach, expect, test } from '@jest/globals';
import { playCut, playRefusedStarts } from './cut.js';
import { NOTICED_MS, playExchange, slowest } from './exchange.js';
import { doubles } from './nodes.js';

const TEST_MS = 300_000;

const nodes = doubles();
afterEach(() => nodes.end());

test(
  'a longer foreign log under load: no charge begins after the exchange, and after `log resume` nothing was lost',
  async () => {
    const figures = await playExchange(nodes, 'a longer foreign log', 'under load');
    expect(figures).toMatchObject({ secondCharges: 0, violations: [] });
    expect(slowest(figures.noticedMs)).toBeLessThan(NOTICED_MS.besideOthers);
  },
  TEST_MS,
);

test(
  'an earlier copy that has grown past the checkpoints: answers stand, nothing is voided or charged',
  async () => {
    expect(await playCut(nodes, { service: 'stopped', grown: true, incidentMs: 0 })).toMatchObject({ secondCharges: 0 });
  },
  TEST_MS,
);

test('a start on an empty or foreign log, and of a new database on an old log, is refused in one line', () => playRefusedStarts(nodes), TEST_MS);

/** Another log answers at the address of the event store (faults 1, 2 and 12), short. `npm run storefaults` plays all of it, on real servers too. */
import { afterEach, expect, test } from '@jest/globals';
import { playExchange } from './exchange.js';
import { doubles } from './nodes.js';

const TEST_MS = 300_000;

const nodes = doubles();
afterEach(() => nodes.end());

test(
  'a longer foreign log under load: no charge begins after the exchange, and after `log resume` nothing was lost',
  async () => {
    expect(await playExchange(nodes, 'a longer foreign log', 'under load')).toMatchObject({ secondCharges: 0, violations: [] });
  },
  TEST_MS,
);

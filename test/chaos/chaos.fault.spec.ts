/** A short chaos run on a whole installation, and 12 of the 96 TCP cases. `npm run chaos` and `npm run chaos:tcp` are the long runs. */
import { expect, test } from '@jest/globals';
import { Random } from '../../apps/demo/city.js';
import { runChaos } from './chaos.js';
import { proveTcp } from './tcp.js';

const ROUND_MS = 6_000;

test('after kills, stops, bad links and clock jumps all sides agree, except for the one payment that was planted', async () => {
  const report = await runChaos(new Random(20_261_121), { milliseconds: ROUND_MS, rounds: 1, roundMs: ROUND_MS, plant: 'loss' });
  expect(report.violations).toEqual([
    expect.stringMatching(/^planted: was told of payment 0{8}-\S+, the log has none$/),
    expect.stringMatching(/^partners were told of \d+ cents in all, the bank holds \d+$/),
  ]);
  // The first kill always happens. The number of later kills depends on the machine.
  expect(report.kills.random + report.kills.atFailpoints).toBeGreaterThanOrEqual(1);
  expect(report.intentions).toBeGreaterThan(5);
}, 600_000);

test('a link that becomes a black hole under a create, a refund, a void and a read loses nothing and doubles nothing', async () => {
  const report = await proveTcp(new Random(3), { toxics: ['timeout'] });
  expect(report.violations).toEqual([]);
  expect(report.cases).toBe(12);
  expect(report.harmedConnections).toBeGreaterThan(3);
}, 600_000);

/** A short run of the API fuzzer (api.ts) with a fixed seed. A second run must find a planted violation. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { DataDir, runtimeOf, start, welcomeOf } from '../support/processes.js';
import { fuzzApi, type FuzzOptions, type Target } from './api.js';

const REQUESTS = 4_000;
const FUZZ_MS = 150_000;

let dataDir: DataDir;
let target: Target;
beforeAll(async () => {
  dataDir = await DataDir.create();
  const service = await start('standalone', dataDir, { LOG_LEVEL: 'warn' });
  const { apiKey, portalId } = welcomeOf(service.stdout())!;
  const { apiUrl, simulatorUrl } = runtimeOf(dataDir);
  target = { url: apiUrl, apiKey, portalId, bank: createSimulatorControl(simulatorUrl, controlKeyOf(dataDir.data)) };
});
afterAll(() => dataDir.remove());

const options: FuzzOptions = { seed: 20_261_121, requests: REQUESTS, milliseconds: FUZZ_MS, parallel: 8 };

test(
  'an allowed request is answered as documented, a forbidden one is refused',
  async () => {
    const { violations, requests, checks } = await fuzzApi(target, options);
    expect(violations).toEqual([]);
    expect(requests).toBeGreaterThan(1_000);
    // Every check has run at least once.
    expect(Object.keys(checks).length).toBeGreaterThan(10);
  },
  FUZZ_MS + 60_000,
);

test('a document that lies about one word is found out', async () => {
  const { violations } = await fuzzApi(target, { ...options, requests: 300, planted: true });
  expect(violations.map(({ check }) => check)).toContain('answers are as documented');
});

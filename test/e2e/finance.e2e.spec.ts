/** Runs the month of docs/finance.md as written, against the process tree of `npm start`. At its end, nothing is in transit and nothing is owed. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { type FreshKurrentDb, freshKurrentDb } from '../support/kurrentdb-server.js';
import { DataDir, type RunningProcess, start, welcomeOf } from '../support/processes.js';
import { blocksOf, playTour } from '../support/tour.js';

/** Only a guard against a month that hangs. */
const MONTH_MS = 300_000;

let dataDir: DataDir;
let kurrentDb: FreshKurrentDb;
let service: RunningProcess;
beforeAll(async () => {
  dataDir = await DataDir.create();
  kurrentDb = await freshKurrentDb();
  // The processor closes its batches as in an installation without settings.
  service = await start('standalone', dataDir, { ...kurrentDb.env, SIMULATOR_BATCH_CLOSE: '05:00' });
}, 600_000);
afterAll(async () => {
  await dataDir.remove();
  await kurrentDb?.stop();
});

test(
  'the month gives the shown output',
  async () => {
    const { apiKey, portalId } = welcomeOf(service.stdout())!;
    const blocks = blocksOf('docs/finance.md', '## Rehearse a month', '\n## ');
    expect(blocks.length).toBeGreaterThan(10);
    expect(blocks.map(({ text }) => text).join('')).toContain('hledger');
    await playTour(blocks, {
      dataDir,
      env: { ...kurrentDb.env, SIMULATOR_BATCH_CLOSE: '05:00' },
      setup: `API=${service.url}/api/partner/v1 KEY=${apiKey} PORTAL=${portalId}`,
    });
  },
  MONTH_MS,
);

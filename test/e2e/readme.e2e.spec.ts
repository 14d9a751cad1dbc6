/** Runs the README's tour as written, against the process tree of `npm start`. */
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { freePort } from '#platform';
import { eventsInPostgres, type FreshKurrentDb, freshKurrentDb } from '../support/kurrentdb-server.js';
import { DataDir, type RunningProcess, start, welcomeOf } from '../support/processes.js';
import { blocksOf, playTour } from '../support/tour.js';

/** Only a guard against a tour that hangs. */
const TOUR_MS = 300_000;

if (eventsInPostgres) process.stdout.write('KURRENTDB_FRESH is not set: the services of the end-to-end specs kept their events in Postgres only\n');

let dataDir: DataDir;
let kurrentDb: FreshKurrentDb;
let service: RunningProcess;
beforeAll(async () => {
  dataDir = await DataDir.create();
  kurrentDb = await freshKurrentDb();
  service = await start('standalone', dataDir, kurrentDb.env);
}, 600_000);
afterAll(async () => {
  await dataDir.remove();
  await kurrentDb?.stop();
});

test(
  'the tour gives the shown output',
  async () => {
    const { apiKey, portalId } = welcomeOf(service.stdout())!;
    const { auditUrl } = JSON.parse(await readFile(join(dataDir.data, 'runtime.json'), 'utf8')) as { auditUrl: string };
    const blocks = blocksOf('README.md', '## A tour', '## The command line');
    expect(blocks.length).toBeGreaterThan(20);
    await playTour(blocks, {
      dataDir,
      env: kurrentDb.env,
      setup: `AUDIT=${auditUrl}/audit/v1\nAPI=${service.url}/api/partner/v1 KEY=${apiKey} PORTAL=${portalId}\nexport HOOK=${await freePort()}`,
      // The closing batch holds a charge whose outcome is unknown. So an alarm is correct here.
      stderrMayHold: /^\{.*"a payment needs a decision by staff"\}\n/gm,
    });
  },
  TOUR_MS,
);

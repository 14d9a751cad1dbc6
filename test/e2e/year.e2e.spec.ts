/**
 * A small store of several days, made as `npm run bench -- year` does. Its seal and its books are whole, and the closing of a day reads only that day.
 * Rows are counted, and no time is measured. `test/reads` counts what the reports of a day read.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { findDrift, signLog, verifyLog } from '#audit';
import { closePeriod, verifyPeriods } from '#ledger';
import { reverseByStaff } from '#payments';
import { createLogger, readConfig } from '#platform';
import { openServices, type Services } from '../../apps/services.js';
import { startOfDay } from '../../bench/multiply.js';
import { eventsOf, makeHistory, makeStore } from '../../bench/store.js';
import { dispute, settle } from '../support/books.js';
import { freshDatabase } from '../support/postgres.js';
import { type Service, startService } from '../support/service.js';
import { registerConnections, watchStatements } from '../support/statements.js';

const HISTORY = 40;
/** With this seed, every charge gets an outcome at once. Recovery would end an open one only after a minute. */
const SEED = 44;
const PAYMENTS = 4_000;
const PER_DAY = 800;
const DAYS = PAYMENTS / PER_DAY;
const DAY_MS = 86_400_000;
const NOW = Date.now();
/** Start of the n-th day of the store. */
const day = (number: number): string => new Date(startOfDay(NOW) - (DAYS - number) * DAY_MS).toISOString();

let service: Service;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let directory: string;
let year: Services;

beforeAll(async () => {
  registerConnections();
  service = await startService();
  const { services } = service;
  const account = await service.account();
  const portals = [
    await service.portal(account, { fee: { chargeMode: 'separate' } }),
    await service.portal(account, { fee: { chargeMode: 'combined' } }),
    await service.portal(account, { fee: { flatCents: 195 } }),
  ];
  const refund = { operation: 'refund', amountCents: 100, includeFee: false, reason: 'meter misread', by: 'Dana' } as const;
  const staff = {
    settle: () => settle(service),
    dispute: (paymentId: string) => dispute(service, paymentId, 100, 'in_dispute'),
    refund: (paymentId: string) => reverseByStaff(services.payments, { ...refund, paymentId }, null),
  };
  await makeHistory({ url: service.urls[0]!, apiKey: account.apiKey, portals, pool: services.pool, ...staff }, HISTORY, 1, SEED);
  database = await freshDatabase();
  await makeStore(database.url, await eventsOf(services.pool), { payments: PAYMENTS, perDay: PER_DAY, now: NOW }, () => undefined);
  directory = await mkdtemp(join(tmpdir(), 'payfold-year-'));
  const places = { databaseUrl: database.url, simulatorUrl: services.config.simulatorUrl };
  const config = readConfig({ DATABASE_URL: database.url, SIMULATOR_URL: services.config.simulatorUrl!, DATA_DIR: directory });
  year = await openServices(config, places, services.keys, createLogger('error', 'spec'));
});
afterAll(async () => {
  await year?.close();
  await database?.drop();
  await service?.stop();
  if (directory) await rm(directory, { recursive: true, force: true });
});

/** Rows of the journal's entries that the statements of `work` read. */
const entriesReadBy = async (work: () => Promise<unknown>): Promise<number> => {
  const watched = await watchStatements();
  try {
    await work();
    return watched.take().reduce((sum, { read }) => sum + (read.get('journal_entry') ?? 0), 0);
  } finally {
    await watched.stop();
  }
};

test('the seal, the read models and the books of the multiplied log are whole', async () => {
  const { rows } = await year.pool.query<{ payments: string; days: string; batches: string; deliveries: string }>(
    `select (select count(*) from payment_list) as payments, (select count(distinct created_at::date) from payment_list) as days,
       (select count(*) from settlement_batch) as batches, (select count(*) from webhook_delivery where state = 'delivered') as deliveries`,
  );
  expect(rows[0]).toMatchObject({ payments: String(PAYMENTS), days: String(DAYS) });
  expect(Number(rows[0]!.batches)).toBeGreaterThanOrEqual(PAYMENTS / HISTORY);
  expect(rows[0]!.deliveries).toBe(String((2 * PAYMENTS) / HISTORY));
  await signLog(year.seal);
  const { checks, size } = await verifyLog({ ...year.seal, headFolder: year.seal.folder });
  expect(checks.filter(({ ok }) => !ok)).toEqual([]);
  expect(size).toBe(Number(await year.store.head()));
  expect((await findDrift(year.seal)).differences).toEqual([]);
});

test('closing a day reads only that day', async () => {
  const closing = (to: string) => entriesReadBy(() => closePeriod(year.periods, to, 'Dana'));
  await closing(day(1));
  const [early, late] = [await closing(day(2)), (await closing(day(3)), await closing(day(4)))];
  // A day of 800 payments has some thousand entries.
  expect(early).toBeGreaterThan(PER_DAY);
  expect(late).toBeLessThan(1.2 * early);
  expect(await verifyPeriods(year.seal)).toMatchObject({ ok: true });
});

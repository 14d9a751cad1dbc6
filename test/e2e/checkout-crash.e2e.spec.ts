import { checkoutUnfinishedModel, finishSessions, postgresUnfinishedRows } from '#checkout';
/**
 * A crash at each point of a checkout (C66). While a payer pays, an API process kills itself with SIGKILL right before or right after one port call.
 * The payer then continues at another process. The processor is a separate process, and its books show the money that moved.
 */
import { randomBytes } from 'node:crypto';
import { mkdir, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { Administration, directoryModel, NO_FEE } from '#accounts';
import type { Services } from '../../apps/services.js';
import { controlKeyOf, createSimulatorControl, type SimulatorControl } from '../../apps/simulator/control.js';
import { CARD_FORM, formOf, intakeOf, Payer, readReturn, SHOP, textOf } from '../support/checkout.js';
import { freshDatabase } from '../support/postgres.js';
import { DataDir, type RunningProcess, start, startApiAndWorker } from '../support/processes.js';
import { CARD, FEE } from '../support/service.js';
import { openStores, readBooks, recoverAll } from '../support/truth.js';

const PUBLIC = 'https://pay.test';

let dataDir: DataDir;
let database: Awaited<ReturnType<typeof freshDatabase>>;
let bank: SimulatorControl;
let stores: Services;
let healthy: RunningProcess;
let portalId: string;
let signingSecret: string;
let env: Record<string, string>;

beforeAll(async () => {
  dataDir = await DataDir.create();
  database = await freshDatabase();
  await mkdir(dataDir.data);
  const masterKeyFile = join(dataDir.data, 'master.key');
  await writeFile(masterKeyFile, JSON.stringify({ current: 'k1', keys: { k1: randomBytes(32).toString('base64') } }), { mode: 0o600 });
  const simulator = await start('simulator', dataDir);
  bank = createSimulatorControl(simulator.url, controlKeyOf(dataDir.data));
  env = { DATABASE_URL: database.url, SIMULATOR_URL: simulator.url, MASTER_KEY_FILE: masterKeyFile, PUBLIC_URL: PUBLIC };
  stores = await openStores({ databaseUrl: database.url, simulatorUrl: simulator.url }, masterKeyFile, dataDir.data);
  const { store, clock, ids, keys, personal } = stores;
  const actor = { type: 'system', id: 'spec' } as const;
  const admin = new Administration({ store, clock, ids, keys, personal, environment: 'sandbox', cardInTextCheck: true, actor });
  const { accountId } = (await admin.createAccount('Partner')).state;
  const portal = await admin.createPortal({ accountIds: [accountId], name: 'Portal', gateway: 'simulator', fee: { ...NO_FEE, ...FEE } });
  ({ portalId } = portal.state);
  ({ signingSecret } = portal);
  const { position } = await admin.configureCheckout(portalId, { enabled: true, allow: [`${SHOP}/pay`] });
  await stores.readModels.of(directoryModel).runUntil(position!, { timeoutMs: 10_000 });
  [healthy] = await startApiAndWorker(dataDir, env);
});

afterAll(async () => {
  await stores?.close();
  await dataDir?.remove();
  await database?.drop();
});

const at = (url: string, payer?: Payer): Payer => {
  const moved = new Payer(url, PUBLIC);
  for (const [path, cookie] of payer?.cookies ?? []) moved.cookies.set(path, cookie);
  return moved;
};

/** Does the work now that the worker would do after a minute. */
const aMinuteLater = async () => {
  await recoverAll(stores);
  const checkoutUnfinished = stores.readModels.of(checkoutUnfinishedModel);
  await checkoutUnfinished.runUntil((await stores.store.head())!, { timeoutMs: 10_000 });
  await finishSessions(stores.checkout, postgresUnfinishedRows(stores.pool), { leftAloneMs: 0, abandonedAfterMs: 0 });
};

/** `sees`: the page that the payer gets at once from the other process. `ends`: the state of the session after the worker's round. */
test.each<{ point: string; card?: string; sees: 'processing' | 'receipt' | 'open'; ends: 'paid' | 'open' }>([
  { point: 'append.AttemptStarted:before', sees: 'open', ends: 'open' },
  { point: 'append.AttemptStarted:after', sees: 'processing', ends: 'open' },
  { point: 'append.PaymentInitiated:before', sees: 'processing', ends: 'open' },
  { point: 'append.PaymentInitiated:after', sees: 'processing', ends: 'open' },
  { point: 'charge.principal:before', sees: 'processing', ends: 'open' },
  { point: 'charge.principal:after', sees: 'processing', ends: 'open' },
  { point: 'charge.fee:before', sees: 'processing', ends: 'open' },
  { point: 'charge.fee:after', sees: 'processing', ends: 'open' },
  { point: 'append.PaymentCreated:before', sees: 'processing', ends: 'open' },
  { point: 'append.PaymentCreated:after', sees: 'receipt', ends: 'paid' },
  { point: 'append.CheckoutPaid:before', sees: 'receipt', ends: 'paid' },
  { point: 'append.CheckoutPaid:after', sees: 'receipt', ends: 'paid' },
  { point: 'append.PaymentDeclined:before', card: CARD.declined, sees: 'processing', ends: 'open' },
  { point: 'append.PaymentDeclined:after', card: CARD.declined, sees: 'open', ends: 'open' },
  { point: 'append.AttemptDeclined:before', card: CARD.declined, sees: 'open', ends: 'open' },
  { point: 'append.AttemptDeclined:after', card: CARD.declined, sees: 'open', ends: 'open' },
  { point: 'append.PaymentOutcomeUnknown:after', card: CARD.unreadable, sees: 'processing', ends: 'open' },
  { point: 'append.OutcomeUnknown:before', card: CARD.unreadable, sees: 'processing', ends: 'open' },
  { point: 'append.OutcomeUnknown:after', card: CARD.unreadable, sees: 'processing', ends: 'open' },
])('killed at $point: $sees at once, then $ends', async ({ point, card = CARD.approved, sees, ends }) => {
  const referenceId = `CRASH-${randomBytes(6).toString('hex')}`;
  const before = at(healthy.url);
  const id = await before.begin(intakeOf({ portalId }, { reference_id: referenceId }));
  const form = { ...formOf((await before.send(`/checkout/${id}`)).text), ...CARD_FORM, card_number: card };
  const doomed = await start('api', dataDir, { ...env, FAILPOINT: point });
  const answer = await at(doomed.url, before)
    .submit(id, form)
    .then(
      ({ status }) => `answered ${status}`,
      () => 'cut off',
    );
  expect(answer).toBe('cut off');
  expect((await doomed.exited).signal).toBe('SIGKILL');

  const payer = at(healthy.url, before);
  const shown = await payer.open(`/checkout/${id}/processing`);
  expect(shown.path).toBe(`/checkout/${id}${sees === 'open' ? '' : `/${sees}`}`);
  // If the payer sends the same form again, there must be no second charge.
  const again = await payer.submit(id, form);
  if (point !== 'append.AttemptStarted:before') expect(again.location).toBe(shown.path);
  await aMinuteLater();
  if (ends === 'open') {
    const page = await payer.open(`/checkout/${id}/processing`);
    expect(page.path).toBe(`/checkout/${id}`);
    if (point !== 'append.AttemptStarted:before') expect(textOf(page.text)).toContain('No money has been taken.');
    expect((await payer.pay(id)).location).toBe(`/checkout/${id}/receipt`);
  }
  const done = readReturn(signingSecret, 'return', (await payer.send(`/checkout/${id}/done`)).location);
  expect(done).toMatchObject({ right: true, result: 'paid', checkout_id: id, reference_id: referenceId });
  // Exactly one payment of this bill stands, at the bank and in the log.
  const books = await readBooks(stores, bank);
  const standing = books.for(referenceId).filter(({ netAtBankCents }) => netAtBankCents > 0);
  expect(standing.map(({ paymentId, netAtBankCents }) => [paymentId, netAtBankCents])).toEqual([[done.payment_id, 12_863]]);
});

/** `contents`: the number of contents that the crash leaves. One that no event names is only purged. */
test.each([
  { point: 'write:before', contents: 0 },
  { point: 'write:after', contents: 1 },
  { point: 'append.CheckoutStarted:before', contents: 1 },
  { point: 'append.CheckoutStarted:after', contents: 1 },
])('killed at $point of an intake: the payer starts again from the shop, also under the same nonce', async ({ point, contents }) => {
  const doomed = await start('api', dataDir, { ...env, FAILPOINT: point });
  const fields = intakeOf({ portalId }, { nonce: randomBytes(12).toString('hex') });
  const count = async () => (await stores.pool.query('select from checkout_intake')).rowCount!;
  const before = await count();
  await expect(at(doomed.url).intake(fields)).rejects.toThrow();
  expect((await doomed.exited).signal).toBe('SIGKILL');
  expect((await count()) - before).toBe(contents);
  const payer = at(healthy.url);
  const id = await payer.begin(fields);
  expect((await payer.send(`/checkout/${id}`)).text).toContain('WTR-2041');
  expect((await payer.pay(id)).location).toBe(`/checkout/${id}/receipt`);
});

/**
 * Erasure of personal data in a whole service: half of the payments are erased. Then the log, the proofs and the pack are as valid as before, all read
 * models are made again with the same rows, and nobody sees the erased texts.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { EVERYTHING } from '#accounts';
import { beginPass, headKeys, issueAuditKey, logState, passChecks, provePayment, runPass, signLog, writePack } from '#audit';
import { rebuild, schemaOf } from '#eventstore';
import { reverseByStaff } from '#payments';
import { erase, type ErasureAnswer } from '#privacy';
import { createPool } from '#platform';
import { createResolve, createSender, Endpoints, postgresStaffTables } from '#webhooks';
import { type Audit, createAudit } from '../../apps/audit/audit.js';
import { dispute, settle } from '../support/books.js';
import { checkoutPortal, intakeOf, Payer, textOf } from '../support/checkout.js';
import { eventually } from '../support/eventually.js';
import { type NameServer, startNameServer } from '../support/name-server.js';
import { createAuthority, type Receiver, startReceiver } from '../support/receiver.js';
import { type Answer, CARD, everySubscriber, paymentOf, type Service, startService, type TestAccount } from '../support/service.js';

const VERIFIER = join(import.meta.dirname, '../../apps/operator/verify.mjs');
const PUBLIC = 'https://pay.riverton.example';
const HOOK = 'hooks.riverton.example';
const PAYER = {
  firstName: 'Alexandrina',
  lastName: 'Rivera-Montoya',
  email: 'alexandrina@mail.example',
  phone: '+1 555 010 7788',
  address: { line1: '17 Elmwood Crescent', city: 'Riverton', state: 'CA', zip: '90001', country: 'US' },
};
const LINES = [
  { amountCents: 6_000, referenceId: 'WTR-1', description: 'Water of Alexandrina', metadata: { tenant: 'Rivera-Montoya' } },
  { amountCents: 4_000, referenceId: 'WTR-2' },
];
const VOIDED = 'Alexandrina paid twice';
const REFUNDED = 'Alexandrina moved away';
const PERSONAL = /Alexandrina|Rivera-Montoya|alexandrina@|010 7788|Elmwood/i;

interface Made {
  readonly id: string;
  readonly key: string;
  readonly body: object;
  /** The answer of the create. */
  readonly answer: Answer<unknown>;
  /** The answer of its void or refund, and how it was asked for. */
  returned: { readonly path: 'void' | 'refund'; readonly key: string; readonly body: object; readonly answer: Answer<unknown> } | null;
}

let service: Service;
let partner: TestAccount;
let names: NameServer;
let receiver: Receiver;
let endpoints: Endpoints;
let endpointId: string;
let folder: string;
let origin: string;
let payer: Payer;
let checkoutId: string;
let checkoutPayment: string;
/** Payments whose webhooks were not sent before the erasure. */
let unsent: string[];
let answer: ErasureAnswer;
const made: Made[] = [];
let erased: Made[];
let kept: Made[];

const caughtUp = async () => {
  const head = (await service.services.store.head())!;
  for (const subscriber of everySubscriber(service.services)) await subscriber.runUntil(head, { timeoutMs: 30_000 });
};
const sign = async () => {
  await caughtUp();
  return (await signLog(service.services.seal))!;
};
/** The checks of `audit verify --full` that fail. */
const failedChecks = async () => {
  const { services } = service;
  const ports = { ...services.seal, headFolder: services.seal.folder };
  const pass = await beginPass(ports, null, await logState(services.pool));
  for await (const _page of runPass(ports, pass, { eventsAtOnce: 16_384, paymentsAtOnce: 100 }));
  const checks = passChecks(pass);
  expect(checks.length).toBeGreaterThan(3);
  return checks.filter(({ ok }) => !ok);
};
const run = (...values: string[]) =>
  promisify(execFile)(process.execPath, [VERIFIER, ...values]).then(
    ({ stdout }) => stdout,
    (error: { stderr: string }) => error.stderr,
  );
const proofOf = (name: string) => join(folder, `${name}.json`);
const pack = () => join(folder, 'pack');
const keysFile = () => join(folder, 'keys.txt');

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'payfold-privacy-'));
  names = await startNameServer();
  names.answer(HOOK, ['127.0.0.1']);
  const authority = await createAuthority();
  writeFileSync(join(folder, 'ca.pem'), authority.cert);
  receiver = await startReceiver(await authority.issue(HOOK));
  service = await startService({
    publicUrl: PUBLIC,
    env: {
      WEBHOOK_PRIVATE_TARGETS: `${HOOK}:${receiver.port}=127.0.0.1/32`,
      WEBHOOK_EXTRA_CA_FILE: join(folder, 'ca.pem'),
      WEBHOOK_DNS_SERVERS: names.address,
      WEBHOOK_RETRY_SECONDS: '0.1',
    },
  });
  const { services } = service;
  partner = await service.account();
  const { client } = partner;
  const portal = await service.portal(partner, { fee: { flatCents: 300 } });

  const { pool, store, clock, ids, keys, config } = services;
  const sender = createSender({ settings: config.webhooks, resolve: createResolve(config.webhooks.dnsServers, clock), clock });
  const actor = { type: 'operator', id: 'spec' } as const;
  endpoints = new Endpoints({ tables: postgresStaffTables(pool), store, clock, ids, actor, keys, sender });
  const endpoint = await endpoints.add(partner.accountId, `https://${HOOK}:${receiver.port}/payments`, 'Riverton');
  ({ endpointId } = endpoint);
  receiver.accept(endpoint.secret);
  const pay = async (number: string = CARD.approved) => {
    const body = paymentOf(portal, { lines: [6_000, 4_000], lineItems: LINES, payer: PAYER, number, referenceId: 'CASE-7' });
    const key = `key-${made.length}`;
    const created = await client.create(body, { key });
    expect(created.status).toBe(200);
    const one: Made = { id: created.data.id, key, body, answer: created, returned: null };
    made.push(one);
    return one;
  };
  const takeBack = async (one: Made, path: 'void' | 'refund', body: object) => {
    const key = `${path}-${one.key}`;
    const answered = await client.post(`/api/partner/v1/payments/${one.id}/${path}`, body, { key });
    expect(answered.status).toBe(200);
    one.returned = { path, key, body, answer: answered };
  };
  const byStaff = async () => {
    const { id } = await pay(CARD.settlesAtOnce);
    const request = { operation: 'refund', paymentId: id, amountCents: 1_000, includeFee: false, reason: REFUNDED, by: 'Dana' } as const;
    await reverseByStaff(services.payments, request, null);
    return id;
  };
  for (let number = 0; number < 2; number++) await takeBack(await pay(), 'void', { reason: VOIDED });
  // Partners are told what staff did. These webhooks are sent, later ones are not.
  for (let number = 0; number < 2; number++) await byStaff();
  await eventually(() => receiver.ids.length === 2);
  await endpoints.pause(endpointId);
  unsent = [await byStaff(), await byStaff()];
  for (let number = 0; number < 2; number++) await takeBack(await pay(CARD.settlesAtOnce), 'refund', { reason: REFUNDED, amountCents: 1_000 });
  const disputed = [await pay(CARD.settlesAtOnce), await pay(CARD.settlesAtOnce)];
  for (let number = 0; number < 2; number++) await pay();
  await settle(service);
  for (const { id } of disputed) await dispute(service, id, 2_000, 'debited', 'lost');

  const shop = await checkoutPortal(service, partner);
  payer = new Payer(service.urls[0]!, PUBLIC);
  checkoutId = await payer.begin(
    intakeOf(shop, { payer_first_name: PAYER.firstName, payer_last_name: PAYER.lastName, payer_email: PAYER.email, state: 'Rivera-Montoya' }),
  );
  await payer.pay(checkoutId);
  expect(textOf((await payer.open(`/checkout/${checkoutId}/receipt`)).text)).toContain('Water');
  const listed = (await client.list({ limit: 100 })).data.payments;
  checkoutPayment = listed.find(({ id }) => !made.some((one) => one.id === id))!.id;

  ({ origin } = (await sign()).head);
  writeFileSync(keysFile(), `${headKeys(origin, keys)[0]!.vkey}\n`);
  for (const { id } of made) writeFileSync(proofOf(id), JSON.stringify(await provePayment(services.seal, id)));
  const to = new Date(service.clock.now()).toISOString();
  service.clock.advance(60_000);
  const ports = { ...services.seal, db: pool, reached: caughtUp };
  await writePack(ports, { from: '2020-01-01T00:00:00.000Z', to, out: pack(), version: '0', verifier: VERIFIER });

  // Every second payment, and that of the checkout.
  [erased, kept] = [made.filter((_, index) => index % 2 === 0), made.filter((_, index) => index % 2 === 1)];
  const chosen = { payments: [...erased.map(({ id }) => id), checkoutPayment] };
  answer = await erase(services.privacy, { chosen, reasonCode: 'request', by: 'Kim Park', apply: true });
}, 600_000);
afterAll(async () => {
  await service?.stop();
  await receiver?.close();
  names?.close();
  rmSync(folder, { recursive: true, force: true });
});

test('half of the payments are erased', () => {
  expect(answer).toMatchObject({ erased: erased.length + 1, skipped: [] });
  expect(erased.length).toBe(kept.length);
});

describe('the proofs', () => {
  test('audit verify finds nothing wrong', async () => {
    await sign();
    expect(await failedChecks()).toEqual([]);
  });
  test('proofs from before the erasure hold, and are equal to those of today', async () => {
    for (const { id } of made) {
      expect(await run('prove', proofOf(id), '--key', readFileSync(keysFile(), 'utf8').trim())).toMatch(/^ok: /);
      const before = JSON.parse(readFileSync(proofOf(id), 'utf8')) as { events: { event: unknown }[] };
      const { events } = await provePayment(service.services.seal, id);
      expect(events.map(({ event }) => event)).toEqual(before.events.map(({ event }) => event));
    }
  });
  test('the pack from before the erasure holds', async () => expect(await run('pack', pack(), '--key', keysFile())).toMatch(/^ok/m));
  test('every read model is made again with the same rows', async () => {
    const { services } = service;
    await caughtUp();
    const pool = createPool(services.pool.options.connectionString!, { name: 'rebuild', max: 8, statementTimeoutMs: 0 });
    const digests = async () => {
      const found: Record<string, string> = {};
      for (const model of services.readModels.models)
        for (const table of model.tables) {
          const { rows } = await pool.query<{ row: string }>(
            `select row_to_json(t)::text as row from ${schemaOf(model)}.${table} t order by row_to_json(t)::text collate "C"`,
          );
          found[`${model.name}/${table}`] = createHash('sha256')
            .update(rows.map(({ row }) => row).join('\n'))
            .digest('hex');
        }
      return found;
    };
    try {
      const before = await digests();
      for (const model of services.readModels.models)
        await rebuild(model, { store: services.store, pool, now: () => services.clock.realNow(), ownLog: services.ownLog });
      expect(await digests()).toEqual(before);
    } finally {
      await pool.end();
    }
  });
});

describe('a partner', () => {
  test('sees null in GET and list, and when it was erased; other payments are as before', async () => {
    await caughtUp();
    const listed = new Map((await partner.client.list({ limit: 100 })).data.payments.map((one) => [one.id, one]));
    for (const { id } of [...erased, { id: checkoutPayment }]) {
      const found = (await partner.client.find(id)).data;
      expect(found).toMatchObject({ payer: null, personalDataErasedAt: expect.stringMatching(/^\d{4}-/) });
      expect(found.lineItems.map(({ description, metadata }) => [description, metadata])).toEqual(found.lineItems.map(() => [null, null]));
      expect(JSON.stringify(found)).not.toMatch(PERSONAL);
      expect(listed.get(id)).toEqual(found);
    }
    for (const { id } of kept) {
      const found = (await partner.client.find(id)).data;
      expect(found).toMatchObject({ payer: PAYER, lineItems: [{ description: LINES[0]!.description, metadata: LINES[0]!.metadata }, {}] });
      expect(found).not.toHaveProperty('personalDataErasedAt');
      expect(listed.get(id)).toEqual(found);
    }
  });

  test('gets the same answer under a key, with null where the text was (C77)', async () => {
    const { client } = partner;
    const replay = async ({ body, key }: Pick<Made, 'body' | 'key'>, path = '') => client.post(`/api/partner/v1/payments${path}`, body, { key });
    for (const one of kept) {
      expect((await replay(one)).text).toBe(one.answer.text);
      if (one.returned) expect((await replay(one.returned, `/${one.id}/${one.returned.path}`)).text).toBe(one.returned.answer.text);
    }
    for (const one of erased) {
      const again = await replay(one);
      expect([again.status, again.headers['idempotent-replayed']]).toEqual([200, 'true']);
      expect(again.text).not.toMatch(PERSONAL);
      expect(again.data).toMatchObject({ id: one.id, payer: null });
      if (!one.returned) continue;
      const back = await replay(one.returned, `/${one.id}/${one.returned.path}`);
      const before = JSON.parse(one.returned.answer.text) as { data: { reason: string | null } };
      expect(before.data.reason).toMatch(PERSONAL);
      expect(back.text).toBe(one.returned.answer.text.replace(JSON.stringify(before.data.reason), 'null'));
    }
  });

  test('gets unsent webhooks under their id, with an empty reason (C78)', async () => {
    await endpoints.resume(endpointId);
    // Two refunds that were told before, two that were not, and two disputes with two steps each.
    await eventually(() => receiver.ids.length === 8);
    const ofPayment = (id: string) => receiver.deliveries.map(({ event }) => JSON.stringify(event)).filter((text) => text.includes(id));
    const [gone, stays] = [unsent.find((id) => erased.some((one) => one.id === id))!, unsent.find((id) => kept.some((one) => one.id === id))!];
    expect(ofPayment(gone)).toEqual([expect.stringContaining('"reason":""')]);
    expect(ofPayment(stays)).toEqual([expect.stringContaining(`"reason":"${REFUNDED}"`)]);
  });
});

test('the answers of the partner’s endpoint to these payments are gone', async () => {
  const { rows } = await service.services.pool.query<{ payment_id: string }>(
    `select distinct e.payment_id from webhook_attempt a join webhook_delivery d on d.id = a.delivery_id join webhook_event e on e.id = d.event_id
     where a.response_head is not null and a.started_at < (select min(erased_at) from personal_erased)`,
  );
  const ids = rows.map((row) => row.payment_id);
  expect(erased.filter(({ id }) => ids.includes(id))).toEqual([]);
});

test('a payer sees a receipt without names, texts and way back', async () => {
  const page = await payer.open(`/checkout/${checkoutId}`);
  expect(page.status).toBe(200);
  expect(page.text).not.toMatch(PERSONAL);
  expect(page.text).not.toMatch(/shop\.test|Water|Sewer/);
  expect(textOf(page.text)).toContain('125');
});

test('a later refund works, takes a new key, and a second erasure covers it', async () => {
  const one = erased.find(({ returned }) => returned?.path === 'refund')!;
  expect((await partner.client.refund(one.id, { amountCents: 500, reason: REFUNDED })).status).toBe(200);
  const { services } = service;
  const again = { chosen: { payments: [one.id] }, reasonCode: 'order', by: 'Kim Park', apply: true } as const;
  expect(await erase(services.privacy, again)).toMatchObject({ erased: 1 });
  expect(await erase(services.privacy, again)).toMatchObject({ erasureId: null, erased: 0 });
});

test('a payment with an open dispute and an unknown payment are refused, and nothing is recorded', async () => {
  const { services } = service;
  // The last one was neither returned nor disputed before.
  const { id } = kept.at(-1)!;
  await dispute(service, id, 100, 'debited');
  const before = await services.store.head();
  const ask = (payment: string) => erase(services.privacy, { chosen: { payments: [payment] }, reasonCode: 'request', by: 'Kim Park', apply: true });
  await expect(ask(services.ids.uuid())).rejects.toMatchObject({ code: 'PAYMENT_NOT_FOUND' });
  await expect(ask(id)).rejects.toMatchObject({ code: 'INVALID_STATE', message: 'A dispute of the payment is not decided.' });
  expect(await services.store.head()).toBe(before);
  expect((await partner.client.find(id)).data).toMatchObject({ payer: PAYER });
});

describe('finance and auditors', () => {
  let audit: Audit;
  let url: string;
  let auditKey: string;
  const get = async (path: string) => {
    const answer = await fetch(`${url}${path}`, { headers: { authorization: `AuditKey ${auditKey}` } });
    return { status: answer.status, text: await answer.text() };
  };
  beforeAll(async () => {
    const { store, pool: db, clock, ids, keys, config } = service.services;
    const ports = { store, db, clock, ids, keys, environment: config.environment };
    ({ auditKey } = await issueAuditKey(ports, { name: 'Auditor', role: 'auditor', scope: EVERYTHING, personal: true }, { type: 'operator', id: 'spec' })); // prettier-ignore
    audit = await createAudit(service.services);
    url = await audit.listen(0, '127.0.0.1');
    await caughtUp();
  }, 60_000);
  afterAll(() => audit?.close());
  const opened = (path: string) => `${path}${path.includes('?') ? '&' : '?'}personal=true`;
  const pathsOf = (id: string) => [`/audit/v1/payments/${id}`, `/audit/v1/payments/${id}/timeline`];
  const REPORTS = ['reversals', 'disputes', 'line-items', 'staff-actions'].map((report) => `/audit/v1/exports/${report}?format=ndjson`);

  test('see the texts of payments that stand, and none of erased ones, also where they ask for them', async () => {
    for (const { id } of kept)
      for (const path of pathsOf(id)) {
        expect([path, (await get(path)).text]).toEqual([path, expect.not.stringMatching(PERSONAL)]);
        expect([path, (await get(opened(path))).text]).toEqual([path, expect.stringMatching(PERSONAL)]);
      }
    for (const id of [...erased.map((one) => one.id), checkoutPayment])
      for (const path of pathsOf(id))
        for (const asked of [path, opened(path)]) {
          const { status, text } = await get(asked);
          expect([asked, status, PERSONAL.test(text)]).toEqual([asked, 200, false]);
        }
    const erasedIds = [...erased.map((one) => one.id), checkoutPayment];
    for (const path of ['/audit/v1/payments?limit=100', ...REPORTS]) {
      const { status, text } = await get(opened(path));
      expect([path, status]).toEqual([path, 200]);
      const rows = path.includes('/exports/') ? text.trim().split('\n') : (JSON.parse(text) as { data: { payments: object[] } }).data.payments.map((row) => JSON.stringify(row)); // prettier-ignore
      for (const id of erasedIds) expect([path, rows.filter((row) => row.includes(id) && PERSONAL.test(row))]).toEqual([path, []]);
    }
    expect((await get(opened(REPORTS[0]!))).text).toMatch(PERSONAL);
  });

  test('while the table of keys is away, what opens boxes answers 500, and all else goes on', async () => {
    const { pool } = service.services;
    await pool.query('alter table personal_key rename to personal_key_away');
    try {
      const { id } = kept[0]!;
      expect((await partner.client.find(id)).status).toBe(500);
      expect((await partner.client.list({ limit: 100 })).status).toBe(500);
      for (const path of pathsOf(id)) expect([path, (await get(opened(path))).status]).toEqual([path, 500]);
      for (const path of ['events?limit=1000', 'changed-payments?limit=1000', 'ledger/journal', 'ledger/balances', 'exceptions', 'batches', 'alerts'])
        expect([path, (await get(`/audit/v1/${path}`)).status]).toEqual([path, 200]);
      for (const report of ['payments', 'line-items', 'fees'])
        expect([report, (await get(`/audit/v1/exports/${report}`)).status]).toEqual([report, 200]);
      expect(await failedChecks()).toEqual([]);
      // A create without texts needs no key of its own, and its answer opens none.
      const portal = await service.portal(partner);
      const created = await partner.client.create(paymentOf(portal));
      expect(created.status).toBe(200);
      expect((await partner.client.find(created.data.id)).status).toBe(200);
    } finally {
      await pool.query('alter table personal_key_away rename to personal_key');
    }
    expect((await partner.client.find(kept[0]!.id)).data.payer).toEqual(PAYER);
  });
});

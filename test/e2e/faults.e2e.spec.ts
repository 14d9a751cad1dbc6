/** The answers to a partner while the processor or the database is broken, or the service shuts down (C19, C29, C42, C43). */
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { afterAll, afterEach, beforeAll, describe, expect, test } from '@jest/globals';
import type { SimulatorControl } from '../../apps/simulator/control.js';
import { createMetrics } from '../../apps/metrics.js';
import { eventually } from '../support/eventually.js';
import { figuresOf } from '../support/metrics.js';
import { type Answer, CARD, type Client, PARTNER, paymentOf, type Service, startService, type TestAccount } from '../support/service.js';

let service: Service;
let partner: TestAccount;
let client: Client;
let portal: string;
let separate: string;
let watched: ReturnType<typeof createMetrics>;
beforeAll(async () => {
  service = await startService({ cuttable: true, instances: 2 });
  partner = await service.account();
  client = partner.client;
  portal = await service.portal(partner, { fee: { flatCents: 300, chargeMode: 'combined' } });
  separate = await service.portal(partner, { fee: { flatCents: 300 } });
  watched = createMetrics(service.services);
});
afterAll(() => service.stop());
afterEach(() => service.simulator.clearFaults());

type Fault = Parameters<SimulatorControl['arm']>[0];
const charges = async (where: string) =>
  (await service.simulator.truth()).filter(({ op, merchantAccount }) => op === 'charge' && merchantAccount.endsWith(where));
const standing = async (where: string) => (await charges(where)).filter(({ state }) => state !== undefined && state !== 'voided');

describe('the processor', () => {
  test('is down: 502 PAYMENT_GATEWAY_ERROR, since not a byte was sent; nothing charged, and a new key works afterwards (C43)', async () => {
    const where = await service.portal(partner);
    const paid = await client.created(paymentOf(where));
    const before = (await standing(where)).length;
    await service.bank.stop();
    try {
      const answer = await client.create(paymentOf(where), { key: 'down' });
      expect([answer.status, answer.code]).toEqual([502, 'PAYMENT_GATEWAY_ERROR']);
      expect(await client.status(answer.details!.id as string)).toBe('failed');
      const refund = await client.refund(paid.id, {}, { key: 'down refund' });
      expect([refund.status, refund.code]).toEqual([502, 'PAYMENT_GATEWAY_ERROR']);
      expect(await client.status(paid.id)).toBe('succeeded');
    } finally {
      await service.bank.start();
    }
    expect((await standing(where)).length).toBe(before);
    expect((await client.create(paymentOf(where), { key: 'up again' })).status).toBe(200);
    expect((await client.refund(paid.id, {}, { key: 'down refund' })).status).toBe(200);
  });

  test('refuses clearly: 502, failed', async () => {
    await service.simulator.setProcessing(false);
    const answer = await client.create(paymentOf(separate));
    await service.simulator.setProcessing(true);
    expect([answer.status, answer.code]).toEqual([502, 'PAYMENT_GATEWAY_ERROR']);
    expect(await client.status(answer.details!.id as string)).toBe('failed');
  });

  const faults: [string, Fault][] = [
    ['cut, executed', { answer: 'cut', effect: true }],
    ['cut, not executed', { answer: 'cut', effect: false }],
    ['no JSON', { answer: 'not_json', effect: true }],
    ['fields missing', { answer: 'missing_fields', effect: true }],
    ['the answer of another reference', { answer: 'other_reference', effect: true }],
    ['2 MiB', { answer: 'oversized', effect: true }],
    ['a bare 500, executed', { answer: 'bare_500', effect: true }],
    ['a bare 500, not executed', { answer: 'bare_500', effect: false }],
  ];
  test.each(faults)('%s: 504 PAYMENT_TIMEOUT, unknown, and recovery undoes it: voided (C29, C43)', async (_, fault) => {
    for (const [where, leg] of [
      [portal, 'combined'],
      [separate, 'principal'],
      [separate, 'fee'],
    ] as const) {
      const before = (await standing(where)).length;
      await service.simulator.arm({ match: { call: 'charge', leg }, ...fault });
      const answer = await client.create(paymentOf(where));
      expect([leg, answer.status, answer.code]).toEqual([leg, 504, 'PAYMENT_TIMEOUT']);
      const id = answer.details!.id as string;
      expect(await client.status(id)).toBe('unknown');
      await service.recover(id);
      expect((await client.find(id)).data).toMatchObject({ status: 'voided', capturedAmountCents: 0, confirmationNumber: null });
      expect((await standing(where)).length).toBe(before);
    }
  });

  test('the fee is certainly not processed: the principal is taken back, 502, failed (C41)', async () => {
    const before = (await standing(separate)).length;
    await service.simulator.arm({ match: { call: 'charge', leg: 'fee' }, answer: 'disabled' });
    const answer = await client.create(paymentOf(separate));
    expect([answer.status, answer.code]).toEqual([502, 'PAYMENT_GATEWAY_ERROR']);
    expect(await client.status(answer.details!.id as string)).toBe('failed');
    expect((await standing(separate)).length).toBe(before);
  });

  test('the fee is declined and the principal cannot be taken back: 504, and recovery does it later (C41)', async () => {
    const before = (await standing(separate)).length;
    await service.simulator.arm({ match: { call: 'void', askedBy: 'reversal' }, answer: 'disabled' });
    const answer = await client.create(paymentOf(separate, { number: CARD.feeDeclined }));
    expect([answer.status, answer.code]).toEqual([504, 'PAYMENT_TIMEOUT']);
    const id = answer.details!.id as string;
    await service.recover(id);
    expect(await client.status(id)).toBe('voided');
    expect((await standing(separate)).length).toBe(before);
  });

  test('takes longer than 20 s: 504, and the worker undoes the charge by itself (C42)', async () => {
    await service.simulator.arm({ match: { call: 'charge', leg: 'combined' }, delayAfterMs: 25_000 });
    const begun = performance.now();
    const answer = await client.create(paymentOf(portal), { key: 'too slow' });
    const took = performance.now() - begun;
    expect([answer.status, answer.code]).toEqual([504, 'PAYMENT_TIMEOUT']);
    expect(took).toBeGreaterThan(19_500);
    expect(took).toBeLessThan(28_000);
    expect((await client.create(paymentOf(portal), { key: 'too slow' })).code).toBe('IDEMPOTENCY_RECONCILIATION_REQUIRED');
    service.clock.advance(61_000);
    const id = answer.details!.id as string;
    await eventually(async () => (await client.status(id)) === 'voided', { everyMs: 100 });
  }, 40_000);
});

describe('the database', () => {
  const reads: [string, (on: Client) => Promise<Answer<unknown>>][] = [
    ['GET /payments', (on) => on.list()],
    ['GET /payments/{id}', (on) => on.find('018f0000-0000-7000-8000-00000000dead')],
    ['GET /fees/quote', (on) => on.get(`${PARTNER}/fees/quote?portalId=${portal}&amountCents=100`)],
  ];

  test('cannot be reached: keyed requests 503 IDEMPOTENCY_UNAVAILABLE, others 500 in the envelope; nothing is charged; it recovers by itself (C19)', async () => {
    const paid = await client.created(paymentOf(portal));
    const before = (await charges(portal)).length;
    service.database!.cut();
    try {
      const keyed = [
        await client.create(paymentOf(portal), { key: 'away' }),
        await client.refund(paid.id, {}, { key: 'away' }),
        await client.void(paid.id, {}, { key: 'away', instance: 1 }),
      ];
      for (const { status, code, headers } of keyed) {
        expect([status, code]).toEqual([503, 'IDEMPOTENCY_UNAVAILABLE']);
        expect(Number(headers['retry-after'])).toBeGreaterThan(0);
      }
      for (const [, send] of [...reads, ['POST /payments', (on: Client) => on.create(paymentOf(portal))] as const]) {
        const { status, details, text } = await send(client);
        expect([status, details]).toEqual([500, { code: 'INTERNAL_ERROR' }]);
        expect(text).not.toMatch(/ECONN|postgres|pool|select|127\.0\.0\.1|\.ts/i);
      }
      // Requests that need no database are answered as usual.
      expect((await service.anonymous.list()).status).toBe(401);
      expect((await client.get('/nothing')).status).toBe(404);
      expect((await fetch(`${service.urls[0]}/healthz`)).status).toBe(200);
      // Figures of the database are absent, and those of the process are there.
      const figures = await figuresOf(watched.shared);
      expect([figures.get('payfold_store_incident'), [...figures.keys()].some((name) => name.startsWith('payfold_open_attempts'))]).toEqual([
        0,
        false,
      ]);
      const ready = await fetch(`${service.urls[0]}/readyz`);
      expect([ready.status, await ready.text()]).toEqual([503, expect.not.stringMatching(/ECONN|127\.0/)]);
    } finally {
      service.database!.restore();
    }
    await eventually(async () => (await client.create(paymentOf(portal), { key: 'away' })).status === 200);
    expect((await charges(portal)).length).toBe(before + 1);
    // A refund works again, too. Its key is new.
    expect((await client.refund(paid.id, {}, { key: 'afterwards' })).status).toBe(200);
    await eventually(async () => (await client.list({ limit: 1, status: 'partially_refunded' })).data.payments[0]?.id === paid.id);
    await eventually(async () => (await fetch(`${service.urls[0]}/readyz`)).status === 200);
  });

  test('goes away during a charge and comes back: the outcome is recorded, one charge, 200', async () => {
    const before = (await charges(portal)).length;
    const answering = client.create(paymentOf(portal, { number: CARD.slow }), { key: 'interrupted' });
    await eventually(async () => (await client.list({ status: 'pending' })).data.payments.length === 1);
    service.database!.cut();
    await eventually(async () => (await charges(portal)).length === before + 1);
    service.database!.restore();
    const answer = await answering;
    expect(answer.status).toBe(200);
    expect(await client.status(answer.data.id)).toBe('succeeded');
    const again = await eventually(async () => {
      const answered = await client.create(paymentOf(portal, { number: CARD.slow }), { key: 'interrupted' });
      // A process takes a moment to look at the time of its sandbox again. Until then it begins nothing.
      return answered.code === 'IDEMPOTENCY_IN_PROGRESS' || answered.code === 'IDEMPOTENCY_UNAVAILABLE' ? null : answered;
    });
    expect([again.text, again.headers['idempotent-replayed']]).toEqual([answer.text, 'true']);
    expect((await charges(portal)).length).toBe(before + 1);
  });
});

describe('a database that takes no writes', () => {
  afterEach(() => service.takesWrites(true));
  const heals = async () => {
    await service.takesWrites(true);
    await eventually(async () => (await client.create(paymentOf(portal))).status === 200);
  };

  test('503 IDEMPOTENCY_UNAVAILABLE at once, with and without a key; nothing is charged; it heals without a restart (C19)', async () => {
    const paid = await client.created(paymentOf(portal));
    const before = (await charges(portal)).length;
    await service.takesWrites(false);
    // A process takes a moment to look at the time of its sandbox again.
    await eventually(async () => (await client.find(paid.id)).status === 200);
    for (const key of [{}, { key: 'read-only' }]) {
      const begun = performance.now();
      const answers = [await client.create(paymentOf(portal), key), await client.refund(paid.id, { reason: 'twice' }, key)];
      for (const { status, code, headers } of answers) expect([status, code, headers['retry-after']]).toEqual([503, 'IDEMPOTENCY_UNAVAILABLE', '1']);
      // An append that is tried until its deadline takes 26 s.
      expect(performance.now() - begun).toBeLessThan(20_000);
    }
    expect(await client.status(paid.id)).toBe('succeeded');
    expect((await fetch(`${service.urls[0]}/readyz`)).status).toBe(503);
    expect((await charges(portal)).length).toBe(before);
    await heals();
    // Each process notices the repair at its own time.
    await eventually(async () => (await client.create(paymentOf(portal), { key: 'read-only' })).status === 200);
    expect((await charges(portal)).length).toBe(before + 2);
    await eventually(async () => (await fetch(`${service.urls[0]}/readyz`)).status === 200);
  });

  test('while the processor is charging: the outcome is recorded when writes are taken again: 200, one charge', async () => {
    const before = (await charges(portal)).length;
    const answering = client.create(paymentOf(portal, { number: CARD.slow }), { key: 'half a failover' });
    await eventually(async () => (await client.list({ status: 'pending' })).data.payments.length === 1);
    await service.takesWrites(false);
    await eventually(async () => (await charges(portal)).length === before + 1);
    await service.takesWrites(true);
    const answer = await answering;
    expect([answer.status, await client.status(answer.data.id)]).toEqual([200, 'succeeded']);
    expect((await charges(portal)).length).toBe(before + 1);
    await heals();
  });
});

// This must be the last block: the second instance is not started again.
describe('shutdown', () => {
  test('not ready at once; requests in flight are answered, and connections without a whole request are closed', async () => {
    const instance = 1;
    // The database was away. Both instances must have the time of the sandbox again.
    for (const each of [0, instance]) await eventually(async () => (await client.create(paymentOf(portal), { instance: each })).status === 200);
    const paid = await client.created(paymentOf(portal));
    await service.simulator.arm({ match: { call: 'void' }, delayAfterMs: 1_000 });
    const inFlight = [
      ...Array.from({ length: 5 }, () => client.create(paymentOf(portal, { number: CARD.slow }), { instance })),
      client.refund(paid.id, { amountCents: 5 }, { instance }),
    ];
    await eventually(async () => (await client.list({ status: 'pending' })).data.payments.length === 5);
    // This call takes longer than the time that clients have to finish their requests.
    await service.simulator.arm({ match: { call: 'charge' }, delayAfterMs: 14_000 });
    inFlight.push(client.create(paymentOf(portal), { instance }));
    await eventually(async () => (await client.list({ status: 'pending' })).data.payments.length === 6);
    // One connection sends nothing, and one sends no whole request. Neither holds up the stop. One sends the rest of its request after the stop.
    const { port } = new URL(service.urls[instance]!);
    const [silent, unfinished, late] = [0, 1, 2].map(() => connect(Number(port), '127.0.0.1').on('error', () => undefined)) as [
      Socket,
      Socket,
      Socket,
    ];
    unfinished.resume().write('GET /healthz HTTP/1.1\r\n');
    late.write('GET /healthz HTTP/1.1\r\n');
    let answer = '';
    late.on('data', (chunk) => (answer += String(chunk)));
    const ended = [silent.resume(), unfinished, late].map((socket) => once(socket, 'close'));
    const [, api] = service.apis;
    api!.health.drain();
    expect((await fetch(`${service.urls[1]}/readyz`)).status).toBe(503);
    const closed = api!.close();
    const begun = performance.now();
    setTimeout(() => late.write('host: test\r\n\r\n'), 2_000);
    expect((await Promise.all(inFlight)).map(({ status }) => status)).toEqual([200, 200, 200, 200, 200, 200, 200]);
    await closed;
    await Promise.all(ended);
    expect(answer).toMatch(/^HTTP\/1.1 200 /);
    // Otherwise `SILENT_MS` would end the silent connection after 120 s. The limit of 30 s only tells the two apart.
    expect(performance.now() - begun).toBeLessThan(30_000);
    await expect(fetch(`${service.urls[1]}/healthz`)).rejects.toThrow();
  });
});

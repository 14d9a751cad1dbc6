/** The change feed of the audit API: its pages, its end, waiting, what it leaves out, and what it says while a read model stands still. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { EVERYTHING, type Scope } from '#accounts';
import { type AuditRole, auditKeyModel, FeedWaits, issueAuditKey } from '#audit';
import { checkpointOf, closeIncident, type Position, type Recorded } from '#eventstore';
import { type PaymentView, paymentListModel, resolvePayment } from '#payments';
import { type Audit, createAudit } from '../../apps/audit/audit.js';
import { createMetrics } from '../../apps/metrics.js';
import { type BusyDay, busyDay, dispute } from '../support/books.js';
import { eventually } from '../support/eventually.js';
import { eventsInPostgres } from '../support/kurrentdb-server.js';
import { figuresOf } from '../support/metrics.js';
import { createOpenApiJudge, type OpenApiJudge } from '../support/openapi.js';
import { CARD, everySubscriber, paymentOf, type Service, startService } from '../support/service.js';

let service: Service;
let day: BusyDay;
let audit: Audit;
let url: string;
let judge: OpenApiJudge;
let key: string;
let metrics: ReturnType<typeof createMetrics>;
beforeAll(async () => {
  service = await startService();
  day = await busyDay(service);
  metrics = createMetrics(service.services);
  audit = await createAudit({ ...service.services, onLimit: metrics.auditLimited });
  url = await audit.listen(0, '127.0.0.1');
  judge = createOpenApiJudge((await (await fetch(`${url}/openapi.json`)).json()) as Parameters<typeof createOpenApiJudge>[0]);
  key = await issue();
}, 600_000);
afterAll(async () => {
  await audit.close();
  await service.stop();
});

const issue = async (role: AuditRole = 'finance', scope: Scope = EVERYTHING): Promise<string> => {
  const { store, pool, clock, ids, keys, config, readModels } = service.services;
  const ports = { store, db: pool, clock, ids, keys, environment: config.environment };
  const issued = await issueAuditKey(ports, { name: `Reader ${ids.uuid()}`, role, scope, personal: false }, { type: 'operator', id: 'spec' });
  await readModels.of(auditKeyModel).runUntil(issued.position, { timeoutMs: 10_000 });
  return issued.auditKey;
};
const caughtUp = async () => {
  const head = (await service.services.store.head())!;
  for (const projection of everySubscriber(service.services)) await projection.runUntil(head, { timeoutMs: 20_000 });
};
const head = () => service.services.store.head();
const log = async (after: Position | null = null): Promise<Recorded[]> => {
  const events: Recorded[] = [];
  for await (const batch of service.services.store.readAll(after)) events.push(...batch);
  return events;
};

interface FeedEvent {
  readonly position: string;
  readonly stream: string;
  readonly revision: number;
  readonly eventId: string;
  readonly type: string;
  readonly version: number;
  readonly recordedAt: string;
  readonly effectiveAt: string | null;
  readonly actorType: string;
  readonly data: Record<string, unknown>;
}
interface Changed {
  readonly payment: PaymentView & { readonly accountId: string };
  readonly revision: number;
  readonly position: string;
}
interface Answer {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
  readonly data: { readonly events: FeedEvent[]; readonly payments: Changed[]; readonly next: string | null; readonly end: boolean };
}
const get = async (
  path: string,
  query: Readonly<Record<string, string | number | null>> = {},
  { authorization = key, signal }: { authorization?: string; signal?: AbortSignal } = {},
): Promise<Answer> => {
  const given = Object.entries(query).filter(([, value]) => value !== null) as [string, string][];
  const full = `/audit/v1/${path}?${new URLSearchParams(given).toString()}`;
  const response = await fetch(`${url}${full}`, { headers: { authorization }, ...(signal && { signal }) });
  const text = await response.text();
  judge.check({ method: 'GET', path: full, status: response.status, contentType: response.headers.get('content-type') ?? undefined, text });
  return { status: response.status, headers: response.headers, text, data: (JSON.parse(text) as { data: Answer['data'] }).data };
};
/** All pages from a place to the end. */
const pages = async (path: string, query: Readonly<Record<string, string | number | null>> = {}, authorization = key): Promise<Answer['data'][]> => {
  const all: Answer['data'][] = [];
  for (let after: string | null = (query.after as string | undefined) ?? null; ;) {
    const { status, data } = await get(path, { ...query, after }, { authorization });
    expect(status).toBe(200);
    all.push(data);
    if (data.end) return all;
    expect(data.next).not.toBe(after);
    after = data.next;
  }
};
const everyEvent = async (query: Readonly<Record<string, string | number | null>> = {}, authorization = key) =>
  (await pages('events', query, authorization)).flatMap(({ events }) => events);

describe('events', () => {
  test.each([1_000, 50, 7])('in pages of %d are the log, each once and in its order', async (limit) => {
    const events = await everyEvent({ limit });
    const whole = (await log()).slice(0, events.length);
    expect(events.length).toBeGreaterThan(80);
    expect(events.map(({ data: _, ...event }) => event)).toEqual(
      whole.map(({ position, stream, revision, id, type, v, meta }) => ({
        position,
        stream,
        revision: Number(revision),
        eventId: id,
        type,
        version: v,
        recordedAt: meta.recordedAt,
        effectiveAt: meta.effectiveAt ?? null,
        actorType: meta.actor.type,
      })),
    );
  });
  test('say where they end and what follows, in the answer and in its headers', async () => {
    await caughtUp();
    const whole = await log();
    const { data, headers } = await get('events', { limit: 10 });
    expect([data.next, data.end, headers.get('ledger-position')]).toEqual([whole[9]!.position, false, whole[9]!.position]);
    expect(headers.get('ledger-lag')).toBe(eventsInPostgres ? String(whole.length - 10) : 'unknown');
    const last = await get('events', { after: whole.at(-2)!.position });
    expect(last.data).toMatchObject({ events: [{ position: whole.at(-1)!.position }], next: whole.at(-1)!.position, end: true });
    expect([last.headers.get('ledger-position'), last.headers.get('ledger-lag')]).toEqual([whole.at(-1)!.position, '0']);
    const none = await get('events', { after: whole.at(-1)!.position });
    expect(none.data).toEqual({ events: [], next: whole.at(-1)!.position, end: true });
  });
  test('of some types: `next` passes the others', async () => {
    const types = 'PaymentSettled,BatchFunded';
    const whole = await log();
    const wanted = whole.filter(({ type }) => types.split(',').includes(type)).map(({ position }) => position);
    const found = await pages('events', { types, limit: 3 });
    expect(found.flatMap(({ events }) => events.map(({ position }) => position))).toEqual(wanted);
    expect(wanted.length).toBeGreaterThan(5);
    const last = await get('events', { types: 'PortalCodingSet' });
    expect(last.data).toEqual({ events: [], next: await head(), end: true });
  });
  test.each<Record<string, string>>([
    { limit: '0' },
    { limit: '1001' },
    { wait: '31' },
    { wait: '-1' },
    { types: 'PaymentMoved' },
    { types: '' },
    { types: 'constructor' },
    { after: '' },
    { after: 'x' },
    { after: '7' },
    { after: '99999999999999999999' },
    { after: '00000000000000000007:00000000000000000007:1' },
    { personal: 'true' },
    { cursor: 'x' },
  ])('%o is refused', async (query) => {
    const { status, text } = await get('events', query);
    expect([status, text]).toEqual([400, expect.stringContaining('VALIDATION_ERROR')]);
    expect((await get('changed-payments', query)).status).toBe(400);
  });
  test('a place beyond the end, and one of another kind of store, are refused', async () => {
    const beyond = (await head())!.replace(/\d/g, '9');
    const other = eventsInPostgres ? `${(await head())!}:${(await head())!}` : (await head())!.split(':')[0]!;
    for (const after of [beyond, other])
      for (const path of ['events', 'changed-payments']) {
        const { status, text } = await get(path, { after });
        expect([after, path, status, text]).toEqual([after, path, 400, expect.stringContaining('after is no place of this log')]);
      }
  });
  test('in an incident of the event store are refused with 503', async () => {
    const { pool, ownLog } = service.services;
    await pool.query(`insert into store_incident (kind, message, found_by) values ('lost_events', 'it does not hold an event', 'another process')`);
    try {
      await eventually(() => ownLog.incident !== null);
      expect([(await get('events')).status, (await get('changed-payments')).status]).toEqual([503, 503]);
    } finally {
      await closeIncident(pool, [], { by: 'Dana', reason: 'spec' });
      await eventually(() => ownLog.incident === null);
    }
  });
});

describe('changed payments', () => {
  const asList = async () => {
    const found: PaymentView[] = [];
    for (let cursor: string | null = ''; cursor !== null;) {
      const { text } = await get('payments', { limit: 100, ...(cursor && { cursor }) });
      const { data } = JSON.parse(text) as { data: { payments: PaymentView[]; nextCursor: string | null } };
      found.push(...data.payments);
      cursor = data.nextCursor;
    }
    return new Map(
      found.map((one) => [one.id, { ...one, payer: null, lineItems: one.lineItems.map((line) => ({ ...line, description: null, metadata: null })) }]),
    );
  };
  test.each([1_000, 2])('in pages of %d are all payments, as they are now', async (limit) => {
    await caughtUp();
    const found = await pages('changed-payments', { limit });
    const [list, whole] = [await asList(), await log()];
    const last = new Map<string, Changed>();
    for (const { payments, next } of found) {
      expect(new Set(payments.map(({ payment }) => payment.id)).size).toBe(payments.length);
      expect(payments.length).toBeLessThanOrEqual(limit);
      for (const one of payments) {
        expect(one.position <= next!).toBe(true);
        expect(one.payment).toEqual(list.get(one.payment.id));
        last.set(one.payment.id, one);
      }
    }
    expect([...last.keys()].sort()).toEqual([...list.keys()].sort());
    for (const [id, { position, revision }] of last) {
      const events = whole.filter(({ stream }) => stream === `payment-${id}`);
      expect([position, revision]).toEqual([events.at(-1)!.position, events.length - 1]);
    }
  });
  test('after a place are those that changed since, each once', async () => {
    const { client } = day.partner;
    const earlier = await client.created(paymentOf(day.separate));
    await caughtUp();
    const after = await head();
    expect((await get('changed-payments', { after })).data).toEqual({ payments: [], next: after, end: true });
    const made = await client.created(paymentOf(day.separate));
    await client.refund(made.id, { amountCents: 100 });
    await client.refund(earlier.id, { amountCents: 1 });
    await caughtUp();
    const { data } = await get('changed-payments', { after });
    expect(data.end).toBe(true);
    expect(data.payments.map(({ payment }) => payment.id)).toEqual([made.id, earlier.id]);
    expect(data.payments[0]!.payment).toMatchObject({ status: 'partially_refunded', refundedAmountCents: 100 });
  });
  test('never pass the place that the list has reached, while the feed goes on', async () => {
    const { pool, store, readModels } = service.services;
    await caughtUp();
    const after = await head();
    const held = await pool.connect();
    try {
      await held.query('begin');
      await held.query('select from projection_checkpoint where name = $1 for update', [checkpointOf(paymentListModel)]);
      const made = await day.partner.client.created(paymentOf(day.separate));
      expect((await everyEvent({ after })).map(({ stream }) => stream)).toContain(`payment-${made.id}`);
      const { data, headers } = await get('changed-payments', { after });
      expect(data).toEqual({ payments: [], next: after, end: false });
      expect(headers.get('ledger-position')).toBe(after);
      expect(headers.get('ledger-lag')).not.toBe('0');
      await held.query('rollback');
      await readModels.of(paymentListModel).runUntil((await store.head())!, { timeoutMs: 20_000 });
      expect((await pages('changed-payments', { after })).flatMap(({ payments }) => payments.map(({ payment }) => payment.id))).toContain(made.id);
    } finally {
      await held.query('rollback');
      held.release();
    }
  });
});

describe('waiting', () => {
  const pay = () => day.partner.client.created(paymentOf(day.separate));
  const atEnd = async () => {
    await caughtUp();
    return (await get('events', { after: await head() })).data.next;
  };
  test('ends with the first event, and the pages go on without a gap', async () => {
    let after = await atEnd();
    const begun = after;
    const seen: FeedEvent[] = [];
    for (let round = 0; round < 5; round++) {
      const waiting = get('events', { after, wait: 30 });
      const made = await pay();
      const isSeen = () => seen.some(({ stream, type }) => stream === `payment-${made.id}` && type === 'PaymentCreated');
      for (let answer = await waiting; ; answer = await get('events', { after, wait: 30 })) {
        expect(answer.data.events.length).toBeGreaterThan(0);
        seen.push(...answer.data.events);
        after = answer.data.next;
        if (isSeen()) break;
      }
    }
    const whole = await log(begun as Position);
    expect(seen.map(({ eventId }) => eventId)).toEqual(whole.slice(0, seen.length).map(({ id }) => id));
  });
  test('without events ends with an empty page, and `next` has passed events of other types', async () => {
    const after = await atEnd();
    const begun = performance.now();
    const waiting = get('events', { after, wait: 1, types: 'PortalCodingSet' });
    await pay();
    const { data } = await waiting;
    expect(performance.now() - begun).toBeGreaterThan(950);
    expect(data.events).toEqual([]);
    expect(data.next! > after!).toBe(true);
  });
  test('of a key with a scope ends only with an event of its own', async () => {
    const portal = await service.portal(day.partner);
    const authorization = await issue('agency', { accounts: [], portals: [portal] });
    const after = await atEnd();
    let answered = false;
    const waiting = get('events', { after, wait: 30 }, { authorization }).then((answer) => {
      answered = true;
      return answer;
    });
    const other = await pay();
    await caughtUp();
    expect(answered).toBe(false);
    const own = await day.partner.client.created(paymentOf(portal));
    const { data } = await waiting;
    expect(new Set(data.events.map(({ stream }) => stream))).toEqual(new Set([`payment-${own.id}`]));
    expect(JSON.stringify(data)).not.toContain(other.id);
  });
  test('64 readers wait, 4 of a key; further ones get 429 with Retry-After; one event answers all, and a reader that is gone makes room', async () => {
    const keys = [key, ...(await Promise.all(Array.from({ length: 16 }, () => issue())))];
    const after = await atEnd();
    const leaving = new AbortController();
    const types = 'PaymentCreated';
    const waits = keys
      .slice(0, 16)
      .flatMap((authorization) =>
        Array.from({ length: 4 }, () => get('events', { after, wait: 30, types }, { authorization, signal: leaving.signal })),
      );
    const seats = () => audit.app.get(FeedWaits).taken;
    await eventually(() => seats() === 64);
    const limited = async (authorization: string) => {
      const { status, headers } = await get('events', { after, wait: 30 }, { authorization });
      return [status, headers.get('retry-after')];
    };
    expect(await limited(key)).toEqual([429, '5']);
    expect(await limited(keys[16]!)).toEqual([429, '5']);
    expect((await figuresOf(metrics.own)).get('payfold_audit_limited_total{limit="waits"}')).toBe(2);
    // Without wait, a reader needs no seat. Other requests go on.
    expect((await get('events', { after }, { authorization: keys[16]! })).status).toBe(200);
    expect((await get('payments')).status).toBe(200);
    await pay();
    const answers = await Promise.all(waits);
    for (const { status, data } of answers) expect([status, data.events.map(({ type }) => type)]).toEqual([200, [types]]);
    await eventually(() => seats() === 0);

    const again = await atEnd();
    const few = Array.from({ length: 4 }, () => get('events', { after: again, wait: 30 }, { signal: leaving.signal }).catch(() => null));
    await eventually(() => seats() === 4);
    expect(await limited(key)).toEqual([429, '5']);
    leaving.abort();
    await Promise.all(few);
    await eventually(() => seats() === 0);
  });
  test('ends when the listener closes', async () => {
    const closing = await createAudit(service.services);
    const base = await closing.listen(0, '127.0.0.1');
    const after = await atEnd();
    const begun = performance.now();
    const waiting = fetch(`${base}/audit/v1/events?after=${after}&wait=30`, { headers: { authorization: key } });
    await eventually(() => closing.app.get(FeedWaits).taken === 1);
    await closing.close(1_000);
    expect(((await (await waiting).json()) as { data: Answer['data'] }).data).toMatchObject({ events: [] });
    expect(performance.now() - begun).toBeLessThan(20_000);
  });
});

describe('what belongs to a payer, and what people write', () => {
  const SECRET = 'Zanzibar';
  test('does not leave: not by events, not by changed payments, for no key', async () => {
    const { payments, settlement, ids } = service.services;
    const { client } = day.partner;
    const body = paymentOf(day.separate, {
      payer: {
        firstName: `${SECRET}-first`,
        lastName: `${SECRET}-last`,
        email: `${SECRET}@example.com`,
        phone: `+1 555 ${SECRET}`,
        address: { line1: `${SECRET} street`, line2: `${SECRET} flat`, city: `${SECRET} city`, state: 'CA', zip: `${SECRET.slice(0, 5)}` },
      },
      lineItems: [
        { amountCents: 10_000, referenceId: 'INV-SECRET', description: `${SECRET} water`, metadata: { note: `${SECRET} meta`, [SECRET]: 1 } },
      ],
    });
    const made = await client.created(body);
    await client.refund(made.id, { amountCents: 5, reason: `${SECRET} refund` });
    await client.void((await client.created(body)).id, { reason: `${SECRET} void` });
    await dispute(service, made.id, 100, 'debited');
    const unknown = await client.create(paymentOf(day.separate, { number: CARD.neverReached }));
    const resolution = { as: 'failed', evidence: `${SECRET} call`, by: `${SECRET} Dana`, force: false, transactions: {} } as const;
    await resolvePayment(payments.ports, settlement.register, { ...resolution, paymentId: unknown.details!.id as string });
    await service.administer(
      service.admin.restrictCase({
        portalId: day.separate,
        referenceId: `CASE-${ids.uuid()}`,
        kind: 'block',
        until: null,
        reason: `${SECRET} block`,
      }),
    );
    await caughtUp();
    // The log holds the texts in boxes, and the evidence of staff as it was written.
    const typesWith = async (text: string) =>
      new Set((await log()).filter(({ data }) => JSON.stringify(data).includes(text)).map(({ type }) => type));
    expect(await typesWith(SECRET)).toEqual(new Set(['PaymentResolved']));
    expect(await typesWith('"box"')).toEqual(
      new Set(['PaymentInitiated', 'RefundRequested', 'ReversalEnded', 'VoidRequested', 'PaymentDisputed', 'CaseBlocked']),
    );
    for (const authorization of [key, await issue('auditor'), await issue('agency', { accounts: [], portals: [day.separate] })])
      for (const path of ['events', 'changed-payments']) {
        const text = JSON.stringify(await pages(path, {}, authorization));
        expect([path, text.includes(made.id)]).toEqual([path, true]);
        expect([path, text.includes(SECRET)]).toEqual([path, false]);
        // The names of staff and of other actors are not shown either, nor the keyed hashes of requests.
        for (const hidden of ['Dana', '"box"', 'keyHash', 'fingerprint', 'secretHash', 'ciphertext', 'credentialsRef'])
          expect([path, hidden, text.includes(hidden)]).toEqual([path, hidden, false]);
      }
  });
});

/** This is the last test, since it leaves an event in the log that this release does not know. */
test('an event of a newer release is not passed: the page ends before it, and then the answer is 503 until the upgrade', async () => {
  const { store, ids } = service.services;
  const before = await head();
  const meta = { recordedAt: new Date().toISOString(), actor: { type: 'system' as const, id: 'spec' }, correlationId: 'spec' };
  await store.append(`staff-newer-${ids.uuid()}`, 'no_stream', [{ id: ids.uuid(), type: 'SomethingNewer', v: 1, data: { name: 'a' }, meta }]);
  const newer = (await log(before)).findIndex(({ type }) => type === 'SomethingNewer');
  let after: string | null = before;
  for (let read = 0; read < newer;) {
    const { data } = await get('events', { after });
    expect(data.end).toBe(false);
    read += data.events.length;
    after = data.next;
  }
  const { status, headers, text } = await get('events', { after });
  expect([status, headers.get('retry-after'), text]).toEqual([503, '60', expect.stringContaining('SomethingNewer version 1')]);
  expect((await get('events', { after, wait: 5 })).status).toBe(503);
  // A reader of other types goes on.
  expect((await get('events', { after, types: 'PaymentCreated' })).status).toBe(200);
});

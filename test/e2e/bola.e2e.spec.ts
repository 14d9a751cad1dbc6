/**
 * Broken object level authorization: an account must not reach another account's objects. The tests combine all operations, kinds of id, and two
 * accounts. The operations come from the served OpenAPI document, so a new operation is included. Its test fails if `NAMES` does not have one of its
 * parameters. The audit listener's operations are tested too.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { EVERYTHING } from '#accounts';
import { auditKeyModel, issueAuditKey } from '#audit';
import { type Audit, createAudit } from '../../apps/audit/audit.js';
import { type Answer, type Client, paymentOf, PAYMENTS, type Service, startService, type TestAccount } from '../support/service.js';

interface Parameter {
  readonly in: string;
  readonly name: string;
  readonly required?: boolean;
}
interface Route {
  readonly method: string;
  readonly path: string;
  readonly parameters: readonly Parameter[];
  readonly body: string | null;
}

let service: Service;
let owner: TestAccount;
let stranger: TestAccount;
let portalId: string;
let strangersPortal: string;
let paymentId: string;
let lineItemId: string;
let routes: Route[];
/** Texts that no account but the owner may see. */
let secrets: string[];

beforeAll(async () => {
  service = await startService();
  owner = await service.account('Owner');
  stranger = await service.account('Stranger');
  portalId = await service.portal(owner);
  strangersPortal = await service.portal(stranger);
  const payment = await owner.client.created(paymentOf(portalId, { referenceId: 'OWNERS-CASE' }));
  paymentId = payment.id;
  lineItemId = payment.lineItems[0]!.id;
  secrets = [paymentId, lineItemId, payment.confirmationNumber!, payment.gateway.transactionId!, 'OWNERS-CASE'];
  const { paths } = service.judge.document as unknown as {
    paths: Record<string, Record<string, { parameters?: Parameter[]; requestBody?: { content: Record<string, { schema: { $ref?: string } }> }; security?: unknown[] }>>;
  }; // prettier-ignore
  routes = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods)
      .filter(([, { security }]) => (security?.length ?? 0) > 0)
      .map(([method, { parameters = [], requestBody }]) => ({
        method: method.toUpperCase(),
        path,
        parameters,
        body: requestBody?.content['application/json']?.schema.$ref?.split('/').at(-1) ?? null,
      })),
  );
});
afterAll(() => service.stop());

const NOWHERE = '018f0000-0000-7000-8000-00000000dead';
/** The service refuses these operations before it looks up an id (C6). */
const UNSUPPORTED = /\/(capture|vault)$/;

/** The kind of object that each parameter names. */
const NAMES: Readonly<Record<string, 'payment' | 'portal' | 'cursor' | 'nothing'>> = {
  'path id': 'payment',
  'query portalId': 'portal',
  'query cursor': 'cursor',
  'query amountCents': 'nothing',
  'query limit': 'nothing',
  'query status': 'nothing',
  'query from': 'nothing',
  'query to': 'nothing',
  'query idempotencyKey': 'nothing',
  'header Idempotency-Key': 'nothing',
};
const bodyOf = (route: Route, portal: string): object | undefined => {
  if (route.body === null) return undefined;
  if (route.body === 'CreatePaymentRequest') return paymentOf(portal);
  return {};
};
const send = (client: Client, route: Route, ids: { payment?: string; portal?: string; cursor?: string }): Promise<Answer<unknown>> => {
  const query = new URLSearchParams();
  for (const { in: where, name, required } of route.parameters) {
    if (where !== 'query') continue;
    const kind = NAMES[`query ${name}`];
    if (kind === 'portal' && (ids.portal || required)) query.set(name, ids.portal ?? strangersPortal);
    else if (kind === 'cursor' && ids.cursor) query.set(name, ids.cursor);
    else if (required) query.set(name, name === 'amountCents' ? '100' : 'x');
  }
  const path = route.path.replace('{id}', ids.payment ?? paymentId);
  return client.send(route.method, query.size > 0 ? `${path}?${query.toString()}` : path, bodyOf(route, ids.portal ?? strangersPortal));
};
const expectNothingTold = (answer: Answer<unknown>) => {
  for (const secret of secrets) expect(answer.text).not.toContain(secret);
};

test('every parameter of every operation is known to the matrix', () => {
  expect(routes.length).toBeGreaterThan(7);
  expect(routes.flatMap(({ parameters }) => parameters.map((one) => `${one.in} ${one.name}`)).filter((name) => !(name in NAMES))).toEqual([]);
  expect(routes.flatMap(({ path }) => [...path.matchAll(/\{(\w+)\}/g)].map(([, name]) => name)).filter((name) => name !== 'id')).toEqual([]);
});

describe('a payment’s id', () => {
  const withPayment = () => routes.filter(({ path }) => path.includes('{id}') && !UNSUPPORTED.test(path));
  test('of another account, absent, a line item’s or no id at all: 404, byte for byte the same (C7)', async () => {
    for (const route of withPayment()) {
      const texts = new Map<string, string>();
      const kinds = { 'another account’s': paymentId, absent: NOWHERE, 'a line item’s': lineItemId, 'another account’s, in capitals': paymentId.toUpperCase(), 'a portal’s': portalId, 'no id': 'no-id', 'a number': '1' }; // prettier-ignore
      for (const [kind, id] of Object.entries(kinds)) {
        const answer = await send(stranger.client, route, { payment: id });
        expect([route.method, route.path, kind, answer.status, answer.code]).toEqual([route.method, route.path, kind, 404, 'PAYMENT_NOT_FOUND']);
        expectNothingTold(answer);
        texts.set(kind, answer.text);
      }
      // The id of a line item is not the id of a payment. The answer must be the same as for an unknown id.
      texts.set('the owner’s line item', (await send(owner.client, route, { payment: lineItemId })).text);
      expect(new Set(texts.values()).size).toBe(1);
    }
    // No request of the stranger has moved money.
    expect((await owner.client.find(paymentId)).data).toMatchObject({ status: 'succeeded', refundedAmountCents: 0 });
  });
  test('the owner is answered on the same routes, so the matrix tests existing ones', async () => {
    for (const route of withPayment().filter(({ method }) => method === 'GET')) expect((await send(owner.client, route, {})).status).toBe(200);
  });
  test('refused without credentials, with another environment’s key or half a key', async () => {
    const key = owner.apiKey;
    for (const route of routes)
      for (const authorization of [null, `ApiKey ${key.slice(0, -4)}`, `ApiKey ${key.replace('pc_test', 'pc_live')}`, `Bearer ${key}`]) {
        const answer = await send(service.anonymous.as(authorization), route, { portal: portalId });
        expect([route.path, authorization === null, answer.status]).toEqual([route.path, authorization === null, 401]);
        expectNothingTold(answer);
      }
  });
});

describe('a portal’s id', () => {
  test('another account’s and an unknown one: the same 403 (specification, Portals)', async () => {
    const withPortal = routes.filter(({ parameters, body }) => body === 'CreatePaymentRequest' || parameters.some(({ name }) => name === 'portalId'));
    expect(withPortal.length).toBeGreaterThanOrEqual(3);
    for (const route of withPortal) {
      const [others, absent] = [await send(stranger.client, route, { portal: portalId }), await send(stranger.client, route, { portal: NOWHERE })];
      expect([others.status, others.code]).toEqual([403, 'PORTAL_ACCESS_DENIED']);
      expect(absent.text).toBe(others.text);
      expectNothingTold(others);
    }
  });
});

describe('routes without an id', () => {
  test('a list shows the account’s own payments only, also with another account’s cursor', async () => {
    for (let count = 0; count < 2; count++) await owner.client.created(paymentOf(portalId));
    const { nextCursor } = (await owner.client.list({ limit: 1 })).data;
    expect(nextCursor).not.toBeNull();
    const stolen = await stranger.client.list({ limit: 1, cursor: nextCursor! });
    expect([stolen.status, stolen.code]).toEqual([400, 'VALIDATION_ERROR']);
    const own = await stranger.client.list();
    expect(own.data.payments).toEqual([]);
    expectNothingTold(own);
  });
  test('an idempotency key is the account’s own: another account’s replays nothing', async () => {
    const key = 'shared-key';
    const first = await owner.client.create(paymentOf(portalId), { key });
    const other = await stranger.client.create(paymentOf(strangersPortal), { key });
    expect([other.status, other.headers['idempotent-replayed']]).toEqual([200, undefined]);
    expect(other.data.id).not.toBe(first.data.id);
    // The stranger uses the key of the owner's refund. The answer must say nothing about that refund.
    await owner.client.refund(first.data.id, {}, { key: 'shared-refund' });
    const refund = await stranger.client.refund(first.data.id, {}, { key: 'shared-refund' });
    expect([refund.status, refund.code]).toEqual([404, 'PAYMENT_NOT_FOUND']);
  });
  test('an access token is good for its own account only', async () => {
    const token = (await stranger.client.post<{ accessToken: string }>('/api/partner/v1/auth/token')).data.accessToken;
    const answer = await service.anonymous.as(`Bearer ${token}`).get(`${PAYMENTS}/${paymentId}`);
    expect([answer.status, answer.code]).toEqual([404, 'PAYMENT_NOT_FOUND']);
  });
});

describe('the audit listener', () => {
  let audit: Audit;
  let base: string;
  let auditKey: string;
  beforeAll(async () => {
    const { store, pool: db, clock, ids, keys, config, readModels } = service.services;
    audit = await createAudit(service.services);
    base = await audit.listen(0, '127.0.0.1');
    const issued = await issueAuditKey(
      { store, db, clock, ids, keys, environment: config.environment },
      { name: 'Matrix', role: 'auditor', scope: EVERYTHING, personal: false },
      { type: 'operator', id: 'spec' },
    );
    ({ auditKey } = issued);
    await readModels.of(auditKeyModel).runUntil(issued.position, { timeoutMs: 10_000 });
  });
  afterAll(() => audit.close());

  test('no operation of it answers a partner, nor anybody without a key of its own; with one, each does', async () => {
    const { paths } = (await (await fetch(`${base}/openapi.json`)).json()) as { paths: Record<string, Record<string, { security?: unknown[] }>> };
    const operations = Object.entries(paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => ({ path, method, operation })),
    );
    expect(operations.length).toBeGreaterThan(8);
    for (const { path, method, operation } of operations) {
      expect([path, method, operation.security]).toEqual([path, 'get', [{ auditKey: [] }]]);
      const url = `${base}${path.replace('{id}', paymentId).replace('{report}', 'payments').replace('{portalId}', portalId)}${path.includes('/statements/') ? '?period=2026-01' : ''}`; // prettier-ignore
      const { data } = await owner.client.post<{ accessToken: string }>('/api/partner/v1/auth/token', {});
      for (const authorization of [null, `ApiKey ${owner.apiKey}`, owner.apiKey, `Bearer ${data.accessToken}`, `AuditKey ${owner.apiKey}`]) {
        const refused = await fetch(url, { headers: authorization === null ? {} : { authorization } });
        const text = await refused.text();
        expect([path, refused.status]).toEqual([path, 401]);
        for (const secret of secrets) expect(text).not.toContain(secret);
      }
      const answered = await fetch(url, { headers: { authorization: `AuditKey ${auditKey}` } });
      await answered.arrayBuffer();
      expect([path, answered.status]).toEqual([path, 200]);
    }
  });
  test('and its key opens no operation of a partner’s', async () => {
    for (const route of routes)
      for (const authorization of [auditKey, `AuditKey ${auditKey}`, `ApiKey ${auditKey}`, `Bearer ${auditKey}`]) {
        const answer = await send(service.anonymous.as(authorization), route, { portal: portalId });
        expect([route.path, answer.status]).toEqual([route.path, 401]);
        expectNothingTold(answer);
      }
  });
});

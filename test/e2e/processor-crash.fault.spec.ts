/**
 * `kill -9` of an API process at each call to a processor. A proxy stands between that process and the doubles. It kills the process before a request
 * is passed on, or after the processor has executed it and before the answer arrives. A flow is repeated and killed one call later each time, until it
 * comes to its end. So no call can be left out. Another API then gets the same key again, and recovery does the rest.
 */
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import http, { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { buffer } from 'node:stream/consumers';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { NO_FEE, type FeeConfig } from '#accounts';
import { CLOSED, fold } from '#kernel';
import {
  createRecovery,
  isVisible,
  payment as decider,
  paymentEvents,
  paymentIdOf,
  paymentView,
  postgresRecoveryWork,
  type VisiblePayment,
} from '#payments';
import { Partner } from '../../apps/demo/partner.js';
import { type AuthorizeNetDouble, startAuthorizeNetDouble } from '../doubles/authorize-net/server.js';
import { controlOf, type StripeControl } from '../doubles/stripe/control.js';
import { startStripeDouble, type StripeDouble } from '../doubles/stripe/server.js';
import { eventually } from '../support/eventually.js';
import { payfoldOn, type Running, startIn } from '../support/merchants.js';
import { DataDir, kill, newKey, type RunningProcess, start } from '../support/processes.js';
import { PARTNER, paymentOf } from '../support/service.js';
import { endLeases } from '../support/truth.js';

const CARD = '4111 1111 1111 1111';
const MERCHANT = 'login-one';
const DAY_MS = 86_400_000;
const stops: (() => unknown)[] = [];
let folder: string;
let net: AuthorizeNetDouble;
let stripe: StripeDouble;
let cards: StripeControl;
let running: Running;
let partner: Partner;
let dataDir: DataDir;
let doomed: RunningProcess | null = null;
/** What doomed processes wrote. */
const written: string[] = [];
/** The file of the write-ahead log in which the spec begins. */
let firstWal: string;

type Moment = 'before' | 'after';
/** The next kill: at the call with this number, counted from 1. null: calls pass. */
let crash: { readonly call: number; readonly moment: Moment } | null = null;
let calls = 0;

/** Passes requests on to a processor, and kills the process that sent them. Only the doomed process uses it. */
const proxyTo = async (target: () => string): Promise<string> => {
  const pass = async (request: IncomingMessage, response: ServerResponse) => {
    const body = await buffer(request);
    calls += 1;
    const moment = crash?.call === calls ? crash.moment : null;
    if (moment === 'before') return kill(doomed!.pid);
    const { hostname, port } = new URL(target());
    const passed = http.request({ agent: false, hostname, port, path: request.url, method: request.method, headers: request.headers }).end(body);
    const [answer] = (await once(passed, 'response')) as [IncomingMessage];
    const text = await buffer(answer);
    if (moment === 'after') return kill(doomed!.pid);
    response.writeHead(answer.statusCode!, answer.headers).end(text);
  };
  const server = createServer((request, response) => void pass(request, response)).listen(0, '127.0.0.1');
  await once(server, 'listening');
  stops.push(() => {
    server.closeAllConnections();
    server.close();
  });
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
};

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-processor-crash-'));
  dataDir = await DataDir.create();
  stops.push(() => dataDir.remove());
  net = await startAuthorizeNetDouble({ file: join(folder, 'net.jsonl') });
  stripe = await startStripeDouble({ file: join(folder, 'stripe.jsonl') });
  stops.push(
    () => net.close(),
    () => stripe.close(),
  );
  cards = controlOf(stripe.url);
  // This process calls the doubles directly. The address of an account counts for other processes: they call by the proxy.
  running = await startIn({ folder, stops }, 'sandbox', { 'authorize-net': net.endpoint, stripe: stripe.url });
  partner = new Partner(running.url + PARTNER, running.apiKey);
  const { rows } = await running.services.pool.query<{ name: string }>('select pg_walfile_name(pg_current_wal_lsn()) as name');
  firstWal = rows[0]!.name;
  const add = async (id: string, gateway: string, endpoint: string, credentials: string) => {
    const args = ['merchant-accounts', 'add', id, '--gateway', gateway, '--environment', 'sandbox', '--endpoint', endpoint];
    const done = await payfoldOn(running, [...args, '--credentials-file', '-', '--yes'], credentials);
    expect([done.code, done.stderr]).toEqual([0, '']);
  };
  const { pathname } = new URL(net.endpoint);
  await add('net', 'authorize-net', (await proxyTo(() => net.endpoint)) + pathname, '{"apiLoginId":"login-one","transactionKey":"key-of-one-0001"}');
  await add('cards', 'stripe', await proxyTo(() => stripe.url), '{"secretKey":"sk_test_double_one_0001"}');
});
afterAll(async () => {
  for (const stop of stops.reverse()) await stop();
  await rm(folder, { recursive: true, force: true });
});

interface Processor {
  readonly gateway: 'authorize-net' | 'stripe';
  readonly merchantAccount: string;
  readonly fee: FeeConfig;
  readonly payment: (portalId: string) => object;
  /** Closes the batch, so that money is returned by refunds. */
  readonly settle: () => Promise<unknown>;
  /** Moves the clock of the double. */
  readonly passTime: (ms: number) => Promise<unknown>;
  /** Cents that the processor holds of a charge. */
  readonly netOf: (ref: string) => Promise<number>;
  /** Cents that it holds of all charges. */
  readonly net: () => Promise<number>;
}

const netOfAuthorizeNet = (ref: string | null): number => {
  const all = net.vendor.all(MERCHANT);
  const mine = all.filter((txn) => txn.type === 'authCaptureTransaction' && (ref === null || txn.ref === ref));
  const isGood = ({ status }: { status: string }) => status !== 'voided' && status !== 'declined';
  return mine.filter(isGood).reduce((sum, { id, amountCents }) => {
    const refunds = all.filter((txn) => txn.type === 'refundTransaction' && txn.refTransId === id && isGood(txn));
    return sum + amountCents - refunds.reduce((cents, refund) => cents + refund.amountCents, 0);
  }, 0);
};
const netOfStripe = async (isMine: (intent: unknown) => boolean): Promise<number> =>
  (await cards.charges())
    .filter(({ payment_intent, status }) => status === 'succeeded' && isMine(payment_intent))
    .reduce((sum, { amount, amount_refunded }) => sum + Number(amount) - Number(amount_refunded), 0);

const PROCESSORS: readonly Processor[] = [
  {
    gateway: 'authorize-net',
    merchantAccount: 'net',
    fee: { ...NO_FEE, flatCents: 50 },
    payment: (portalId) => paymentOf(portalId, { number: CARD }),
    settle: async () => net.vendor.closeNow(MERCHANT),
    passTime: async (ms) => net.vendor.moveTo(net.vendor.ahead + ms),
    netOf: async (ref) => netOfAuthorizeNet(ref),
    net: async () => netOfAuthorizeNet(null),
  },
  {
    gateway: 'stripe',
    merchantAccount: 'cards',
    fee: { ...NO_FEE, flatCents: 50, chargeMode: 'combined' },
    payment: (portalId) => paymentOf(portalId, { paymentMethod: { type: 'card_token', token: 'pm_card_visa' } }),
    settle: () => cards.payOut(),
    passTime: (ms) => cards.advance(ms),
    netOf: async (ref) => {
      const ids = (await cards.intents(ref)).map(({ id }) => id);
      return netOfStripe((intent) => ids.includes(intent as string));
    },
    net: () => netOfStripe(() => true),
  },
];

describe.each(PROCESSORS)('$gateway', ({ gateway, merchantAccount, fee, payment, settle, passTime, netOf, net: netOfAll }) => {
  let portalId: string;
  beforeAll(async () => {
    const { admin, inForce, accountId } = running;
    ({ portalId } = (await inForce(admin.createPortal({ accountIds: [accountId], name: 'Portal', gateway: 'none', fee }))).state);
    await inForce(admin.setGateway(portalId, { gateway, principal: merchantAccount, fee: merchantAccount }));
  });

  const paid = async (): Promise<string> => {
    const reply = await partner.post('payments', payment(portalId), newKey('paid'));
    if (reply.status !== 200) throw new Error(`no payment: ${reply.text}`);
    return reply.data.id as string;
  };

  /** Kills a process at the call with a number. Resolves to null, or to the status of the answer if the flow had fewer calls. */
  const killedAt = async (call: number, moment: Moment, path: string, body: object, key: string): Promise<number | null> => {
    const { databaseUrl, dataDir: data } = running;
    const env = { DATABASE_URL: databaseUrl, MASTER_KEY_FILE: join(data, 'master.key'), SIMULATOR_URL: 'http://127.0.0.1:1', LOG_LEVEL: 'debug' };
    doomed ??= await start('api', dataDir, env);
    [crash, calls] = [{ call, moment }, 0];
    const answer = await new Partner(doomed.url + PARTNER, running.apiKey).post(path, body, key).then(
      ({ status }) => status,
      () => null,
    );
    crash = null;
    if (answer !== null) return answer;
    const { signal, stdout, stderr } = await doomed.exited;
    expect(signal).toBe('SIGKILL');
    written.push(stdout + stderr);
    doomed = null;
    return null;
  };

  interface Flow {
    readonly name: string;
    readonly path: (target: string) => string;
    readonly body: object;
    /** The calls of the flow. */
    readonly calls: number;
    readonly settled?: true;
    /**
     * How many payments wait for the batch afterwards, with those of earlier flows. Only the batch can tell that Authorize.Net never got a charge, and
     * what became of a refund.
     */
    readonly waiting: number;
  }
  const twoLegs = fee.chargeMode !== 'combined';
  const FLOWS: readonly Flow[] = [
    { name: 'create', path: () => 'payments', body: {}, calls: 2, waiting: twoLegs ? 2 : 0 },
    // Stripe cannot void.
    ...(twoLegs ? [{ name: 'void', path: (target: string) => `payments/${target}/void`, body: { reason: 'crash' }, calls: 2, waiting: 2 }] : []),
    {
      name: 'refund with fee',
      path: (target) => `payments/${target}/refund`,
      body: { feeType: 'include_fee' },
      calls: twoLegs ? 6 : 1,
      settled: true,
      waiting: twoLegs ? 8 : 0,
    },
  ];

  const killed: (Flow & { readonly key: string; readonly at: string; readonly sent: object })[] = [];
  const retry = async (name: string): Promise<number[]> => {
    const statuses: number[] = [];
    for (const one of killed) if (one.name === name) statuses.push((await partner.post(one.at, one.sent, one.key)).status);
    return statuses;
  };

  /** The payments of this portal, folded from the log. */
  const payments = async () => {
    const streams = new Map<string, ReturnType<typeof paymentEvents.read>[]>();
    for await (const batch of running.services.store.readAll(null, { streamPrefixes: ['payment-'] }))
      for (const event of batch) streams.set(event.stream, [...(streams.get(event.stream) ?? []), paymentEvents.read(event)]);
    return [...streams].flatMap(([stream, facts]) => {
      const state = fold(decider, facts);
      return isVisible(state) && state.terms.portalId === portalId ? [{ id: paymentIdOf(stream), state }] : [];
    });
  };

  /** Cents that the processor holds of a payment. */
  const heldFor = async ({ terms }: VisiblePayment): Promise<number> => {
    const held = await Promise.all(terms.legs.map(({ references }) => netOf(references.charge)));
    return held.reduce((sum, one) => sum + one, 0);
  };

  /** Runs recovery until at most this many payments are open. */
  const recover = async (waiting: number): Promise<void> => {
    const { payments: service, store, pool } = running.services;
    const recovery = createRecovery(service.ports, store, postgresRecoveryWork(pool), { startsAfterMs: 0 });
    const ids = (await payments()).map(({ id }) => id);
    await eventually(
      async () => {
        const ends = await Promise.all(ids.map((id) => recovery.resolve(id)));
        expect(ends).not.toContain('staff');
        const left = ends.filter((end) => end !== 'resolved').length;
        if (left > waiting) throw new Error(`${left} payments are open`);
        return true;
      },
      { timeoutMs: 60_000 },
    );
  };

  test.each(FLOWS)(
    '$name: killed before its first call, and after each call',
    async (flow) => {
      const { name, path, body, calls: expected, settled, waiting } = flow;
      const crashes: readonly [number, Moment][] = [[1, 'before'], ...Array.from({ length: 20 }, (_, at): [number, Moment] => [at + 1, 'after'])];
      let ended: number | null = null;
      let kills = 0;
      for (const [call, moment] of crashes) {
        const [key, at] = [newKey(name.replaceAll(' ', '-')), path(name === 'create' ? '' : await paid())];
        if (settled) await settle();
        const sent = name === 'create' ? payment(portalId) : body;
        ended = await killedAt(call, moment, at, sent, key);
        if (ended !== null) break;
        killed.push({ ...flow, key, at, sent });
        kills += 1;
      }
      expect([ended, kills]).toEqual([200, expected + 1]);

      await endLeases(running.services);
      const statuses = await retry(name);
      // A create that was cut is never sent again.
      if (name === 'create') expect(statuses.filter((status) => status === 200)).toEqual([]);
      await recover(waiting);
      // Also while a payment waits, nothing of its payer is kept.
      for (const { state } of await payments()) if (state.phase !== 'charged') expect(await heldFor(state)).toBe(0);
    },
    120_000,
  );

  test('the processor holds exactly the cents of the payments, also after the batch', async () => {
    running.clock.advance(4 * DAY_MS);
    await passTime(4 * DAY_MS);
    await settle();
    await recover(0);
    for (const { name } of FLOWS) if (name !== 'create') expect(new Set(await retry(name))).toEqual(new Set([200]));

    let sum = 0;
    for (const { id, state } of await payments()) {
      const { status, capturedAmountCents, refundedAmountCents } = paymentView(id, state, CLOSED);
      const cents = capturedAmountCents - refundedAmountCents;
      expect([status, await heldFor(state)]).toEqual([status, cents]);
      expect(['succeeded', 'voided', 'refunded', 'failed']).toContain(status);
      sum += cents;
    }
    expect(await netOfAll()).toBe(sum);
  }, 180_000);
});

describe('no place that keeps data', () => {
  const SECRETS = ['key-of-one-0001', 'sk_test_double_one_0001', CARD.replaceAll(' ', ''), CARD];
  /** The secrets that bytes show: as text, as UTF-16, as hex, and in base64 from each of three places. */
  const secretsIn = (bytes: Buffer): string[] =>
    SECRETS.filter((secret) => {
      const utf8 = Buffer.from(secret);
      const shifted = [0, 1, 2].map((by) => Buffer.concat([Buffer.alloc(by), utf8]).toString('base64').slice(by === 0 ? 0 : 4, -4)); // prettier-ignore
      return [utf8, Buffer.from(secret, 'utf16le'), utf8.toString('hex'), ...shifted].some((form) => bytes.includes(form));
    });
  const tables = async (): Promise<Buffer> => {
    const { rows } = await running.services.pool.query<{ name: string }>(
      `select quote_ident(n.nspname) || '.' || quote_ident(c.relname) as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
       where c.relkind in ('r', 'p', 'm') and n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast')`,
    );
    const texts: string[] = [];
    for (const { name } of rows)
      texts.push(...(await running.services.pool.query<{ row: string }>(`select t::text as row from ${name} t`)).rows.map(({ row }) => row));
    return Buffer.from(texts.join('\n'));
  };
  const writeAheadLog = async (): Promise<readonly Buffer[]> => {
    const { rows } = await running.services.pool.query<{ name: string }>(
      'select name from pg_ls_waldir() where name between $1 and pg_walfile_name(pg_current_wal_lsn()) order by name',
      [firstWal],
    );
    const segments: Buffer[] = [];
    for (const { name } of rows)
      segments.push(
        (await running.services.pool.query<{ bytes: Buffer }>(`select pg_read_binary_file('pg_wal/' || $1) as bytes`, [name])).rows[0]!.bytes,
      );
    return segments;
  };

  test('holds a card or a key of a processor: tables, write-ahead log, logs of all processes', async () => {
    const found = async () => ({
      tables: secretsIn(await tables()),
      log: [...new Set((await writeAheadLog()).flatMap(secretsIn))],
      lines: secretsIn(Buffer.from([...running.log, ...written].join('\n'))),
    });
    expect(written.length).toBeGreaterThan(10);
    expect((await tables()).length).toBeGreaterThan(100_000);
    expect(await found()).toEqual({ tables: [], log: [], lines: [] });
    // The search finds a leak in each form.
    const [key] = SECRETS as [string];
    await running.services.pool.query('create table leak as select encode($1::bytea, $2) as value', [Buffer.from(`x${key}`), 'base64']);
    expect(await found()).toMatchObject({ tables: [key], log: [key] });
    for (const form of ['hex', 'utf8', 'utf16le'] as const) expect(secretsIn(Buffer.from(form === 'hex' ? Buffer.from(key).toString('hex') : key, form === 'hex' ? 'utf8' : form))).toEqual([key]); // prettier-ignore
  });
});

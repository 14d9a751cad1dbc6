/**
 * `kill -9` of an API process at each call to a processor. A proxy stands between that process and the doubles. It kills the process before a request
 * is passed on, or after the processor has executed it and before the answer arrives. A flow is repeated and killed one call later each time, until it
 * comes to its end. So no call can be left out. Another API then gets the same key again, and recovery does the rest.
 */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { NO_FEE, type FeeConfig } from '#accounts';
import { CLOSED } from '#kernel';
import { createRecovery, isVisible, paymentView, postgresRecoveryWork, type VisiblePayment } from '#payments';
import { Partner } from '../../apps/demo/partner.js';
import { type AuthorizeNetDouble, startAuthorizeNetDouble } from '../doubles/authorize-net/server.js';
import { controlOf, type StripeControl } from '../doubles/stripe/control.js';
import { startStripeDouble, type StripeDouble } from '../doubles/stripe/server.js';
import { eventually } from '../support/eventually.js';
import { addMerchantAccount, type Running, startIn } from '../support/merchants.js';
import { DataDir, kill, newKey, type RunningProcess, start } from '../support/processes.js';
import { heldByAuthorizeNet, heldByStripe, type Moment, startProcessorProxy } from '../support/processor-proxy.js';
import { PARTNER, paymentOf } from '../support/service.js';
import { search, type Sink, tablesOf } from '../support/sinks.js';
import { endLeases, paymentStreams } from '../support/truth.js';

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
/** The output of the doomed processes. */
const written: string[] = [];
/** The file of the write-ahead log in which the spec begins. */
let firstWal: string;

/** The next kill: at the call with this number, counted from 1. null: calls pass. */
let crash: { readonly call: number; readonly moment: Moment } | null = null;
let calls = 0;

/** The address of a proxy that kills the doomed process. Only that process uses it. */
const proxyTo = async (target: string): Promise<string> => {
  const judge = () => {
    calls += 1;
    return crash?.call === calls ? crash.moment : null;
  };
  const proxy = await startProcessorProxy(target, judge, () => kill(doomed!.pid));
  stops.push(() => proxy.close());
  return proxy.url;
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
  const netProxy = (await proxyTo(net.endpoint)) + new URL(net.endpoint).pathname;
  await addMerchantAccount(running, 'net', 'authorize-net', netProxy, '{"apiLoginId":"login-one","transactionKey":"key-of-one-0001"}');
  await addMerchantAccount(running, 'cards', 'stripe', await proxyTo(stripe.url), '{"secretKey":"sk_test_double_one_0001"}');
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
  /** Cents that the processor holds of a charge. null: of all charges. */
  readonly netOf: (ref: string | null) => Promise<number>;
}

const PROCESSORS: readonly Processor[] = [
  {
    gateway: 'authorize-net',
    merchantAccount: 'net',
    fee: { ...NO_FEE, flatCents: 50 },
    payment: (portalId) => paymentOf(portalId, { number: CARD }),
    settle: async () => net.vendor.closeNow(MERCHANT),
    passTime: async (ms) => net.vendor.moveTo(net.vendor.ahead + ms),
    netOf: async (ref) => heldByAuthorizeNet(net, MERCHANT, ref),
  },
  {
    gateway: 'stripe',
    merchantAccount: 'cards',
    fee: { ...NO_FEE, flatCents: 50, chargeMode: 'combined' },
    payment: (portalId) => paymentOf(portalId, { paymentMethod: { type: 'card_token', token: 'pm_card_visa' } }),
    settle: () => cards.payOut(),
    passTime: (ms) => cards.advance(ms),
    netOf: (ref) => heldByStripe(cards, ref),
  },
];

describe.each(PROCESSORS)('$gateway', ({ gateway, merchantAccount, fee, payment, settle, passTime, netOf }) => {
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

  interface Asked {
    readonly path: string;
    readonly body: object;
  }
  /** Kills a process at the call with a number. Resolves to null, or to the status of the answer if the flow had fewer calls. */
  const killedAt = async (call: number, moment: Moment, { path, body, key }: Asked & { readonly key: string }): Promise<number | null> => {
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
    /** Prepares a request. */
    readonly request: () => Promise<Asked>;
    /** The calls of the flow. */
    readonly calls: number;
    /**
     * How many payments wait for the batch afterwards, with those of earlier flows. Only the batch can tell that Authorize.Net never got a charge, and
     * what became of a refund.
     */
    readonly waiting: number;
  }
  const twoLegs = fee.chargeMode !== 'combined';
  const onSettled = async () => {
    const target = await paid();
    await settle();
    return { path: `payments/${target}/refund`, body: { feeType: 'include_fee' } };
  };
  const toVoid = async () => ({ path: `payments/${await paid()}/void`, body: { reason: 'crash' } });
  const FLOWS: readonly Flow[] = [
    { name: 'create', request: async () => ({ path: 'payments', body: payment(portalId) }), calls: 2, waiting: twoLegs ? 2 : 0 },
    // Stripe cannot void.
    ...(twoLegs ? [{ name: 'void', request: toVoid, calls: 2, waiting: 2 }] : []),
    { name: 'refund with fee', request: onSettled, calls: twoLegs ? 6 : 1, waiting: twoLegs ? 8 : 0 },
  ];

  const killed: (Asked & { readonly name: string; readonly key: string })[] = [];
  const retry = async (name: string): Promise<number[]> => {
    const statuses: number[] = [];
    for (const one of killed) if (one.name === name) statuses.push((await partner.post(one.path, one.body, one.key)).status);
    return statuses;
  };

  /** The payments of this portal, folded from the log. */
  const payments = async () =>
    (await paymentStreams(running.services.store)).flatMap(({ paymentId: id, payment: state }) =>
      isVisible(state) && state.terms.portalId === portalId ? [{ id, state }] : [],
    );

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
    const seen = new Set<string>();
    await eventually(
      async () => {
        const ends = await Promise.all(ids.map((id) => recovery.resolve(id)));
        ends.forEach((end) => seen.add(end));
        const left = ends.filter((end) => end !== 'resolved').length;
        if (left > waiting) throw new Error(`${left} payments are open`);
        return true;
      },
      { timeoutMs: 60_000 },
    );
    // At no time did a person have to decide.
    expect([...seen]).not.toContain('staff');
  };

  test.each(FLOWS)(
    '$name: killed before its first call, and after each call',
    async ({ name, request, calls: expected, waiting }) => {
      const crashes: readonly [number, Moment][] = [[1, 'before'], ...Array.from({ length: 20 }, (_, at): [number, Moment] => [at + 1, 'after'])];
      let ended: number | null = null;
      let kills = 0;
      for (const [call, moment] of crashes) {
        const asked = { ...(await request()), name, key: newKey(name.replaceAll(' ', '-')) };
        ended = await killedAt(call, moment, asked);
        if (ended !== null) break;
        killed.push(asked);
        kills += 1;
      }
      expect([ended, kills]).toEqual([200, expected + 1]);

      await endLeases(running.services);
      const statuses = await retry(name);
      // A create that was cut is never sent again.
      if (name === 'create') expect(statuses.filter((status) => status === 200)).toEqual([]);
      // Also while a payment waits, nothing of its payer is kept. A charge that the processor does not show yet is taken back by a later round.
      const isSpared = async ({ state }: { state: VisiblePayment }) => state.phase === 'charged' || (await heldFor(state)) === 0;
      await eventually(
        async () => {
          await recover(waiting);
          return (await Promise.all((await payments()).map(isSpared))).every(Boolean);
        },
        { timeoutMs: 60_000 },
      );
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
    expect(await netOf(null)).toBe(sum);
  }, 180_000);
});

describe('no place that keeps data', () => {
  const SECRETS = { key: 'key-of-one-0001', secretKey: 'sk_test_double_one_0001', card: CARD.replaceAll(' ', ''), groups: CARD };
  const writeAheadLog = async (): Promise<readonly Sink[]> => {
    const { rows } = await running.services.pool.query<{ name: string }>(
      'select name from pg_ls_waldir() where name between $1 and pg_walfile_name(pg_current_wal_lsn()) order by name',
      [firstWal],
    );
    const segments: Sink[] = [];
    for (const { name } of rows) {
      const { rows: read } = await running.services.pool.query<{ bytes: Buffer }>(`select pg_read_binary_file('pg_wal/' || $1) as bytes`, [name]);
      segments.push({ name: 'write-ahead log', bytes: read[0]!.bytes });
    }
    return segments;
  };

  test('holds a card or a key of a processor: tables, write-ahead log, logs of all processes', async () => {
    const found = async () => {
      const lines = { name: 'log lines', bytes: Buffer.from([...running.log, ...written].join('\n')) };
      return new Set(search(SECRETS, [...(await tablesOf(running.services.pool)), ...(await writeAheadLog()), lines]));
    };
    expect(written.join('').length).toBeGreaterThan(1_000);
    expect((await tablesOf(running.services.pool)).reduce((sum, { bytes }) => sum + bytes.length, 0)).toBeGreaterThan(100_000);
    expect(await found()).toEqual(new Set());
    written.push(`{"msg":"planted","key":"${SECRETS.secretKey}"}`);
    await running.services.pool.query('create table public.leak as select encode($1::bytea, $2) as value', [
      Buffer.from(`x${SECRETS.key}`),
      'base64',
    ]);
    expect(await found()).toEqual(new Set(['key in table public.leak', 'key in write-ahead log', 'secretKey in log lines']));
  });
});

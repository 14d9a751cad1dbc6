/**
 * Measures payments through the adapters of Authorize.Net and Stripe, against the doubles of both. `npm run bench -- processors [--only PART]
 * [--rate N] [--seconds N] [--unknown N] [--unsettled N] [--lines N] [--paid N]`. The parts:
 *
 * - `adapters`: each adapter alone against a bare server that repeats a recorded answer. Prints calls a second, and their ratio to the simulator's.
 * - `service`: creates at `--rate` through the whole service (Stripe: 40 % of it), with 50 ms a call, beside the simulator with the same total delay.
 * - `unknown`: all answers of charges at Authorize.Net are lost, and many transactions are unsettled. Measures the time and the list requests until
 *   every charge has an outcome.
 * - `import`: two batches from each processor. One holds the lines of `--paid` payments. No payment has the `--lines` lines of the other, so each becomes
 *   an exception, which is the dearest case.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { createAuthorizeNetGateway, createSimulatorGateway, createStripeGateway, Secret } from '#gateways';
import { systemClock, timestamp } from '#kernel';
import type { GatewayAccount, PaymentGateway, PaymentInstrument } from '#payments';
import { crockford } from '#platform';
import { caughtUp } from './history.js';
import { type LoadResult, openLoop, percentile } from './load.js';
import { operate } from './operate.js';
import { printSettings, refuseWithoutFsync } from './pgbench.js';
import { type BenchService, createRequest, processorMs, PARTS, rssMib, serviceMs, startService } from './service.js';

const PROCESSOR_MS = 50;
const CONNECTIONS = 128;
const WARM_UP_SECONDS = 5;
const ROUNDS = 16;
const ROUND_SECONDS = 1;
const IN_FLIGHT = 32;
const STRIPE_SHARE = 0.4;
const POLL_MS = 1_000;
const GATES = {
  ratio: 0.7,
  latencyMs: 50,
  unknownSeconds: 300,
  lists: 300,
  mib: 300,
  linesPerSecond: { 'authorize-net': 2_000, stripe: 400 },
} as const;

type Vendor = 'authorize-net' | 'stripe';
const CREDENTIALS = {
  'authorize-net': { apiLoginId: 'login-one', transactionKey: 'key-of-one-0001' },
  stripe: { secretKey: 'sk_test_double_one_0001' },
} as const;
const CUT_OFF = ['--cut-off', '16:00', '--time-zone', 'America/Los_Angeles'];
const API_PATH: Readonly<Record<Vendor, string>> = { 'authorize-net': '/xml/v1/request.api', stripe: '' };

const { values } = parseArgs({
  options: {
    only: { type: 'string' },
    rate: { type: 'string', default: '250' },
    seconds: { type: 'string', default: '30' },
    unknown: { type: 'string', default: '1000' },
    unsettled: { type: 'string', default: '50000' },
    lines: { type: 'string', default: '200000' },
    paid: { type: 'string', default: '5000' },
  },
});
const rate = Number(values.rate);
const seconds = Number(values.seconds);
const unknown = Number(values.unknown);
const unsettled = Number(values.unsettled);
const lines = Number(values.lines);
const paid = Number(values.paid);

/** As the service makes references: 20 characters of Crockford's base 32. */
const newRef = (): string => crockford(randomBytes(13), 20);

const children: ChildProcess[] = [];
/** Starts a script that prints a line of JSON with its `url`. */
const start = async (script: string, ...args: string[]): Promise<string> => {
  const child = spawn(process.execPath, [fileURLToPath(new URL(script, import.meta.url)), ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
  children.push(child);
  const line = await new Promise<string>((resolve, reject) => {
    child.once('exit', (code) => reject(new Error(`${script} ended with ${code}`)));
    child.stdout.once('data', (bytes: Buffer) => resolve(String(bytes)));
  });
  return (JSON.parse(line) as { url: string }).url;
};
const startDouble = (vendor: Vendor, service: BenchService, name: string, delayMs = 0) =>
  start(`../test/doubles/${vendor}/main.js`, '--file', join(service.dataDir, `${name}.jsonl`), '--delay-ms', String(delayMs));

const control = async <T>(url: string, method: string, path: string, body?: object): Promise<T> => {
  const answer = await fetch(`${url}/_double${path}`, { method, ...(body && { body: JSON.stringify(body) }) });
  if (!answer.ok) throw new Error(`${method} ${path}: ${await answer.text()}`);
  return (await answer.json()) as T;
};

const payfold = async (service: BenchService, ...args: string[]) => {
  const done = await operate(service, ...args);
  if (done.exitCode !== 0) throw new Error(`payfold ${args.join(' ')}: ${done.stderr || done.stdout}`);
  return done;
};

const createPortal = async (service: BenchService, name: string, chargeMode: ChargeMode, ...gateway: string[]): Promise<string> => {
  const { rows } = await service.pool.query<{ account_id: string }>('select account_id from directory_account');
  const fee = ['--fee-flat-cents', '50', '--charge-mode', chargeMode];
  const { stdout } = await payfold(service, 'portals', 'create', '--account', rows[0]!.account_id, '--name', name, ...fee, ...gateway);
  return (JSON.parse(stdout) as { portalId: string }).portalId;
};

type ChargeMode = 'combined' | 'separate';
/** As partners use the processors. */
const CHARGE_MODES: Readonly<Record<Vendor, ChargeMode>> = { 'authorize-net': 'separate', stripe: 'combined' };

/** Enters a merchant account, and makes a portal of it with a fee of 50 cents. `separate`: the fee is a leg of its own. */
const portalAt = async (
  service: BenchService,
  vendor: Vendor,
  url: string,
  merchantAccount: string,
  chargeMode = CHARGE_MODES[vendor],
): Promise<string> => {
  const file = join(service.dataDir, `${merchantAccount}.json`);
  writeFileSync(file, JSON.stringify(CREDENTIALS[vendor]), { mode: 0o600 });
  const cutOff = vendor === 'authorize-net' ? CUT_OFF : [];
  await payfold(service, 'merchant-accounts', 'add', merchantAccount, '--gateway', vendor, '--environment', 'sandbox', '--credentials-file', file, '--endpoint', url + API_PATH[vendor], ...cutOff); // prettier-ignore
  return createPortal(service, merchantAccount, chargeMode, '--gateway', vendor, '--principal', merchantAccount);
};

const loadOf = (service: BenchService, run: string) => ({
  host: service.url.hostname,
  port: Number(service.url.port),
  connections: CONNECTIONS,
  request: createRequest(service, run),
});
const told = ({ perSecond, latencies, statuses }: LoadResult) =>
  `${perSecond.toFixed(0)}/s, p50 ${percentile(latencies, 0.5).toFixed(0)} ms, p99 ${percentile(latencies, 0.99).toFixed(0)} ms, answers ${[...statuses].map(([status, count]) => `${status}: ${count}`).join(', ')}`;
const fail = (line: string) => {
  console.log(`GATE: ${line}`);
  process.exitCode = 1;
};

/** The ratio and its 95 % interval: mean of logarithms, Student's t with 15 degrees of freedom. */
const intervalOf = (ratios: readonly number[]): { text: string; most: number } => {
  const logs = ratios.map(Math.log);
  const mean = logs.reduce((sum, one) => sum + one, 0) / logs.length;
  const spread = Math.sqrt(logs.reduce((sum, one) => sum + (one - mean) ** 2, 0) / (logs.length - 1) / logs.length);
  const [least, most] = [Math.exp(mean - 2.13 * spread), Math.exp(mean + 2.13 * spread)];
  return { text: `${Math.exp(mean).toFixed(3)} [${least.toFixed(3)}, ${most.toFixed(3)}]`, most };
};

const adapters = async (service: BenchService): Promise<void> => {
  const [net, stripe] = [await startDouble('authorize-net', service, 'net'), await startDouble('stripe', service, 'stripe')];
  const echo = (target: string) => start('./echo.js', target);
  const accountOf = (gateway: string): GatewayAccount => ({ gateway, merchantAccount: 'bench', credentialsRef: 'bench', environment: 'sandbox' });
  const card: PaymentInstrument = { type: 'card', number: new Secret('4111111111111111'), expiry: { month: 12, year: 2040 }, cvv: new Secret('900') };
  const token: PaymentInstrument = { type: 'card_token', token: new Secret('pm_card_visa') };
  const made = (gateway: string, endpoint: string) => ({ endpoint, account: accountOf(gateway), clock: systemClock });
  const simulated = made('simulator', await echo(service.simulatorUrl.origin));
  const all: readonly { name: string; calls: number; gateway: PaymentGateway; instrument: PaymentInstrument }[] = [
    { name: 'simulator', calls: 1, gateway: createSimulatorGateway(simulated), instrument: card },
    { name: 'authorize-net', calls: 1, gateway: createAuthorizeNetGateway({ ...made('authorize-net', `${await echo(net)}${API_PATH['authorize-net']}`), credentials: CREDENTIALS['authorize-net'], cutOff: { time: '16:00', timeZone: 'America/Los_Angeles' } }), instrument: card }, // prettier-ignore
    { name: 'stripe', calls: 2, gateway: createStripeGateway({ ...made('stripe', await echo(stripe)), credentials: CREDENTIALS.stripe }), instrument: token }, // prettier-ignore
  ];
  const charge = async ({ name, gateway, instrument }: (typeof all)[number]) => {
    const call = { ref: newRef(), account: accountOf(name), leg: 'combined', begunAt: timestamp(systemClock.now()), amountCents: 1_250, instrument } as const; // prettier-ignore
    const outcome = await gateway.charge(call, AbortSignal.timeout(10_000));
    if (outcome.kind !== 'approved') throw new Error(`${name}: ${JSON.stringify(outcome)}`);
  };
  const rateOf = async (one: (typeof all)[number]): Promise<number> => {
    const end = performance.now() + ROUND_SECONDS * 1_000;
    const started = performance.now();
    let count = 0;
    const run = async () => {
      for (; performance.now() < end; count++) await charge(one);
    };
    await Promise.all(Array.from({ length: IN_FLIGHT }, run));
    return (count * one.calls) / ((performance.now() - started) / 1_000);
  };
  for (const one of all) {
    await charge(one);
    await rateOf(one);
  }
  const [yardstick, ...measured] = all;
  for (const one of measured) {
    const [rates, yard]: [number[], number[]] = [[], []];
    // ABBA, so that a machine that gets slower harms both alike.
    for (let round = 0; round < ROUNDS; round++) {
      const order = round % 2 === 0 ? [one, yardstick!] : [yardstick!, one];
      for (const next of order) (next === one ? rates : yard).push(await rateOf(next));
    }
    const median = (numbers: readonly number[]) => [...numbers].sort((a, b) => a - b)[numbers.length >> 1]!;
    const interval = intervalOf(rates.map((own, round) => own / yard[round]!));
    console.log(`adapter ${one.name}: ${median(rates).toFixed(0)} calls/s, simulator ${median(yard).toFixed(0)}; ratio ${interval.text}; gate ${GATES.ratio}`); // prettier-ignore
    if (interval.most < GATES.ratio) fail(`adapter ${one.name}`);
  }
  for (const { gateway } of all) gateway.close();
};

const measured = async (service: BenchService, load: ReturnType<typeof loadOf>, perSecond: number) => {
  await caughtUp(service);
  const before = processorMs(service);
  const result = await openLoop(load, perSecond, seconds);
  const after = processorMs(service);
  const spent = PARTS.filter((part) => part !== 'load' && part !== 'processor').reduce((sum, part) => sum + after[part] - before[part], 0);
  return { result, cpu: spent / result.answered };
};

/** Runs the simulator beside each processor, with the same total delay, in the order ABBA. */
const wholeService = async (service: BenchService): Promise<void> => {
  for (const vendor of ['authorize-net', 'stripe'] as const) {
    const perSecond = vendor === 'stripe' ? rate * STRIPE_SHARE : rate;
    const calls = vendor === 'stripe' ? 1 : 2;
    const url = await startDouble(vendor, service, `${vendor}-slow`, PROCESSOR_MS);
    const portalId = await portalAt(service, vendor, url, `${vendor}-slow`);
    await service.bank.clearFaults();
    // Stripe's adapter makes two calls for its one leg; the simulated leg takes as long as both.
    await service.bank.arm({ match: { call: 'charge' }, times: null, delayAfterMs: vendor === 'stripe' ? 2 * PROCESSOR_MS : PROCESSOR_MS });
    const simulated = vendor === 'stripe' ? await createPortal(service, 'combined', 'combined') : service.portalId;
    const of = (portal: string, run: string, isVendor: boolean) =>
      isVendor && vendor === 'stripe' ? tokenLoad({ ...service, portalId: portal }, run) : loadOf({ ...service, portalId: portal }, run);
    for (const [portal, isVendor] of [[simulated, false], [portalId, true]] as const) await openLoop(of(portal, `warm-${vendor}-${isVendor}`, isVendor), perSecond / 2, WARM_UP_SECONDS); // prettier-ignore
    const p99s: { own: number[]; yard: number[] } = { own: [], yard: [] };
    for (const [round, isVendor] of [false, true, true, false].entries()) {
      const portal = isVendor ? portalId : simulated;
      const { result, cpu } = await measured(service, of(portal, `${vendor}-${round}`, isVendor), perSecond);
      const name = isVendor ? vendor : 'simulator';
      console.log(`${name}, ${calls} leg(s), at ${perSecond}/s: ${told(result)}; ${cpu.toFixed(2)} ms of processors a create`);
      p99s[isVendor ? 'own' : 'yard'].push(percentile(result.latencies, 0.99));
      if ((result.statuses.get(200) ?? 0) < result.answered) fail(`${name}: not every create was answered 200`);
    }
    const mean = ([first, second]: readonly number[]) => (first! + second!) / 2;
    const more = mean(p99s.own) - mean(p99s.yard);
    console.log(`${vendor}: p99 ${more.toFixed(0)} ms above the simulator; gate ${GATES.latencyMs}`);
    if (more > GATES.latencyMs) fail(`${vendor}: p99`);
  }
  await service.bank.clearFaults();
};

const tokenLoad = (service: BenchService, run: string) => {
  const load = loadOf(service, run);
  const card = '"paymentMethod":{"type":"card","cardNumber":"4242 4242 4242 4242","expirationDate":"12/30","cvv":"123"}';
  const token = '"paymentMethod":{"type":"card_token","token":"pm_card_visa"}';
  return {
    ...load,
    request: (number: number) => {
      const text = load.request(number);
      if (!text.includes(card)) throw new Error('the request has another payment method');
      const [head, body] = text.replace(card, token).split('\r\n\r\n') as [string, string];
      return `${head.replace(/content-length: \d+/, `content-length: ${Buffer.byteLength(body)}`)}\r\n\r\n${body}`;
    },
  };
};

/** All answers of charges are cut off. Then the processor answers again. */
const unknownOutcomes = async (service: BenchService): Promise<void> => {
  const url = await startDouble('authorize-net', service, 'unknown');
  // With two legs, the fee would never be sent, and only the batch shows that it was not.
  const portalId = await portalAt(service, 'authorize-net', url, 'unknown', 'combined');
  await control(url, 'POST', '/seed', { count: unsettled, amountCents: 700, label: 'U', settled: false });
  await control(url, 'POST', '/faults', { name: 'cut_after', op: 'charge', times: null });
  const lists = async () => {
    const { calls } = await control<{ calls: Readonly<Record<string, number>> }>(url, 'GET', '');
    return (calls.unsettled ?? 0) + (calls.batches ?? 0) + (calls.batch ?? 0);
  };
  const before = await lists();
  const lost = await openLoop(loadOf({ ...service, portalId }, 'lost'), 50, unknown / 50);
  const started = performance.now();
  await control(url, 'DELETE', '/faults');
  const ended = async () =>
    Number(
      (
        await service.pool.query<{ count: string }>(
          `select count(distinct stream_id) from es.events e where stream_id like 'payment-%' and type in ('PaymentVoided', 'PaymentFailed', 'PaymentDeclined', 'PaymentResolved')
           and exists (select from es.events i where i.stream_id = e.stream_id and i.type = 'PaymentInitiated' and i.data::jsonb ->> 'portalId' = $1)`,
          [portalId],
        )
      ).rows[0]!.count,
    );
  let done = await ended();
  console.log(`${unknown} creates whose answers were cut off: ${told(lost)}; ${done} have ended`);
  for (; done < unknown && performance.now() - started < 2 * GATES.unknownSeconds * 1_000; done = await ended()) await sleep(POLL_MS);
  const took = (performance.now() - started) / 1_000;
  const asked = (await lists()) - before;
  console.log(`${done} of ${unknown} ended in ${took.toFixed(0)} s with ${asked} list requests among ${unsettled} unsettled transactions; gates ${GATES.unknownSeconds} s, ${GATES.lists}`); // prettier-ignore
  if (done < unknown || took > GATES.unknownSeconds || asked > GATES.lists) fail('unknown charges');
};

/** Rate of the creates that fill the first batch, each second. */
const PAID_RATE = 60;

const importOfBatch = async (service: BenchService): Promise<void> => {
  for (const vendor of ['authorize-net', 'stripe'] as const) {
    const url = await startDouble(vendor, service, `${vendor}-batch`);
    const account = `${vendor}-batch`;
    const portalId = await portalAt(service, vendor, url, account, 'combined');
    const load = vendor === 'stripe' ? tokenLoad({ ...service, portalId }, account) : loadOf({ ...service, portalId }, account);
    // Only accounts with a charge are asked for their batches.
    const { statuses, answered } = await openLoop(load, PAID_RATE, paid / PAID_RATE);
    const charges = statuses.get(200) ?? 0;
    if (charges < answered) fail(`${vendor}: not every create was answered 200`);
    await caughtUp(service);
    const sync = () => payfold(service, 'settlement', 'sync', '--merchant-account', account);
    const idle = await sync();
    const measure = async (name: string, count: number) => {
      const [cpu, workerMib] = [serviceMs(service), await rssMib(service.pids.worker)];
      const { seconds: whole, peakMib, cpuMs, stdout } = await sync();
      // Without the start of the command.
      const took = whole - idle.seconds;
      await caughtUp(service);
      const spent = [cpuMs - idle.cpuMs, serviceMs(service) - cpu].map((ms) => (ms / count).toFixed(2));
      const perSecond = count / took;
      const { batches } = JSON.parse(stdout) as { batches: readonly unknown[] };
      console.log(`${vendor}: ${count} lines ${name} in ${took.toFixed(1)} s, ${perSecond.toFixed(0)} lines/s (gate ${GATES.linesPerSecond[vendor]}), ${spent[0]} ms of processors a line in the command and ${spent[1]} in the service; memory ${(peakMib - idle.peakMib).toFixed(0)} MiB above idle (gate ${GATES.mib}), worker ${((await rssMib(service.pids.worker)) - workerMib).toFixed(0)} MiB; batches ${batches.length}`); // prettier-ignore
      if (perSecond < GATES.linesPerSecond[vendor] || peakMib - idle.peakMib > GATES.mib || batches.length !== 1)
        fail(`${vendor}: import of lines ${name}`);
    };
    await control(url, 'POST', vendor === 'stripe' ? '/payouts' : '/batch', {});
    await measure('with a payment', charges);
    await control(url, 'POST', '/seed', { count: lines, amountCents: 1_000, label: 'M', settled: true });
    await measure('without a payment', lines);
  }
};

const PARTS_OF_THIS = { adapters, service: wholeService, unknown: unknownOutcomes, import: importOfBatch };
if (values.only !== undefined && !(values.only in PARTS_OF_THIS)) throw new Error(`--only: ${Object.keys(PARTS_OF_THIS).join(', ')}`);
const service = await startService();
try {
  await refuseWithoutFsync(service.pool);
  await printSettings(service.pool);
  for (const [name, part] of Object.entries(PARTS_OF_THIS)) if (values.only === undefined || values.only === name) await part(service);
} finally {
  for (const child of children) {
    child.removeAllListeners('exit');
    child.kill();
  }
  await service.stop();
}

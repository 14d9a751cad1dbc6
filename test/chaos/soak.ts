/**
 * The soak: partners pay at an even rate for a long time, while finance settles, exports and verifies, and while processes of `npm start` are killed
 * and restarted with commands in between. In the end all money must be exact. No start may be refused, no alarm may fire without a cause, and a
 * request in the last quarter may cost little more than in the second.
 */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { headFiles } from '#audit';
import { freePort } from '#platform';
import { recordSettlements } from '#settlement';
import { Random } from '../../apps/demo/city.js';
import type { Services } from '../../apps/services.js';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { percentile } from '../../bench/load.js';
import { PARTS, pidsOf, processorMs } from '../../bench/service.js';
import { Alerts, readRules } from '../support/alerts.js';
import { DataDir, type Ended, kill, launch, type RunningProcess, runtimeOf, start, welcomeOf } from '../support/processes.js';
import { CARD, PARTNER } from '../support/service.js';
import { endLeases, openStores, recoverAll, waitingForStaff } from '../support/truth.js';
import { bringToEnd, judge } from './judge.js';
import { type Charge, Partners, type Return } from './partners.js';

const OPERATOR = fileURLToPath(new URL('../../apps/operator/main.js', import.meta.url));
const PATIENCE_MS = 8_000;
/** Tries of a request before it is put aside. It goes on when the service is calm. */
const TRIES = 3;
/** Of each charge: reads, lists and returns beside it. */
const BESIDE = { read: 0.25, list: 0.05, return: 0.1 } as const;
const DECLINED_SHARE = 0.03;
/** Fees that are declined take their principal back. */
const FEE_DECLINED_SHARE = 0.01;
const SCRAPE_EVERY_MS = 5_000;
const CPU_EVERY_MS = 1_000;
const DELAY_EVERY_MS = 100;
/** After a fault, costs and error lines count as those of the fault for this long after the service is ready again. */
const CALM_AFTER_MS = 15_000;
const PAUSE_MS = { least: 4_000, most: 12_000 } as const;
/** Violations that are printed while the run goes on. All are counted at the end. */
const SHOWN_AT_ONCE = 5;
const COMMAND_MS = 10 * 60_000;
/** How many of the newest charges are sent again at the end. */
const ASKED_AGAIN = 500;
/** Pause before a request without an outcome is sent again. Without it, requests whose payments wait for staff would double the load. */
const AGAIN_EVERY_MS = 30_000;
/** A payment may still be under way this long after it began. */
const UNDER_WAY_MS = 10_000;
/** A run of this length must have flat costs. */
const FLAT_FROM_MINUTES = 20;
/** The last quarter is compared with this one, the second. In the first quarter the store is empty, and staff have little to do. */
const BASE_QUARTER = 1;
/** With fewer answers in either quarter, a percentile is printed and not judged. */
const LEAST_ANSWERS = { p50: 100, p99: 500 } as const;
/** The same for the mean of a command. */
const LEAST_RUNS = 5;
const FLAT = { p50: 1.2, p99: 1.5, cpu: 1.2, command: 1.5 } as const;
/** A difference below this is noise. */
const NOISE_MS = 2;
/** Alarms that the faults of this run cause. They are true. */
const CAUSED: Readonly<Record<string, string>> = { PayfoldChildRestarts: 'child' };
const QUARTERS = 4;
const STAFF_NEEDED = 'a payment needs a decision by staff';

export interface SoakOptions {
  readonly minutes: number;
  /** Charges per second. */
  readonly rate: number;
  readonly onProgress: (line: string) => void;
}

export interface SoakReport {
  readonly violations: readonly string[];
  readonly [figure: string]: unknown;
}

/** The service as `npm start` runs it, and its restarts. */
class Kept {
  process: RunningProcess | null = null;
  /** Since when nothing disturbs the service. Infinity: it is being restarted. */
  private calmSince = 0;
  /** When processes were killed that may have been at work on payments, in milliseconds of the epoch. */
  readonly interruptions: number[] = [];
  /** Each error line that asks staff for a decision: the payment and the reason. */
  readonly askedStaff: string[] = [];
  readonly readySeconds: number[] = [];
  readonly violations: string[] = [];
  readonly errors = { calm: new Map<string, number>(), faults: new Map<string, number>() };
  private read = 0;

  constructor(
    readonly dataDir: DataDir,
    private readonly env: Readonly<Record<string, string>>,
  ) {}

  get isCalm(): boolean {
    return performance.now() - this.calmSince > CALM_AFTER_MS;
  }

  /** `interrupts`: processes that may be at work on payments are about to be killed. */
  disturbed(interrupts: boolean): void {
    this.collectErrors();
    this.calmSince = Number.POSITIVE_INFINITY;
    if (interrupts) this.interruptions.push(Date.now());
  }

  private settled(): void {
    this.calmSince = performance.now();
  }

  async start(): Promise<void> {
    const begun = performance.now();
    try {
      const started = await start('standalone', this.dataDir, this.env);
      this.collectErrors();
      [this.process, this.read] = [started, 0];
      this.readySeconds.push((performance.now() - begun) / 1_000);
    } catch (error) {
      this.violations.push(`a start was refused: ${(error as Error).message.slice(0, 2_000)}`);
      throw error;
    }
    this.settled();
  }

  /** Kills a role. The supervisor starts it again. Resolves when the service is ready again. */
  async killRole(role: 'api' | 'worker', readyUrl: string): Promise<void> {
    this.disturbed(role === 'api');
    const pid = this.process!.children().find(({ args }) => args.includes(`/${role}/main.js`))?.pid;
    if (pid === undefined) throw new Error(`there is no ${role}`);
    kill(pid);
    const isBack = () => this.process!.children().some((one) => one.args.includes(`/${role}/main.js`) && one.pid !== pid);
    while (!(isBack() && (await fetch(readyUrl).catch(() => null))?.ok)) await sleep(100);
    this.settled();
  }

  /** Counts the error lines since the last call. */
  collectErrors(): void {
    const lines = (this.process?.stderr() ?? '').split('\n').slice(0, -1);
    const into = this.isCalm ? this.errors.calm : this.errors.faults;
    for (const line of lines.slice(this.read)) {
      if (!line.startsWith('{')) continue;
      const {
        level,
        msg,
        loop,
        line: postgres,
        paymentId,
        reason,
      } = JSON.parse(line) as Record<'msg' | 'loop' | 'line' | 'paymentId' | 'reason', string | undefined> & { readonly level: number };
      if (level < 50) continue;
      if (msg === STAFF_NEEDED) {
        this.askedStaff.push(`${paymentId} ${reason}`);
        continue;
      }
      const name = [msg, loop, postgres?.slice(0, 200)].filter(Boolean).join(': ');
      into.set(name, (into.get(name) ?? 0) + 1);
    }
    this.read = lines.length;
  }
}

interface Commanded {
  /** Of each run during which no fault was played, by quarter. */
  readonly seconds: number[][];
  runs: number;
  /** Ended with an error because the service below it was stopped. */
  cutOff: number;
  slowestSeconds: number;
}

/** The parts of the service whose processor time is measured. */
const SERVED = PARTS.filter((part) => part !== 'load');
type Served = (typeof SERVED)[number];

/** Costs of a quarter of the run, in calm times only. A command of staff uses the same processors. So requests beside one are counted apart. */
interface Quarter {
  readonly latencies: Map<string, number[]>;
  /** Processor time while no command runs, and the answers in the same time. */
  readonly alone: { readonly cpuMs: Map<Served, number>; answers: number };
}

export const runSoak = async (random: Random, { minutes, rate, onProgress }: SoakOptions): Promise<SoakReport> => {
  const dataDir = await DataDir.create();
  const [port, metrics, audit, simulator] = [await freePort(), await freePort(), await freePort(), await freePort()].map(String) as [string, string, string, string]; // prettier-ignore
  const env = { PORT: port, METRICS_PORT: metrics, AUDIT_PORT: audit, SIMULATOR_PORT: simulator, LOG_LEVEL: 'warn' };
  const service = new Kept(dataDir, env);
  const url = `http://127.0.0.1:${port}`;
  const violations: string[] = [];
  const commands = new Map<string, Commanded>();
  const faults: Record<string, number> = {};
  let stores: Services | null = null;
  let partners: Partners | null = null;
  const stop = new AbortController();
  try {
    await service.start();
    const { apiKey, portalId } = welcomeOf(service.process!.stdout())!;
    // Two entrances to one API: some requests are sent twice at once.
    partners = new Partners([`${url}${PARTNER}`, `${url}${PARTNER}`], apiKey, portalId, 'soak', PATIENCE_MS);
    const begun = performance.now();
    const lasts = minutes * 60_000;
    const quarters: Quarter[] = Array.from({ length: QUARTERS }, () => ({ latencies: new Map(), alone: { cpuMs: new Map(), answers: 0 } }));
    const quarterNow = () => Math.min(QUARTERS - 1, Math.floor(((performance.now() - begun) / lasts) * QUARTERS));
    const quarter = () => quarters[quarterNow()]!;
    let [commandsRunning, commandEnded, answers] = [0, 0, 0];
    const measured = (kind: string, ms: number): void => {
      if (!service.isCalm) return;
      const { latencies } = quarter();
      const isAlone = commandsRunning === 0 && commandEnded < performance.now() - ms;
      const name = isAlone ? kind : `${kind} beside a command`;
      if (!latencies.has(name)) latencies.set(name, []);
      latencies.get(name)!.push(ms);
    };
    partners.onAnswered = (kind, ms) => {
      answers += 1;
      measured(kind, ms);
    };
    const alerts = new Alerts(readRules());
    const watching = [
      measureLoad((ms) => measured(LOAD, ms), stop.signal),
      watchAlerts(alerts, `http://127.0.0.1:${metrics}/metrics`, begun, stop.signal, service),
      measureProcessors(
        service,
        () => (commandsRunning === 0 ? answers : null),
        (ms, count) => {
          const { alone } = quarter();
          for (const part of SERVED) alone.cpuMs.set(part, (alone.cpuMs.get(part) ?? 0) + ms(part));
          alone.answers += count;
        },
        stop.signal,
      ),
    ];
    const paying = pay(partners, rate, random, service, stop.signal);
    const payfold = (args: readonly string[]): Promise<Ended> => {
      const running = launch(['--enable-source-maps', OPERATOR, '--json', '--yes', ...args], dataDir, { LOG_LEVEL: 'error' });
      const timer = setTimeout(() => kill(running.pid), COMMAND_MS);
      return running.exited.finally(() => clearTimeout(timer));
    };
    const command = async (during: 'calm' | 'down' | 'stopping', ...args: readonly string[]): Promise<Ended> => {
      const name = args.filter((word) => !/[/\d]/.test(word)).join(' ');
      const started = performance.now();
      commandsRunning += 1;
      const ended = await payfold(args).finally(() => (commandsRunning -= 1));
      commandEnded = performance.now();
      const seconds = (commandEnded - started) / 1_000;
      const one = commands.get(name) ?? { seconds: quarters.map(() => []), runs: 0, cutOff: 0, slowestSeconds: 0 };
      commands.set(name, one);
      one.runs += 1;
      one.slowestSeconds = Math.max(one.slowestSeconds, seconds);
      if (during === 'calm' && !stop.signal.aborted) one.seconds[quarterNow()]!.push(seconds);
      const isVerdict = ended.stdout.includes('"ok":false');
      if (ended.code !== 0 && during === 'stopping' && !isVerdict) one.cutOff += 1;
      else if (ended.code !== 0)
        violations.push(
          `payfold ${args.join(' ')} (${during}) ended with ${ended.code ?? ended.signal}: ${(ended.stderr || ended.stdout).slice(-1_000)}`,
        );
      return ended;
    };
    /** Verifies what came after the newest head of the last call. */
    const trusted = join(dataDir.path, 'trusted.head');
    const verify = async (during: 'calm' | 'down' | 'stopping'): Promise<void> => {
      const newest = headFiles(join(dataDir.data, 'heads')).at(-1);
      const next = newest === undefined ? null : readFileSync(newest);
      await command(during, 'audit', 'verify', ...(existsSync(trusted) ? ['--from-head', trusted] : []));
      if (next) writeFileSync(trusted, next);
    };
    const exported = async (): Promise<void> => {
      const from = new Date(Date.now() - 60_000).toISOString();
      for (const report of ['transactions', 'payable'])
        await command('calm', 'audit', 'export', report, '--from', from, '--to', new Date().toISOString());
    };
    /** What staff do while the service is down or about to stop. */
    const meanwhile = random.int(0, 2);
    const byStaff = (number: number, during: 'down' | 'stopping'): Promise<unknown> =>
      [
        () => command(during, 'settlement', 'close'),
        () => verify(during),
        () => command(during, 'payments', 'tasks'),
        () => command(during, 'settlement', 'exceptions'),
      ][(number + meanwhile) % 4]!();
    const restart = async (how: 'kill -9 of the tree' | 'SIGTERM', number: number): Promise<void> => {
      service.disturbed(how === 'kill -9 of the tree');
      faults[how] = (faults[how] ?? 0) + 1;
      const old = service.process!;
      if (how === 'SIGTERM') {
        old.signal('SIGTERM');
        const early = byStaff(number, 'stopping');
        const { code, signal } = await old.exited;
        if (code !== 0) violations.push(`SIGTERM ended the service with ${code ?? signal}`);
        await Promise.all([early, service.start()]);
      } else {
        await old.killTree();
        const late = byStaff(number, 'down');
        await sleep(random.int(0, 3_000));
        await Promise.all([late, service.start()]);
      }
    };
    const killed = async (role: 'api' | 'worker') => {
      faults[`kill -9 of the ${role}`] = (faults[`kill -9 of the ${role}`] ?? 0) + 1;
      await service.killRole(role, `${url}/readyz`);
    };
    const deeds: readonly ((round: number) => Promise<unknown>)[] = [
      () => command('calm', 'settlement', 'close'),
      () => killed('worker'),
      () => verify('calm'),
      (round) => restart('kill -9 of the tree', 2 * round),
      exported,
      () => killed('api'),
      () => command('calm', 'settlement', 'exceptions'),
      (round) => restart('SIGTERM', 2 * round + 1),
    ];
    const shown = { own: 0, partners: 0 };
    for (let deed = 0; performance.now() - begun < lasts; deed++) {
      const round = Math.floor(deed / deeds.length);
      await deeds[deed % deeds.length]!(round);
      service.collectErrors();
      const { charges, figures } = partners;
      if (deed % deeds.length === deeds.length - 1)
        onProgress(`${((performance.now() - begun) / 60_000).toFixed(1)} min, round ${round + 1}: ${charges.length} charges, ${figures.answers} answers, ${violations.length + partners.violations.length} violations`); // prettier-ignore
      const found = [...violations.slice(shown.own), ...partners.violations.slice(shown.partners)];
      for (const one of found.slice(0, SHOWN_AT_ONCE)) onProgress(`✗ ${one.slice(0, 500)}`);
      Object.assign(shown, { own: violations.length, partners: partners.violations.length });
      await sleep(Math.max(0, Math.min(random.int(PAUSE_MS.least, PAUSE_MS.most), lasts - (performance.now() - begun))));
    }
    stop.abort();
    await paying;
    // The comparison sends requests of its own, at another rate.
    partners.onAnswered = () => undefined;
    await Promise.all(watching);
    service.collectErrors();
    const calmErrors = [...service.errors.calm].map(([text, count]) => `an error line without a cause, ${count} times: ${text}`);

    onProgress('the load has ended; recovery and comparison begin');
    const { databaseUrl, simulatorUrl } = runtimeOf(dataDir);
    const opened = (stores = await openStores({ databaseUrl, simulatorUrl }, join(dataDir.data, 'master.key'), dataDir.data));
    violations.push(...(await judgeStaffTasks(service, opened)));
    let decidedByStaff = 0;
    /** A batch settled some sales before their outcome was known. Staff say that the charge stands. If that is refused, its money goes back. */
    const decide = async (): Promise<void> => {
      const by = ['--by', 'Soak'];
      const waiting = await waitingForStaff(opened);
      if (waiting.length === 0) return;
      const rows = JSON.parse((await command('calm', 'settlement', 'exceptions')).stdout) as { exceptionId: string; paymentId: string | null }[];
      for (const paymentId of waiting) {
        const { code } = await payfold(['payments', 'resolve', paymentId, '--as', 'succeeded', '--evidence', 'the batch', ...by]);
        const as = code === 0 ? ['--as', 'settles'] : ['--as', 'refund', '--send'];
        for (const { exceptionId } of rows.filter((row) => row.paymentId === paymentId))
          await command('calm', 'settlement', 'exceptions', 'resolve', exceptionId, ...as, '--reason', 'decided', ...by);
        decidedByStaff += 1;
      }
    };
    const recover = async (): Promise<number> => {
      await opened.pool.query('delete from recovery_try');
      await endLeases(opened);
      const resolved = await recoverAll(opened);
      await decide();
      await recordSettlements(opened.settlement, AbortSignal.timeout(COMMAND_MS));
      return resolved;
    };
    const resolvedByRecovery = await bringToEnd({ recover }, partners, random);
    const bank = createSimulatorControl(simulatorUrl, controlKeyOf(dataDir.data));
    const verdict = await judge({ stores: opened, bank }, partners, { charges: Math.max(0, partners.charges.length - ASKED_AGAIN) });
    await command('calm', 'settlement', 'close');
    const verified = await command('calm', 'audit', 'verify', '--full');
    const drifted = await command('calm', 'audit', 'drift');
    const differences = (JSON.parse(drifted.stdout || '{}') as { differences?: unknown[] }).differences?.length;
    if (differences !== 0) violations.push(`audit drift: ${differences ?? 'no'} differences were told`);
    const alarms = [...alerts.fired].map(([alert, times]) => `${alert} at ${times.map((at) => `${(at / 1_000).toFixed(0)} s`).join(', ')}`);
    const false_ = [...alerts.fired.keys()].filter((alert) => !(alert in CAUSED && Object.keys(faults).some((fault) => /api|worker/.test(fault))));
    const costs = compareQuarters(quarters[BASE_QUARTER]!, quarters.at(-1)!, commands);
    const grown = minutes < FLAT_FROM_MINUTES ? [] : costs.filter(({ flat }) => flat === false).map(({ name }) => `the cost of ${name} has grown`);
    printTable({ costs, service, commands, faults, alarms, partners, verified: (JSON.parse(verified.stdout || '{}') as { checks?: { name: string; ok: boolean }[] }).checks ?? [], differences: differences ?? null, resolvedByRecovery, verdict }); // prettier-ignore
    return {
      minutes,
      rate,
      charges: partners.charges.length,
      returns: partners.returns.length,
      requests: partners.figures,
      payments: verdict.payments,
      chargesAtBank: verdict.chargesAtBank,
      netAtBankCents: verdict.netAtBankCents,
      askedAgain: verdict.replayed,
      resolvedByRecovery,
      decidedByStaff,
      staffLines: service.askedStaff.length,
      starts: service.readySeconds.length,
      slowestStartSeconds: Math.max(...service.readySeconds),
      faults,
      alarms,
      errorLinesInFaults: Object.fromEntries(service.errors.faults),
      costs,
      violations: [
        ...violations,
        ...service.violations,
        ...partners.violations,
        ...verdict.violations,
        ...calmErrors,
        ...false_.map((alert) => `a false alarm: ${alert}`),
        ...grown,
      ],
    };
  } finally {
    stop.abort();
    partners?.end();
    await stores?.close().catch(() => undefined);
    await service.process?.stop().catch(() => undefined);
    await dataDir.remove();
  }
};

/** Begins `rate` charges a second, and reads, lists and returns beside them. Resolves when all of them have ended or are put aside. */
const pay = async (partners: Partners, rate: number, random: Random, service: Kept, stop: AbortSignal): Promise<void> => {
  const running = new Set<Promise<unknown>>();
  const aside: { readonly one: Charge | Return; readonly from: number }[] = [];
  const begin = (work: Promise<unknown>) => {
    const one: Promise<unknown> = work.finally(() => running.delete(one));
    running.add(one);
  };
  const pursue = async (one: Charge | Return) => {
    const end = await ('operation' in one ? partners.pursueReturn(one, random, TRIES) : partners.pursueCharge(one, random, TRIES));
    if (end !== 'ended') aside.push({ one, from: performance.now() + AGAIN_EVERY_MS });
  };
  const begun = performance.now();
  for (let number = 0; !stop.aborted; number++) {
    await sleep(Math.max(0, begun + (number * 1_000) / rate - performance.now()));
    const draw = random.next();
    const card = draw < DECLINED_SHARE ? CARD.declined : draw < DECLINED_SHARE + FEE_DECLINED_SHARE ? CARD.feeDeclined : CARD.approved;
    begin(pursue(partners.beginCharge(random, card)));
    const known = partners.idlePayment(random);
    if (known && random.next() < BESIDE.read) begin(partners.read(known, random));
    if (random.next() < BESIDE.list) begin(partners.list(random));
    const paid = partners.idlePayment(random);
    if (paid && random.next() < BESIDE.return) begin(pursue(partners.beginReturn(paid, random)));
    const [next] = aside;
    if (next && service.isCalm && next.from <= performance.now()) {
      aside.shift();
      begin(pursue(next.one));
    }
  }
  partners.close();
  await Promise.all(running);
};

const watchAlerts = async (alerts: Alerts, url: string, begun: number, stop: AbortSignal, service: Kept): Promise<void> => {
  while (!stop.aborted) {
    const answer = await fetch(url).catch(() => null);
    const text = answer?.ok ? await answer.text().catch(() => null) : null;
    alerts.scraped(text, performance.now() - begun);
    service.collectErrors();
    await sleep(SCRAPE_EVERY_MS, undefined, { signal: stop }).catch(() => undefined);
  }
};

/** Returns a violation for each task that staff were told of twice, and for each task whose payment no kill can have interrupted. */
const judgeStaffTasks = async (service: Kept, { store }: Services): Promise<string[]> => {
  const told = new Map<string, number>();
  for (const line of service.askedStaff) told.set(line, (told.get(line) ?? 0) + 1);
  // Commands raise tasks, too.
  const raised: { readonly paymentId: string; readonly reason: string }[] = [];
  for await (const events of store.readAll(null, { streamPrefixes: ['staff-task-'] }))
    for (const { type, data } of events) if (type === 'StaffTaskRaised') raised.push(data as (typeof raised)[number]);
  return [
    ...[...told].flatMap(([line, times]) => (times > 1 ? [`staff were told ${times} times: ${line}`] : [])),
    ...raised.flatMap(({ paymentId, reason }) => {
      const begunAt = timeOfUuid(paymentId);
      if (service.interruptions.some((at) => begunAt >= at - UNDER_WAY_MS && begunAt <= at)) return [];
      const before = Math.max(...service.interruptions.filter((at) => at < begunAt));
      return `staff were asked about ${paymentId} (${reason}), and no kill came within ${UNDER_WAY_MS / 1_000} s after it began; the last came ${(begunAt - before) / 1_000} s before`;
    }),
  ];
};

/** The delay of a timer of the load. All other times of requests contain it. */
const LOAD = 'delay of the load itself';
const measureLoad = async (add: (ms: number) => void, stop: AbortSignal): Promise<void> => {
  while (!stop.aborted) {
    const due = performance.now() + DELAY_EVERY_MS;
    await sleep(DELAY_EVERY_MS, undefined, { signal: stop }).catch(() => undefined);
    add(Math.max(0, performance.now() - due));
  }
};

/** When a payment began, in milliseconds of the epoch: its id is a UUID of version 7. */
const timeOfUuid = (id: string): number => Number.parseInt(id.replaceAll('-', '').slice(0, 12), 16);

/** Adds the processor time of each part of the service and the answers in the same time. `answered`: all answers so far; null: a command runs. */
const measureProcessors = async (
  service: Kept,
  answered: () => number | null,
  add: (ms: (part: Served) => number, answers: number) => void,
  stop: AbortSignal,
): Promise<void> => {
  let last = null as { readonly pid: number; readonly ms: ReturnType<typeof processorMs>; readonly answers: number } | null;
  while (!stop.aborted) {
    const pid = service.process?.pid;
    const answers = answered();
    let now: typeof last = null;
    // While a process is missing, the service is not calm.
    if (pid !== undefined && service.isCalm && answers !== null)
      try {
        now = { pid, ms: processorMs({ pids: pidsOf(pid) }), answers };
      } catch {
        // A process has ended meanwhile.
      }
    if (now && last?.pid === now.pid) {
      const [from, to] = [last, now];
      add((part) => to.ms[part] - from.ms[part], to.answers - from.answers);
    }
    last = now;
    await sleep(CPU_EVERY_MS, undefined, { signal: stop }).catch(() => undefined);
  }
};

interface Cost {
  readonly name: string;
  readonly before: number;
  readonly last: number;
  /** null: it is not judged. */
  readonly flat: boolean | null;
}

const compareQuarters = (one: Quarter, other: Quarter, commands: ReadonlyMap<string, Commanded>): Cost[] => {
  const compared = (name: string, before: number, last: number, times: number, isEnough = true): Cost => ({
    name,
    before,
    last,
    flat: isEnough ? last <= times * before + NOISE_MS : null,
  });
  const kinds = [...one.latencies.keys()].filter((kind) => other.latencies.has(kind)).sort();
  return [
    ...kinds.flatMap((kind) => {
      const [before, last] = [one, other].map(({ latencies }) => Float64Array.from(latencies.get(kind)!).sort()) as [Float64Array, Float64Array];
      const answers = Math.min(before.length, last.length);
      return [
        compared(
          `${kind} p50 ms (${before.length}, ${last.length} answers)`,
          percentile(before, 0.5),
          percentile(last, 0.5),
          FLAT.p50,
          answers >= LEAST_ANSWERS.p50,
        ),
        compared(`${kind} p99 ms`, percentile(before, 0.99), percentile(last, 0.99), FLAT.p99, answers >= LEAST_ANSWERS.p99),
      ];
    }),
    ...SERVED.map((part) => compared(`processor ms of ${part} per answer`, cpuOf(one, [part]), cpuOf(other, [part]), FLAT.cpu, false)),
    ...[...commands].flatMap(([name, { seconds }]) => {
      const [before, last] = [seconds[BASE_QUARTER]!, seconds.at(-1)!];
      if (before.length === 0 || last.length === 0) return [];
      const isEnough = Math.min(before.length, last.length) >= LEAST_RUNS;
      return compared(
        `payfold ${name} mean ms (${before.length}, ${last.length} runs)`,
        1_000 * mean(before),
        1_000 * mean(last),
        FLAT.command,
        isEnough,
      );
    }),
    compared('processor ms of the service per answer', cpuOf(one, SERVED), cpuOf(other, SERVED), FLAT.cpu),
  ];
};

const cpuOf = ({ alone }: Quarter, parts: readonly Served[]): number =>
  parts.reduce((sum, part) => sum + (alone.cpuMs.get(part) ?? 0), 0) / alone.answers;

const mean = (values: readonly number[]): number => values.reduce((sum, one) => sum + one, 0) / values.length;

interface Printed {
  readonly costs: readonly Cost[];
  readonly service: Kept;
  readonly commands: ReadonlyMap<string, Commanded>;
  readonly faults: Readonly<Record<string, number>>;
  readonly alarms: readonly string[];
  readonly partners: Partners;
  readonly verified: readonly { readonly name: string; readonly ok: boolean }[];
  readonly differences: number | null;
  readonly resolvedByRecovery: number;
  readonly verdict: { readonly payments: number; readonly chargesAtBank: number; readonly netAtBankCents: number };
}

const printTable = ({ costs, service, commands, faults, alarms, partners, verified, differences, resolvedByRecovery, verdict }: Printed): void => {
  const line = (name: string, ...cells: readonly string[]) => console.log(`${name.padEnd(52)}${cells.map((cell) => cell.padStart(14)).join('')}`);
  line('in calm times', 'second quarter', 'last quarter', '');
  for (const { name, before, last, flat } of costs) line(name, before.toFixed(1), last.toFixed(1), flat === null ? '' : flat ? 'flat' : 'GROWN');
  line('command', 'runs', 'cut off', 'slowest s');
  for (const [name, { runs, cutOff, slowestSeconds }] of commands) line(`payfold ${name}`, String(runs), String(cutOff), slowestSeconds.toFixed(1));
  line('fault', 'times');
  for (const [name, times] of Object.entries(faults)) line(name, String(times));
  const { readySeconds, errors } = service;
  line('starts; the slowest in seconds', String(readySeconds.length), Math.max(...readySeconds).toFixed(1));
  line('error lines in calm times', String([...errors.calm.values()].reduce((sum, count) => sum + count, 0)));
  for (const [text, count] of errors.faults) console.log(`  in faults, ${count} ×: ${text}`);
  console.log(`alarms: ${alarms.length === 0 ? 'none' : alarms.join('; ')}`);
  console.log(
    `charges begun ${partners.charges.length}, returns ${partners.returns.length}, resolved by recovery ${resolvedByRecovery}; payments in the log ${verdict.payments}, charges at the processor ${verdict.chargesAtBank}, which holds ${verdict.netAtBankCents} cents`,
  );
  console.log(`audit verify --full: ${verified.map(({ name, ok }) => `${name} ${ok ? 'ok' : 'FAILED'}`).join(', ') || 'no verdict'}; audit drift: ${differences ?? 'no verdict'} differences`); // prettier-ignore
};

/**
 * The commands `npm run sim`, `npm run crash` and `npm run canaries`. They share the work among processes. For each finding they print the command
 * that repeats it, and for the first ones the lines of the run. They write one line of JSON to `reports/`, and exit with 1 after a finding.
 */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { progress, writeReport } from '../support/report.js';
import { CANARIES } from './canaries.js';
import { SCENARIOS } from './scenarios.js';
import { story } from './story.js';
import { again, type Done, type Finding, isLosingStore, NOTHING, type Piece, together } from './work.js';
import { doPiece, doPieces, startWorker } from './workers.js';

const ROOT = process.cwd();
/** Runs that failed once. The specs play them again every time. */
const REGRESSIONS = join(ROOT, 'test', 'simulation', 'regressions.json');
const SEEDS_OF_A_PIECE = 100;
/** Every tenth piece of work is run twice, to check determinism. */
const TWICE_EVERY = 10;
/** How many seeds are tried for each canary. */
const CANARY_SEEDS = 6_000;
const STORIES = 3;
/** By default, every sixth pair of crash points is played. */
const PAIRS_EVERY = 6;

/** Runs the pieces from `next` in `jobs` processes, until `next` returns null. `onDone` gets the results in the order of arrival. */
const share = async (
  next: () => Piece | null,
  jobs: number,
  bar: Bar,
  onDone: (piece: Piece, done: Done) => void = () => undefined,
): Promise<Done> => {
  let all = NOTHING;
  const children = Array.from({ length: jobs }, () => startWorker());
  try {
    await Promise.all(
      children.map(async (child) => {
        for (let piece = next(); piece; piece = next()) {
          const done = await doPiece(child, piece, (runs) => bar.more(runs));
          all = together(all, done);
          onDone(piece, done);
        }
      }),
    );
  } finally {
    for (const child of children) if (child.connected) child.disconnect();
  }
  return all;
};

interface Bar {
  more(runs: number): void;
  end(): void;
}

/** A progress bar that also advances during a piece of work. */
const counting = (what: string, total: number | null): Bar => {
  const bar = progress(what, total);
  let done = 0;
  return { more: (runs) => bar.update((done += runs)), end: () => bar.stop() };
};

const report = (name: string, figures: Readonly<Record<string, unknown>>): void => {
  writeReport(name, figures);
  console.log(JSON.stringify(figures));
};

const repro = ({ seed, scenario, crashes, planted }: Finding): string =>
  seed !== null
    ? `npm run sim -- --from ${seed} --story${planted === undefined ? '' : ` --plant ${JSON.stringify(planted)}`}`
    : `npm run crash -- --scenario ${JSON.stringify(scenario)} --at ${crashes.map(({ index, when }) => `${index}:${when}`).join(',')}`;

const tell = async (findings: readonly Finding[]): Promise<void> => {
  for (const finding of findings.slice(0, STORIES)) {
    const result = await again(finding);
    console.error(`\n${story(result)}\n\nAgain: ${repro(finding)}\n`);
  }
  for (const finding of findings) console.error(`${repro(finding)}   # ${finding.violations[0]}`);
};

const remember = (findings: readonly Finding[]): void => {
  if (findings.every(({ planted }) => planted !== undefined)) return;
  const known = existsSync(REGRESSIONS) ? (JSON.parse(readFileSync(REGRESSIONS, 'utf8')) as Finding[]) : [];
  const name = (finding: Finding) => JSON.stringify([finding.seed, finding.scenario, finding.crashes]);
  const names = new Set(known.map(name));
  const fresh = findings
    .filter((finding) => !names.has(name(finding)))
    .map((finding) => ({ ...finding, violations: finding.violations.slice(0, 1) }));
  writeFileSync(REGRESSIONS, `${JSON.stringify([...known, ...fresh], null, 2)}\n`);
};

const figures = (
  { runs, statistics, checks, payments, events, deliveries, arrivals, simulatedMs, cpuMs, answers, nondeterministic, findings }: Done,
  startedAt: number,
  jobs: number,
  ranTwice = 0,
) => {
  const seconds = (Date.now() - startedAt) / 1000;
  return {
    runs,
    violations: findings.length,
    checks,
    payments,
    events,
    deliveries,
    arrivals,
    simulatedHours: Math.round(simulatedMs / 3_600_000),
    faults: statistics.drops + statistics.lost + statistics.late + statistics.crashes + statistics.pauses,
    ...statistics,
    nondeterministic: nondeterministic.length,
    answers,
    seconds: Math.round(seconds),
    jobs,
    runsPerSecond: Math.round((runs / seconds) * 10) / 10,
    runsPerCpuSecond: Math.round((runs + ranTwice) / (cpuMs / 1000)),
  };
};

const number = (text: string | undefined, otherwise: number): number => {
  if (text === undefined) return otherwise;
  const value = Number(text);
  if (!Number.isSafeInteger(value) || value < 0) throw new Error(`not a number: ${text}`);
  return value;
};

const sim = async (args: string[]): Promise<number> => {
  const { values } = parseArgs({
    args,
    options: {
      seeds: { type: 'string' },
      from: { type: 'string' },
      minutes: { type: 'string' },
      jobs: { type: 'string' },
      story: { type: 'boolean' },
      lost: { type: 'string' },
      plant: { type: 'string' },
    },
  });
  const from = number(values.from, 1);
  const minutes = values.minutes === undefined ? null : number(values.minutes, 0);
  const seeds = minutes !== null && values.seeds === undefined ? Number.MAX_SAFE_INTEGER : number(values.seeds, 2_000);
  const jobs = Math.max(1, number(values.jobs, availableParallelism()));
  const { lost } = values;
  if (lost !== undefined && !isLosingStore(lost)) throw new Error('--lost is log or keys');
  const planted = values.plant === undefined ? {} : { planted: values.plant };
  if (values.story) {
    const result = await again({ seed: from, scenario: null, crashes: [], ...planted });
    console.log(story(result));
    return result.violations.length === 0 ? 0 : 1;
  }
  const startedAt = Date.now();
  const end = minutes === null ? Number.POSITIVE_INFINITY : startedAt + minutes * 60_000;
  const bar = counting('seeds', seeds === Number.MAX_SAFE_INTEGER ? null : seeds);
  let at = from;
  let pieces = 0;
  let twice = 0;
  const next = (): Piece | null => {
    if (at >= from + seeds || Date.now() >= end) return null;
    const piece: Piece = {
      kind: 'seeds',
      from: at,
      to: Math.min(at + SEEDS_OF_A_PIECE, from + seeds),
      twice: pieces++ % TWICE_EVERY === 0,
      lost,
      ...planted,
    };
    if (piece.twice) twice += piece.to - piece.from;
    at = piece.to;
    return piece;
  };
  const done = await share(next, jobs, bar);
  bar.end();
  remember(done.findings);
  await tell(done.findings);
  if (values.plant === undefined) report('sim', { seeds: { from, to: at - 1 }, ranTwice: twice, ...figures(done, startedAt, jobs, twice) });
  if (done.nondeterministic.length > 0) console.error(`not deterministic: seeds ${done.nondeterministic.join(', ')}`);
  return done.findings.length + done.nondeterministic.length === 0 ? 0 : 1;
};

const crash = async (args: string[]): Promise<number> => {
  const { values } = parseArgs({
    args,
    options: {
      pairs: { type: 'boolean' },
      every: { type: 'string' },
      scenario: { type: 'string' },
      at: { type: 'string' },
      jobs: { type: 'string' },
    },
  });
  if (values.at !== undefined) {
    const crashes = values.at
      .split(',')
      .filter(Boolean)
      .map((point) => {
        const [index, when] = point.split(':');
        if (when !== 'before' && when !== 'after') throw new Error('--at is INDEX:before or INDEX:after, joined by commas');
        return { index: number(index, 0), when } as const;
      });
    const result = await again({ seed: null, scenario: values.scenario ?? '', crashes });
    console.log(story(result));
    return result.violations.length === 0 ? 0 : 1;
  }
  const names = Object.keys(SCENARIOS).filter((name) => values.scenario === undefined || name === values.scenario);
  if (names.length === 0) throw new Error(`no such scenario; there are: ${Object.keys(SCENARIOS).join(' · ')}`);
  const jobs = Math.max(1, number(values.jobs, availableParallelism()));
  const startedAt = Date.now();
  const every = Math.max(1, number(values.every, PAIRS_EVERY));
  const queue: Piece[] = names.map((scenario) => (values.pairs ? { kind: 'pairs', scenario, every } : { kind: 'singles', scenario }));
  const bar = counting(values.pairs ? 'pairs of crashes' : 'crashes', null);
  const byScenario: Record<string, number> = {};
  const done = await share(
    () => queue.shift() ?? null,
    jobs,
    bar,
    (piece, { runs }) => {
      if ('scenario' in piece) byScenario[piece.scenario] = runs;
    },
  );
  bar.end();
  remember(done.findings);
  await tell(done.findings);
  report(values.pairs ? 'crash-pairs' : 'crash', {
    scenarios: names.length,
    ...(values.pairs && { everyNth: every }),
    byScenario,
    ...figures(done, startedAt, jobs),
  });
  return done.findings.length === 0 ? 0 : 1;
};

const canaries = async (args: string[]): Promise<number> => {
  const { values } = parseArgs({
    args,
    options: { seeds: { type: 'string' }, from: { type: 'string' }, jobs: { type: 'string' }, name: { type: 'string' } },
  });
  const from = number(values.from, 1);
  const seeds = number(values.seeds, CANARY_SEEDS);
  const jobs = Math.max(1, number(values.jobs, availableParallelism()));
  const startedAt = Date.now();
  const chosen = CANARIES.filter(({ name }) => values.name === undefined || name.includes(values.name));
  const queue: Piece[] = chosen.map(({ name }) => ({ kind: 'canary', canary: name, from, to: from + seeds }));
  const bar = counting('seeds', null);
  const foundAfter: Record<string, number | null> = {};
  const done = await share(
    () => queue.shift() ?? null,
    jobs,
    bar,
    (piece, { foundAfter: after = null }) => {
      if (piece.kind === 'canary') foundAfter[piece.canary] = after;
    },
  );
  bar.end();
  const missed = chosen.filter(({ name, redundant }) => foundAfter[name] === null && redundant === undefined);
  const redundant = chosen.filter(({ name, redundant: why }) => foundAfter[name] === null && why !== undefined);
  for (const { name, redundant: why } of chosen)
    console.log(
      `${String(foundAfter[name] ?? '–').padStart(6)}  ${name}${foundAfter[name] === null && why !== undefined ? `   (redundant: ${why})` : ''}`,
    );
  const took = chosen.flatMap(({ name }) => foundAfter[name] ?? []).sort((a, b) => a - b);
  report('canaries', {
    seeds: { from, to: from + seeds - 1 },
    planted: chosen.length,
    found: took.length,
    redundant: redundant.map(({ name }) => name),
    missed: missed.map(({ name }) => name),
    medianSeeds: took[Math.floor((took.length - 1) / 2)] ?? null,
    foundAfter,
    runs: done.runs,
    seconds: Math.round((Date.now() - startedAt) / 1000),
    jobs,
  });
  for (const { name } of missed) console.error(`not found: ${name}`);
  remember(done.findings);
  for (const finding of done.findings) console.error(`wrong without a planted bug: ${repro(finding)}   # ${finding.violations[0]}`);
  return missed.length + done.findings.length === 0 ? 0 : 1;
};

const [, , command, ...args] = process.argv;
const COMMANDS: Readonly<Record<string, (args: string[]) => Promise<number>>> = { sim, crash, canaries };
if (command === 'worker') doPieces();
else if (command !== undefined && COMMANDS[command])
  COMMANDS[command](args).then(
    (code) => (process.exitCode = code),
    (error: unknown) => {
      console.error(error instanceof Error ? error.message : error);
      process.exitCode = 2;
    },
  );
else {
  console.error(
    'sim [--seeds N] [--from S] [--minutes M] [--lost log|keys] [--story] · crash [--pairs [--every N]] [--scenario NAME [--at I:before,J:after]] · canaries [--seeds N] [--name TEXT]',
  );
  process.exitCode = 2;
}

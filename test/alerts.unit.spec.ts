/**
 * The alert rules, the dashboard and the documentation name only metrics that the code declares. Each rule names a chapter of docs/operations.md.
 * supervisor.fault.spec compares the declared metrics with what a service prints.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from '@jest/globals';
import { Alerts, readRules, type Rule } from './support/alerts.js';
import { metricsInCode } from './support/metrics.js';

const ROOT = new URL('..', import.meta.url).pathname;
const read = (file: string) => readFileSync(join(ROOT, file), 'utf8');

const rules = readRules();
const { panels } = JSON.parse(read('docker/dashboard.json')) as {
  readonly panels: readonly { readonly id: number; readonly title: string; readonly targets: readonly { readonly expr: string }[] }[];
};
const operations = read('docs/operations.md');
/** Names of Prometheus itself and of the runtime, which prom-client declares. */
const FOREIGN = /^(up|process_cpu_seconds_total|process_resident_memory_bytes|nodejs_eventloop_lag_p99_seconds)$/;
/** Labels that the scrape adds. */
const SCRAPED = ['job', 'instance'];
const code = metricsInCode();
const SUFFIXES: Readonly<Record<string, readonly string[]>> = { Histogram: ['_bucket', '_count', '_sum'] };

/** Each metric of an expression with the labels of its selector. */
const selectors = (expr: string) =>
  [...expr.replaceAll(/\b(sum|min|max) by \([^)]*\)/g, '').matchAll(/\b([a-z]\w*)(?:\{([^}]*)\})?(?!\w|\s*\()/g)]
    .filter(([, name]) => /_|^up$/.test(name!))
    .map(([, name, labels = '']) => ({ name: name!, labels: [...labels.matchAll(/(\w+)(?:=~?|!~)"/g)].map(([, label]) => label!) }));

const expectDeclared = (expr: string) => {
  const found = selectors(expr);
  expect(found).not.toEqual([]);
  for (const { name, labels } of found) {
    if (FOREIGN.test(name)) continue;
    const declared = Object.entries(code).find(([known, { type }]) => (SUFFIXES[type] ?? ['']).some((suffix) => known + suffix === name));
    expect([name, declared?.[0]]).toEqual([name, expect.any(String)]);
    for (const label of labels) expect([...declared![1].labels, ...SCRAPED]).toContain(label);
  }
};

test('the declared metrics are found in the code', () => {
  expect(Object.keys(code).length).toBeGreaterThan(25);
  expect(code.payfold_open_attempts).toEqual({ type: 'Gauge', labels: ['state', 'figure'] });
  expect(selectors('sum by (job) (rate(payfold_x_count{a=~"1|2",b="3"}[5m])) > 0.1')).toEqual([{ name: 'payfold_x_count', labels: ['a', 'b'] }]);
});

describe('alert rules', () => {
  test.each(rules.map((rule): [string, Rule] => [rule.alert, rule]))(
    '%s names declared metrics and a chapter',
    (_, { expr, annotations, labels }) => {
      expectDeclared(expr);
      expect(labels.severity).toMatch(/^(page|ticket)$/);
      expect(annotations.summary).toMatch(/\.$/);
      const [file, chapter] = annotations.runbook.split('#');
      expect(file).toBe('docs/operations.md');
      expect([...operations.matchAll(/^#+ (.*)$/gm)].map(([, heading]) => heading!.toLowerCase().replaceAll(' ', '-'))).toContain(chapter);
    },
  );
  test('have unique names, and docs/operations.md lists each', () => {
    const names = rules.map(({ alert }) => alert);
    expect(new Set(names).size).toBe(names.length);
    for (const name of names) expect(operations).toContain(`\`${name.replace('Payfold', '')}\``);
  });
});

describe('the evaluation of alert rules', () => {
  /** Scrapes every 10 s the series that `text` gives for a second. Returns the time at which an alert first fires in seconds. null: it never does. */
  const firesAfter = (alert: string, seconds: number, text: (second: number) => string | null): number | null => {
    const alerts = new Alerts(rules);
    for (let second = 0; second <= seconds; second += 10) if (alerts.scraped(text(second), second * 1_000).includes(alert)) return second;
    return null;
  };
  const requests = (ok: number, failed: number, route = '/x') =>
    `payfold_http_request_duration_seconds_count{route="${route}",status="200"} ${ok}\npayfold_http_request_duration_seconds_count{route="${route}",status="503"} ${failed}\n`;

  test('each rule can be evaluated', () => {
    expect(new Alerts(rules).scraped('payfold_ready{check="database"} 1\n', 0)).toEqual([]);
  });
  test('a limit: at once, or only when it has lasted', () => {
    expect(firesAfter('PayfoldStoreIncident', 100, (second) => `payfold_store_incident ${second >= 50 ? 1 : 0}\n`)).toBe(50);
    expect(firesAfter('PayfoldNotReady', 300, () => null)).toBe(120);
    expect(firesAfter('PayfoldNotReady', 300, () => 'payfold_ready{check="a"} 1\npayfold_ready{check="b"} 0\n')).toBe(120);
    expect(firesAfter('PayfoldNotReady', 300, (second) => `payfold_ready{check="a"} ${second % 100 === 0 ? 1 : 0}\n`)).toBeNull();
    expect(firesAfter('PayfoldOpenAttemptOld', 600, () => 'payfold_open_attempts{state="running",figure="count"} 9999\n')).toBeNull();
    expect(firesAfter('PayfoldOpenAttemptOld', 600, () => 'payfold_open_attempts{state="running",figure="oldest_seconds"} 901\n')).toBe(300);
  });
  test('a counter: its increase counts, also after a restart, and not its height', () => {
    expect(firesAfter('PayfoldChildRestarts', 600, () => 'payfold_child_restarts_total{child="api"} 3\n')).toBeNull();
    expect(firesAfter('PayfoldChildRestarts', 600, (second) => `payfold_child_restarts_total{child="api"} ${second < 300 ? 3 : 1}\n`)).toBe(300);
  });
  test('a share of requests', () => {
    expect(firesAfter('PayfoldServerErrors', 900, (second) => requests(second * 100, second))).toBeNull();
    expect(firesAfter('PayfoldServerErrors', 900, (second) => requests(second * 100, second * 2))).toBe(310);
  });
  test('refused audit requests raise a ticket, and never the alarm of payments', () => {
    const refused = (second: number) => requests(second * 100, second) + requests(second, second * 10, '/audit/v1/exports/:report');
    expect(firesAfter('PayfoldServerErrors', 1_200, refused)).toBeNull();
    expect(firesAfter('PayfoldAuditErrors', 1_200, refused)).toBe(910);
  });
});

test('each panel of the dashboard shows declared metrics', () => {
  expect(new Set(panels.map(({ id }) => id)).size).toBe(panels.length);
  for (const { targets } of panels) for (const { expr } of targets) expectDeclared(expr);
});

test('docs/operations.md lists every declared metric, and no other', () => {
  const chapter = /^## Metrics\n[^]*?(?=^## )/m.exec(operations)![0];
  expect([...new Set([...chapter.matchAll(/^\| `(payfold_\w+)`/gm)].map(([, name]) => name))].sort()).toEqual(Object.keys(code).sort());
});

describe('docs/operations.md, the table of alarms', () => {
  const chapter = /^## Alarms\n[^]*?(?=^## )/m.exec(operations)![0];
  const rows = [...chapter.matchAll(/^\| (log: )?`([^`]+)`\s*\|(.*)\|$/gm)].map(([, log, name, rest]) => ({
    log: log !== undefined,
    name: name!,
    cells: rest!.split(/(?<!\\)\|/).map((cell) => cell.trim()),
  }));
  test('each row has a meaning, a first and a second step', () => {
    for (const { name, cells } of rows) expect([name, cells]).toEqual([name, Array(3).fill(expect.stringMatching(/./))]);
  });
  test('has every rule, and no other', () => {
    const named = rows.filter(({ log }) => !log).map(({ name }) => name);
    expect(named.sort()).toEqual(rules.map(({ alert }) => alert).sort());
  });
  test('each log line is one that the code writes', () => {
    const sources = ['libs', 'apps'].flatMap((folder) =>
      readdirSync(join(ROOT, folder), { recursive: true, encoding: 'utf8' })
        .filter((file) => /(?<!\.spec)\.tsx?$/.test(file))
        .map((file) => read(join(folder, file))),
    );
    const lines = rows.filter(({ log }) => log);
    expect(lines.length).toBeGreaterThan(20);
    for (const { name } of lines) expect([name, sources.some((source) => source.includes(name))]).toEqual([name, true]);
  });
});

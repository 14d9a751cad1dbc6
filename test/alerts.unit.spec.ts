/**
 * The alert rules, the dashboard and the documentation name only metrics that the code declares. Each rule names a chapter of docs/operations.md.
 * supervisor.fault.spec compares the declared metrics with what a service prints.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from '@jest/globals';
import { parse } from 'yaml';
import { metricsInCode } from './support/metrics.js';

const ROOT = new URL('..', import.meta.url).pathname;
const read = (file: string) => readFileSync(join(ROOT, file), 'utf8');

interface Rule {
  readonly alert: string;
  readonly expr: string;
  readonly for?: string;
  readonly labels: { readonly severity: string };
  readonly annotations: { readonly summary: string; readonly runbook: string };
}
const { groups } = parse(read('docker/alerts.yaml')) as { readonly groups: readonly { readonly name: string; readonly rules: readonly Rule[] }[] };
const rules = groups.flatMap((group) => group.rules);
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
    .map(([, name, labels = '']) => ({ name: name!, labels: [...labels.matchAll(/(\w+)=~?"/g)].map(([, label]) => label!) }));

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
  expect(code.payfold_open_attempts).toEqual({ type: 'Gauge', labels: ['figure'] });
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

test('each panel of the dashboard shows declared metrics', () => {
  expect(new Set(panels.map(({ id }) => id)).size).toBe(panels.length);
  for (const { targets } of panels) for (const { expr } of targets) expectDeclared(expr);
});

test('docs/operations.md lists every declared metric, and no other', () => {
  const chapter = /^## Metrics\n[^]*?(?=^## )/m.exec(operations)![0];
  expect([...new Set([...chapter.matchAll(/^\| `(payfold_\w+)`/gm)].map(([, name]) => name))].sort()).toEqual(Object.keys(code).sort());
});

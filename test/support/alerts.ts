/**
 * The alert rules of docker/alerts.yaml, evaluated on scraped metrics. It knows the part of PromQL that these rules use: selectors, `rate`, `increase`,
 * `min_over_time`, `sum by`, `min by`, division, comparison with a number, `or`. Rates are not extrapolated to the edges of their window.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { parse } from 'yaml';
import { figuresIn } from './metrics.js';

export interface Rule {
  readonly alert: string;
  readonly expr: string;
  readonly for?: string;
  readonly labels: { readonly severity: string };
  readonly annotations: { readonly summary: string; readonly runbook: string };
}

const ROOT = new URL('../..', import.meta.url).pathname.replace(/\/dist\/$/, '/');

export const readRules = (): readonly Rule[] => {
  const { groups } = parse(readFileSync(join(ROOT, 'docker/alerts.yaml'), 'utf8')) as {
    readonly groups: readonly { readonly rules: readonly Rule[] }[];
  };
  return groups.flatMap((group) => group.rules);
};

type Labels = Readonly<Record<string, string>>;
interface Value {
  readonly labels: Labels;
  readonly value: number;
}
interface Series {
  readonly name: string;
  readonly labels: Labels;
  /** One sample of each scrape that had the series, oldest first. */
  readonly samples: { readonly atMs: number; readonly value: number }[];
}

const UNIT_MS: Readonly<Record<string, number>> = { s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000 };
const durationMs = (text: string): number => Number(text.slice(0, -1)) * UNIT_MS[text.at(-1)!]!;
const TARGET: Labels = { job: 'payfold', instance: 'payfold' };

/** Alerts of one service. */
export class Alerts {
  private readonly series = new Map<string, Series>();
  private readonly since = new Map<string, number>();
  private atMs = 0;
  /** Each alert that has fired, with the times at which it began to fire. */
  readonly fired = new Map<string, number[]>();

  constructor(private readonly rules: readonly Rule[]) {}

  /** Takes the text of a scrape, and evaluates all rules. null: the scrape failed. Returns the names of the alerts that fire now. */
  scraped(text: string | null, atMs: number): string[] {
    this.atMs = atMs;
    this.add('up', TARGET, text === null ? 0 : 1);
    for (const [name, value] of figuresIn(text ?? '')) {
      const labels = [...name.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, label, of]) => [label!, of!]);
      this.add(name.split('{')[0]!, { ...(Object.fromEntries(labels) as Labels), ...TARGET }, value);
    }
    return this.rules.filter((rule) => this.fires(rule)).map(({ alert }) => alert);
  }

  private add(name: string, labels: Labels, value: number): void {
    const key = `${name} ${JSON.stringify(labels)}`;
    const series = this.series.get(key) ?? { name, labels, samples: [] };
    this.series.set(key, series);
    series.samples.push({ atMs: this.atMs, value });
  }

  private fires({ alert, expr, for: lasting = '0s' }: Rule): boolean {
    if (new Expression(expr, this.series.values(), this.atMs).values().length === 0) {
      this.since.delete(alert);
      return false;
    }
    const since = this.since.get(alert) ?? this.atMs;
    const was = this.since.has(alert) && (this.fired.get(alert)?.at(-1) ?? 0) >= since;
    this.since.set(alert, since);
    if (this.atMs - since < durationMs(lasting)) return false;
    if (!was) this.fired.set(alert, [...(this.fired.get(alert) ?? []), this.atMs]);
    return true;
  }
}

const TOKEN = /\s*(\[\d+[smhd]\]|"[^"]*"|[\w.]+|=~|!~|==|[{}(),=/<>])/y;
const FUNCTIONS = ['rate', 'increase', 'min_over_time'];

/** Parses an expression and evaluates it at once. */
class Expression {
  private readonly tokens: string[] = [];
  private readonly series: readonly Series[];

  constructor(
    text: string,
    series: Iterable<Series>,
    private readonly atMs: number,
  ) {
    this.series = [...series];
    for (TOKEN.lastIndex = 0; TOKEN.lastIndex < text.length;) {
      const found = TOKEN.exec(text);
      if (!found) throw new Error(`this part of PromQL is not known here: ${text}`);
      this.tokens.push(found[1]!);
    }
  }

  values(): readonly Value[] {
    const values = this.either();
    if (this.tokens.length > 0) throw new Error(`this part of PromQL is not known here: ${this.tokens.join(' ')}`);
    return values;
  }

  private take(expected: string | null = null): string {
    const token = this.tokens.shift();
    if (token === undefined || (expected !== null && token !== expected)) throw new Error(`${expected ?? 'more'} was expected instead of ${token}`);
    return token;
  }

  private taken(token: string): boolean {
    if (this.tokens[0] !== token) return false;
    this.tokens.shift();
    return true;
  }

  private either(): readonly Value[] {
    let values = this.compared();
    while (this.taken('or')) values = [...values, ...this.compared()];
    return values;
  }

  private compared(): readonly Value[] {
    const left = this.divided();
    const operator = this.tokens[0];
    if (operator !== '==' && operator !== '>' && operator !== '<') return left;
    this.take();
    const right = Number(this.take());
    return left.filter(({ value }) => (operator === '==' ? value === right : operator === '>' ? value > right : value < right));
  }

  private divided(): readonly Value[] {
    const left = this.part();
    if (!this.taken('/')) return left;
    const right = new Map(this.part().map(({ labels, value }) => [JSON.stringify(labels), value]));
    return left.flatMap(({ labels, value }) => {
      const by = right.get(JSON.stringify(labels));
      return by === undefined ? [] : [{ labels, value: value / by }];
    });
  }

  private part(): readonly Value[] {
    const word = this.take();
    if ((word === 'sum' || word === 'min') && this.taken('by')) {
      const names = this.list();
      this.take('(');
      const groups = new Map<string, Value>();
      for (const { labels, value } of this.either()) {
        const kept = Object.fromEntries(names.flatMap((name) => (labels[name] === undefined ? [] : [[name, labels[name]]]))) as Labels;
        const before = groups.get(JSON.stringify(kept))?.value;
        groups.set(JSON.stringify(kept), {
          labels: kept,
          value: before === undefined ? value : word === 'sum' ? before + value : Math.min(before, value),
        });
      }
      this.take(')');
      return [...groups.values()];
    }
    if (FUNCTIONS.includes(word)) {
      this.take('(');
      const found = this.selected(this.take());
      const windowMs = durationMs(this.take().slice(1, -1));
      this.take(')');
      return found.flatMap(({ labels, samples }) => {
        const inside = samples.filter(({ atMs }) => atMs > this.atMs - windowMs);
        if (word === 'min_over_time') return inside.length === 0 ? [] : [{ labels, value: Math.min(...inside.map(({ value }) => value)) }];
        if (inside.length < 2) return [];
        // A counter that falls began again at 0.
        const increase = inside
          .slice(1)
          .reduce((sum, { value }, index) => sum + (value < inside[index]!.value ? value : value - inside[index]!.value), 0);
        const seconds = (inside.at(-1)!.atMs - inside[0]!.atMs) / 1_000;
        return [{ labels, value: word === 'rate' ? increase / seconds : increase }];
      });
    }
    return this.selected(word).flatMap(({ labels, samples }) => {
      const last = samples.at(-1)!;
      return last.atMs === this.atMs ? [{ labels, value: last.value }] : [];
    });
  }

  private list(): string[] {
    const names: string[] = [];
    this.take('(');
    while (!this.taken(')')) if (!this.taken(',')) names.push(this.take());
    return names;
  }

  private selected(name: string): readonly Series[] {
    const wanted: ((labels: Labels) => boolean)[] = [];
    if (this.taken('{'))
      while (!this.taken('}')) {
        if (this.taken(',')) continue;
        const label = this.take();
        const operator = this.take();
        const text = this.take().slice(1, -1);
        wanted.push((labels) => {
          if (operator === '=') return labels[label] === text;
          return new RegExp(`^(?:${text})$`).test(labels[label] ?? '') === (operator === '=~');
        });
      }
    return this.series.filter((one) => one.name === name && wanted.every((holds) => holds(one.labels)));
  }
}

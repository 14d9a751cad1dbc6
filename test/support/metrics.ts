/** Figures in the text of `/metrics`, and the metrics that the code declares. */
import { readFileSync } from 'node:fs';
import type { Registry } from 'prom-client';

/** By name and labels, such as `payfold_open_attempts{state="running",figure="count"}`. */
export const figuresIn = (text: string): ReadonlyMap<string, number> =>
  new Map(
    text
      .split('\n')
      .filter((line) => line !== '' && !line.startsWith('#'))
      .map((line): [string, number] => [line.slice(0, line.lastIndexOf(' ')), Number(line.slice(line.lastIndexOf(' ') + 1))]),
  );

export const figuresOf = async (registry: Registry): Promise<ReadonlyMap<string, number>> => figuresIn(await registry.metrics());

const APPS = new URL('../../apps/', import.meta.url).pathname.replace('/dist/', '/');
const DECLARED = /new client\.(Gauge|Counter|Histogram)\(\{\s*name: '(\w+)',[^]*?registers/g;

export interface DeclaredMetric {
  readonly type: string;
  readonly labels: readonly string[];
}

/** Every metric that the code declares, by name. */
export const metricsInCode = (): Readonly<Record<string, DeclaredMetric>> =>
  Object.fromEntries(
    ['metrics.ts', 'lifecycle.ts', 'standalone/main.ts']
      .flatMap((file) => [...readFileSync(APPS + file, 'utf8').matchAll(DECLARED)])
      .map(([text, type, name]) => [
        name!,
        { type: type!, labels: [...(/labelNames: \[(.*?)\]/.exec(text)?.[1] ?? '').matchAll(/'(\w+)'/g)].map(([, label]) => label!) },
      ]) // prettier-ignore
      .filter(([name]) => (name as string).startsWith('payfold_')) as [string, DeclaredMetric][],
  );

/** Figures in the text of `/metrics`. */
import type { Registry } from 'prom-client';

/** By name and labels, such as `payfold_open_attempts{figure="count"}`. */
export const figuresIn = (text: string): ReadonlyMap<string, number> =>
  new Map(
    text
      .split('\n')
      .filter((line) => line !== '' && !line.startsWith('#'))
      .map((line): [string, number] => [line.slice(0, line.lastIndexOf(' ')), Number(line.slice(line.lastIndexOf(' ') + 1))]),
  );

export const figuresOf = async (registry: Registry): Promise<ReadonlyMap<string, number>> => figuresIn(await registry.metrics());

/** Children that end by themselves, while the service runs and while it stops. */
import { expect, test } from '@jest/globals';
import type { Logger } from '#platform';
import { eventually } from '../../test/support/eventually.js';
import { type Child, keepRunning } from './keep-running.js';

/** Starts children that end when they are told to. */
const kept = async (stop: AbortSignal) => {
  const said: string[] = [];
  const log = Object.fromEntries(['info', 'warn', 'error'].map((level) => [level, () => said.push(level)])) as unknown as Logger;
  const ends: (() => void)[] = [];
  let faults = 0;
  const start = async (): Promise<Child> => {
    let end: () => void = () => undefined;
    const exited = new Promise<void>((gone) => (end = gone));
    ends.push(end);
    return { pid: ends.length, exited, stop: async () => end() };
  };
  const child = await keepRunning('a child', log, stop, () => (faults += 1), start);
  return { child, said, ends, faults: () => faults };
};

test('a child that ends by itself is a fault, and is started again', async () => {
  const { child, said, ends, faults } = await kept(new AbortController().signal);
  ends[0]!();
  await eventually(() => child.current().pid === 2 && said.length === 2);
  expect([said, faults()]).toEqual([['error', 'warn'], 1]);
  await child.stop();
});

test('a child that a signal to the process group ends is started again until it is stopped, and is no fault', async () => {
  const stopping = new AbortController();
  const { child, said, ends, faults } = await kept(stopping.signal);
  stopping.abort();
  ends[0]!();
  await eventually(() => child.current().pid === 2 && said.length === 2);
  expect([said, faults()]).toEqual([['info', 'info'], 0]);
  await child.stop();
});

/**
 * The jest environment of every spec file. Before the file runs, it takes one of the places of this machine, and waits until one is free.
 *
 * A machine has one place per core, but at least two. All runs on the machine share these places. Without this limit all files would be slow, and
 * tests that wait for processes or connections would reach their time limits. Unit specs start no process and need no place. A run that a spec starts
 * shares the place of that spec (`TEST_PLACE=held`).
 */
import { once } from 'node:events';
import { createServer } from 'node:net';
import { availableParallelism } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { TestEnvironment } from 'jest-environment-node';

/** The number of places: at least as many as one run uses (`maxWorkers`). */
const PLACES = Math.max(2, availableParallelism());
const LOOK_AGAIN_MS = 50;
/** A process that has given a place back waits this long, so that other waiting processes get it first. */
const AFTER_YOU_MS = 100;
let hadOne = false;

/**
 * Takes a place: a socket name in Linux's abstract namespace. Only one process can hold a name, and the kernel frees it when that process dies. null:
 * the place is taken.
 */
const tryPlace = async (number) => {
  const server = createServer().listen(`\0payfold-test-place-${number}`);
  try {
    await once(server, 'listening');
    return server;
  } catch (error) {
    if (error.code === 'EADDRINUSE') return null;
    throw error;
  }
};

export default class TakeTurns extends TestEnvironment {
  constructor(config, context) {
    super(config, context);
    // Other systems have no such names, so runs do not wait for each other there.
    this.needsPlace = process.platform === 'linux' && process.env.TEST_PLACE !== 'held' && !context.testPath.endsWith('.unit.spec.ts');
  }

  async setup() {
    await super.setup();
    if (!this.needsPlace) return;
    if (hadOne) await sleep(AFTER_YOU_MS);
    while (!this.place) {
      for (let number = 0; number < PLACES && !this.place; number++) this.place = await tryPlace(number);
      if (!this.place) await sleep(LOOK_AGAIN_MS);
    }
    hadOne = true;
  }

  async teardown() {
    try {
      await super.teardown();
    } finally {
      this.place?.close();
    }
  }
}

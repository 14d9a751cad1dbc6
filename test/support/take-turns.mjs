/**
 * The jest environment of every spec file. Before the file runs, it takes one of the machine's places, and waits until one is free. After a test that
 * reached its time limit, it skips the rest of the file: the tests share one service, so each of them could wait as long.
 *
 * All runs on a machine share 1.5 places a core, at least 3. Specs wait a third of their time, so three files keep two cores busy. With more files at
 * once, they would reach their time limits. Unit specs start no process and need no place. A run that a spec starts shares that spec's place (`TEST_PLACE=held`).
 */
import { once } from 'node:events';
import { createServer } from 'node:net';
import { availableParallelism } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { TestEnvironment } from 'jest-environment-node';

/** At least as many places as one run uses (`maxWorkers`). */
const PLACES = Math.max(3, Math.floor(1.5 * availableParallelism()));
const LOOK_AGAIN_MS = 50;
/** After a process gave a place back, it waits this long. Other waiting processes get the place first. */
const AFTER_YOU_MS = 100;
let hadOne = false;

/**
 * Takes a place: a socket name in Linux's abstract namespace, which only one process can hold. The kernel frees the name when that process ends.
 * null: the place is taken.
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
    // Other systems have no such names. There, runs do not wait for each other.
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

  handleTestEvent({ name, test }) {
    if (name === 'test_done') this.timedOut ||= test.errors.flat().some((error) => String(error).startsWith('Exceeded timeout of '));
    if (name === 'test_start' && this.timedOut) test.mode = 'skip';
  }

  async teardown() {
    try {
      await super.teardown();
    } finally {
      this.place?.close();
    }
  }
}

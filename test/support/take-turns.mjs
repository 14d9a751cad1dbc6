/**
 * The environment of every spec file. It gives the file a place to run in.
 *
 * On one machine as many files run at once as it has cores, however many runs were started. So two runs on two cores take turns. Side by side, all
 * files would be slow, and waits for processes or connections would end too early. Unit specs start no process and need no place. A run that a spec
 * starts shares the place of that spec (`TEST_PLACE=held`).
 */
import { once } from 'node:events';
import { createServer } from 'node:net';
import { availableParallelism } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { TestEnvironment } from 'jest-environment-node';

/** At least as many as one run uses (`maxWorkers`). */
const PLACES = Math.max(2, availableParallelism());
const LOOK_AGAIN_MS = 50;
/** A process that gives a place back lets waiting ones go first. */
const AFTER_YOU_MS = 100;
let hadOne = false;

/** A name in Linux's abstract namespace. One process holds it at a time, and the kernel takes it back from a process that dies. null: it is taken. */
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

  async teardown() {
    try {
      await super.teardown();
    } finally {
      this.place?.close();
    }
  }
}

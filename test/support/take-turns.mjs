/**
 * The environment of every spec file, with a place to run in: as many files run at once on a machine as it has cores, however many runs were started on it.
 * Two runs on two cores so take turns, where side by side all would be slow and what waits for a process or a connection would give up. Unit specs start
 * nothing, and need no place. A run that a spec starts shares the place of that spec (`TEST_PLACE=held`).
 */
import { once } from 'node:events';
import { createServer } from 'node:net';
import { availableParallelism } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { TestEnvironment } from 'jest-environment-node';

/** At least what one run takes by itself (`maxWorkers`). */
const PLACES = Math.max(2, availableParallelism());
const LOOK_AGAIN_MS = 50;
/** A process that gives a place back lets the waiting ones go first. */
const AFTER_YOU_MS = 100;
let hadOne = false;

/** A name in Linux's abstract namespace: one process has it at a time, and the kernel takes it back from one that dies. null where it is taken. */
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
    // Other systems have no such names; there each run is on its own.
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

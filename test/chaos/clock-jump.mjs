/**
 * A process loads this file before its own code (`NODE_OPTIONS=--import …`). The file shifts the process's wall clock by the milliseconds in the file
 * that `CHAOS_CLOCK_FILE` names. That file is read every 100 ms. Timers and monotonic time do not change, as when an operator sets the clock of a
 * machine.
 */
import { readFileSync } from 'node:fs';
import { setInterval } from 'node:timers';

const LOOK_EVERY_MS = 100;
const { now } = Date;
let offsetMs = 0;
const look = () => {
  try {
    offsetMs = Number(readFileSync(process.env.CHAOS_CLOCK_FILE, 'utf8')) || 0;
  } catch {
    // There is no file: the clock is right.
  }
};
look();
setInterval(look, LOOK_EVERY_MS).unref();
Date.now = () => now() + offsetMs;

/**
 * Loaded into a process first (`NODE_OPTIONS=--import …`). Puts the process's wall clock off by the milliseconds in the file that `CHAOS_CLOCK_FILE`
 * names, as soon as the file changes. Timers and monotonic time stay, as when an operator sets the clock of a machine.
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

/**
 * Loaded into a process before anything else (`NODE_OPTIONS=--import …`). Its wall clock is off by the milliseconds in the file that
 * `CHAOS_CLOCK_FILE` names, from the moment that the file changes. Timers and monotonic time stay, as when an operator sets the clock of a machine.
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
    // Not there: the clock is right.
  }
};
look();
setInterval(look, LOOK_EVERY_MS).unref();
Date.now = () => now() + offsetMs;

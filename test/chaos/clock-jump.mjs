/**
 * Loaded into a process before anything else (`NODE_OPTIONS=--import …`): its wall clock is off by as many milliseconds as the file says that `CHAOS_CLOCK_FILE`
 * names, from whenever the file says so. Timers and monotonic time are left alone, as when somebody sets the clock of a machine.
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

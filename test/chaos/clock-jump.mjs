/**
 * Shifts the wall clock of a process that loads this file first (`NODE_OPTIONS=--import …`). The file in `CHAOS_CLOCK_FILE` holds the shift in
 * milliseconds. Timers and monotonic time do not change.
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

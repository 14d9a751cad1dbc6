/** A run as a story to read: its events in order, with short names for ids, and then the violations. */
import type { RunResult } from './run.js';

const UUID = /[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}/g;

export const story = ({ seed, lines, violations, statistics, payments, simulatedMs }: RunResult): string => {
  const names = new Map<string, string>();
  const short = (text: string) =>
    text.replace(UUID, (id) => {
      if (!names.has(id)) names.set(id, `#${names.size + 1}`);
      return names.get(id)!;
    });
  const told = lines.map((line) => {
    const [ms = '0', who = '', what = ''] = line.split('\t');
    return `${(Number(ms) / 1000).toFixed(3).padStart(10)}  ${who.padEnd(7)} ${short(what)}`;
  });
  const { calls, drops, lost, late, crashes, pauses } = statistics;
  const summary = `seed ${seed}: ${payments} payments, ${calls} port calls, ${drops} drops, ${lost} lost replies, ${late} late effects, ${crashes} crashes, ${pauses} pauses in ${(simulatedMs / 3_600_000).toFixed(1)} h`;
  const verdict = violations.length === 0 ? ['no violation'] : violations.map((violation) => `VIOLATION: ${short(violation)}`);
  return [...told, '', summary, ...verdict].join('\n');
};

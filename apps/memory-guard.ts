/** In production, nothing may show the memory of a process or write it to disk, because card numbers pass through it (docs/contract.md#card-data). */
import { existsSync, readFileSync } from 'node:fs';
import inspector from 'node:inspector';
import type { Logger } from '#platform';

/** Flags of Node that show memory or what TLS protects, or write it to a file. Node reads `_` and `-` in a flag as the same. */
const SHOWS_MEMORY = /^--(inspect|heapsnapshot|heap-prof|report|abort-on-uncaught-exception|tls-keylog|trace-tls)/;

/** The flags of NODE_OPTIONS as Node reads them: blanks end a flag, except within double quotes, where a backslash stands before any character. */
const flagsOf = (nodeOptions: string): string[] => {
  const flags = [''];
  let quoted = false;
  for (let at = 0; at < nodeOptions.length; at++) {
    const character = nodeOptions[at]!;
    if (character === '"') quoted = !quoted;
    else if (quoted && character === '\\') flags[flags.length - 1] += nodeOptions[++at] ?? '';
    else if (!quoted && /\s/.test(character)) flags.push('');
    else flags[flags.length - 1] += character;
  }
  return flags;
};

/** The first flag that shows memory. undefined: there is none. */
export const memoryFlag = (execArgv: readonly string[], nodeOptions: string): string | undefined =>
  [...execArgv, ...flagsOf(nodeOptions)].map((flag) => flag.replaceAll('_', '-')).find((flag) => SHOWS_MEMORY.test(flag));

/** Throws an error of one line if something is on that shows memory or writes it to disk. */
export const refuseMemoryDumps = (): void => {
  const flag = memoryFlag(process.execArgv, process.env.NODE_OPTIONS ?? '');
  if (flag) throw new Error(`${flag} is refused in production: it can show card data that is in memory`);
  if (inspector.url() !== undefined) throw new Error('an inspector is open; production refuses it, because it can show card data that is in memory');
  const { reportOnSignal, reportOnFatalError, reportOnUncaughtException } = process.report;
  if (reportOnSignal || reportOnFatalError || reportOnUncaughtException)
    throw new Error('diagnostic reports are on; production refuses them, because they can show secrets that are in memory');
  const limits = existsSync('/proc/self/limits') ? readFileSync('/proc/self/limits', 'utf8') : '';
  const coreLimit = /^Max core file size\s+(\S+)/m.exec(limits)?.[1];
  if (coreLimit !== undefined && coreLimit !== '0') throw new Error('core dumps are on; production needs a core file size limit of 0 (ulimit -c 0)');
};

/** Takes SIGUSR1, at which Node would open its inspector. */
export const takeInspectorSignal = (log: Logger): void => {
  process.on('SIGUSR1', () => log.warn('SIGUSR1 was ignored: in production no inspector is opened'));
};

/**
 * A full disk. Postgres and the processor keep their files on a small file system of their own. While partners pay, this file system is full for some
 * seconds. A process that cannot write must refuse the request or die. It must never acknowledge data that it did not write. Afterwards all records
 * must agree. Needs root, since only root may mount.
 */
import { spawnSync } from 'node:child_process';
import { closeSync, openSync, rmSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Random } from '../../apps/demo/city.js';
import { startInstallation } from './installation.js';
import { bringToEnd, judge, type Verdict } from './judge.js';
import { Partners } from './partners.js';

/** Postgres needs some 70 MB before the first payment. */
const SIZE = '320m';
const PATIENCE_MS = 8_000;
const CLERKS = 8;
/** Times within a round, in milliseconds. */
const BEFORE_MS = { least: 500, most: 4_000 } as const;
const FULL_MS = { least: 4_000, most: 12_000 } as const;
const CHUNK = Buffer.alloc(1024 * 1024);

export interface DiskReport extends Verdict {
  readonly rounds: number;
  readonly intentions: number;
  readonly returns: number;
  readonly requests: Partners['figures'];
  /** Processes that ended when they could not write. */
  readonly endedByItself: number;
}

/** True if this process may mount a file system. */
export const mayMount = (): boolean => process.getuid?.() === 0 && spawnSync('unshare', ['--mount', 'true']).status === 0;

export const proveDisk = async (random: Random, rounds: number, onProgress: (line: string) => void = () => undefined): Promise<DiskReport> => {
  let filler = '';
  const installation = await startInstallation(random, {
    prepare: (data) => {
      filler = join(data, 'filler');
      run('mount', ['-t', 'tmpfs', '-o', `size=${SIZE},mode=711`, 'payfold-chaos', data]);
    },
    release: (data) => run('umount', [data]),
  });
  const { parts } = installation;
  try {
    const partners = new Partners(installation.urls, installation.apiKey, installation.portalId, 'disk', PATIENCE_MS);
    let verdict: Verdict | null = null;
    let round = 0;
    while (round < rounds && (verdict?.violations.length ?? 0) === 0) {
      round += 1;
      const since = { charges: partners.charges.length };
      const working = partners.work(CLERKS, random);
      await sleep(random.int(BEFORE_MS.least, BEFORE_MS.most));
      parts.postgres.mayEnd = parts.simulator.mayEnd = true;
      fill(filler);
      await sleep(random.int(FULL_MS.least, FULL_MS.most));
      const before = partners.figures.answers;
      rmSync(filler);
      partners.close();
      await Promise.all([parts.postgres.ready(), parts.simulator.ready()]);
      parts.postgres.mayEnd = parts.simulator.mayEnd = false;
      await installation.heal();
      await working;
      await bringToEnd(installation, partners, random);
      verdict = await judge(installation, partners, since);
      verdict = { ...verdict, violations: [...installation.faults(), ...partners.violations, ...verdict.violations] };
      onProgress(
        `round ${round}: ${partners.charges.length} intentions, ${before} answers, ${verdict.payments} payments, ${verdict.violations.length} violations`,
      );
    }
    partners.end();
    return {
      ...verdict!,
      rounds: round,
      intentions: partners.charges.length,
      returns: partners.returns.length,
      requests: partners.figures,
      endedByItself: parts.postgres.deaths.byItself + parts.simulator.deaths.byItself,
    };
  } finally {
    await installation.remove();
  }
};

const fill = (file: string): void => {
  const descriptor = openSync(file, 'w');
  try {
    for (let size = CHUNK.length; size >= 1;) {
      try {
        writeSync(descriptor, CHUNK, 0, size);
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code !== 'ENOSPC') throw error;
        size = Math.floor(size / 2);
      }
    }
  } finally {
    closeSync(descriptor);
  }
};

const run = (command: string, args: readonly string[]): void => {
  const { status, stderr } = spawnSync(command, args, { encoding: 'utf8' });
  if (status !== 0) throw new Error(`${command} ${args.join(' ')}: ${stderr}`);
};

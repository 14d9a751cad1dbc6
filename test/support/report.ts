/** The reports of the long proofs: one JSON line for each run in `reports/`, with the commit. Also a progress bar. */
import { execFileSync } from 'node:child_process';
import { appendFileSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { SingleBar } from 'cli-progress';

const ROOT = process.cwd();

/** Appends a line to `reports/<name>.ndjson` of the checkout. */
export const writeReport = (name: string, figures: Readonly<Record<string, unknown>>): void => {
  mkdirSync(join(ROOT, 'reports'), { recursive: true });
  const line = { at: new Date().toISOString(), commit: commit(), node: process.version, ...figures };
  appendFileSync(join(ROOT, 'reports', `${name}.ndjson`), `${JSON.stringify(line)}\n`);
};

/** The commit of the checkout, with `+` if files outside of `reports/` have changed. null: not a checkout. */
const commit = (): string | null => {
  try {
    const git = (...args: string[]) => execFileSync('git', args, { cwd: ROOT, encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).trim();
    return git('rev-parse', '--short', 'HEAD') + (git('status', '--porcelain', '--untracked-files=no', '--', '.', ':!reports') === '' ? '' : '+');
  } catch {
    return null;
  }
};

export const progress = (name: string, total: number | null): { update(done: number): void; stop(): void } => {
  if (!process.stderr.isTTY) return { update: () => undefined, stop: () => undefined };
  const format = total === null ? `${name} {value}` : `${name} {bar} {percentage} % | {value}/{total} | {eta_formatted} left`;
  const bar = new SingleBar({ format, hideCursor: true, fps: 5, stream: process.stderr });
  bar.start(total ?? 0, 0);
  return { update: (done) => bar.update(done), stop: () => bar.stop() };
};

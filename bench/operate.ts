/** Runs `payfold` beside a service, and measures its time and memory. */
import { spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { type BenchService, endedChildrenMs, rssMib } from './service.js';

const OPERATOR = fileURLToPath(new URL('../apps/operator/main.js', import.meta.url));
const SAMPLE_MS = 250;

export interface Operated {
  readonly exitCode: number | null;
  readonly stdout: string;
  readonly stderr: string;
  readonly seconds: number;
  /** Processor time of the command alone. Postgres works for it too. Right only while no other child of this process ends. */
  readonly cpuMs: number;
  readonly peakMib: number;
}

export const operate = async ({ dataDir }: Pick<BenchService, 'dataDir'>, ...args: readonly string[]): Promise<Operated> => {
  const started = performance.now();
  const before = endedChildrenMs();
  const child = spawn(process.execPath, [OPERATOR, '--json', '--yes', ...args], {
    env: { ...process.env, DATA_DIR: dataDir, LOG_LEVEL: 'error' },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let [stdout, stderr, peakMib] = ['', '', 0];
  child.stdout.on('data', (chunk: Buffer) => (stdout += chunk.toString()));
  child.stderr.on('data', (chunk: Buffer) => (stderr += chunk.toString()));
  const sampler = setInterval(
    () =>
      void rssMib(child.pid!).then(
        (mib) => (peakMib = Math.max(peakMib, mib)),
        () => undefined,
      ),
    SAMPLE_MS,
  );
  const exitCode = await new Promise<number | null>((done) => child.once('close', done));
  clearInterval(sampler);
  return { exitCode, stdout, stderr, seconds: (performance.now() - started) / 1_000, cpuMs: endedChildrenMs() - before, peakMib };
};

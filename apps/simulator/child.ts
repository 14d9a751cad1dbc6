/** Runs the simulator as a child process of the standalone service, the command line or a test. */
import { spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

/** A start takes some seconds, but the first one reads the whole journal of an older release. Four million records take some minutes. */
const START_TIMEOUT_MS = 30 * 60_000;
/** Longer than the 2 s for which a stopping simulator waits for answers in flight. */
const STOP_TIMEOUT_MS = 10_000;

export interface SimulatorProcess {
  readonly url: string;
  readonly pid: number;
  /** Resolves with exit code and signal when the process is gone. */
  readonly exited: Promise<{ readonly code: number | null; readonly signal: NodeJS.Signals | null }>;
  /** Sends SIGTERM, and SIGKILL if the process does not end in time. Resolves when the process is gone. */
  stop(): Promise<void>;
  /** `kill -9`. Resolves when the process is gone. */
  kill(): Promise<void>;
}

export interface SimulatorProcessOptions {
  readonly dataDir: string;
  /** 0 or omitted: any free port. */
  readonly port?: number;
  readonly logLevel?: string;
  /** The time of day, in UTC, at which the simulator closes its batches. null: batches close only on request. */
  readonly closeBatchesAt?: string | null;
  /** Called with each line of the simulator's log. */
  readonly onLog?: (line: string) => void;
  /** Ends a start that is under way. */
  readonly stop?: AbortSignal | undefined;
  /** Path of the built `main.js`. Needed only if this file runs without a build. */
  readonly entry?: string;
}

/**
 * Starts the simulator and waits until it listens. If this fails, throws an error with the simulator's stderr. The simulator also ends if this
 * process is killed.
 */
export const startSimulatorProcess = async (options: SimulatorProcessOptions): Promise<SimulatorProcess> => {
  const { dataDir, port = 0, logLevel = 'info', closeBatchesAt = null, onLog = () => undefined } = options;
  const entry = options.entry ?? fileURLToPath(new URL('./main.js', import.meta.url));
  // The child gets only these variables. It needs none of our addresses and secrets.
  const env = { DATA_DIR: dataDir, SIMULATOR_PORT: String(port), SIMULATOR_BATCH_CLOSE: closeBatchesAt ?? 'off', LOG_LEVEL: logLevel };
  const child = spawn(process.execPath, ['--enable-source-maps', entry], { env, stdio: ['ignore', 'pipe', 'pipe', 'ipc'] });
  const exited = new Promise<{ code: number | null; signal: NodeJS.Signals | null }>((resolve) => {
    child.once('exit', (code, signal) => resolve({ code, signal }));
    child.once('error', () => resolve({ code: null, signal: null }));
  });

  const said: string[] = [];
  createInterface(child.stderr!).on('line', (line) => {
    if (said.length < 20) said.push(line);
    onLog(line);
  });
  const ready = new Promise<{ url: string }>((resolve) => {
    createInterface(child.stdout!).once('line', (line) => resolve(JSON.parse(line) as { url: string }));
  });
  const timeout = setTimeout(() => child.kill('SIGKILL'), START_TIMEOUT_MS);
  const onStop = () => void child.kill('SIGTERM');
  options.stop?.addEventListener('abort', onStop, { once: true });
  if (options.stop?.aborted) onStop();
  const started = await Promise.race([ready, exited.then(() => null)]);
  options.stop?.removeEventListener('abort', onStop);
  clearTimeout(timeout);
  if (!started) throw new Error(`the simulator did not start: ${said.join(' | ') || 'it said nothing'}`);

  const end = async (signal: NodeJS.Signals) => {
    child.kill(signal);
    const force = setTimeout(() => child.kill('SIGKILL'), STOP_TIMEOUT_MS);
    await exited;
    clearTimeout(force);
  };
  return { url: started.url, pid: child.pid!, exited, stop: () => end('SIGTERM'), kill: () => end('SIGKILL') };
};

/** The role `simulator`: the sandbox card processor as a process. Prints one JSON line when it listens. */
import { join } from 'node:path';
import { ConfigError, createLogger, NotOurs, readConfig, requireOwnFolderOrNone } from '#platform';
import { whenNpmIsGone } from '../npm-parent.js';
import { startSimulator } from './server.js';
import { StoreRefused } from './store.js';

const run = async (): Promise<void> => {
  const config = readConfig();
  const logger = createLogger(config.logLevel, 'simulator');
  const directory = join(config.dataDir, 'simulator');
  requireOwnFolderOrNone(directory);
  const simulator = await startSimulator({
    directory,
    host: config.host,
    port: config.simulatorPort,
    closeBatchesAt: config.simulatorBatchClose,
    controls: config.environment === 'sandbox',
    onLog: (line) => logger.info(line),
    // After a failed write the process must end. Only a restart reads the file again.
    onFailure: () => process.exit(1),
  });
  const stop = () => void simulator.close().then(() => process.exit(0));
  process.on('SIGTERM', stop);
  // With a parent process (an IPC channel), the simulator ends when the parent ends. It then ignores Ctrl-C and a closed terminal, because the parent
  // still has calls to make.
  process.on('disconnect', stop);
  whenNpmIsGone(stop);
  for (const signal of ['SIGINT', 'SIGHUP'] as const) process.on(signal, process.connected ? () => undefined : stop);
  process.stdout.write(`${JSON.stringify({ ready: 'simulator', url: simulator.url, pid: process.pid })}\n`);
};

run().catch((error: unknown) => {
  const system = error as NodeJS.ErrnoException;
  const known = error instanceof ConfigError || error instanceof NotOurs || error instanceof StoreRefused || typeof system.code === 'string';
  process.stderr.write(`${known ? system.message : (system.stack ?? String(error))}\n`);
  process.exit(1);
});

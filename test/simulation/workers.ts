/** Processes that do pieces of work, for the commands and for the specs. */
import { type ChildProcess, fork } from 'node:child_process';
import { join } from 'node:path';
import { type Done, type Piece, work } from './work.js';

/** The built program. Called with `worker`, it does the pieces that its parent sends. */
const PROGRAM = join(process.cwd(), 'dist', 'test', 'simulation', 'main.js');
/**
 * The processes use all cores, so garbage collection gets no extra threads. With a young generation of 64 MiB, V8 collects it a third as often as by
 * default.
 */
const WORKER_OPTIONS = ['--enable-source-maps', '--single-threaded-gc', '--max-semi-space-size=64'];

type Message = { readonly run: number } | { readonly done: Done };

/** The process ends when it is disconnected. */
export const startWorker = (): ChildProcess => fork(PROGRAM, ['worker'], { execArgv: WORKER_OPTIONS });

/** Has a worker do one piece. */
export const doPiece = (child: ChildProcess, piece: Piece, onRuns: (runs: number) => void = () => undefined): Promise<Done> =>
  new Promise((resolve, reject) => {
    if (!child.connected) throw new Error('the worker has ended before');
    const onMessage = (message: Message) => {
      if ('run' in message) return onRuns(message.run);
      child.off('message', onMessage);
      child.off('exit', onExit);
      resolve(message.done);
    };
    const onExit = (code: number | null) => reject(new Error(`a worker ended with ${code} while it did ${JSON.stringify(piece)}`));
    child.on('message', onMessage);
    child.once('exit', onExit);
    child.send(piece);
  });

/** The part of a worker: does the pieces that its parent sends. */
export const doPieces = (): void => {
  // The stacks of errors are never printed. Making them would take a tenth of the time.
  Error.stackTraceLimit = 0;
  let pending = 0;
  process.on('message', (piece: Piece) => {
    const onRun = () => {
      if (++pending < 20) return;
      process.send!({ run: pending } satisfies Message);
      pending = 0;
    };
    void work(piece, onRun).then(
      (done) => process.send!({ done } satisfies Message),
      (error: unknown) => {
        console.error(error);
        process.exit(1);
      },
    );
  });
};

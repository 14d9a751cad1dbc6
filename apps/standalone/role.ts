/**
 * The API or the worker as a child process. The child reports its address, answers questions over its channel, and ends on SIGTERM or when its parent
 * is gone.
 */
import { fork } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import type { Writable } from 'node:stream';
import { fileURLToPath } from 'node:url';
import { systemClock, within } from '#kernel';
import { type Addresses, type Answer, type Answers, type FromChild, type Question, SUPERVISED } from '../lifecycle.js';
import type { Child } from './keep-running.js';

const ANSWER_TIMEOUT_MS = 15_000;
const SUPERVISOR_ID = randomUUID();

export interface RoleProcess extends Child {
  readonly addresses: Partial<Addresses>;
  /** Rejects if the process ends or cannot answer. */
  ask<Name extends keyof Answers>(name: Name): Promise<Answers[Name]>;
}

/**
 * Memory for new objects, in MiB (`npm run start:api` gives the same). With Node's 16 MiB, a large page of the list is copied several times before it is
 * answered, which costs a sixth of its processor time.
 */
const YOUNG_OBJECTS = '--max-semi-space-size=32';

/**
 * Starts the role and waits until it is ready. If it does not start, throws the role's error line. The child holds `lifeline` open while it lives.
 * `stop` ends a start that is under way.
 */
export const startRole = async (
  role: 'api' | 'worker',
  env: NodeJS.ProcessEnv,
  lifeline: Writable | 'ignore',
  stop: AbortSignal,
): Promise<RoleProcess> => {
  stop.throwIfAborted();
  const child = fork(fileURLToPath(new URL(`../${role}/main.js`, import.meta.url)), [`${SUPERVISED}${SUPERVISOR_ID}`], {
    env,
    execArgv: [...process.execArgv, ...(role === 'api' ? [YOUNG_OBJECTS] : [])],
    // Metrics may be NaN, which JSON cannot express.
    serialization: 'advanced',
    stdio: ['ignore', 'inherit', 'inherit', 'ipc', lifeline],
  });
  const kill = () => child.kill('SIGKILL');
  // If this process exits first, the child must end too.
  process.once('exit', kill);
  const exited = new Promise<string>((resolve) => {
    child.on('exit', (code, signal) => resolve(signal ?? `code ${code}`)).on('error', (error) => resolve(error.message));
  }).finally(() => process.off('exit', kill));

  const first = new Promise<FromChild>((resolve) => child.once('message', resolve));
  const onStop = () => void child.kill('SIGTERM');
  stop.addEventListener('abort', onStop, { once: true });
  const started = await Promise.race([first, exited.then((how) => ({ refused: `the ${role} ended with ${how} before it was ready` }))]);
  stop.removeEventListener('abort', onStop);
  if (!('ready' in started)) {
    await exited;
    throw new Error('refused' in started ? started.refused : `the ${role} did not say whether it is ready`);
  }

  const waiting = new Map<number, { readonly resolve: (answer: never) => void; readonly reject: (error: Error) => void }>();
  let questions = 0;
  let ended = false;
  void exited.then((how) => {
    ended = true;
    for (const { reject } of waiting.values()) reject(new Error(`the ${role} ended with ${how}`));
  });
  child.on('message', ({ id, answer, error }: Answer) => {
    if (error === undefined) waiting.get(id)?.resolve(answer as never);
    else waiting.get(id)?.reject(new Error(error));
  });
  return {
    pid: child.pid!,
    addresses: started.ready,
    exited,
    ask: (ask) => {
      const id = ++questions;
      const answer = new Promise<Answers[typeof ask]>((resolve, reject) => {
        waiting.set(id, { resolve, reject });
        child.send({ id, ask } satisfies Question, (failed) => failed && reject(failed));
      }).finally(() => waiting.delete(id));
      return within(systemClock, ANSWER_TIMEOUT_MS, answer, () => new Error(`the ${role} does not answer`));
    },
    stop: async () => {
      if (ended) return;
      child.kill('SIGTERM');
      const how = await exited;
      if (how !== 'code 0') throw new Error(`the ${role} ended with ${how}`);
    },
  };
};

/**
 * The worker runs the subscribers that follow the log, the loops with fixed intervals, and the webhook dispatcher. Several workers may run at the
 * same time.
 */
import { setMaxListeners } from 'node:events';
import { finishSessions, postgresUnfinishedRows } from '#checkout';
import { dropUnusedShapes, type LogGate } from '#eventstore';
import { within } from '#kernel';
import { BrokenPromise, type Difference, ForgedHead, isWarning, runDuePasses, signLog, sweepDrift } from '#audit';
import { atStableTime, purgeKeys, purgeRefusals, purgeTries, purgeVelocity, sweepKeys } from '#payments';
import type { Logger, SandboxTime } from '#platform';
import { createRefundRecovery, recordDisputes, recordSettlements } from '#settlement';
import { purgeAttempts, purgeDelivered } from '#webhooks';
import type { Services } from '../services.js';

const RECOVERY_EVERY_MS = 5_000;
const SWEEP_EVERY_MS = 5_000;
/** How often a worker looks for feeds of processors that are due. */
const SETTLEMENT_EVERY_MS = 20_000;
const FINISH_CHECKOUTS_EVERY_MS = 5_000;
/** Time between two signed heads. A loss of events after the newest signed head is not visible in any head. */
const HEAD_EVERY_MS = 60_000;
const DRIFT_EVERY_MS = 5_000;
/** How often a worker looks for a verification pass that is due, or that a dead worker has left. */
const VERIFY_EVERY_MS = 60_000;
/** Pause of the sweep and of the passes after every 40 payments. So each compares at most 160 payments a second. */
const COMPARE_PAUSE_MS = 250;
const PURGE_EVERY_MS = 10 * 60_000;
/** How often a worker looks whether a new day has begun, whose retention it must apply. */
const RETENTION_EVERY_MS = 10 * 60_000;
const DROP_UNUSED_EVERY_MS = 60 * 60_000;
/** At a stop, work that takes longer is cut off, as by a crash. All of it survives that. Without the limit, reads of a store that is away add up. */
const WORK_ENDS_MS = 5_000;

interface Round {
  readonly name: string;
  run(): Promise<unknown>;
}

interface Loop extends Round {
  readonly everyMs: number;
}

export interface Worker {
  /** Completes the work at hand, but waits for it no longer than {@link WORK_ENDS_MS}. */
  stop(): Promise<void>;
}

/**
 * Runs one round of a loop. Does nothing in an incident: the round might act on events that are lost (C76). Does nothing while the time of a sandbox is
 * moved, or this process cannot read it: the round would take running attempts for old ones.
 */
export const playRound = async (
  round: Round,
  ownLog: Pick<LogGate, 'incident'>,
  log: Pick<Logger, 'warn'>,
  sandboxTime: Pick<SandboxTime, 'isOpen'> | null = null,
): Promise<void> => {
  if (ownLog.incident || sandboxTime?.isOpen === false) return;
  await round.run().catch((error: unknown) => log.warn({ err: error, loop: round.name }, 'a loop of the worker failed; it goes on'));
};

export const startWorker = (services: Services): Worker => {
  const { checkout, clock, config, log, ownLog, payments, pool, reactors, readModels, sandboxTime, settlement, webhooks } = services;
  const subscribers = [...Object.values(reactors), ...readModels.all()];
  const stop = new AbortController();
  // Rounds of several loops add listeners to this signal.
  setMaxListeners(0, stop.signal);
  /** Ends the pauses of all loops. */
  let wake = new AbortController();
  const wakeLoops = () => {
    wake.abort('woken');
    wake = new AbortController();
    // Every loop adds a listener to this signal.
    setMaxListeners(0, wake.signal);
  };
  wakeLoops();
  // After a move of the time, every loop looks at once for what is due now. Processors have closed batches meanwhile.
  let hasMoved = false;
  sandboxTime?.watch(() => {
    hasMoved = true;
    wakeLoops();
  });
  const refunds = createRefundRecovery(settlement, pool);
  const loops: readonly Loop[] = [
    { name: 'recovery', everyMs: RECOVERY_EVERY_MS, run: () => payments.recovery.round(stop.signal) },
    // Open exceptions even if recording failed. Some batches may have been recorded before the failure.
    {
      name: 'settlement',
      everyMs: SETTLEMENT_EVERY_MS,
      run: async () => {
        // The time must not move between the batches and the exceptions of one round. Otherwise charges from before a move seem to be in no batch.
        // A large batch takes minutes. It is left for after the move.
        const signal = sandboxTime ? AbortSignal.any([stop.signal, sandboxTime.closing]) : stop.signal;
        const onlyDue = !hasMoved;
        hasMoved = false;
        const recorded = () => recordSettlements(settlement, signal, { onlyDue });
        await atStableTime(payments.ports, () => recorded().finally(() => services.openExceptions(signal)));
      },
    },
    { name: 'disputes', everyMs: SETTLEMENT_EVERY_MS, run: () => recordDisputes(settlement, stop.signal, { onlyDue: true }) },
    { name: 'exception refunds', everyMs: RECOVERY_EVERY_MS, run: () => refunds.round(stop.signal) },
    { name: 'key sweeper', everyMs: SWEEP_EVERY_MS, run: () => sweepKeys(payments) },
    {
      name: 'checkout finisher',
      everyMs: FINISH_CHECKOUTS_EVERY_MS,
      run: () => finishSessions(checkout, postgresUnfinishedRows(pool), { stop: stop.signal }),
    },
    { name: 'key purge', everyMs: PURGE_EVERY_MS, run: () => purgeKeys(payments, stop.signal) },
    { name: 'drift', everyMs: DRIFT_EVERY_MS, run: () => lookForDrift(services, stop.signal) },
    { name: 'verification', everyMs: VERIFY_EVERY_MS, run: () => verifyWhatIsDue(services, stop.signal) },
    { name: 'log heads', everyMs: HEAD_EVERY_MS, run: () => signHeads(services) },
    { name: 'recovery purge', everyMs: PURGE_EVERY_MS, run: () => purgeTries(pool, stop.signal) },
    { name: 'intake purge', everyMs: PURGE_EVERY_MS, run: () => checkout.sessions.purge(clock.realNow(), stop.signal) },
    { name: 'velocity purge', everyMs: PURGE_EVERY_MS, run: () => purgeVelocity(pool, stop.signal) },
    { name: 'refusal purge', everyMs: PURGE_EVERY_MS, run: () => purgeRefusals(pool, clock.now(), stop.signal) },
    {
      name: 'unused read models',
      everyMs: DROP_UNUSED_EVERY_MS,
      run: async () => {
        for (const schema of await dropUnusedShapes(pool, readModels.models))
          log.info({ schema }, 'a shape of a read model that nobody uses was dropped');
      },
    },
    { name: 'retention', everyMs: RETENTION_EVERY_MS, run: () => services.retention.round(stop.signal) },
    { name: 'webhook attempt purge', everyMs: PURGE_EVERY_MS, run: () => purgeAttempts(pool, stop.signal) },
    { name: 'webhook purge', everyMs: PURGE_EVERY_MS, run: () => purgeDelivered(pool, config.webhooks.keepDays, stop.signal) },
  ];

  for (const reactor of Object.values(reactors)) reactor.start();
  // A worker serves no requests, but its key sweeper finishes keys. So the worker must compare the keys in the database with the log, too.
  void payments.claims.begun();
  const following = readModels.follow(stop.signal);
  webhooks.dispatcher.start();
  const running = loops.map(async (loop) => {
    while (!stop.signal.aborted) {
      await playRound(loop, ownLog, log, sandboxTime);
      if (!stop.signal.aborted) await clock.sleep(loop.everyMs, wake.signal);
    }
  });
  return {
    stop: async () => {
      stop.abort();
      wakeLoops();
      const ended = Promise.all([...running, following, webhooks.dispatcher.stop(), ...subscribers.map((subscriber) => subscriber.stop())]);
      const late = new Error(`the work of the worker did not end within ${WORK_ENDS_MS / 1_000} s and is cut off`);
      await within(clock, WORK_ENDS_MS, ended, () => late).catch((error: unknown) => {
        if (error !== late) throw error;
        log.warn(late.message);
      });
    },
  };
};

/** Signs the log. If the log no longer begins with the signed part, logs an error as an alarm and signs nothing. */
const signHeads = async ({ seal, log }: Services): Promise<void> => {
  try {
    await signLog(seal);
  } catch (error) {
    if (!(error instanceof BrokenPromise || error instanceof ForgedHead)) throw error;
    log.error({ err: error }, 'the log is not the one that was signed; run payfold audit verify');
  }
};

/** Pauses. Returns false if the worker must stop, or if the store has an incident. */
const pauseOrStop = async ({ clock, ownLog }: Services, stop: AbortSignal): Promise<boolean> => {
  await clock.sleep(COMPARE_PAUSE_MS, stop);
  return !stop.aborted && !ownLog.incident;
};

const reportDifferences = ({ log }: Services, differences: readonly Difference[]): void => {
  for (const { paymentId, kind, position, message } of differences.filter((one) => !isWarning(one)))
    log.error({ paymentId, kind, position, difference: message }, 'a payment is shown otherwise than its events say');
};

/** Compares the payments that changed with their events, and logs each difference as a fault or as tampering. */
const lookForDrift = async (services: Services, stop: AbortSignal): Promise<void> => {
  for (;;) {
    const swept = await sweepDrift(services.seal, () => pauseOrStop(services, stop));
    reportDifferences(services, swept?.differences ?? []);
    if (!swept || swept.level || !(await pauseOrStop(services, stop))) return;
  }
};

/** Runs the verification passes that are due. Logs each check that fails as an error. */
const verifyWhatIsDue = async (services: Services, stop: AbortSignal): Promise<void> => {
  const { seal, clock, ids, log } = services;
  await runDuePasses({
    ...seal,
    headFolder: seal.folder,
    clock,
    ids,
    goOn: () => pauseOrStop(services, stop),
    onDifferences: (differences) => reportDifferences(services, differences),
    onFailed: (pass, { name, detail }) => log.error({ pass, check: name, finding: detail }, 'a verification pass has found a fault'),
  });
};

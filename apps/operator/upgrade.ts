/** `payfold upgrade`: upgrades to the next release without a stop. The order of steps: docs/operations.md. */
import type { Command } from 'commander';
import { ServiceError, systemClock } from '#kernel';
import { clockOf, compareReleases, livingProcesses, migrate, missingMigrations, RELEASE, systemIds } from '#platform';
import { checkpointOf, prepareReadModels, shapeStatus } from '#eventstore';
import { loginName, table, type Terminal } from './terminal.js';
import type { UpgradeContext } from './upgrade-context.js';

export const addUpgrade = (program: Command, { action }: Terminal<UpgradeContext>): void => {
  const upgrade = program.command('upgrade').description('from one release to the next without a stop');

  upgrade
    .command('status')
    .description('releases that run, shapes of read models, and what is missing')
    .action(
      action(async (context) => {
        const status = await statusOf(context);
        return { json: status, text: inWords(status) };
      }),
    );

  upgrade
    .command('prepare')
    .description('expand the schema and build the read models of this release beside the old ones; done when they are level with the log')
    .action(
      action(async (context) => {
        const { MIGRATIONS } = await import('../services.js');
        const { pool, untilInterrupted } = context;
        const stop = untilInterrupted();
        const log = await context.ownLog(() => migrate(pool, MIGRATIONS, { stop }));
        const readModels = context.guardedReadModels(log);
        await prepareReadModels(pool, readModels.models, log);
        const done = new AbortController();
        const checking = log.run(done.signal);
        await readModels.follow(stop);
        await Promise.all(readModels.all().map((subscriber) => subscriber.stop()));
        done.abort();
        await checking;
        stop.throwIfAborted();
        const status = await statusOf(context);
        return { json: status, text: inWords(status) };
      }),
    );

  upgrade
    .command('finish')
    .description('remove what only older releases need; refused while a process of an older release lives')
    .action(
      action(async (context) => {
        const { MIGRATIONS } = await import('../services.js');
        const before = await statusOf(context);
        if (before.missing.length > 0)
          throw new ServiceError(
            'INVALID_STATE',
            `Release ${RELEASE} is not prepared: ${before.missing.join(', ')}. Run payfold upgrade prepare first.`,
          );
        const older = before.processes.filter(({ release }) => compareReleases(release, RELEASE) < 0);
        if (older.length > 0)
          throw new ServiceError(
            'INVALID_STATE',
            `Older processes live: ${older.map(({ role, release, host, pid }) => `${role} ${release} (process ${pid} on ${host})`).join(', ')}. Stop them first; nothing was changed.`,
          );
        const store = await context.ownLog();
        await migrate(context.pool, MIGRATIONS, { phase: 'contract' });
        const [{ changePostingRules }, { operator }] = await Promise.all([import('#ledger'), import('#payments')]);
        const ids = systemIds(() => systemClock.realNow());
        await changePostingRules({ store, clock: await clockOf(context.pool), ids }, operator(loginName(), ids.uuid()));
        await store.keepMarks();
        const status = await statusOf(context);
        return { json: status, text: inWords(status) };
      }),
    );
};

interface UpgradeStatus {
  readonly release: string;
  readonly processes: readonly { readonly role: string; readonly release: string; readonly host: string; readonly pid: number }[];
  readonly readModels: readonly {
    readonly name: string;
    readonly shape: number;
    readonly ofThisRelease: boolean;
    readonly built: boolean;
    readonly position: string | null;
    /** Number of events between the read model's position and the head. null: positions of this store do not count events. */
    readonly lagEvents: number | null;
  }[];
  /** Remaining work of `prepare`: names of migrations, and of read models whose shape is absent or not built. */
  readonly missing: readonly string[];
  /** Remaining work of `finish`: names of migrations. */
  readonly unfinished: readonly string[];
}

const statusOf = async ({ pool, store, readModels }: UpgradeContext): Promise<UpgradeStatus> => {
  const { MIGRATIONS } = await import('../services.js');
  const expand = await missingMigrations(pool, MIGRATIONS);
  const unfinished = await missingMigrations(pool, MIGRATIONS, 'contract');
  const has = async (name: string) => (await pool.query<{ found: boolean }>('select to_regclass($1) is not null as found', [name])).rows[0]!.found;
  const shapes = (await has('public.read_model')) ? await shapeStatus(pool) : [];
  const processes = (await has('public.payfold_process')) ? await livingProcesses(pool) : [];
  const head = await store.head();
  const lagOf = (position: string | null) => {
    if (head === null || position === head) return 0;
    return /^\d+$/.test(head) ? Number(BigInt(head) - BigInt(position ?? 0)) : null;
  };
  const ours = readModels.models.map(checkpointOf);
  const notBuilt = ours.filter((checkpoint) => !shapes.some((shape) => checkpointOf(shape) === checkpoint && shape.isBuilt));
  return {
    release: RELEASE,
    processes: processes.map(({ role, release, host, pid }) => ({ role, release, host, pid })),
    readModels: shapes.map(({ name, shape, isBuilt, position }) => ({
      name,
      shape,
      ofThisRelease: ours.includes(checkpointOf({ name, shape })),
      built: isBuilt,
      position,
      lagEvents: lagOf(position),
    })),
    missing: [...expand, ...notBuilt],
    unfinished,
  };
};

const inWords = ({ release, processes, readModels, missing, unfinished }: UpgradeStatus): string =>
  [
    `release ${release}`,
    table(
      ['ROLE', 'RELEASE', 'HOST', 'PROCESS'],
      processes.map((one) => [one.role, one.release, one.host, String(one.pid)]),
    ),
    table(
      ['READ MODEL', 'SHAPE', 'THIS RELEASE', 'BUILT', 'LAG (EVENTS)'],
      readModels.map((one) => [one.name, String(one.shape), one.ofThisRelease ? 'yes' : 'no', one.built ? 'yes' : 'no', String(one.lagEvents ?? '')]),
    ),
    missing.length === 0 ? 'prepared' : `not prepared: ${missing.join(', ')}`,
    unfinished.length === 0 ? 'finished' : `not finished: ${unfinished.join(', ')}`,
  ].join('\n\n');

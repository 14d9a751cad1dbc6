/** `payfold log`: checks whether the event store is the log of this installation, and whether it is whole. First steps: docs/operations.md. */
import type { Command } from 'commander';
import {
  closeIncident,
  type Examined,
  type EventStore,
  examineLog,
  foundWhole,
  type Incident,
  installationIn,
  isWhole,
  keptIntents,
  type KnownMark,
  type MarkBook,
  openEventStore,
  postgresMarkBook,
  readStreams,
  StoreIncident,
  unheldMarks,
} from '#eventstore';
import { ServiceError, systemClock } from '#kernel';
import { openKeys, type Pool, systemIds, transaction } from '#platform';
import type { Unborne } from '#payments';
import { byOption, fields, table, type Terminal } from './terminal.js';
import type { UpgradeContext } from './upgrade-context.js';

interface ResumeOptions {
  readonly by: string;
  readonly reason: string;
}

/**
 * `stores` opens the stores without checking the log, because the commands here must also work on a wrong log. `terminal` opens the whole service for
 * one command.
 */
export const addLog = (program: Command, stores: Terminal<UpgradeContext>, terminal: Terminal): void => {
  const log = program.command('log').description('the event store: whether it is ours, and whole');

  log
    .command('status')
    .description('ids, head, checkpoints, marks and the open incident')
    .action(
      stores.action(async (context) => {
        if (!(await hasInstallation(context.pool)))
          return { json: { ...NO_INSTALLATION, store: context.where }, text: 'no installation: this database is new' };
        const known = await (await bookOf(context)).read();
        const { rows } = await context.pool.query<{ id: string; generation: number }>('select id, generation from installation');
        const status = {
          installationId: rows[0]?.id ?? null,
          installationInLog: await installationIn(context.store),
          generation: rows[0]?.generation ?? null,
          store: context.where,
          head: await context.store.head(),
          incident: known.incident && incidentOf(known.incident),
          checkpoints: known.checkpoints,
          marks: known.marks.map(markOf),
        };
        const head = fields([
          ['installation', status.installationId ?? 'none'],
          ['in the log', status.installationInLog ?? 'none'],
          ['generation', String(status.generation ?? '')],
          ['event store', status.store],
          ['head', status.head ?? 'empty'],
          ['incident', status.incident ? `${status.incident.message}; since ${status.incident.since}, found by ${status.incident.foundBy}` : 'none'],
        ]);
        const checkpoints = table(
          ['CHECKPOINT', 'POSITION'],
          status.checkpoints.map(({ name, position }) => [name, position]),
        );
        const marks = table(
          ['MARK', 'POSITION', 'EVENT', 'CONFIRMED'],
          status.marks.map((mark) => [mark.where, mark.position, mark.eventId, mark.confirmed ? 'yes' : 'no']),
        );
        return { json: status, text: [head, checkpoints, marks].join('\n\n') };
      }),
    );

  log
    .command('check')
    .description('whether the log has every mark, checkpoint and signed head, and bears out every list row and stored answer')
    .action(
      stores.action(async (context) => {
        const checked = await check(context);
        const lost = checked.places.filter(({ held }) => !held);
        const ok = lost.length === 0 && !speaksOfLost(checked);
        if (!ok) await openIncident(context, lost);
        return { json: { ok, ...checked }, text: inWords(checked), exitCode: ok ? 0 : 1 };
      }),
    );

  log
    .command('resume')
    .description('close the incident, once the right event store is back and holds everything')
    .addOption(byOption())
    .requiredOption('--reason <reason>', 'what was wrong; recorded')
    .action(
      terminal.action(async (context, { by, reason }: ResumeOptions) => {
        const { config, databaseUrl, pool, store } = context;
        const { incident } = await (await bookOf({ config, pool })).read();
        if (!incident) throw new ServiceError('INVALID_STATE', 'No incident of the event store is open.');
        const { payments, ownLog, ...services } = await context.services({ withGateway: true, mends: true });
        const checked = await check({ config, databaseUrl, pool: services.pool, store });
        const refuse = (why: string) => new ServiceError('INVALID_STATE', `${why}; nothing was changed.\n${inWords(checked)}`);
        if (!isWhole(checked.places) || speaksOfLost(checked)) throw refuse('The event store does not hold everything that it held');
        const { forgetFeeds } = await import('#settlement');
        const { compareKeys, endedCreates, finishEmptyCreates, paymentStream, PaymentStreams, postgresKeyRows, restoreIntents } =
          await import('#payments');
        // The guard refuses every append until the incident is closed. What is mended here must be in the log before that.
        const { clock, ids, personal, log: logger } = payments.ports;
        const installationId = await installationOf(pool);
        const unguarded: EventStore = await openEventStore(config.kurrentdbUrl, databaseUrl, logger, () => ({
          installationId,
          checkConnection: async () => {
            if ((await installationIn(unguarded)) !== installationId) throw new StoreIncident('the event store is not the log of this installation');
          },
        }));
        const ports = { ...payments.ports, ownLog: foundWhole, streams: new PaymentStreams(unguarded, clock, ids) };
        const kept = await keptIntents({ folder: config.marksDir, installationId });
        const mend = async () => [...(await restoreIntents(ports, kept)), ...(await finishEmptyCreates(ports, await endedCreates(services.pool)))];
        const ended = await mend().finally(() => unguarded.close());
        // The keys of lost intents may be lost with them. No request may claim them anew.
        const events = (
          await readStreams(
            store,
            ended.map(({ paymentId }) => paymentStream(paymentId)),
          )
        ).flat();
        await transaction(services.pool, (client) =>
          compareKeys({ store, answers: payments.answers, personal, clock }, postgresKeyRows(client), events),
        );
        const forgotten = unheldMarks(checked.places);
        // A batch or a dispute may have been recorded in the wrong log only, or its event is forgotten now. So all of them are read again.
        await forgetFeeds(services.pool);
        await closeIncident(services.pool, forgotten, { by, reason });
        await ownLog.begin();
        ownLog.refuse();
        const abandoned = ended.flatMap((one) => (one.ended === 'abandoned' ? one.paymentId : []));
        const lost = ended.flatMap((one) => (one.ended === 'lost' ? one.paymentId : []));
        const lines = [
          ...abandoned.map((paymentId) => `payment ${paymentId}: never charged, abandoned`),
          ...lost.map((paymentId) => `payment ${paymentId}: the log had lost its end; read its status, and the tasks of staff`),
        ];
        const json = { closed: incidentOf(incident), forgotten, abandoned, lost };
        return { json, text: [`closed: ${incident.message}`, inWords(checked), ...lines].join('\n') };
      }),
    );
};

const NO_INSTALLATION = { installationId: null, installationInLog: null, generation: null, head: null, incident: null, checkpoints: [], marks: [] };

const hasInstallation = async (pool: Pool): Promise<boolean> => {
  const { rows } = await pool.query<{ found: boolean }>(`select to_regclass('public.installation') is not null as found`);
  return rows[0]!.found;
};

/** Something that was acknowledged is missing, so nothing may be charged until a person has looked. Does nothing while an incident is open. */
const openIncident = async (context: Stores, lost: readonly Examined[]): Promise<void> => {
  const inLog = await installationIn(context.store);
  const [first] = lost;
  const message = first
    ? `it does not hold the event at ${first.position}, ${first.where}`
    : 'it does not bear out rows of the list or stored answers';
  const finding =
    inLog !== null && inLog !== (await installationOf(context.pool))
      ? { kind: 'other_log' as const, message: `it belongs to installation ${inLog}`, mark: null }
      : { kind: 'lost_events' as const, message, mark: null };
  await (await bookOf(context)).open(finding);
};

type Stores = Pick<UpgradeContext, 'config' | 'databaseUrl' | 'pool' | 'store'>;

/** Empty: the database has no installation. */
const installationOf = async (pool: Pool): Promise<string> => {
  const { rows } = await pool.query<{ id: string }>('select id from installation');
  return rows[0]?.id ?? '';
};

const bookOf = async ({ config, pool }: Pick<Stores, 'config' | 'pool'>): Promise<MarkBook> => {
  const processId = systemIds(() => systemClock.realNow()).uuid();
  const installationId = await installationOf(pool);
  return postgresMarkBook({ pool, folder: config.marksDir, installationId, processId, name: 'command', pid: process.pid, clock: systemClock });
};

interface Checked extends Unborne {
  readonly places: readonly Examined[];
}

const check = async (stores: Stores): Promise<Checked> => {
  const { config, pool, store } = stores;
  const [{ unborne }, { signedEnd }] = await Promise.all([import('#payments'), import('#audit')]);
  const head = () => signedEnd({ db: pool, keys: openKeys(config), folder: config.headsDir, now: () => systemClock.realNow() });
  return { places: await examineLog({ store, book: await bookOf(stores), signedHead: head }), ...(await unborne(pool, store)) };
};

const speaksOfLost = ({ listRows, storedAnswers }: Unborne): boolean => listRows.length + storedAnswers.length > 0;

const inWords = ({ places, listRows, storedAnswers }: Checked): string =>
  [
    table(
      ['REMEMBERED BY', 'POSITION', 'EVENT', 'IN THE LOG'],
      places.map(({ where, position, eventId, confirmed, held }) => [
        where,
        position,
        eventId ?? '',
        held ? 'yes' : confirmed ? 'LOST' : 'LOST; no check had found it',
      ]),
    ),
    `list rows that their streams do not bear out: ${listRows.length}${named(listRows)}`,
    `stored answers that their streams do not bear out: ${storedAnswers.length}${named(storedAnswers)}`,
  ].join('\n');

const NAMED_PAYMENTS = 20;
const named = (paymentIds: readonly string[]): string =>
  paymentIds.length === 0 ? '' : ` (${paymentIds.slice(0, NAMED_PAYMENTS).join(', ')}${paymentIds.length > NAMED_PAYMENTS ? ', …' : ''})`;

/** The first line of a report while an incident is open, with its end of line. */
export const incidentLine = (incident: Incident | null): string =>
  incident ? `AN INCIDENT OF THE EVENT STORE IS OPEN since ${incident.since}: ${incident.message}; run payfold log status\n` : '';

const incidentOf = ({ kind, message, mark, since, foundBy }: Incident) => ({ kind, message, position: mark?.position ?? null, since, foundBy });
const markOf = ({ where, mark, confirmed }: KnownMark) => ({ where, position: mark.position, eventId: mark.id, confirmed });

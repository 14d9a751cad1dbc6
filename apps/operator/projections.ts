/** `payfold projections`: the progress of the read models, and their rebuild from the log while the service runs. */
import type { Command } from 'commander';
import { rebuild } from '#eventstore';
import { createPool } from '#platform';
import { incidentLine } from './log.js';
import { progressBar, table, type Terminal, UsageError } from './terminal.js';

/** One connection holds the lock, one loads, two follow the log, one swaps the tables, and one is to spare. */
const REBUILD_CONNECTIONS = 6;

export const addProjections = (program: Command, { action }: Terminal): void => {
  const projections = program.command('projections').description('read models');

  projections
    .command('status')
    .description('position, lag and failure of each read model')
    .action(
      action(async (context) => {
        const services = await context.services({ mends: true });
        const rows = await Promise.all(
          [...services.readModels.all(), ...Object.values(services.reactors)].map(async (projection) => {
            const { name, position, head, lagEvents, lagMs, leased, failure } = await projection.status();
            return { name, position, head, lagEvents, lagMs, running: leased, failure: failure?.message ?? null };
          }),
        );
        const cells = rows.map((row) => [
          row.name,
          row.position ?? '',
          String(row.lagEvents ?? ''),
          String(row.lagMs ?? 'unknown'),
          row.running ? 'yes' : 'no',
          row.failure ?? '',
        ]);
        const { incident } = services.ownLog;
        const text = table(['NAME', 'POSITION', 'LAG (EVENTS)', 'LAG (MS)', 'RUNNING', 'FAILURE'], cells);
        return { json: rows, text: incidentLine(incident) + text, exitCode: incident ? 1 : 0 };
      }),
    );

  projections
    .command('rebuild')
    .description('make a read model again from the log and swap it in; readers are not interrupted')
    .argument('[name]', 'name of the read model')
    .option('--all', 'every read model')
    .action(
      action(async (context, name: string | undefined, { all = false }: { all?: boolean }) => {
        const stop = context.untilInterrupted();
        const { readModels, store, ownLog, clock } = await context.services({ mends: true });
        const names = readModels.models.map((model) => model.name);
        if (all === (name !== undefined) || (name !== undefined && !names.includes(name)))
          throw new UsageError(`name one of ${names.join(', ')}, or --all`);
        // Statements of this pool have no time limit, because they load whole tables and build indexes.
        const pool = createPool(context.databaseUrl, { name: 'rebuild', max: REBUILD_CONNECTIONS, statementTimeoutMs: 0 });
        const reports = [];
        try {
          for (const model of readModels.models) {
            if (!all && model.name !== name) continue;
            let bar: ReturnType<typeof progressBar> | undefined;
            // Positions of Postgres count events. Positions of KurrentDB do not, so show only the number of events read so far.
            const onProgress = ({ events, position, total }: { events: number; position: string; total: number | null }) =>
              (bar ??= progressBar(model.name, total)).update(total === null ? events : Number(position));
            try {
              reports.push(await rebuild(model, { store, pool, now: () => clock.realNow(), ownLog, stop, onProgress }));
            } finally {
              bar?.stop();
            }
          }
        } finally {
          await pool.end();
        }
        const cells = reports.map((report) => [
          report.name,
          report.position ?? '',
          String(report.events),
          report.seconds.toFixed(1),
          report.rows.map(({ table: one, live, rebuilt }) => `${one} ${rebuilt}${live === rebuilt ? '' : ` (was ${live})`}`).join(', '),
        ]);
        return { json: all ? reports : reports[0], text: table(['NAME', 'POSITION', 'EVENTS', 'SECONDS', 'ROWS'], cells) };
      }),
    );
};

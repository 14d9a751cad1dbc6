/** `payfold alerts`: what waits for people too long, and what does not agree. */
import type { Command } from 'commander';
import type { Incident } from '#eventstore';
import { decimal } from '#kernel';
import { allCaughtUp } from './audit.js';
import { incidentLine } from './log.js';
import { table, type Terminal } from './terminal.js';

/** An open incident as an alert. It is in no table of alerts, since the process that finds it must not need one. */
const alertOf = ({ kind, message, since }: Incident) => ({
  name: 'store_incident',
  severity: 'page',
  count: 1,
  cents: null,
  oldestAt: since,
  threshold: null,
  items: [{ kind, id: message, cents: null, at: since }],
});

export const addAlerts = (program: Command, { action }: Terminal): void => {
  program
    .command('alerts')
    .description('what waits for people too long, and what does not agree; exit 1 if an alert fires')
    .action(
      action(async ({ services }) => {
        const all = await services({ mends: true });
        const { findAlerts } = await import('#audit');
        const { incident } = all.ownLog;
        // In an incident nothing follows the log, so the figures are those of its begin.
        if (!incident) await allCaughtUp(all);
        const found = await findAlerts({ store: all.store, db: all.pool, nowMs: all.clock.now(), thresholds: all.config.alerts });
        const alerts = incident ? [alertOf(incident), ...found] : found;
        const fired = alerts.filter(({ count }) => count > 0);
        const rows = fired.map(({ name, severity, count, cents, oldestAt, threshold, items: [oldest] }) => [
          name,
          severity,
          String(count),
          cents === null ? '' : decimal(cents),
          oldestAt ?? '',
          threshold ?? '',
          oldest ? `${oldest.kind} ${oldest.id}` : '',
        ]);
        return {
          json: alerts,
          text:
            fired.length === 0
              ? 'no alert fires'
              : incidentLine(incident) + table(['ALERT', 'SEVERITY', 'COUNT', 'USD', 'OLDEST', 'THRESHOLD', 'FIRST'], rows),
          exitCode: fired.length === 0 ? 0 : 1,
        };
      }),
    );
};

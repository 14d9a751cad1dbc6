/** `payfold alerts`: what waits for people too long, and what does not agree. */
import type { Command } from 'commander';
import { decimal } from '#kernel';
import { allCaughtUp } from './audit.js';
import { table, type Terminal } from './terminal.js';

export const addAlerts = (program: Command, { action }: Terminal): void => {
  program
    .command('alerts')
    .description('what waits for people too long, and what does not agree; exit 1 if an alert fires')
    .action(
      action(async ({ services }) => {
        const all = await services();
        const { findAlerts } = await import('#audit');
        await allCaughtUp(all);
        const alerts = await findAlerts({ store: all.store, db: all.pool, nowMs: all.clock.now(), thresholds: all.config.alerts });
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
          text: fired.length === 0 ? 'no alert fires' : table(['ALERT', 'SEVERITY', 'COUNT', 'USD', 'OLDEST', 'THRESHOLD', 'FIRST'], rows),
          exitCode: fired.length === 0 ? 0 : 1,
        };
      }),
    );
};

/** `payfold settlement`: batches of the processor, and the lines of them that fit no payment. */
import type { Command } from 'commander';
import { decimal } from '#kernel';
import type { BatchSummary, SimulatorGateway } from '#payments';
import { table, type Terminal, UsageError, uuid } from './terminal.js';

/** A batch of a big day takes a while to be matched line by line. */
const CLOSE_MS = 15 * 60_000;

export const addSettlement = (program: Command, { action }: Terminal): void => {
  const settlement = program.command('settlement').description('settlement batches');

  settlement
    .command('close')
    .description('close the open batches (sandbox), then record every closed batch that is not recorded yet; safe to repeat')
    .option('--portal <portal>', 'close those of one portal only', uuid)
    .action(
      action(async ({ config, directory, caughtUp, services }, { portal: portalId }: { portal?: string }) => {
        if (config.environment !== 'sandbox')
          throw new UsageError('batches are closed by hand in the sandbox only; the worker records what the processor closes');
        const { recordSettlements } = await import('#payments');
        const all = await services({ withGateway: true });
        const { register } = all.settlement;
        await caughtUp();
        await register.caughtUp();
        const portal = portalId === undefined ? null : (await directory.portals()).find((one) => one.portalId === portalId);
        if (portal === undefined) throw new UsageError('there is no such portal');
        const mine = portal && [portal.gateway?.merchantAccount, portal.gateway?.feeMerchantAccount];

        const signal = AbortSignal.timeout(CLOSE_MS);
        const batches = new Map<string, BatchSummary>();
        for (const account of await register.accounts()) {
          if (mine && !mine.includes(account.merchantAccount)) continue;
          const gateway = all.payments.ports.gateways.find(account) as SimulatorGateway | null;
          const closed = await gateway?.closeBatch(account, signal);
          if (closed) batches.set(closed.batchId, closed);
        }
        for (const batch of await recordSettlements(all.settlement, signal)) batches.set(batch.batchId, batch);
        const rows = [...batches.values()];
        return {
          json: { batches: rows },
          text: table(
            ['BATCH', 'LINES', 'GROSS'],
            rows.map(({ batchId, count, amountCents }) => [batchId, String(count), decimal(amountCents)]),
          ),
        };
      }),
    );

  settlement
    .command('exceptions')
    .description('settlement lines that fit no payment, or not the way they should')
    .action(
      action(async ({ services }) => {
        const { register } = (await services()).settlement;
        await register.caughtUp();
        const rows = await register.exceptions();
        return {
          json: rows,
          text: table(
            ['EXCEPTION', 'KIND', 'BATCH', 'TRANSACTION', 'GROSS', 'EXPECTED', 'PAYMENT'],
            rows.map((row) => [
              row.exceptionId,
              row.kind,
              row.batchId,
              row.transactionId,
              decimal(row.grossCents),
              row.expectedCents === null ? '' : decimal(row.expectedCents),
              row.paymentId ?? '',
            ]),
          ),
        };
      }),
    );
};

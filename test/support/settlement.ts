/** A finance desk for specs: writes and imports settlement files, and reads the books and the exceptions. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { EVERYTHING } from '#accounts';
import { balances, bookSumCents, journalModel } from '#ledger';
import { collect } from '#platform';
import { type ExceptionRow, exceptionRows, type FileImported, importSettlementFile, type SettlementPorts } from '#settlement';
import type { Service } from './service.js';

export const FILE_HEAD = 'batch_id,closed_at,transaction_id,ref,type,gross_cents,fee_cents,net_cents,funded_on';

type Over = Partial<Record<'closed' | 'ref' | 'type' | 'gross' | 'fee' | 'net' | 'funded', string | number>>;

export interface SettlementDesk {
  /** The folder of the files. `close` deletes it. */
  readonly folder: string;
  /** The charge of the payment's principal. */
  transaction(paymentId: string): Promise<{ merchantAccount: string; transactionId: string; ref: string }>;
  /** A line of a file: a sale of 100.00 that settles now, changed by `over`. */
  line(batch: string, transactionId: string, over?: Over): string;
  /** A closing time for all lines of one batch. */
  closedNow(): string;
  written(text: string | Buffer): string;
  csv(...lines: string[]): string;
  importFile(file: string, merchantAccount?: string | null, ports?: SettlementPorts, again?: boolean): Promise<FileImported>;
  /** The number of events that imports write. The service may record other events at any time. */
  eventCount(): Promise<number>;
  /** Opens all exceptions that are due. Then returns those with this status. null: those that have not ended. */
  exceptions(status?: string | null): Promise<ExceptionRow[]>;
  /** Cents of the accounts with this prefix. Fails if the books do not sum to 0. */
  booked(): Promise<(prefix: string) => number>;
  close(): void;
}

export const settlementDesk = (service: Service): SettlementDesk => {
  const { services } = service;
  const folder = mkdtempSync(join(tmpdir(), 'payfold-file-'));
  let files = 0;
  const closedNow = () => new Date(service.clock.now()).toISOString();
  const written = (text: string | Buffer): string => {
    const file = join(folder, `${++files}.csv`);
    writeFileSync(file, text);
    return file;
  };
  return {
    folder,
    transaction: async (paymentId) => {
      await services.settlement.register.caughtUp();
      const { rows } = await services.pool.query<{ merchant_account: string; transaction_id: string; ref: string }>(
        `select merchant_account, transaction_id, ref from gateway_transaction where payment_id = $1 and leg = 'principal' and op = 'charge'`,
        [paymentId],
      );
      return { merchantAccount: rows[0]!.merchant_account, transactionId: rows[0]!.transaction_id, ref: rows[0]!.ref };
    },
    line: (batch, transactionId, over = {}) => {
      const { closed = closedNow(), ref = '', type = 'sale', gross = 10_000, fee = 230, funded = '' } = over;
      return [batch, closed, transactionId, ref, type, gross, fee, over.net ?? Number(gross) - Number(fee), funded].join(',');
    },
    closedNow,
    written,
    csv: (...lines) => written(`${[FILE_HEAD, ...lines].join('\n')}\n`),
    importFile: (file, merchantAccount = null, ports = services.settlement, again = false) =>
      importSettlementFile(
        ports,
        file,
        { merchantAccount, again, by: { actor: { type: 'operator', id: 'spec' }, correlationId: 'spec' } },
        AbortSignal.timeout(20_000),
      ),
    eventCount: async () => {
      const { rows } = await services.pool.query<{ count: string }>(
        `select count(*) as count from es.events where stream_id like 'settlement-%' or type in ('PaymentSettled', 'SettlementRejected', 'SettlementWithdrawn')`,
      );
      return Number(rows[0]!.count);
    },
    exceptions: async (status = null) => {
      await services.settlement.register.caughtUp();
      while ((await services.openExceptions()) > 0);
      return collect(exceptionRows(services.pool, EVERYTHING, { status, now: service.clock.now() }));
    },
    booked: async () => {
      await services.readModels.of(journalModel).runUntil((await services.store.head())!, { timeoutMs: 20_000 });
      const rows = await balances(services.pool, { asOf: null, effectiveTo: null });
      if (bookSumCents(rows) !== 0) throw new Error(`the books sum to ${bookSumCents(rows)}`);
      return (prefix) => rows.filter(({ account }) => account.startsWith(prefix)).reduce((sum, row) => sum + row.balanceCents, 0);
    },
    close: () => rmSync(folder, { recursive: true, force: true }),
  };
};

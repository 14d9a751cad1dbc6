/** `payfold settlement`: batches of the processor, and exceptions of their lines. */
import { type Command, InvalidArgumentError, Option } from 'commander';
import { decimal, ServiceError } from '#kernel';
import { collect, type Queryable } from '#platform';
import type { BatchSummary, ExceptionChange, Feed, Funding, Resolution, SendRequest } from '#settlement';
import type { SimulatorGateway } from '#gateways';
import type { Context } from './context.js';
import { anyText, byOption, fields, loginName, progressBar, table, type Terminal, UsageError, uuid, wholeNumber } from './terminal.js';

interface ResolveOptions {
  readonly as: Resolution;
  readonly portal?: string | null;
  readonly transaction?: string | null;
  readonly feeCents?: number;
  readonly send?: boolean;
  readonly last4?: string;
  readonly reason: string;
  readonly by: string;
}

interface ImportFlags {
  readonly merchantAccount?: string | null;
  readonly again?: boolean;
  readonly old?: boolean;
}

interface FundOptions {
  readonly merchantAccount?: string;
  readonly batch?: string;
  readonly on?: string;
  readonly feeCents?: number;
  readonly reference?: string;
  readonly file?: string;
  readonly old?: boolean;
  readonly correct?: boolean;
  readonly by: string;
}

const fundingOf = ({ merchantAccount, batch, on, feeCents = 0, reference }: Omit<FundOptions, 'file' | 'by' | 'old' | 'correct'>): Funding => {
  if (merchantAccount === undefined || batch === undefined || on === undefined || reference === undefined)
    throw new UsageError('name --merchant-account, --batch, --on and --reference, or a --file');
  return { merchantAccount, batchId: batch, on, feeCents, reference };
};

const lastFour = (text: string): string => {
  if (!/^\d{4}$/.test(text)) throw new InvalidArgumentError('It must be four digits.');
  return text;
};

/** The only gateway that closes batches on request. */
const SIMULATOR = 'simulator';

/** Matching the lines of a large batch takes minutes, and so does a long list of a processor. */
export const READ_MS = 15 * 60_000;

/** The batches of an answer, as a table. */
const batchTable = (batches: readonly BatchSummary[]): string =>
  table(
    ['BATCH', 'LINES', 'GROSS'],
    batches.map(({ batchId, count, amountCents }) => [batchId, String(count), decimal(amountCents)]),
  );

interface SyncedFeeds {
  readonly feeds: readonly Feed[];
  readonly text: string;
  readonly exitCode: 0 | 1;
}

/** The feeds after a `sync`. The exit code is 1 if one of them could not be read to its end. */
export const syncedFeeds = async (db: Queryable, name: Feed['feed'], account: string | null): Promise<SyncedFeeds> => {
  const { feedsOf } = await import('#settlement');
  const feeds = (await feedsOf(db, account)).filter(({ feed }) => feed === name);
  return {
    feeds,
    text: table(
      ['ACCOUNT', 'FEED', 'LAST READ', 'NEXT', 'ERROR'],
      feeds.map(({ merchantAccount, feed, lastOkAt, nextAt, error }) => [merchantAccount, feed, lastOkAt ?? 'never', nextAt, error ?? '']),
    ),
    exitCode: feeds.some(({ error }) => error !== null) ? 1 : 0,
  };
};

export const addSettlement = (program: Command, { action }: Terminal): void => {
  const settlement = program.command('settlement').description('settlement batches');

  settlement
    .command('close')
    .description('close the open batches of the simulator (sandbox), then record every closed batch that is not recorded yet; safe to repeat')
    .option('--portal <portal>', 'close those of one portal only', uuid)
    .action(
      action(async ({ config, directory, caughtUp, services }, { portal: portalId }: { portal?: string }) => {
        if (config.environment !== 'sandbox')
          throw new UsageError('batches are closed by hand in the sandbox only; the worker records what the processor closes');
        const { RecordSettlements } = await import('#settlement/module');
        const all = await services({ withGateway: true });
        // A batch that is closed at the processor could not be recorded.
        all.ownLog.refuse();
        const { register } = all.settlement;
        await caughtUp();
        await register.caughtUp();
        const portal = portalId === undefined ? null : (await directory.portals()).find((one) => one.portalId === portalId);
        if (portal === undefined) throw new UsageError('there is no such portal');
        if (portal?.gateway && portal.gateway.gateway !== SIMULATOR)
          throw new ServiceError(
            'INVALID_STATE',
            `Only the simulator closes batches on request; ${portal.gateway.gateway} closes its batches by itself.`,
          );
        const mine = portal && [portal.gateway?.merchantAccount, portal.gateway?.feeMerchantAccount];

        const signal = AbortSignal.timeout(READ_MS);
        const batches = new Map<string, BatchSummary>();
        for (const account of await register.accounts()) {
          if (account.gateway !== SIMULATOR || (mine && !mine.includes(account.merchantAccount))) continue;
          const gateway = all.payments.ports.gateways.find(account) as SimulatorGateway | null;
          const closed = await gateway?.closeBatch(signal);
          if (closed) batches.set(closed.batchId, closed);
        }
        for (const batch of await all.commands.execute(new RecordSettlements(signal))) batches.set(batch.batchId, batch);
        const rows = [...batches.values()];
        return {
          json: { batches: rows },
          text: batchTable(rows),
        };
      }),
    );

  settlement
    .command('sync')
    .description(
      'read the batches that processors have closed now, and record what is new; the worker does this every 15 minutes. Exit 1 if one cannot be read',
    )
    .option('--merchant-account <account>', 'of one merchant account only')
    .action(
      action(async ({ services, pool }, { merchantAccount = null }: { merchantAccount?: string | null }) => {
        const { RecordSettlements } = await import('#settlement/module');
        const all = await services({ withGateway: true });
        all.ownLog.refuse();
        const batches = await all.commands.execute(new RecordSettlements(AbortSignal.timeout(READ_MS), { merchantAccount }));
        const { feeds, text, exitCode } = await syncedFeeds(pool, 'settlement', merchantAccount);
        return { json: { batches, feeds }, text: `${batchTable(batches)}\n\n${text}`, exitCode };
      }),
    );

  settlement
    .command('fund')
    .description('record when the money of a batch reached the bank, and what the processor kept, if the processor names neither')
    .option('--merchant-account <account>', 'the account that was charged')
    .option('--batch <batch>', 'the batch')
    .option('--on <day>', 'the day on which the bank got the money, YYYY-MM-DD')
    .option('--fee-cents <cents>', 'what the processor kept of the batch; default 0', wholeNumber)
    .option('--reference <reference>', 'where this is written, such as the number of a statement; for the record', anyText)
    .option('--file <file>', 'a CSV file instead, with merchant_account,batch_id,funded_on,fee_cents,reference')
    .option('--old', 'a date may lie more than 400 days back')
    .option('--correct', 'the day that staff recorded was wrong; the books take it back')
    .addOption(byOption('name of the person who records it'))
    .action(
      action(async ({ services, ids }, { file, by, old = false, correct = false, ...options }: FundOptions) => {
        const { RecordFunding } = await import('#settlement/module');
        const [{ fundingsIn }, { staff }] = await Promise.all([import('#settlement'), import('#payments')]);
        const fundings = file === undefined ? [fundingOf(options)] : await fundingsIn(file);
        if (file !== undefined && Object.values(options).some((value) => value !== undefined))
          throw new UsageError('--file stands alone, with --by, --old and --correct');
        const { commands, ownLog } = await services();
        ownLog.refuse();
        const recorded = await commands.execute(new RecordFunding(fundings, staff(by, ids.uuid()), { old, correct }));
        const before = fundings.length - recorded;
        return {
          json: { recorded, before },
          text: fields([
            ['recorded', String(recorded)],
            ['recorded before', String(before)],
          ]),
        };
      }),
    );

  settlement
    .command('import')
    .description('import the processor’s file, CSV or NDJSON; the same file again does nothing, a corrected one supersedes what was recorded')
    .argument('<file>', 'file')
    .option('--merchant-account <account>', 'whose file it is, where it cannot be told from its transactions', anyText)
    .option('--again', 'import it although it was imported before: to return to it after another file')
    .option('--old', 'a date may lie more than 400 days back')
    .action(
      action(async ({ services, ids }, file: string, { merchantAccount = null, again = false, old = false }: ImportFlags) => {
        const all = await services();
        const { ImportSettlementFile } = await import('#settlement/module');
        const bar = progressBar('lines', null);
        const { staff } = await import('#payments');
        const by = staff(loginName(), ids.uuid());
        const options = { merchantAccount, again, old, by, onLines: (lines: number) => bar.update(lines) };
        const imported = await all.commands.execute(new ImportSettlementFile(file, options, AbortSignal.timeout(READ_MS))).finally(() => bar.stop());
        const exceptions = await all.openExceptions();
        const { batches, repeated, lines, corrected, sha256 } = imported;
        return {
          json: { batches, repeated, lines, corrected, exceptions, sha256 },
          text: repeated
            ? 'this file was imported before; nothing was done'
            : `${table(
                ['BATCH', 'LINES', 'GROSS'],
                batches.map(({ batchId, count, amountCents }) => [batchId, String(count), decimal(amountCents)]),
              )}\n\n${lines} lines, ${corrected} corrected, ${exceptions} new exceptions`,
        };
      }),
    );

  const exceptions = settlement
    .command('exceptions')
    .description('what the processor says and the books do not, or the other way round')
    .addOption(
      new Option('--status <status>', 'those of one status; the open ones otherwise').choices([
        'opened',
        'assigned',
        'explained',
        'resolved',
        'superseded',
      ]),
    )
    .action(
      action(async (context, { status = null }: { status?: string | null }) => {
        const all = await context.services();
        await all.settlement.register.caughtUp();
        await all.openExceptions();
        const { EVERYTHING } = await import('#accounts');
        const { exceptionRows } = await import('#settlement');
        const rows = await collect(exceptionRows(all.pool, EVERYTHING, { status, now: context.clock.now() }));
        return {
          json: rows,
          text: table(
            ['EXCEPTION', 'KIND', 'STATUS', 'DAYS', 'BATCH', 'TRANSACTION', 'SAYS', 'EXPECTED', 'SUSPENSE', 'PAYMENT'],
            rows.map((row) => [
              row.exceptionId,
              row.kind,
              row.status,
              String(row.ageDays ?? ''),
              row.batchId ?? '',
              row.transactionId ?? '',
              row.grossCents === null ? '' : decimal(row.grossCents),
              row.expectedCents === null ? '' : decimal(row.expectedCents),
              row.suspenseCents === 0 ? '' : decimal(row.suspenseCents),
              row.paymentId ?? '',
            ]),
          ),
        };
      }),
    );

  const changed = async (context: Context, exceptionId: string, change: ExceptionChange) => {
    // The processor is asked about a return that is adopted.
    const all = await context.services({ withGateway: change.type === 'Resolve' && change.resolution === 'adopt' });
    // First bring exceptions up to date. A corrected file may have removed the cause of this exception. Then the exception is superseded and the
    // change is refused.
    await all.settlement.register.caughtUp();
    await all.openExceptions();
    const { ChangeException } = await import('#settlement/module');
    const { staff } = await import('#payments');
    await all.commands.execute(new ChangeException(exceptionId, change, staff(change.by, context.ids.uuid())));
    await all.openExceptions();
    const booksOnly =
      change.type === 'Resolve' && change.resolution === 'refund' ? '\nOnly the books were changed. No money was sent to the card.' : '';
    return { json: { exceptionId, status: STATUS_AFTER[change.type] }, text: `${exceptionId} is ${STATUS_AFTER[change.type]}${booksOnly}` };
  };

  const sent = async (context: Context, request: SendRequest) => {
    const all = await context.services({ withGateway: true });
    // The refund could not be recorded.
    all.ownLog.refuse();
    await all.settlement.register.caughtUp();
    await all.openExceptions();
    const { SendRefund } = await import('#settlement/module');
    const { staff } = await import('#payments');
    const done = await all.commands.execute(new SendRefund(request, staff(request.by, context.ids.uuid())));
    await all.openExceptions();
    return {
      json: done,
      text: fields([
        ['exception', `${done.exceptionId} is ${done.status}`],
        ['refunded', decimal(done.amountCents)],
        ['transaction', done.transactionId],
        ['payment', done.paymentId ?? ''],
      ]),
    };
  };

  exceptions
    .command('assign')
    .description('say who looks after it')
    .argument('<exception>', 'exception id', uuid)
    .requiredOption('--to <name>', 'who')
    .addOption(byOption())
    .action(action((context, id: string, { to, by }: { to: string; by: string }) => changed(context, id, { type: 'Assign', to, by })));

  exceptions
    .command('explain')
    .description('say what it is, before it is resolved')
    .argument('<exception>', 'exception id', uuid)
    .requiredOption('--reason <reason>', 'what was found out')
    .addOption(byOption('who'))
    .action(action((context, id: string, { reason, by }: { reason: string; by: string }) => changed(context, id, { type: 'Explain', reason, by })));

  exceptions
    .command('resolve')
    .description('end it; what of it lies in suspense is posted to where it belongs')
    .argument('<exception>', 'exception id', uuid)
    .addOption(
      new Option(
        '--as <resolution>',
        'settles: a payment that stands as unsettled; refund: back to the cardholder (books only, unless --send); adopt: an agency’s money, or (RETURNED_ELSEWHERE) a return of the payment; no_posting',
      )
        .choices(['settles', 'refund', 'adopt', 'no_posting'])
        .makeOptionMandatory(),
    )
    .option('--portal <portal>', 'whose money it is (adopt)', uuid)
    .option('--transaction <id>', 'the processor’s id of the refund that was made elsewhere, if the exception names none (adopt)', anyText)
    .option(
      '--send',
      'refund only: sends the money of a sale, or of a refund that failed, to the card now; without it, refund changes the books only',
    )
    .option('--last4 <digits>', 'last four digits of the card, where the gateway asks for them (--send)', lastFour)
    .option('--fee-cents <cents>', 'of it, the service fee (adopt)', wholeNumber)
    .requiredOption('--reason <reason>', 'why; the evidence')
    .addOption(byOption())
    .action(
      action(
        async (context, id: string, { as, portal = null, transaction = null, feeCents = 0, send = false, last4, reason, by }: ResolveOptions) => {
          if (send && as !== 'refund') throw new UsageError('--send belongs to --as refund');
          if (transaction !== null && as !== 'adopt') throw new UsageError('--transaction belongs to --as adopt');
          if (last4 !== undefined && !send) throw new UsageError('--last4 belongs to --send');
          if (send && (portal !== null || feeCents !== 0)) throw new UsageError('--portal and --fee-cents belong to --as adopt');
          return send
            ? sent(context, { exceptionId: id, reason, by, last4: last4 ?? null })
            : changed(context, id, { type: 'Resolve', resolution: as, portalId: portal, feeCents, transactionId: transaction, reason, by });
        },
      ),
    );
};

const STATUS_AFTER = { Assign: 'assigned', Explain: 'explained', Resolve: 'resolved' } as const;

/** `payfold ledger`: balances of the books, and the journal as text for other tools. */
import { type Command, Option } from 'commander';
import { decimal, ServiceError, timestamp } from '#kernel';
import type { JournalFormat } from '#ledger';
import type { Services } from '../services.js';
import { byOption, day, fields, moment, print, table, type Terminal, UsageError, uuid, wholeNumber } from './terminal.js';

/** How long to wait for the journal. At its first run it reads the whole log. */
const CATCH_UP_MS = 30 * 60_000;

export const addLedger = (program: Command, { action }: Terminal): void => {
  const ledger = program.command('ledger').description('the double-entry books');

  ledger
    .command('balances')
    .description('debits, credits and balance (debits minus credits) of every account: assets are positive, debts are negative')
    .option('--as-of <time>', 'as it was known at a time', moment)
    .option('--effective-to <time>', 'only what had taken effect before a time', moment)
    .action(
      action(async ({ services }, { asOf = null, effectiveTo = null }: { asOf?: string | null; effectiveTo?: string | null }) => {
        const all = await services();
        await journalCaughtUp(all);
        const { balances } = await import('#ledger');
        const accounts = await balances(all.pool, { asOf, effectiveTo });
        return {
          json: { accounts },
          text: table(
            ['ACCOUNT', 'DEBIT', 'CREDIT', 'BALANCE'],
            accounts.map((one) => [one.account, decimal(one.debitCents), decimal(one.creditCents), decimal(one.balanceCents)]),
          ),
        };
      }),
    );

  ledger
    .command('journal')
    .description('every entry, in the order of the log')
    .addOption(new Option('--format <format>', 'what to write').choices(['csv', 'ndjson', 'hledger']).default('hledger'))
    .option('--from <time>', 'booked from a time on', moment)
    .option('--to <time>', 'booked before a time', moment)
    .action(
      action(async ({ services }, { format, from = null, to = null }: { format: JournalFormat; from?: string | null; to?: string | null }) => {
        if (from !== null && to !== null && from > to) throw new UsageError('--from lies after --to');
        const all = await services();
        const until = await journalCaughtUp(all);
        const { JOURNAL_START, journalHeading, journalPages, journalText } = await import('#ledger');
        await print(journalHeading(format));
        const text = journalText(format);
        for await (const page of journalPages(all.pool, JOURNAL_START, { from, to, until })) await print(page.map(text).join(''));
        return { json: null, text: '', printed: true };
      }),
    );

  ledger
    .command('adjust')
    .description('post an adjustment by hand: one account is debited, another credited')
    .requiredOption('--debit <account>', 'account of the chart')
    .requiredOption('--credit <account>', 'account of the chart')
    .requiredOption('--amount-cents <cents>', 'how much', wholeNumber)
    .option('--effective-at <time>', 'when it took effect; now otherwise', moment)
    .option('--old', 'a date may lie more than 400 days back')
    .requiredOption('--reason <reason>', 'why; for the record')
    .addOption(byOption())
    .option('--id <adjustment>', 'an id of your own, a UUID: sent again it posts nothing a second time', uuid)
    .action(
      action(async ({ services, clock, ids }, { debit, credit, amountCents: cents, effectiveAt, old, reason, by, id }: AdjustOptions) => {
        const all = await services();
        const { AdjustBooks } = await import('#ledger/module');
        const postings = [
          { account: debit, cents },
          { account: credit, cents: -cents },
        ];
        const adjustmentId = id ?? ids.uuid();
        const adjustment = { adjustmentId, postings, effectiveAt: effectiveAt ?? timestamp(clock.now()), reason, by };
        await all.commands.execute(new AdjustBooks(adjustment, old)).catch((error: unknown) => {
          if (error instanceof ServiceError) throw error;
          throw new Error(`adjustment ${adjustmentId} may have been posted; repeat the command with --id ${adjustmentId}: ${(error as Error).message}`, { cause: error }); // prettier-ignore
        });
        return { json: { adjustmentId, postings }, text: `adjustment ${adjustmentId}` };
      }),
    );

  ledger
    .command('remit')
    .description('record a payment to an agency, out of the balance owed to it; or take such a record back')
    .requiredOption('--portal <portal>', 'the agency’s portal', uuid)
    .addOption(byOption())
    .addOption(new Option('--amount-cents <cents>', 'how much was paid').argParser(wholeNumber).conflicts(['reverse', 'reason']))
    .addOption(new Option('--reference <text>', 'name of the payment at the bank; each counts once').conflicts(['reverse', 'reason']))
    .addOption(new Option('--advance', 'also more than the funded part').conflicts(['reverse', 'reason']))
    .option('--on <day>', 'the day of the payment or of taking it back, YYYY-MM-DD; today otherwise', day)
    .option('--old', 'a date may lie more than 400 days back')
    .option('--reverse <remittance>', 'take this remittance back by a second entry', uuid)
    .option('--reason <reason>', 'why it is taken back; for the record')
    .action(
      action(async ({ administration, services, ids }, options: RemitOptions) => {
        const { portal: portalId, by, on = null, amountCents: cents, reference, advance = false, old = false, reverse, reason } = options;
        if (reverse !== undefined && reason === undefined) throw new UsageError('--reverse needs --reason');
        if (reverse === undefined && (cents === undefined || reference === undefined))
          throw new UsageError('name --amount-cents and --reference, or --reverse and --reason');
        await administration.portal(portalId);
        const { commands } = await services();
        const { RemitToAgency, ReverseRemittance } = await import('#ledger/module');
        if (reverse !== undefined) {
          const done = await commands.execute(new ReverseRemittance({ remittanceId: reverse, portalId, on, reason: reason!, by, old }));
          const { cents: amountCents, ...rest } = done;
          return { json: { ...rest, amountCents }, text: `remittance ${reverse} of ${decimal(amountCents)} is taken back` };
        }
        const request = { remittanceId: ids.uuid(), portalId, cents: cents!, reference: reference!, on, advance, by, old };
        const done = await commands.execute(new RemitToAgency(request)).catch((error: unknown) => {
          if (error instanceof ServiceError) throw error;
          throw new Error(`the remittance may be recorded; repeat the command: if it is, its reference is refused: ${(error as Error).message}`, { cause: error }); // prettier-ignore
        });
        const { cents: amountCents, ...rest } = done;
        return {
          json: { ...rest, amountCents },
          text: fields([
            ['remittance', done.remittanceId],
            ['paid', decimal(amountCents)],
            ['payable before', decimal(done.payableCents)],
            ['of it settled', decimal(done.settledCents)],
            ['of it funded', decimal(done.fundedCents)],
          ]),
        };
      }),
    );
};

interface RemitOptions {
  readonly portal: string;
  readonly by: string;
  readonly amountCents?: number;
  readonly reference?: string;
  readonly advance?: boolean;
  readonly on?: string;
  readonly old?: boolean;
  readonly reverse?: string;
  readonly reason?: string;
}

interface AdjustOptions {
  readonly debit: string;
  readonly credit: string;
  readonly amountCents: number;
  readonly effectiveAt?: string;
  readonly old?: boolean;
  readonly reason: string;
  readonly by: string;
  readonly id?: string;
}

/** Brings the journal up to the end of the log. Returns that position. */
export const journalCaughtUp = async ({ readModels }: Services): Promise<string | null> => {
  const { journalModel } = await import('#ledger');
  return readModels.caughtUp(journalModel, CATCH_UP_MS);
};

/** `payfold disputes`: disputes of cardholders, recorded by staff. Each change of status or stage is one event and one webhook. */
import { type Command, Option } from 'commander';
import { decimal } from '#kernel';
import type { DisputeStatus, Leg } from '#payments';
import type { DisputeFacts } from '#settlement';
import { READ_MS, syncedFeeds } from './settlement.js';
import { type Answer, byOption, fields, table, type Terminal, UsageError, uuid, wholeNumber } from './terminal.js';

interface OpenOptions {
  readonly id?: string;
  readonly payment: string;
  readonly amountCents: number;
  readonly status: DisputeStatus;
  readonly leg?: Leg;
  readonly stage: string;
  readonly reasonCode: string;
  readonly reason: string;
  readonly openedOn: string;
  readonly dueDate: string;
  readonly old?: boolean;
  readonly by: string;
}

interface UpdateOptions {
  readonly amountCents?: number;
  readonly status?: DisputeStatus;
  readonly stage?: string;
  readonly by: string;
}

const statusOption = () => new Option('--status <status>', 'where the money is').choices(['debited', 'in_dispute', 'lost', 'recovered']);

export const addDisputes = (program: Command, { action }: Terminal): void => {
  const disputes = program.command('disputes').description('disputes of cardholders');

  disputes
    .command('open')
    .description('record a new dispute of a payment')
    .requiredOption('--payment <payment>', 'payment id', uuid)
    .requiredOption('--amount-cents <cents>', 'disputed amount, at most what was captured', wholeNumber)
    .addOption(statusOption().makeOptionMandatory())
    .requiredOption('--stage <stage>', 'the processor’s word for the step, such as chargeback')
    .requiredOption('--reason-code <code>', 'reason code of the card network')
    .requiredOption('--reason <reason>', 'the reason in words')
    .requiredOption('--opened-on <day>', 'YYYY-MM-DD')
    .requiredOption('--due-date <day>', 'the day by which it must be answered, YYYY-MM-DD; at most 180 days from now')
    .option('--old', 'a date may lie more than 400 days back')
    .addOption(
      new Option('--leg <leg>', 'the charge that the processor named, where the fee was charged apart').choices(['principal', 'fee', 'combined']),
    )
    .option('--id <dispute>', 'an id of your own, a UUID: sent again it opens no second dispute', uuid)
    .addOption(byOption('name of the person who records it'))
    .action(
      action(async ({ services, ids }, { id, payment: paymentId, amountCents, by, old = false, ...rest }: OpenOptions) => {
        const { OpenDispute } = await import('#settlement/module');
        const { staff } = await import('#payments');
        const { commands, settlement } = await services();
        const terms = { disputeId: id ?? ids.uuid(), disputedAmountCents: amountCents, ...rest };
        const dispute = await commands.execute(new OpenDispute(paymentId, terms, staff(by, ids.uuid()), old));
        await settlement.register.caughtUp();
        return answer({ ...dispute, paymentId });
      }),
    );

  disputes
    .command('update')
    .description('record that a dispute has moved on')
    .argument('<dispute>', 'dispute id', uuid)
    .addOption(statusOption())
    .option('--stage <stage>', 'the processor’s word for the step')
    .option('--amount-cents <cents>', 'the disputed amount, if the processor has corrected it', wholeNumber)
    .addOption(byOption('name of the person who records it'))
    .action(
      action(async ({ services, ids }, disputeId: string, { status, stage, amountCents, by }: UpdateOptions) => {
        if (status === undefined && stage === undefined && amountCents === undefined)
          throw new UsageError('name a --status, a --stage or an --amount-cents');
        const { UpdateDispute } = await import('#settlement/module');
        const { staff } = await import('#payments');
        const { commands } = await services();
        const change = { status: status ?? null, stage: stage ?? null, ...(amountCents !== undefined && { amountCents }) };
        return answer(await commands.execute(new UpdateDispute(disputeId, change, staff(by, ids.uuid()))));
      }),
    );

  disputes
    .command('sync')
    .description('read the disputes that processors list now, and record what is new; the worker does this every hour. Exit 1 if one cannot be read')
    .option('--merchant-account <account>', 'of one merchant account only')
    .action(
      action(async ({ services, pool }, { merchantAccount = null }: { merchantAccount?: string | null }) => {
        const { RecordDisputes } = await import('#settlement/module');
        const { ownLog, commands } = await services({ withGateway: true });
        ownLog.refuse();
        const listed = await commands.execute(new RecordDisputes(AbortSignal.timeout(READ_MS), { merchantAccount }));
        const { feeds, ...shown } = await syncedFeeds(pool, 'disputes', merchantAccount);
        return { json: { listed, feeds }, ...shown };
      }),
    );

  disputes
    .command('list')
    .description('all disputes, those that are open and the next due date first')
    .action(
      action(async ({ services }) => {
        const { settlement } = await services();
        await settlement.register.caughtUp();
        const rows = await settlement.register.disputes();
        return {
          json: rows,
          text: table(
            ['DISPUTE', 'PAYMENT', 'AMOUNT', 'STATUS', 'STAGE', 'DUE'],
            rows.map((row) => [row.disputeId, row.paymentId, decimal(row.disputedAmountCents), row.status, row.stage, row.dueDate]),
          ),
        };
      }),
    );
};

const answer = (dispute: DisputeFacts & { readonly paymentId: string }): Answer => ({
  json: dispute,
  text: fields([
    ['dispute', dispute.disputeId],
    ['payment', dispute.paymentId],
    ['amount', decimal(dispute.disputedAmountCents)],
    ['status', dispute.status],
    ['stage', dispute.stage],
    ['due', dispute.dueDate],
  ]),
});

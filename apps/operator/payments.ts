/** `payfold payments`: a payment in the ledger, now or at an earlier time, and the actions of staff. */
import { resolve } from 'node:path';
import { type Command, InvalidArgumentError, Option } from 'commander';
import type { Recorded } from '#eventstore';
import { type Cents, decimal, dollars, type Json, type Reveal, ServiceError } from '#kernel';
import type { FindBy, FindParameter } from '#audit';
import type { AcknowledgedTask, Leg, PaymentStatus, ResolveRequest, StaffReverseRequest } from '#payments';
import type { Chosen, ErasureAnswer, ErasurePlan, ReasonCode } from '#privacy';
import type { Context } from './context.js';
import { paymentPage } from './payment-page.js';
import {
  type Answer,
  byOption,
  day,
  each,
  fields,
  isPersonThere,
  loginName,
  moment,
  rowLimit,
  table,
  type Terminal,
  timeIn,
  UsageError,
  UTC,
  uuid,
  wholeNumber,
  withPersonal,
  zoneOption,
} from './terminal.js';

interface ShowOptions {
  readonly asOf?: string;
  readonly revision?: string;
  readonly events?: boolean;
  readonly withPersonal?: boolean;
  readonly zone: string;
}

interface ReverseOptions {
  readonly reason: string;
  readonly by: string;
  readonly amountCents?: number;
  readonly includeFee?: boolean;
  readonly idempotencyKey?: string;
  readonly again?: boolean;
}

interface ResolveOptions {
  readonly as: ResolveRequest['as'];
  readonly evidence: string;
  readonly by: string;
  readonly force?: boolean;
  readonly transaction?: ResolveRequest['transactions'];
}

interface AcknowledgeOptions {
  readonly task: AcknowledgedTask;
  readonly reason: string;
  readonly by: string;
}

/** What a caller may know of a payment. */
interface FoundBy extends FindBy {
  readonly amount?: readonly [Cents, Cents];
  readonly brand?: string;
  readonly status?: PaymentStatus;
  readonly email?: string;
  readonly account?: string;
  readonly portal?: string;
  readonly on?: string;
  readonly from?: string;
  readonly to?: string;
}

interface FindOptions extends FoundBy {
  readonly zone: string;
  readonly limit: number;
  readonly cursor?: string | null;
}

interface EraseOptions {
  readonly email?: string;
  readonly retention?: boolean;
  readonly replay?: string;
  readonly reasonCode?: ReasonCode;
  readonly by: string;
  readonly apply?: boolean;
}

/** Default and maximum of payments in an answer of `find`. */
const FOUND_ROWS = 100;
const MAX_FOUND_ROWS = 1_000;

interface RefusalOptions {
  readonly portal?: string;
  readonly reference?: string;
  readonly from?: string;
  readonly to?: string;
  readonly limit: number;
}

/** Deliveries of a payment that are shown, the newest ones. */
const DELIVERIES_SHOWN = 100;
const REFUSALS_SHOWN = 100;
const MAX_REFUSALS = 1_000;
/** This many digits of a card's hash are shown. They tell the cards of a list apart. */
const SHOWN_HASH_DIGITS = 12;

/** The names of `ACKNOWLEDGED_TASKS`. A second list lets help and wrong usage answer without loading the lib. The type compares both lists. */
const TASKS: Readonly<Record<AcknowledgedTask, true>> = {
  settlement_rejected: true,
  settled_after_rejection: true,
  refund_failed: true,
  gateway_dispute_unmatched: true,
  dispute_after_return: true,
};

/** The names of `PAYMENT_STATUSES`, likewise. */
const STATUSES: Readonly<Record<PaymentStatus, true>> = {
  pending: true,
  authorized: true,
  succeeded: true,
  failed: true,
  voided: true,
  refunded: true,
  partially_refunded: true,
  unknown: true,
};

/** How long to wait for the read models. A worker normally keeps them at the end of the log. */
const CATCH_UP_MS = 30_000;

/** The names of `REASON_CODES` of the lib, which help and wrong usage need without loading it. */
const ERASURE_REASONS: Readonly<Record<ReasonCode, true>> = { request: true, retention: true, order: true };
/** Skipped payments that are shown as text. JSON has all of them. */
const SKIPPED_SHOWN = 100;

const LEGS: readonly Leg[] = ['principal', 'fee', 'combined'];

/** Parses one `leg=transaction` and adds it to the earlier ones. */
const legTransaction = (text: string, before: ResolveRequest['transactions'] = {}): ResolveRequest['transactions'] => {
  const [, leg, transactionId] = /^(\w+)=([0-9A-Za-z_-]{1,64})$/.exec(text) ?? [];
  if (transactionId === undefined || !LEGS.includes(leg as Leg)) throw new InvalidArgumentError(`It must read ${LEGS.join('|')}=ID.`);
  return { ...before, [leg as Leg]: transactionId };
};

export const addPayments = (program: Command, { action }: Terminal): void => {
  const payments = program.command('payments').description('payments');

  payments
    .command('refund')
    .description('refund a payment: what remains of the principal, a part of it, or all with the service fee')
    .argument('<payment>', 'payment id', uuid)
    .option('--amount-cents <cents>', 'this much of the principal; the fee stays', wholeNumber)
    .option('--include-fee', 'all that remains, with the service fee')
    .requiredOption('--reason <reason>', 'why; the partner is told')
    .addOption(byOption('name of the person who decides; recorded with the refund'))
    .option('--idempotency-key <key>', 'the same key again gives the same answer and returns nothing twice', idempotencyKey)
    .option('--again', 'another one, although staff completed the same within the last ten minutes')
    .action(
      action((context, paymentId: string, options: ReverseOptions) => reverse(context, ...refundOf(paymentId, options)), {
        counts: (context, paymentId, options) => effectOf(context, ...refundOf(paymentId, options)),
      }),
    );

  payments
    .command('void')
    .description('void a payment before its batch settles, principal and service fee')
    .argument('<payment>', 'payment id', uuid)
    .requiredOption('--reason <reason>', 'why; the partner is told')
    .addOption(byOption('name of the person who decides; recorded with the void'))
    .option('--idempotency-key <key>', 'the same key again gives the same answer', idempotencyKey)
    .option('--again', 'another one, although staff completed the same within the last ten minutes')
    .action(
      action((context, paymentId: string, options: ReverseOptions) => reverse(context, ...voidOf(paymentId, options)), {
        counts: (context, paymentId, options) => effectOf(context, ...voidOf(paymentId, options)),
      }),
    );

  payments
    .command('tasks')
    .description('what only a person may decide: payments that nobody could bring to an end')
    .option('--all', 'also those that have come to an end')
    .action(
      action(async ({ services }, { all = false }: { all?: boolean }) => {
        const { store, pool: db, readModels } = await services();
        const { paymentListModel, staffTasks, staffWorkModel } = await import('#payments');
        for (const model of [paymentListModel, staffWorkModel]) await readModels.caughtUp(model, CATCH_UP_MS);
        const rows = await staffTasks({ store, db }, { all });
        return {
          json: rows,
          text: table(
            ['PAYMENT', 'REASON', 'STATUS', 'RAISED'],
            rows.map((row) => [row.paymentId, row.reason, row.status, row.raisedAt]),
          ),
        };
      }),
    );

  payments
    .command('refusals')
    .description('charges that a case, a rule of the portal or a limit refused, newest first, of the last 90 days')
    .option('--portal <portal>', 'portal id', uuid)
    .option('--reference <reference>', 'reference id of the payment')
    .option('--from <time>', 'refused from then on: RFC 3339, or a day', moment)
    .option('--to <time>', 'refused before then', moment)
    .option('--limit <rows>', `rows at most, up to ${MAX_REFUSALS}`, wholeNumber, REFUSALS_SHOWN)
    .action(
      action(async ({ services }, { portal, reference, from, to, limit }: RefusalOptions) => {
        if (limit < 1 || limit > MAX_REFUSALS) throw new UsageError(`--limit must be 1 to ${MAX_REFUSALS}`);
        const { listRefusals } = await import('#payments');
        const { pool } = await services();
        const query = { portalId: portal ?? null, referenceId: reference ?? null, from: from ?? null, to: to ?? null, after: null, limit };
        const { refusals } = await listRefusals(pool, query);
        return {
          json: refusals,
          text: table(
            ['REFUSED', 'PORTAL', 'CODE', 'REFERENCE', 'CARD', 'ATTEMPTS'],
            refusals.map((row) => [
              row.refusedAt,
              row.portalId,
              row.code,
              row.referenceId ?? '',
              row.cardHash?.slice(0, SHOWN_HASH_DIGITS) ?? '',
              String(row.attempts),
            ]),
          ),
        };
      }),
    );

  payments
    .command('waiting')
    .description('charges, refunds and voids without an outcome, which the gateway cannot tell about; with the time when it can')
    .action(
      action(async ({ services, clock }) => {
        const { paymentListModel, waitingPayments } = await import('#payments');
        const { pool, readModels } = await services();
        await readModels.caughtUp(paymentListModel, CATCH_UP_MS);
        const waiting = await waitingPayments(pool, clock.now());
        return {
          json: { payments: waiting },
          text: table(
            ['PAYMENT', 'PORTAL', 'AMOUNT', 'OPERATION', 'SINCE', 'STATE', 'WHY', 'DECIDED BY'],
            waiting.map(({ paymentId, portalId, amountCents, operation, since, state, why, decidedBy }) => [
              paymentId,
              portalId,
              decimal(amountCents),
              operation,
              since,
              state,
              why ?? '',
              decidedBy ?? '',
            ]),
          ),
        };
      }),
    );

  payments
    .command('acknowledge')
    .description('end a task about a rejected settlement, once it is dealt with; it moves no money')
    .argument('<payment>', 'payment id', uuid)
    .addOption(new Option('--task <task>', 'which task').choices(Object.keys(TASKS)).makeOptionMandatory())
    .requiredOption('--reason <reason>', 'what was done; for the record')
    .addOption(byOption('who has dealt with it'))
    .action(
      action(async ({ services }, paymentId: string, { task, reason, by }: AcknowledgeOptions) => {
        const { AcknowledgeTask } = await import('#settlement/module');
        const { commands } = await services();
        const done = await commands.execute(new AcknowledgeTask({ paymentId, task, reason, by }));
        return {
          json: done,
          text: fields([
            ['payment', done.paymentId],
            ['task', done.task],
            ['acknowledged by', done.by],
            ['reason', done.reason],
          ]),
        };
      }),
    );

  payments
    .command('resolve')
    .description('decide a payment whose outcome is unknown; refused where the gateway shows something else')
    .argument('<payment>', 'payment id', uuid)
    .addOption(new Option('--as <outcome>', 'what became of it').choices(['succeeded', 'voided', 'failed']).makeOptionMandatory())
    .requiredOption('--evidence <evidence>', 'why this is sure; for the record')
    .addOption(byOption())
    .option('--force', 'decide although the gateway cannot tell')
    .option(
      '--transaction <leg=id>',
      'transaction of a leg, from the processor’s own records: of its charge, or (voided) of its return',
      legTransaction,
    )
    .action(
      action(async ({ services }, paymentId: string, { as, evidence, by, force = false, transaction = {} }: ResolveOptions) => {
        const { ResolvePayment } = await import('#settlement/module');
        const { commands } = await services({ withGateway: true });
        const view = await commands.execute(new ResolvePayment({ paymentId, as, evidence, by, force, transactions: transaction }));
        return {
          json: view,
          text: fields([
            ['payment', view.id],
            ['status', view.status],
            ['captured', decimal(view.capturedAmountCents)],
          ]),
        };
      }),
    );

  payments
    .command('find')
    .description('find payments by what a caller knows, in any mix; the newest first')
    .option('--amount <dollars>', 'principal or total in dollars, 128.63, or a range, 100..150', dollarRange)
    .option('--on <day>', 'made on a day, YYYY-MM-DD', day)
    .option('--last4 <digits>', 'last four digits of the card')
    .option('--brand <brand>', 'brand of the card, such as visa', (text) => text.toLowerCase())
    .addOption(new Option('--status <status>', 'status of the payment').choices(Object.keys(STATUSES)))
    .option('--email <address>', 'e-mail address of the payer; - reads it from standard input')
    .option('--reference-id <text>', 'reference of the payment')
    .option('--line-reference <text>', 'reference of a line item')
    .option('--confirmation-number <number>', 'confirmation number')
    .option('--transaction-id <id>', 'the processor’s id of a charge, void, refund or settlement line')
    .addOption(new Option('--amount-cents <cents>', 'principal or total in cents').conflicts('amount'))
    .option('--account <account>', 'of this account only', uuid)
    .option('--portal <portal>', 'of this portal only', uuid)
    .addOption(new Option('--from <time>', 'made from a time on').argParser(moment).conflicts('on'))
    .addOption(new Option('--to <time>', 'made before a time').argParser(moment).conflicts('on'))
    .addOption(zoneOption('the time zone of --on and of the times shown'))
    .option('--limit <rows>', `at most this many, up to ${MAX_FOUND_ROWS}`, rowLimit(MAX_FOUND_ROWS), FOUND_ROWS)
    .option('--cursor <cursor>', 'go on where the answer before ended', uuid)
    .action(
      action(async ({ services, refuse }, { limit, cursor = null, zone, ...asked }: FindOptions) => {
        const { EVERYTHING } = await import('#accounts');
        const { searchPayments, paymentFindModel } = await import('#audit');
        const query = await findQuery(asked, zone);
        const email = asked.email === undefined ? null : await addressIn(asked.email);
        const { store, pool: db, readModels, privacy } = await services();
        const { paymentListModel } = await import('#payments');
        const { hashOfMail } = await import('#privacy');
        const mailMac = email === null ? null : await hashOfMail(privacy, email);
        if (query.status !== null) await readModels.caughtUp(paymentListModel, CATCH_UP_MS);
        const position = await readModels.caughtUp(paymentFindModel, CATCH_UP_MS);
        const { payments: found, next } = await searchPayments({ store, db }, EVERYTHING, { ...query, mailMac, after: cursor, limit });
        // In an incident of the event store, a payment that is not found may be lost (C76).
        if (found.length === 0) refuse();
        const rows = table(
          ['PAYMENT', 'CREATED', 'STATUS', 'CHARGED', 'CARD', 'REFERENCE', 'CONFIRMATION', 'PORTAL'],
          found.map((one) => [
            one.id,
            zone === UTC ? one.createdAt : timeIn(zone, one.createdAt),
            one.status,
            decimal(one.totalChargedCents),
            `${one.paymentMethod.brand} ${one.paymentMethod.last4}`,
            one.referenceId ?? '',
            one.confirmationNumber ?? '',
            one.portalId,
          ]),
        );
        const more =
          found.length === 0 ? 'None among the newest. To see further, say more (--on, --last4, --email), or go on with' : 'There may be more:';
        return { json: { payments: found, nextCursor: next, position }, text: next === null ? rows : `${rows}\n\n${more} --cursor ${next}` };
      }),
    );

  payments
    .command('erase')
    .description('erase personal data of payments for ever; without --apply only the plan')
    .argument('[payments...]', 'payment ids', each(uuid))
    .option('--email <address>', 'all payments of a payer with this e-mail address; - reads it from standard input')
    .option('--retention', 'all payments whose retention is over')
    .option('--replay <file>', 'after a restore: erase again what an erasure file names')
    .addOption(new Option('--reason-code <code>', 'why').choices(Object.keys(ERASURE_REASONS)))
    .addOption(byOption())
    .option('--apply', 'erase; it cannot be taken back')
    .action(
      action(async ({ services }, named: readonly string[], options: EraseOptions) => {
        refuseUnclearErasure(named, options);
        const { by, apply = false, replay, reasonCode } = options;
        const { ErasePersonalData, ReplayErasures } = await import('#privacy/module');
        if (replay !== undefined) {
          const { commands } = await services({ mends: true });
          const done = await commands.execute(new ReplayErasures({ file: resolve(replay), by, apply }));
          const text = fields([
            ['file', done.file],
            ['erasures', String(done.events)],
            [apply ? 'recorded again' : 'to record again', String(done.recorded)],
            [apply ? 'keys destroyed' : 'keys to destroy', apply ? String(done.keys) : `${done.keys}; nothing was changed: add --apply`],
          ]);
          return { json: done, text };
        }
        const chosen = await chosenIn(named, options);
        const { commands } = await services();
        const done = await commands.execute(new ErasePersonalData({ chosen, reasonCode: reasonCode!, by, apply }));
        return { json: done, text: erasureText(done) };
      }),
    );

  payments
    .command('show')
    .description('a payment on one page: card, lines, charges, refunds and voids, disputes, webhooks')
    .argument('<payment>', 'payment id', uuid)
    .option('--as-of <time>', 'as it was known at a time: RFC 3339, or a day', moment)
    .option('--revision <number>', 'as it was after its event of that number, from 0')
    .option('--events', 'its events too, in words')
    .addOption(zoneOption('the time zone of the times shown'))
    .addOption(withPersonal())
    .action(
      action(async (context, id: string, { asOf, revision, events: withEvents = false, withPersonal: opens = false, zone }: ShowOptions) => {
        const { store, directory, pool } = context;
        if (asOf !== undefined && revision !== undefined) throw new UsageError('--as-of and --revision exclude each other');
        if (revision !== undefined && !/^\d{1,9}$/.test(revision)) throw new UsageError('--revision must be a whole number');
        const { listDeliveries, webhookMigrations } = await import('#webhooks');
        const {
          eventInWords,
          isVisible,
          keysOfPayment,
          reversalsOf,
          payment: decider,
          paymentStream,
          auditedPayment,
          paymentEvents,
          shownEvent,
          textOf,
        } = await import('#payments');
        const events = [];
        for await (const event of store.read(paymentStream(id))) {
          if (revision !== undefined && event.revision > BigInt(revision)) break;
          if (asOf !== undefined && event.meta.recordedAt > asOf) break;
          events.push(event);
        }
        const payment = events.map(paymentEvents.read).reduce(decider.evolve, decider.initial);
        if (!isVisible(payment)) throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
        const keyIds = keysOfPayment(payment);
        const reveal = opens ? await openedBy(context, `payments show ${id}`, keyIds) : await context.personal.erasures(keyIds);
        const view = auditedPayment(id, payment, reveal);
        const dataOf = (event: Recorded): object => {
          const known = paymentEvents.read(event);
          const { personal: _, ...data } = shownEvent(known).data as unknown as Record<string, Json>;
          const text = textOf(id, known);
          const content = text && reveal.content(text.personal, text.context);
          return text === null || content === null ? data : { ...data, personal: content };
        };
        const history = events.map((event) => ({
          revision: Number(event.revision),
          position: event.position,
          type: event.type,
          version: event.v,
          ...event.meta,
          words: eventInWords(paymentEvents.read(event)),
          data: dataOf(event),
        }));
        const reversals = payment.phase === 'charged' ? reversalsOf(id, payment, reveal) : [];
        await context.prepare(webhookMigrations);
        const isNow = asOf === undefined && revision === undefined;
        const webhooks = isNow ? await listDeliveries(pool, { paymentId: id, limit: DELIVERIES_SHOWN }) : null;
        const text = paymentPage({
          view,
          payment,
          reversals,
          askedBy: new Map(history.flatMap(({ actor, data }) => ('attemptId' in data && actor.type === 'staff' ? [[String(data.attemptId), actor.id] as const] : []))), // prettier-ignore
          webhooks,
          accountName: (await directory.account(view.accountId))?.name ?? '',
          portalName: (await directory.portal(view.portalId))?.name ?? '',
          zone,
          showsPersonal: opens,
        });
        const timeline = table(
          ['#', 'RECORDED', 'WHO', 'WHAT'],
          history.map((event) => [String(event.revision), timeIn(zone, event.recordedAt), `${event.actor.type} ${event.actor.id}`, event.words]),
        );
        const grown = {
          ...view,
          ...(payment.phase === 'failed' && { declineCode: payment.declineCode }),
          reversals,
          disputes: payment.phase === 'charged' ? payment.disputes.map(({ personal: _, ...dispute }) => dispute) : [],
          webhooks,
        };
        const texts = history.flatMap(({ revision: number, data }) => ('personal' in data ? [[String(number), JSON.stringify(data.personal)]] : []));
        const personal = texts.length > 0 ? table(['#', 'PERSONAL DATA'], texts) : 'personal data  none';
        return {
          json: withEvents ? { ...grown, events: history } : grown,
          text: [text, ...(withEvents ? [timeline] : []), ...(opens ? [personal] : [])].join('\n\n'),
        };
      }),
    );
};

/** Opens keys for the person who is logged in, and notes it. */
const openedBy = async ({ services }: Context, report: string, keyIds: readonly string[]): Promise<Reveal> => {
  const { personal, openings } = await services();
  const opening = await openings.begin({ actor: `staff ${loginName()}`, report });
  const reveal = await personal.open(keyIds);
  await opening.shown(1);
  return reveal;
};

/** The address of an option. `-`: the one line of standard input, so that the address is in no list of processes and no history. */
const addressIn = async (option: string): Promise<string> => {
  if (option !== '-') return option;
  let text = '';
  for await (const piece of process.stdin) {
    text += String(piece);
    if (text.length > MAX_ADDRESS_INPUT) break;
  }
  const address = text.trim();
  if (address === '' || /[\r\n]/.test(address)) throw new UsageError('standard input must have one line with one e-mail address');
  return address;
};
const MAX_ADDRESS_INPUT = 1_000;

/** The search that the options ask for. Throws UsageError. */
const findQuery = async ({ email, amount, amountCents, last4, brand, status, on, account, portal, from, to, ...by }: FoundBy, zone: string) => {
  const { dayIn, findFaults, nameHashesOf, NOTHING_KNOWN } = await import('#audit');
  const { hashes: nameHashes, faults } = nameHashesOf(by);
  // The checks of both are those of the audit API, which finds a card by both together.
  const ofCard = findFaults({ last4: last4 ?? '0000', amountCents: amountCents ?? '1' });
  const wrong = [...faults, ...ofCard].map(({ field, message }) => `${optionOf(field)} ${message}`);
  if (wrong.length > 0) throw new UsageError(wrong.join('; '));
  if (
    nameHashes.length === 0 &&
    [email, amount, amountCents, last4, brand, status, on, account, portal, from, to].every((known) => known === undefined)
  )
    throw new UsageError('say what is known of the payment: --amount, --on, --last4, --brand, --status, --email, --portal, a reference or a number');
  const cents = amountCents === undefined ? (amount ?? null) : ([Number(amountCents), Number(amountCents)] as const);
  const [begin, end] = on === undefined ? [from ?? null, to ?? null] : dayIn(zone, on);
  const known = { ...NOTHING_KNOWN, nameHashes, last4: last4 ?? null, brand: brand ?? null, amount: cents, status: status ?? null };
  return { ...known, asOf: null, accountId: account ?? null, portalId: portal ?? null, from: begin, to: end };
};

const DOLLARS = /^(\d{1,8})(?:\.(\d{2}))?$/;

/** Dollars, or two amounts with two points between them, as cents. */
const dollarRange = (text: string): readonly [Cents, Cents] => {
  const [from, to = from, ...more] = text.replaceAll(/[$,]/g, '').split('..').map((part) => {
    const [, whole, cents = '00'] = DOLLARS.exec(part) ?? [];
    return whole === undefined ? Number.NaN : Number(whole + cents);
  }); // prettier-ignore
  if (more.length > 0 || !(from! <= to!)) throw new InvalidArgumentError('It must be dollars like 128.63, or a range like 100..150.');
  return [from!, to!];
};

const chosenIn = async (payments: readonly string[], { email, retention = false }: EraseOptions): Promise<Chosen> => {
  if (email !== undefined) return { email: await addressIn(email) };
  return retention ? 'retention' : { payments };
};

/** Throws unless exactly one of the four ways to name payments is used. */
const refuseUnclearErasure = (payments: readonly string[], { email, retention, replay, reasonCode }: EraseOptions): void => {
  const ways = [payments.length > 0, email !== undefined, retention === true, replay !== undefined].filter(Boolean).length;
  if (ways !== 1) throw new UsageError('name payments, or one of --email, --retention, --replay');
  if (replay === undefined && reasonCode === undefined) throw new UsageError('--reason-code is missing: request, retention or order');
  if (replay !== undefined && reasonCode !== undefined) throw new UsageError('--replay takes the reason code of its file');
};

const erasureText = (answer: ErasureAnswer | ErasurePlan): string => {
  const { skipped } = answer;
  const said = fields([
    ...('wouldErase' in answer
      ? ([['would erase', `${answer.wouldErase} payments; nothing was changed: add --apply`]] as const)
      : ([
          ['erasure', answer.erasureId ?? 'none'],
          ['erased', `${answer.erased} payments`],
        ] as const)),
    ['skipped', String(skipped.length)],
    ['complete on', answer.completeOn],
  ]);
  if (skipped.length === 0) return said;
  const rows = skipped.slice(0, SKIPPED_SHOWN).map(({ paymentId, why }) => [paymentId, why]);
  const more = skipped.length > SKIPPED_SHOWN ? `\n${skipped.length - SKIPPED_SHOWN} more: --json shows all` : '';
  return `${said}\n\n${table(['SKIPPED', 'WHY'], rows)}${more}`;
};

/** The option of a parameter: `--last4` of `last4`, `--reference-id` of `referenceId`. */
const optionOf = (name: FindParameter): string => `--${name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)}`;

/** Checks an idempotency key by the rules of the request header (C14). */
const idempotencyKey = (text: string): string => {
  if (!/^[\x20-\x7e]{1,255}$/.test(text)) throw new InvalidArgumentError('It must be 1 to 255 visible ASCII characters.');
  return text;
};

type Asked = readonly [request: StaffReverseRequest, idempotencyKey: string | null];

const refundOf = (paymentId: string, { amountCents, includeFee = false, idempotencyKey: key, ...rest }: ReverseOptions): Asked => [
  { operation: 'refund', paymentId, amountCents: amountCents ?? null, includeFee, ...rest },
  key ?? null,
];

const voidOf = (paymentId: string, { idempotencyKey: key, ...rest }: ReverseOptions): Asked => [
  { operation: 'void', paymentId, amountCents: null, includeFee: true, ...rest },
  key ?? null,
];

/** What the command will do, for a person at a terminal. null: nobody is there to read it. */
const effectOf = async ({ services, directory, pool }: Context, ...[request, key]: Asked): Promise<string | null> => {
  if (!isPersonThere()) return null;
  const [{ EffectByStaff }, { postgresStaffTables }] = await Promise.all([import('#payments/module'), import('#webhooks')]);
  const { queries } = await services({ withGateway: true });
  const effect = await queries.execute(new EffectByStaff(request, key)).catch((error: unknown) => {
    // The key may own an answer of an earlier request, which no refusal takes away. Without a key, the command itself is refused for the same reason.
    if (error instanceof ServiceError && key !== null) return error;
    throw withAgain(error, request);
  });
  if (effect instanceof ServiceError) return `Not possible now: ${effect.message} If the key was used before, its answer is shown.`;
  const { accountId, legs, feeKeptCents, earlier } = effect;
  const account = (await directory.accounts()).find((one) => one.accountId === accountId)?.name ?? accountId;
  const endpoints = (await postgresStaffTables(pool).endpoints(accountId)).filter(({ status }) => status === 'enabled').length;
  return `${fields([
    [request.operation, `payment ${request.paymentId}`],
    ...(earlier?.isOpen
      ? [['first', `the ${earlier.operation} of ${earlier.requestedAt} is brought to its end; if it is the same, it is not repeated`] as const]
      : []),
    ...(earlier && !earlier.isOpen
      ? [['done', `by the ${earlier.operation} of ${earlier.requestedAt}: its result is shown, no money moves`] as const]
      : []),
    ...legs.map((leg) => [leg.leg, `${dollars(leg.principalCents + leg.feeCents)} goes back by ${leg.means}`] as const),
    ['fee kept', dollars(feeKeptCents)],
    [
      'told',
      `${account}, by payment.refunded to ${endpoints} webhook ${endpoints === 1 ? 'endpoint' : 'endpoints'}; Payfold tells the payer nothing`,
    ],
  ])}\n`;
};

/** The refusal of a repeated refund or void names the option that takes it as another one. */
const withAgain = (error: unknown, { operation }: StaffReverseRequest): unknown =>
  error instanceof ServiceError && error.name === 'RepeatRefused'
    ? new ServiceError(error.code, `${error.message} For another ${operation}, add --again.`, error.details)
    : error;

/** Executes a refund or a void by staff. The answer and a refusal have the form of the partner API. A refusal has exit code 1. */
const reverse = async ({ services }: Context, ...[request, key]: Asked): Promise<Answer> => {
  const { ReverseByStaff } = await import('#payments/module');
  const { viewOf } = await import('../answers.js');
  const { commands } = await services({ withGateway: true });
  const view = viewOf(
    await commands.execute(new ReverseByStaff(request, key)).catch((error: unknown) => {
      throw withAgain(error, request);
    }),
  );
  const isVoided = 'reversalType' in view ? view.reversalType === 'void' : true;
  return {
    json: view,
    text: fields([
      ['payment', view.id],
      ['returned', dollars(view.amountCents)],
      ['how', isVoided ? 'the charge was voided before its batch settled' : 'refunded to the card'],
      ['transaction', view.gateway.transactionId],
    ]),
  };
};

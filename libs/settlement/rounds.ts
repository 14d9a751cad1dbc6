/**
 * Rounds over the merchant accounts: they read the feeds of the processors that are due, and record what is new. A fault of a processor, or of one
 * batch or dispute, ends the reading of that feed. The other feeds continue. If our own stores fail, the round ends with their error.
 */
import {
  type GatewayAccount,
  type GatewayDispute,
  isVisible,
  type PaymentGateway,
  type PaymentPorts,
  raiseStaffTask,
  UnknownCursor,
} from '#payments';
import type { Origin } from '#eventstore';
import { type Json, ServiceError, sumCents, timestamp } from '#kernel';
import { hashedUuid } from '#platform';
import { openDispute, updateDispute } from './dispute.js';
import { findReturns } from './elsewhere.js';
import type { FeedEnd, FeedName } from './feeds.js';
import { changeCase } from './case.js';
import { type BatchSummary, isOfStore, NotYet, recordBatch, recordFunding, type SettlementPorts, WrongDate } from './record.js';

/** Accounts of real processors whose feeds are read at the same time. */
const AT_ONCE = 2;

/** The processor cannot be asked now. */
class CannotAsk extends NotYet {}

export interface RoundOptions {
  /** True: only feeds whose time has come. Default: all feeds, now. */
  readonly onlyDue?: boolean;
  /** Absent or null: all accounts. */
  readonly merchantAccount?: string | null;
}

/**
 * Records all closed batches that are not recorded yet, and the funding of batches whose day has come. Returns the listed batches that are complete
 * now. Throws if our own stores fail.
 */
export const recordSettlements = async (ports: SettlementPorts, signal: AbortSignal, options: RoundOptions = {}): Promise<BatchSummary[]> => {
  const recorded: BatchSummary[] = [];
  const lists = ({ capabilities }: PaymentGateway) => capabilities.settlement !== 'none';
  await eachFeed(ports, 'settlement', lists, signal, options, async (account, gateway, cursor, passed) => {
    const readable = <T>(items: AsyncIterable<T>) => readWhilePossible(items, ports.payments, account);
    for await (const { lines, fundedOn = null, cursor: next, ...listed } of readable(gateway.settlements(cursor, signal))) {
      const batch = { ...listed, fundedOn, lines: readable(lines) };
      try {
        const { batchId, count, amountCents } = await recordBatch(ports, account, batch, null, signal);
        recorded.push({ batchId, count, amountCents });
      } catch (error) {
        if (!(error instanceof WrongDate)) throw error;
        await openWrongDate(ports, account, listed.batchId, error);
      }
      await passed(next);
      // Bring the register up to date. Otherwise a refund in two batches would match twice.
      await ports.register.caughtUp();
    }
    await findReturns(ports, account, gateway);
  });
  await recordFunding(ports);
  return recorded;
};

/** Opens an exception for a batch that the interface lists with a date that cannot be true. The feed goes on, and a file records the batch. */
const openWrongDate = async (ports: SettlementPorts, account: GatewayAccount, batchId: string, error: WrongDate): Promise<void> => {
  const { gateway, merchantAccount } = account;
  const { clock, log } = ports.payments;
  log.error({ merchantAccount, batchId, err: error }, 'a settlement batch has a date that cannot be true; resolve its exception');
  const exceptionId = hashedUuid('settlement-exception', 'wrong-date', gateway, merchantAccount, batchId);
  const [at, origin] = [timestamp(clock.now()), { actor: { type: 'system', id: 'settlement' }, correlationId: exceptionId } as const];
  const nothing = { line: null, transactionId: null, ref: null, paymentId: null, leg: null, grossCents: null, expectedCents: null, suspenseCents: 0 };
  const opened = { exceptionId, kind: 'SOURCE_MISMATCH', gateway, merchantAccount, batchId, ...nothing } as const;
  const { state } = await changeCase(ports, exceptionId, { type: 'Open', at, opened }, origin);
  if (state?.status !== 'opened') return;
  const reason = `${error.message}; import a file of the batch with the right date`;
  await changeCase(ports, exceptionId, { type: 'Explain', at, reason, by: 'settlement' }, origin);
};

/** Opens and moves the disputes that processors list. Returns their number. Throws if our own stores fail. */
export const recordDisputes = async (ports: SettlementPorts, signal: AbortSignal, options: RoundOptions = {}): Promise<number> => {
  let count = 0;
  const lists = ({ capabilities }: PaymentGateway) => capabilities.disputes === 'poll';
  await eachFeed(ports, 'disputes', lists, signal, options, async (account, gateway, cursor, passed) => {
    const open = await ports.feeds.openDisputes(account);
    for await (const { cursor: next, ...dispute } of readWhilePossible(gateway.disputes!(open, cursor, signal), ports.payments, account)) {
      if ('gone' in dispute) {
        // It stays open here, so that it is asked for again. The same task is not raised twice.
        await disputeTask(ports, account, dispute.externalId, null, { gone: true });
        continue;
      }
      await recordDispute(ports, account, dispute);
      await ports.feeds.disputeSeen(account, dispute.externalId, dispute.status === 'debited' || dispute.status === 'in_dispute');
      await passed(next);
      count += 1;
    }
  });
  return count;
};

type Read = (
  account: GatewayAccount,
  gateway: PaymentGateway,
  cursor: string | null,
  /** Remembers that everything up to the place is recorded. */
  passed: (cursor: string) => Promise<void>,
) => Promise<void>;

/** Reads a feed of each account that has it. */
const eachFeed = async (
  ports: SettlementPorts,
  feed: FeedName,
  has: (gateway: PaymentGateway) => boolean,
  signal: AbortSignal,
  options: RoundOptions,
  read: Read,
): Promise<void> => {
  const { register, payments } = ports;
  const { merchantAccount = null } = options;
  await register.caughtUp();
  const accounts = (await register.accounts()).filter((account) => merchantAccount === null || account.merchantAccount === merchantAccount);
  const isSimulated = ({ gateway }: GatewayAccount) => gateway === 'simulator';
  // The accounts of the simulator are read in their order, so that a sandbox does the same each time.
  const simulated = accounts.filter(isSimulated).values();
  const others = accounts.filter((account) => !isSimulated(account)).values();
  const readEach = async (queue: Iterable<GatewayAccount>) => {
    for (const account of queue) {
      const gateway = payments.gateways.find(account);
      if (gateway && has(gateway)) await readFeed(ports, feed, account, gateway, signal, options, read);
    }
  };
  const ends = await Promise.allSettled([readEach(simulated), ...Array.from({ length: AT_ONCE }, () => readEach(others))]);
  for (const end of ends) if (end.status === 'rejected') throw end.reason;
};

const readFeed = async (
  { feeds, payments: { log } }: SettlementPorts,
  feed: FeedName,
  account: GatewayAccount,
  gateway: PaymentGateway,
  signal: AbortSignal,
  { onlyDue = false }: RoundOptions,
  read: Read,
): Promise<void> => {
  const { merchantAccount } = account;
  const claimed = await feeds.claim(account, feed, !onlyDue);
  if (!claimed) return;
  const ended = (end: FeedEnd) => feeds.ended(account, feed, claimed, end);
  const readFrom = (cursor: string | null) => read(account, gateway, cursor, (next) => feeds.passed(account, feed, claimed, next));
  try {
    try {
      await readFrom(claimed.cursor);
    } catch (error) {
      if (!(error instanceof UnknownCursor) || claimed.cursor === null) throw error;
      log.error({ merchantAccount, feed }, 'the processor does not know the place in its list any more; all of the list is read');
      await feeds.passed(account, feed, claimed, null);
      await readFrom(null);
    }
    await ended({ kind: 'read' });
  } catch (error) {
    const why = (error as Error).message;
    // A fault of our stores affects all accounts. Any other fault affects only this account.
    if (isOfStore(error) || signal.aborted) {
      // Another worker need not wait for the end of this claim.
      await ended({ kind: 'waiting', why }).catch(() => undefined);
      throw error;
    }
    if (error instanceof NotYet) log.info({ merchantAccount, feed }, why);
    else
      log.error(
        { merchantAccount, feed, err: error },
        feed === 'settlement' ? 'a settlement batch cannot be recorded' : 'a dispute cannot be recorded',
      );
    await ended({ kind: error instanceof NotYet && !(error instanceof CannotAsk) ? 'waiting' : 'failed', why });
  }
};

/** Passes on what a processor lists. A fault of the processor becomes {@link CannotAsk}. */
const readWhilePossible = async function* <T>(items: AsyncIterable<T>, { log }: PaymentPorts, { merchantAccount }: GatewayAccount): AsyncIterable<T> {
  const iterator = items[Symbol.asyncIterator]();
  try {
    for (;;) {
      let next: IteratorResult<T>;
      try {
        next = await iterator.next();
      } catch (error) {
        if (error instanceof UnknownCursor) throw error;
        log.warn({ merchantAccount, err: error }, 'the processor cannot be asked for its lists');
        throw new CannotAsk('the processor cannot be asked now');
      }
      if (next.done) return;
      yield next.value;
    }
  } finally {
    await iterator.return?.();
  }
};

/**
 * Opens a dispute at the payment of its charge, or moves it. If no payment can have it, staff get a task. A processor that names no due date takes no
 * evidence; the dispute then is due on the day on which it was opened.
 */
const recordDispute = async (ports: SettlementPorts, account: GatewayAccount, said: GatewayDispute): Promise<void> => {
  const { gateway, merchantAccount } = account;
  const { externalId, chargeTransactionId, ref, status, stage, reasonCode, reason, amountCents, openedOn, dueDate } = said;
  const { payments, register } = ports;
  const disputeId = hashedUuid('dispute', gateway, merchantAccount, externalId);
  const origin: Origin = { actor: { type: 'system', id: 'disputes' }, correlationId: disputeId };
  const charges = (await register.transactions(gateway, [chargeTransactionId], ref === null ? [] : [ref])).filter(({ op }) => op === 'charge');
  const charge = charges.find(({ transactionId }) => transactionId === chargeTransactionId) ?? charges[0];
  const payment = charge?.paymentId ? (await payments.streams.load(charge.paymentId)).payment : null;
  if (payment && isVisible(payment) && payment.phase === 'charged') {
    const legs = payment.legs.filter(({ leg }) => leg === charge!.leg);
    const captured = sumCents(legs, ({ principalCents, feeCents }) => principalCents + feeCents);
    const isPossible = amountCents >= 1 && amountCents <= captured;
    if (payment.disputes.some((dispute) => dispute.disputeId === disputeId)) {
      await updateDispute(payments, register, disputeId, { status, stage, ...(isPossible && { amountCents }) }, origin);
      if (isPossible) return;
    } else if (isPossible) {
      const due = dueDate !== null && dueDate > openedOn ? dueDate : openedOn;
      const source = { gateway, merchantAccount, externalId };
      const terms = { disputeId, leg: charge!.leg, source, status, stage, reasonCode, reason, disputedAmountCents: amountCents, openedOn, dueDate: due }; // prettier-ignore
      try {
        await openDispute(payments, charge!.paymentId!, terms, origin);
        return;
      } catch (error) {
        // Staff get the task below, and record the dispute with the right dates.
        if (!(error instanceof ServiceError) || error.code !== 'VALIDATION_ERROR') throw error;
        payments.log.error({ merchantAccount, dispute: externalId, err: error }, 'a dispute of the processor cannot be recorded; staff have a task');
      }
    }
  }
  await disputeTask(ports, account, externalId, charge?.paymentId ?? null, { chargeTransactionId, amountCents, status });
};

/** `paymentId` null: no payment is known, so the id of the task is that of the dispute. */
const disputeTask = async (
  { payments, store }: SettlementPorts,
  { gateway, merchantAccount }: GatewayAccount,
  externalId: string,
  paymentId: string | null,
  found: Readonly<Record<string, Json>>,
): Promise<void> => {
  const disputeId = hashedUuid('dispute', gateway, merchantAccount, externalId);
  const origin: Origin = { actor: { type: 'system', id: 'disputes' }, correlationId: disputeId };
  const evidence = { gateway, merchantAccount, dispute: externalId, ...found };
  await raiseStaffTask(payments, store, paymentId ?? disputeId, 'gateway_dispute_unmatched', evidence, origin);
};

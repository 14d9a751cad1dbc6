/**
 * Audits of two readers of the log: the ledger makes postings, and the webhooks make notifications. Each audit compares the results with the bank.
 */
import type { Recorded } from '#eventstore';
import { type Books, type Entry, firstRules, postPayment, postSettlement } from '#ledger';
import { paymentIdOf, paymentEvents } from '#payments';
import { settlementEvents } from '#settlement';
import { notificationOf } from '#webhooks';

export type Check = (holds: boolean, rule: string) => void;

const RULES = firstRules();

/** The cents that the bank charged for a payment and did not return. null: the payment was not charged. */
export type KeptAtBank = (paymentId: string) => number | null;

/**
 * Checks that every entry balances, and that the trial balance is 0. The ledger's cents of each payment must equal those at the bank (A2, A4).
 * Payments with a dispute or a rejected settlement are left out of the comparison with the bank.
 */
export const auditLedger = (
  streams: ReadonlyMap<string, readonly Recorded[]>,
  settlement: readonly Recorded[],
  kept: KeptAtBank,
  check: Check,
): void => {
  let total = 0;
  const add = (entries: readonly Entry[]) => {
    for (const { postings } of entries) for (const { cents } of postings) total += cents;
  };
  const posted = (what: string, post: () => readonly Entry[]): readonly Entry[] => {
    try {
      return post();
    } catch (error) {
      check(false, `A4: ${what}: ${(error as Error).message}`);
      return [];
    }
  };
  for (const [stream, events] of streams) {
    const paymentId = paymentIdOf(stream);
    let books: Books = null;
    const entries: Entry[] = [];
    for (const recorded of events)
      entries.push(
        ...posted(recorded.type, () => {
          const after = postPayment(RULES, paymentId, books, paymentEvents.read(recorded));
          books = after.books;
          return after.entries;
        }),
      );
    add(entries);
    if (events.some(({ type }) => type === 'PaymentDisputed' || type === 'SettlementRejected')) continue;
    const owedAndEarned = entries
      .flatMap(({ postings }) => postings)
      .filter(({ account }) => account.startsWith('liabilities:agency:') || account.startsWith('revenue:'))
      .reduce((sum, { cents }) => sum - cents, 0);
    check(owedAndEarned === (kept(paymentId) ?? 0), `A4: the ledger has ${owedAndEarned} cents of a payment, the bank ${kept(paymentId) ?? 0}`);
  }
  for (const recorded of settlement) add(posted(recorded.type, () => postSettlement(RULES, settlementEvents.read(recorded))));
  check(total === 0, `A4: the trial balance is ${total}`);
};

/**
 * The notified refunds of each payment must add up to `staffReturned`: the cents that the bank returned for staff (C56). A dispute may be notified
 * again only after a change (C57).
 */
export const auditNotifications = (
  streams: ReadonlyMap<string, readonly Recorded[]>,
  staffReturned: (paymentId: string) => number,
  check: Check,
): void => {
  for (const [stream, events] of streams) {
    const paymentId = paymentIdOf(stream);
    const told = events.flatMap((recorded) => notificationOf(paymentId, paymentEvents.read(recorded), '') ?? []);
    const cents = told.reduce((sum, { type, data }) => sum + (type === 'payment.refunded' ? data.amountCents : 0), 0);
    check(cents === staffReturned(paymentId), `C56: notifications tell of ${cents} cents, staff returned ${staffReturned(paymentId)}`);
    const last = new Map<string, string>();
    for (const { type, data } of told) {
      if (type !== 'payment.disputed') continue;
      const state = `${data.status} ${data.stage}`;
      check(last.get(data.disputeId) !== state, 'C57: a dispute was told again without a change');
      last.set(data.disputeId, state);
    }
  }
};

/**
 * A busy day for specs of the books: payments with every outcome, later settled, refunded and disputed. Also a reader of hledger's format that shares
 * no code with the product.
 */
import { balances, bookSumCents, journalModel } from '#ledger';
import { type DisputeStatus, type PaymentView, reverseByStaff, staff } from '#payments';
import { openDispute, recordSettlements, updateDispute } from '#settlement';
import { CARD, paymentOf, type Service, type TestAccount } from './service.js';

export interface BusyDay {
  readonly partner: TestAccount;
  readonly separate: string;
  readonly combined: string;
  /** Every payment that was charged. */
  readonly payments: readonly PaymentView[];
}

const signal = () => AbortSignal.timeout(20_000);

/** Reads the books up to the end of the log. The result sums the balances of the accounts whose names match, in cents. Throws if the books are not balanced. */
export const booksOf = async ({ readModels, store, pool }: Pick<Service['services'], 'readModels' | 'store' | 'pool'>) => {
  await readModels.of(journalModel).runUntil((await store.head())!, { timeoutMs: 20_000 });
  const rows = await balances(pool, { asOf: null, effectiveTo: null });
  const sum = bookSumCents(rows);
  if (sum !== 0) throw new Error(`the books sum to ${sum} cents`);
  return (account: RegExp): number => rows.filter((row) => account.test(row.account)).reduce((cents, row) => cents + row.balanceCents, 0);
};

export const settle = async (service: Service) => {
  await service.simulator.closeBatches();
  return recordSettlements(service.services.settlement, signal());
};

export const dispute = async (service: Service, paymentId: string, cents: number, ...statuses: readonly DisputeStatus[]): Promise<string> => {
  const { payments, ids, settlement } = service.services;
  const owner = staff('Dana', ids.uuid());
  const disputeId = ids.uuid();
  const today = new Date(service.clock.now()).toISOString().slice(0, 10);
  const terms = {
    disputeId,
    stage: 'chargeback',
    reasonCode: '10.4',
    reason: 'fraud',
    disputedAmountCents: cents,
    openedOn: today,
    dueDate: today,
  };
  await openDispute(payments.ports, paymentId, { ...terms, status: statuses[0]! }, owner);
  for (const status of statuses.slice(1)) await updateDispute(payments.ports, settlement.register, disputeId, { status, stage: null }, owner);
  return disputeId;
};

export const busyDay = async (service: Service): Promise<BusyDay> => {
  const partner = await service.account();
  const { client } = partner;
  const separate = await service.portal(partner, { fee: { flatCents: 300 } });
  const combined = await service.portal(partner, { fee: { flatCents: 25, percentBps: 250, chargeMode: 'combined' } });
  const payments: PaymentView[] = [];
  const pay = async (portal: string, lines: number[]) => {
    const made = await client.created(paymentOf(portal, { lines }));
    payments.push(made);
    return made.id;
  };
  // Before the batch closes: full and partial voids, and payments without a charge.
  await client.void(await pay(separate, [4_000]), {});
  await client.refund(await pay(separate, [5_000, 2_500]), { amountCents: 1_234 });
  await client.refund(await pay(combined, [9_999]), { feeType: 'include_fee' });
  for (const number of [CARD.declined, CARD.gatewayError, CARD.feeDeclined]) await client.create(paymentOf(separate, { number }));
  const unknown = await client.create(paymentOf(separate, { number: CARD.unreadable }));
  const kept = [await pay(separate, [10_000]), await pay(combined, [3_333, 3_333, 3_334]), await pay(separate, [777]), await pay(combined, [20_000])];
  await client.created(paymentOf(separate, { number: CARD.settlementRejected })).then((made) => payments.push(made));
  await service.recover(unknown.details!.id as string);
  await settle(service);
  // After the batch has closed: refunds in a batch of their own, and disputes with every outcome.
  await client.refund(kept[0]!, { amountCents: 2_500 });
  await client.refund(kept[0]!, { feeType: 'include_fee' });
  const { payments: services } = service.services;
  await reverseByStaff(
    services,
    { operation: 'refund', paymentId: kept[2]!, amountCents: null, includeFee: true, reason: 'billed twice', by: 'Dana' },
    null,
  );
  await dispute(service, kept[1]!, 5_000, 'debited', 'in_dispute', 'lost');
  await dispute(service, kept[3]!, 20_525, 'debited');
  await pay(separate, [1_500]);
  await settle(service);
  await dispute(service, kept[3]!, 100, 'debited', 'recovered');
  await pay(combined, [60]);
  // On a later day, the processor has funded the first batches.
  service.clock.advance(5 * 86_400_000);
  await recordSettlements(service.services.settlement, signal());
  // Open all exceptions now. Otherwise the worker could open them in the middle of a spec.
  while ((await service.services.openExceptions()) > 0);
  return { partner, separate, combined, payments };
};

/** Adds up a journal as hledger does. Each transaction must balance. Returns the cents of each account. */
export const addHledger = (text: string): Map<string, bigint> => {
  const sums = new Map<string, bigint>();
  for (const block of text.split(/\n\n+/)) {
    if (!/^\d{4}-\d{2}-\d{2} /.test(block)) continue;
    let left = 0n;
    for (const line of block.split('\n').slice(1)) {
      const posting = /^ {4}(\S+) {2}USD (-?)(\d+)\.(\d\d)$/.exec(line);
      if (!posting) {
        if (/^ {4}; /.test(line)) continue;
        throw new Error(`not a posting: ${line}`);
      }
      const cents = BigInt(posting[3]! + posting[4]!) * (posting[2] === '-' ? -1n : 1n);
      sums.set(posting[1]!, (sums.get(posting[1]!) ?? 0n) + cents);
      left += cents;
    }
    if (left !== 0n) throw new Error(`unbalanced: ${block}`);
  }
  return sums;
};

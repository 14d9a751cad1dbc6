/** Compares the log with the bank after crashes and chaos runs, when every process runs again. Uses no read model. */
import assert from 'node:assert/strict';
import type { EventStore, Recorded } from '#eventstore';
import { CLOSED, fold } from '#kernel';
import {
  createRecovery,
  isVisible,
  payment as decider,
  type Payment,
  paymentIdOf,
  paymentView,
  postgresRecoveryWork,
  paymentEvents,
  WAITS_FOR_STAFF,
} from '#payments';
import { createLogger, readConfig, readKeyRing } from '#platform';
import { openServices, type Services } from '../../apps/services.js';
import type { SimulatorControl } from '../../apps/simulator/control.js';
import type { Truth } from '../../apps/simulator/processor.js';
import { eventually } from './eventually.js';

/** Opens the stores of a running service for the spec. */
export const openStores = async (
  places: { databaseUrl: string; simulatorUrl: string },
  masterKeyFile: string,
  dataDir: string,
): Promise<Services> => {
  const config = readConfig({
    DATABASE_URL: places.databaseUrl,
    SIMULATOR_URL: places.simulatorUrl,
    MASTER_KEY_FILE: masterKeyFile,
    DATA_DIR: dataDir,
  });
  return openServices(config, places, readKeyRing(masterKeyFile), createLogger('silent', 'spec'));
};

/** Ends the leases of all keys. Every owner was killed, so the spec need not wait 60 s for the end of a lease. */
export const endLeases = async ({ pool }: Services): Promise<number> =>
  (await pool.query(`update idempotency_key set lease_until = clock_timestamp() - interval '1 second' where state = 'in_progress'`)).rowCount ?? 0;

/** A guard against hanging: a busy machine may have hundreds of open payments. */
const RECOVERS_WITHIN_MS = 300_000;

/**
 * Resolves open payments without recovery's wait of a minute, until none is left that recovery can resolve. A running worker must keep the list up to
 * date. Returns the number of resolved payments.
 */
export const recoverAll = async (services: Services): Promise<number> => {
  const { payments, pool, store } = services;
  const recovery = createRecovery(payments.ports, store, postgresRecoveryWork(pool), { startsAfterMs: 0 });
  let resolved = 0;
  await eventually(
    async () => {
      const head = await store.head();
      if (head !== null && !(await payments.list.caughtUpTo(head, 5_000))) throw new Error('the list is not up to date');
      resolved += await recovery.round();
      const { rows } = await pool.query<{ open: string }>(
        `select payment_id as open from payment_list p where open_since is not null and not (${WAITS_FOR_STAFF}) limit 5`,
      );
      if (rows.length > 0) throw new Error(`payments are still open: ${rows.map(({ open }) => open).join(', ')}`);
      return head === (await store.head());
    },
    { timeoutMs: RECOVERS_WITHIN_MS },
  );
  return resolved;
};

/** The payments that wait for a decision by staff. Recovery cannot resolve them. */
export const waitingForStaff = async ({ pool }: Services): Promise<readonly string[]> => {
  const { rows } = await pool.query<{ id: string }>(
    `select payment_id as id from payment_list p where open_since is not null and ${WAITS_FOR_STAFF}`,
  );
  return rows.map(({ id }) => id);
};

export interface Book {
  readonly paymentId: string;
  readonly payment: Payment;
  readonly types: readonly string[];
  /** The bank's approved charges under this payment's references. */
  readonly charges: readonly Truth[];
  readonly netAtBankCents: number;
  readonly netInLogCents: number;
}

export interface Books {
  readonly payments: readonly Book[];
  readonly chargesAtBank: number;
  readonly netAtBankCents: number;
  of(paymentId: string): Book;
  /** The payments with this `referenceId` of their own, not of a line. */
  for(referenceId: string): readonly Book[];
}

const netOf = (charges: readonly Truth[]) =>
  charges.reduce((sum, { amountCents = 0, voidedCents = 0, refundedCents = 0 }) => sum + amountCents - voidedCents - refundedCents, 0);

/** The payments, folded from the log. */
export const paymentStreams = async (store: EventStore) => {
  const streams = new Map<string, Recorded[]>();
  for await (const events of store.readAll(null, { streamPrefixes: ['payment-'] }))
    for (const event of events) {
      const known = streams.get(event.stream);
      if (known) known.push(event);
      else streams.set(event.stream, [event]);
    }
  return [...streams].map(([stream, events]) => {
    const facts = events.map(paymentEvents.read);
    return { stream, paymentId: paymentIdOf(stream), facts, payment: fold(decider, facts) };
  });
};

/**
 * Reads the log and the bank, and checks the rules for the end of every run (A1 to A12). Every charge of the bank has its payment (A2). Log and bank
 * agree to the cent for each payment (A2, A4). No leg returned more than it took (A5). Every stream can be folded (A6). Positions have no gaps, and
 * no payment is open (A9).
 */
export const readBooks = async ({ store, pool }: Services, bank: SimulatorControl): Promise<Books> => {
  const streams = await paymentStreams(store);
  const charges = (await bank.truth()).filter(({ op, result }) => op === 'charge' && result === 'approved');
  const unclaimed = new Map(charges.map((charge) => [charge.ref, charge]));

  const payments = streams.map(({ stream, paymentId, facts, payment }): Book => {
    const legs = isVisible(payment) ? payment.terms.legs : [];
    const mine = legs.flatMap((leg) => {
      const charge = unclaimed.get(leg.references.charge);
      unclaimed.delete(leg.references.charge);
      if (charge) assert.deepEqual([charge.leg, charge.amountCents], [leg.leg, leg.principalCents + leg.feeCents], `the bank's charge of ${stream}`);
      return charge ? [charge] : [];
    });
    for (const { ref, amountCents = 0, voidedCents = 0, refundedCents = 0 } of mine)
      assert(voidedCents + refundedCents <= amountCents, `${ref}: more was returned than was taken`);
    const view = isVisible(payment) ? paymentView(paymentId, payment, CLOSED) : null;
    const netInLogCents = view ? view.capturedAmountCents - view.refundedAmountCents : 0;
    return { paymentId, payment, types: facts.map(({ type }) => type), charges: mine, netAtBankCents: netOf(mine), netInLogCents };
  });
  const none = (found: readonly unknown[], what: string) => assert.deepEqual(found, [], what);
  none([...unclaimed.values()], 'the bank has charges that no payment knows of');
  none(
    payments.filter(({ netAtBankCents, netInLogCents }) => netAtBankCents !== netInLogCents),
    'bank and log differ',
  );
  none(
    payments.filter(({ payment }) => payment.phase === 'pending' || payment.phase === 'unknown'),
    'charges are open',
  );
  none(
    payments.filter(({ payment }) => payment.phase === 'charged' && payment.attempts.some(({ ended }) => ended === null)),
    'reversals are open',
  );
  const { rows } = await pool.query(
    `select count(*) = max(position) and min(position) = 1 and max(position) = (select position from es.head) as gap_free,
            count(distinct event_id) = count(*) as once from es.events`,
  );
  assert.deepEqual({ ...rows[0] }, { gap_free: true, once: true }, 'the log has gaps, or an event twice');

  const byId = new Map(payments.map((book) => [book.paymentId, book]));
  return {
    payments,
    chargesAtBank: charges.length,
    netAtBankCents: netOf(charges),
    of: (paymentId) => {
      const book = byId.get(paymentId);
      if (!book) throw new Error(`no stream of payment ${paymentId}`);
      return book;
    },
    for: (referenceId) => payments.filter(({ payment }) => isVisible(payment) && payment.terms.referenceId === referenceId),
  };
};

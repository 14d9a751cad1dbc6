/** A purge forgets no key whose payment the log may have lost. */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { type EventStore, memoryEventStore, OwnLog } from '#eventstore';
import { timestamp } from '#kernel';
import { createLogger, systemIds } from '#platform';
import { MovableClock } from '../../../test/support/clock.js';
import { newEvents } from '../../../test/support/event-store.contract.js';
import { earlierCopy, type ExchangeableStore, exchangeableStore } from '../../../test/support/exchangeable-store.js';
import { charged, ended, move, principals, refundRequested } from '../../../test/support/given.js';
import { INSTALLATION, Marks, writeInstallation } from '../../../test/support/mark-book.js';
import type { Bound } from './key-store.js';
import type { PaymentEvent } from '../payment.js';
import { paymentEvents, PaymentStreams, paymentStream } from '../stream.js';
import { purgeKeys } from './sweep.js';

let clock: MovableClock;
let bare: EventStore;
let store: ExchangeableStore;
let ticking: NodeJS.Timeout;
beforeEach(async () => {
  clock = new MovableClock();
  ticking = setInterval(() => clock.advance(100), 1);
  bare = memoryEventStore();
  store = exchangeableStore(bare);
  await writeInstallation(bare, clock);
});
afterEach(() => clearInterval(ticking));

/** Opens the guard, and purges one reserved key. Returns whether the key was deleted. */
const purge = async (bound: Bound, prepare: (own: OwnLog) => Promise<void>): Promise<boolean> => {
  const log = createLogger('silent', 'spec');
  const own = new OwnLog({ store, book: new Marks(clock).bookOf('worker'), installationId: INSTALLATION, clock, log, appendsProve: false });
  await own.begin();
  await prepare(own);
  const ids = systemIds(() => clock.now());
  let deleted = false;
  const idempotency = {
    purge: async (_limit: number, resolved: (one: Bound) => Promise<boolean>) => {
      deleted = await resolved(bound).catch(() => false);
      return deleted ? 1 : 0;
    },
  };
  const ports = { clock, ids, ownLog: own, log, streams: new PaymentStreams(own, clock, ids) };
  await purgeKeys({ ports, idempotency } as never);
  return deleted;
};
const newBound = (): Bound => {
  const ids = systemIds(() => clock.now());
  return {
    accountId: ids.uuid(),
    paymentId: ids.uuid(),
    attemptId: ids.uuid(),
    operation: 'create',
    claimedAt: new Date(clock.now()).toISOString(),
    begun: false,
  };
};

test('a reserved key of a payment that never began is deleted', async () => {
  expect(await purge(newBound(), async () => undefined)).toBe(true);
});

test('a reserved key stays while the log lacks its payment, before any routine check has noticed it', async () => {
  const bound = newBound();
  const isDeleted = await purge(bound, async (own) => {
    const copy = await earlierCopy(bare, 1);
    await own.append(`payment-${bound.paymentId}`, 'no_stream', newEvents(1));
    await own.verified(null);
    store.exchange(copy);
  });
  expect(isDeleted).toBe(false);
});

describe('the key of a refund', () => {
  const HOUR_MS = 3_600_000;
  const attempt = 'R';
  const asked = refundRequested(attempt, { legs: [move(attempt, 'principal', 2_500, 0)], lines: principals(833, 833, 834) });
  const deletedAfter = async (hours: number, facts: readonly PaymentEvent[]): Promise<boolean> => {
    const paymentId = newBound().paymentId;
    return purge({ ...newBound(), attemptId: attempt, operation: `refund:${paymentId}` }, async (own) => {
      const ids = systemIds(() => clock.now());
      const meta = { recordedAt: timestamp(clock.now()), actor: { type: 'partner', id: 'spec' }, correlationId: 'spec' } as const;
      const events = facts.map((fact) => paymentEvents.write(fact, ids.uuid(), meta));
      await own.append(paymentStream(paymentId), 'no_stream', events);
      clock.advance(hours * HOUR_MS);
    });
  };

  test('stays while its attempt is open, however old it is', async () => {
    expect(await deletedAfter(24 * 30, [...charged(), asked])).toBe(false);
  });
  test('leaves a day after its attempt has ended', async () => {
    const facts = [...charged(), asked, ended(attempt, { outcome: 'never_executed', reversalType: null, amountCents: 0 })];
    expect(await deletedAfter(23, facts)).toBe(false);
    expect(await deletedAfter(25, facts)).toBe(true);
  });
  test('leaves if its attempt never began', async () => {
    expect(await deletedAfter(0, charged())).toBe(true);
  });
});

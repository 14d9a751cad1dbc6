/** The contract on KurrentDB: against the double, and against the server at KURRENTDB_URL if that is set. */
import type { Position } from './event-store.js';
import { createKurrentDbEventStore } from './kurrentdb.js';
import { eventStoreContract } from '../../test/support/event-store.contract.js';
import { KurrentDbDouble } from '../../test/support/kurrentdb-double.js';

/** A position at which no event begins. Positions are byte offsets, and an event is longer than one byte. */
const between = (position: Position) => position.replace(/\d+/g, (half) => String(BigInt(half) + 1n).padStart(half.length, '0')) as Position;

eventStoreContract('KurrentDB (double)', async () => {
  const double = await new KurrentDbDouble().start();
  // Writes system events between our events, as a busy server does.
  const stranger = setInterval(() => double.write('$stats-somewhere', [{ type: '$statsCollected', data: { load: 1 } }]), 20);
  const [store, another] = await Promise.all([createKurrentDbEventStore(double.url()), createKurrentDbEventStore(double.url())]);
  return {
    store,
    another,
    fresh: true,
    between,
    close: async () => {
      clearInterval(stranger);
      await Promise.all([store.close(), another.close()]);
      double.kill();
    },
  };
});

const url = process.env.KURRENTDB_URL;
if (url)
  eventStoreContract('KurrentDB (server)', async () => {
    const [store, another] = await Promise.all([createKurrentDbEventStore(url), createKurrentDbEventStore(url)]);
    return { store, another, fresh: false, between, close: async () => void (await Promise.all([store.close(), another.close()])) };
  });
else process.stdout.write('KURRENTDB_URL is not set: the event store contract ran against the KurrentDB double only\n');

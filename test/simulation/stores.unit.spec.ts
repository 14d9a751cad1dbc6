/** The simulated stores pass the contract suites of the real ones. */
import { expect, test } from '@jest/globals';
import { memoryEventStore } from '#eventstore';
import { systemClock } from '#kernel';
import { newKeyRing, systemIds } from '#platform';
import { Secret } from '#payments';
import { Endpoints, type EndpointStatus, type OutboxEvent, redeliver } from '#webhooks';
import { checkpointContract } from '../support/checkpoint.contract.js';
import { deliveriesContract } from '../support/deliveries.contract.js';
import { gatewayContract } from '../contract/gateway.js';
import { idempotencyContract } from '../support/key-store.contract.js';
import { intakeRowsContract } from '../support/intake-rows.contract.js';
import { listRowsContract } from '../support/list-rows.contract.js';
import { unfinishedRowsContract } from '../support/unfinished-rows.contract.js';
import { webhookRowsContract } from '../support/webhook-rows.contract.js';
import { Bank, bankGateway, CAPABILITIES, CARDS, directWire, type GatewayName } from './bank.js';
import { simulatedDeliveries, simulatedDueSignal, simulatedOutboxRows, simulatedStaffTables } from './deliveries.js';
import { NO_FAULTS, Process, Simulator } from './simulator.js';
import { comparedStatement, directStatement, KeyTable, memoryIdempotency, simulatedClaims, simulatedKeyRows } from './stores.js';
import { Database, type Run, simulatedCheckpoint, simulatedIntakeRows, simulatedListRows, simulatedUnfinishedRows, Tables } from './tables.js';

idempotencyContract('the simulation’s', async () => {
  const table = new KeyTable(() => Date.now());
  const ids = systemIds(() => Date.now());
  const ring = newKeyRing();
  const store = () => memoryIdempotency(table, ring, ids, directStatement);
  return {
    stores: [store(), store()],
    rows: simulatedKeyRows(table, directStatement),
    withRing: (other) => memoryIdempotency(table, other, ids, directStatement),
    rowOf: async (name) => {
      const row = table.find(name);
      return row && { ...row, fence: String(row.fence) };
    },
    leaseEnds: async (name, agoSeconds) => Object.assign(table.find(name)!, { leaseUntil: Date.now() - agoSeconds * 1000 }),
    expires: async (name, agoSeconds) => Object.assign(table.find(name)!, { expiresAt: Date.now() - agoSeconds * 1000 }),
    now: () => Date.now(),
    close: async () => undefined,
  };
});

const card = (number: string) => ({
  type: 'card' as const,
  number: new Secret(number),
  expiry: { month: 12, year: 2040 },
  cvv: new Secret('123'),
});

for (const name of Object.keys(CAPABILITIES) as GatewayName[]) {
  const account = { gateway: name, merchantAccount: 'm', credentialsRef: 'c', environment: 'sandbox' } as const;
  let ahead = 0;
  const now = () => Date.now() + ahead;
  const { capabilities } = bankGateway(new Bank(now), account, directWire, now);
  gatewayContract(`the simulation’s bank, ${name}`, capabilities, { holds: true }, async () => {
    const bank = new Bank(now);
    return {
      gateway: bankGateway(bank, account, directWire, now),
      account,
      approved: () => card(CARDS.approved),
      declined: () => card(CARDS.declined),
      held: () => card(CARDS.held),
      last4: CARDS.approved.slice(-4),
      now,
      advance: async (ms) => void (ahead += ms),
      passBatch: async () => bank.closeBatch('m'),
      close: async () => undefined,
    };
  });
}

/** Makes tables in a simulation without faults. The simulated time advances by itself. */
const openTables = () => {
  const sim = new Simulator(1, NO_FAULTS);
  const tables = new Tables(sim);
  let open = true;
  const goOn = async () => {
    while (open) {
      await sim.run(() => !open);
      await new Promise(setImmediate);
    }
  };
  const going = goOn();
  return {
    tables,
    /** The connections of another process. */
    connect: () => new Database(sim, new Process('A'), tables),
    pass: (ms: number) => sim.wait(ms),
    close: async () => {
      open = false;
      await going;
    },
  };
};

checkpointContract<Run>(
  'the simulation’s',
  async () => {
    const { connect, pass, close } = openTables();
    const written: [name: string, row: string][] = [];
    return {
      checkpoint: (name) => simulatedCheckpoint(connect(), name),
      write: (run, name, row) => run('write', ({ writes }) => void writes.push(() => written.push([name, row]))),
      rows: async (name) => written.filter(([of]) => of === name).map(([, row]) => row),
      pass,
      wait: pass,
      close,
    };
  },
  200,
);

listRowsContract(
  'the simulation’s',
  async () => {
    const { tables, connect, close } = openTables();
    return { rows: simulatedListRows(tables, connect().run), close };
  },
  100,
);

unfinishedRowsContract('the simulation’s', async () => {
  const { tables, connect, close } = openTables();
  return { rows: simulatedUnfinishedRows(tables, connect().run), close };
});

intakeRowsContract('the simulation’s', async () => {
  const { tables, connect, close } = openTables();
  return { rows: simulatedIntakeRows(tables, connect().run), close };
});

webhookRowsContract('the simulation’s', async () => {
  const { tables, connect, pass, close } = openTables();
  const database = connect();
  return {
    tables: simulatedStaffTables(database),
    deliveries: simulatedDeliveries(tables.webhooks, directStatement),
    due: simulatedDueSignal(database),
    outbox: (work) => database.transaction((run) => work(simulatedOutboxRows(tables, run))),
    eventIds: async () => [...tables.webhooks.events.keys()],
    rows: async () => [...tables.webhooks.deliveries.values()],
    wait: pass,
    close,
  };
});

const VERBS = { paused: 'pause', enabled: 'resume', disabled: 'disable' } as const;

deliveriesContract(
  'the simulation’s',
  async () => {
    const worlds: { close(): Promise<void> }[] = [];
    const fresh = async () => {
      const world = openTables();
      worlds.push(world);
      const { tables, connect, pass } = world;
      const { webhooks } = tables;
      const database = connect();
      const store = memoryEventStore({ now: () => tables.now });
      const ids = systemIds(() => tables.now);
      const clock = { ...systemClock, now: () => tables.now };
      const staff = { tables: simulatedStaffTables(database), store, clock, ids, actor: { type: 'staff', id: 'spec' } } as const;
      const endpoints = new Endpoints({ ...staff, keys: newKeyRing(), sender: { vet: async () => undefined } });
      const happened: OutboxEvent[] = [];
      const [accountId, paymentId, stream] = ['a', 'p', 'payment-p'];
      let told = 0;
      const write = (events: readonly OutboxEvent[]) => {
        told = happened.length;
        return database.transaction((run) => simulatedOutboxRows(tables, run).write(events));
      };
      return {
        workers: [simulatedDeliveries(webhooks, directStatement), simulatedDeliveries(webhooks, directStatement)] as const,
        register: async (url: string) => (await endpoints.add(accountId, url)).endpointId,
        change: (endpointId: string, to: EndpointStatus) => endpoints[VERBS[to]](endpointId),
        happen: async () => {
          const revision = BigInt(happened.length);
          const id = `evt_${revision}`;
          const meta = { recordedAt: '', actor: { type: 'system', id: 'spec' }, correlationId: '' } as const;
          const { position } = await store.append(stream, revision === 0n ? 'no_stream' : revision - 1n, [
            { id: ids.uuid(), type: 'Happened', v: 1, data: {}, meta },
          ]);
          happened.push({ id, type: 't', accountId, paymentId, payload: Buffer.alloc(0), createdAt: '', stream, revision, position });
        },
        tell: () => write(happened.slice(told)),
        replay: () => write(happened),
        pass: (seconds: number) => pass(seconds * 1000),
        redeliver: (deliveryId: string) =>
          redeliver(staff, [deliveryId]).then(
            () => true,
            () => false,
          ),
        rows: async () => [...webhooks.deliveries.values()].map(({ leaseLosses: losses, ...row }) => ({ ...row, losses })),
        counts: async () => ({ events: webhooks.events.size, attempts: webhooks.attempts.length }),
      };
    };
    return { fresh, close: () => Promise.all(worlds.map((world) => world.close())) };
  },
  200,
);

test('a copy of the keys puts back rows and the last notice; the next statement compares a new connection', async () => {
  const table = new KeyTable(() => 0);
  const row = { accountId: 'a', keyHash: Buffer.from('k'), operation: 'create', fp: Buffer.from('f'), fpKid: 'k', fpFromLog: false, paymentId: 'p', attemptId: 't' }; // prettier-ignore
  const places: unknown[] = [];
  const statement = comparedStatement(table, directStatement, async (place) => void places.push(await place()));
  await statement('claim', () => table.claim(row));
  const goBack = table.copied();
  table.finish(row, '1', 'reserved', null);
  table.claim({ ...row, keyHash: Buffer.from('l') });
  await simulatedClaims(table, statement, async () => '').notice();
  goBack('promoted');
  expect([...table.rows.values()]).toMatchObject([{ state: 'in_progress', fence: 1 }]);
  expect(table).toMatchObject({ fences: 2, noticedAt: null, timeline: 2, starts: 2 });
  // The copy is not changed by what happens to the table afterwards.
  table.finish(row, '1', 'reserved', null);
  goBack('restarted');
  expect([...table.rows.values()]).toMatchObject([{ state: 'in_progress' }]);
  await statement('find', () => table.find(row));
  expect(places).toEqual([
    { systemId: 'keys', timeline: '1', position: '0', startedAt: '1' },
    { systemId: 'keys', timeline: '2', position: '2', startedAt: '3' },
  ]);
});

test('a reserved key of a create never expires by itself', () => {
  let now = 0;
  const table = new KeyTable(() => now);
  const row = {
    accountId: 'a',
    keyHash: Buffer.from('k'),
    operation: 'create',
    fp: Buffer.from('f'),
    fpKid: 'k',
    fpFromLog: false,
    paymentId: 'p',
    attemptId: 't',
  };
  const owned = table.claim(row)!;
  table.finish(row, String(owned.row.fence), 'reserved', null);
  now = 48 * 3_600_000;
  expect(table.claim({ ...row, fp: Buffer.from('g') })).toBeNull();
});

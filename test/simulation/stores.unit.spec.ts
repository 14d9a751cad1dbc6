/** The simulated stores keep the contracts of the real ones; else what is proved over them says nothing. */
import { expect, test } from '@jest/globals';
import { newKeyRing, systemIds } from '#platform';
import { Secret } from '#payments';
import { deliveriesContract } from '../support/deliveries.contract.js';
import { gatewayContract } from '../support/gateway.contract.js';
import { idempotencyContract } from '../support/key-store.contract.js';
import { Bank, bankGateway, CARDS, directWire, type GatewayName } from './bank.js';
import { type EventRow, simulatedDeliveries, WebhookTables } from './deliveries.js';
import { Rng } from './simulator.js';
import { directStatement, KeyTable, memoryIdempotency } from './stores.js';

idempotencyContract('the simulation’s', async () => {
  const table = new KeyTable(() => Date.now());
  const ids = systemIds(() => Date.now());
  const ring = newKeyRing();
  const store = () => memoryIdempotency(table, ring, ids, directStatement);
  return {
    stores: [store(), store()],
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

for (const name of ['bank-lowering', 'bank-plain', 'bank-refunding'] as const satisfies readonly GatewayName[])
  gatewayContract(`the simulation’s bank, ${name}`, async () => {
    const bank = new Bank(() => Date.now());
    const account = { gateway: name, merchantAccount: 'm', credentialsRef: 'c', environment: 'sandbox' as const };
    return {
      gateway: bankGateway(bank, name, directWire),
      account,
      approved: card(CARDS.approved),
      declined: card(CARDS.declined),
      closeBatch: async () => bank.closeBatch('m'),
      close: async () => undefined,
    };
  });

deliveriesContract(
  'the simulation’s',
  async () => ({
    fresh: async () => {
      let now = 1_000_000;
      const tables = new WebhookTables(() => now, new Rng(1));
      const happened: EventRow[] = [];
      let told = 0;
      const position = () => String(happened.length).padStart(4, '0');
      return {
        workers: [simulatedDeliveries(tables, directStatement), simulatedDeliveries(tables, directStatement)] as const,
        register: async (url) => {
          const id = url;
          tables.endpoints.set(id, {
            id,
            accountId: 'a',
            url,
            createdAt: '',
            registeredAt: position(),
            seenFrom: now,
            status: 'enabled',
            failures: 0,
          });
          tables.secrets.set(id, { id, endpointId: id, kid: 'k', ciphertext: 'c', hint: 'hint', state: 'active' });
          return id;
        },
        change: async (endpointId, status) => {
          const endpoint = tables.endpoints.get(endpointId)!;
          if (endpoint.status !== status) Object.assign(endpoint, { status, failures: 0 });
          tables.cancelForDisabled();
        },
        happen: async () => {
          const [id, after] = [`evt_${happened.length}`, String(happened.length + 1).padStart(4, '0')];
          happened.push({ id, type: 't', accountId: 'a', paymentId: 'p', payload: Buffer.alloc(0), stream: 's', revision: id, position: after });
        },
        tell: async () => {
          tables.tell(happened.slice(told));
          told = happened.length;
        },
        replay: async () => {
          tables.tell(happened);
          told = happened.length;
        },
        pass: async (seconds) => void (now += seconds * 1000),
        redeliver: async (deliveryId) => {
          const row = tables.deliveries.get(deliveryId)!;
          const allowed = tables.canReopen(row);
          if (allowed) tables.reopen(row);
          return allowed;
        },
        rows: async () => [...tables.deliveries.values()].map(({ leaseLosses: losses, ...row }) => ({ ...row, losses })),
        counts: async () => ({ events: tables.events.size, attempts: tables.attempts.length }),
      };
    },
    close: async () => undefined,
  }),
  200,
);

test('a reserved key of a create never expires by itself', () => {
  let now = 0;
  const table = new KeyTable(() => now);
  const row = { accountId: 'a', keyHash: Buffer.from('k'), operation: 'create', fp: Buffer.from('f'), fpKid: 'k', paymentId: 'p', attemptId: 't' };
  const owned = table.claim(row)!;
  table.settle(row, String(owned.row.fence), 'reserved', null);
  now = 48 * 3_600_000;
  expect(table.claim({ ...row, fp: Buffer.from('g') })).toBeNull();
});

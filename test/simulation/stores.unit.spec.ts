/** The simulated stores keep the contracts of the real ones; else what is proved over them says nothing. */
import { expect, test } from '@jest/globals';
import { newKeyRing, systemIds } from '#platform';
import { Secret } from '#payments';
import { gatewayContract } from '../support/gateway.contract.js';
import { idempotencyContract } from '../support/idempotency.contract.js';
import { Bank, bankGateway, CARDS, directWire, type GatewayName } from './bank.js';
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

test('a reserved key of a create never expires by itself', () => {
  let now = 0;
  const table = new KeyTable(() => now);
  const row = { accountId: 'a', keyHash: Buffer.from('k'), operation: 'create', fp: Buffer.from('f'), fpKid: 'k', paymentId: 'p', attemptId: 't' };
  const owned = table.claim(row)!;
  table.settle(row, String(owned.row.fence), 'reserved', null);
  now = 48 * 3_600_000;
  expect(table.claim({ ...row, fp: Buffer.from('g') })).toBeNull();
});

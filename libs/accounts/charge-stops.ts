/**
 * The merchant accounts whose processor refuses its lists or our credentials. The outcome of a charge whose answer is lost could not be learned. So no
 * new charge begins through them. The stops are rows, since one process may notice the refusal, and another one charge.
 *
 * The rows may be lost: without its row, an account is stopped again as soon as a process asks for a list.
 */
import type { Migration, Queryable } from '#platform';
import { change, load } from '#eventstore';
import { ServiceError } from '#kernel';
import { MERCHANT_ACCOUNT_STREAM } from './events.js';
import type { MerchantAccount } from './merchant-account.js';

export const chargeStopMigration: Migration = {
  name: '0112-gateway-charge-stop',
  sql: `
    create table gateway_charge_stop (
      gateway text not null, merchant_account text not null, primary key (gateway, merchant_account));
  `,
};

export type Stopped = Pick<MerchantAccount, 'gateway' | 'merchantAccount'>;

/** A port with two implementations: Postgres, and memory in specs. */
export interface ChargeStops {
  all(): Promise<readonly Stopped[]>;
  stop(account: Stopped): Promise<void>;
  /** The processor answers again. */
  end(account: Stopped): Promise<void>;
}

export const postgresChargeStops = (db: Queryable): ChargeStops => ({
  all: async () => {
    const { rows } = await db.query<Stopped>('select gateway, merchant_account as "merchantAccount" from gateway_charge_stop');
    return rows;
  },
  stop: async ({ gateway, merchantAccount }) => {
    await db.query('insert into gateway_charge_stop (gateway, merchant_account) values ($1, $2) on conflict do nothing', [gateway, merchantAccount]);
  },
  end: async ({ gateway, merchantAccount }) => {
    await db.query('delete from gateway_charge_stop where gateway = $1 and merchant_account = $2', [gateway, merchantAccount]);
  },
});

/** Disables the charges of an account until a person enables it. Does nothing if it is disabled already. */
export const disableCharges = async (
  ports: Parameters<typeof change>[0],
  merchantAccount: string,
  reason: string,
  correlationId: string,
): Promise<void> => {
  const busy = () => new ServiceError('INVALID_STATE', 'The merchant account is being changed.');
  const origin = { actor: { type: 'system', id: 'gateways' }, correlationId } as const;
  const { state } = await load(ports.store, MERCHANT_ACCOUNT_STREAM, merchantAccount);
  if (state?.status !== 'active') return;
  await change(ports, MERCHANT_ACCOUNT_STREAM, merchantAccount, { type: 'Disable', scope: 'charges', reason }, origin, busy);
};

/**
 * The merchant accounts whose processor refuses its lists, so that nobody could learn what became of a charge whose answer is lost. No new charge
 * begins through them. One process may notice it and another one charge, so the stops are rows.
 *
 * The rows may be lost: without its row, an account is stopped again as soon as a process asks for a list.
 */
import type { Migration, Queryable } from '#platform';
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

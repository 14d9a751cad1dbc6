/**
 * The charge that each transaction of a processor belongs to. A processor may answer two charges of one merchant account with the same transaction, by
 * an error of its own. To undo the second charge could return the money of the first. So the first reference keeps the transaction.
 *
 * The rows begin with the release that made the table. A row is written before the outcome is recorded, and without waiting for the disk. So after a
 * crash of the database, only the last rows may be missing.
 */
import type { Migration, Pool, Queryable } from '#platform';
import type { GatewayAccount, Ref } from './gateway.js';

export const transactionClaimMigration: Migration = {
  name: '0113-transaction-claim',
  sql: `
    create table transaction_claim (
      gateway text not null, merchant_account text not null, transaction_id text not null, ref text not null, repeated_by text[],
      primary key (gateway, merchant_account, transaction_id));
    create index transaction_claim_repeated on transaction_claim (gateway) where repeated_by is not null;
  `,
};

export interface TransactionClaims {
  /**
   * True: the transaction belongs to this reference, now or before. False: it belongs to another one, and this one is noted. A reference that was
   * noted once gets no transaction any more: nobody knows which answer of the processor was true.
   */
  claim(account: Pick<GatewayAccount, 'gateway' | 'merchantAccount'>, transactionId: string, ref: Ref): Promise<boolean>;
}

export const postgresTransactionClaims = (pool: Pool): TransactionClaims => ({
  claim: async ({ gateway, merchantAccount }, transactionId, ref) => {
    const { rows } = await pool.query<{ ref: string }>(
      `with quick as (select set_config('synchronous_commit', 'off', true))
       insert into transaction_claim as known (gateway, merchant_account, transaction_id, ref) select $1, $2, $3, $4 from quick
       where not exists (select from transaction_claim t where t.gateway = $1 and t.merchant_account = $2 and $4 = any(t.repeated_by))
       on conflict (gateway, merchant_account, transaction_id) do update set repeated_by = array_append(known.repeated_by, excluded.ref)
         where known.ref <> excluded.ref and not excluded.ref = any(coalesce(known.repeated_by, '{}'))
       returning ref`,
      [gateway, merchantAccount, transactionId, ref],
    );
    if (rows[0]) return rows[0].ref === ref;
    // The row stood before, and did not change: it is of this reference, or had noted it. Or there is no row: the reference is noted at another one.
    const { rows: known } = await pool.query<{ ref: string }>(
      'select ref from transaction_claim where gateway = $1 and merchant_account = $2 and transaction_id = $3',
      [gateway, merchantAccount, transactionId],
    );
    return known[0]?.ref === ref;
  },
});

export interface RepeatedTransaction extends Pick<GatewayAccount, 'gateway' | 'merchantAccount'> {
  readonly transactionId: string;
  /** The second reference and all later ones. */
  readonly refs: readonly Ref[];
}

/** The transactions that more than one charge was answered with. */
export const repeatedTransactions = async (db: Queryable): Promise<readonly RepeatedTransaction[]> => {
  const { rows } = await db.query<RepeatedTransaction>(
    `select gateway, merchant_account as "merchantAccount", transaction_id as "transactionId", repeated_by as refs
     from transaction_claim where repeated_by is not null order by 1, 2, 3`,
  );
  return rows;
};

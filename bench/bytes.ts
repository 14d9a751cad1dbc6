/** Prints the bytes of a payment for each table and index, and the sum without the rows that expire. */
import { SCHEMAS_OF_POSTGRES } from './pages.js';
import type { Pool } from '#platform';

interface Relation {
  readonly schema: string;
  readonly table: string;
  /** null: the table itself, with its TOAST and its maps. */
  readonly index: string | null;
  readonly bytes: number;
  readonly scans: number;
}

/** Tables whose rows expire: keys after a day, notifications after their delivery. */
const EXPIRES = ['idempotency_key', 'webhook_event', 'webhook_delivery', 'webhook_attempt', 'velocity_entry'];
/** The audit trail. */
const TRAIL = ['events', 'log_tile'];
/** Smaller relations, in bytes per payment, share one line. */
const SHOWN_FROM = 1;

const relations = async (pool: Pool): Promise<readonly Relation[]> => {
  const { rows } = await pool.query<Record<keyof Relation, string>>(
    `select n.nspname as schema, t.relname as table, i.relname as index, coalesce(s.idx_scan, 0) as scans,
            case when i.oid is null then pg_table_size(t.oid) else pg_relation_size(i.oid) end as bytes
     from pg_class t join pg_namespace n on n.oid = t.relnamespace
     cross join lateral (select null::oid as indexrelid union all select x.indexrelid from pg_index x where x.indrelid = t.oid) x
     left join pg_class i on i.oid = x.indexrelid left join pg_stat_user_indexes s on s.indexrelid = x.indexrelid
     where t.relkind = 'r' and n.nspname not in ${SCHEMAS_OF_POSTGRES}`,
  );
  return rows.map((row) => ({ ...row, bytes: Number(row.bytes), scans: Number(row.scans) }));
};

/** Bytes of a payment: of the audit trail, of the rows that expire, and of everything else. */
export interface Bytes {
  readonly trail: number;
  readonly expires: number;
  readonly others: number;
}

export const printBytes = async (pool: Pool): Promise<Bytes> => {
  const { rows } = await pool.query<{ count: string }>('select count(*) as count from payment_list');
  const payments = Number(rows[0]!.count);
  const all = (await relations(pool)).map((one) => ({ ...one, each: one.bytes / payments })).sort((a, b) => b.bytes - a.bytes);
  const sum = (some: readonly { each: number }[]) => some.reduce((total, { each }) => total + each, 0);
  const of = (names: readonly string[]) => all.filter(({ table }) => names.includes(table));
  console.log(`bytes of ${payments} payments, each`);
  const line = (each: number, name: string, note = '') => console.log(`${each.toFixed(0).padStart(7)}  ${name.padEnd(84)}${note}`);
  for (const { each, schema, table, index, scans } of all.filter(({ each: bytes }) => bytes >= SHOWN_FROM))
    line(each, `${schema}.${table}${index === null ? '' : `  ${index}`}`, index === null ? '' : `${scans} scans`);
  line(sum(all.filter(({ each }) => each < SHOWN_FROM)), 'other tables and indexes');
  const [trail, expires] = [sum(of(TRAIL)), sum(of(EXPIRES))];
  const others = sum(all) - trail - expires;
  line(trail, 'events and seal');
  line(expires, 'keys, notifications and other rows that expire');
  line(others, 'everything else that stays');
  return { trail, expires, others };
};

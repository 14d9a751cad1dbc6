/** Measures the import of a large settlement batch beside creates. The payments of the batch are copies of one real charge that has not settled. */
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { copyInto, type Pool, transaction } from '#platform';
import { caughtUp } from './history.js';
import { type LoadResult, openLoop } from './load.js';
import { copiesOf, keptIds } from './multiply.js';
import { type Operated, operate } from './operate.js';
import { type BenchService, createRequest, serviceMs } from './service.js';
import { EVENT_COLUMNS, eventsOf } from './store.js';

const CONNECTIONS = 8;
/** Payments per transaction. Each has two events. */
const CHUNK_PAYMENTS = 5_000;
/** The processor's fee of each line. */
const FEE_CENTS = 35;
const HEADER = 'batch_id,closed_at,transaction_id,ref,type,gross_cents,fee_cents,net_cents,funded_on';

/**
 * Appends copies of the newest approved charge, which nothing has settled. Their times are those of the copying, so the log stays in the order of
 * time. Returns the position of the first copy.
 */
const copyNewestCharge = async (pool: Pool, count: number): Promise<number> => {
  const base = await eventsOf(
    pool,
    `where stream_id = (select stream_id from es.events where type = 'PaymentCreated' order by position desc limit 1) and revision < 2`,
  );
  const kept = keptIds(await eventsOf(pool, `where stream_id like 'account-%' or stream_id like 'portal-%'`));
  const bornMs = Date.parse(base[0]!.recordedAt);
  const copies = base.map((event) => copiesOf(event, kept, bornMs));
  let first: number | null = null;
  for (let done = 0; done < count;) {
    const size = Math.min(CHUNK_PAYMENTS, count - done);
    await transaction(pool, async (client) => {
      // Appends of the service wait for this row until the chunk is committed.
      const { rows } = await client.query<{ position: string }>('update es.head set position = position + $1 returning position', [
        size * base.length,
      ]);
      let position = Number(rows[0]!.position) - size * base.length;
      first ??= position + 1;
      const shiftMs = Date.now() - bornMs;
      const copy = copyInto(client, 'es.events', EVENT_COLUMNS);
      for (const end = done + size; done < end; done++)
        for (const copyOf of copies) {
          const { stream, revision, eventId, type, data, meta, recordedAt } = copyOf({ number: done, shiftMs });
          await copy.write([String(++position), stream, revision, eventId, type, data, meta, recordedAt]);
        }
      await copy.end();
    });
  }
  return first!;
};

interface Line {
  readonly transaction_id: string;
  readonly ref: string;
  readonly cents: string;
}

/** Writes the processor's file of the payments from a position on: the larger leg of each payment. Returns the merchant account of the file. */
const writeBatchFile = async (pool: Pool, file: string, batchId: string, from: number, lines: number): Promise<string> => {
  const copied = `from es.events e join gateway_transaction t on t.payment_id = substr(e.stream_id, 9)::uuid
    where e.position >= $1 and e.type = 'PaymentInitiated' and e.stream_id like 'payment-%' and t.settled_batch_id is null and t.transaction_id is not null`;
  const { rows: accounts } = await pool.query<{ merchant_account: string }>(
    `select t.merchant_account ${copied} and e.position < $1 + 100 group by 1 order by sum(t.amount_cents) desc limit 1`,
    [from],
  );
  const merchantAccount = accounts[0]!.merchant_account;
  const { rows } = await pool.query<Line>(
    `select t.transaction_id, t.ref, t.amount_cents as cents ${copied} and t.merchant_account = $2 order by e.position limit $3`,
    [from, merchantAccount, lines],
  );
  if (rows.length < lines) throw new Error(`only ${rows.length} of ${lines} payments can be settled`);
  const closedAt = new Date().toISOString();
  const text = rows.map(
    ({ transaction_id: id, ref, cents }) => `${batchId},${closedAt},${id},${ref},sale,${cents},${FEE_CENTS},${Number(cents) - FEE_CENTS},\n`,
  );
  await writeFile(file, `${HEADER}\n${text.join('')}`);
  return merchantAccount;
};

export interface SettledBatch {
  readonly imported: Operated;
  readonly creates: LoadResult;
  /** Processor time of the command and of the whole service while it runs. */
  readonly cpuMs: number;
  /** What is wrong with the result. null: every line matched its payment. */
  readonly failed: string | null;
}

/** Makes as many payments as the batch has lines, and imports the batch beside `rate` creates per second. */
export const settleBatch = async (service: BenchService, lines: number, rate: number): Promise<SettledBatch> => {
  const folder = await mkdtemp(join(tmpdir(), 'payfold-batch-'));
  try {
    const from = await copyNewestCharge(service.pool, lines);
    await caughtUp(service);
    const batchId = `bench_${Date.now()}`;
    const file = join(folder, 'batch.csv');
    const account = await writeBatchFile(service.pool, file, batchId, from, lines);
    const load = { host: service.url.hostname, port: Number(service.url.port), connections: CONNECTIONS, request: createRequest(service, batchId) };
    const over = new AbortController();
    const cpu = serviceMs(service);
    const creating = openLoop(load, rate, Number.POSITIVE_INFINITY, undefined, over.signal);
    const imported = await operate(service, 'settlement', 'import', file, '--merchant-account', account).finally(() => over.abort());
    const cpuMs = imported.cpuMs + serviceMs(service) - cpu;
    return { imported, creates: await creating, cpuMs, failed: faultOf(imported, lines) };
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
};

const faultOf = ({ exitCode, stdout, stderr }: Operated, lines: number): string | null => {
  if (exitCode !== 0) return `exit ${exitCode}: ${(stderr || stdout).slice(0, 200)}`;
  const told = JSON.parse(stdout) as { lines: number; exceptions: number };
  return told.lines === lines && told.exceptions === 0 ? null : `${told.lines} lines, ${told.exceptions} exceptions`;
};

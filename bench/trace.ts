/**
 * Shows how long each step of a create takes, from its due time to its answer. The steps end with the claim of its key, the intent, the charges and
 * the outcome.
 */
import type { Pool } from '#platform';
import type { Answered } from './load.js';

interface Moments {
  readonly request: string;
  readonly claimed: number;
  readonly decided: number;
  readonly stored: number;
  readonly charged: number;
  readonly recorded: number;
}

const STEPS = ['in, authenticated, key claimed', 'terms read, intent decided', 'intent written', 'intent committed, charged', 'outcome written', 'outcome committed, answered'] as const; // prettier-ignore

/**
 * Prints the mean of each step in milliseconds, for creates around the median and for the slowest 1 %. `run`: the run name passed to `createRequest`.
 */
export const printTrace = async (pool: Pool, run: string, answered: readonly Answered[]): Promise<void> => {
  const ms = (column: string) => `extract(epoch from ${column})::float8 * 1000`;
  const { rows } = await pool.query<Moments>(
    `select i.meta->>'correlationId' as request, ${ms('k.created_at')} as claimed,
            ${ms("(i.meta->>'recordedAt')::timestamptz")} as decided, ${ms('i.stored_at')} as stored,
            ${ms("(o.meta->>'recordedAt')::timestamptz")} as charged, ${ms('o.stored_at')} as recorded
     from es.events i
     join es.events o on o.stream_id = i.stream_id and o.revision = 1
     join idempotency_key k on k.payment_id = substr(i.stream_id, 9)::uuid
     where i.type = 'PaymentInitiated' and i.meta->>'correlationId' like $1 || '-%'`,
    [run],
  );
  const found = new Map(rows.map((row) => [row.request, row]));
  const traces = answered
    .flatMap(({ number, dueMs, answeredMs }) => {
      const row = found.get(`${run}-${number}`);
      if (!row) return [];
      const moments = [dueMs, row.claimed, row.decided, row.stored, row.charged, row.recorded, answeredMs];
      return [{ total: answeredMs - dueMs, steps: moments.slice(1).map((moment, index) => moment - moments[index]!) }];
    })
    .sort((a, b) => a.total - b.total);
  const at = (share: number) => Math.floor(traces.length * share);
  const mean = (from: number, to: number) => {
    const some = traces.slice(from, Math.max(to, from + 1));
    return STEPS.map((_, step) => some.reduce((sum, { steps }) => sum + steps[step]!, 0) / some.length);
  };
  const [middle, slow] = [mean(at(0.45), at(0.55)), mean(at(0.99), traces.length)];
  STEPS.forEach((step, index) =>
    console.log(
      `  ${step.padEnd(32)} ${middle[index]!.toFixed(1).padStart(6)} ms at the median ${slow[index]!.toFixed(1).padStart(6)} ms in the slowest 1 %`,
    ),
  );
};

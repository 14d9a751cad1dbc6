/**
 * The double as a process: `npm run double:stripe -- [--file PATH] [--port N] [--delay-ms N] [--database URL]`. Prints one JSON line when it listens.
 * With `--database`, its clock follows `payfold sandbox advance` of that database.
 */
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import pg from 'pg';
import { startStripeDouble } from './server.js';

const FOLLOW_MS = 250;

const { values } = parseArgs({
  options: {
    file: { type: 'string', default: join(tmpdir(), 'payfold-double-stripe.jsonl') },
    port: { type: 'string', default: '0' },
    'delay-ms': { type: 'string', default: '0' },
    database: { type: 'string' },
  },
});

const double = await startStripeDouble({ file: values.file, port: Number(values.port), delayMs: Number(values['delay-ms']) });

if (values.database !== undefined) {
  const pool = new pg.Pool({ connectionString: values.database, max: 1 });
  pool.on('error', () => undefined);
  const follow = async (): Promise<void> => {
    const { rows } = await pool.query<{ ahead_ms: string }>('select ahead_ms from public.sandbox_time');
    double.vendor.moveTo(Number(rows[0]?.ahead_ms ?? 0));
  };
  // The database may start later, and may be away for a while.
  setInterval(() => void follow().catch(() => undefined), FOLLOW_MS);
}

const stop = () => void double.close().then(() => process.exit(0));
process.on('SIGTERM', stop);
process.on('SIGINT', stop);
process.stdout.write(`${JSON.stringify({ ready: 'double:stripe', url: double.url, pid: process.pid })}\n`);

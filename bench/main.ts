/**
 * `npm run bench [-- name … --option value …]` runs the named benchmarks one after the other, each in its own process. Without names, it runs all
 * benchmarks except the long ones. Each benchmark adds a line to `reports/bench.ndjson`.
 */
import { spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { writeReport } from '../test/support/report.js';

const BENCHMARKS = ['append', 'create', 'read-models', 'growth', 'checkout', 'webhooks', 'ledger', 'held', 'outage', 'tenants', 'feed'];
/** Benchmarks whose options set their duration. They run only if they are named. */
const LONG = ['soak', 'memory', 'year', 'processors', 'erase'];

const [, , ...given] = process.argv;
const firstOption = given.findIndex((word) => word.startsWith('--'));
const [names, options] = firstOption < 0 ? [given, []] : [given.slice(0, firstOption), given.slice(firstOption)];

/** Runs a benchmark and prints its output at once. */
const run = (name: string): Promise<{ exitCode: number | null; printed: string }> =>
  new Promise((resolve, reject) => {
    const script = fileURLToPath(new URL(`./${name}.js`, import.meta.url));
    const child = spawn(process.execPath, ['--enable-source-maps', script, ...options], { stdio: ['inherit', 'pipe', 'inherit'] });
    let printed = '';
    child.stdout.on('data', (chunk: Buffer) => {
      process.stdout.write(chunk);
      printed += chunk.toString();
    });
    child.once('error', reject);
    child.once('close', (exitCode) => resolve({ exitCode, printed }));
  });

const unknown = names.filter((name) => ![...BENCHMARKS, ...LONG].includes(name));
if (unknown.length > 0) {
  process.stderr.write(`there is no benchmark ${unknown.join(', ')}; there are ${[...BENCHMARKS, ...LONG].join(', ')}\n`);
  process.exitCode = 2;
} else {
  for (const name of names.length > 0 ? names : BENCHMARKS) {
    process.stdout.write(`\n── ${name} ──\n`);
    const { exitCode, printed } = await run(name);
    writeReport('bench', { bench: name, options, exitCode, printed: printed.split('\n').filter((line) => line !== '') });
    if (exitCode !== 0) process.exitCode = 1;
  }
}

/** `npm run bench [-- name … --option value …]`: the named benchmarks, or all of them, one after the other, each as a process of its own. */
import { spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';

const BENCHMARKS = ['append', 'create', 'read-models', 'growth', 'checkout', 'webhooks', 'ledger', 'held', 'outage'];
/** Takes as long as one says: only when it is named. */
const LONG = ['soak'];

const [, , ...given] = process.argv;
const firstOption = given.findIndex((word) => word.startsWith('--'));
const [names, options] = firstOption < 0 ? [given, []] : [given.slice(0, firstOption), given.slice(firstOption)];
const unknown = names.filter((name) => ![...BENCHMARKS, ...LONG].includes(name));
if (unknown.length > 0) {
  process.stderr.write(`there is no benchmark ${unknown.join(', ')}; there are ${[...BENCHMARKS, ...LONG].join(', ')}\n`);
  process.exitCode = 2;
} else {
  for (const name of names.length > 0 ? names : BENCHMARKS) {
    process.stdout.write(`\n── ${name} ──\n`);
    const { status } = spawnSync(process.execPath, ['--enable-source-maps', fileURLToPath(new URL(`./${name}.js`, import.meta.url)), ...options], {
      stdio: 'inherit',
    });
    if (status !== 0) process.exitCode = 1;
  }
}

/**
 * The command line of the chaos runs. Exits with 1 after a violation.
 *
 * - `npm run chaos [-- --minutes M --rounds R --seed S --plant charge|loss]`
 * - `npm run chaos -- --keys 200`: sends each key 50 times at once.
 * - `npm run chaos -- --soak [--minutes 40 --rate 42 --seed S]`: an even load on `npm start`, with commands of staff and restarts.
 * - `npm run chaos -- --disk [--rounds 5]`: needs root.
 * - `npm run chaos:tcp [-- --seed S]`
 */
import { parseArgs } from 'node:util';
import { Random } from '../../apps/demo/city.js';
import { progress, writeReport } from '../support/report.js';
import { PLANTS, runChaos } from './chaos.js';
import { mayMount, proveDisk } from './disk.js';
import { proveKeys } from './keys.js';
import { runSoak } from './soak.js';
import { proveTcp } from './tcp.js';

const { values } = parseArgs({
  options: {
    tcp: { type: 'boolean', default: false },
    minutes: { type: 'string' },
    rounds: { type: 'string' },
    seed: { type: 'string' },
    keys: { type: 'string' },
    plant: { type: 'string' },
    disk: { type: 'boolean', default: false },
    soak: { type: 'boolean', default: false },
    /** Charges per second of a soak. */
    rate: { type: 'string', default: '42' },
  },
});
const seed = Number(values.seed ?? Math.floor(Date.now() / 1_000));
const random = new Random(seed);
const plant = PLANTS.find((one) => one === values.plant) ?? null;
if (values.plant !== undefined && plant === null) throw new Error(`--plant ${values.plant}: must be one of ${PLANTS.join(', ')}`);
/** How many requests with the same key are sent at once. */
const HANDS = 50;
const begun = performance.now();

const finish = (name: string, { violations, ...figures }: { violations: readonly string[] }): void => {
  const seconds = Math.round((performance.now() - begun) / 1_000);
  for (const violation of violations.slice(0, 20)) console.log(`✗ ${violation}`);
  console.log(`${name}, seed ${seed}: ${violations.length} violations in ${seconds} s\n${JSON.stringify(figures, null, 2)}`);
  writeReport(name, { seed, seconds, ...(plant && { plant }), ...figures, violations: violations.length });
  if (violations.length > 0) process.exitCode = 1;
};

if (values.tcp) {
  const bar = progress('cases', 96);
  const report = await proveTcp(random, { onProgress: (cases) => bar.update(cases) });
  bar.stop();
  finish('chaos-tcp', report);
} else if (values.soak) {
  const options = { minutes: Number(values.minutes ?? 40), rate: Number(values.rate) };
  finish('chaos-soak', await runSoak(random, { ...options, onProgress: (line) => console.log(line) }));
} else if (values.disk) {
  if (mayMount()) finish('chaos-disk', await proveDisk(random, Number(values.rounds ?? 5), (line) => console.log(line)));
  else console.log('no disk was filled: only root may mount one that is small enough');
} else if (values.keys !== undefined) {
  const keys = Number(values.keys);
  const bar = progress('keys', keys);
  const report = await proveKeys(random, keys, HANDS, (done) => bar.update(done));
  bar.stop();
  finish('chaos-keys', report);
} else {
  const milliseconds = Number(values.minutes ?? 10) * 60_000;
  const rounds = values.rounds === undefined ? Number.POSITIVE_INFINITY : Number(values.rounds);
  finish('chaos', await runChaos(random, { milliseconds, rounds, plant, onProgress: (line) => console.log(line) }));
}

// Node 20 may wait for ever for the pipes of killed children.
process.exit();

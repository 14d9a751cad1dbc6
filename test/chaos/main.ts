/** `npm run chaos:tcp [-- --seed S]`. Exit 1 on a violation. */
import { parseArgs } from 'node:util';
import { Random } from '../../apps/demo/city.js';
import { progress, writeReport } from '../support/report.js';
import { proveTcp } from './tcp.js';

const { values } = parseArgs({ options: { tcp: { type: 'boolean', default: false }, seed: { type: 'string' } } });
const seed = Number(values.seed ?? Math.floor(Date.now() / 1_000));
const begun = performance.now();

const finish = (name: string, { violations, ...figures }: { violations: readonly string[] }): void => {
  const seconds = Math.round((performance.now() - begun) / 1_000);
  for (const violation of violations.slice(0, 20)) console.log(`✗ ${violation}`);
  console.log(`${name}, seed ${seed}: ${violations.length} violations in ${seconds} s\n${JSON.stringify(figures, null, 2)}`);
  writeReport(name, { seed, seconds, ...figures, violations: violations.length });
  if (violations.length > 0) process.exitCode = 1;
};

const bar = progress('cases', 96);
const report = await proveTcp(new Random(seed), { onProgress: (cases) => bar.update(cases) });
bar.stop();
finish('chaos-tcp', report);

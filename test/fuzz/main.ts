/**
 * `npm run fuzz:api -- [--minutes M] [--requests N] [--seed S] [--parallel P] [--plant]`: starts a service and fuzzes it from its own document. Exit
 * 1 on a violation.
 */
import { parseArgs } from 'node:util';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { DataDir, runtimeOf, start, welcomeOf } from '../support/processes.js';
import { progress, writeReport } from '../support/report.js';
import { fuzzApi } from './api.js';

const { values } = parseArgs({
  options: {
    minutes: { type: 'string', default: '2' },
    requests: { type: 'string' },
    seed: { type: 'string' },
    parallel: { type: 'string', default: '16' },
    plant: { type: 'boolean', default: false },
  },
});
const seed = Number(values.seed ?? Math.floor(Date.now() / 1_000));
const milliseconds = values.requests === undefined ? Number(values.minutes) * 60_000 : Number.POSITIVE_INFINITY;
const requests = Number(values.requests ?? Number.POSITIVE_INFINITY);

const dataDir = await DataDir.create();
try {
  const service = await start('standalone', dataDir, { LOG_LEVEL: 'warn' });
  const { apiKey, portalId } = welcomeOf(service.stdout())!;
  const { apiUrl, simulatorUrl } = runtimeOf(dataDir);
  const begun = performance.now();
  const bar = progress('requests', Number.isFinite(requests) ? requests : null);
  const target = { url: apiUrl, apiKey, portalId, bank: createSimulatorControl(simulatorUrl, controlKeyOf(dataDir.data)) };
  const report = await fuzzApi(target, {
    seed,
    requests,
    milliseconds,
    parallel: Number(values.parallel),
    planted: values.plant,
    onProgress: (count) => bar.update(count),
  });
  bar.stop();
  await service.stop();
  const seconds = Math.round((performance.now() - begun) / 1_000);
  for (const { check, what, request, answer } of report.violations.slice(0, 10)) console.log(`\n✗ ${check}: ${what}\n  ${request}\n  → ${answer}`);
  console.log(
    `\n${report.requests} requests in ${seconds} s, seed ${seed}: ${report.violations.length} violations\nstatuses ${JSON.stringify(report.statuses)}\nchecks ${JSON.stringify(report.checks)}`,
  );
  const { violations, ...figures } = report;
  writeReport('fuzz-api', { ...figures, seconds, violations: violations.length });
  if (violations.length > 0) process.exitCode = 1;
} finally {
  await dataDir.remove();
}

/**
 * `npm run fuzz:parsers -- [--minutes M] [--executions N] [--seed S] [--only NAME]`: fuzzes every parser for an equal share of the time. First the
 * fuzzer must find a planted bug. Exit 1 on a violation.
 */
import { parseArgs } from 'node:util';
import { writeReport } from '../support/report.js';
import { fuzzParser, type ParserReport } from './coverage.js';
import { PARSERS, plantedTarget } from './parsers.js';

const { values } = parseArgs({
  options: { minutes: { type: 'string', default: '2' }, executions: { type: 'string' }, seed: { type: 'string' }, only: { type: 'string' } },
});
const seed = Number(values.seed ?? Math.floor(Date.now() / 1_000));
const targets = PARSERS.filter(({ name }) => values.only === undefined || name === values.only);
const milliseconds = values.executions === undefined ? (Number(values.minutes) * 60_000) / targets.length : Number.POSITIVE_INFINITY;
const executions = values.executions === undefined ? Number.POSITIVE_INFINITY : Math.ceil(Number(values.executions) / targets.length);
/** The planted bug is behind four nested conditions. The fuzzer finds it in far fewer runs. */
const PLANTED_EXECUTIONS = 5_000_000;

const begun = performance.now();
const planted = fuzzParser(plantedTarget, { seed, executions: PLANTED_EXECUTIONS, milliseconds: 120_000 });
console.log(`planted bug ${planted.failure ? 'found after' : 'NOT FOUND in'} ${planted.executions} executions`);
const reports: ParserReport[] = [];
for (const target of targets) {
  const started = performance.now();
  const report = fuzzParser(target, { seed, executions, milliseconds });
  // Let this parser's asynchronous work end before the next parser starts.
  await new Promise((settled) => setImmediate(settled));
  reports.push(report);
  const rate = report.executions / ((performance.now() - started) / 1_000);
  console.log(
    `${report.failure ? '✗' : '✓'} ${report.name}: ${report.executions} executions, ${rate.toFixed(0)}/s, ${report.blocks} blocks, corpus ${report.corpus}${report.failure ? `\n  ${report.failure.message}\n  input (latin1) ${report.failure.input}` : ''}`,
  );
}
const total = reports.reduce((sum, report) => sum + report.executions, 0);
const failures = reports.filter(({ failure }) => failure !== null).length;
console.log(`${total} executions, seed ${seed}, ${failures} violations`);
writeReport('fuzz-parsers', {
  seed,
  seconds: Math.round((performance.now() - begun) / 1_000),
  executions: total,
  planted: planted.failure ? planted.executions : null,
  targets: Object.fromEntries(reports.map(({ name, executions: ran, blocks }) => [name, { executions: ran, blocks }])),
  violations: failures,
});
if (failures > 0 || !planted.failure) process.exitCode = 1;

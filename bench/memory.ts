/**
 * Measures whether the memory of supervisor, API and worker grows with their work. Resident memory is sampled when idle after the start, after every
 * 10,000 creates at an even rate, and when idle at the end. The first sample includes the simulated processor. Then the benchmark measures the
 * rebuild of the list of all these payments.
 *
 * `npm run bench -- memory [--payments 200000] [--rate 300]`.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { caughtUp, rebuild } from './history.js';
import { openLoop, slope } from './load.js';
import { createRequest, rssOf, startService } from './service.js';

const CONNECTIONS = 32;
const STEP = 10_000;
/** V8 returns memory to the system only after some time without work. */
const IDLE_MS = 60_000;
const CEILING_IDLE_MIB = 350;
/** After this share of the creates, caches are full and the code is compiled. */
const WARM_UP_SHARE = 0.25;

const { values } = parseArgs({ options: { payments: { type: 'string', default: '200000' }, rate: { type: 'string', default: '300' } } });
const [payments, rate] = [Number(values.payments), Number(values.rate)];

const service = await startService();
try {
  await sleep(IDLE_MS);
  const idle = await rssOf(service, ['supervisor', 'api', 'worker', 'processor']);
  console.log(`idle after the start ${idle.toFixed(0)} MiB; ceiling ${CEILING_IDLE_MIB}`);
  const statuses = new Map<number, number>();
  const samples: (readonly [creates: number, mib: number])[] = [];
  for (let done = 0; done < payments; done += STEP) {
    const count = Math.min(STEP, payments - done);
    const load = {
      host: service.url.hostname,
      port: Number(service.url.port),
      connections: CONNECTIONS,
      request: createRequest(service, `m${done}`),
    };
    const result = await openLoop(load, rate, count / rate);
    for (const [status, answers] of result.statuses) statuses.set(status, (statuses.get(status) ?? 0) + answers);
    const mib = await rssOf(service, ['supervisor', 'api', 'worker']);
    samples.push([done + count, mib]);
    console.log(`${done + count} creates: ${mib.toFixed(0)} MiB, ${result.perSecond.toFixed(0)}/s`);
  }
  await caughtUp(service);
  await sleep(IDLE_MS);
  const idleAgain = await rssOf(service, ['supervisor', 'api', 'worker']);
  const kept = samples.filter(([creates]) => creates > payments * WARM_UP_SHARE);
  const growth = 100_000 * slope(kept);
  const [least, most] = [Math.min(...kept.map(([, mib]) => mib)), Math.max(...kept.map(([, mib]) => mib))];
  console.log(`after the first quarter ${least.toFixed(0)} to ${most.toFixed(0)} MiB, slope ${growth.toFixed(1)} MiB for 100,000 creates; idle again ${idleAgain.toFixed(0)} MiB; answers ${[...statuses].map(([status, count]) => `${status}: ${count}`).join(', ')}`); // prettier-ignore
  const rebuilt = await rebuild(service);
  console.log(`rebuild of the list: ${rebuilt.events} events in ${rebuilt.seconds.toFixed(1)} s, ${(rebuilt.events / rebuilt.seconds).toFixed(0)}/s, at most ${rebuilt.peakMib.toFixed(0)} MiB`); // prettier-ignore
  if (idle > CEILING_IDLE_MIB || [...statuses.keys()].some((status) => status !== 200)) process.exitCode = 1;
} finally {
  await service.stop();
}

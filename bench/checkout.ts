/**
 * Measures hosted checkout: pages rendered per second on one core, the size of a page, and paint and layout shifts in a browser. Then 200 payers go
 * through the checkout over HTTP at the same time. At the end, the benchmark checks that each payer was charged once.
 */
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { assetNamed, assetsFor, Pay, render } from '#checkout';
import { startBrowser } from '../test/support/browser.js';
import { CARD_FORM, formOf, intakeOf, Payer, readReturn, SHOP } from '../test/support/checkout.js';
import { percentile } from './load.js';
import { startService } from './service.js';

const RENDER_SECONDS = 3;
const PAYERS = 200;
/**
 * `within`: the payers arrive within this many seconds. Each payer takes up to this long to read and type. With 0, all requests are sent at the same
 * instant. The figure then shows a queue of 200 requests.
 */
const ROUNDS = [{ within: 10 }, { within: 10 }, { within: 0 }] as const;
const PAINTS = 5;
const LAUNCHER = fileURLToPath(new URL('../../apps/operator/payfold.mjs', import.meta.url));

const kib = (bytes: number) => `${(bytes / 1024).toFixed(1)} KiB`;
const assets = assetsFor(null);
const line = { referenceId: 'WTR-2041', description: 'Water', amountCents: 10_000 };
const pageOf = (lines: number) =>
  Pay({
    frame: { locale: 'en', agency: 'City of Riverton', sandbox: false, assets },
    page: {
      checkoutId: `cs_${'x'.repeat(32)}`,
      lines: Array.from({ length: lines }, () => line),
      amountCents: 10_000 * lines,
      serviceFeeCents: 300,
      proof: { attemptId: '018f0000-0000-7000-8000-00000000000a', token: 'x'.repeat(43) },
      expiresAt: '2026-11-21T15:00:00.000Z',
      values: {},
      faults: {},
      notice: null,
    },
  });

for (const lines of [2, 50]) {
  for (let warm = 0; warm < 500; warm++) render(pageOf(lines));
  let pages = 0;
  const started = performance.now();
  while (performance.now() - started < RENDER_SECONDS * 1_000) {
    for (let batch = 0; batch < 20; batch++) render(pageOf(lines));
    pages += 20;
  }
  const perSecond = pages / ((performance.now() - started) / 1_000);
  console.log(`${lines} lines: ${perSecond.toFixed(0)} pages/s on one core; floor 1000`);
  if (lines === 2 && perSecond < 1_000) process.exitCode = 1;
}

const files = Object.entries(assets).map(([name, path]) => [name, Buffer.byteLength(assetNamed(path.split('/').at(-1)!)!.body)] as const);
const htmlBytes = Buffer.byteLength(render(pageOf(2)));
const total = htmlBytes + files.reduce((sum, [, bytes]) => sum + bytes, 0);
console.log(
  `pay page ${kib(total)} uncompressed (page ${kib(htmlBytes)}, ${files.map(([name, bytes]) => `${name} ${kib(bytes)}`).join(', ')}); ceiling 30 KiB`,
);
if (total > 30 * 1024) process.exitCode = 1;

const service = await startService();
try {
  const env = { ...process.env, DATA_DIR: service.dataDir };
  execFileSync(process.execPath, [LAUNCHER, 'portals', 'checkout', service.portalId, '--enable', '--allow', `${SHOP}/pay`], { env });
  const staged = execFileSync(process.execPath, [LAUNCHER, '--json', 'portals', 'checkout', service.portalId, '--stage-secret'], {
    env,
    encoding: 'utf8',
  });
  execFileSync(process.execPath, [LAUNCHER, 'portals', 'checkout', service.portalId, '--activate-secret'], { env });
  const { signingSecret } = JSON.parse(staged) as { signingSecret: string };
  const origin = service.url.origin;
  const fields = intakeOf(service, { state: 'bench' });

  const browser = await startBrowser();
  try {
    const paints: number[] = [];
    let shift = 0;
    for (let paint = 0; paint < PAINTS; paint++) {
      const payer = new Payer(origin);
      const id = await payer.begin(fields);
      const context = await browser.context();
      const [name, value] = payer.cookies.get(`/checkout/${id}`)!.split('=') as [string, string];
      await context.addCookies([{ name, value, url: `${origin}/checkout/${id}` }]);
      const page = await context.newPage();
      await page.goto(`${origin}/checkout/${id}`, { waitUntil: 'networkidle' });
      const measured = await page.evaluate(
        () =>
          new Promise<{ paintMs: number; shift: number }>((tell) => {
            const seen = { paintMs: 0, shift: 0 };
            const watch = (type: string, note: (entry: PerformanceEntry & { value?: number }) => void) =>
              new PerformanceObserver((list) => list.getEntries().forEach(note)).observe({ type, buffered: true });
            watch('largest-contentful-paint', (entry) => (seen.paintMs = entry.startTime));
            watch('layout-shift', (entry) => (seen.shift += entry.value ?? 0));
            setTimeout(() => tell(seen), 300);
          }),
      );
      paints.push(measured.paintMs);
      shift = Math.max(shift, measured.shift);
      await context.close();
    }
    paints.sort((a, b) => a - b);
    console.log(
      `largest contentful paint ${paints.map((ms) => ms.toFixed(0)).join(', ')} ms (ceiling 500), largest sum of layout shifts ${shift.toFixed(3)} (must be 0)`,
    );
    if (paints.at(-1)! > 500 || shift > 0) process.exitCode = 1;
  } finally {
    await browser.close();
  }

  const stored = async () => {
    const { rows } = await service.pool.query<{ paid: string; sessions: string }>(
      `select count(*) filter (where type = 'PaymentCreated') as paid, count(*) filter (where type = 'CheckoutPaid') as sessions from es.events`,
    );
    return { paid: Number(rows[0]!.paid), sessions: Number(rows[0]!.sessions) };
  };
  for (const { within } of ROUNDS) {
    const pause = () => new Promise((wake) => setTimeout(wake, Math.random() * within * 1_000));
    const before = await stored();
    const pages: number[] = [];
    const submits: number[] = [];
    const timed = async <T>(into: number[], work: Promise<T>): Promise<T> => {
      const sent = performance.now();
      const answer = await work;
      into.push(performance.now() - sent);
      return answer;
    };
    const started = performance.now();
    await Promise.all(
      Array.from({ length: PAYERS }, async () => {
        const payer = new Payer(origin);
        await pause();
        const id = await payer.begin(fields);
        const page = await timed(pages, payer.send(`/checkout/${id}`));
        await pause();
        const paid = await timed(submits, payer.submit(id, { ...formOf(page.text), ...CARD_FORM }));
        const receipt = await timed(pages, payer.send(paid.location));
        const done = await payer.send(`/checkout/${id}/done`);
        if (receipt.status !== 200 || !readReturn(signingSecret, 'return', done.location).right)
          throw new Error(`a payer was left behind: ${receipt.status}`);
      }),
    );
    const seconds = (performance.now() - started) / 1_000;
    const after = await stored();
    const sorted = (values: number[]) => Float64Array.from(values).sort();
    const of = (values: number[]) => `p50 ${percentile(sorted(values), 0.5).toFixed(0)} ms, p99 ${percentile(sorted(values), 0.99).toFixed(0)} ms`;
    console.log(
      `${PAYERS} payers ${within === 0 ? 'at the same instant' : 'at once'}, ${seconds.toFixed(1)} s; pages ${of(pages)}${within === 0 ? '' : ' (goal 200)'}; submits ${of(submits)}; charged ${after.paid - before.paid}, sessions paid ${after.sessions - before.sessions}`,
    );
    if (after.paid - before.paid !== PAYERS || after.sessions - before.sessions !== PAYERS) process.exitCode = 1;
  }
} finally {
  await service.stop();
}

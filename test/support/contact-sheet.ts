/**
 * `npm run contact-sheet`: makes docs/checkout-pages.jpg, a picture of every page of the hosted checkout. A real browser shows a real service at 320,
 * 768 and 1280 pixels, light and dark. The picture is only for people. Specs check the rules of the pages.
 */
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Page } from 'playwright-core';
import { startEmbeddedPostgres } from '#platform';
import { startBrowser, startSites } from './browser.js';
import { CARD_FORM, checkoutPortal, intakeOf } from './checkout.js';
import { startService } from './service.js';

const ROOT = process.cwd();
const OUT = join(ROOT, 'docs', 'checkout-pages.jpg');
const WIDTHS = [320, 768, 1_280] as const;
const SCHEMES = ['light', 'dark'] as const;
const OVER_AN_HOUR_MS = 61 * 60_000;

const photograph = async (): Promise<void> => {
  const sites = await startSites();
  const service = await startService({ publicUrl: sites.payUrl });
  sites.lead(service.urls[0]!);
  const browser = await startBrowser();
  try {
    const portal = await checkoutPortal(service, await service.account(), { allow: [`${sites.shopUrl}/pay`], colour: '#0b4f6c' });
    const fields = intakeOf(portal, {
      return_url: `${sites.shopUrl}/pay/done`,
      cancel_url: `${sites.shopUrl}/pay/cancelled`,
      payer_first_name: 'Maria',
    });
    const shots = new Map<string, string[]>();
    for (const scheme of SCHEMES)
      for (const width of WIDTHS) {
        const context = await browser.context({ viewport: { width, height: 900 }, colorScheme: scheme });
        const page = await context.newPage();
        const take = async (name: string) => {
          const picture = await page.screenshot({ fullPage: true, type: 'jpeg', quality: 80 });
          shots.set(name, [
            ...(shots.get(name) ?? []),
            `<figure style="flex:${Math.sqrt(width)} 0 0"><img src="data:image/jpeg;base64,${picture.toString('base64')}"></figure>`,
          ]);
        };
        await visitAll(page, {
          sites,
          portal: fields,
          take,
          hourPasses: () => service.clock.advance(OVER_AN_HOUR_MS),
          halfMinutePasses: () => service.clock.advance(31_000),
        });
        await context.close();
      }
    const sheet = await (await browser.context({ viewport: { width: 1_600, height: 900 } })).newPage();
    const rows = [...shots].map(([name, pictures]) => `<h2>${name}</h2><section>${pictures.join('')}</section>`);
    await sheet.setContent(
      `<style>body{margin:16px;font:14px sans-serif;background:#c9ced6}h2{font-size:15px;margin:14px 0 6px}section{display:flex;gap:8px;align-items:start}figure{margin:0;height:330px;overflow:hidden}img{width:100%;display:block}</style>${rows.join('')}`,
    );
    await writeFile(OUT, await sheet.screenshot({ fullPage: true, type: 'jpeg', quality: 50 }));
    process.stdout.write(`${OUT}\n`);
  } finally {
    await browser.close();
    await service.stop();
    await sites.close();
  }
};

interface Tour {
  readonly sites: Awaited<ReturnType<typeof startSites>>;
  readonly portal: ReturnType<typeof intakeOf>;
  readonly take: (name: string) => Promise<void>;
  readonly hourPasses: () => void;
  readonly halfMinutePasses: () => void;
}

const visitAll = async (page: Page, { sites, portal, take, hourPasses, halfMinutePasses }: Tour): Promise<void> => {
  const begin = async () => {
    await page.goto('about:blank');
    const inputs = Object.entries(portal).map(([name, value]) => `<input name="${name}" value="${value.replaceAll('"', '&quot;')}">`);
    await page.setContent(`<form method="post" action="${sites.payUrl}/api/v1/payer/intake">${inputs.join('')}<button></button></form>`);
    await page.click('button');
    await page.waitForSelector('#pay');
    return page.url();
  };
  const payWith = async (card: string, until: string) => {
    for (const [name, value] of Object.entries({ ...CARD_FORM, card_number: card })) await page.fill(`#${name}`, value);
    await page.click('#pay button');
    await page.waitForSelector(until);
  };
  const start = await begin();
  await take('Pay');
  await page.fill('#card_number', '4242');
  await page.fill('#email', 'nobody');
  await page.click('#pay button');
  await page.waitForSelector('.problem li');
  await take('Mistakes');
  await page.fill('#email', '');
  await payWith('4000000000009995', '.problem p');
  await take('Declined');
  await payWith('4242424242424242', '.receipt');
  await take('Receipt');
  await page.goto(`${start}/paid`);
  await take('Already paid');
  await begin();
  await payWith('4000007770005145', '.sign.wait');
  await take('Waiting for the bank');
  halfMinutePasses();
  await page.reload();
  await take('Waiting, after half a minute');
  const left = await begin();
  await page.goto(`${left}/cancel`);
  await take('Cancel, asked');
  await page.click('main button');
  await page.goto(left);
  await take('Cancelled');
  await begin();
  hourPasses();
  await page.reload();
  await take('Expired');
  await page.goto(`${sites.payUrl}/checkout/error?code=PORTAL_ACCESS_DENIED&ref=01a1fea4-028b`);
  await take('Cannot be started');
};

const directory = await mkdtemp(join(tmpdir(), 'payfold-sheet-'));
const postgres = await startEmbeddedPostgres(join(directory, 'postgres'), { settings: { fsync: 'off' } });
try {
  process.env.TEST_POSTGRES_URL = postgres.adminUrl;
  await photograph();
} finally {
  await postgres.stop();
  await rm(directory, { recursive: true, force: true });
}

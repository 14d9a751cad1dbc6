/** The README's partner page: the test runs `npm start` and one command. Then a payer pays on the page in a real browser. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { freePort } from '#platform';
import { complaintsOf, startBrowser, type TestBrowser } from '../support/browser.js';
import { DataDir, launch, type RunningProcess, start } from '../support/processes.js';

const ROOT = join(import.meta.dirname, '../..');
const SHOP = 'examples/partner-shop/shop.mjs';

let dataDir: DataDir;
let browser: TestBrowser;
let service: RunningProcess;
let shop: ReturnType<typeof launch>;
let address: string;

beforeAll(async () => {
  dataDir = await DataDir.create();
  const [port, shopPort] = [await freePort(), await freePort()];
  service = await start('standalone', dataDir, { PORT: String(port) });
  shop = launch([join(ROOT, SHOP)], dataDir, { SHOP_PORT: String(shopPort) });
  [, address = ''] = await shop.firstLine(/^open (https:\S+)/m);
  browser = await startBrowser();
}, 600_000);
afterAll(async () => {
  await browser?.close();
  await dataDir?.remove();
});

test.each<[string, () => Record<string, string>, RegExp]>([
  ['no service runs', () => ({ DATA_DIR: join(dataDir.path, 'other') }), /^no running service: \S+ cannot be read\. Run "npm start" first.*\n$/],
  [
    'its port is taken',
    () => ({ SHOP_PORT: new URL(address).port }),
    /^the shop cannot listen on port \d+ \(EADDRINUSE\)\. Set SHOP_PORT to another one\.\n$/,
  ],
])('if %s, the shop fails in one line and creates nothing', async (_, env, line) => {
  const second = launch([join(ROOT, SHOP)], dataDir, env());
  const { code } = await second.exited;
  expect([code, second.stdout(), second.stderr()]).toEqual([1, '', expect.stringMatching(line)]);
});
test('the first start prints the checkout secret of the sandbox portal', () => expect(service.stdout()).toMatch(/^ {2}Checkout {3}psec_test_\S+$/m));
test('the README names the command', () => expect(readFileSync(join(ROOT, 'README.md'), 'utf8')).toContain(`node ${SHOP}`));

test.each(['button', '#link'])('a payer pays by %s, and the shop verifies it; a changed address it refuses', async (way) => {
  const context = await browser.context();
  try {
    const page = await context.newPage();
    const complaints = complaintsOf(page);
    await page.goto(address);
    await page.click(way);
    await page.waitForSelector('#pay');
    await page.fill('#card_number', '4242424242424242');
    await page.fill('#expiry', '12/30');
    await page.fill('#security_code', '123');
    await page.click('#pay button[type=submit]');
    await page.waitForSelector('.receipt');
    const confirmation = await page.textContent('.wide .code');
    await page.click('a.button');
    await page.waitForURL(`${address}pay/done**`);
    expect(await page.textContent('h1')).toBe('Payment verified');
    expect(await page.textContent('p')).toBe(`Confirmation ${confirmation}`);
    const back = page.url();
    await page.reload();
    expect(await page.textContent('h1')).toBe('This bill was settled before');
    expect(complaints).toEqual([]);
    await page.goto(back.replace('result=paid', 'result=unknown'));
    expect(await page.textContent('h1')).toBe('Not verified');
    await page.goto(address);
    await page.click('button');
    await page.click('.aside button');
    await page.waitForURL(`${address}pay/cancelled**`);
    expect(await page.textContent('pre')).toContain('"result": "cancelled"');
  } finally {
    await context.close();
  }
});

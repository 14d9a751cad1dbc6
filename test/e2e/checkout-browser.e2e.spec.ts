/**
 * Hosted checkout in Chromium: the service behind TLS on one site, a partner on another, a stranger on a third. Tests the parts that need a browser:
 * cookies across sites, policies, Back, history, focus, keys and zoom. checkout.e2e tests the rest over HTTP.
 */
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from '@jest/globals';
import type { BrowserContext, BrowserContextOptions, Page } from 'playwright-core';
import { complaintsOf, installedChromium, type Sites, startBrowser, startSites, type TestBrowser } from '../support/browser.js';
import { checkoutPortal, type Fields, formOf, intakeOf, type Portal, readReturn, signedFields } from '../support/checkout.js';
import { eventually } from '../support/eventually.js';
import { CARD, type Service, startService, type TestAccount } from '../support/service.js';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

let sites: Sites;
let service: Service;
let browser: TestBrowser;
let account: TestAccount;
let portal: Portal;

beforeAll(async () => {
  sites = await startSites();
  service = await startService({ publicUrl: sites.payUrl, instances: 2 });
  sites.lead(service.urls[0]!);
  account = await service.account();
  portal = await checkoutPortal(service, account, { allow: [`${sites.shopUrl}/pay`], colour: '#0b4f6c' });
  browser = await startBrowser();
}, 600_000);
afterAll(async () => {
  await browser?.close();
  await service?.stop();
  await sites?.close();
});
beforeEach(() => {
  sites.visits.length = 0;
  sites.lead(service.urls[0]!);
});

// The partner's shop, and the actions of a payer.

const ask = (more: Readonly<Record<string, string | undefined>> = {}) =>
  intakeOf(portal, { return_url: `${sites.shopUrl}/pay/done?case=A%26B+7`, cancel_url: `${sites.shopUrl}/pay/cancelled`, ...more });

const escaped = (text: string) => text.replaceAll('&', '&amp;').replaceAll('"', '&quot;');
const shopPage = (fields: Fields, action = `${sites.payUrl}/api/v1/payer/intake`) =>
  `<!doctype html><title>Shop</title><form method="post" action="${action}">${Object.entries(fields)
    .map(([name, value]) => `<input type="hidden" name="${name}" value="${escaped(value)}">`)
    .join('')}<button>Pay the bill</button></form>`;

/** Runs `work` in a new browser window. Our pages must cause no script error and no policy violation. */
const inWindow = async (work: (page: Page, context: BrowserContext) => Promise<void>, options: BrowserContextOptions = {}) => {
  const context = await browser.context(options);
  try {
    const page = await context.newPage();
    const complaints = complaintsOf(page);
    await work(page, context);
    expect(complaints).toEqual([]);
  } finally {
    await context.close();
  }
};

const toPayPage = async (page: Page, fields: Fields = ask()): Promise<string> => {
  sites.pages.set('/', () => shopPage(fields));
  await page.goto(sites.shopUrl);
  await page.click('button');
  await page.waitForSelector('#pay');
  return new URL(page.url()).pathname;
};
const fill = async (page: Page, card: string = CARD.approved) => {
  await page.fill('#card_number', card);
  await page.fill('#expiry', '12/30');
  await page.fill('#security_code', '737');
};
const payButton = '#pay button[type=submit]';
const payWith = async (page: Page, card: string, until: string) => {
  await fill(page, card);
  await page.click(payButton);
  await page.waitForSelector(until);
};
const standingCharges = async () =>
  (await service.simulator.truth()).filter(
    ({ op, result, amountCents, voidedCents }) => op === 'charge' && result === 'approved' && (voidedCents ?? 0) < amountCents!,
  ).length;
/** Clicks the link, and reads the result from the signed address at the partner. */
const leaveBy = async (page: Page, selector: string, kind: 'return' | 'cancel') => {
  await page.click(selector);
  await page.waitForURL(`${sites.shopUrl}/pay/**`);
  const said = readReturn(portal.signingSecret, kind, page.url());
  expect(said.right).toBe(true);
  return said;
};
const violations = async (page: Page) => {
  await page.evaluate(AXE);
  return page.evaluate(async () => {
    const { axe } = globalThis as unknown as { axe: { run(): Promise<{ violations: { id: string; nodes: { html: string }[] }[] }> } };
    return (await axe.run()).violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(' ')}`);
  });
};

describe.each([
  ['with scripts', {}],
  ['without scripts', { javaScriptEnabled: false }],
] as const)('the whole way %s', (_, options) => {
  test('form intake, decline, another card, receipt, Done: the partner verifies', () =>
    inWindow(async (page) => {
      const path = await toPayPage(page);
      expect(await page.title()).toBe('Pay City of Riverton');
      await payWith(page, CARD.declined, '.problem');
      expect(await page.title()).toBe('Error: Pay City of Riverton');
      expect(await page.textContent('.problem')).toContain('No money has been taken.');
      await payWith(page, CARD.approved, '.receipt');
      expect(new URL(page.url()).pathname).toBe(`${path}/receipt`);
      await page.reload();
      const confirmation = await page.textContent('.wide .code');
      const said = await leaveBy(page, 'a.button', 'return');
      expect(said).toMatchObject({ result: 'paid', confirmation_number: confirmation, case: 'A&B 7', state: 'xyz', total_charged_cents: '12863' });
      // The API gives the partner the same result.
      expect((await account.client.find(said.payment_id as string)).data).toMatchObject({ status: 'succeeded', totalChargedCents: 12_863 });
      // If one character of the address changes, the signature is wrong.
      expect(readReturn(portal.signingSecret, 'return', page.url().replace('12863', '12864')).right).toBe(false);
      expect(readReturn(portal.signingSecret, 'cancel', page.url()).right).toBe(false);
    }, options));
  test('mistakes, then Cancel: the partner gets the result', () =>
    inWindow(async (page) => {
      await toPayPage(page);
      await page.fill('#card_number', '4242');
      await page.click(payButton);
      await page.waitForSelector('.problem li');
      expect(await page.evaluate(() => document.activeElement?.className)).toBe('problem');
      await page.click('.problem a');
      expect(await page.evaluate(() => document.activeElement?.id)).toBe('card_number');
      expect(await page.inputValue('#card_number')).toBe('');
      expect(await leaveBy(page, '.aside button', 'cancel')).toMatchObject({ result: 'cancelled' });
    }, options));
  test('an unknown outcome: the page waits by itself, and moves on by itself', () =>
    inWindow(async (page) => {
      const path = await toPayPage(page);
      await payWith(page, CARD.unreadable, '.sign.wait');
      expect(await page.locator('form, a.button').count()).toBe(0);
      await service.recover(await paymentIdOf(path));
      // Recovery has moved the clock by a minute, so the page may first offer Done. Then it shows the outcome.
      await page.waitForSelector('.problem', { timeout: 30_000 });
      expect(new URL(page.url()).pathname).toBe(path);
      await payWith(page, CARD.approved, '.receipt');
    }, options));
});

const paymentIdOf = async (path: string): Promise<string> => {
  const session = await service.services.checkout.sessions.load(path.split('/')[2]!);
  return (session!.checkout as { attempt: { paymentId: string } }).attempt.paymentId;
};

describe('the other intakes', () => {
  test('JSON from the partner’s server, the address opened by the payer', () =>
    inWindow(async (page) => {
      const body = JSON.stringify({ ...ask(), amount_cents: 12_500, line_items: JSON.parse(ask().line_items!) });
      const intake = await fetch(`${service.urls[0]}/api/v1/payer/intake`, {
        method: 'POST',
        body,
        headers: { 'content-type': 'application/json' },
        redirect: 'manual',
      });
      expect(intake.status).toBe(303);
      const location = intake.headers.get('location')!;
      expect(location.startsWith(`${sites.payUrl}/checkout/cs_`)).toBe(true);
      sites.pages.set('/', () => ({ status: 303, location }));
      await page.goto(sites.shopUrl);
      await payWith(page, CARD.approved, '.receipt');
      await inWindow(async (other) => {
        await other.goto(location);
        expect(await other.textContent('h1')).toBe('This payment is complete');
        expect(await other.content()).not.toMatch(/WTR-2041|4242.*ending/);
      });
    }));
  test('launch link from a mail: opened, closed, opened again, paid, opened again; and once it has expired', () =>
    inWindow(async (page, context) => {
      const link = (exp: number, nonce: string) => {
        const address = `${sites.payUrl}/api/v1/payer/intake/link`;
        return `${address}?${new URLSearchParams(signedFields(portal.signingSecret, 'link', address, ask({ exp: String(exp), nonce }))).toString()}`;
      };
      const now = Math.floor(service.clock.now() / 1_000);
      const good = link(now + 86_400, 'mail-0000000000000001');
      await page.goto(good);
      const path = new URL(page.url()).pathname;
      const again = await context.newPage();
      await again.goto(good);
      expect(new URL(again.url()).pathname).toBe(path);
      await payWith(again, CARD.approved, '.receipt');
      await page.goto(good);
      expect(await page.textContent('h1')).toBe('This is already paid');
      await page.click('a.button');
      await page.waitForSelector('.receipt');
      await page.goto(link(now - 1, 'mail-0000000000000002'));
      expect(readReturn(portal.signingSecret, 'cancel', page.url())).toMatchObject({ right: true, result: 'failed', error: 'VALIDATION_ERROR' });
    }));
  test('a refused intake ends at the partner, or on our error page, never elsewhere', () =>
    inWindow(async (page) => {
      sites.pages.set('/', () => shopPage(ask({ amount_cents: '1' })));
      await page.goto(sites.shopUrl);
      await page.click('button');
      await page.waitForURL(`${sites.shopUrl}/pay/cancelled**`);
      expect(readReturn(portal.signingSecret, 'cancel', page.url())).toMatchObject({ right: true, error: 'VALIDATION_ERROR' });
      sites.pages.set('/', () => shopPage(ask({ cancel_url: `${sites.evilUrl}/pay` })));
      await page.goto(sites.shopUrl);
      await page.click('button');
      await page.waitForURL(`${sites.payUrl}/checkout/error**`);
      expect(await page.textContent('h1')).toBe('The payment cannot be started');
      expect(await page.textContent('.facts')).toMatch(/VALIDATION_ERROR\s*[\w-]{36}/);
      expect(sites.visits.some(({ host }) => host.startsWith('evil'))).toBe(false);
    }));
});

describe('money is taken once', () => {
  // With scripts the second click finds a disabled button. Without scripts the browser really sends two requests.
  test.each([
    [60, true],
    [300, true],
    [60, false],
    [300, false],
  ])('two clicks %d ms apart, scripts: %s', (apartMs, javaScriptEnabled) =>
    inWindow(
      async (page) => {
        const before = await standingCharges();
        await toPayPage(page);
        await fill(page, CARD.slow);
        await page.locator(payButton).scrollIntoViewIfNeeded();
        const { x, y, width, height } = (await page.locator(payButton).boundingBox())!;
        const [left, top] = [x + width / 2, y + height / 2];
        await page.mouse.click(left, top);
        // The gap between the two clicks is the subject of this test.
        await new Promise((wake) => setTimeout(wake, apartMs));
        await page.mouse.click(left, top);
        await page.waitForSelector('.receipt', { timeout: 25_000 });
        expect((await standingCharges()) - before).toBe(2);
        expect(await leaveBy(page, 'a.button', 'return')).toMatchObject({ result: 'paid' });
      },
      { javaScriptEnabled },
    ),
  );
  test('two tabs', () =>
    inWindow(async (page, context) => {
      const before = await standingCharges();
      await toPayPage(page);
      const other = await context.newPage();
      await other.goto(page.url());
      await Promise.all([fill(page), fill(other, '5555 5555 5555 4444')]);
      await Promise.all([page.click(payButton), other.click(payButton)]);
      await Promise.all([page.waitForSelector('.receipt'), other.waitForSelector('.receipt')]);
      expect(await page.textContent('.wide .code')).toBe(await other.textContent('.wide .code'));
      expect((await standingCharges()) - before).toBe(2);
    }));
  test('Back after paid: no form, no card number, the receipt; Back after cancelled: no form', () =>
    inWindow(async (page) => {
      await toPayPage(page);
      await payWith(page, CARD.approved, '.receipt');
      await page.goBack();
      await eventually(async () => (await page.locator('.receipt').count()) === 1);
      expect(await page.content()).not.toContain('4242 4242 4242 4242"');
      await page.goto(sites.shopUrl);
      await page.goBack();
      expect(await page.locator('.receipt').count()).toBe(1);
      const path = await toPayPage(page);
      await fill(page);
      await leaveBy(page, '.aside button', 'cancel');
      await page.goBack();
      expect(new URL(page.url()).pathname).toBe(path);
      expect(await page.textContent('h1')).toBe('Payment cancelled');
      expect(await page.locator('#card_number').count()).toBe(0);
    }));
  const back = installedChromium ? test : test.skip;
  back(`Back after paid with a back/forward cache${installedChromium ? '' : ': not looked at, no whole Chromium is installed here'}`, async () => {
    const whole = await startBrowser({ installed: installedChromium! });
    try {
      const page = await (await whole.context()).newPage();
      await toPayPage(page);
      await payWith(page, CARD.approved, '.receipt');
      await page.goBack();
      await eventually(async () => (await page.locator('.receipt').count()) === 1);
      expect(await page.locator('#card_number').count()).toBe(0);
    } finally {
      await whole.close();
    }
  });
  test('Back to a page that asked again for the card: history fills nothing in again', () =>
    inWindow(async (page) => {
      const path = await toPayPage(page);
      await payWith(page, CARD.declined, '.problem');
      await page.goto(sites.shopUrl);
      await page.goBack();
      expect(new URL(page.url()).pathname).toBe(path);
      for (const field of ['card_number', 'expiry', 'security_code']) expect(await page.inputValue(`#${field}`)).toBe('');
    }));
  test('another process of the service answers between pay and receipt', () =>
    inWindow(async (page) => {
      const before = await standingCharges();
      await toPayPage(page);
      // The second instance has its own stores over the same database. From now on this browser reaches only the second one. (checkout-crash tests a
      // restart after kill -9.)
      await page.route('**/receipt', async (route) => {
        sites.lead(service.urls[1]!);
        await route.continue();
      });
      await payWith(page, CARD.approved, '.receipt');
      expect(await leaveBy(page, 'a.button', 'return')).toMatchObject({ result: 'paid' });
      expect((await standingCharges()) - before).toBe(2);
    }));
});

describe('other sites', () => {
  test('a frame shows nothing of us', () =>
    inWindow(async (page) => {
      const path = await toPayPage(page);
      const evil = await page.context().newPage();
      sites.pages.set('/frame', () => `<!doctype html><iframe src="${sites.payUrl}${path}" width="600" height="600"></iframe>`);
      const refused: string[] = [];
      evil.on('console', (message) => refused.push(message.text()));
      await evil.goto(`${sites.evilUrl}/frame`);
      await eventually(() => refused.some((text) => /frame-ancestors 'none'|X-Frame-Options/.test(text)));
      for (const frame of evil.frames().slice(1)) expect(await frame.locator('#pay').count()).toBe(0);
    }));
  test('a form of a stranger does nothing: no cookie comes with it, and its origin is not ours', () =>
    inWindow(async (page, context) => {
      const path = await toPayPage(page);
      const hidden = formOf(await page.content());
      const evil = await context.newPage();
      const stolen = { ...hidden, card_number: '4242424242424242', expiry: '1230', security_code: '737' };
      for (const policy of ['', '<meta name="referrer" content="no-referrer">']) {
        sites.pages.set('/steal', () => policy + shopPage(stolen, `${sites.payUrl}${path}/pay`));
        await evil.goto(`${sites.evilUrl}/steal`);
        await evil.click('button');
        await evil.waitForSelector('h1');
        expect(await evil.textContent('h1')).toBe('This did not come from our page');
      }
      // A form in a sandboxed frame has the origin null.
      sites.pages.set('/sandbox', () => `<!doctype html><iframe sandbox="allow-forms allow-scripts allow-top-navigation" srcdoc="${escaped(shopPage(stolen, `${sites.payUrl}${path}/pay`).replace('<form', '<form target="_top"'))}"></iframe>`); // prettier-ignore
      await evil.goto(`${sites.evilUrl}/sandbox`);
      await evil.frames()[1]!.click('button');
      await evil.waitForSelector('h1');
      expect(await evil.textContent('h1')).toBe('This did not come from our page');
      await payWith(page, CARD.approved, '.receipt');
    }));
  test('the partner gets no referrer, and cannot reach our window', () =>
    inWindow(async (page) => {
      let referrer: string | undefined = 'never asked';
      sites.pages.set('/pay/done', (request) => {
        ({ referer: referrer } = request.headers);
        return '<!doctype html><h1>done</h1>';
      });
      await toPayPage(page);
      await payWith(page, CARD.approved, '.receipt');
      await leaveBy(page, 'a.button', 'return');
      expect(referrer).toBeUndefined();
    }));
  test('a partner that redirects on to a third site is not stopped by our policy', () =>
    inWindow(async (page) => {
      sites.pages.set('/pay/done', () => ({ status: 302, location: `${sites.evilUrl}/thanks` }));
      await toPayPage(page);
      await payWith(page, CARD.approved, '.receipt');
      await page.click('a.button');
      await page.waitForURL(`${sites.evilUrl}/thanks`);
      sites.pages.delete('/pay/done');
      sites.pages.set('/pay/cancelled', () => ({ status: 302, location: `${sites.evilUrl}/thanks` }));
      await toPayPage(page);
      await page.click('.aside button');
      await page.waitForURL(`${sites.evilUrl}/thanks`);
      sites.pages.delete('/pay/cancelled');
    }));
});

describe('everybody can use it', () => {
  test.each(['en', 'es'])('axe finds nothing on any page (%s)', (locale) =>
    inWindow(async (page) => {
      const found: Record<string, string[]> = {};
      const look = async (name: string) => {
        const list = await violations(page);
        if (list.length > 0) found[name] = list;
      };
      const fields = ask({ locale });
      const path = await toPayPage(page, fields);
      await look('pay');
      await page.fill('#email', 'nobody');
      await page.click(payButton);
      await page.waitForSelector('.problem li');
      await look('mistakes');
      await page.fill('#email', '');
      await payWith(page, CARD.declined, '.problem p');
      await look('declined');
      await payWith(page, CARD.approved, '.receipt');
      await look('receipt');
      await page.goto(`${sites.payUrl}${path}/paid`);
      await look('already paid');
      await toPayPage(page, fields);
      await payWith(page, CARD.unresolvable, '.sign.wait');
      await look('processing');
      service.clock.advance(31_000);
      await page.reload();
      await look('processing, late');
      const left = await toPayPage(page, fields);
      await page.goto(`${sites.payUrl}${left}/cancel`);
      await look('cancel, asked');
      await page.focus('main button');
      await page.keyboard.press('Enter');
      await page.waitForURL(`${sites.shopUrl}/pay/**`);
      await page.goto(sites.payUrl + left);
      await look('cancelled');
      await toPayPage(page, fields);
      service.clock.advance(3_600_000);
      await page.reload();
      await look('expired');
      for (const address of ['/checkout/error?code=PORTAL_ACCESS_DENIED&ref=1', '/checkout/cs_x']) {
        await page.goto(sites.payUrl + address).catch(() => undefined);
        await look(address);
      }
      expect(found).toEqual({});
    }),
  );
  test('axe finds nothing in the dark either', () =>
    inWindow(
      async (page) => {
        await toPayPage(page);
        await page.click(payButton);
        await page.waitForSelector('.problem li');
        expect(await violations(page)).toEqual([]);
        await payWith(page, CARD.approved, '.receipt');
        expect(await violations(page)).toEqual([]);
      },
      { colorScheme: 'dark' },
    ));
  test('by keyboard alone', () =>
    inWindow(async (page) => {
      await toPayPage(page);
      const focusedId = () => page.evaluate(() => document.activeElement?.id);
      const seen: (string | undefined)[] = [];
      for (let presses = 0; presses < 10 && !seen.includes('card_number'); presses++) {
        await page.keyboard.press('Tab');
        seen.push(await focusedId());
      }
      await page.keyboard.type('4242424242424242');
      expect(await page.inputValue('#card_number')).toBe('4242 4242 4242 4242');
      expect(await page.textContent('.brand')).toBe('Visa');
      await page.keyboard.press('Tab');
      await page.keyboard.type('1230');
      expect(await page.inputValue('#expiry')).toBe('12/30');
      await page.keyboard.press('Tab');
      await page.keyboard.type('737');
      for (const next of ['postal_code', 'first_name', 'last_name', 'email']) {
        await page.keyboard.press('Tab');
        expect(await focusedId()).toBe(next);
      }
      await page.keyboard.press('Tab');
      const outline = await page.evaluate(() => getComputedStyle(document.activeElement!).outlineWidth);
      expect(outline).toBe('3px');
      await page.keyboard.press('Enter');
      await page.waitForSelector('.receipt');
      await page.keyboard.press('Tab');
      await page.keyboard.press('Enter');
      await page.waitForURL(`${sites.shopUrl}/pay/**`);
    }));
  test.each([
    ['320 × 640', { width: 320, height: 640 }, 1],
    ['1280 × 1024 at 400 %', { width: 320, height: 256 }, 4],
  ])('%s: nothing runs over the edge, everything can be pressed', (_, viewport, deviceScaleFactor) =>
    inWindow(
      async (page) => {
        const fits = () => page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth);
        const line = 'An-item-with-a-very-long-name-without-any-space-in-it-'.repeat(3);
        await toPayPage(
          page,
          ask({ line_items: JSON.stringify([{ amount_cents: 12_500, reference_id: line, description: line }]), payer_first_name: 'M' }),
        );
        expect(await fits()).toBe(true);
        const small = await page.evaluate(() =>
          Array.from(document.querySelectorAll('button, input:not([type=hidden]), a') as ArrayLike<Element>)
            .map((element) => element.getBoundingClientRect().height)
            .filter((height) => height < 44),
        );
        expect(small).toEqual([]);
        await page.click(payButton);
        await page.waitForSelector('.problem li');
        expect(await fits()).toBe(true);
        await payWith(page, CARD.approved, '.receipt');
        expect(await fits()).toBe(true);
      },
      { viewport, deviceScaleFactor },
    ),
  );
  test('in Spanish', () =>
    inWindow(async (page) => {
      await toPayPage(page, ask({ locale: 'es' }));
      expect(await page.getAttribute('html', 'lang')).toBe('es');
      expect(await page.textContent(payButton)).toBe('Pagar $128.63');
      await payWith(page, CARD.declined, '.problem');
      expect(await page.textContent('.problem')).toContain('No se ha cobrado nada.');
      await payWith(page, CARD.approved, '.receipt');
      expect(await page.textContent('h1')).toBe('Pago realizado');
    }));
  test('the receipt on paper: the facts, and nothing to press', () =>
    inWindow(async (page) => {
      await toPayPage(page);
      await payWith(page, CARD.approved, '.receipt');
      expect(await page.isVisible('#print')).toBe(true);
      await page.emulateMedia({ media: 'print' });
      for (const selector of ['a.button', '#print', 'footer', '.sign']) expect(await page.isVisible(selector)).toBe(false);
      for (const selector of ['.sum', '.facts', '.lines']) expect(await page.isVisible(selector)).toBe(true);
    }));
  test('more time, without losing typed text; times are in the payer’s own zone', () =>
    inWindow(async (page) => {
      await toPayPage(page);
      const shown = () => page.textContent('#time time');
      const before = await shown();
      expect(before).toMatch(/^\d{1,2}:\d\d\s[AP]M$/);
      await page.fill('#last_name', 'Lovelace');
      service.clock.advance(20 * 60_000);
      await page.click('#time button');
      await eventually(async () => (await shown()) !== before);
      expect(await page.inputValue('#last_name')).toBe('Lovelace');
      await payWith(page, CARD.approved, '.receipt');
    }));
  test('the button says that it is paying, once; a browser that shows the page again shows it ready', () =>
    inWindow(async (page) => {
      await toPayPage(page);
      await fill(page);
      // The form is not sent, so the page stays in its waiting state.
      await page.evaluate(() => document.querySelector('#pay')!.addEventListener('submit', (event) => event.preventDefault()));
      await page.click(payButton);
      await eventually(() => page.isDisabled(payButton));
      expect(await page.textContent(payButton)).toBe('Paying…');
      await page.evaluate(() => dispatchEvent(new Event('pageshow')));
      expect([await page.isDisabled(payButton), await page.textContent(payButton)]).toEqual([false, 'Pay $128.63']);
    }));
});

test('the API reference lies on the origin of the card pages: it has their headers, and works with them', async () => {
  await inWindow(async (page) => {
    const answer = await page.goto(`${sites.payUrl}/docs`);
    expect(await answer!.allHeaders()).toMatchObject({
      'content-security-policy': expect.stringMatching(/^default-src 'none'; script-src 'self'; .*frame-ancestors 'none'$/),
      'x-frame-options': 'DENY',
      'strict-transport-security': expect.anything(),
    });
    await page.locator('.opblock').first().waitFor();
  });
});

/**
 * Sends card numbers through every entrance of the service: good and bad requests, cards in wrong places (paths, queries, headers, free text), and
 * lost answers. Each number is used only once, except those of FIXTURES. Returns the numbers and all answers.
 */
import { randomInt } from 'node:crypto';
import { passesLuhn } from '#platform';
import type { SimulatorControl } from '../../apps/simulator/control.js';

export interface Driven {
  readonly cards: readonly string[];
  /** Status lines, headers and bodies. */
  readonly answers: string;
  readonly requests: number;
}

/** A random card number of a known brand with a correct Luhn digit. */
export const newCard = (): string => {
  for (;;) {
    const [prefix, length] = ([['4', 16], ['51', 16], ['37', 15], ['6011', 16], ['36', 14], ['3530', 16], ['62', 19], ['6759', 16], ['2202', 16], ['82', 16]] as const)[randomInt(10)]!; // prettier-ignore
    const digits = prefix + Array.from({ length: length - prefix.length - 1 }, () => randomInt(10)).join('');
    for (let check = 0; check < 10; check++) if (passesLuhn(`${digits}${check}`)) return `${digits}${check}`;
  }
};

const FIXTURES = ['4242424242424242', '4000000000000002', '4000007770005020', '4000007770005046', '4000007770005145', '4000007770004023', '4000007770004221', '4000007770007026', '6205500000000000004']; // prettier-ignore
/** A card number as people may write it in a text. */
export const SPELLINGS: readonly ((digits: string) => string)[] = [
  ...['.', '_', '/', '\u00a0', '  ', ' - ', '–', '\u200b'].map(
    (separator) => (digits: string) => digits.replaceAll(/(\d{4})(?=\d)/g, `$1${separator}`),
  ),
  (digits) => [...digits].join(' '),
  (digits) => `x${digits}y`,
  ...[0x660, 0x966, 0xff10].map((zero) => (digits: string) => digits.replaceAll(/\d/g, (digit) => String.fromCharCode(zero + Number(digit)))),
];
const grouped = (digits: string) => digits.replaceAll(/(\d{4})(?=\d)/g, '$1 ');

/** Where the portal's hosted checkout may lead. */
export const SHOP = 'https://shop.test';

export const driveCards = async (target: {
  url: string;
  apiKey: string;
  portalId: string;
  bank: SimulatorControl;
  rounds: number;
}): Promise<Driven> => {
  const { url, apiKey, portalId, bank, rounds } = target;
  const cards = new Set<string>(FIXTURES);
  const answers: string[] = [];
  let requests = 0;
  const unique = () => {
    const card = newCard();
    cards.add(card);
    return card;
  };
  const send = async (method: string, path: string, body?: string, headers: Record<string, string> = {}, redirect: RequestRedirect = 'follow') => {
    requests += 1;
    const answer = await fetch(`${url}${path}`, {
      method,
      redirect,
      headers: { authorization: `ApiKey ${apiKey}`, ...(body !== undefined && { 'content-type': 'application/json' }), ...headers },
      ...(body !== undefined && { body }),
    }).catch(() => null);
    if (!answer) return null;
    const text = await answer.text();
    const lines: string[] = [];
    answer.headers.forEach((value, name) => lines.push(`${name}: ${value}`));
    answers.push(`${answer.status} ${lines.join('; ')} ${text}`);
    return { status: answer.status, text };
  };
  const payment = (cardNumber: string, more: object = {}, method: object = {}) =>
    JSON.stringify({
      portalId,
      amountCents: 10_000,
      lineItems: [{ amountCents: 10_000, referenceId: 'WTR-1', description: 'Water' }],
      paymentMethod: { type: 'card', cardNumber, expirationDate: '12/30', cvv: String(randomInt(1_000, 10_000)), ...method },
      ...more,
    });
  const create = (body: string, headers: Record<string, string> = {}) => send('POST', '/api/partner/v1/payments', body, headers);
  const intake = (fields: Record<string, string>) => {
    const form = new URLSearchParams({
      ...{ portal_id: portalId, amount_cents: '12500', line_items: '[{"amount_cents":12500,"reference_id":"x"}]' },
      ...{ return_url: `${SHOP}/pay/done`, cancel_url: `${SHOP}/pay/no`, ...fields },
    });
    const headers = { 'content-type': 'application/x-www-form-urlencoded' };
    return send('POST', '/api/v1/payer/intake', form.toString(), headers, 'manual');
  };
  let drawn = 0;
  const key = () => ({ 'idempotency-key': `pan-${process.pid}-${++drawn}` });

  for (let round = 0; round < rounds; round++) {
    // Requests that reach the processor: every fixture, with and without a key, then repeats, refunds and voids.
    for (const fixture of FIXTURES) {
      const own = key();
      const body = payment(round % 2 === 0 ? fixture : grouped(fixture));
      const made = await create(body, own);
      await create(body, own);
      await create(payment(unique()), own);
      const id = /"id":"([0-9a-f-]{36})"/.exec(made?.text ?? '')?.[1];
      if (id) await send('POST', `/api/partner/v1/payments/${id}/${round % 2 === 0 ? 'refund' : 'void'}`, '{"reason":"pan"}', key());
    }
    await create(payment(unique()), key());
    await create(payment(grouped(unique())));
    // Lost answers, before and after the effect.
    await bank.arm({ match: { call: 'charge' }, answer: 'cut' });
    await create(payment(unique()), key());
    await bank.arm({ match: { call: 'charge' }, answer: 'bare_500' });
    await create(payment(unique()), key());
    await bank.arm({ match: { call: 'charge' }, answer: 'not_json' });
    await create(payment('4242424242424242'), key());
    await bank.setProcessing(false);
    await create(payment(unique()), key());
    await bank.setProcessing(true);
    // Bad requests that hold a whole card.
    await create(payment(unique(), {}, { expirationDate: '01/20' }), key());
    await create(payment(unique(), {}, { cvv: 'abc' }));
    await create(payment(`${unique().slice(0, -1)}x`));
    await create(payment(unique(), { amountCents: 1 }));
    await create(payment(unique(), { capture: 'auth' }));
    await create(payment(unique(), { portalId: '018f0000-0000-7000-8000-00000000dead' }), key());
    await create(payment(unique()).slice(0, -20));
    await create(`${payment(unique())}}`);
    await create(payment(unique()).replace('{', '{"portalId":1,'));
    await create(payment(unique()), { 'content-type': 'text/plain' });
    await create(payment(unique()), { authorization: 'ApiKey pc_test_nobody' });
    await create(JSON.stringify({ [unique()]: 1 }));
    await create(`"${unique()}"`);
    await create(unique());
    // A card number in a field for other data. The service must refuse the request or store nothing of the card.
    for (const field of ['referenceId', 'description'])
      await create(payment('4242424242424242', { lineItems: [{ amountCents: 10_000, referenceId: 'x', [field]: `card ${unique()}` }] }));
    await create(payment('4242424242424242', { referenceId: unique() }));
    await create(
      payment('4242424242424242', { payer: { firstName: unique(), email: `${unique()}@example.com`, address: { line1: grouped(unique()) } } }),
    );
    await create(
      payment('4242424242424242', {
        lineItems: [{ amountCents: 10_000, referenceId: 'x', metadata: { [unique()]: { deep: [Number(unique().slice(0, 15))] } } }],
      }),
    );
    await create(payment('4242424242424242', { paymentMethod: { type: 'card_token', token: unique() } }));
    await create(payment('4242424242424242'), { 'idempotency-key': unique() });
    for (const id of [unique(), `r${unique()}`, grouped(unique()).replaceAll(' ', '.')])
      await create(payment('4242424242424242'), { 'x-request-id': id });
    // The spellings, in each field for free text of a create, a refund and an intake.
    for (const spell of SPELLINGS) {
      const spelled = () => spell(unique());
      for (const field of ['referenceId', 'description'])
        await create(payment('4242424242424242', { lineItems: [{ amountCents: 10_000, referenceId: 'x', [field]: spelled() }] }));
      await create(payment('4242424242424242', { referenceId: spelled() }));
      await create(payment('4242424242424242', { payer: { lastName: spelled(), phone: spelled(), address: { city: spelled() } } }));
      await create(payment('4242424242424242', { lineItems: [{ amountCents: 10_000, referenceId: 'x', metadata: { [spelled()]: [spelled()] } }] }));
      await send('POST', '/api/partner/v1/payments/018f0000-0000-7000-8000-00000000dead/refund', JSON.stringify({ reason: spelled() }), key());
      for (const field of ['state', 'reference_id', 'payer_first_name', 'payer_line1']) await intake({ [field]: spelled() });
    }
    for (const separator of ['-', '%20', '.']) {
      const tag = unique().replaceAll(/(\d{4})(?=\d)/g, `$1${separator}`);
      if (separator === '-') await intake({ locale: `en-${tag}` });
      await intake({ return_url: `${SHOP}/pay/done?n=${tag}` });
      await intake({ cancel_url: `${SHOP}/pay/no?n=${tag}` });
    }
    await send('GET', `/checkout/error?code=VALIDATION_ERROR&ref=r${unique()}`);
    await create(payment('4242424242424242'), { authorization: `ApiKey ${unique()}` });
    await send('GET', `/api/partner/v1/payments/${unique()}`);
    await send('GET', `/api/partner/v1/${unique()}/x`);
    await send('GET', `/api/partner/v1/payments?cursor=${unique()}&status=${unique()}`);
    await send('GET', `/api/partner/v1/fees/quote?portalId=${unique()}&amountCents=${unique()}`);
    await send('GET', `/api/partner/v1/payments?${unique()}=1`);
    await send(
      'POST',
      '/api/partner/v1/vault',
      JSON.stringify({ portalId, paymentMethod: { type: 'card', cardNumber: unique(), expirationDate: '12/30', cvv: '123' } }),
    );
    await send('POST', '/api/partner/v1/payments/018f0000-0000-7000-8000-00000000dead/refund', JSON.stringify({ reason: unique() }), key());
    await send('POST', '/api/partner/v1/auth/token', JSON.stringify({ card: unique() }));
    await send('PUT', `/api/partner/v1/payments`, payment(unique()));
    await send('POST', '/api/v1/payer/intake', new URLSearchParams({ portal_id: portalId, card: unique() }).toString(), {
      'content-type': 'application/x-www-form-urlencoded',
    });
    await send('GET', `/checkout/${unique()}`);
    await send('POST', `/checkout/cs_${unique()}/pay`, new URLSearchParams({ pan: unique(), cvv: '123' }).toString(), {
      'content-type': 'application/x-www-form-urlencoded',
    });
  }
  return { cards: [...cards], answers: answers.join('\n'), requests };
};

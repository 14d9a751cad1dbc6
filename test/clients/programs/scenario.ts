/** A partner's scenario, for each generated client. The program of a generator fills in {@link Client} with its generated functions. */
import assert from 'node:assert/strict';

export interface Payment {
  readonly id: string;
  readonly status: string;
  readonly totalChargedCents: number;
  readonly remainingRefundableAmountCents: number;
}
export interface Answer<Data> {
  readonly response: { readonly status: number; readonly headers: Headers };
  readonly data?: { readonly success: boolean; readonly data: Data } | undefined;
  readonly error?: { readonly success: boolean; readonly message: string; readonly details?: { readonly code: string } } | undefined;
}
type Promised<Data> = Promise<Answer<Data>>;
export interface Client {
  quote(amountCents: number): Promised<{ readonly totalChargedCents: number }>;
  create(cardNumber: string, amountCents: number, key: string): Promised<Payment>;
  find(id: string): Promised<Payment>;
  list(cursor: string | undefined, limit: number): Promised<{ readonly payments: readonly Payment[]; readonly nextCursor: string | null }>;
  refund(id: string, amountCents: number, key: string): Promised<{ readonly reversalType: string; readonly remainingRefundableAmountCents: number }>;
  void(id: string, key: string): Promised<{ readonly status: string }>;
}

export const environment = (): { base: string; apiKey: string; portalId: string } => {
  const { BASE, API_KEY, PORTAL } = process.env;
  if (!BASE || !API_KEY || !PORTAL) throw new Error('BASE, API_KEY and PORTAL must be set');
  return { base: BASE, apiKey: API_KEY, portalId: PORTAL };
};

const APPROVED = '4242 4242 4242 4242';

/** `stranger`: the same client with a wrong key. */
export const play = async (client: Client, stranger: Client): Promise<void> => {
  const run = `${process.pid}-${Date.now()}`;
  const ok = <Data>({ response, data, error }: Answer<Data>): Data => {
    assert.equal(response.status, 200, JSON.stringify(error));
    assert.equal(data?.success, true);
    return data!.data;
  };
  const refused = (answer: Answer<unknown>, status: number, code: string | undefined): void => {
    assert.equal(answer.response.status, status);
    assert.equal(answer.error?.success, false);
    assert.equal(answer.error?.details?.code, code);
  };

  const quote = ok(await client.quote(12_500));
  const answer = await client.create(APPROVED, 12_500, `${run}-1`);
  const payment = ok(answer);
  assert.equal(payment.status, 'succeeded');
  assert.equal(payment.totalChargedCents, quote.totalChargedCents);
  assert.equal(answer.response.headers.get('idempotent-replayed'), null);

  const replay = await client.create(APPROVED, 12_500, `${run}-1`);
  assert.equal(ok(replay).id, payment.id);
  assert.equal(replay.response.headers.get('idempotent-replayed'), 'true');

  const second = ok(await client.create(APPROVED, 700, `${run}-2`));
  const seen = new Set<string>();
  for (let cursor: string | undefined; ;) {
    const page = ok(await client.list(cursor, 1));
    for (const { id } of page.payments) seen.add(id);
    if (page.nextCursor === null) break;
    cursor = page.nextCursor;
  }
  assert(seen.has(payment.id) && seen.has(second.id));

  const refund = ok(await client.refund(payment.id, 2_500, `${run}-3`));
  assert.equal(refund.remainingRefundableAmountCents, payment.totalChargedCents - 2_500);
  assert.equal(ok(await client.find(payment.id)).status, 'partially_refunded');
  assert.equal(ok(await client.void(second.id, `${run}-4`)).status, 'voided');

  refused(await client.create('4000 0000 0000 0002', 100, `${run}-5`), 402, 'PAYMENT_DECLINED');
  refused(await client.create('1', 100, `${run}-6`), 400, 'VALIDATION_ERROR');
  refused(await stranger.find(payment.id), 401, undefined);
  refused(await client.find('018f0000-0000-7000-8000-000000000000'), 404, 'PAYMENT_NOT_FOUND');
  console.log('scenario passed');
};

/** The scenario with orval's `fetch` client. Its functions have no parameter for `Idempotency-Key`: the options of the request carry it. */
import { createPayment, getPayment, listPayments, quoteFee, refundPayment, voidPayment } from './generated/orval.js';
import { type Answer, type Client, environment, play } from './scenario.js';

const { base, apiKey, portalId } = environment();

const answered = async <Data>(
  call: Promise<{ readonly status: number; readonly headers: Headers; readonly data: object }>,
): Promise<Answer<Data>> => {
  const { status, headers, data } = await call;
  const body = status === 200 ? { data } : { error: data };
  return { response: { status, headers }, ...body } as Answer<Data>;
};

/** The generated addresses have no host. */
const fetchOf = globalThis.fetch;
globalThis.fetch = (input, init) => fetchOf(typeof input === 'string' ? new URL(input, base) : input, init);

const clientOf = (key: string): Client => {
  const authorization = `ApiKey ${key}`;
  const keyed = (name: string) => ({ headers: { authorization, 'Idempotency-Key': name } });
  const options = { headers: { authorization } };
  return {
    quote: (amountCents) => answered(quoteFee({ portalId, amountCents }, options)),
    create: (cardNumber, amountCents, name) =>
      answered(
        createPayment(
          {
            portalId,
            amountCents,
            paymentMethod: { type: 'card', cardNumber, expirationDate: '12/30', cvv: '123' },
            lineItems: [{ amountCents, referenceId: 'WATER-2041' }],
          },
          keyed(name),
        ),
      ),
    find: (id) => answered(getPayment(id, options)),
    list: (cursor, limit) => answered(listPayments({ ...(cursor && { cursor }), limit }, options)),
    refund: (id, amountCents, name) => answered(refundPayment(id, { amountCents }, keyed(name))),
    void: (id, name) => answered(voidPayment(id, {}, keyed(name))),
  };
};

await play(clientOf(apiKey), clientOf(`${apiKey}x`));

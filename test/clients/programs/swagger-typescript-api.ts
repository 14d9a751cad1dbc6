/** The scenario with swagger-typescript-api. Its functions have no parameter for `Idempotency-Key`: the last argument carries it. */
import { Api, type HttpResponse } from './generated/swagger-typescript-api.js';
import { type Answer, type Client, environment, play } from './scenario.js';

const { base, apiKey, portalId } = environment();

/** The client throws the answer if its status is not 2xx. */
const answered = async <Data>(call: Promise<HttpResponse<unknown, unknown>>): Promise<Answer<Data>> => {
  const answer = await call.catch((error: unknown) => error as HttpResponse<unknown, unknown>);
  return { response: answer, ...(answer.ok ? { data: answer.data } : { error: answer.error }) } as Answer<Data>;
};

const clientOf = (key: string): Client => {
  const { api } = new Api({ baseUrl: base, baseApiParams: { headers: { authorization: `ApiKey ${key}` } } });
  const keyed = (name: string) => ({ headers: { 'Idempotency-Key': name } });
  return {
    quote: (amountCents) => answered(api.quoteFee({ portalId, amountCents })),
    create: (cardNumber, amountCents, name) =>
      answered(
        api.createPayment(
          {
            portalId,
            amountCents,
            paymentMethod: { type: 'card', cardNumber, expirationDate: '12/30', cvv: '123' },
            lineItems: [{ amountCents, referenceId: 'WATER-2041' }],
          },
          keyed(name),
        ),
      ),
    find: (id) => answered(api.getPayment(id)),
    list: (cursor, limit) => answered(api.listPayments({ ...(cursor && { cursor }), limit })),
    refund: (id, amountCents, name) => answered(api.refundPayment(id, { amountCents }, keyed(name))),
    void: (id, name) => answered(api.voidPayment(id, {}, keyed(name))),
  };
};

await play(clientOf(apiKey), clientOf(`${apiKey}x`));

/** The scenario with @hey-api/openapi-ts. */
import { createClient, createConfig } from './generated/hey/client/index.js';
import { createPayment, getPayment, listPayments, quoteFee, refundPayment, voidPayment } from './generated/hey/index.js';
import { type Answer, type Client, environment, play } from './scenario.js';

const { base, apiKey, portalId } = environment();

/** `response` is absent only if no answer came. */
const answered = async <Data>(call: Promise<Omit<Answer<Data>, 'response'> & { readonly response?: Response }>): Promise<Answer<Data>> => {
  const { response, ...rest } = await call;
  if (!response) throw new Error('no answer');
  return { ...rest, response };
};

const clientOf = (key: string): Client => {
  const client = createClient(createConfig({ baseUrl: base, auth: ({ type }) => (type === 'apiKey' ? `ApiKey ${key}` : undefined) }));
  const headers = (name: string) => ({ 'Idempotency-Key': name });
  return {
    quote: (amountCents) => answered(quoteFee({ client, query: { portalId, amountCents } })),
    create: (cardNumber, amountCents, name) =>
      answered(
        createPayment({
          client,
          headers: headers(name),
          body: {
            portalId,
            amountCents,
            paymentMethod: { type: 'card', cardNumber, expirationDate: '12/30', cvv: '123' },
            lineItems: [{ amountCents, referenceId: 'WATER-2041' }],
          },
        }),
      ),
    find: (id) => answered(getPayment({ client, path: { id } })),
    list: (cursor, limit) => answered(listPayments({ client, query: { ...(cursor && { cursor }), limit } })),
    refund: (id, amountCents, name) => answered(refundPayment({ client, path: { id }, headers: headers(name), body: { amountCents } })),
    void: (id, name) => answered(voidPayment({ client, path: { id }, headers: headers(name), body: {} })),
  };
};

await play(clientOf(apiKey), clientOf(`${apiKey}x`));

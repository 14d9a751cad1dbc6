/** The scenario with openapi-typescript and openapi-fetch. */
import createClient from 'openapi-fetch';
import type { paths } from './generated/openapi.js';
import { type Client, environment, play } from './scenario.js';

const { base, apiKey, portalId } = environment();

const clientOf = (key: string): Client => {
  const api = createClient<paths>({ baseUrl: base, headers: { authorization: `ApiKey ${key}` } });
  const keyed = (name: string) => ({ 'Idempotency-Key': name });
  return {
    quote: (amountCents) => api.GET('/api/partner/v1/fees/quote', { params: { query: { portalId, amountCents } } }),
    create: (cardNumber, amountCents, name) =>
      api.POST('/api/partner/v1/payments', {
        params: { header: keyed(name) },
        body: {
          portalId,
          amountCents,
          paymentMethod: { type: 'card', cardNumber, expirationDate: '12/30', cvv: '123' },
          lineItems: [{ amountCents, referenceId: 'WATER-2041' }],
        },
      }),
    find: (id) => api.GET('/api/partner/v1/payments/{id}', { params: { path: { id } } }),
    list: (cursor, limit) => api.GET('/api/partner/v1/payments', { params: { query: { ...(cursor && { cursor }), limit } } }),
    refund: (id, amountCents, name) =>
      api.POST('/api/partner/v1/payments/{id}/refund', { params: { path: { id }, header: keyed(name) }, body: { amountCents } }),
    void: (id, name) => api.POST('/api/partner/v1/payments/{id}/void', { params: { path: { id }, header: keyed(name) }, body: {} }),
  };
};

await play(clientOf(apiKey), clientOf(`${apiKey}x`));

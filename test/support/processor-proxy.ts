/** A proxy between a process of the service and the double of a processor, for specs that kill the process at a call. Also what the doubles hold. */
import { once } from 'node:events';
import http, { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { buffer } from 'node:stream/consumers';
import type { AuthorizeNetDouble } from '../doubles/authorize-net/server.js';
import type { StripeControl } from '../doubles/stripe/control.js';

/** `before`: the processor does not get the call. `after`: it executes the call, and its answer does not arrive. */
export type Moment = 'before' | 'after';

export interface ProcessorCall {
  readonly method: string;
  readonly path: string;
  readonly body: string;
}

export interface ProcessorProxy {
  readonly url: string;
  close(): void;
}

/** Passes calls on to a processor. If `judge` names a moment, the call ends there: `cut` is called, and the caller never gets an answer. */
export const startProcessorProxy = async (
  target: string,
  judge: (call: ProcessorCall) => Moment | null,
  cut: () => void,
): Promise<ProcessorProxy> => {
  const { hostname, port } = new URL(target);
  const pass = async (request: IncomingMessage, response: ServerResponse) => {
    const body = await buffer(request);
    const { url: path = '', method = '', headers } = request;
    const moment = judge({ method, path, body: body.toString('utf8') });
    if (moment === 'before') return cut();
    const passed = http.request({ agent: false, hostname, port, path, method, headers }).end(body);
    const [answer] = (await once(passed, 'response')) as [IncomingMessage];
    const text = await buffer(answer);
    if (moment === 'after') return cut();
    response.writeHead(answer.statusCode!, answer.headers).end(text);
  };
  const server = createServer((request, response) => void pass(request, response)).listen(0, '127.0.0.1');
  await once(server, 'listening');
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    close: () => {
      server.closeAllConnections();
      server.close();
    },
  };
};

/** Cents that Authorize.Net holds of a charge. null: of all charges of the merchant. */
export const heldByAuthorizeNet = ({ vendor }: AuthorizeNetDouble, merchant: string, ref: string | null): number => {
  const all = vendor.all(merchant);
  const isGood = ({ status }: { status: string }) => !['voided', 'declined', 'settlementError'].includes(status);
  const mine = all.filter((txn) => txn.type === 'authCaptureTransaction' && (ref === null || txn.ref === ref) && isGood(txn));
  return mine.reduce((sum, { id, amountCents }) => {
    const refunds = all.filter((txn) => txn.type === 'refundTransaction' && txn.refTransId === id && isGood(txn));
    return sum + amountCents - refunds.reduce((cents, refund) => cents + refund.amountCents, 0);
  }, 0);
};

/** Cents that Stripe holds of a charge. null: of all charges of the account. */
export const heldByStripe = async (stripe: StripeControl, ref: string | null): Promise<number> => {
  const ids = ref === null ? null : (await stripe.intents(ref)).map(({ id }) => id);
  return (await stripe.charges())
    .filter(({ payment_intent, status }) => status === 'succeeded' && (ids === null || ids.includes(payment_intent as string)))
    .reduce((sum, { amount, amount_refunded }) => sum + Number(amount) - Number(amount_refunded), 0);
};

/**
 * The signature of a delivery: HMAC-SHA256 over `<t>.<body>`, in hex, in `Service-Signature: t=<unix seconds>,v1=<hex>`
 * (specification, Signature verification). The key is the whole secret as text, including `whsec_` (C55).
 *
 * `t` is the time of the attempt, not of the event. A receiver refuses a `t` that is older than 300 s, and five attempts span 8 minutes.
 */
import { createHash, createHmac } from 'node:crypto';

/** Lower-case hex, 64 characters. */
export const signatureOf = (secret: string, unixSeconds: number, body: string | Uint8Array): string =>
  createHmac('sha256', secret).update(`${unixSeconds}.`).update(body).digest('hex');

export interface SignedEvent {
  readonly id: string;
  readonly type: string;
  /** The stored bytes. */
  readonly body: Uint8Array;
}

/** Headers of one attempt. */
export const headersOf = ({ id, type, body }: SignedEvent, secret: string, unixSeconds: number): Record<string, string> => ({
  'Content-Type': 'application/json',
  'Content-Length': String(body.byteLength),
  'User-Agent': 'Payfold-Webhooks/1',
  'Service-Signature': `t=${unixSeconds},v1=${signatureOf(secret, unixSeconds, body)}`,
  'Service-Event-Id': id,
  'Service-Event-Type': type,
});

const ID_LENGTH = 27;

/**
 * The id of a webhook event. It depends only on the notification's type and on the payment's event (stream and revision). A repeated write gives the
 * same id.
 */
export const eventIdOf = (type: string, stream: string, revision: bigint): string =>
  `evt_${createHash('sha256').update(`${type}\n${stream}\n${revision}`).digest('base64url').slice(0, ID_LENGTH)}`;

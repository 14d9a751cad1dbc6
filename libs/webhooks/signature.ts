/**
 * The signature of a delivery: HMAC-SHA256 over `<t>.<body>`, in hex, in `Service-Signature: t=<unix seconds>,v1=<hex>` (specification, Signature verification).
 * The key is the whole secret as text, `whsec_` included (C55). `t` is the time of the attempt: five attempts span 8 minutes, the tolerance is 300 s.
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

/** The event's id: a pure function of the notification's type and of its fact. So a batch that is written twice makes one event. */
export const eventIdOf = (type: string, stream: string, revision: bigint): string =>
  `evt_${createHash('sha256').update(`${type}\n${stream}\n${revision}`).digest('base64url').slice(0, ID_LENGTH)}`;

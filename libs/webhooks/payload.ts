/**
 * The bodies of notifications, as rows hold them. A body with a reason is boxed under the key of the event's text. After an erasure, a body that is
 * sent is made again from its event with an empty reason (C78).
 */
import type { EventStore, Recorded } from '#eventstore';
import { CLOSED, isBox, type Personal, type Reveal } from '#kernel';
import { type PaymentEvent, paymentEvents, paymentIdOf, type Reason, textOf } from '#payments';
import { boxAsText, boxInText, type OpenedKeys, type PersonalKeys } from '#platform';
import { bodyOf, type Notification, notificationOf, NOTIFYING_EVENTS } from './notification.js';
import { eventIdOf } from './signature.js';

export interface PayloadPorts {
  readonly personal: Pick<PersonalKeys, 'open'>;
  readonly store: Pick<EventStore, 'read'>;
}

/** The id and the body of a notification. */
const written = ({ stream, revision, meta }: Recorded, notification: Notification) => {
  const id = eventIdOf(notification.type, stream, revision);
  return { id, body: bodyOf(id, meta.recordedAt, notification) };
};

const contextOf = (stream: string, eventId: string): string => `${stream}/webhook:${eventId}`;

const personalOf = ({ data }: Recorded): Personal<unknown> => (data as { readonly personal?: Personal<unknown> }).personal ?? null;

/** True if the event makes a notification. */
export const notifies = (recorded: Recorded): boolean =>
  (NOTIFYING_EVENTS as readonly string[]).includes(recorded.type) && notificationFor(recorded, CLOSED) !== null;

/** The ids of the keys that {@link payloadOf} needs for these events. */
export const keysOfEvents = (events: readonly Recorded[]): readonly string[] => [
  ...new Set(events.map(personalOf).flatMap((personal) => (isBox(personal) ? [personal.key] : []))),
];

/** The notification of an event, as its row holds it. null: the event makes none. */
export const payloadOf = (
  recorded: Recorded,
  opened: OpenedKeys,
): { readonly id: string; readonly type: Notification['type']; readonly payload: Buffer } | null => {
  const notification = notificationFor(recorded, opened);
  if (!notification) return null;
  const { id, body } = written(recorded, notification);
  const personal = personalOf(recorded);
  const key = isBox(personal) ? opened.key(personal.key) : null;
  return { id, type: notification.type, payload: Buffer.from(key ? boxAsText(key.sealText(body, contextOf(recorded.stream, id))) : body) };
};

const notificationFor = (recorded: Recorded, reveal: Reveal): Notification | null => {
  const paymentId = paymentIdOf(recorded.stream);
  const event = paymentEvents.read(recorded);
  return notificationOf(paymentId, event, reasonIn(paymentId, event, reveal));
};

/** The reason of an event. Empty if it has none, or if `reveal` does not show it. */
const reasonIn = (paymentId: string, event: PaymentEvent, reveal: Reveal): string => {
  const text = textOf(paymentId, event);
  return (text && reveal.content(text.personal as Personal<Reason>, text.context)?.reason) ?? '';
};

/** The row of a notification. */
export interface StoredPayload {
  readonly eventId: string;
  readonly payload: Buffer;
  readonly stream: string;
  readonly revision: bigint;
}

/** The body to send. Throws the errors of the database and of the event store. */
export const bodyToSend = async ({ personal, store }: PayloadPorts, { eventId, payload, stream, revision }: StoredPayload): Promise<Buffer> => {
  const box = boxInText(payload.toString());
  if (!box) return payload;
  const opened = await personal.open([box.key]);
  const key = opened.key(box.key);
  if (key) return Buffer.from(key.openText(box, contextOf(stream, eventId)));
  for await (const recorded of store.read(stream, revision, 1)) {
    const notification = notificationFor(recorded, opened);
    if (notification) return Buffer.from(written(recorded, notification).body);
  }
  throw new Error(`${stream}@${revision} is not the event of ${eventId}`);
};

/**
 * Multiplies a real history: each copy has the same events with other ids, references, keys and times. An id becomes the same new id wherever a copy
 * names it. So a copy is complete: its batches settle its own payments.
 */

/** An event as the log of Postgres stores it. `data` and `meta`: JSON, byte for byte. `recordedAt`: RFC 3339. */
export interface StoredEvent {
  readonly stream: string;
  readonly revision: string;
  readonly eventId: string;
  readonly type: string;
  readonly data: string;
  readonly meta: string;
  readonly recordedAt: string;
}

/** Streams that are copied. Accounts, portals and keys exist once, and every copy uses them. */
const COPIED_STREAMS = ['payment-', 'settlement-', 'staff-task-'];
export const isCopied = ({ stream }: Pick<StoredEvent, 'stream'>): boolean => COPIED_STREAMS.some((prefix) => stream.startsWith(prefix));

const UUID = /[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/;
const TIME = /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z/;
const DAY = /"\d{4}-\d\d-\d\d"/;
/** Hashes of keys and of requests. */
const HASH = /\b[0-9a-f]{64}\b/;
const BATCH = /\bbat_\d+/;
/** Ids of the processor's transactions, for example `ch_QBE4GRG1JEPM0MZC`. */
const TRANSACTION = /\b[a-z]{2}_[0-9A-Z]{16}\b/;
/** Our references for the processor. */
const REFERENCE = /"[0-9A-Z]{20}"/;
const CONFIRMATION = /"[0-9A-Z]{4}-[0-9A-Z]{4}-[0-9A-Z]{2}"/;
/** References of bills, for example `"WTR-100200"` or `"PRM-40000-1"` (apps/demo/city.ts). */
const BILL = /"(?:WTR|CIT|PRM)-\d+/;
const NAMES = new RegExp([UUID, TIME, DAY, HASH, BATCH, TRANSACTION, REFERENCE, CONFIRMATION, BILL].map(({ source }) => source).join('|'), 'g');

const DAY_MS = 86_400_000;
const HEX = '0123456789abcdef';
const CROCKFORD = '0123456789ABCDEFGHJKMNPQRSTVWXYZ';
/** The simulator numbers its batches from 1. Copies begin at this number, and each copy has as many. */
const BATCHES_PER_COPY = 10_000;
const BATCH_DIGITS = 8;

/** A copy: its number from 0, and the milliseconds between the original and its events. */
export interface Copy {
  readonly number: number;
  readonly shiftMs: number;
}

/** A one-to-one mixing of 32 bits, so that copies with neighbouring numbers get ids that lie far from each other. */
const mixed = (number: number): number => {
  let value = Math.imul(number + 1, 0x9e3779b1) >>> 0;
  value = Math.imul(value ^ (value >>> 15), 0x85ebca6b) >>> 0;
  return (value ^ (value >>> 13)) >>> 0;
};

/** Replaces 8 characters from `at` on. Each copy gets other characters. */
const turned = (name: string, at: number, alphabet: string, copy: Copy): string => {
  const by = mixed(copy.number);
  let part = '';
  for (let digit = 0; digit < 8; digit++) part += alphabet[(alphabet.indexOf(name[at + digit]!) + ((by >>> (4 * digit)) & 15)) % alphabet.length];
  return name.slice(0, at) + part + name.slice(at + 8);
};

const LAST_GROUP = 24;
/** A UUID of version 7 begins with its time in 48 bits. */
const newUuid = (uuid: string, copy: Copy): string => {
  if (uuid[14] !== '7') return turned(uuid, 0, HEX, copy);
  const time = (Number.parseInt(uuid.slice(0, 8) + uuid.slice(9, 13), 16) + copy.shiftMs).toString(16).padStart(12, '0');
  return turned(`${time.slice(0, 8)}-${time.slice(8)}${uuid.slice(13)}`, LAST_GROUP, HEX, copy);
};

/** The start of the UTC day of a time in milliseconds. */
export const startOfDay = (ms: number): number => ms - (ms % DAY_MS);

type Name = (copy: Copy) => string;
/** The new name in a copy. null: the name stays. `bornMs`: time of the original's first event. */
const nameOf = (name: string, kept: ReadonlySet<string>, bornMs: number): Name | null => {
  if (/^"[A-Z]{3}-\d+$/.test(name)) {
    const digits = name.slice(5);
    return (copy) => name.slice(0, 5) + String((Number(digits) + mixed(copy.number)) % 10 ** digits.length).padStart(digits.length, '0');
  }
  if (name[0] === '"' && name.length === 12)
    return ({ shiftMs }) => {
      const days = startOfDay(bornMs + shiftMs) - startOfDay(bornMs);
      return `"${new Date(Date.parse(name.slice(1, 11)) + days).toISOString().slice(0, 10)}"`;
    };
  if (name[5] === '-') {
    const bare = name.replaceAll(/["-]/g, '');
    return (copy) => turned(bare, 0, CROCKFORD, copy).replace(/^(.{4})(.{4})(.{2})$/, '"$1-$2-$3"');
  }
  if (name[0] === '"') return (copy) => turned(name, 1, CROCKFORD, copy);
  if (name.startsWith('bat_'))
    return ({ number }) => `bat_${String(Number(name.slice(4)) + (number + 1) * BATCHES_PER_COPY).padStart(BATCH_DIGITS, '0')}`;
  if (name[2] === '_') return (copy) => turned(name, 3, CROCKFORD, copy);
  if (name[10] === 'T') return ({ shiftMs }) => new Date(Date.parse(name) + shiftMs).toISOString();
  if (name.length === 64) return (copy) => turned(name, 0, HEX, copy);
  return kept.has(name) ? null : (copy) => newUuid(name, copy);
};

/** Separates the parts of an event while names are replaced. JSON never contains this character. */
const SEPARATOR = '\t';

/** Makes the copies of an event. `kept`: ids that stay in every copy. */
export const copiesOf = (event: StoredEvent, kept: ReadonlySet<string>, bornMs: number): ((copy: Copy) => StoredEvent) => {
  const text = [event.stream, event.eventId, event.data, event.meta, event.recordedAt].join(SEPARATOR);
  const parts: (string | Name)[] = [];
  let from = 0;
  for (const found of text.matchAll(NAMES)) {
    const name = nameOf(found[0], kept, bornMs);
    if (!name) continue;
    parts.push(text.slice(from, found.index), name);
    from = found.index + found[0].length;
  }
  parts.push(text.slice(from));
  const { revision, type } = event;
  return (copy) => {
    let made = '';
    for (const part of parts) made += typeof part === 'string' ? part : part(copy);
    const [stream, eventId, data, meta, recordedAt] = made.split(SEPARATOR) as [string, string, string, string, string];
    return { stream, revision, eventId, type, data, meta, recordedAt };
  };
};

/** The ids in events that are not copied: of accounts, portals, keys and these events themselves. */
export const keptIds = (events: readonly StoredEvent[]): ReadonlySet<string> =>
  new Set(
    events
      .filter((event) => !isCopied(event))
      .flatMap(({ stream, eventId, data, meta }) => `${stream} ${eventId} ${data} ${meta}`.match(new RegExp(UUID.source, 'g')) ?? []),
  );

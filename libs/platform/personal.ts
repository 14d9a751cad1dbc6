/**
 * Keys of personal data, and the boxes that they seal (docs/decisions/0050-personal-data.md). Each payment with personal data has a key of its own.
 * Without the key, its boxes can never be opened again. So an erasure deletes the key, and no event changes.
 *
 * A process writes keys in blocks before it needs them. So a key is durable before the event that uses it, and no request waits for the write.
 */
import { createCipheriv, createDecipheriv, createHmac, randomBytes } from 'node:crypto';
import { type Box, canonicalJson, type Clock, CLOSED, type Ids, isBox, type Personal, type Reveal } from '#kernel';
import { batched } from './batch.js';
import type { KeyRing } from './keys.js';
import type { Logger } from './logging.js';
import type { Queryable } from './postgres/pool.js';
import type { Migration } from './postgres/schema.js';

export const personalKeyMigration: Migration = {
  name: '0091-personal-key',
  sql: `
    create table personal_key (key_id uuid primary key, kid text not null, wrapped bytea not null, made_at timestamptz not null default clock_timestamp());
    -- Says why a key is gone. The projection of erasures writes it, and can make it again from the log.
    create table personal_erased (key_id uuid primary key, erasure_id uuid not null, erased_at timestamptz not null);
    -- Each reading of personal data by finance tools, auditors and staff: when, by which key or person, of which report, and of how many rows.
    create table personal_opening (
      opening_id uuid primary key, opened_at timestamptz not null default clock_timestamp(), actor text not null, report text not null,
      shown bigint not null default 0);
    create index personal_opening_time on personal_opening (opened_at);
  `,
};

/** Keys that a log line names at most. */
const NAMED_KEYS = 10;
const ENCRYPTION_BYTES = 32;
/** An AES-256 key and a key for HMAC-SHA256. */
const KEY_BYTES = 64;
const NONCE_BYTES = 12;
const TAG_BYTES = 16;

const encrypt = (key: Uint8Array, nonce: Uint8Array, plaintext: Uint8Array, context: string): Buffer => {
  const cipher = createCipheriv('aes-256-gcm', key, nonce).setAAD(Buffer.from(context));
  return Buffer.concat([nonce, cipher.update(plaintext), cipher.final(), cipher.getAuthTag()]);
};

/** Throws if key, bytes or context differ from those of {@link encrypt}. */
const decrypt = (key: Uint8Array, bytes: Buffer, context: string): Buffer => {
  const decipher = createDecipheriv('aes-256-gcm', key, bytes.subarray(0, NONCE_BYTES), { authTagLength: TAG_BYTES })
    .setAAD(Buffer.from(context))
    .setAuthTag(bytes.subarray(bytes.length - TAG_BYTES));
  return Buffer.concat([decipher.update(bytes.subarray(NONCE_BYTES, bytes.length - TAG_BYTES)), decipher.final()]);
};

/** Texts that a key keeps after it has opened them, in characters. */
const KEPT_CHARACTERS = 4_096;

/** A key in memory. It keeps short texts that it has opened, since opening costs more than all else of a page. `context`: `<stream>/<field>`. A box that is copied to another place cannot be opened there. */
export class PersonalKey {
  private readonly kept = new Map<string, OpenedBox>();
  private keptCharacters = 0;

  constructor(
    readonly id: string,
    private readonly bytes: Buffer,
  ) {
    if (bytes.length !== KEY_BYTES) throw new Error(`a personal key has ${KEY_BYTES} bytes`);
  }

  /** Seals content as canonical JSON (RFC 8785). The same content and context give the same box. */
  seal(content: unknown, context: string): Box {
    return this.sealText(canonicalJson(content), context);
  }

  /** Opens the content of a box. It is frozen. Throws if the box was changed, or belongs to another key or context. */
  open(box: Box, context: string): unknown {
    const opened = this.opened(box, context);
    return (opened.content ??= frozen(JSON.parse(opened.text)));
  }

  sealText(text: string, context: string): Box {
    const plaintext = Buffer.from(text, 'utf8');
    // The nonce depends on content and context. Two different texts never share one, and a repeated request makes the same box.
    const nonce = createHmac('sha256', this.bytes.subarray(ENCRYPTION_BYTES))
      .update(context)
      .update(ZERO)
      .update(plaintext)
      .digest()
      .subarray(0, NONCE_BYTES);
    return { key: this.id, box: encrypt(this.bytes.subarray(0, ENCRYPTION_BYTES), nonce, plaintext, context).toString('base64') };
  }

  openText(box: Box, context: string): string {
    return this.opened(box, context).text;
  }

  private opened({ key, box }: Box, context: string): OpenedBox {
    if (key !== this.id) throw new Error(`a box of key ${key} cannot be opened with key ${this.id}`);
    const known = this.kept.get(box);
    if (known?.context === context) return known;
    const text = decrypt(this.bytes.subarray(0, ENCRYPTION_BYTES), Buffer.from(box, 'base64'), context).toString('utf8');
    const opened: OpenedBox = { context, text, content: undefined };
    if (this.keptCharacters + text.length <= KEPT_CHARACTERS) {
      this.keptCharacters += text.length;
      this.kept.set(box, opened);
    }
    return opened;
  }

  /** The key as the database holds it: encrypted under the ring. */
  wrap(keys: KeyRing, random: RandomBytes): WrappedKey {
    const wrapped = encrypt(keys.derive('personal-key'), random(NONCE_BYTES), this.bytes, this.id);
    return { keyId: this.id, kid: keys.current, wrapped };
  }

  /** Throws if the ring has not the key that wrapped this one. */
  static unwrap(keys: KeyRing, { keyId, kid, wrapped }: WrappedKey): PersonalKey {
    return new PersonalKey(keyId, decrypt(keys.derive('personal-key', kid), wrapped, keyId));
  }
}
const ZERO = Buffer.from([0]);

interface OpenedBox {
  readonly context: string;
  readonly text: string;
  /** undefined: nobody has read it yet. */
  content: unknown;
}

/** Several readers share a content. */
const frozen = <T>(value: T): T => {
  if (typeof value === 'object' && value !== null) Object.values(Object.freeze(value)).forEach(frozen);
  return value;
};

type RandomBytes = (count: number) => Buffer;

export interface WrappedKey {
  readonly keyId: string;
  /** Id of the master key. */
  readonly kid: string;
  readonly wrapped: Buffer;
}

/** `key` null: the database has no such key. `erasedAt`: RFC 3339; null: the key was not erased. */
export interface FoundKey {
  readonly keyId: string;
  readonly key: WrappedKey | null;
  readonly erasedAt: string | null;
}

/** An erasure, as the log names it. `at`: RFC 3339. */
export interface Erasure {
  readonly erasureId: string;
  readonly at: string;
}

/** The port to the rows of keys. Postgres and the simulation pass the same contract tests (test/support/personal-keys.contract.ts). */
export interface PersonalKeyRows {
  /** Writes keys durably. */
  insert(keys: readonly WrappedKey[]): Promise<void>;
  /** One answer for each id, in order. */
  find(keyIds: readonly string[]): Promise<readonly FoundKey[]>;
  /** Deletes keys that nothing uses, and records nothing. */
  discard(keyIds: readonly string[]): Promise<void>;
  /** Deletes keys, and records that they were erased. Repeating it changes nothing; a key keeps its first erasure. */
  forget(keyIds: readonly string[], erasure: Erasure): Promise<void>;
}

/** `db`: a pool, or the transaction of a projection. Its commits must wait for the disk. */
export const postgresPersonalKeyRows = (db: Queryable): PersonalKeyRows => ({
  insert: async (keys) => {
    await db.query({
      name: 'personal-key-insert',
      text: 'insert into personal_key (key_id, kid, wrapped) select * from unnest($1::uuid[], $2::text[], $3::bytea[])',
      values: [keys.map(({ keyId }) => keyId), keys.map(({ kid }) => kid), keys.map(({ wrapped }) => wrapped)],
    });
  },

  find: async (keyIds) => {
    const { rows } = await db.query<{ key_id: string; kid: string | null; wrapped: Buffer | null; erased_at: Date | null }>({
      name: 'personal-key-find',
      text: `
        select asked.key_id, k.kid, k.wrapped, e.erased_at from unnest($1::uuid[]) with ordinality as asked (key_id, number)
        left join personal_key k on k.key_id = asked.key_id left join personal_erased e on e.key_id = asked.key_id order by asked.number`,
      values: [keyIds],
    });
    return rows.map(({ key_id: keyId, kid, wrapped, erased_at: erasedAt }) => ({
      keyId,
      key: kid === null ? null : { keyId, kid, wrapped: wrapped! },
      erasedAt: erasedAt?.toISOString() ?? null,
    }));
  },

  discard: async (keyIds) => {
    await db.query({ name: 'personal-key-discard', text: 'delete from personal_key where key_id = any ($1::uuid[])', values: [keyIds] });
  },

  forget: async (keyIds, { erasureId, at }) => {
    await db.query(
      `with gone as (delete from personal_key where key_id = any ($1::uuid[]))
       insert into personal_erased (key_id, erasure_id, erased_at) select key_id, $2, $3 from unnest($1::uuid[]) as asked (key_id)
       on conflict do nothing`,
      [keyIds, erasureId, at],
    );
  },
});

/** The keys that one request opened. It is dropped with the request. */
export class OpenedKeys implements Reveal {
  constructor(
    private readonly keys: ReadonlyMap<string, PersonalKey>,
    private readonly erased: ReadonlyMap<string, string> = new Map(),
  ) {}

  /** null: the key is erased or missing. */
  key(keyId: string): PersonalKey | null {
    return this.keys.get(keyId) ?? null;
  }

  content<Content>(personal: Personal<Content>, context: string): Content | null {
    if (personal === null) return null;
    if (!isBox(personal)) return personal.clear;
    const key = this.keys.get(personal.key);
    return key ? (key.open(personal, context) as Content) : null;
  }

  erasedAt(personal: readonly Personal<unknown>[]): string | null {
    let newest: string | null = null;
    for (const one of personal) {
      const at = isBox(one) ? (this.erased.get(one.key) ?? null) : null;
      if (at !== null && (newest === null || at > newest)) newest = at;
    }
    return newest;
  }
}

/** The port of personal keys. */
export interface PersonalKeys {
  /**
   * A new key. It is durable. Resolves without a statement while the block of this process lasts. Throws the errors of the database if the block is
   * used up and no other one can be written.
   */
  take(): Promise<PersonalKey>;
  /**
   * Opens keys in one statement. A key that is neither kept nor erased is missing: it is logged and counted, and its boxes stay closed. Throws the
   * errors of the database.
   */
  open(keyIds: readonly string[]): Promise<OpenedKeys>;
  /** Says which keys were erased, and opens none. Throws the errors of the database. */
  erasures(keyIds: readonly string[]): Promise<Reveal>;
  /** Deletes keys that no event and no row uses. */
  discard(keyIds: readonly string[]): Promise<void>;
  /** Deletes keys for ever. Repeating it changes nothing. */
  forget(keyIds: readonly string[], erasure: Erasure): Promise<void>;
}

export interface PersonalKeysOptions {
  readonly keys: KeyRing;
  readonly ids: Ids;
  readonly clock: Pick<Clock, 'monotonic'>;
  readonly log: Pick<Logger, 'warn' | 'error'>;
  /** Number of keys in one block. Default 512. A command needs few. */
  readonly block?: number;
  /** Called with the number of keys that were missing. */
  readonly onMissing?: (count: number) => void;
  /** Default: the random numbers of the system. The simulation passes its own. */
  readonly random?: RandomBytes;
}

/** When this many keys were opened, older ones begin to be dropped. So a process keeps at most twice as many. */
const KEPT_KEYS = 2_000;
/** A process calls `expire` this often. So an opened key is dropped after at most three times as long without use. */
export const OPENED_KEYS_KEPT_MS = 30_000;

interface KeptKey {
  readonly wrapped: Buffer;
  readonly key: PersonalKey;
}

/** Keys that were opened lately. Whether a key may still be used, the database says each time. */
class LatelyOpened {
  private newer = new Map<string, KeptKey>();
  private older = new Map<string, KeptKey>();
  private turnedAt: number;

  constructor(
    private readonly keys: KeyRing,
    private readonly clock: Pick<Clock, 'monotonic'>,
  ) {
    this.turnedAt = clock.monotonic();
  }

  open(found: WrappedKey): PersonalKey {
    const { keyId, wrapped } = found;
    this.turn();
    let one = this.newer.get(keyId) ?? this.older.get(keyId);
    if (!one?.wrapped.equals(wrapped)) one = { wrapped, key: PersonalKey.unwrap(this.keys, found) };
    this.newer.set(keyId, one);
    return one.key;
  }

  forget(keyId: string): void {
    this.newer.delete(keyId);
    this.older.delete(keyId);
  }

  /** Drops keys that were not used since the last turn but one. */
  turn(): void {
    const age = this.clock.monotonic() - this.turnedAt;
    if (this.newer.size < KEPT_KEYS && age < OPENED_KEYS_KEPT_MS) return;
    this.older = age < 2 * OPENED_KEYS_KEPT_MS ? this.newer : new Map<string, KeptKey>();
    this.newer = new Map();
    this.turnedAt = this.clock.monotonic();
  }
}

const BLOCK_KEYS = 512;
/** After a failed write, the next block is begun early only after this time. A request without any key tries again at once. */
const RETRY_MS = 500;
/** Requests that open keys at the same time share a statement. */
const OPENING = { maxItems: 100, inFlight: 2 } as const;

export interface PersonalKeysOfProcess extends PersonalKeys {
  /** Writes the first block before a request needs it. */
  warm(): void;
  /** Drops opened keys that were not used lately. A process that serves calls it every {@link OPENED_KEYS_KEPT_MS}. */
  expire(): void;
  /** Gives unused keys back. */
  stop(): Promise<void>;
}

export const createPersonalKeys = (rows: PersonalKeyRows, options: PersonalKeysOptions): PersonalKeysOfProcess => new DurableKeys(rows, options);

class DurableKeys implements PersonalKeysOfProcess {
  private ready: PersonalKey[] = [];
  private writing: Promise<void> | null = null;
  private failedAt = Number.NEGATIVE_INFINITY;
  private readonly size: number;
  private readonly lately: LatelyOpened;
  private readonly find: (keyIds: readonly string[]) => Promise<readonly FoundKey[]>;

  constructor(
    private readonly rows: PersonalKeyRows,
    private readonly options: PersonalKeysOptions,
  ) {
    this.size = options.block ?? BLOCK_KEYS;
    this.lately = new LatelyOpened(options.keys, options.clock);
    this.find = batched(async (asked: readonly (readonly string[])[]) => {
      const found = new Map((await rows.find([...new Set(asked.flat())])).map((one) => [one.keyId, one]));
      return asked.map((keyIds) => keyIds.map((keyId) => found.get(keyId)!));
    }, OPENING);
  }

  /** Writes the first block in the background, so that the first request finds it. */
  warm(): void {
    this.writeEarly();
  }

  expire(): void {
    this.lately.turn();
  }

  async take(): Promise<PersonalKey> {
    // Without blocks, each caller writes a key of its own.
    while (this.ready.length === 0) await (this.size === 1 ? this.writeBlock() : this.write());
    const key = this.ready.pop()!;
    if (this.ready.length * 2 < this.size) this.writeEarly();
    return key;
  }

  private writeEarly(): void {
    if (this.size === 1 || this.writing || this.options.clock.monotonic() - this.failedAt < RETRY_MS) return;
    this.write().catch((error: unknown) =>
      this.options.log.warn({ err: error, left: this.ready.length }, 'no new keys of personal data can be written'),
    );
  }

  /** All callers share one write. */
  private write(): Promise<void> {
    return (this.writing ??= this.writeBlock().finally(() => (this.writing = null)));
  }

  private async writeBlock(): Promise<void> {
    const { keys, ids, random = randomBytes } = this.options;
    const block = Array.from({ length: this.size }, () => new PersonalKey(ids.uuid(), random(KEY_BYTES)));
    try {
      await this.rows.insert(block.map((key) => key.wrap(keys, random)));
    } catch (error) {
      this.failedAt = this.options.clock.monotonic();
      throw error;
    }
    // The keys of the older block are used first.
    this.ready = [...block, ...this.ready];
  }

  async open(keyIds: readonly string[]): Promise<OpenedKeys> {
    if (keyIds.length === 0) return NONE_OPENED;
    const opened = new Map<string, PersonalKey>();
    const erased = new Map<string, string>();
    const missing: string[] = [];
    for (const { keyId, key, erasedAt } of await this.find(keyIds)) {
      // A database that was restored may hold an erased key until the erasure is repeated.
      if (erasedAt !== null) erased.set(keyId, erasedAt);
      else if (key) opened.set(keyId, this.lately.open(key));
      else missing.push(keyId);
      if (erasedAt !== null || !key) this.lately.forget(keyId);
    }
    if (missing.length > 0) {
      this.options.log.error(
        { keyIds: missing.slice(0, NAMED_KEYS), missing: missing.length },
        'keys of personal data are missing; their texts cannot be shown',
      );
      this.options.onMissing?.(missing.length);
    }
    return new OpenedKeys(opened, erased);
  }

  async erasures(keyIds: readonly string[]): Promise<Reveal> {
    if (keyIds.length === 0) return CLOSED;
    const erased = new OpenedKeys(new Map(), new Map((await this.find(keyIds)).flatMap(({ keyId, erasedAt }) => (erasedAt === null ? [] : [[keyId, erasedAt]])))); // prettier-ignore
    return { content: () => null, erasedAt: (personal) => erased.erasedAt(personal) };
  }

  async discard(keyIds: readonly string[]): Promise<void> {
    if (keyIds.length > 0) await this.rows.discard(keyIds);
  }

  /** Gives the unused keys back. If the database does not answer, they stay there, and nothing uses them. */
  async stop(): Promise<void> {
    const unused = this.ready.splice(0).map(({ id }) => id);
    await this.discard(unused).catch(() => undefined);
  }

  async forget(keyIds: readonly string[], erasure: Erasure): Promise<void> {
    if (keyIds.length > 0) await this.rows.forget(keyIds, erasure);
  }
}

const NONE_OPENED = new OpenedKeys(new Map());

// ------------------------------------------------------------------------------------------------------------------------------------
// Boxes in text columns, such as stored answers.

/** Begins the text of a box. JSON never begins like this. */
const BOXED = 'box ';

export const boxAsText = ({ key, box }: Box): string => `${BOXED}${key} ${box}`;

/** The box of a text. null: the text is not boxed. */
export const boxInText = (text: string): Box | null => {
  if (!text.startsWith(BOXED)) return null;
  const [key = '', box = ''] = text.slice(BOXED.length).split(' ');
  return { key, box };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Openings: who has read personal data.

/** `actor`: an audit key or a person at the command line. `report`: what was read. */
export interface Opening {
  readonly actor: string;
  readonly report: string;
}

/** Notes an opening before any data is shown, and later the number of payments, events or rows that were shown. */
export interface Openings {
  begin(opening: Opening): Promise<{ shown(count: number): Promise<void> }>;
}

export const postgresOpenings = (db: Queryable, { ids, log }: { readonly ids: Ids; readonly log: Pick<Logger, 'info'> }): Openings => ({
  begin: async ({ actor, report }) => {
    const openingId = ids.uuid();
    await db.query('insert into personal_opening (opening_id, actor, report) values ($1, $2, $3)', [openingId, actor, report]);
    return {
      shown: async (count) => {
        log.info({ openingId, actor, report, count }, 'personal data was opened');
        await db.query('update personal_opening set shown = $2 where opening_id = $1', [openingId, count]);
      },
    };
  },
});

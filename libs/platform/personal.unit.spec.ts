/** Boxes, and the blocks of keys: which request waits, and what happens while no key can be written. */
import { describe, expect, test } from '@jest/globals';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import fc from 'fast-check';
import { canonicalJson, type Json, type Personal } from '#kernel';
import { MovableClock } from '../../test/support/clock.js';
import { MemoryPersonalKeyRows } from '../../test/support/personal-keys.js';
import { systemIds } from './ids.js';
import { newKeyRing } from './keys.js';
import {
  boxAsText,
  boxInText,
  createPersonalKeys,
  OPENED_KEYS_KEPT_MS,
  OpenedKeys,
  PersonalKey,
  type PersonalKeyRows,
  type PersonalKeysOptions,
} from './personal.js';

const ID = '018f0000-0000-7000-8000-00000000000a';
const key = new PersonalKey(ID, Buffer.alloc(64, 7));

describe('a box', () => {
  test('opens to its content, whatever it is', () =>
    fc.assert(
      fc.property(fc.jsonValue(), (content) => {
        const box = key.seal(content, 'here');
        expect(canonicalJson(key.open(box, 'here'))).toBe(canonicalJson(content));
        expect(box.key).toBe(ID);
      }),
    ));
  test('is the same for the same content, context and key, in any order of the fields', () => {
    expect(key.seal({ a: 1, b: [2] }, 'here')).toEqual(key.seal({ b: [2], a: 1 }, 'here'));
    const others = [key.seal({ a: 1 }, 'here'), key.seal({ a: 2 }, 'here'), key.seal({ a: 1 }, 'there'), new PersonalKey(ID, Buffer.alloc(64, 8)).seal({ a: 1 }, 'here')]; // prettier-ignore
    expect(new Set(others.map(({ box }) => box)).size).toBe(4);
    // No two boxes share a nonce.
    expect(new Set(others.map(({ box }) => box.slice(0, 16))).size).toBe(4);
  });
  test('does not open in another place, with another key, or if one bit was changed', () => {
    const box = key.seal({ name: 'Ada' }, 'payment-1/terms');
    expect(() => key.open(box, 'payment-2/terms')).toThrow();
    expect(() => new PersonalKey(ID, Buffer.alloc(64, 8)).open(box, 'payment-1/terms')).toThrow();
    expect(() => new PersonalKey(ID.replace('a', 'b'), Buffer.alloc(64, 7)).open(box, 'payment-1/terms')).toThrow(/cannot be opened with key/);
    const bytes = Buffer.from(box.box, 'base64');
    for (const place of [0, 12, bytes.length - 17, bytes.length - 1]) {
      const changed = Buffer.from(bytes);
      changed[place]! ^= 1;
      expect(() => key.open({ key: ID, box: changed.toString('base64') }, 'payment-1/terms')).toThrow();
    }
    for (const short of ['', 'AAAA', bytes.subarray(0, 27).toString('base64')])
      expect(() => key.open({ key: ID, box: short }, 'payment-1/terms')).toThrow();
  });
  test('holds 12 bytes of nonce and 16 of tag beside the canonical text', () => {
    const content: Json = { payer: { email: 'ada@example.org' } };
    expect(Buffer.from(key.seal(content, 'here').box, 'base64')).toHaveLength(12 + canonicalJson(content).length + 16);
  });
  test('as a text begins as no JSON does', () => {
    const box = key.sealText('{"success":true}', 'here');
    const text = boxAsText(box);
    expect(() => JSON.parse(text)).toThrow();
    expect(boxInText(text)).toEqual(box);
    expect(key.openText(boxInText(text)!, 'here')).toBe('{"success":true}');
    for (const other of ['', '{}', '"box "', 'boxes']) expect(boxInText(other)).toBeNull();
  });
  test('of a key that is not 64 bytes long cannot be made', () => {
    expect(() => new PersonalKey(ID, Buffer.alloc(32))).toThrow(/64 bytes/);
  });
});

describe('a key that has opened a box', () => {
  const textOf = (characters: number) => 'x'.repeat(characters - 2);
  const boxOf = (text: string) => key.seal(text, 'here');

  test('keeps its content, and decrypts it once', () => {
    const own = new PersonalKey(ID, Buffer.alloc(64, 7));
    const box = boxOf('a');
    const list = own.seal(['a'], 'here');
    expect(own.open(list, 'here')).toBe(own.open(list, 'here'));
    expect(own.open(box, 'here')).toBe('a');
    expect(() => own.open(list, 'there')).toThrow();
  });
  test('keeps 4,096 characters, and opens longer texts each time', () => {
    const kept = (characters: readonly number[]) => {
      const own = new PersonalKey(ID, Buffer.alloc(64, 7));
      const boxes = characters.map((count) => own.seal([textOf(count - 2)], 'here'));
      const first = boxes.map((box) => own.open(box, 'here'));
      return boxes.map((box, index) => own.open(box, 'here') === first[index]);
    };
    expect(kept([4_096])).toEqual([true]);
    expect(kept([4_097])).toEqual([false]);
    // A text that does not fit is passed over. Shorter ones after it still fit.
    expect(kept([4_000, 97, 96, 10])).toEqual([true, false, true, false]);
  });
});

describe('a wrapped key', () => {
  test('opens under the ring that wrapped it, under its own id', () => {
    const ring = newKeyRing();
    const wrapped = key.wrap(ring, (count) => Buffer.alloc(count, 1));
    expect(wrapped.wrapped).toHaveLength(12 + 64 + 16);
    expect(PersonalKey.unwrap(ring, wrapped).seal('x', 'here')).toEqual(key.seal('x', 'here'));
    expect(() => PersonalKey.unwrap(newKeyRing(), wrapped)).toThrow();
    expect(() => PersonalKey.unwrap(ring, { ...wrapped, keyId: '018f0000-0000-7000-8000-00000000000b' })).toThrow();
    expect(() => PersonalKey.unwrap(ring, { ...wrapped, kid: 'k2' })).toThrow(/not in the ring/);
  });
});

describe('what a reader sees', () => {
  const box = key.seal({ name: 'Ada' }, 'here');
  const clear: Personal<{ name: string }> = { clear: { name: 'Bob' } };
  test('the content of open boxes, and texts in clear', () => {
    const opened = new OpenedKeys(new Map([[ID, key]]));
    expect([opened.content(box, 'here'), opened.content(clear, 'here'), opened.content(null, 'here')]).toEqual([
      { name: 'Ada' },
      { name: 'Bob' },
      null,
    ]);
    expect([opened.key(ID), opened.key('other'), opened.erasedAt([box, clear, null])]).toEqual([key, null, null]);
  });
  test('nothing of a key that it has not, and the newest erasure', () => {
    const other = { key: 'other', box: '' };
    const opened = new OpenedKeys(new Map(), new Map([[ID, '2026-03-02T09:00:00.000Z'], ['other', '2026-03-01T09:00:00.000Z']])); // prettier-ignore
    expect(opened.content(box, 'here')).toBeNull();
    expect(opened.erasedAt([other, box, clear])).toBe('2026-03-02T09:00:00.000Z');
    expect(opened.erasedAt([other])).toBe('2026-03-01T09:00:00.000Z');
  });
});

test('the newest of several erasures counts, in any order', () => {
  const [one, other, last] = ['0', '1', '2'].map((end) => `${ID.slice(0, -1)}${end}`) as [string, string, string];
  const erased = new Map([
    [one, '2026-03-01T09:00:00.000Z'],
    [other, '2026-03-02T09:00:00.000Z'],
    [last, '2026-03-01T10:00:00.000Z'],
  ]);
  const boxes = [one, other, last].map((id) => ({ key: id, box: '' }));
  const opened = new OpenedKeys(new Map(), erased);
  expect(opened.erasedAt(boxes)).toBe('2026-03-02T09:00:00.000Z');
  expect(opened.erasedAt([...boxes].reverse())).toBe('2026-03-02T09:00:00.000Z');
  expect(opened.erasedAt([boxes[2]!, { key: ID.replace('0', '9'), box: '' }, boxes[0]!])).toBe('2026-03-01T10:00:00.000Z');
});

/** Rows whose writes a test holds up, or lets fail. */
class SlowRows extends MemoryPersonalKeyRows implements PersonalKeyRows {
  writes = 0;
  finds = 0;
  discards = 0;
  forgets = 0;
  away = false;
  held: Promise<void> | null = null;

  override async insert(keys: Parameters<PersonalKeyRows['insert']>[0]): Promise<void> {
    this.writes += 1;
    if (this.held) await this.held;
    if (this.away) throw new Error('the database is away');
    await super.insert(keys);
  }

  override async discard(keyIds: readonly string[]) {
    this.discards += 1;
    if (this.away) throw new Error('the database is away');
    await super.discard(keyIds);
  }

  override async forget(...given: Parameters<PersonalKeyRows['forget']>) {
    this.forgets += 1;
    await super.forget(...given);
  }

  override async find(keyIds: readonly string[]) {
    this.finds += 1;
    if (this.away) throw new Error('the database is away');
    return super.find(keyIds);
  }
}

const open = (options: Partial<PersonalKeysOptions> = {}) => {
  const rows = new SlowRows();
  const clock = new MovableClock();
  const said: string[] = [];
  const fields: unknown[] = [];
  const say = (given: unknown, text: string) => (fields.push(given), said.push(text));
  const log = { warn: say, error: say } as never;
  const personal = createPersonalKeys(rows, { keys: newKeyRing(), ids: systemIds(() => clock.now()), clock, log, block: 8, ...options });
  return { rows, clock, said, fields, personal };
};
const settled = () => new Promise((resolve) => setTimeout(resolve, 5));

describe('blocks of keys', () => {
  test('a key stands before it is handed out', async () => {
    const { rows, personal } = open();
    const key = await personal.take();
    expect(rows.keys.has(key.id)).toBe(true);
    expect(rows.keys.size).toBe(8);
  });
  test('the next block is written when half of one is used, and no request waits for it', async () => {
    const { rows, personal } = open();
    for (let number = 0; number < 4; number++) await personal.take();
    expect(rows.writes).toBe(1);
    let goOn!: () => void;
    rows.held = new Promise((resolve) => (goOn = resolve));
    const taken = new Set<string>();
    for (let number = 0; number < 4; number++) taken.add((await personal.take()).id);
    expect([rows.writes, taken.size]).toEqual([2, 4]);
    goOn();
    rows.held = null;
    await settled();
    expect(rows.keys.size).toBe(16);
  });
  test('requests that find no key share one write, and get a key each', async () => {
    const { rows, personal } = open();
    const taken = await Promise.all(Array.from({ length: 20 }, () => personal.take()));
    expect(new Set(taken.map(({ id }) => id)).size).toBe(20);
    expect(rows.writes).toBeLessThanOrEqual(4);
  });
  test('while no key can be written, the block lasts; then a request is refused; then all is well again', async () => {
    const { rows, clock, said, personal } = open();
    await personal.take();
    rows.away = true;
    for (let number = 0; number < 7; number++) await personal.take();
    await settled();
    expect(said).toEqual(['no new keys of personal data can be written']);
    await expect(personal.take()).rejects.toThrow('away');
    rows.away = false;
    expect(rows.keys.has((await personal.take()).id)).toBe(true);
    clock.advance(1_000);
  });
  test('after a failed write, an early one waits a moment', async () => {
    const { rows, clock, personal } = open();
    for (let number = 0; number < 4; number++) await personal.take();
    rows.away = true;
    await personal.take();
    await settled();
    const tries = rows.writes;
    await personal.take();
    expect(rows.writes).toBe(tries);
    clock.advance(500);
    rows.away = false;
    await personal.take();
    await settled();
    expect(rows.keys.size).toBe(16);
  });
  test('a command writes one key at a time, and none in advance', async () => {
    const { rows, personal } = open({ block: 1 });
    personal.warm();
    expect(rows.writes).toBe(0);
    await personal.take();
    await personal.take();
    expect([rows.writes, rows.keys.size]).toEqual([2, 2]);
  });
  test('a command that needs two keys at once writes each by itself', async () => {
    const { rows, personal } = open({ block: 1 });
    const taken = await Promise.all([personal.take(), personal.take()]);
    expect([new Set(taken.map(({ id }) => id)).size, rows.writes]).toEqual([2, 2]);
  });
  test('a failed write ahead is logged with the keys that are left', async () => {
    const { rows, fields, personal } = open();
    for (let number = 0; number < 4; number++) await personal.take();
    rows.away = true;
    await personal.take();
    await settled();
    expect(fields).toEqual([{ err: expect.any(Error), left: 3 }]);
  });
  test('unused keys are given back at the end, also if the database does not answer', async () => {
    const { rows, personal } = open();
    const used = await personal.take();
    await personal.stop();
    expect([...rows.keys.keys()]).toEqual([used.id]);
    await personal.take();
    rows.away = true;
    await expect(personal.stop()).resolves.toBeUndefined();
  });
  test('a process that expects requests writes its first block before them', async () => {
    const { rows, personal } = open();
    personal.warm();
    await settled();
    expect(rows.keys.size).toBe(8);
    await personal.take();
    expect(rows.writes).toBe(1);
  });
});

describe('opening', () => {
  test('requests at the same moment share a statement, and nothing is asked for no key', async () => {
    const { rows, personal } = open();
    const [one, other] = [await personal.take(), await personal.take()];
    const all = await Promise.all([personal.open([one.id]), personal.open([other.id, one.id]), personal.open([])]);
    expect(rows.finds).toBe(1);
    expect(all.map((opened) => [opened.key(one.id) !== null, opened.key(other.id) !== null])).toEqual([[true, false], [true, true], [false, false]]); // prettier-ignore
  });
  test('a key that is neither kept nor erased is said and counted; its boxes stay closed', async () => {
    let missing = 0;
    const { rows, said, personal } = open({ onMissing: (count) => (missing += count) });
    const key = await personal.take();
    const box = key.seal('x', 'here');
    rows.keys.delete(key.id);
    const opened = await personal.open([key.id]);
    expect([opened.content(box, 'here'), opened.erasedAt([box]), missing]).toEqual([null, null, 1]);
    expect(said).toEqual([expect.stringContaining('are missing')]);
    await personal.forget([key.id], { erasureId: ID, at: '2026-03-02T09:00:00.000Z' });
    expect((await personal.open([key.id])).erasedAt([box])).toBe('2026-03-02T09:00:00.000Z');
    expect(missing).toBe(1);
  });
  test('of many missing keys the log names ten, and nobody needs to count them; of none it says nothing', async () => {
    const { said, fields, personal } = open();
    const key = await personal.take();
    await personal.open([key.id]);
    expect(said).toEqual([]);
    const missing = Array.from({ length: 12 }, (_, number) => `${ID.slice(0, -2)}${String(number).padStart(2, '0')}`);
    await personal.open(missing);
    expect(fields).toEqual([{ keyIds: missing.slice(0, 10), missing: 12 }]);
  });
  test('which keys were erased is told without opening one', async () => {
    const { rows, personal } = open();
    const [key, erased] = [await personal.take(), await personal.take()];
    const [box, gone] = [key.seal('x', 'here'), erased.seal('y', 'here')];
    await personal.forget([erased.id], { erasureId: ID, at: '2026-03-02T09:00:00.000Z' });
    const told = await personal.erasures([key.id, erased.id]);
    expect([told.content(box, 'here'), told.erasedAt([box]), told.erasedAt([gone])]).toEqual([null, null, '2026-03-02T09:00:00.000Z']);
    const { finds } = rows;
    expect((await personal.erasures([])).erasedAt([gone])).toBeNull();
    expect((await personal.open([])).key(key.id)).toBeNull();
    await personal.forget([], { erasureId: ID, at: '2026-03-02T09:00:00.000Z' });
    await personal.discard([]);
    expect([rows.finds, rows.forgets, rows.discards]).toEqual([finds, 1, 0]);
    await personal.discard([key.id]);
    expect(rows.keys.has(key.id)).toBe(false);
  });
  test('a key whose erasure was seen is unwrapped anew, if a restore takes the erasure back', async () => {
    const { rows, personal } = open();
    const { id } = await personal.take();
    const first = (await personal.open([id])).key(id);
    rows.erased.set(id, { erasureId: ID, at: '2026-03-02T09:00:00.000Z' });
    expect((await personal.open([id])).key(id)).toBeNull();
    rows.erased.clear();
    expect((await personal.open([id])).key(id)).not.toBe(first);
  });
  test('a busy process keeps the last 2,000 to 4,000 keys', async () => {
    const { personal } = open({ block: 512 });
    const ids: string[] = [];
    for (let number = 0; number < 4_001; number++) ids.push((await personal.take()).id);
    const first = (await personal.open([ids[0]!])).key(ids[0]!);
    await personal.open(ids.slice(1, 2_000));
    expect((await personal.open([ids[0]!])).key(ids[0]!)).toBe(first);
    await personal.open(ids.slice(2_000, 4_001));
    await personal.open(ids.slice(1, 2_001));
    expect((await personal.open([ids[0]!])).key(ids[0]!)).not.toBe(first);
  });
  test('an erased key that a restore brought back stays closed', async () => {
    const { rows, personal } = open();
    const key = await personal.take();
    rows.erased.set(key.id, { erasureId: ID, at: '2026-03-02T09:00:00.000Z' });
    const opened = await personal.open([key.id]);
    expect([opened.key(key.id), opened.content(key.seal('x', 'here'), 'here')]).toEqual([null, null]);
  });
  test('a key that was opened lately is not unwrapped again; but its row must be there, and be the same', async () => {
    const { personal, rows, clock } = open({ block: 1 });
    const { id } = await personal.take();
    const opened = async () => (await personal.open([id])).key(id);
    const first = await opened();
    expect(await opened()).toBe(first);
    // It is kept for two turns of 30 s without a use.
    clock.advance(29_000);
    expect(await opened()).toBe(first);
    clock.advance(61_000);
    const later = await opened();
    expect(later).not.toBe(first);
    const row = rows.keys.get(id)!;
    rows.keys.set(id, { ...row, wrapped: Buffer.from(row.wrapped).fill(0) });
    await expect(personal.open([id])).rejects.toThrow();
    rows.keys.set(id, row);
    await personal.forget([id], { erasureId: id, at: '2026-01-01T00:00:00.000Z' });
    expect(await opened()).toBeNull();
    rows.erased.clear();
    rows.keys.set(id, row);
    expect(await opened()).not.toBe(later);
  });
  test('an opened key leaves the memory of a process that shows nothing more', async () => {
    setFlagsFromString('--expose-gc');
    const collect = runInNewContext('gc') as () => void;
    const { personal, clock } = open({ block: 1 });
    const { id } = await personal.take();
    const opened = new WeakRef((await personal.open([id])).key(id)!);
    const isKept = async () => (await settled(), collect(), opened.deref() !== undefined);
    personal.expire();
    expect(await isKept()).toBe(true);
    for (let turn = 0; turn < 2; turn++) {
      clock.advance(OPENED_KEYS_KEPT_MS);
      personal.expire();
    }
    expect(await isKept()).toBe(false);
  });
  test('a box that was opened before is not opened for another place', () => {
    const box = key.seal({ name: 'Ada' }, 'payment-1/terms');
    expect(key.open(box, 'payment-1/terms')).toEqual({ name: 'Ada' });
    expect(() => key.open(box, 'payment-2/terms')).toThrow();
    const read = key.open(box, 'payment-1/terms') as { name: string };
    expect(() => (read.name = 'changed by a reader')).toThrow();
  });
  test('fails while the database is away', async () => {
    const { rows, personal } = open();
    const key = await personal.take();
    rows.away = true;
    await expect(personal.open([key.id])).rejects.toThrow('away');
    await expect(personal.erasures([key.id])).rejects.toThrow('away');
  });
});

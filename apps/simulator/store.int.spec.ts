/** Tests the simulator's rows on a real disk: shared fsyncs, missing writes, damaged rows, older journals, and one holder at a time. */
import { mkdir, mkdtemp, readdir, readFile, rename, rm, stat, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { crc32 } from 'node:zlib';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { ClassicLevel } from 'classic-level';
import { readJournal } from './journal.js';
import { openStore, StoreFailed, StoreRefused, type Store } from './store.js';

let directory: string;
let journal: string;
let books: string;
let logged: string[];
const opened: Store[] = [];
beforeEach(async () => {
  directory = await mkdtemp(join(tmpdir(), 'payfold-store-'));
  journal = join(directory, 'journal.ndjson');
  books = join(directory, 'books');
  logged = [];
});
afterEach(async () => {
  for (const store of opened.splice(0)) await store.close();
  await rm(directory, { recursive: true, force: true });
});

const load = async (): Promise<Store> => {
  const store = await openStore(directory, async (file, empty) => {
    let number = 0;
    for await (const records of readJournal<{ note: string }>(file, (line) => logged.push(line)))
      for (const { note } of records) empty.put(`note/${number++}`, note);
  });
  opened.push(store);
  return store;
};
const close = (store: Store) => {
  opened.splice(opened.indexOf(store), 1);
  return store.close();
};
const written = async (...notes: string[]) => {
  const store = await load();
  for (const [number, note] of notes.entries()) {
    store.put(`note/${number}`, note);
    await store.durable();
  }
  await close(store);
};
const rowsOf = async (store: Store, prefix = 'note/', after?: string, upTo?: string) => {
  const rows: string[] = [];
  for await (const [, row] of store.list<string>(prefix, after, upTo)) rows.push(row);
  return rows;
};
const refusal = async (): Promise<string> => {
  const error = await load().then(
    () => null,
    (refused: unknown) => refused as Error,
  );
  expect(error).toBeInstanceOf(StoreRefused);
  expect(error!.message).not.toContain('\n');
  return error!.message;
};
/** Counts the writes of LevelDB, or fails them. */
const withWrites = async (write: (() => Promise<void>) | null, run: () => Promise<void>): Promise<number> => {
  const probe = new ClassicLevel(join(directory, 'probe'));
  await probe.open();
  const prototype = Object.getPrototypeOf(probe.batch()) as { write: (options: { sync: boolean }) => Promise<void> };
  await probe.close();
  const original = prototype.write;
  let writes = 0;
  prototype.write = function (this: unknown, options) {
    expect(options).toEqual({ sync: true });
    writes += 1;
    return write ? write() : original.call(this, options);
  };
  await run().finally(() => (prototype.write = original));
  return writes;
};

test('a row is there at once, on disk when it is durable, and read back', async () => {
  const store = await load();
  store.put('a', { text: 'ü\n"c"' });
  store.put('b', 1);
  expect(store.get('a')).toEqual({ text: 'ü\n"c"' });
  let durable = false;
  const waiting = store.durable().then(() => (durable = true));
  await Promise.resolve();
  expect(durable).toBe(false);
  await waiting;
  store.delete('b');
  expect(store.get('b')).toBeUndefined();
  await close(store);
  const again = await load();
  expect([again.get('a'), again.get('b'), again.get('c')]).toEqual([{ text: 'ü\n"c"' }, undefined, undefined]);
  expect((await stat(directory)).mode & 0o077).toBe(0);
});

test('rows are listed by key, from one key to another', async () => {
  await written(...Array.from({ length: 9 }, (_, number) => `n${number}`));
  const store = await load();
  store.put('notes', 'no');
  await store.durable();
  expect(await rowsOf(store)).toEqual(['n0', 'n1', 'n2', 'n3', 'n4', 'n5', 'n6', 'n7', 'n8']);
  expect(await rowsOf(store, 'note/', '2', '4')).toEqual(['n3', 'n4']);
});

test('rows that come together share their fsyncs', async () => {
  const store = await load();
  const writes = await withWrites(null, async () => {
    await Promise.all(
      Array.from({ length: 500 }, (_, index) => {
        store.put(`note/${index}`, 'x');
        return store.durable();
      }),
    );
  });
  expect(writes).toBeGreaterThan(0);
  expect(writes).toBeLessThan(10);
  await close(store);
  expect(await rowsOf(await load())).toHaveLength(500);
});

test('a failed write fails every later call; only a new start reads the truth', async () => {
  const store = await load();
  await withWrites(
    () => Promise.reject(Object.assign(new Error('disk'), { code: 'LEVEL_IO_ERROR' })),
    async () => {
      store.put('note/a', 'a');
      const refused = store.durable();
      await new Promise((next) => setImmediate(next));
      await expect(refused).rejects.toBeInstanceOf(StoreFailed);
      await expect(refused).rejects.toThrow('LEVEL_IO_ERROR');
    },
  );
  expect(() => store.put('note/b', 'b')).toThrow(StoreFailed);
  await expect(store.durable()).rejects.toBeInstanceOf(StoreFailed);
  await close(store);
  expect(await rowsOf(await load())).toEqual([]);
});

describe('damage refuses the start with one line', () => {
  const log = async () =>
    join(
      books,
      (await readdir(books)).find((name) => name.endsWith('.log'))!,
    );
  const spoil = async (file: string, at: number) => {
    const bytes = await readFile(file);
    bytes[at]! ^= 1;
    await writeFile(file, bytes);
  };

  test.each(['first', 'last'])('a byte of the %s write, which LevelDB drops with all behind it', async (which) => {
    await written('first', 'second', 'last');
    const file = await log();
    await spoil(file, (await readFile(file)).indexOf(which));
    expect(await refusal()).toMatch(/books is damaged: its write \d is missing\. Restore .*, or move it away to begin anew/);
    // The next start refuses too, though LevelDB has dropped the damaged part.
    expect(await refusal()).toMatch(/is missing/);
  });

  test('a write in the middle of many', async () => {
    const notes = Array.from({ length: 300 }, (_, number) => `${number}`.repeat(200));
    await written(...notes);
    const file = await log();
    await spoil(file, (await readFile(file)).indexOf(notes[50]!) + 10);
    expect(await refusal()).toMatch(/its write 51 is missing/);
  });

  test('a torn last write is not damage if it was not answered', async () => {
    await written('first', 'second');
    const file = await log();
    const bytes = await readFile(file);
    await writeFile(file, bytes.subarray(0, bytes.length - 5));
    // As if the process had been killed before it wrote down that `second` is on disk.
    const header = await readFile(journal, 'latin1');
    await writeFile(journal, header.replace(/2\n$/, '1\n'));
    expect(await rowsOf(await load())).toEqual(['first']);
  });

  test('a row of a few, at the start; of many, when it is read', async () => {
    const spoilRow = async () => {
      const level = new ClassicLevel(books);
      await level.put('note/0', '00000000"changed"');
      await level.close();
    };
    await written('first');
    await spoilRow();
    expect(await refusal()).toMatch(/books is damaged: the checksum of its row note\/0 differs/);
    await rm(directory, { recursive: true });
    const store = await load();
    for (let number = 0; number < 100_000; number++) store.put(`earlier/${number}`, 0);
    await store.durable();
    await close(store);
    await spoilRow();
    const again = await load();
    expect(() => again.get('note/0')).toThrow(/the row note\/0 of the books is damaged: its checksum differs/);
    await expect(rowsOf(again)).rejects.toBeInstanceOf(StoreFailed);
  });

  test('the books or the journal are gone', async () => {
    await written('first');
    await rename(books, `${books}.away`);
    expect(await refusal()).toMatch(/books is gone\. Restore/);
    await rename(`${books}.away`, books);
    await rename(journal, `${journal}.away`);
    expect(await refusal()).toMatch(/journal\.ndjson is gone, but .*books holds rows/);
  });

  test('LevelDB cannot read its own list of files', async () => {
    await written('first');
    await writeFile(join(books, 'CURRENT'), 'rubbish');
    expect(await refusal()).toMatch(/books cannot be opened \(LEVEL_\w+\)/);
  });
});

test('one holder at a time; a closed store is free again; a refused start lets go', async () => {
  const store = await load();
  await expect(load()).rejects.toThrow(`another simulator holds ${directory}`);
  await close(store);
  const whole = await readFile(journal);
  await writeFile(journal, 'rubbish\n');
  expect(await refusal()).toMatch(/damaged at line 1/);
  await writeFile(journal, whole);
  await load();
});

describe('the journal of an older simulator', () => {
  const line = (number: number, record: unknown) => {
    const covered = `"number":${number},"record":${JSON.stringify(record)}}`;
    return `{"crc":"${crc32(covered).toString(16).padStart(8, '0')}",${covered}\n`;
  };
  const text = (version = 1, ...notes: string[]) =>
    [{ type: 'journal', version }, ...notes.map((note) => ({ note }))].map((record, number) => line(number, record)).join('');

  test.each([1, 2])('of format %i is carried over once', async (version) => {
    await writeFile(journal, text(version, 'first', 'second'));
    const store = await load();
    expect(await rowsOf(store)).toEqual(['first', 'second']);
    store.put('note/2', 'third');
    await close(store);
    expect(await rowsOf(await load())).toEqual(['first', 'second', 'third']);
    // Older simulators read versions 1 and 2, and check the line as they check all lines.
    expect((await readFile(journal, 'utf8')).split('\n')[0] + '\n').toBe(line(0, { type: 'journal', version: 3 }));
    expect((await readdir(directory)).sort()).toEqual(['books', 'journal.ndjson']);
  });

  test('goes on if the carry-over was killed, at each of its steps', async () => {
    const older = text(1, 'first', 'second');
    await mkdir(`${books}.new`);
    await writeFile(join(`${books}.new`, 'CURRENT'), 'half');
    await writeFile(journal, older);
    await close(await load());
    // The journal was replaced, and the new books are not in their place yet.
    await rename(books, `${books}.new`);
    expect(await rowsOf(await load())).toEqual(['first', 'second']);
  });

  test('never replaces books that are there', async () => {
    await written('younger');
    const ours = await readFile(journal, 'utf8');
    await writeFile(journal, text(1, 'older'));
    expect(await refusal()).toMatch(/is of an older simulator, but .*books exists too\. Move one of them away/);
    await writeFile(journal, ours.replace('journal', 'jounral'));
    expect(await refusal()).toMatch(/damaged at line 1/);
    await writeFile(journal, ours);
    expect(await rowsOf(await load())).toEqual(['younger']);
  });

  test('without the end of its last line: that line is left out', async () => {
    const whole = text(1, 'first', 'second');
    await writeFile(journal, whole.slice(0, -5));
    expect(await rowsOf(await load())).toEqual(['first']);
    expect(logged).toEqual([expect.stringMatching(/left \d+ bytes of an unfinished last line of .* out/)]);
  });

  test('that is longer than one piece', async () => {
    const notes = Array.from({ length: 5_000 }, (_, number) => `${number} ${'x'.repeat(300)}`);
    await writeFile(journal, text(1, ...notes));
    expect(await rowsOf(await load())).toHaveLength(5_000);
  });

  test.each<[string, (text: string) => string, string]>([
    ['one letter', (text) => text.replace('second', 'secand'), 'damaged at line 3: its checksum differs'],
    [
      'one digit of the checksum',
      (text) => text.replace(/"crc":"(.)/, (_, digit: string) => `"crc":"${digit === '0' ? '1' : '0'}`),
      'damaged at line 1',
    ],
    ['a line removed', (text) => text.split('\n').toSpliced(2, 1).join('\n'), 'damaged at line 3: it is numbered 3'],
    ['a line twice', (text) => text.split('\n').toSpliced(2, 0, text.split('\n')[1]!).join('\n'), 'damaged at line 3: it is numbered 1'],
    ['an empty line', (text) => `${text}\n`, 'damaged at line 5'],
    ['something else', () => 'hello\n', 'damaged at line 1'],
    ['a last line that ended', (text) => `${text}{"crc":"00000000","number":4}\n`, 'damaged at line 5'],
    ['no line at all', () => 'x'.repeat(3 * 1024 * 1024), 'is no simulator journal'],
    ['a newer format', () => text(4), 'has format 4, which this simulator does not know'],
  ])('damaged: %s', async (_, damage, message) => {
    await writeFile(journal, damage(text(1, 'first', 'second', 'third')));
    const before = await readFile(journal);
    expect(await refusal()).toContain(message);
    // The refused start left the file as it was.
    expect(before.equals(await readFile(journal))).toBe(true);
  });
});

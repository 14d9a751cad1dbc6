/** Tests the journal on a real file: order, shared fsyncs, torn and damaged lines, and one holder at a time. */
import { appendFile, mkdtemp, open, readdir, readFile, rm, stat, truncate, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { JournalFailed, JournalRefused, openJournal, type Journal } from './journal.js';

interface Note {
  readonly note: string;
}

let directory: string;
let file: string;
let logged: string[];
const opened: Journal<Note>[] = [];
beforeEach(async () => {
  directory = await mkdtemp(join(tmpdir(), 'payfold-journal-'));
  file = join(directory, 'journal.ndjson');
  logged = [];
});
afterEach(async () => {
  for (const journal of opened.splice(0)) await journal.close();
  await rm(directory, { recursive: true, force: true });
});

const load = async (): Promise<{ journal: Journal<Note>; notes: string[] }> => {
  const notes: string[] = [];
  const journal = await openJournal<Note>(
    file,
    ({ note }) => notes.push(note),
    (line) => logged.push(line),
  );
  opened.push(journal);
  return { journal, notes };
};
const close = (journal: Journal<Note>) => {
  opened.splice(opened.indexOf(journal), 1);
  return journal.close();
};
const written = async (...notes: string[]) => {
  const { journal } = await load();
  for (const note of notes) journal.append({ note });
  await journal.durable();
  await close(journal);
};

test('durable records are in the file, in order, and are read back', async () => {
  const { journal } = await load();
  for (const note of ['a', 'b', 'ü\n"c"']) journal.append({ note });
  await journal.durable();
  const lines = (await readFile(file, 'utf8')).trimEnd().split('\n');
  expect(lines.map((line) => (JSON.parse(line) as { record: unknown }).record)).toEqual([
    { type: 'journal', version: 1 },
    { note: 'a' },
    { note: 'b' },
    { note: 'ü\n"c"' },
  ]);
  await close(journal);
  expect((await load()).notes).toEqual(['a', 'b', 'ü\n"c"']);
  expect((await stat(file)).mode & 0o077).toBe(0);
});

test('appends that come together share their fsyncs', async () => {
  const { journal } = await load();
  const handle = await open(file);
  const prototype = Object.getPrototypeOf(handle) as { datasync: () => Promise<void> };
  await handle.close();
  const datasync = prototype.datasync;
  let syncs = 0;
  prototype.datasync = function (this: unknown) {
    syncs += 1;
    return datasync.call(this);
  };
  try {
    await Promise.all(
      Array.from({ length: 500 }, (_, index) => {
        journal.append({ note: String(index) });
        return journal.durable();
      }),
    );
  } finally {
    prototype.datasync = datasync;
  }
  expect(syncs).toBeGreaterThan(0);
  expect(syncs).toBeLessThan(10);
  await close(journal);
  expect((await load()).notes).toHaveLength(500);
});

test('nothing is durable before the disk said so', async () => {
  const { journal } = await load();
  journal.append({ note: 'a' });
  let durable = false;
  const waiting = journal.durable().then(() => (durable = true));
  await Promise.resolve();
  expect(durable).toBe(false);
  await waiting;
  expect(await readFile(file, 'utf8')).toContain('"a"');
});

test('a failed write fails every later call; only a new start reads the truth', async () => {
  const { journal } = await load();
  const handle = await open(file);
  const prototype = Object.getPrototypeOf(handle) as { datasync: () => Promise<void> };
  await handle.close();
  const datasync = prototype.datasync;
  prototype.datasync = () => Promise.reject(Object.assign(new Error('disk'), { code: 'EIO' }));
  journal.append({ note: 'a' });
  const refused = journal.durable();
  journal.append({ note: 'b' });
  const alsoRefused = journal.durable();
  await expect(refused).rejects.toBeInstanceOf(JournalFailed);
  await expect(alsoRefused).rejects.toThrow('EIO');
  prototype.datasync = datasync;
  expect(() => journal.append({ note: 'c' })).toThrow(JournalFailed);
  await expect(journal.durable()).rejects.toBeInstanceOf(JournalFailed);
  await close(journal);
  expect((await load()).notes).not.toContain('c');
});

describe('a torn last line', () => {
  test('is cut off at every byte, with a log line, and the journal goes on behind its whole lines', async () => {
    await written('first', 'second');
    const whole = await readFile(file);
    const start = whole.lastIndexOf(10, whole.length - 2) + 1;
    for (let length = start + 1; length < whole.length; length++) {
      await writeFile(file, whole.subarray(0, length));
      logged = [];
      const { journal, notes } = await load();
      expect(notes).toEqual(['first']);
      expect(logged).toEqual([`cut ${length - start} bytes of an unfinished last line off ${file}`]);
      journal.append({ note: 'third' });
      await close(journal);
    }
    expect((await load()).notes).toEqual(['first', 'third']);
  });

  test('of zeros, as a lost page leaves it', async () => {
    await written('first');
    const { size } = await stat(file);
    await appendFile(file, Buffer.alloc(4096));
    expect((await load()).notes).toEqual(['first']);
    expect(logged).toHaveLength(1);
    expect((await stat(file)).size).toBe(size);
  });

  test('is the whole file: the journal begins again', async () => {
    await written();
    await truncate(file, 20);
    const { journal, notes } = await load();
    expect(notes).toEqual([]);
    journal.append({ note: 'a' });
    await close(journal);
    expect((await load()).notes).toEqual(['a']);
  });
});

describe('a damaged line refuses the start with one line', () => {
  const refusal = async (damage: (text: string) => string) => {
    await written('first', 'second', 'third');
    await writeFile(file, damage(await readFile(file, 'utf8')));
    const before = await readFile(file);
    const error = await load().then(
      () => null,
      (refused: unknown) => refused as Error,
    );
    expect(error).toBeInstanceOf(JournalRefused);
    expect(error!.message).not.toContain('\n');
    // The refused start left the file as it was.
    expect(await readFile(file)).toEqual(before);
    return error!.message;
  };

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
  ])('%s', async (_, damage, message) => {
    expect(await refusal(damage)).toContain(message);
  });
});

test('one holder at a time; a closed journal is free again', async () => {
  const { journal } = await load();
  await expect(load()).rejects.toThrow(`another simulator holds ${directory}`);
  await close(journal);
  await load();
});

test('a refused start lets go of the directory', async () => {
  await written('first');
  const whole = await readFile(file);
  await writeFile(file, 'rubbish\n');
  await expect(load()).rejects.toBeInstanceOf(JournalRefused);
  await writeFile(file, whole);
  expect((await load()).notes).toEqual(['first']);
});

describe('compaction', () => {
  test('keeps the given records and all that are appended meanwhile, in order and durable', async () => {
    await written(...Array.from({ length: 20_000 }, (_, index) => `old ${index}`));
    const { journal } = await load();
    journal.append({ note: 'pending' });
    const compacting = journal.compact([{ note: 'kept' }, { note: 'pending' }]);
    let compacted = false;
    void compacting.then(() => (compacted = true));
    const meanwhile: string[] = [];
    while (!compacted) {
      const note = `meanwhile ${meanwhile.length}`;
      meanwhile.push(note);
      journal.append({ note });
      await journal.durable();
      expect(await readFile(file, 'utf8')).toContain(`"${note}"`);
    }
    await compacting;
    journal.append({ note: 'after' });
    await journal.durable();
    await close(journal);
    expect(meanwhile.length).toBeGreaterThan(0);
    const again = await load();
    expect(again.notes).toEqual(['kept', 'pending', ...meanwhile, 'after']);
    await again.journal.compact(again.notes.slice(-1).map((note) => ({ note })));
    again.journal.append({ note: 'last' });
    await close(again.journal);
    expect((await load()).notes).toEqual(['after', 'last']);
    expect(await readdir(directory)).toEqual(['journal.ndjson']);
  });

  test('that cannot write its file leaves the journal as it was', async () => {
    await written('first');
    const { journal } = await load();
    await writeFile(`${file}.new`, '');
    const compacting = journal.compact([]);
    journal.append({ note: 'second' });
    await expect(compacting).rejects.toThrow('EEXIST');
    journal.append({ note: 'third' });
    await close(journal);
    expect((await load()).notes).toEqual(['first', 'second', 'third']);
    expect(await readdir(directory)).toEqual(['journal.ndjson']);
  });

  test('is broken off when the journal closes; no record is lost', async () => {
    const { journal } = await load();
    const notes = Array.from({ length: 20_000 }, (_, index) => `note ${index}`);
    for (const note of notes) journal.append({ note });
    const compacting = journal.compact(notes.map((note) => ({ note }))).catch((error: unknown) => error);
    await close(journal);
    await compacting;
    expect((await load()).notes).toEqual(notes);
    expect(await readdir(directory)).toEqual(['journal.ndjson']);
  });
});

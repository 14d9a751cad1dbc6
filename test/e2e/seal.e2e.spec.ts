/** The seal of the log in a whole service. Appended events can be verified and proved. Each kind of tampering by SQL is found and named. */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { closeIncident, type Position, resetCheckpoint, StoreIncident } from '#eventstore';
import { timestamp } from '#kernel';
import {
  BrokenPromise,
  headFiles,
  headKeys,
  LOG_SEAL,
  logState,
  proveConsistency,
  provePayment,
  readHeadFile,
  resumeSeal,
  signLog,
  verifyLog,
} from '#audit';
import { newKeyRing, transaction } from '#platform';
import { type BusyDay, busyDay } from '../support/books.js';
import { eventsInPostgres } from '../support/kurrentdb-server.js';
import { type Service, startService } from '../support/service.js';

const VERIFIER = join(import.meta.dirname, '../../apps/operator/verify.mjs');
/** Enough events for more than two tiles of the tree. */
const FILLER_APPENDS = 6;
const FILLER_EVENTS = 100;

let service: Service;
let day: BusyDay;
let folder: string;
beforeAll(async () => {
  service = await startService();
  folder = mkdtempSync(join(tmpdir(), 'payfold-seal-'));
  day = await busyDay(service);
  const { store, ids } = service.services;
  const meta = { recordedAt: timestamp(service.clock.now()), actor: { type: 'system' as const, id: 'spec' }, correlationId: 'spec' };
  for (let append = 0; append < FILLER_APPENDS; append++)
    await store.append(
      `staff-filler-${append}`,
      'no_stream',
      Array.from({ length: FILLER_EVENTS }, (_, number) => ({ id: ids.uuid(), type: 'StaffNoted', v: 1, data: { number }, meta })),
    );
  await sealed();
  await signLog(service.services.seal);
}, 600_000);
afterAll(async () => {
  rmSync(folder, { recursive: true, force: true });
  await service.stop();
});

const sealed = async () => service.services.reactors.logSeal.runUntil((await service.services.store.head())!, { timeoutMs: 20_000 });
const verify = async () => {
  const { seal } = service.services;
  const { checks, ...log } = await verifyLog({ ...seal, headFolder: seal.folder });
  return {
    ...log,
    ok: checks.every(({ ok }) => ok),
    found: Object.fromEntries(checks.filter(({ ok }) => !ok).map(({ name, detail }) => [name, detail])),
  };
};
const run = (...values: string[]) =>
  promisify(execFile)(process.execPath, [VERIFIER, ...values]).then(
    ({ stdout }) => stdout,
    (error: { stderr: string }) => error.stderr,
  );
const written = (name: string, value: unknown) => {
  const file = join(folder, name);
  writeFileSync(file, typeof value === 'string' ? value : JSON.stringify(value));
  return file;
};

test('the seal holds every appended event; the heads are in files and in the database', async () => {
  const { ok, size, root } = await verify();
  let events = 0;
  for await (const page of service.services.store.readAll(null)) events += page.length;
  expect([ok, size]).toEqual([true, events]);
  const { note } = (await signLog(service.services.seal))!;
  expect(note).toContain(root);
  expect(readHeadFile(headFiles(service.services.seal.folder).at(-1)!)).toBe(note);
});

test('events of a payment are proved to a signed head; the verifier, which shares no code, agrees, and not when anything was changed', async () => {
  const { seal } = service.services;
  const proofs = await provePayment(seal, day.payments[3]!.id);
  expect(proofs.events.length).toBeGreaterThan(2);
  const keys = readFileSync(join(seal.folder, 'keys.txt'), 'utf8');
  expect(await run('prove', written('proof.json', proofs), '--key', keys.trim())).toMatch(/^ok: \d+ events are in the log of \d+ events/);
  const [first, ...rest] = proofs.events;
  const changed = {
    ...proofs,
    events: [{ ...first!, event: { ...first!.event, data: { ...(first!.event.data as object), amountCents: 1 } } }, ...rest],
  };
  expect(await run('prove', written('changed.json', changed))).toMatch(/NOT OK: the event at position \S+ is not in the log/);
  const stranger = headKeys(proofs.head.split('\n')[0]!, newKeyRing())[0]!.vkey;
  expect(await run('prove', written('proof.json', proofs), '--key', stranger)).toContain('NOT OK: no trusted key signed this head');
  // The verifier must refuse a misspelt key option. It must also work through a symbolic link.
  expect(await run('prove', written('proof.json', proofs), '--keys', stranger)).toContain('NOT OK: use: node verify.mjs');
  symlinkSync(VERIFIER, join(folder, 'linked.mjs'));
  const linked = await promisify(execFile)(process.execPath, [join(folder, 'linked.mjs'), 'prove', written('proof.json', proofs)]);
  expect(linked.stdout).toMatch(/^ok: /);
});

test('a later head only appended to an earlier one', async () => {
  const { seal } = service.services;
  const before = (await signLog(seal))!;
  await day.partner.client.find(day.payments[0]!.id);
  await day.partner.client.refund(day.payments.at(-1)!.id, {});
  await sealed();
  const after = (await signLog(seal))!;
  expect(after.head.size).toBeGreaterThan(before.head.size);
  const { heads: _, ...proof } = await proveConsistency(seal, after.note, before.note);
  expect(await run('consistency', written('consistency.json', proof))).toContain(
    `begins with the ${before.head.size} that were signed at ${before.head.at}`,
  );
  expect(await run('consistency', written('consistency.json', { ...proof, proof: proof.proof.slice(1) }))).toContain('NOT OK: the log of');
});

/** The tests change events by SQL, which is not possible in KurrentDB. */
(eventsInPostgres ? describe : describe.skip)('tampering is found and named', () => {
  // A projection that read the log while it was changed would keep the place of an event that is not there afterwards.
  beforeAll(() => service.stopWorker());
  const sql = (text: string, ...values: unknown[]) => service.services.pool.query(text, values);
  const at = (position: number) => String(position).padStart(20, '0');
  /** Makes the change, verifies the log, and undoes the change. */
  const tampered = async (change: () => Promise<unknown>) => {
    const { pool } = service.services;
    const tables = ['es.events', 'es.head', 'log_tile', 'log_state', 'log_head'];
    for (const table of tables) await pool.query(`create table kept_${table.replace('.', '_')} as table ${table}`);
    try {
      await change();
      return await verify();
    } finally {
      for (const table of tables) await pool.query(`begin; truncate ${table}; insert into ${table} table kept_${table.replace('.', '_')}; drop table kept_${table.replace('.', '_')}; commit`); // prettier-ignore
      await guardGoesOn();
    }
  };
  /** The service may notice that events are missing, and open an incident. This closes the incident, as `payfold log resume` does. */
  const guardGoesOn = async (): Promise<void> => {
    const { ownLog, pool } = service.services;
    for (;;)
      try {
        return await ownLog.verified(null);
      } catch (error) {
        if (!(error instanceof StoreIncident)) throw error;
        await closeIncident(pool, [], { by: 'spec', reason: 'the events are back' });
        await ownLog.begin();
      }
  };
  const eventAt = async (position: number) => (await sql('select event_id, type, stream_id from es.events where position = $1', position)).rows[0] as { event_id: string; type: string; stream_id: string }; // prettier-ignore

  test.each([
    [
      'its data',
      `set data = replace(data::text, '"amountCents":10000', '"amountCents":10001')::json where type = 'PaymentInitiated' and data::text like '%"amountCents":10000%'`,
    ],
    ['its metadata', `set meta = replace(meta::text, '"partner"', '"operator"')::json where position = 30`],
    ['its type', `set type = 'StaffNotes' where position = 300`],
    ['its id', `set event_id = gen_random_uuid() where position = 20`],
    ['its stream', `set stream_id = 'staff-other' where position = 350 and stream_id like 'staff-filler%'`],
    ['its revision', `set revision = 5000 where position = 255`],
  ])('a byte of an event: %s', async (_name, change) => {
    const { rows } = await sql(`select min(position)::int as position from es.events where ${/where (.*)$/.exec(change)![1]}`);
    const { position } = rows[0] as { position: number };
    const { found, ok } = await tampered(() => sql(`update es.events ${change}`));
    expect(ok).toBe(false);
    expect(found.events).toMatch(new RegExp(`^the event at position ${at(position)} \\(.*\\) was changed`));
    expect(found.tiles).toBeUndefined();
  });
  test('an event that was deleted', async () => {
    expect((await tampered(() => sql('delete from es.events where position = 77'))).found.events).toContain(`position ${at(77)} was removed`);
  });
  test('an event that was deleted, and the rest moved up', async () => {
    const { found } = await tampered(async () => {
      await sql('delete from es.events where position = 280');
      await sql('update es.events set position = -position where position > 280');
      await sql('update es.events set position = -position - 1 where position < 0');
      await sql('update es.head set position = position - 1');
    });
    expect(found.events).toContain(`the event that was sealed at position ${at(280)} was removed: the event at position ${at(280)}`);
    expect(found.events).toContain(`was sealed at position ${at(281)}`);
  });
  test('an event that was put in between', async () => {
    const { found } = await tampered(async () => {
      await sql('update es.events set position = -position where position >= 100');
      await sql('update es.events set position = -position + 1 where position < 0');
      await sql(`insert into es.events (position, stream_id, revision, event_id, type, data, meta)
                 select 100, 'staff-forged', 0, gen_random_uuid(), 'StaffNoted', '{}', meta from es.events where position = 1`);
      await sql('update es.head set position = position + 1');
    });
    expect(found.events).toContain(`the event at position ${at(100)} (StaffNoted`);
    expect(found.events).toContain(`was inserted: the one that was sealed there now lies at position ${at(101)}`);
  });
  test('two events that changed places', async () => {
    const { event_id: moved } = await eventAt(263);
    const { found } = await tampered(() => sql('update es.events set position = -9 where position = 260').then(() => sql('update es.events set position = 260 where position = 263')).then(() => sql('update es.events set position = 263 where position = -9'))); // prettier-ignore
    expect(found.events).toContain(`the event at position ${at(260)} (StaffNoted ${moved}`);
    expect(found.events).toContain(`was swapped with the one at position ${at(263)}`);
  });
  test('a log that was cut short', async () => {
    const { size } = await logState(service.services.pool);
    const { found } = await tampered(async () => {
      await sql('delete from es.events where position > $1', size - 3);
      await sql('update es.head set position = $1', size - 3);
    });
    expect(found.events).toBe(`the log ends after ${size - 3} events (position ${at(size - 3)}); ${size} were sealed, up to position ${at(size)}`);
    expect(found.heads).toMatch(new RegExp(`over ${size} events; the log shows only ${size - 3} now`));
  });
  test('a log that was cut short together with its tree and the heads in the database: the files tell', async () => {
    const { found } = await tampered(async () => {
      await sql('delete from es.events where position > 250');
      await sql('update es.head set position = 250');
      await sql(`delete from log_tile where not (level = 0 and number = 0)`);
      await sql(`update log_tile set hashes = substr(hashes, 1, 250 * 32)`);
      await sql(`update log_state set size = 250, position = $1`, at(250));
      await sql('delete from log_head where size > 250');
    });
    expect(found.events).toBeUndefined();
    expect(found.heads).toContain(`was signed at`);
    // The clock decides which heads were signed before the change.
    expect(found.heads).toMatch(/over [3-9]\d\d events; only 250 are sealed now/);
  });
  test('an event and the whole tree over it, made again without the key: every head shows it', async () => {
    const { seal } = service.services;
    const before = (await signLog(seal))!;
    const { found } = await tampered(async () => {
      await sql(`update es.events set data = '{"forged":true}' where position = 10`);
      await sql(`delete from log_tile`);
      await sql(`update log_state set size = 0, position = ''`);
      await sql(`update projection_checkpoint set position = '' where name = 'log-seal'`);
      await sealed();
      await expect(signLog(seal)).rejects.toThrow(BrokenPromise);
    });
    expect(found.events).toBeUndefined();
    expect(found.heads).toContain(`was signed at ${before.head.at} over other events than the first ${before.head.size} of now`);
    await sealed();
  });
  test.each([
    [0, 1, 40],
    [0, 0, 5_000],
    [1, 0, 33],
  ])('a byte of tile %i/%i', async (level, number, byte) => {
    const { found } = await tampered(() => sql('update log_tile set hashes = set_byte(hashes, $3, get_byte(hashes, $3) # 1) where level = $1 and number = $2', level, number, byte)); // prettier-ignore
    expect(found.events).toBeUndefined();
    expect(found.tiles).toContain(`tile ${level}/${number} was changed`);
  });
  test('a tile that is missing', async () => {
    expect((await tampered(() => sql('delete from log_tile where level = 0 and number = 1'))).found.tiles).toBe('tile 0/1 is missing');
  });
  test('a head without a valid signature, in the database and in a file', async () => {
    const { found } = await tampered(() =>
      sql(`update log_head set note = replace(note, 'at 20', 'at 19') where size = (select max(size) from log_head)`),
    );
    expect(found.heads).toMatch(/^the head of \d+ in the database is forged: no key of this log signed it/);
    const file = headFiles(service.services.seal.folder).at(-1)!;
    const note = readHeadFile(file);
    writeFileSync(file, note.replace(/\n\d+\n/, '\n7\n'));
    const forged = await verify();
    writeFileSync(file, note);
    expect(forged.found.heads).toBe(`${file} is forged: no key of this log signed it`);
  });
  test('a seal that was lost with its database goes on under the origin of its heads, made again from the log; until it comes to them nothing is signed', async () => {
    const { seal, pool } = service.services;
    const before = (await signLog(seal))!;
    const { ok } = await tampered(async () => {
      await sql('delete from log_head');
      await sql('delete from log_tile');
      await transaction(pool, async (client) => {
        await client.query(`update log_state set origin = 'payfold/log/of-a-new-database', size = 0, position = ''`);
        await resetCheckpoint(client, LOG_SEAL, null);
      });
      await resumeSeal({ ...seal, keys: newKeyRing() });
      expect((await logState(pool)).origin).toBe('payfold/log/of-a-new-database');
      await resumeSeal(seal);
      expect((await logState(pool)).origin).toBe(before.head.origin);
      expect(await signLog(seal)).toBeNull();
      await sealed();
      expect((await signLog(seal))!.head.size).toBeGreaterThanOrEqual(before.head.size);
    });
    expect(ok).toBe(true);
    await sealed();
  });
  test('a log from before a signed head is reported while its sealer is behind; a seal that is being made again is not', async () => {
    const { seal, pool } = service.services;
    await signLog(seal);
    const undo = new Error('undo');
    const looked = transaction(pool, async (client) => {
      await client.query(`delete from log_tile where not (level = 0 and number = 0)`);
      await client.query(`update log_tile set hashes = substr(hashes, 1, 250 * 32)`);
      await client.query(`update log_state set size = 250, position = $1`, [at(250)]);
      await client.query(`update projection_checkpoint set position = $1 where name = $2`, [at(250), LOG_SEAL]);
      const behind = { ...seal, db: client };
      expect(await signLog(behind)).toBeNull();
      const restored = { ...seal.store, head: () => Promise.resolve(at(253) as Position) };
      await expect(signLog({ ...behind, store: restored })).rejects.toThrow(BrokenPromise);
      throw undo;
    });
    await expect(looked).rejects.toBe(undo);
  });
  test('and when all is as it was, nothing', async () => {
    expect(await verify()).toMatchObject({ ok: true, found: {} });
  });
});

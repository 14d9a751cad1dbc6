/**
 * The contract of every checkpoint. Two workers take and lose the lease, commit from an outdated position, and fail during a commit. Random sequences
 * of these steps are compared with a model that was written from the rules. The suite runs against Postgres and against the simulation's tables.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import fc from 'fast-check';
import { type Checkpoint, HandlerFault, Moved, type Place, type Position, Unavailable } from '#eventstore';

export interface CheckpointGround<Tx> {
  /** One worker's access to this checkpoint. */
  checkpoint(name: string): Checkpoint<Tx>;
  /** Writes a row of the projection. */
  write(tx: Tx, name: string, row: string): Promise<unknown>;
  /** Committed rows, in the order of writing. */
  rows(name: string): Promise<readonly string[]>;
  /** Makes leases older by this much. */
  pass(ms: number): Promise<unknown>;
  /** Waits for `ms`. Open transactions continue. */
  wait(ms: number): Promise<unknown>;
  close(): Promise<unknown>;
}

/** One step of time. One step is shorter than a lease. Two steps are longer, even on a slow machine. */
const STEP_MS = 40_000;
const LEASE_MS = 60_000;

const START: Place = { position: '', epoch: '0' };
const at = (number: number) => String(number).padStart(4, '0') as Position;

const STEPS = ['take', 'take', 'renew', 'release', 'look', 'commit', 'commit', 'commit', 'move', 'fail', 'stale', 'pass'] as const;
type Step = readonly [(typeof STEPS)[number], 0 | 1];

const follow = async <Tx>(ground: CheckpointGround<Tx>, steps: readonly Step[]): Promise<void> => {
  const name = `model ${randomUUID()}`;
  const workers = ([0, 1] as const).map((who) => ({
    who,
    checkpoint: ground.checkpoint(name),
    lease: { owner: randomUUID(), ms: LEASE_MS },
    place: START,
  }));
  const model: { row: { position: string; epoch: number; owner: 0 | 1 | null; leaseUntil: number } | null } = { row: null };
  const rows: string[] = [];
  let now = 0;
  let last = 0;
  const isLeased = () => model.row !== null && model.row.owner !== null && model.row.leaseUntil >= now;
  const isTrue = ({ position, epoch }: Place) => model.row !== null && model.row.position === position && String(model.row.epoch) === epoch;

  for (const [step, who] of steps) {
    const worker = workers[who]!;
    const { checkpoint, lease } = worker;
    const to = at(++last);
    const commit = (from: Place, apply: ((tx: Tx) => Promise<void>) | null) => checkpoint.commit(from, to, lease, apply);
    const writes = async (tx: Tx) => void (await ground.write(tx, name, to));
    if (step === 'take') {
      const taken = await checkpoint.take(lease);
      if (isLeased() && model.row!.owner !== who) expect(taken).toBeNull();
      else {
        model.row = {
          position: model.row?.position ?? '',
          epoch: (model.row?.epoch ?? 0) + (model.row?.owner === who ? 0 : 1),
          owner: who,
          leaseUntil: now + LEASE_MS,
        };
        worker.place = { position: model.row.position, epoch: String(model.row.epoch) };
        expect(taken).toEqual(worker.place);
      }
    } else if (step === 'renew') {
      const isMine: boolean = model.row?.owner === who && String(model.row.epoch) === worker.place.epoch;
      expect(await checkpoint.renew(lease, worker.place.epoch)).toBe(isMine);
      if (isMine) model.row!.leaseUntil = now + LEASE_MS;
    } else if (step === 'release') {
      await checkpoint.release(lease.owner);
      if (model.row?.owner === who) model.row.owner = null;
    } else if (step === 'look') {
      model.row ??= { position: '', epoch: 0, owner: null, leaseUntil: 0 };
      worker.place = { position: model.row.position, epoch: String(model.row.epoch) };
      expect(await checkpoint.look()).toEqual({ ...worker.place, leased: isLeased() });
    } else if (step === 'pass') {
      now += STEP_MS;
      await ground.pass(STEP_MS);
    } else if (!isTrue(worker.place)) await expect(commit(worker.place, step === 'move' ? null : writes)).rejects.toBeInstanceOf(Moved);
    else if (step === 'stale') {
      for (const from of [
        { ...worker.place, position: at(9999) },
        { ...worker.place, epoch: '77' },
      ])
        await expect(commit(from, writes)).rejects.toBeInstanceOf(Moved);
    } else if (step === 'fail')
      await expect(
        commit(worker.place, async (tx) => {
          await writes(tx);
          throw new Error('the connection is closed');
        }),
      ).rejects.toBeInstanceOf(HandlerFault);
    else {
      await commit(worker.place, step === 'move' ? null : writes);
      if (step === 'commit') rows.push(to);
      model.row!.position = to;
      if (model.row!.owner === who) model.row!.leaseUntil = now + LEASE_MS;
      worker.place = { ...worker.place, position: to };
    }
    expect(await ground.rows(name)).toEqual(rows);
    expect(await checkpoint.position()).toBe(model.row?.position ?? '');
    expect(await checkpoint.status()).toMatchObject({
      position: model.row?.position || null,
      epoch: BigInt(model.row?.epoch ?? 0),
      leased: isLeased(),
    });
  }
};

export const checkpointContract = <Tx>(whose: string, open: () => Promise<CheckpointGround<Tx>>, runs: number): void =>
  describe(`${whose} checkpoints`, () => {
    let ground: CheckpointGround<Tx>;
    beforeAll(async () => {
      ground = await open();
    });
    afterAll(() => ground.close());

    /** Makes two workers for one checkpoint. The first worker holds the lease. */
    const stage = async () => {
      const name = randomUUID();
      const [one, two] = [ground.checkpoint(name), ground.checkpoint(name)];
      const [mine, other] = [randomUUID(), randomUUID()].map((owner) => ({ owner, ms: LEASE_MS }));
      const place = (await one.take(mine!))!;
      return { name, one, two, mine: mine!, other: other!, place, rows: () => ground.rows(name) };
    };

    test('any sequence of steps, two workers: the model agrees after each', async () => {
      const step = fc.tuple(fc.constantFrom(...STEPS), fc.constantFrom(0 as const, 1 as const));
      await fc.assert(
        fc.asyncProperty(fc.array(step, { minLength: 10, maxLength: 40 }), (steps) => follow(ground, steps)),
        { numRuns: runs, endOnFailure: true },
      );
    }, 180_000);

    test('of two that take a lease at once, one gets it', async () => {
      const name = randomUUID();
      const leases = Array.from({ length: 4 }, () => ground.checkpoint(name).take({ owner: randomUUID(), ms: LEASE_MS }));
      expect((await Promise.all(leases)).filter((place) => place !== null)).toEqual([{ position: '', epoch: '1' }]);
    });

    test('rows and position are seen together, and not before the commit', async () => {
      const { name, one, two, mine, place, rows } = await stage();
      await one.commit(place, at(1), mine, async (tx) => {
        await ground.write(tx, name, 'a');
        expect([await two.position(), await rows()]).toEqual(['', []]);
      });
      expect([await two.position(), await rows()]).toEqual([at(1), ['a']]);
    });

    test('of two commits from one place the second waits for the first, and then has done nothing', async () => {
      const { name, one, two, mine, other, place, rows } = await stage();
      const order: string[] = [];
      const first = one.commit(place, at(1), mine, async (tx) => {
        await ground.wait(300);
        order.push('first');
        await ground.write(tx, name, 'first');
      });
      await ground.wait(100);
      const second = two.commit(place, at(1), other, async (tx) => {
        order.push('second');
        await ground.write(tx, name, 'second');
      });
      await expect(second).rejects.toBeInstanceOf(Moved);
      await first;
      expect([order, await rows()]).toEqual([['first'], ['first']]);
    });

    test('where the first of two fails, the second goes on from the same place', async () => {
      const { name, one, two, mine, other, place, rows } = await stage();
      const first = one.commit(place, at(1), mine, async () => {
        await ground.wait(300);
        throw Object.assign(new Error('deadlock'), { code: '40P01' });
      });
      const failed = expect(first).rejects.toMatchObject({ code: '40P01' });
      await ground.wait(100);
      await two.commit(place, at(2), other, async (tx) => void (await ground.write(tx, name, 'second')));
      await failed;
      expect([await one.position(), await rows()]).toEqual([at(2), ['second']]);
    });

    test('the error of a handler is distinguished from that of a store or a server', async () => {
      const { one, mine, place } = await stage();
      const thrown = async (error: Error) =>
        one
          .commit(place, at(1), mine, async () => {
            throw error;
          })
          .catch((caught: unknown) => caught);
      const own = new Error('Connection terminated');
      expect(await thrown(own)).toMatchObject({ name: 'Error', cause: own });
      expect(await thrown(own)).toBeInstanceOf(HandlerFault);
      for (const error of [new Unavailable('the log is away'), Object.assign(new Error('busy'), { code: '53300' })])
        expect(await thrown(error)).toBe(error);
      expect(await one.position()).toBe('');
    });

    describe('a failure', () => {
      const event = (number: number) => ({ position: at(number), id: randomUUID(), stream: 'stream-1', type: 'Happened' });
      const failureOf = (number: number, message = 'the account is closed') => ({ event: event(number), message, stack: 'at handler' });

      test('stands until a commit passes it', async () => {
        const { one, mine, place } = await stage();
        const failure = failureOf(5);
        await one.recordFailure(failure);
        const recorded = { position: at(5), eventId: failure.event.id, message: 'the account is closed', failedAt: expect.any(Date) };
        expect((await one.status()).failure).toEqual(recorded);
        await one.commit(place, at(4), mine, async () => undefined);
        expect((await one.status()).failure).toEqual(recorded);
        await one.commit({ ...place, position: at(4) }, at(5), mine, null);
        expect((await one.status()).failure).toBeNull();
      });
      test('that happens again is recorded once, with its newest text; of several the first is shown', async () => {
        const { one } = await stage();
        await one.recordFailure(failureOf(7));
        await one.recordFailure(failureOf(6, 'first'));
        await one.recordFailure(failureOf(6, 'again'));
        expect((await one.status()).failure).toMatchObject({ position: at(6), message: 'again' });
      });
      test('is resolved by the worker that takes over', async () => {
        const { one, two, mine, other, place } = await stage();
        await one.recordFailure(failureOf(1));
        await one.release(mine.owner);
        const taken = (await two.take(other))!;
        expect(taken).toEqual({ position: place.position, epoch: '2' });
        await two.commit(taken, at(1), other, async () => undefined);
        expect((await two.status()).failure).toBeNull();
      });
      test('without an event stands at the checkpoint', async () => {
        const { one, mine, place } = await stage();
        await one.commit(place, at(3), mine, null);
        await one.recordFailure({ event: null, message: 'the log cannot be read', stack: '' });
        expect((await one.status()).failure).toMatchObject({ position: at(3), eventId: null });
      });
      test('that is not written, because its commit failed, is not resolved', async () => {
        const { one, mine, place } = await stage();
        await one.recordFailure(failureOf(1));
        await expect(one.commit(place, at(1), mine, () => Promise.reject(new Error('again')))).rejects.toBeInstanceOf(HandlerFault);
        expect((await one.status()).failure).toMatchObject({ position: at(1) });
      });
      test('belongs to one checkpoint', async () => {
        const [{ one }, { one: another }] = [await stage(), await stage()];
        await one.recordFailure(failureOf(1));
        expect((await another.status()).failure).toBeNull();
      });
    });
  });

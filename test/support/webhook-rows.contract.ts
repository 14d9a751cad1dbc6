/**
 * The contract of the rows that the outbox and staff write, and of the signal for a due delivery. The suite runs against Postgres and the simulation.
 * Deliveries have their own contract (deliveries.contract.ts).
 */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { randomUUID } from 'node:crypto';
import type { Deliveries, DueSignal, Fate, OutboxEvent, OutboxRows, StaffRows, StaffTables } from '#webhooks';

/** Empty tables. */
export interface WebhookRowsGround {
  readonly tables: StaffTables;
  readonly deliveries: Deliveries;
  readonly due: DueSignal;
  /** Runs one transaction of the outbox. */
  outbox<T>(work: (rows: OutboxRows) => Promise<T>): Promise<T>;
  /** The ids of the events, in the order in which they were written. */
  eventIds(): Promise<readonly string[]>;
  /** The deliveries, in order of their numbers. */
  rows(): Promise<
    readonly { readonly id: string; readonly eventId: string; readonly endpointId: string; readonly state: string; readonly round: number }[]
  >;
  /** Waits for `ms`. Open transactions continue. */
  wait(ms: number): Promise<unknown>;
  close(): Promise<unknown>;
}

const at = (number: number) => String(number).padStart(4, '0');
const time = (ms: number) => new Date(Date.UTC(2026, 2, 2, 9) + ms).toISOString();
const eventually = async (ground: WebhookRowsGround, holds: () => boolean) => {
  for (let round = 0; !holds(); round++) {
    expect(round).toBeLessThan(500);
    await ground.wait(10);
  }
};

export const webhookRowsContract = (whose: string, open: () => Promise<WebhookRowsGround>): void =>
  describe(`${whose} rows of webhooks`, () => {
    let ground: WebhookRowsGround;
    let accountId: string;
    beforeEach(async () => {
      ground = await open();
      accountId = randomUUID();
    });
    afterEach(() => ground.close());

    let made = 0;
    const change = <T>(work: (rows: StaffRows) => Promise<T>) => ground.tables.change(work);
    const addEndpoint = async (registered: number, account = accountId) => {
      const [endpointId, secretId] = [randomUUID() as string, randomUUID() as string];
      await change(async (rows) => {
        const url = `https://receiver.example/${endpointId}`;
        await rows.addEndpoint({
          endpointId,
          accountId: account,
          url,
          description: null,
          createdAt: time(++made),
          registeredAtPosition: at(registered),
        });
        await rows.addSecret({ secretId, endpointId, kid: 'k', ciphertext: 'sealed', hint: 'hint', state: 'active', at: time(made) });
      });
      return endpointId;
    };
    const eventAt = (number: number, account = accountId): OutboxEvent => ({
      id: `evt_${account.slice(0, 8)}${number}`,
      type: 'payment.refunded',
      accountId: account,
      paymentId: randomUUID(),
      payload: Buffer.from(`{"number":${number}}`),
      createdAt: time(number),
      stream: `payment-${account}`,
      revision: BigInt(number),
      position: at(number),
    });
    const tell = (...events: readonly OutboxEvent[]) => ground.outbox((rows) => rows.write(events));
    const told = async () => (await ground.rows()).map(({ eventId, endpointId, state }) => [eventId, endpointId, state]);
    /** Ends the attempts of all due deliveries. */
    const attempt = async (fate: Fate, slots = 100) => {
      const claimed = await ground.deliveries.claimDue(slots);
      const ends = {
        fate,
        outcome: 'http_5xx',
        statusCode: 500,
        errorCode: null,
        remoteIp: null,
        responseHead: null,
        bodySha256: Buffer.alloc(32),
        durationMs: 1,
      } as const;
      await ground.deliveries.complete(claimed.map((one) => ({ ...ends, ...one, startedAtMs: one.claimedAtMs })));
      return claimed.map(({ deliveryId }) => deliveryId);
    };

    describe('the outbox', () => {
      test('writes an event with a delivery for each endpoint of its account that was registered before it', async () => {
        const [one, late, paused, disabled] = [await addEndpoint(3), await addEndpoint(5), await addEndpoint(3), await addEndpoint(3)];
        await addEndpoint(0, randomUUID());
        await change((rows) => rows.setStatus(paused, 'paused'));
        await change((rows) => rows.setStatus(disabled, 'disabled'));
        const [first, second, third] = [eventAt(3), eventAt(5), eventAt(6)];
        await tell(first, second, third);
        expect(await ground.eventIds()).toEqual([first.id, second.id, third.id]);
        const deliveries = (await told()).map(([event, endpoint, state]) => `${event} ${endpoint} ${state}`);
        expect(deliveries.sort()).toEqual(
          [[second, one], [second, paused], [third, one], [third, paused], [third, late]].map(([event, to]) => `${(event as OutboxEvent).id} ${to as string} pending`).sort(), // prettier-ignore
        );
      });
      test('does not write existing rows again, in one transaction or in another', async () => {
        await addEndpoint(0);
        const [first, second] = [eventAt(1), eventAt(2)];
        await tell(first);
        const before = await ground.rows();
        await tell({ ...first, payload: Buffer.from('other') }, second);
        await tell(second, first);
        expect(await ground.eventIds()).toEqual([first.id, second.id]);
        const after = await ground.rows();
        expect([after.length, after[0]]).toEqual([2, before[0]]);
        const claimed = await ground.deliveries.claimDue(10);
        expect(claimed.map(({ payload }) => payload.toString()).sort()).toEqual(['{"number":1}', '{"number":2}']);
      });
      test('writes nothing in a transaction that is rolled back', async () => {
        await addEndpoint(0);
        const broken = ground.outbox(async (rows) => {
          await rows.write([eventAt(1)]);
          throw new Error('broken');
        });
        await expect(broken).rejects.toThrow('broken');
        expect([await ground.eventIds(), await told()]).toEqual([[], []]);
      });
    });

    describe('the signal', () => {
      test('rings at the start, and for each commit that announces something; a rollback is silent', async () => {
        const stop = new AbortController();
        let rings = 0;
        const listening = ground.due.listen(() => (rings += 1), stop.signal);
        await eventually(ground, () => rings === 1);
        await ground.outbox(async (rows) => {
          await rows.announceDue();
          await ground.wait(50);
          expect(rings).toBe(1);
        });
        await eventually(ground, () => rings === 2);
        await change((rows) => rows.announceDue());
        await eventually(ground, () => rings === 3);
        const broken = change(async (rows) => {
          await rows.announceDue();
          throw new Error('broken');
        });
        await expect(broken).rejects.toThrow('broken');
        await ground.wait(100);
        expect(rings).toBe(3);
        stop.abort();
        await listening;
      });
      test('ends at once for a listener that was stopped before', async () => ground.due.listen(() => undefined, AbortSignal.abort()));
    });

    describe('staff', () => {
      test.each<[string, (rows: StaffRows, endpointId: string) => Promise<unknown>]>([
        ['an account', (rows) => rows.lockAccount(accountId)],
        ['an endpoint', (rows, endpointId) => rows.lockEndpoint(endpointId)],
      ])('locking %s makes others wait until the end of the transaction', async (_, lock) => {
        const endpointId = await addEndpoint(0);
        const order: string[] = [];
        const first = change(async (rows) => {
          await lock(rows, endpointId);
          await ground.wait(300);
          order.push('first');
        });
        await ground.wait(100);
        await change(async (rows) => {
          await lock(rows, endpointId);
          order.push('second');
        });
        await first;
        expect(order).toEqual(['first', 'second']);
      });

      test('an endpoint: unknown, registered, paused, disabled', async () => {
        const endpointId = await addEndpoint(0);
        const { url } = (await ground.tables.endpoints(accountId))[0]!;
        const look = () =>
          change(async (rows) => [
            await rows.lockEndpoint(endpointId),
            await rows.hasEndpoint(accountId, url),
            await rows.hasEndpoint(randomUUID(), url),
          ]);
        expect(await change((rows) => rows.lockEndpoint(randomUUID()))).toBeNull();
        expect(await look()).toEqual(['enabled', true, false]);
        await ground.deliveries.recordHealth([{ endpointId, succeeded: false }]);
        expect(await ground.tables.endpoints(accountId)).toEqual([
          { endpointId, accountId, url, description: null, status: 'enabled', consecutiveFailures: 1, createdAt: time(made), secretHint: 'hint', stagedSecretHint: null }, // prettier-ignore
        ]);
        await change((rows) => rows.setStatus(endpointId, 'paused'));
        expect(await look()).toEqual(['paused', true, false]);
        expect(await ground.tables.endpoints(null)).toMatchObject([{ endpointId, status: 'paused', consecutiveFailures: 0 }]);
        await change((rows) => rows.setStatus(endpointId, 'disabled'));
        expect(await look()).toEqual(['disabled', false, false]);
        const others = [await addEndpoint(0), await addEndpoint(0, randomUUID())];
        expect((await ground.tables.endpoints(accountId)).map((one) => one.endpointId)).toEqual([endpointId, others[0]]);
        expect((await ground.tables.endpoints(null)).map((one) => one.endpointId)).toEqual([endpointId, ...others]);
      });

      test('a change that throws leaves nothing', async () => {
        const endpointId = await addEndpoint(0);
        const broken = change(async (rows) => {
          await rows.setStatus(endpointId, 'disabled');
          await rows.retireSecret(endpointId, 'active', time(1));
          throw new Error('broken');
        });
        await expect(broken).rejects.toThrow('broken');
        expect(await ground.tables.endpoints(null)).toMatchObject([{ status: 'enabled', secretHint: 'hint' }]);
      });

      test('a staged secret takes the place of the active one', async () => {
        const endpointId = await addEndpoint(0);
        const staged = {
          secretId: randomUUID(),
          endpointId,
          kid: 'k',
          ciphertext: 'sealed anew',
          hint: 'next',
          state: 'staged',
          at: time(1),
        } as const;
        expect(await change((rows) => rows.stagedSecret(endpointId))).toBeNull();
        await change((rows) => rows.addSecret(staged));
        expect(await change((rows) => rows.stagedSecret(endpointId))).toBe(staged.secretId);
        expect(await ground.tables.endpoints(null)).toMatchObject([{ secretHint: 'hint', stagedSecretHint: 'next' }]);
        await tell(eventAt(1));
        expect(await ground.deliveries.claimDue(1)).toMatchObject([{ sealed: { ciphertext: 'sealed' } }]);
        await change(async (rows) => {
          await rows.retireSecret(endpointId, 'active', time(2));
          await rows.activateSecret(staged.secretId, time(2));
        });
        expect(await ground.tables.endpoints(null)).toMatchObject([{ secretHint: 'next', stagedSecretHint: null }]);
        expect(await change((rows) => rows.stagedSecret(endpointId))).toBeNull();
        await tell(eventAt(2));
        expect(await ground.deliveries.claimDue(1)).toMatchObject([{ secretId: staged.secretId, sealed: { ciphertext: 'sealed anew' } }]);
      });

      test('only waiting deliveries of a disabled endpoint are cancelled', async () => {
        const [one, two] = [await addEndpoint(0), await addEndpoint(0)];
        await tell(eventAt(1));
        await change(async (rows) => {
          await rows.setStatus(one, 'disabled');
          await rows.cancelForDisabled();
        });
        expect(new Set((await told()).map(([, endpoint, state]) => `${endpoint} ${state}`))).toEqual(new Set([`${one} canceled`, `${two} pending`]));
      });
    });

    describe('sending again', () => {
      /** Makes three held deliveries, oldest first, and one pending one. */
      const held = async () => {
        const endpointId = await addEndpoint(0);
        const ids: string[] = [];
        for (const number of [1, 2, 3]) {
          await tell(eventAt(number));
          ids.push(...(await attempt({ state: 'held' })));
          await ground.wait(5);
        }
        await tell(eventAt(4));
        return { endpointId, ids, pending: (await ground.rows()).at(-1)!.id };
      };

      test('finds deliveries by number and by event; an event’s are those of endpoints that are not disabled', async () => {
        const [one, two] = [await addEndpoint(0), await addEndpoint(0)];
        const event = eventAt(1);
        await tell(event);
        const find = (name: string) => change((rows) => rows.findDeliveries(name));
        const rows = await ground.rows();
        expect((await find(event.id)).sort()).toEqual(rows.map(({ id }) => id).sort());
        await change((rows) => rows.setStatus(one, 'disabled'));
        expect(await find(event.id)).toEqual(rows.filter(({ endpointId }) => endpointId === two).map(({ id }) => id));
        for (const { id } of rows) expect(await find(id)).toEqual([id]);
        expect([await find('evt_unknown'), await find('99999')]).toEqual([[], []]);
      });

      test('begins another round for held or delivered ones, and for no others', async () => {
        const { endpointId, ids, pending } = await held();
        const all = [...ids, pending];
        const reopened = await change((rows) => rows.reopen(all));
        expect(reopened.map(({ deliveryId, round }) => [String(deliveryId), round]).sort()).toEqual(ids.map((id) => [id, 2]).sort());
        expect(reopened.every((one) => one.endpointId === endpointId)).toBe(true);
        expect((await ground.rows()).map(({ state, round }) => `${state} ${round}`)).toEqual(['pending 2', 'pending 2', 'pending 2', 'pending 1']);
        expect(await change((rows) => rows.reopen(all))).toEqual([]);
        await attempt({ state: 'delivered' });
        expect(await change((rows) => rows.reopen([ids[0]!]))).toMatchObject([{ deliveryId: Number(ids[0]), round: 3 }]);
        await change((rows) => rows.setStatus(endpointId, 'disabled'));
        expect(await change((rows) => rows.reopen(all))).toEqual([]);
        expect(await change((rows) => rows.deliveryState([pending]))).toEqual({ id: pending, state: 'delivered', status: 'disabled' });
      });

      test('takes the oldest held ones first, none of a disabled endpoint', async () => {
        const { endpointId, ids } = await held();
        const take = (limit: number) => change((rows) => rows.heldDeliveries(limit));
        expect([await take(2), await take(10)]).toEqual([ids.slice(0, 2), ids]);
        await change((rows) => rows.setStatus(endpointId, 'disabled'));
        expect(await take(10)).toEqual([]);
      });

      test('of two at once sends each delivery once', async () => {
        const { ids } = await held();
        const all = () =>
          change(async (rows) => {
            const found = await rows.heldDeliveries(10);
            await ground.wait(100);
            return found.length === 0 ? [] : rows.reopen(found);
          });
        const reopened = (await Promise.all([all(), all(), all()])).flat();
        expect(reopened.map(({ deliveryId }) => String(deliveryId)).sort()).toEqual([...ids].sort());
        const twice = await Promise.all([1, 2].map(() => change((rows) => rows.reopen(ids))));
        expect(twice).toEqual([[], []]);
      });

      test('one delivery, asked for twice at once, is sent again once', async () => {
        const { ids } = await held();
        const again = () =>
          change(async (rows) => {
            const reopened = await rows.reopen([ids[0]!]);
            await ground.wait(100);
            return reopened;
          });
        expect((await Promise.all([again(), again()])).flat()).toMatchObject([{ round: 2 }]);
      });
    });
  });

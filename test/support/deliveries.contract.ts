/**
 * The contract of every table of deliveries. Workers claim deliveries and end their attempts in time, late or never. Staff pause, redeliver and
 * disable. The outbox lags and replays.
 *
 * Random sequences of these steps also run on a model that was written from the rules. Both must agree after each step. At the end, workers and
 * endpoints work again, and every delivery must end. The suite runs against Postgres and against the simulation's tables. Each `pass` changes stored
 * times or the simulation's clock, so no test waits.
 */
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { type Claimed, type Deliveries, type EndpointStatus, FAILING_AFTER, type Fate, MAX_ATTEMPTS, MAX_LEASE_LOSSES } from '#webhooks';

/** The fields of a delivery that the suite checks. */
export interface SeenDelivery {
  readonly id: string;
  readonly endpointId: string;
  readonly state: string;
  readonly round: number;
  readonly attempts: number;
  readonly losses: number;
}

/** Empty tables, with one account and one payment of it. */
export interface DeliveriesUnderTest {
  /** Two workers over the same rows. */
  readonly workers: readonly [Deliveries, Deliveries];
  /** Registers a URL for the account. Returns its id. */
  register(url: string): Promise<string>;
  change(endpointId: string, to: EndpointStatus): Promise<unknown>;
  /** Appends an event of the payment that endpoints must get. */
  happen(): Promise<unknown>;
  /** The outbox writes the new events. `replay`: it writes all events once more. */
  tell(): Promise<unknown>;
  replay(): Promise<unknown>;
  /** Lets time pass for the deliveries without a wait. Postgres makes the stored times older, the simulation moves its clock. */
  pass(seconds: number): Promise<unknown>;
  /** Requests a redelivery, as staff do. False: the request was refused. */
  redeliver(deliveryId: string): Promise<boolean>;
  /** In order of their ids. */
  rows(): Promise<readonly SeenDelivery[]>;
  counts(): Promise<{ readonly events: number; readonly attempts: number }>;
}

export interface DeliveriesGround {
  fresh(): Promise<DeliveriesUnderTest>;
  close(): Promise<unknown>;
}

/**
 * One step of time. It is longer than a lease and shorter than the wait between attempts. No multiple of the step equals either of them, so the speed
 * of the machine does not matter.
 */
const STEP_SECONDS = 40;
const WAIT_MS = 130_000;
const SHARE = 8;

interface Expected {
  readonly endpoint: number;
  state: string;
  round: number;
  attempts: number;
  losses: number;
  /** In steps of time. */
  dueAt: number;
  token: string | null;
  leasedAt: number;
}

const STEPS = ['event', 'tell', 'replay', 'claim', 'claim', 'claim', 'succeed', 'fail', 'fail', 'fail', 'late', 'pass', 'pass', 'pass', 'reap', 'redeliver', 'pause', 'resume', 'disable'] as const; // prettier-ignore
type Step = readonly [(typeof STEPS)[number], number];

const URLS = ['https://one.example/', 'https://two.example/', 'https://three.example/'];

const run = async (tables: DeliveriesUnderTest, steps: readonly Step[]): Promise<void> => {
  const { workers } = tables;
  const endpoints: { id: string; status: string; failures: number }[] = [];
  for (const url of URLS) endpoints.push({ id: await tables.register(url), status: 'enabled', failures: 0 });
  const model = new Map<string, Expected>();
  /** Deliveries that workers hold, even after the lease has ended. */
  const held: Claimed[] = [];
  let now = 0;
  let events = 0;
  let untold = 0;
  let recorded = 0;

  const inFlight = (endpoint: number) => [...model.values()].filter((one) => one.endpoint === endpoint && one.state === 'in_flight').length;
  const share = (endpoint: number) => (endpoints[endpoint]!.failures >= FAILING_AFTER ? 1 : SHARE);
  const claimable = (one: Expected) => one.state === 'pending' && one.dueAt <= now && endpoints[one.endpoint]!.status === 'enabled';
  const told = async () => {
    for (const row of await tables.rows())
      if (!model.has(row.id)) {
        const endpoint = endpoints.findIndex(({ id }) => id === row.endpointId);
        // A disabled endpoint must get no new delivery.
        expect(endpoints[endpoint]!.status).not.toBe('disabled');
        model.set(row.id, { endpoint, state: 'pending', round: 1, attempts: 0, losses: 0, dueAt: now, token: null, leasedAt: 0 });
      }
    untold = 0;
  };
  const claim = async (slots: number) => {
    const claimed = await workers[slots % 2]!.claimDue(slots);
    for (const one of claimed) {
      const expected = model.get(one.deliveryId)!;
      expect([one.deliveryId, claimable(expected)]).toEqual([one.deliveryId, true]);
      expect([one.round, one.attempts]).toEqual([expected.round, expected.attempts]);
      Object.assign(expected, { state: 'in_flight', token: one.token, leasedAt: now });
      held.push(one);
    }
    for (const endpoint of endpoints.keys()) {
      if (claimed.some(({ endpointId }) => endpointId === endpoints[endpoint]!.id)) expect(inFlight(endpoint)).toBeLessThanOrEqual(share(endpoint));
      // A due delivery may stay unclaimed for two reasons: all slots are used, or its endpoint has its maximum of deliveries in flight.
      const left = [...model.values()].some((one) => one.endpoint === endpoint && claimable(one));
      if (claimed.length < slots && left) expect(inFlight(endpoint)).toBeGreaterThanOrEqual(share(endpoint));
    }
  };
  const end = async (index: number, succeeded: boolean) => {
    const one = held.splice(index % held.length, 1)[0]!;
    const expected = model.get(one.deliveryId)!;
    const mine = expected.state === 'in_flight' && expected.token === one.token;
    const attempt = one.attempts + 1;
    const fate: Fate = succeeded ? { state: 'delivered' } : attempt >= MAX_ATTEMPTS ? { state: 'held' } : { state: 'pending', waitMs: WAIT_MS };
    const { deliveryId, token, secretId, endpointId, round } = one;
    const ended = { deliveryId, token, fate, secretId, outcome: succeeded ? 'ok' : 'http_5xx', statusCode: succeeded ? 200 : 500, errorCode: null, remoteIp: null, responseHead: null, bodySha256: Buffer.alloc(32), startedAtMs: one.claimedAtMs, durationMs: 1 } as const; // prettier-ignore
    expect(await workers[index % 2]!.complete([ended])).toEqual([mine]);
    if (!mine) return;
    recorded += 1;
    Object.assign(expected, { state: fate.state, attempts: attempt, token: null, dueAt: now + WAIT_MS / 1000 / STEP_SECONDS });
    if (!succeeded && round > 1) return;
    await workers[0].recordHealth([{ endpointId, succeeded }]);
    endpoints[expected.endpoint]!.failures = succeeded ? 0 : endpoints[expected.endpoint]!.failures + 1;
  };
  const pass = async () => {
    now += 1;
    await tables.pass(STEP_SECONDS);
  };
  const reap = async () => {
    const expired = await workers[0].expired();
    const over = [...model].filter(([, one]) => one.state === 'in_flight' && one.leasedAt < now);
    expect(expired.map(({ deliveryId }) => deliveryId).sort()).toEqual(over.map(([id]) => id).sort());
    if (expired.length > 0) await workers[0].reap(expired);
    for (const [, one] of over) {
      const losses = one.losses + 1;
      Object.assign(one, { state: losses >= MAX_LEASE_LOSSES ? 'held' : 'pending', losses, token: null, dueAt: now });
    }
  };
  const again = async (pick: number) => {
    const all = [...model.keys()];
    if (all.length === 0) return;
    const id = all[pick % all.length]!;
    const one = model.get(id)!;
    const allowed = ['held', 'delivered'].includes(one.state) && endpoints[one.endpoint]!.status !== 'disabled';
    const done = await tables.redeliver(id);
    expect(done).toBe(allowed);
    if (allowed) Object.assign(one, { state: 'pending', round: one.round + 1, attempts: 0, losses: 0, dueAt: now });
  };
  const change = async (pick: number, to: 'paused' | 'enabled' | 'disabled') => {
    const endpoint = pick % endpoints.length;
    // The first endpoint is never disabled. So there is always a receiver.
    if (endpoints[endpoint]!.status === 'disabled' || (to === 'disabled' && endpoint === 0)) return;
    if (to !== endpoints[endpoint]!.status) endpoints[endpoint]!.failures = 0;
    await tables.change(endpoints[endpoint]!.id, to);
    endpoints[endpoint]!.status = to;
  };
  const tidy = async () => {
    await workers[1].tidy(120);
    for (const one of model.values()) if (one.state === 'pending' && endpoints[one.endpoint]!.status === 'disabled') one.state = 'canceled';
  };
  const agree = async () => {
    expect((await tables.rows()).map(({ id, state, round, attempts, losses }) => ({ id, state, round, attempts, losses }))).toEqual(
      [...model]
        .map(([id, { state, round, attempts, losses }]) => ({ id, state, round, attempts, losses }))
        .sort((a, b) => Number(a.id) - Number(b.id)),
    );
    expect(await tables.counts()).toEqual({ events: events - untold, attempts: recorded });
  };

  for (const [step, pick] of steps) {
    if (step === 'event') {
      await tables.happen();
      events += 1;
      untold += 1;
    } else if (step === 'tell' || step === 'replay') {
      await tables[step]();
      await told();
    } else if (step === 'claim') await claim(1 + (pick % 12));
    else if (step === 'succeed' && held.length > 0) await end(pick, true);
    else if (step === 'fail' && held.length > 0) await end(pick, false);
    // Ends the delivery that a worker has held longest. Its lease may be over.
    else if (step === 'late' && held.length > 0) await end(0, pick % 2 === 0);
    else if (step === 'pass') await pass();
    else if (step === 'reap') await reap();
    else if (step === 'redeliver') await again(pick);
    else if (step === 'pause') await change(pick, 'paused');
    else if (step === 'resume') await change(pick, 'enabled');
    else if (step === 'disable') await change(pick, 'disabled');
    await tidy();
    await agree();
  }

  // At the end workers run, endpoints answer, and time passes.
  await tables.tell();
  await told();
  for (const endpoint of endpoints.keys()) await change(endpoint, 'enabled');
  held.splice(0);
  await pass();
  await reap();
  for (let rounds = 0; [...model.values()].some(({ state }) => state === 'pending'); rounds++) {
    expect(rounds).toBeLessThan(200);
    await claim(20);
    while (held.length > 0) await end(0, true);
    await pass();
    await tidy();
  }
  await agree();
  for (const one of model.values()) expect(['delivered', 'held', 'canceled']).toContain(one.state);
};

export const deliveriesContract = (whose: string, open: () => Promise<DeliveriesGround>, runs: number): void =>
  describe(`${whose} deliveries`, () => {
    let ground: DeliveriesGround;
    beforeAll(async () => {
      ground = await open();
    });
    afterAll(() => ground.close());

    test('any sequence of steps, two workers: the model agrees after each, and in the end everything has arrived, is held or cancelled', async () => {
      const step = fc.tuple(fc.constantFrom(...STEPS), fc.nat(1_000));
      const many = fc.integer({ min: 1, max: 12 }).map((count): Step[] => Array.from({ length: count }, () => ['event', 0] as const));
      await fc.assert(
        fc.asyncProperty(many, fc.array(step, { minLength: 20, maxLength: 60 }), async (first, steps) =>
          run(await ground.fresh(), [...first, ['tell', 0], ...steps]),
        ),
        { numRuns: runs, endOnFailure: true },
      );
    }, 180_000);
  });

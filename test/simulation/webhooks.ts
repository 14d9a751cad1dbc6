/**
 * Webhooks in the simulation: staff who change endpoints, receivers, and the network between receivers and the service. The receivers were written
 * from the specification.
 *
 * The rules for the end of a run: each event arrived at every endpoint that was registered before it, or its delivery is held after five attempts.
 * All arrivals of an event have the same id and bytes, and a signature that the receiver accepts. No event is lost, invented, or sent to another
 * account.
 */
import { createHmac, timingSafeEqual } from 'node:crypto';
import type { EventStore, LogGate, Recorded } from '#eventstore';
import type { Clock, Ids } from '#kernel';
import { paymentIdOf, paymentEvents } from '#payments';
import type { KeyRing, Logger } from '#platform';
import {
  ATTEMPT_BUDGET_MS,
  createDispatcher,
  type Endpoint,
  Endpoints,
  type EndpointSecret,
  MAX_ATTEMPTS,
  MAX_LEASE_LOSSES,
  notificationOf,
  type OutboxEvent,
  type PayloadPorts,
  type Posted,
  redeliverAllHeld,
  RETRY_SECONDS,
  type Sender,
  type StaffTables,
} from '#webhooks';
import type { Check } from './audits.js';
import { type DeliveryRow, simulatedDeliveries, simulatedDueSignal, type WebhookTables } from './deliveries.js';
import type { Outside } from './partners.js';
import { clearText, type World } from './service.js';
import type { Process, Rng, Simulator } from './simulator.js';
import { simulatedStatement } from './stores.js';
import type { Database } from './tables.js';

// ------------------------------------------------------------------------------------------------------------------------------------
// Staff's commands (`payfold webhooks …`), which any process may run.

export type WebhookAsk =
  | { readonly kind: 'add endpoint'; readonly accountId: string; readonly url: string }
  | { readonly kind: 'endpoints' }
  | { readonly kind: 'change endpoint'; readonly endpointId: string; readonly verb: 'pause' | 'resume' | 'disable' }
  | { readonly kind: 'stage secret' | 'activate secret'; readonly endpointId: string }
  | { readonly kind: 'redeliver held' };

/** Possible answers to staff's webhook commands. */
export const WEBHOOK_ANSWERS: Readonly<Record<WebhookAsk['kind'], readonly string[]>> = {
  'add endpoint': ['OK', 'INVALID_STATE', 'INTERNAL_ERROR'],
  endpoints: ['OK', 'INTERNAL_ERROR'],
  'change endpoint': ['OK', 'INVALID_STATE', 'INTERNAL_ERROR'],
  'stage secret': ['OK', 'INVALID_STATE', 'INTERNAL_ERROR'],
  'activate secret': ['OK', 'INVALID_STATE', 'INTERNAL_ERROR'],
  'redeliver held': ['OK', 'INTERNAL_ERROR'],
};

export interface WebhookPorts {
  readonly tables: StaffTables;
  readonly store: EventStore;
  readonly clock: Clock;
  readonly ids: Ids;
  readonly keys: KeyRing;
}

export const serveWebhooks = async (ports: WebhookPorts, ask: WebhookAsk): Promise<object> => {
  const deps = { ...ports, actor: { type: 'staff', id: 'staff' }, sender: { vet: async () => undefined } } as const;
  const endpoints = new Endpoints(deps);
  switch (ask.kind) {
    case 'add endpoint':
      return endpoints.add(ask.accountId, ask.url);
    case 'endpoints':
      return { endpoints: await endpoints.list() };
    case 'change endpoint':
      return endpoints[ask.verb](ask.endpointId);
    case 'stage secret':
      return endpoints.stageSecret(ask.endpointId);
    case 'activate secret':
      return endpoints.activateSecret(ask.endpointId);
    case 'redeliver held':
      return { redelivered: await redeliverAllHeld(deps) };
  }
};

/** The intervals of the dispatcher, longer than in the product. A notification wakes the dispatcher when a delivery is due. */
const LOOK_MS = { idleMs: 20_000, leaseLookMs: 20_000, tidyEveryMs: 20_000 } as const;

export const startDispatcher = (
  world: World,
  database: Database,
  { clock, keys }: WebhookPorts,
  payloads: PayloadPorts,
  ownLog: Pick<LogGate, 'incident'>,
  log: Logger,
): void => {
  const { sim, seams, tables } = world;
  const { process } = database;
  const bareDeliveries = simulatedDeliveries(tables.webhooks, simulatedStatement(sim, process, 'tables'));
  const bareSender = simulatedSender(sim, process, world.receivers);
  createDispatcher(
    {
      deliveries: seams.deliveries?.(bareDeliveries, world) ?? bareDeliveries,
      sender: seams.sender?.(bareSender, world) ?? bareSender,
      due: simulatedDueSignal(database),
      payloads,
      keys,
      clock,
      log,
      paused: () => ownLog.incident !== null,
      watch: { attempted: () => undefined, leaseLost: () => undefined },
      retrySeconds: RETRY_SECONDS,
    },
    LOOK_MS,
  ).start();
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Receivers, and the network between them and the service.

/** How late a request may still reach a receiver after the sender has given up. */
const LATE_POST_MS = [500, 20_000] as const;
const POST_MS = 3_000;
const NOWHERE = { statusCode: null, errorCode: 'ECONNREFUSED', remoteIp: null, responseHead: null } as const;
const UNREACHED: Posted = { ...NOWHERE, outcome: 'connect' };
const UNANSWERED: Posted = { ...NOWHERE, outcome: 'timeout', errorCode: 'answer' };

export type SimulatedSender = Pick<Sender, 'post' | 'close'>;

const simulatedSender = (sim: Simulator, process: Process, receivers: ReadonlyMap<string, Receiver>): SimulatedSender => {
  const clock = sim.clock(process);
  return {
    post: async ({ url, endpointId, headers, body }) => {
      const begun = clock.monotonic();
      const posted = await sim.call<Posted>(process, {
        store: 'receiver',
        name: `POST ${headers['Service-Event-Type']}`,
        effect: () => receivers.get(url)?.receive(endpointId, headers, Buffer.from(body)) ?? UNREACHED,
        failed: (kind) => (kind === 'dropped' ? UNREACHED : UNANSWERED),
        lateMs: LATE_POST_MS,
        latencyMs: POST_MS,
      });
      // Without an answer, the sender waits until the time limit of the attempt.
      if (posted === UNANSWERED) await clock.sleep(ATTEMPT_BUDGET_MS - (clock.monotonic() - begun));
      return posted;
    },
    close: () => undefined,
  };
};

/** Signature verification, step 2: the largest difference between the time of the signature and now. */
const TOLERANCE_S = 300;

interface Arrival {
  /** Only for the oracle. A URL may be disabled and added again as another endpoint. The receiver cannot tell the two apart. */
  readonly endpointId: string;
  readonly id: string;
  readonly body: string;
  /** The receiver's judgement of the request. */
  readonly verdict: 'accepted' | 'signature' | 'age' | 'out of order';
}

/** A partner's server. It accepts a delivery if the signature is correct and not too old. */
export class Receiver {
  readonly arrivals: Arrival[] = [];
  /** The secrets that the receiver accepts. Each rotation adds one. */
  readonly secrets: string[] = [];
  /** `fails`: the share of deliveries that get a 500. `isDeaf`: every delivery gets a 500. */
  fails = 0;
  isDeaf = false;

  constructor(
    private readonly sim: Simulator,
    private readonly rng: Rng,
  ) {}

  receive(endpointId: string, headers: Readonly<Record<string, string>>, bytes: Buffer): Posted {
    const body = bytes.toString();
    const verdict = this.judge(headers['Service-Signature'] ?? '', body);
    this.arrivals.push({ endpointId, id: headers['Service-Event-Id'] ?? '', body, verdict });
    const status = verdict === 'accepted' ? 200 : verdict === 'out of order' ? 500 : 400;
    this.sim.note('receiver', `${headers['Service-Event-Type']}: ${verdict}`);
    return { outcome: status === 200 ? 'ok' : status === 500 ? 'http_5xx' : 'http_4xx', statusCode: status, errorCode: null, remoteIp: null, responseHead: null }; // prettier-ignore
  }

  private judge(signature: string, body: string): Arrival['verdict'] {
    const [, t, v1] = /^t=(\d+),v1=([0-9a-f]{64})$/.exec(signature) ?? [];
    if (t === undefined || v1 === undefined) return 'signature';
    const known = this.secrets.some((secret) =>
      timingSafeEqual(createHmac('sha256', secret).update(`${t}.${body}`).digest(), Buffer.from(v1, 'hex')),
    );
    if (!known) return 'signature';
    if (Math.abs(this.sim.now / 1000 - Number(t)) > TOLERANCE_S) return 'age';
    return this.isDeaf || (this.sim.faultsOn && this.rng.chance(this.fails)) ? 'out of order' : 'accepted';
  }

  /** Accepted notifications by id, in the order of first acceptance. */
  get taken(): ReadonlyMap<string, { type: string; data: Record<string, unknown> }> {
    return new Map(
      this.arrivals
        .filter(({ verdict }) => verdict === 'accepted')
        .map(({ id, body }) => [id, JSON.parse(body) as { type: string; data: Record<string, unknown> }]),
    );
  }
}

// ------------------------------------------------------------------------------------------------------------------------------------
// The registration of receivers, and their faults.

export interface Subscription {
  readonly accountId: string;
  readonly url: string;
  readonly fails: number;
  /** The receiver answers 500 until repairReceivers, so its deliveries become held. */
  readonly isDeaf: boolean;
  readonly pauseMs: number | null;
  readonly rotates: boolean;
  readonly endsMs: number | null;
}

export const subscribe = async (outside: Outside, { accountId, url, fails, isDeaf, pauseMs, rotates, endsMs }: Subscription): Promise<void> => {
  const { world } = outside;
  const { sim } = world;
  world.openWebhooks();
  const receiver = new Receiver(sim, sim.rng);
  Object.assign(receiver, { fails, isDeaf });
  world.receivers.set(url, receiver);
  const rotate = async (endpointId: string) => {
    const staged = await outside.persist({ kind: 'stage secret', endpointId });
    if (staged?.status !== 200) return;
    receiver.secrets.push((staged.data as unknown as EndpointSecret).secret);
    await outside.persist({ kind: 'activate secret', endpointId });
  };
  const added = await outside.persist({ kind: 'add endpoint', accountId, url });
  if (added?.status === 200) receiver.secrets.push((added.data as unknown as EndpointSecret).secret);
  const listed = await outside.persist({ kind: 'endpoints' });
  const endpoint = (listed?.data.endpoints as Endpoint[] | undefined)?.find((one) => one.url === url);
  if (!endpoint) return;
  const { endpointId } = endpoint;
  // If the command crashed after it added the endpoint, it did not show the secret. So make a new secret.
  if (receiver.secrets.length === 0) await rotate(endpointId);
  if (pauseMs !== null) {
    await outside.persist({ kind: 'change endpoint', endpointId, verb: 'pause' });
    await sim.wait(pauseMs);
    await outside.persist({ kind: 'change endpoint', endpointId, verb: 'resume' });
  }
  if (rotates) await rotate(endpointId);
  if (endsMs === null) return;
  await sim.wait(endsMs);
  await outside.persist({ kind: 'change endpoint', endpointId, verb: 'disable' });
};

/** Repairs every receiver and gives it a new secret. Then staff send all held deliveries again. */
export const repairReceivers = async (outside: Outside): Promise<void> => {
  const { receivers, hasWebhooks } = outside.world;
  if (!hasWebhooks) return;
  const listed = await outside.persist({ kind: 'endpoints' });
  for (const { endpointId, url, status } of (listed?.data.endpoints as Endpoint[] | undefined) ?? []) {
    const receiver = receivers.get(url)!;
    receiver.isDeaf = false;
    if (status === 'disabled') continue;
    if (status === 'paused') await outside.persist({ kind: 'change endpoint', endpointId, verb: 'resume' });
    // The receiver may not know the present secret: a command may have crashed before it showed the secret. So make a new one, and repeat this until
    // there is an answer.
    let staged;
    do staged = await outside.persist({ kind: 'stage secret', endpointId });
    while (!staged);
    receiver.secrets.push((staged.data as unknown as EndpointSecret).secret);
    await outside.persist({ kind: 'activate secret', endpointId });
  }
  await outside.persist({ kind: 'redeliver held' });
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The oracle on deliveries.

/** True if no delivery is in flight, and only paused endpoints have pending deliveries. */
export const areDeliveriesQuiet = ({ deliveries, endpoints }: WebhookTables): boolean =>
  [...deliveries.values()].every(({ state, endpointId }) => state !== 'in_flight' && (state !== 'pending' || endpoints.get(endpointId)!.status === 'paused')); // prettier-ignore

/** The shortest wait between two attempts: two minutes less a tenth (Retries 2, C55). */
const LEAST_WAIT_MS = 108_000;

/**
 * Checks all deliveries. `streams`: the streams of payments. `staffReturned`: the cents that the bank returned for staff, by payment. The
 * notifications that a receiver accepted must add up to these cents.
 */
export const auditDeliveries = (
  world: World,
  streams: ReadonlyMap<string, readonly Recorded[]>,
  staffReturned: (paymentId: string) => number,
  check: Check,
): void => {
  if (!world.hasWebhooks) return;
  const accounts = new Map([...streams].map(([stream, [first]]) => [paymentIdOf(stream), (first!.data as { accountId?: string }).accountId ?? '']));
  const { tables: { webhooks }, receivers, sim } = world; // prettier-ignore
  const { opened } = world;
  const bodyOf = ({ id, stream, payload }: OutboxEvent) => clearText(opened, payload.toString(), `${stream}/webhook:${id}`);
  auditEvents(webhooks, streams, accounts, bodyOf, check);
  const storedAt = (stream: string, revision: bigint) => streams.get(stream)![Number(revision)]!.storedAt.getTime();
  for (const endpoint of webhooks.endpoints.values()) {
    const receiver = receivers.get(endpoint.url)!;
    const deliveries = [...webhooks.deliveries.values()].filter(({ endpointId }) => endpointId === endpoint.id);
    const arrivals = receiver.arrivals.filter(({ endpointId }) => endpointId === endpoint.id);
    const mayHear = [...webhooks.events.values()].filter((event) => event.accountId === endpoint.accountId && event.position > endpoint.registeredAt);
    const due = new Set(mayHear.map(({ id }) => id));
    for (const { eventId } of deliveries) check(due.delete(eventId), 'a delivery of what was not for this endpoint, or twice');
    // An event may have no delivery to an endpoint whose row became visible after the event was stored.
    const missed = mayHear.filter(({ id, stream, revision }) => due.has(id) && storedAt(stream, revision) > endpoint.seenFrom);
    check(
      missed.length === 0 || endpoint.status === 'disabled',
      `${missed.length} events were never to be delivered to an endpoint that was registered`,
    );
    for (const { id, body, verdict } of arrivals) {
      check(
        deliveries.some(({ eventId }) => eventId === id),
        'something arrived that was not to be delivered',
      );
      const event = webhooks.events.get(id);
      check(event !== undefined && bodyOf(event) === body, 'the body of an event changed');
      // A delivery is late by minutes only if its process was paused between signing and sending.
      check(verdict !== 'age' || sim.statistics.pauses > 0, 'Signature verification: a delivery arrived with an old time');
    }
    for (const delivery of deliveries) {
      const mine = arrivals.filter(({ id }) => id === delivery.eventId);
      auditDelivery(webhooks, delivery, mine, sim.statistics.pauses > 0, check);
    }
    if (endpoint.status === 'disabled') continue;
    // Compare the sums of the notifications with the money that the bank returned, as a partner would do.
    const heard = new Map<string, number>();
    for (const { type, data } of receiver.taken.values()) {
      const id = data.id as string;
      check(accounts.get(id) === endpoint.accountId, 'a receiver heard of another account’s payment');
      if (type === 'payment.refunded') heard.set(id, (heard.get(id) ?? 0) + (data.amountCents as number));
    }
    const first = [...streams.values()].flat()[0]?.position ?? '';
    if (endpoint.registeredAt >= first || due.size > 0 || deliveries.some(({ state }) => state === 'held')) continue;
    for (const [paymentId, accountId] of accounts)
      if (accountId === endpoint.accountId)
        check(
          (heard.get(paymentId) ?? 0) === staffReturned(paymentId),
          `C56: a receiver heard of ${heard.get(paymentId) ?? 0} cents, staff returned ${staffReturned(paymentId)}`,
        );
  }
};

/** Each recorded event that must be notified has exactly one outbox event, with the same time and position. */
const auditEvents = (
  { events }: WebhookTables,
  streams: ReadonlyMap<string, readonly Recorded[]>,
  accounts: ReadonlyMap<string, string>,
  bodyOf: (event: OutboxEvent) => string,
  check: Check,
): void => {
  const ofFact = new Map([...events.values()].map((event) => [`${event.stream} ${event.revision}`, event]));
  check(ofFact.size === events.size, 'C56: a fact became two events');
  for (const recorded of [...streams.values()].flat()) {
    const fact = `${recorded.stream} ${recorded.revision}`;
    const event = ofFact.get(fact);
    const isTold = notificationOf(paymentIdOf(recorded.stream), paymentEvents.read(recorded), '') !== null;
    check(isTold === (event !== undefined), `C56: ${recorded.type}, which is${isTold ? '' : ' not'} to be told, became ${event ? 'an' : 'no'} event`);
    if (!event) continue;
    const { id, createdAt } = JSON.parse(bodyOf(event)) as { id: string; createdAt: string };
    check(
      id === event.id && createdAt === recorded.meta.recordedAt && event.position === recorded.position,
      'an event has another id, time or place than its fact',
    );
    check(event.accountId === accounts.get(event.paymentId), 'an event belongs to another account');
  }
};

/** Checks one delivery. `arrivals`: its requests at the receiver. `stoodStill`: a process was paused in this run, so waits may look too short. */
const auditDelivery = (
  { attempts, endpoints }: WebhookTables,
  { id, endpointId, state, round: last, leaseLosses, lostInAll }: DeliveryRow,
  arrivals: readonly Arrival[],
  stoodStill: boolean,
  check: Check,
): void => {
  const isDisabled = endpoints.get(endpointId)!.status === 'disabled';
  const made = attempts.filter(({ deliveryId }) => deliveryId === id);
  const accepted = arrivals.filter(({ verdict }) => verdict === 'accepted');
  check(made.filter(({ outcome }) => outcome === 'ok').length <= accepted.length, 'an attempt counts as delivered, and the receiver took nothing');
  check(arrivals.length <= made.length + lostInAll, `${arrivals.length} arrivals of ${made.length} attempts and ${lostInAll} lost workers`);
  for (let round = 1; round <= last; round++) {
    const tried = made.filter((one) => one.round === round);
    const inOrder = tried.every(({ attempt }, index) => attempt === index + 1);
    check(inOrder && tried.length <= MAX_ATTEMPTS, `C55: attempts ${tried.map(({ attempt }) => attempt).join()} of one round`);
    check(
      tried.slice(0, -1).every(({ outcome }) => outcome !== 'ok'),
      'C55: tried again after it was delivered',
    );
    const endedAt = (index: number) => tried[index]!.startedAtMs + tried[index]!.durationMs;
    const waited = tried.slice(1).every(({ startedAtMs }, index) => startedAtMs >= endedAt(index) + LEAST_WAIT_MS);
    check(waited || stoodStill, 'Retries 2: tried again within two minutes');
  }
  const tried = made.filter(({ round }) => round === last);
  const isSpent = tried.length === MAX_ATTEMPTS || leaseLosses >= MAX_LEASE_LOSSES;
  if (state === 'delivered') check(tried.at(-1)?.outcome === 'ok', 'called delivered without an answer that says so');
  if (state === 'held') check(isSpent, `Retries 3: held after ${tried.length} attempts`);
  // All receivers work when staff send held deliveries again. So a delivery is held a second time only after lost leases.
  if (state === 'held' && last > 1 && !isDisabled) check(leaseLosses >= MAX_LEASE_LOSSES, 'held again although the receiver was well');
  check(state !== 'canceled' || isDisabled, 'cancelled for an endpoint that is not disabled');
};

/**
 * An incident of the event store (C76). Simulated staff close it once the right log is back, as `payfold log resume` does. This file also checks runs
 * whose events are lost for good.
 */
import { examineLog, foundWhole, isWhole, OwnLog, unheldMarks } from '#eventstore';
import { timestamp } from '#kernel';
import {
  finishEmptyCreates,
  type GatewayAccount,
  GatewaySlots,
  NO_FILTERS,
  type PaymentPorts,
  paymentStream,
  PaymentStreams,
  restoreIntents,
} from '#payments';
import { INSTALLATION } from '../support/mark-book.js';
import { bankGateway, directWire } from './bank.js';
import { isKeyed, type Oracle, told, type Told } from './oracle.js';
import { chargeAsk, type Outside } from './partners.js';
import { ACCOUNTS, type Ask, CHECK_EVERY_MS, logger, PORTALS, type Reply, SLOTS, USUAL_PORTALS, type World } from './service.js';
import { Process } from './simulator.js';
import { collect } from './stores.js';

// ------------------------------------------------------------------------------------------------------------------------------------
// Staff.

const LOOKS_MS = [5_000, 60_000] as const;

/**
 * Simulated staff close an open incident when the right log is back. If they cannot close it, they give up for the rest of the run. No faults affect
 * their command.
 */
export const attend = async (world: World): Promise<void> => {
  const { sim, watch, marks } = world;
  for (;;) {
    await sim.wait(sim.rng.int(...LOOKS_MS));
    if (!marks.incident || watch!.isLost) continue;
    if ((await resume(world)) === 'resumed') continue;
    sim.note('staff', 'the log does not hold everything: not resumed');
    watch!.isGivenUp = true;
    return;
  }
};

/** The same steps as in apps/operator/log.ts. `refused`: the incident stays open. */
const resume = async (world: World): Promise<'resumed' | 'refused'> => {
  const { sim, log: store, marks, keys, bank } = world;
  const process = new Process('staff');
  const clock = sim.clock(process);
  const book = marks.bookOf('staff');
  const places = await examineLog({ store, book, signedHead: async () => null });
  if (!isWhole(places) || (await speaksOfLost(world))) return 'refused';
  const log = logger(sim, process);
  const ownLog = new OwnLog({ store, book, installationId: INSTALLATION, clock, log, appendsProve: false });
  const ids = sim.ids();
  const find = (account: GatewayAccount) => bankGateway(world.bank, account, directWire, () => sim.now);
  const slots = new GatewaySlots(clock, SLOTS);
  const ports = { clock, ids, streams: new PaymentStreams(ownLog, clock, ids), ownLog, gateways: { find }, slots, log } satisfies Partial<PaymentPorts>; // prettier-ignore
  const creates = [...keys.rows.values()].flatMap(({ operation, state, createdAt, ...row }) =>
    operation === 'create' && state === 'reserved' ? [{ ...row, claimedAt: timestamp(createdAt) }] : [],
  );
  const whole = { ...ports, streams: new PaymentStreams(store, clock, ids), ownLog: foundWhole } as unknown as PaymentPorts;
  const kept = [...marks.kept.values()].flat(2);
  for (const { paymentId, ended } of [...(await restoreIntents(whole, kept)), ...(await finishEmptyCreates(whole, creates))]) {
    sim.note('staff', `payment ${paymentId}: ${ended}`);
    const stream = await collect(store.read(paymentStream(paymentId)));
    const refs = stream.filter(({ meta }) => meta.actor.id === 'log-resume').flatMap(({ data }) => referencesIn(data));
    world.check(!refs.some((ref) => bank.sent.has(ref)), 'C76: a charge, void or refund without an intent in the log');
  }
  world.feeds.forget();
  marks.close(unheldMarks(places));
  sim.note('staff', 'the incident is closed');
  await ownLog.begin();
  return ownLog.incident ? 'refused' : 'resumed';
};

/** The gateway references in the data of an event. */
const referencesIn = (data: unknown): readonly string[] => {
  const { legs = [], references = [] } = data as Partial<Record<'legs' | 'references', readonly { readonly references?: Record<string, string> }[]>>;
  return [...legs, ...references].flatMap(({ references: names = {} }) => Object.values(names));
};

/** True if a list row or a stored answer needs an event that the log does not have. The same as `unborne`, on the simulated tables. */
const speaksOfLost = async ({ log, tables, keys }: World): Promise<boolean> => {
  const events = (paymentId: string) => collect(log.read(paymentStream(paymentId)));
  for (const { paymentId, revision } of tables.list.values()) if (((await events(paymentId)).at(-1)?.revision ?? -1n) < revision) return true;
  for (const { operation, state, status, paymentId: own, attemptId } of keys.rows.values()) {
    if (state !== 'completed' || status !== 200) continue;
    const stream = await events(operation === 'create' ? own : operation.slice(operation.indexOf(':') + 1));
    if (!stream.some(({ data }) => (data as { readonly attemptId?: string }).attemptId === attemptId)) return true;
  }
  return false;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The end of a run whose events are lost.

/** Within this time every process must know of the incident: the interval between checks, and the time of a check. */
const KNOWS_WITHIN_MS = CHECK_EVERY_MS + 5_000;
const LOOK_MS = 1_000;
/** After this time, every earlier request and the lease of its key have ended. */
const REQUESTS_END_MS = 90_000;
/** Long enough for several rounds of every worker loop. */
const INCIDENT_MS = 300_000;

export const endInIncident = async (outside: Outside): Promise<void> => {
  const { world, oracle } = outside;
  const { sim, replicas } = world;
  sim.faultsOn = false;
  while (sim.underway > 0 || replicas.some(({ process }) => !process.up || process.pausedUntil > sim.now)) await sim.wait(LOOK_MS);
  await sim.wait(KNOWS_WITHIN_MS);
  for (const { ownLog, process } of replicas) world.check(ownLog.incident !== null, `C76: ${process.id} does not know that the log is lost`);
  await sim.wait(REQUESTS_END_MS);

  const before = await picture(world);
  await ask(outside, oracle);
  await sim.wait(INCIDENT_MS);
  await ask(outside, oracle);
  const after = await picture(world);
  for (const [what, was] of Object.entries(before)) world.check(after[what] === was, `C76: in an incident of the event store, ${what} changed`);
};

/** The data that must not change during an incident, as text. */
const picture = async ({ log, bank, keys, tables }: World): Promise<Record<string, string>> => ({
  'the log': String(await log.head()),
  'the bank': JSON.stringify([[...bank.sent], bank.tombstones.size, bank.charges.size, bank.reversals.size]),
  'the keys': JSON.stringify([...keys.rows.values()].map(({ state, fence, attemptId }) => [state, fence, attemptId])),
  'the list': JSON.stringify([...tables.list.values()].map(({ paymentId, revision }) => [paymentId, String(revision)])),
  'the tries of recovery': JSON.stringify([...tables.tries]),
  'the unfinished checkouts': JSON.stringify([...tables.unfinished.keys()]),
  'a checkpoint': JSON.stringify([...tables.checkpoints].map(([name, { position }]) => [name, position])),
  'a delivery': JSON.stringify([...tables.webhooks.deliveries.values()].map(({ state, attempts }) => [state, attempts])),
});

/** Sends earlier creates and returns again, and then new requests and reads. Checks the answers against C76. */
const ask = async (outside: Outside, oracle: Oracle): Promise<void> => {
  const { world } = outside;
  const { sim } = world;
  const judged = async (what: Ask, isAllowed: (answer: Told, reply: Reply) => boolean): Promise<void> => {
    const { reply } = await outside.send(null, what);
    const answer = reply && told(reply);
    world.check(
      answer !== null && isAllowed(answer, reply!),
      `C76: ${what.kind} was answered ${answer ? `${answer.status} ${answer.code}` : 'not at all'}`,
    );
  };
  const refused = ({ code }: Told, { retryAfterSeconds }: Reply) => code === 'IDEMPOTENCY_UNAVAILABLE' && retryAfterSeconds === 60;
  for (const { exchanges } of oracle.intentions)
    for (const { ask: asked } of exchanges.slice(0, 2))
      if (asked.kind === 'create' || asked.kind === 'reverse' || asked.kind === 'staff')
        await judged(asked, (answer, reply) => (isKeyed(asked) && (reply.replayed === true || answer.code === 'IDEMPOTENCY_MISMATCH' || answer.code === 'IDEMPOTENCY_RECONCILIATION_REQUIRED')) || refused(answer, reply)); // prettier-ignore
  const portal = sim.rng.pick(PORTALS.slice(0, USUAL_PORTALS));
  const wish = { accountId: ACCOUNTS[0], portal, lines: [500], card: 'approved', reference: 'in the incident' } as const;
  await judged(chargeAsk({ ...wish, key: `incident ${sim.now}` }), refused);
  await judged(chargeAsk({ ...wish, key: null }), refused);
  await judged({ kind: 'submit', checkoutId: sim.ids().uuid(), attemptId: sim.ids().uuid(), card: 'approved' }, refused);
  const shown = (answer: Told, reply: Reply) => answer.status === 200 || refused(answer, reply);
  for (const [paymentId, accountId] of oracle.namedPayments()) {
    await judged({ kind: 'get', accountId, paymentId }, shown);
    await judged({ kind: 'get', accountId: ACCOUNTS.find((other) => other !== accountId)!, paymentId }, refused);
  }
  await judged({ kind: 'get', accountId: ACCOUNTS[0], paymentId: sim.ids().uuid() }, refused);
  for (const accountId of ACCOUNTS)
    await judged({ kind: 'list', accountId, filters: NO_FILTERS, cursor: null, limit: null }, ({ status }, { complete }) => status === 200 && !complete); // prettier-ignore
};

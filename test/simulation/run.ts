/**
 * One run: clients use the service during faults. Then all faults end, and the oracle compares the books. If the run has a seed, the seed decides
 * everything. A scenario has only crashes at chosen points.
 */
import { KEEP_HOURS, RECOVERY_SCHEDULE_MS } from '#payments';
import type { CardKind } from './bank.js';
import { checkOut, type Visit } from './checkout.js';
import { attend, endInIncident } from './incident.js';
import { drawKeyFault, type KeyFault, playKeyFault } from './key-loss.js';
import { drawLogFault, type LogFault, playLogFault } from './loss.js';
import { Oracle } from './oracle.js';
import { Outside, type Paid, type Return, type Wish } from './partners.js';
import { ACCOUNTS, PORTALS, type PortalTerms, type Seams, USUAL_PORTALS, World } from './service.js';
import { repairReceivers, subscribe, type Subscription } from './webhooks.js';
import { type CrashPoint, type Faults, NO_FAULTS, Process, Rng, Simulator, type Statistics, type Store } from './simulator.js';

const HOUR_MS = 3_600_000;
/** How long a run may take to become quiet after its faults. Within this time recovery must try each open payment again. */
const QUIET_WITHIN_MS = RECOVERY_SCHEDULE_MS.at(-1)! + HOUR_MS;
const LOOK_EVERY_MS = 30_000;
/** If a client is still busy after this time, the service has stopped answering. */
const CLIENTS_WITHIN_MS = 48 * HOUR_MS;

/** The totals of one run, or of many. */
export interface Counts {
  readonly statistics: Statistics;
  readonly checks: number;
  readonly payments: number;
  readonly events: number;
  /** Webhooks: deliveries, and requests that arrived at receivers. */
  readonly deliveries: number;
  readonly arrivals: number;
  readonly simulatedMs: number;
  /** Answers that clients got, by code. */
  readonly answers: Readonly<Record<string, number>>;
}

export interface RunResult extends Counts {
  readonly seed: number;
  readonly violations: readonly string[];
  readonly hash: string;
  readonly lines: readonly string[];
  /** Names of the port calls, in order. A crash can be put before or after each. */
  readonly points: readonly string[];
}

type Play = (outside: Outside) => Promise<void>;

/**
 * Plays a run. Clients work during faults, and then the service becomes quiet. The epilogue sends last requests, and the service becomes quiet again.
 * Then the oracle audits.
 */
const play = async (
  sim: Simulator,
  skewsMs: readonly [number, number],
  seams: Seams,
  clients: Play,
  epilogue: Play,
  fault: LogFault | null = null,
  keyFault: KeyFault | null = null,
  portals: readonly PortalTerms[] = PORTALS,
): Promise<RunResult> => {
  const processes = skewsMs.map((skewMs, index) => new Process('AB'[index]!, skewMs));
  const world = new World(sim, processes, seams, fault !== null, keyFault !== null, portals);
  const { watch } = world;
  const oracle = new Oracle(world);
  const outside = new Outside(world, oracle);
  for (const process of processes) sim.start(process);
  const finish = async (work: Promise<unknown>, what: string) => {
    let done = false;
    work.then(
      () => (done = true),
      (error: unknown) => {
        world.check(false, `${what} threw: ${error instanceof Error ? (error.stack ?? error.message) : String(error)}`);
        done = true;
      },
    );
    if (!(await sim.run(() => done, sim.elapsed + CLIENTS_WITHIN_MS))) world.check(false, `liveness: ${what} never ended`);
  };
  const becomeQuiet = async () => {
    sim.faultsOn = false;
    const until = sim.elapsed + QUIET_WITHIN_MS;
    while (!watch?.isGivenUp && !(await oracle.isQuiet())) {
      if (sim.elapsed >= until) return world.check(false, 'liveness: not quiet hours after everything was healed');
      await sim.run(() => false, sim.elapsed + LOOK_EVERY_MS);
    }
  };

  if (fault)
    void attend(world).catch((error: unknown) => world.check(false, `staff threw: ${error instanceof Error ? error.message : String(error)}`));
  await finish(Promise.all([clients(outside), fault && playLogFault(world, fault), keyFault && playKeyFault(outside, keyFault)]), 'the clients');
  const isLost = () => watch !== null && (watch.isLost || watch.isGivenUp);
  if (!isLost()) {
    await becomeQuiet();
    if (!isLost()) await finish(epilogue(outside), 'the epilogue');
    await becomeQuiet();
  }
  if (isLost()) await finish(endInIncident(outside), 'the incident');
  else if (!watch?.isTold) await oracle.audit();
  watch?.auditBank((requestId) => oracle.sentAt(requestId));
  if (watch && world.marks.incidents > 0) sim.statistics.incidents += 1;
  for (const { name, message } of world.tables.failures) world.check(false, `A8: a projection stopped: ${name}: ${message}`);

  const head = await world.log.head();
  return {
    seed: sim.seed,
    violations: [...new Set(world.violations)],
    hash: sim.hash(),
    statistics: sim.statistics,
    checks: world.checks,
    payments: world.tables.list.size,
    events: Number(head ?? 0),
    deliveries: world.tables.webhooks.deliveries.size,
    arrivals: [...world.receivers.values()].reduce((sum, { arrivals }) => sum + arrivals.length, 0),
    simulatedMs: sim.elapsed,
    answers: oracle.answers,
    lines: sim.lines,
    points: sim.names,
  };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// A seed.

const STORES: readonly Store[] = ['log', 'keys', 'gateway', 'tables', 'directory'];

/** Swarm testing: each rate is often zero. Some seeds have few kinds of faults and long histories, others have many kinds and short histories. */
const drawFaults = (rng: Rng): Faults => {
  const rate = (most: number) => (rng.chance(0.35) ? 0 : most * rng.next() ** 2);
  const outages = rng.chance(0.4)
    ? Array.from({ length: rng.int(1, 3) }, () => {
        const fromMs = rng.int(0, 120_000);
        return { store: rng.pick(STORES), fromMs, toMs: fromMs + rng.int(1_000, 100_000) };
      })
    : [];
  return { drop: rate(0.06), lost: rate(0.05), late: rate(0.12), pause: rate(0.015), crash: rate(0.025), network: rate(0.08), outages };
};

const CARD_MIX: readonly CardKind[] = [
  ...Array<CardKind>(12).fill('approved'),
  'declined',
  'gatewayError',
  'unreadable',
  'unreadable',
  'cannotTell',
  'voidRejected',
  'feeDeclined',
  'feeDeclined',
  'feeVoidFailsOnce',
  'feeVoidFailsOnce',
  'feeRefundFailsOnce',
  'feeRefundFailsOnce',
  'settlesAtOnce',
  'settlesAtOnce',
  'settlementRejected',
];

/** At banks like those of vendors. */
const VENDOR_CARDS: readonly CardKind[] = [...CARD_MIX, 'held', 'held'];

export const simulate = async (seed: number, seams: Seams = {}): Promise<RunResult> => {
  const draw = new Rng(seed ^ 0x2545f491);
  const sim = new Simulator(seed, drawFaults(draw));
  const { rng } = sim;
  // The wall clocks of the replicas may differ. Safety must not depend on them.
  const wild = draw.next();
  const skew = wild < 0.5 ? 0 : wild < 0.9 ? 5_000 : 120_000;
  const drawnSkewsMs = [draw.int(-skew, skew), draw.int(-skew, skew)] as const;
  const usual = PORTALS.slice(0, USUAL_PORTALS);
  const vendors = PORTALS.slice(USUAL_PORTALS);
  const drawn = draw.chance(0.5) ? [draw.pick(usual)] : usual;
  // These seeds draw with random numbers of their own, so the histories of the others stay as they are.
  const banks = new Rng(seed ^ 0x7feb352d);
  const isVendor = banks.chance(0.25);
  const portals = !isVendor ? drawn : banks.chance(0.5) ? [banks.pick(vendors)] : vendors;
  // In these seeds charges only arrive late, so that the oracle can judge how soon recovery finds them.
  const isLateOnly = isVendor && banks.chance(0.2);
  if (isLateOnly) sim.faults = { ...NO_FAULTS, late: 0.3 };
  /** The whole service is down for a day, a moment after a client has asked for its money. The client sends its request again when it is up. */
  let downForADay = isVendor && !isLateOnly && banks.chance(0.3);
  const skewsMs = isLateOnly ? ([0, 0] as const) : drawnSkewsMs;
  const cards = isVendor ? VENDOR_CARDS : CARD_MIX;
  const keyed = draw.chance(0.7) ? 0.95 : 0.5;
  const nextDay = draw.chance(0.12);
  // Payers have their own random numbers, so they do not change the histories of seeds without payers.
  const lots = new Rng(seed ^ 0x6c078965);
  const payers = lots.chance(0.15) ? lots.int(1, 3) : 0;
  const post = new Rng(seed ^ 0x165667b1);
  const subscriptions = post.chance(0.2) ? drawSubscriptions(post) : [];
  const paid: Paid[] = [];
  const keys: (() => Promise<unknown>)[] = [];

  const returns = (payment: Paid, number: number): Return => {
    const actor = rng.chance(0.2) ? 'staff' : 'partner';
    const key = rng.chance(keyed) ? `return ${payment.paymentId} ${number}` : null;
    const asksAgain = rng.chance(0.4);
    const kind = rng.int(1, 10);
    if (kind <= 2) return { operation: 'void', amountCents: null, includeFee: true, key, actor, asksAgain };
    // Many refunds have the same amount, so a faulty service could confuse them (C18).
    const part = rng.chance(0.4) ? Math.ceil(payment.amountCents / 10) : rng.int(1, Math.max(1, Math.floor(payment.amountCents / 2)));
    if (kind <= 6) return { operation: 'refund', amountCents: part, includeFee: false, key, actor, asksAgain };
    return { operation: 'refund', amountCents: null, includeFee: kind <= 9, key, actor, asksAgain };
  };
  const client = async (outside: Outside, number: number): Promise<void> => {
    await sim.wait(rng.int(0, 20_000));
    for (let turn = 1, turns = rng.int(1, 2); turn <= turns; turn++) {
      const wish: Wish = {
        accountId: ACCOUNTS[number % 2]!,
        portal: rng.pick(portals),
        lines: Array.from({ length: rng.int(1, 3) }, () => rng.int(1, 20_000)),
        card: nextDay && rng.chance(0.3) ? 'cannotTell' : rng.pick(cards),
        // Two accounts use the same keys. They must not affect each other (C12).
        key: rng.chance(keyed) ? `pay ${number >> 1}.${turn}` : null,
        reference: `case ${number}.${turn}`,
        doubles: rng.chance(0.1),
        asksAgain: rng.chance(0.3),
      };
      // Another client of the same account uses the same key for another request.
      const rival = wish.key !== null && rng.chance(0.06) ? outside.pay({ ...wish, lines: [...wish.lines, 1] }) : null;
      const { paid: payment } = await outside.pay(wish);
      if (wish.key !== null) keys.push(() => outside.pay({ ...wish, asksAgain: false, doubles: false }));
      await rival;
      if (!payment) continue;
      paid.push(payment);
      if (rng.chance(0.2)) await outside.readList(wish.accountId, rng.pick([null, 1, 2]));
      if (!rng.chance(0.75)) continue;
      const asked = Array.from({ length: rng.int(1, 3) }, (_, index) => returns(payment, index));
      if (downForADay) {
        downForADay = false;
        const down = sim.wait(banks.int(50, 2_500)).then(() => {
          const downMs = banks.int(24, 26) * HOUR_MS + banks.int(0, HOUR_MS);
          for (const { process } of outside.world.replicas) sim.crash(process, downMs);
        });
        await outside.giveBack(payment, { ...asked[0]!, key: `return ${payment.paymentId} and wait`, waits: true });
        await down;
        await outside.untilUp();
        continue;
      }
      if (rng.chance(0.4)) await Promise.all(asked.map((one) => outside.giveBack(payment, one)));
      else
        for (const one of asked) {
          await outside.giveBack(payment, one);
          if (rng.chance(0.5)) await outside.readPayment(payment.accountId, payment.paymentId);
        }
    }
  };
  const payer = async (outside: Outside, number: number): Promise<void> => {
    const visit: Visit = {
      portal: lots.pick(portals),
      lines: Array.from({ length: lots.int(1, 3) }, () => lots.int(1, 20_000)),
      cards: Array.from({ length: lots.int(1, 4) }, () => lots.pick(cards)),
      nonce: `visit-of-payer-${number}`,
      reference: `visit ${number}`,
      ...lots.pick<Pick<Visit, 'twice'>>([{}, {}, { twice: 'click' }, { twice: 'window' }]),
      ...lots.pick<Pick<Visit, 'cancels'>>([{}, { cancels: 'afterwards' }, { cancels: 'beside' }]),
      closes: lots.chance(0.25),
      leaves: lots.chance(0.3),
    };
    const refunds = lots.chance(0.3);
    await sim.wait(lots.int(0, 30_000));
    const { paymentId, accountId } = await checkOut(outside, visit);
    if (!paymentId || !refunds) return;
    const payment = { paymentId, accountId, amountCents: visit.lines.reduce((sum, cents) => sum + cents, 0) };
    await outside.giveBack(payment, returns(payment, 0));
  };
  const night = async (outside: Outside): Promise<void> => {
    if (!draw.chance(0.5)) return;
    for (let round = draw.int(1, 3); round > 0; round--) {
      await sim.wait(draw.int(5_000, 120_000));
      outside.settle(draw.pick(portals));
    }
  };
  const operator = async (outside: Outside): Promise<void> => {
    if (!draw.chance(0.15)) return;
    await sim.wait(draw.int(0, 60_000));
    await outside.revoke(draw.pick(portals), draw.int(1_000, 40_000));
  };
  const disputes = async (outside: Outside): Promise<void> => {
    if (!draw.chance(0.25)) return;
    await sim.wait(draw.int(10_000, 120_000));
    const payment = paid.at(-1);
    if (payment) await outside.dispute(payment, draw.int(1, payment.amountCents));
  };
  /** Staff return money and open disputes, so that there are notifications to send. */
  const clerk = async (outside: Outside): Promise<void> => {
    for (let acts = subscriptions.length > 0 ? post.int(1, 4) : 0; acts > 0; acts--) {
      await sim.wait(post.int(5_000, 90_000));
      const payment = paid.at(-post.int(1, 3));
      if (payment && post.chance(0.3)) await outside.dispute(payment, post.int(1, payment.amountCents));
      else if (payment)
        await outside.giveBack(payment, { operation: 'refund', amountCents: post.int(1, Math.ceil(payment.amountCents / 4)), includeFee: false, key: `clerk ${acts}`, actor: 'staff' }); // prettier-ignore
    }
  };
  const epilogue = async (outside: Outside): Promise<void> => {
    await repairReceivers(outside);
    const all = outside.oracle.intentions.filter(({ kind }) => kind === 'charge');
    // Send most keys again with the same request, as long as they are kept. The answer is the stored one, or "reconciliation required". No money may
    // move.
    const isKept = ({ sentAt }: { readonly sentAt: number }) => sim.now - sentAt < (KEEP_HOURS - 1) * HOUR_MS;
    if (rng.chance(0.5))
      for (const exchange of outside.oracle.firstUses())
        if (rng.chance(0.7) && isKept(exchange)) await outside.send(exchange.intention, exchange.ask);
    for (const intention of all) if (intention.paymentId) await outside.readPayment(intention.accountId, intention.paymentId);
    for (const accountId of ACCOUNTS) await outside.readList(accountId, rng.pick([null, 2]));
    if (nextDay && keys.length > 0) await tomorrow(outside);
    await outside.decideWhatWaits();
  };
  const tomorrow = async (outside: Outside): Promise<void> => {
    // The keys expire after a day. The same key then makes a new payment, unless the outcome of its old payment is unknown.
    for (const { process } of outside.world.replicas) sim.crash(process, 25 * HOUR_MS);
    await sim.wait(25 * HOUR_MS + 15 * 60_000);
    for (const again of keys.slice(0, 4)) await again();
  };
  const clients = async (outside: Outside): Promise<void> => {
    await Promise.all([
      ...Array.from({ length: draw.int(1, 4) }, (_, number) => client(outside, number)),
      ...Array.from({ length: payers }, (_, number) => payer(outside, number)),
      ...subscriptions.map((subscription) => sim.wait(post.chance(0.5) ? 0 : post.int(0, 60_000)).then(() => subscribe(outside, subscription))),
      clerk(outside),
      night(outside),
      disputes(outside),
      operator(outside),
    ]);
  };
  return play(sim, skewsMs, seams, clients, epilogue, drawLogFault(seed), drawKeyFault(seed), portals);
};

/** Draws the receivers: one or two for the first account, none or one for the second. */
const drawSubscriptions = (post: Rng): Subscription[] =>
  [ACCOUNTS[0], ACCOUNTS[0], ACCOUNTS[1]].flatMap((accountId, index) =>
    index > 0 && post.chance(0.5)
      ? []
      : {
          accountId,
          url: `https://receiver-${index}.example/hook`,
          fails: post.pick([0, 0, 0.2, 0.6]),
          isDeaf: post.chance(0.15),
          pauseMs: post.chance(0.25) ? post.int(10_000, 300_000) : null,
          rotates: post.chance(0.25),
          endsMs: post.chance(0.15) ? post.int(0, 300_000) : null,
        },
  );

// ------------------------------------------------------------------------------------------------------------------------------------
// A scenario.

export const playScenario = (clients: Play, crashPoints: readonly CrashPoint[], seams: Seams = {}): Promise<RunResult> => {
  const sim = new Simulator(1, NO_FAULTS, crashPoints);
  const epilogue = async (outside: Outside): Promise<void> => {
    for (const exchange of outside.oracle.firstUses()) await outside.send(exchange.intention, exchange.ask);
    for (const { kind, paymentId, accountId } of outside.oracle.intentions)
      if (kind === 'charge' && paymentId) await outside.readPayment(accountId, paymentId);
    for (const accountId of ACCOUNTS) await outside.readList(accountId);
  };
  return play(sim, [0, 0], seams, clients, epilogue);
};

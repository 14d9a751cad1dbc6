/**
 * Scenarios: fixed actions of one or two clients, without random faults. A crash can be placed before and after every port call of a scenario, and at
 * every pair of port calls. After a crash the clients continue as partners do.
 */
import type { CardKind } from './bank.js';
import { checkOut, type Visit } from './checkout.js';
import type { Outside, Paid, Return, Wish } from './partners.js';
import { ACCOUNTS, PORTALS, type Seams } from './service.js';
import { playScenario, type RunResult } from './run.js';
import type { CrashPoint } from './simulator.js';
import { repairReceivers, subscribe } from './webhooks.js';

const [LOWERING, PLAIN, REFUNDING, COMBINED, COMBINED_REFUNDING, NO_FEE] = PORTALS as unknown as [
  (typeof PORTALS)[number],
  (typeof PORTALS)[number],
  (typeof PORTALS)[number],
  (typeof PORTALS)[number],
  (typeof PORTALS)[number],
  (typeof PORTALS)[number],
];

type Scenario = (outside: Outside) => Promise<void>;

const wish = (portal: Wish['portal'], card: CardKind = 'approved', change: Partial<Wish> = {}): Wish => ({
  accountId: ACCOUNTS[0],
  portal,
  lines: [3_333, 3_333, 3_334],
  card,
  key: 'pay',
  reference: 'case',
  ...change,
});

const voided: Return = { operation: 'void', amountCents: null, includeFee: true, key: 'return', actor: 'partner' };
const refund = (amountCents: number | null, includeFee = false, change: Partial<Return> = {}): Return => ({
  operation: 'refund',
  amountCents,
  includeFee,
  key: 'return',
  actor: 'partner',
  ...change,
});

/** Pays, and then does `then` with the payment. */
const paying =
  (portal: Wish['portal'], card: CardKind, then: (outside: Outside, paid: Paid) => Promise<unknown>): Scenario =>
  async (outside) => {
    const { paid } = await outside.pay(wish(portal, card));
    if (paid) await then(outside, paid);
  };

const settled =
  (portal: Wish['portal'], card: CardKind, then: (outside: Outside, paid: Paid) => Promise<unknown>): Scenario =>
  async (outside) => {
    const { paid } = await outside.pay(wish(portal, card));
    outside.settle(portal);
    await outside.world.sim.wait(200_000);
    if (paid) await then(outside, paid);
  };

const checkingOut =
  (portal: Visit['portal'], cards: readonly CardKind[], change: Partial<Visit> = {}): Scenario =>
  async (outside) =>
    void (await checkOut(outside, { portal, lines: [3_333, 3_334], cards, nonce: 'visit-of-the-payer', reference: 'visit', ...change }));

/** A scenario with a notification. The receiver answers 500 during the first `deafMs` after `act`. */
const telling =
  (
    deafMs: number,
    act: (outside: Outside, paid: Paid) => Promise<unknown>,
    then: (outside: Outside) => Promise<void> = async () => undefined,
  ): Scenario =>
  async (outside) => {
    const url = 'https://receiver.example/hook';
    await subscribe(outside, { accountId: ACCOUNTS[0], url, fails: 0, isDeaf: deafMs > 0, pauseMs: null, rotates: false, endsMs: null });
    const { paid } = await outside.pay(wish(NO_FEE));
    if (!paid) return;
    await act(outside, paid);
    await outside.world.sim.wait(deafMs);
    outside.world.receivers.get(url)!.isDeaf = false;
    await then(outside);
  };

/** The scenarios by name, without crash points. */
export const SCENARIOS: Readonly<Record<string, Scenario>> = {
  'create, one leg': async (outside) => void (await outside.pay(wish(COMBINED))),
  'create, two legs': async (outside) => void (await outside.pay(wish(LOWERING))),
  'create without a key': async (outside) => void (await outside.pay(wish(LOWERING, 'approved', { key: null }))),
  'create, twice at once': async (outside) => void (await outside.pay(wish(LOWERING, 'approved', { doubles: true, asksAgain: true }))),
  'create, declined': async (outside) => void (await outside.pay(wish(LOWERING, 'declined', { asksAgain: true }))),
  'create, fee declined': async (outside) => void (await outside.pay(wish(LOWERING, 'feeDeclined'))),
  'create, not processed': async (outside) => void (await outside.pay(wish(COMBINED, 'gatewayError'))),
  'create, answer unreadable': async (outside) => void (await outside.pay(wish(LOWERING, 'unreadable'))),
  'create, nobody can tell, a person decides': async (outside) => {
    await outside.pay(wish(COMBINED, 'cannotTell', { looks: 3 }));
    await outside.decideWhatWaits();
  },
  'create, settled while unknown, a person decides': async (outside) => {
    const paying = outside.pay(wish(COMBINED, 'unreadable', { looks: 5 }));
    await outside.world.sim.wait(20_000);
    outside.settle(COMBINED);
    await paying;
    await outside.decideWhatWaits();
  },
  'create, refused before it began, and again under the same key': async (outside) => {
    const revoked = outside.revoke(LOWERING, 3_000);
    await outside.pay(wish(LOWERING));
    await revoked;
  },
  'two creates of one account': async (outside) => {
    await Promise.all([outside.pay(wish(LOWERING)), outside.pay(wish(LOWERING, 'approved', { key: 'another', reference: 'another', lines: [500] }))]);
  },
  void: paying(LOWERING, 'approved', (outside, paid) => outside.giveBack(paid, voided)),
  'void, one leg': paying(COMBINED, 'approved', (outside, paid) => outside.giveBack(paid, { ...voided, asksAgain: true })),
  'void, rejected, then refund': paying(LOWERING, 'voidRejected', async (outside, paid) => {
    await outside.giveBack(paid, voided);
    await outside.giveBack(paid, refund(null, true, { key: 'refund' }));
  }),
  'void, fee fails once': paying(LOWERING, 'feeVoidFailsOnce', (outside, paid) => outside.giveBack(paid, voided)),
  'refund in part, before settlement': paying(LOWERING, 'approved', (outside, paid) => outside.giveBack(paid, refund(1_000))),
  'refund in part, before settlement, by refund': paying(COMBINED_REFUNDING, 'approved', (outside, paid) => outside.giveBack(paid, refund(1_000))),
  'refund with the fee, before settlement': paying(PLAIN, 'approved', (outside, paid) => outside.giveBack(paid, refund(null, true))),
  'refund with the fee, after settlement': settled(LOWERING, 'approved', (outside, paid) => outside.giveBack(paid, refund(null, true))),
  'refund with the fee, the fee fails once': settled(LOWERING, 'feeRefundFailsOnce', (outside, paid) => outside.giveBack(paid, refund(null, true))),
  'refund, settled without our knowing': paying(REFUNDING, 'approved', async (outside, paid) => {
    outside.settle(REFUNDING);
    await outside.giveBack(paid, refund(null, true));
  }),
  'refunds in parts, one after the other': settled(COMBINED, 'approved', async (outside, paid) => {
    await outside.giveBack(paid, refund(1_000, false, { key: 'first' }));
    await outside.giveBack(paid, refund(2_000, false, { key: 'second' }));
    await outside.giveBack(paid, refund(null, true, { key: 'rest' }));
  }),
  'refunds at once': settled(NO_FEE, 'approved', (outside, paid) =>
    Promise.all([outside.giveBack(paid, refund(1_000, false, { key: 'first' })), outside.giveBack(paid, refund(2_000, false, { key: 'second' }))]),
  ),
  'refund without a key': settled(LOWERING, 'approved', (outside, paid) => outside.giveBack(paid, refund(1_234, false, { key: null }))),
  'staff beside partner': settled(LOWERING, 'approved', (outside, paid) =>
    Promise.all([
      outside.giveBack(paid, refund(1_111, false, { key: null, actor: 'staff' })),
      outside.giveBack(paid, refund(1_111, false, { key: 'partner' })),
    ]),
  ),
  'void beside refund': paying(LOWERING, 'approved', (outside, paid) =>
    Promise.all([outside.giveBack(paid, voided), outside.giveBack(paid, refund(700, false, { key: 'refund' }))]),
  ),
  'dispute during a refund': settled(LOWERING, 'approved', (outside, paid) =>
    Promise.all([outside.dispute(paid, 5_000), outside.giveBack(paid, refund(null))]),
  ),
  'settlement during a refund': paying(LOWERING, 'approved', async (outside, paid) => {
    const refunding = outside.giveBack(paid, refund(null, true));
    await outside.world.sim.wait(300);
    outside.settle(LOWERING);
    await refunding;
  }),
  'rejected settlement during a void': paying(COMBINED, 'settlementRejected', async (outside, paid) => {
    const voiding = outside.giveBack(paid, voided);
    await outside.world.sim.wait(40);
    outside.settle(COMBINED);
    await voiding;
  }),
  checkout: checkingOut(LOWERING, ['approved', 'approved']),
  'checkout, Pay is pressed twice': checkingOut(COMBINED, ['approved'], { twice: 'click' }),
  'checkout, in two windows at once': checkingOut(COMBINED, ['approved'], { twice: 'window' }),
  'checkout, declined, then another card': checkingOut(COMBINED, ['declined', 'approved']),
  'checkout, answer unreadable, then another card': checkingOut(COMBINED, ['unreadable', 'approved']),
  'checkout, answer unreadable, the payer leaves': checkingOut(COMBINED, ['unreadable'], { leaves: true }),
  'checkout, the payer closes the browser': checkingOut(LOWERING, ['approved'], { closes: true }),
  'checkout, cancelled while it pays': checkingOut(COMBINED, ['approved'], { cancels: 'beside' }),
  'checkout, declined, then cancelled': checkingOut(LOWERING, ['feeDeclined'], { cancels: 'afterwards' }),
  'webhook, a refund by staff': telling(0, (outside, paid) => outside.giveBack(paid, refund(1_000, false, { actor: 'staff' }))),
  'webhook, a dispute, taken at the second attempt': telling(60_000, (outside, paid) => outside.dispute(paid)),
  'webhook, held, and sent again by staff': telling(
    900_000,
    (outside, paid) => outside.giveBack(paid, refund(1_000, false, { actor: 'staff' })),
    repairReceivers,
  ),
};

export interface CrashReport {
  readonly scenario: string;
  readonly runs: number;
  readonly points: number;
  readonly failures: readonly { readonly crashes: readonly CrashPoint[]; readonly result: RunResult }[];
}

export const playNamed = (name: string, crashes: readonly CrashPoint[], seams: Seams = {}): Promise<RunResult> => {
  const scenario = SCENARIOS[name];
  if (!scenario) throw new Error(`no such scenario: ${name}`);
  return playScenario(scenario, crashes, seams);
};

const WHEN = ['before', 'after'] as const;

/** Plays a scenario without a crash, and then once for each crash point. */
export async function* singles(name: string, seams: Seams = {}): AsyncGenerator<{ crashes: readonly CrashPoint[]; result: RunResult }> {
  const calm = await playNamed(name, [], seams);
  yield { crashes: [], result: calm };
  for (let index = 1; index <= calm.points.length; index++)
    for (const when of WHEN) {
      const crashes = [{ index, when }];
      yield { crashes, result: await playNamed(name, crashes, seams) };
    }
}

/**
 * Plays pairs of crash points. The second point comes from the run with the first crash, so it may hit a call of recovery. `every`: only each n-th
 * pair is played.
 */
export async function* pairs(name: string, every: number): AsyncGenerator<{ crashes: readonly CrashPoint[]; result: RunResult }> {
  let number = 0;
  const calm = await playNamed(name, []);
  for (let first = 1; first <= calm.points.length; first++)
    for (const when of WHEN) {
      const one: CrashPoint = { index: first, when };
      const { points } = await playNamed(name, [one]);
      for (let second = first + 1; second <= points.length; second++)
        for (const also of WHEN) {
          if (number++ % every !== 0) continue;
          const crashes = [one, { index: second, when: also }];
          yield { crashes, result: await playNamed(name, crashes) };
        }
    }
}

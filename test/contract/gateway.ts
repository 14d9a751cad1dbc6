/**
 * The contract of every `PaymentGateway`, for each adapter and each fake, in tiers by capability. A reference is executed at most once, and `never`
 * is final. No charge returns more than it took. Batches contain our references.
 *
 * Each run prints the tiers of its adapter, and names those that it leaves out.
 */
import { randomBytes } from 'node:crypto';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { crockford } from '#platform';
import {
  CHARGE_SENT_WITHIN_MS,
  type ChargeTxn,
  type Finalized,
  type GatewayAccount,
  type GatewayCapabilities,
  lateAfterDays,
  MAX_CURSOR_CHARACTERS,
  type Op,
  type Outcome,
  type PaymentGateway,
  type PaymentInstrument,
  type Ref,
  type ReferenceCall,
} from '#payments';
import { listedLines } from '../support/listed-lines.js';

export interface GatewayUnderTest {
  readonly gateway: PaymentGateway;
  /** An account without open transactions of other suites. */
  readonly account: GatewayAccount;
  /** The adapter of another account at the same processor. Only with {@link Abilities.namesTransactions}. */
  readonly another?: PaymentGateway;
  /** A card or a token that is approved, new for each call: some tokens work once. */
  approved(): PaymentInstrument;
  declined(): PaymentInstrument;
  /** The last four digits of `approved`. */
  readonly last4: string;
  /** A card whose next charge is held for review. Only with {@link Abilities.holds}. */
  held?(): PaymentInstrument;
  /** Business time in milliseconds since the epoch. */
  now(): number;
  /** Moves business time forward, for the adapter and for the processor. Absent: time cannot be moved. */
  advance?(ms: number): Promise<unknown>;
  /** Settles the open transactions of the account, and moves the time as far as that needs. */
  passBatch(): Promise<unknown>;
  close(): Promise<unknown>;
}

/** Abilities that are not in the capabilities. */
export interface Abilities {
  /** The processor holds charges for review. */
  readonly holds?: true;
  /** The gateway can be asked for a transaction by its own id. */
  readonly namesTransactions?: true;
  /** The gateway voids a whole charge and cannot be asked for a part, so it does not look at the amount. */
  readonly voidsWhole?: true;
}

/** What an adapter can do, beyond what all do. The suite has tests for each, or for its absence. */
export const TIERS = {
  'keeps the answer of each reference': ({ finalize }) => finalize === 'at_once',
  'promises never only after the batch': ({ finalize }) => finalize === 'after_batch',
  'voids until the batch': ({ voids }) => voids === 'until_batch',
  'undoes by refunds only': ({ voids }) => voids === 'none',
  'voids parts': ({ partialVoid }) => partialVoid,
  'refunds before settlement': ({ refundUnsettled }) => refundUnsettled,
} as const satisfies Readonly<Record<string, (capabilities: GatewayCapabilities) => boolean>>;
export type Tier = keyof typeof TIERS;

const CALL_MS = 20_000;
const PARALLEL = 20;
/** How often a reference in flight is asked about. */
const ASKED_AGAIN = 50;
/** Some gateways do not say whether anything is left of a charge. */
const NOTHING_LEFT = ['already_reversed', 'exceeds'];
const soon = () => AbortSignal.timeout(CALL_MS);
export const drawRef = (): Ref => crockford(randomBytes(13), 20);

export const gatewayContract = (
  name: string,
  capabilities: GatewayCapabilities,
  { holds = false, namesTransactions = false, voidsWhole = false }: { readonly [Name in keyof Abilities]?: boolean },
  start: () => Promise<GatewayUnderTest>,
): void => {
  const has = (tier: Tier): boolean => TIERS[tier](capabilities);
  const tiers = (Object.keys(TIERS) as Tier[]).filter(has);
  const absent = (Object.keys(TIERS) as Tier[]).filter((tier) => !has(tier));
  /** Tests of a tier. If the adapter does not have the tier, they are skipped by name. */
  const tier = (wanted: Tier, tests: () => void) => (has(wanted) ? describe(wanted, tests) : describe.skip(wanted, tests));
  const leftOut: string[] = [];
  /** A test of an ability that not every adapter has. If this adapter lacks it, the test is skipped, and its name says why. */
  const testIf = (can: boolean, why: string): ((title: string, run: () => Promise<void>) => void) =>
    can ? test : (title, run) => (leftOut.push(`${title}: ${why}`), test.skip(`${title} (left out: ${why})`, run));

  describe(`the gateway contract: ${name} (${tiers.join(', ')}; not: ${absent.join(', ')})`, () => {
    let under: GatewayUnderTest;
    let gateway: PaymentGateway;
    let account: GatewayAccount;

    beforeAll(async () => {
      under = await start();
      ({ gateway, account } = under);
    });
    afterAll(() => under.close());
    afterAll(() => {
      const lines = [`tiers of ${name}: ${tiers.join(', ')}`, ...[...absent, ...leftOut].map((what) => `  left out: ${what}`)];
      process.stderr.write(`${lines.join('\n')}\n`);
    });

    const begun = (at = under.now()) => ({ leg: 'combined', account, begunAt: new Date(at).toISOString() }) as const;
    const charge = (amountCents: number, ref = drawRef(), instrument = under.approved(), at = under.now()) =>
      gateway.charge({ ...begun(at), ref, amountCents, instrument }, soon());
    const voidIt = (chargeTransactionId: string, amountCents?: number, ref = drawRef(), askedBy: 'void' | 'refund' | 'reversal' = 'void') =>
      gateway.void({ ...begun(), ref, chargeTransactionId, askedBy, ...(amountCents !== undefined && { amountCents }) }, soon());
    const refund = (chargeTransactionId: string, amountCents: number, ref = drawRef()) =>
      gateway.refund({ ...begun(), ref, chargeTransactionId, amountCents, last4: under.last4 }, soon());
    const about = (ref: Ref, op: Op = 'charge', over: Partial<ReferenceCall> = {}): ReferenceCall => ({
      ...begun(),
      ref,
      op,
      amountCents: 1_000,
      chargeTransactionId: null,
      last4: under.last4,
      ...over,
    });
    const finalize = (...asked: Parameters<typeof about>) => gateway.finalize(about(...asked), soon());
    const lookup = (ref: Ref) => gateway.lookup(about(ref), soon());

    const approvedCharge = async (amountCents: number, ref = drawRef()): Promise<ChargeTxn & { ref: Ref }> => {
      const outcome = await charge(amountCents, ref);
      if (outcome.kind !== 'approved') throw new Error(`not approved: ${JSON.stringify(outcome)}`);
      return { ...outcome.txn, ref };
    };
    /** A charge that a refund can return: settled, unless the gateway can do more. */
    const refundableCharge = async (amountCents: number) => {
      const made = await approvedCharge(amountCents);
      if (!capabilities.refundUnsettled) await under.passBatch();
      return made;
    };
    const records = (cursor: string | null = null) => listedLines(gateway, cursor, soon());
    const salesOf = async (ref: Ref) => (await records()).filter((record) => record.ref === ref && record.type === 'sale');
    /** A gateway without voids need not tell a settled charge from another. */
    const settled: unknown = has('undoes by refunds only') ? expect.stringMatching(/^(approved|settled)$/) : 'settled';
    const rejection = (outcome: Outcome<unknown>) => (outcome.kind === 'rejected' ? outcome.why : outcome.kind);

    test('says of itself what the suite was told, and names the days of its gateway', () => {
      expect(gateway.capabilities).toEqual(capabilities);
      expect([under.held !== undefined, gateway.transaction !== undefined]).toEqual([holds, namesTransactions]);
      expect(capabilities.lateAfterDays).toBe(lateAfterDays(account.gateway));
    });

    test('describes its account', async () => {
      const { externalId, name: called, environment, problems } = await gateway.describe(soon());
      expect([typeof externalId, typeof called, environment, problems]).toEqual(['string', 'string', account.environment, []]);
      await expect(gateway.describe(AbortSignal.abort())).rejects.toThrow();
    });

    describe('once per reference', () => {
      test('the same call again charges once', async () => {
        const ref = drawRef();
        const instrument = under.approved();
        const first = await charge(1_000, ref, instrument);
        expect(first.kind).toBe('approved');
        expect(await charge(1_000, ref, instrument)).toEqual(first);
        await under.passBatch();
        expect(await salesOf(ref)).toHaveLength(1);
      });

      test('calls that race under one reference are one charge', async () => {
        const ref = drawRef();
        const instrument = under.approved();
        const outcomes = await Promise.all(Array.from({ length: PARALLEL }, () => charge(1_100, ref, instrument)));
        const approved = outcomes.filter(({ kind }) => kind === 'approved');
        expect(approved.length).toBeGreaterThan(0);
        for (const outcome of approved) expect(outcome).toEqual(approved[0]);
        // A call that meets the running one may not be told its result. It is never a decline.
        for (const { kind } of outcomes) expect(['approved', 'unknown']).toContain(kind);
        await under.passBatch();
        expect(await salesOf(ref)).toHaveLength(1);
      });

      testIf(capabilities.repeatSafeMs.refund > 0, 'it does not promise that a repeated refund is made once')(
        'the same refund again returns the money once',
        async () => {
          const { transactionId } = await refundableCharge(1_000);
          const ref = drawRef();
          const first = await refund(transactionId, 400, ref);
          expect(first.kind).toBe('approved');
          expect(await refund(transactionId, 400, ref)).toEqual(first);
          expect((await refund(transactionId, 600)).kind).toBe('approved');
          expect(NOTHING_LEFT).toContain(rejection(await refund(transactionId, 1)));
        },
      );

      tier('keeps the answer of each reference', () => {
        test('a reference with other parameters is refused and executes nothing', async () => {
          const { ref } = await approvedCharge(1_200);
          expect(['other', 'not_processed', 'unknown']).toContain(rejection(await charge(1_201, ref)));
          await under.passBatch();
          expect((await salesOf(ref)).map(({ grossCents }) => grossCents)).toEqual([1_200]);
        });

        test('a decline never changes', async () => {
          const ref = drawRef();
          const instrument = under.declined();
          const declined = await charge(900, ref, instrument);
          expect(declined.kind).toBe('declined');
          expect(await charge(900, ref, instrument)).toEqual(declined);
        });
      });
    });

    describe('finalize', () => {
      test('finds an execution, as often as it is asked', async () => {
        const { ref, transactionId } = await approvedCharge(1_000);
        for (let round = 0; round < 2; round++)
          expect(await finalize(ref)).toMatchObject({ kind: 'executed', result: { kind: 'approved', txn: { transactionId } } });
      });

      test('finds a decline', async () => {
        const ref = drawRef();
        expect((await charge(1_000, ref, under.declined())).kind).toBe('declined');
        const found = await finalize(ref);
        expect(found).toMatchObject(has('keeps the answer of each reference') ? { kind: 'executed', result: { kind: 'declined' } } : {});
        if (found.kind === 'executed') expect(found.result.kind).toBe('declined');
      });

      test('finds an executed refund', async () => {
        const { transactionId } = await refundableCharge(1_000);
        const ref = drawRef();
        const refunded = await refund(transactionId, 400, ref);
        if (refunded.kind !== 'approved') throw new Error(`not refunded: ${JSON.stringify(refunded)}`);
        expect(await finalize(ref, 'refund', { amountCents: 400, chargeTransactionId: transactionId })).toMatchObject({
          kind: 'executed',
          result: { kind: 'approved', txn: { transactionId: refunded.txn.transactionId } },
        });
      });

      test('finds the reversal of a charge, and says how the money goes back', async () => {
        const { transactionId } = await approvedCharge(1_000);
        const ref = drawRef();
        const undone = await voidIt(transactionId, 1_000, ref, 'reversal');
        if (undone.kind !== 'approved') throw new Error(`not undone: ${JSON.stringify(undone)}`);
        expect(undone.txn.means ?? 'void').toBe(capabilities.voids === 'none' ? 'refund' : 'void');
        expect(await finalize(ref, 'reversal', { chargeTransactionId: transactionId })).toMatchObject({
          kind: 'executed',
          result: { kind: 'approved', txn: { transactionId: undone.txn.transactionId } },
        });
        // The same call again undoes it once.
        // A gateway may add that it was undone before.
        expect(await voidIt(transactionId, 1_000, ref, 'reversal')).toMatchObject(undone);
      });

      test('the reversal of a charge that has no transaction will never be executed', async () => {
        expect(await finalize(drawRef(), 'reversal')).toEqual({ kind: 'never' });
      });

      tier('keeps the answer of each reference', () => {
        test('never is a promise about the future, for every operation', async () => {
          const { transactionId } = await refundableCharge(1_000);
          const [chargeRef, refundRef] = [drawRef(), drawRef()];
          const refundAsked = { amountCents: 400, chargeTransactionId: transactionId };
          expect(await finalize(chargeRef)).toEqual({ kind: 'never' });
          expect(await finalize(refundRef, 'refund', refundAsked)).toEqual({ kind: 'never' });
          expect(rejection(await charge(1_000, chargeRef))).toBe('finalised');
          expect(rejection(await refund(transactionId, 400, refundRef))).toBe('finalised');
          expect(await finalize(chargeRef)).toEqual({ kind: 'never' });
          expect(await finalize(refundRef, 'refund', refundAsked)).toEqual({ kind: 'never' });
          expect(await lookup(chargeRef)).toEqual({ found: false });
          expect((await refund(transactionId, 1_000)).kind).toBe('approved');
        });

        test('a charge and a finalize that race agree', async () => {
          const pairs = await Promise.all(
            Array.from({ length: PARALLEL }, async (_, index) => {
              const ref = drawRef();
              const calls = [() => charge(1_000, ref), () => finalize(ref)] as const;
              const [outcome, finalized] =
                index % 2 === 0
                  ? await Promise.all([calls[0](), calls[1]()])
                  : await Promise.all([calls[1](), calls[0]()]).then(([second, first]) => [first, second] as const);
              return { ref, outcome, finalized };
            }),
          );
          for (const { ref, outcome, finalized } of pairs) {
            let decided: Finalized<unknown> = finalized;
            for (let asked = 0; decided.kind === 'cannot_tell' && asked < ASKED_AGAIN; asked++) decided = await finalize(ref);
            if (decided.kind === 'never') expect(outcome.kind).not.toBe('approved');
            else if (outcome.kind === 'approved') expect(decided).toMatchObject({ kind: 'executed', result: { kind: 'approved' } });
          }
        });
      });

      tier('promises never only after the batch', () => {
        test('a reference without a trace is not visible until its batch has closed, and never after that', async () => {
          const ref = drawRef();
          const asked = about(ref);
          const before = await gateway.finalize(asked, soon());
          expect(before).toMatchObject({ kind: 'cannot_tell', why: 'not_visible', until: expect.stringMatching(/^\d{4}-/) });
          if (before.kind !== 'cannot_tell' || before.until === undefined || !under.advance) throw new Error('the time cannot be moved');
          await under.advance(Math.max(0, Date.parse(before.until) - under.now()) + 1_000);
          await under.passBatch();
          expect(await gateway.finalize(asked, soon())).toEqual({ kind: 'never' });
          // The promise rests on this: no call of the attempt is sent so late.
          expect(await charge(1_000, ref, under.approved(), Date.parse(asked.begunAt))).toMatchObject({ kind: 'not_processed', answered: false });
        });
      });
    });

    describe('undoing a charge', () => {
      tier('voids until the batch', () => {
        test('a void takes all that remains, and is not followed by another, or by a settlement', async () => {
          const { ref, transactionId } = await approvedCharge(1_000);
          expect((await voidIt(transactionId, 1_000)).kind).toBe('approved');
          expect(['already_reversed', 'approved']).toContain(rejection(await voidIt(transactionId, 1_000)));
          expect(['already_reversed', 'not_settled']).toContain(rejection(await refund(transactionId, 1)));
          expect(await lookup(ref)).toMatchObject({ found: true, state: 'voided', transactionId });
          await under.passBatch();
          expect(await salesOf(ref)).toEqual([]);
        });

        test('voids that race under one reference are one void', async () => {
          const { ref, transactionId } = await approvedCharge(1_000);
          const voidRef = drawRef();
          const outcomes = await Promise.all(Array.from({ length: PARALLEL }, () => voidIt(transactionId, 1_000, voidRef)));
          for (const outcome of outcomes) expect(outcome).toMatchObject({ kind: 'approved', txn: { transactionId: expect.any(String) } });
          await under.passBatch();
          expect(await salesOf(ref)).toEqual([]);
        });

        test('a settled charge is not voided', async () => {
          const { transactionId } = await approvedCharge(1_000);
          await under.passBatch();
          expect(rejection(await voidIt(transactionId, 1_000))).toBe('already_settled');
        });

        testIf(!has('voids parts') && !voidsWhole, voidsWhole ? 'it voids the whole, whatever is asked for' : 'it voids parts')(
          'a void of a part is refused',
          async () => {
            const { transactionId } = await approvedCharge(1_000);
            expect(rejection(await voidIt(transactionId, 400))).toBe('unsupported');
          },
        );
      });

      tier('voids parts', () => {
        test('a void of a part lowers the amount that settles', async () => {
          const { ref, transactionId } = await approvedCharge(1_000);
          expect((await voidIt(transactionId, 400)).kind).toBe('approved');
          expect(rejection(await voidIt(transactionId, 601))).toBe('exceeds');
          expect(await lookup(ref)).toMatchObject({ found: true, state: 'approved' });
          await under.passBatch();
          expect((await salesOf(ref)).map(({ grossCents }) => grossCents)).toEqual([600]);
          expect(rejection(await refund(transactionId, 601))).toBe('exceeds');
          expect((await refund(transactionId, 600)).kind).toBe('approved');
        });

        test('a refused void never changes, and finalize finds it', async () => {
          const { transactionId } = await approvedCharge(900);
          const ref = drawRef();
          const refused = await voidIt(transactionId, 901, ref);
          expect(rejection(refused)).toBe('exceeds');
          expect(await voidIt(transactionId, 901, ref)).toEqual(refused);
          expect(await finalize(ref, 'void', { amountCents: 901, chargeTransactionId: transactionId })).toEqual({
            kind: 'executed',
            result: refused,
          });
          const never = drawRef();
          expect(await finalize(never, 'void', { amountCents: 900, chargeTransactionId: transactionId })).toEqual({ kind: 'never' });
          expect(rejection(await voidIt(transactionId, 900, never))).toBe('finalised');
        });

        test('voids that race never take more than there is', async () => {
          const { transactionId } = await approvedCharge(1_000);
          const outcomes = await Promise.all(Array.from({ length: PARALLEL }, () => voidIt(transactionId, 300)));
          expect(outcomes.filter(({ kind }) => kind === 'approved')).toHaveLength(3);
          expect((await voidIt(transactionId, 100)).kind).toBe('approved');
        });
      });

      tier('undoes by refunds only', () => {
        test('a void that a partner asks for is refused as settled, at once; a refund works', async () => {
          const { transactionId } = await approvedCharge(1_000);
          for (const askedBy of ['void', 'refund'] as const)
            expect(rejection(await voidIt(transactionId, 1_000, drawRef(), askedBy))).toBe('already_settled');
          expect((await refund(transactionId, 1_000)).kind).toBe('approved');
        });
      });

      test('a charge that does not exist is neither undone nor refunded', async () => {
        expect(rejection(await voidIt('404404404404', 1_000, drawRef(), 'reversal'))).toBe('not_found');
        expect(rejection(await refund('404404404404', 1))).toBe('not_found');
      });

      testIf(holds, 'the processor holds no charges')('a held charge is shown as held, and can be undone', async () => {
        const ref = drawRef();
        const held = await charge(1_000, ref, under.held!());
        if (held.kind !== 'held') throw new Error(`not held: ${JSON.stringify(held)}`);
        expect(await lookup(ref)).toMatchObject({ found: true, state: 'held' });
        expect(await finalize(ref)).toMatchObject({ kind: 'executed', result: { kind: 'held', transactionId: held.transactionId } });
        expect((await voidIt(held.transactionId, 1_000, drawRef(), 'reversal')).kind).toBe('approved');
        await under.passBatch();
        expect((await salesOf(ref)).filter(({ accepted }) => accepted)).toEqual([]);
      });
    });

    describe('refunds', () => {
      test('only a settled charge is refunded, unless the gateway can do more', async () => {
        const { transactionId } = await approvedCharge(1_000);
        const early = await refund(transactionId, 400);
        expect(rejection(early)).toBe(has('refunds before settlement') ? 'approved' : 'not_settled');
      });

      test('refunds in parts, up to the amount', async () => {
        const { ref, transactionId } = await approvedCharge(1_000);
        await under.passBatch();
        expect((await refund(transactionId, 400)).kind).toBe('approved');
        expect(rejection(await refund(transactionId, 601))).toBe('exceeds');
        expect((await refund(transactionId, 600)).kind).toBe('approved');
        expect(NOTHING_LEFT).toContain(rejection(await refund(transactionId, 1)));
        // A gateway without voids may show a charge that was refunded as a whole as undone.
        const undone: unknown = has('undoes by refunds only') ? expect.stringMatching(/^(approved|settled|voided)$/) : 'settled';
        expect(await lookup(ref)).toMatchObject({ found: true, state: undone, transactionId });
      });

      test('refunds that race never return more than there is', async () => {
        const { transactionId } = await refundableCharge(1_000);
        const outcomes = await Promise.all(Array.from({ length: PARALLEL }, () => refund(transactionId, 300)));
        expect(outcomes.filter(({ kind }) => kind === 'approved')).toHaveLength(3);
      });
    });

    describe('look-up', () => {
      test('knows nothing of a reference that was never used', async () => {
        expect(await lookup(drawRef())).toEqual({ found: false });
      });

      test('shows approved and settled', async () => {
        const { ref, transactionId } = await approvedCharge(1_000);
        expect(await lookup(ref)).toMatchObject({ found: true, state: 'approved', transactionId, amountCents: 1_000 });
        await under.passBatch();
        expect(await salesOf(ref)).toHaveLength(1);
        expect(await lookup(ref)).toMatchObject({ found: true, state: settled, transactionId, amountCents: 1_000 });
      });
    });

    describe('a transaction by its own id', () => {
      const testNamed = testIf(namesTransactions, 'it has no such question');
      testNamed('shows a charge and its refund with our references, amount, state and charge', async () => {
        const named = (transactionId: string) => gateway.transaction!(transactionId, soon());
        const { ref, transactionId } = await approvedCharge(1_000);
        const charged = { transactionId, ref, op: 'charge', state: 'approved', amountCents: 1_000, chargeTransactionId: null };
        expect(await named(transactionId)).toEqual(charged);
        await under.passBatch();
        expect(await named(transactionId)).toEqual({ ...charged, state: settled });
        const refundRef = drawRef();
        const refunded = await refund(transactionId, 400, refundRef);
        if (refunded.kind !== 'approved') throw new Error('not refunded');
        expect(await named(refunded.txn.transactionId)).toMatchObject({
          transactionId: refunded.txn.transactionId,
          ref: refundRef,
          op: 'refund',
          amountCents: 400,
          chargeTransactionId: transactionId,
        });
      });

      testNamed('knows nothing of an id that was never given, or of another account, and throws if it cannot ask', async () => {
        const named = gateway.transaction!.bind(gateway);
        expect(await named('404404404404', soon())).toBeNull();
        expect(await named('no id / of any gateway', soon())).toBeNull();
        const { transactionId } = await approvedCharge(1_000);
        expect(await under.another!.transaction!(transactionId, soon())).toBeNull();
        await expect(named(transactionId, AbortSignal.abort())).rejects.toThrow();
      });
    });

    describe('settlements', () => {
      test('name our references, sales and refunds, oldest batch first, after the cursor', async () => {
        await under.passBatch();
        const lastCursor = async (from: string | null) => {
          let last = from;
          for await (const { cursor, lines } of gateway.settlements(from, soon())) {
            for await (const _ of lines);
            expect(cursor.length).toBeLessThanOrEqual(MAX_CURSOR_CHARACTERS);
            last = cursor;
          }
          return last;
        };
        const before = await lastCursor(null);
        const first = await approvedCharge(2_000);
        const second = await approvedCharge(3_000);
        await under.passBatch();
        const between = await lastCursor(before);
        const refundRef = drawRef();
        expect((await refund(first.transactionId, 500, refundRef)).kind).toBe('approved');
        const third = await approvedCharge(4_000);
        await under.passBatch();

        const ours = new Set([first.ref, second.ref, third.ref, refundRef]);
        const shown = async (cursor: string | null) =>
          (await records(cursor)).flatMap(({ ref, type, grossCents }) =>
            ref !== undefined && ours.has(ref) && type !== 'fee' ? [{ ref, type, grossCents }] : [],
          );
        const [early, late] = [
          [
            { ref: first.ref, type: 'sale', grossCents: 2_000 },
            { ref: second.ref, type: 'sale', grossCents: 3_000 },
          ],
          [
            { ref: refundRef, type: 'refund', grossCents: -500 },
            { ref: third.ref, type: 'sale', grossCents: 4_000 },
          ],
        ];
        const all = await shown(before);
        expect(all).toHaveLength(4);
        expect(all.slice(0, 2)).toEqual(expect.arrayContaining(early));
        expect(all.slice(2)).toEqual(expect.arrayContaining(late));
        // A gateway may list the batches of the last days again.
        expect(await shown(between)).toEqual(expect.arrayContaining(late));
        for (const record of await records(before)) {
          expect(record.netCents).toBe(record.grossCents - record.feeCents);
          expect(record.closedAt).toMatch(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
        }
      });
    });

    describe('deadlines', () => {
      test('a call after its deadline sends nothing', async () => {
        const ref = drawRef();
        const call = { ...begun(), ref, amountCents: 1_000, instrument: under.approved() };
        expect(await gateway.charge(call, AbortSignal.abort())).toMatchObject({ kind: 'not_processed', answered: false });
        expect(await lookup(ref)).toEqual({ found: false });
      });

      test('a charge is not sent a minute after its intent', async () => {
        const ref = drawRef();
        expect(await charge(1_000, ref, under.approved(), under.now() - CHARGE_SENT_WITHIN_MS - 1_000)).toMatchObject({
          kind: 'not_processed',
          answered: false,
        });
        expect(await lookup(ref)).toEqual({ found: false });
      });

      const lateCall = async () => {
        const { transactionId } = await approvedCharge(1_000);
        const notAfter = new Date(under.now() - 1_000).toISOString();
        return { ...begun(), ref: drawRef(), chargeTransactionId: transactionId, amountCents: 1_000, notAfter };
      };
      test('a refund is not sent after the end of its request', async () => {
        const refund = gateway.refund({ ...(await lateCall()), last4: under.last4 }, soon());
        expect(await refund).toMatchObject({ kind: 'not_processed', answered: false });
      });

      tier('voids until the batch', () => {
        test('a void is not sent after the end of its request', async () => {
          const voided = gateway.void({ ...(await lateCall()), askedBy: 'void' }, soon());
          expect(await voided).toMatchObject({ kind: 'not_processed', answered: false });
        });
      });

      test('finalize that cannot ask cannot tell, and does not throw', async () => {
        // An earlier look through the lists may say that there is no trace.
        expect(await gateway.finalize(about(drawRef()), AbortSignal.abort())).toMatchObject({
          kind: 'cannot_tell',
          why: expect.stringMatching(/^(unreachable|not_visible)$/),
        });
      });
    });
  });
};

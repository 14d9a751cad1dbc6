/**
 * The contract of every `PaymentGateway`, for each adapter and each fake. A reference is executed at most once, and `never` is final. No charge
 * returns more than it took. Batches contain our references.
 */
import { randomBytes } from 'node:crypto';
import { afterAll, beforeAll, describe, expect, test } from '@jest/globals';
import { crockford } from '#platform';
import type { ChargeTxn, GatewayAccount, Outcome, PaymentGateway, PaymentInstrument, Ref, SettlementRecord } from '#payments';

export interface GatewayUnderTest {
  readonly gateway: PaymentGateway;
  /** An account without open transactions of other suites. */
  readonly account: GatewayAccount;
  readonly approved: PaymentInstrument;
  readonly declined: PaymentInstrument;
  /** True: the gateway shows a transaction by its own id. */
  readonly namesTransactions: boolean;
  /** Settles the open transactions of the account. */
  closeBatch(): Promise<unknown>;
  close(): Promise<unknown>;
}

const CALL_MS = 20_000;
const PARALLEL = 20;
const soon = () => AbortSignal.timeout(CALL_MS);
export const drawRef = (): Ref => crockford(randomBytes(13), 20);

export const gatewayContract = (name: string, start: () => Promise<GatewayUnderTest>): void => {
  describe(`the gateway contract: ${name}`, () => {
    let under: GatewayUnderTest;
    let gateway: PaymentGateway;
    let account: GatewayAccount;

    beforeAll(async () => {
      under = await start();
      ({ gateway, account } = under);
    });
    afterAll(() => under.close());

    const charge = (amountCents: number, ref = drawRef(), instrument = under.approved) =>
      gateway.charge({ ref, leg: 'principal', account, amountCents, instrument }, soon());
    const voidIt = (chargeTransactionId: string, amountCents?: number, ref = drawRef()) =>
      gateway.void(
        { ref, leg: 'principal', account, chargeTransactionId, askedBy: 'void', ...(amountCents !== undefined && { amountCents }) },
        soon(),
      );
    const refund = (chargeTransactionId: string, amountCents: number, ref = drawRef()) =>
      gateway.refund({ ref, leg: 'principal', account, chargeTransactionId, amountCents }, soon());
    const finalize = (ref: Ref, op: 'charge' | 'void' | 'refund' | 'reversal' = 'charge') => gateway.finalize({ ref, account, op }, soon());
    const lookup = (ref: Ref) => gateway.lookup({ ref, account, op: 'charge' }, soon());

    const approvedCharge = async (amountCents: number, ref = drawRef()): Promise<ChargeTxn & { ref: Ref }> => {
      const outcome = await charge(amountCents, ref);
      if (outcome.kind !== 'approved') throw new Error(`not approved: ${JSON.stringify(outcome)}`);
      return { ...outcome.txn, ref };
    };
    const records = async (cursor: string | null = null): Promise<SettlementRecord[]> => {
      const all: SettlementRecord[] = [];
      for await (const record of gateway.settlements(account, cursor, soon())) all.push(record);
      return all;
    };
    const settledSales = async (ref: Ref) => (await records()).filter((record) => record.ref === ref && record.type === 'sale');
    const rejection = (outcome: Outcome<unknown>) => (outcome.kind === 'rejected' ? outcome.why : outcome.kind);

    describe('once per reference', () => {
      test('the same call again is answered the same, and charges once', async () => {
        const ref = drawRef();
        const first = await charge(1_000, ref);
        expect(first.kind).toBe('approved');
        expect(await charge(1_000, ref)).toEqual(first);
        await under.closeBatch();
        expect(await settledSales(ref)).toHaveLength(1);
      });

      test('calls that race under one reference are one charge', async () => {
        const ref = drawRef();
        const outcomes = await Promise.all(Array.from({ length: PARALLEL }, () => charge(1_100, ref)));
        expect(outcomes[0]!.kind).toBe('approved');
        for (const outcome of outcomes) expect(outcome).toEqual(outcomes[0]);
        await under.closeBatch();
        expect(await settledSales(ref)).toHaveLength(1);
      });

      test('a reference with other parameters is refused and executes nothing', async () => {
        const { ref } = await approvedCharge(1_200);
        expect(rejection(await charge(1_201, ref))).toBe('other');
        await under.closeBatch();
        expect((await settledSales(ref)).map(({ grossCents }) => grossCents)).toEqual([1_200]);
      });

      test('a decline and a refused reversal never change', async () => {
        const ref = drawRef();
        const declined = await charge(900, ref, under.declined);
        expect(declined.kind).toBe('declined');
        expect(await charge(900, ref, under.declined)).toEqual(declined);

        const { transactionId } = await approvedCharge(900);
        const voidRef = drawRef();
        const tooMuch = await voidIt(transactionId, 901, voidRef);
        expect(rejection(tooMuch)).toBe('exceeds');
        expect(await voidIt(transactionId, 901, voidRef)).toEqual(tooMuch);
      });

      test('voids that race under one reference are one void', async () => {
        const { transactionId } = await approvedCharge(1_000);
        const ref = drawRef();
        const outcomes = await Promise.all(Array.from({ length: PARALLEL }, () => voidIt(transactionId, undefined, ref)));
        expect(outcomes[0]!.kind).toBe('approved');
        for (const outcome of outcomes) expect(outcome).toEqual(outcomes[0]);
      });
    });

    describe('finalize', () => {
      test('finds an execution, as often as it is asked', async () => {
        const ref = drawRef();
        const outcome = await charge(1_000, ref);
        expect(await finalize(ref)).toEqual({ kind: 'executed', result: outcome });
        expect(await finalize(ref)).toEqual({ kind: 'executed', result: outcome });
        const declinedRef = drawRef();
        const declined = await charge(1_000, declinedRef, under.declined);
        expect(await finalize(declinedRef)).toEqual({ kind: 'executed', result: declined });
      });

      test('finds an executed reversal, and a refused one', async () => {
        const { transactionId } = await approvedCharge(1_000);
        const voidRef = drawRef();
        const voided = await voidIt(transactionId, undefined, voidRef);
        expect(await finalize(voidRef, 'void')).toEqual({ kind: 'executed', result: voided });
        expect(await finalize(voidRef, 'reversal')).toEqual({ kind: 'executed', result: voided });
        const refusedRef = drawRef();
        const refused = await voidIt(transactionId, undefined, refusedRef);
        expect(rejection(refused)).toBe('already_reversed');
        expect(await finalize(refusedRef, 'void')).toEqual({ kind: 'executed', result: refused });
      });

      test('never is a promise about the future, for every operation', async () => {
        const { transactionId } = await approvedCharge(1_000);
        const [chargeRef, voidRef, refundRef] = [drawRef(), drawRef(), drawRef()];
        expect(await finalize(chargeRef)).toEqual({ kind: 'never' });
        expect(await finalize(voidRef, 'void')).toEqual({ kind: 'never' });
        expect(await finalize(refundRef, 'refund')).toEqual({ kind: 'never' });
        expect(rejection(await charge(1_000, chargeRef))).toBe('finalised');
        expect(rejection(await voidIt(transactionId, undefined, voidRef))).toBe('finalised');
        expect(rejection(await refund(transactionId, 1_000, refundRef))).toBe('finalised');
        expect(await finalize(chargeRef)).toEqual({ kind: 'never' });
        expect(await lookup(chargeRef)).toEqual({ found: false });
        expect((await voidIt(transactionId)).kind).toBe('approved');
      });

      test('a charge and a finalize that race agree', async () => {
        const pairs = await Promise.all(
          Array.from({ length: PARALLEL }, async (_, index) => {
            const ref = drawRef();
            const calls = [() => charge(1_300, ref), () => finalize(ref)] as const;
            const [outcome, finalized] =
              index % 2 === 0
                ? await Promise.all([calls[0](), calls[1]()])
                : await Promise.all([calls[1](), calls[0]()]).then(([second, first]) => [first, second] as const);
            return { outcome, finalized };
          }),
        );
        for (const { outcome, finalized } of pairs) {
          if (finalized.kind === 'never') expect(rejection(outcome)).toBe('finalised');
          else expect(finalized).toEqual({ kind: 'executed', result: outcome });
        }
      });
    });

    describe('voids', () => {
      test('a void takes all that remains, and is not followed by another, or by a settlement', async () => {
        const { ref, transactionId } = await approvedCharge(1_000);
        expect((await voidIt(transactionId)).kind).toBe('approved');
        expect(rejection(await voidIt(transactionId))).toBe('already_reversed');
        expect(rejection(await refund(transactionId, 1))).toBe('already_reversed');
        expect(await lookup(ref)).toMatchObject({ found: true, state: 'voided', transactionId });
        await under.closeBatch();
        expect(await settledSales(ref)).toEqual([]);
      });

      test('a void of a part lowers the amount that settles', async () => {
        const { ref, transactionId } = await approvedCharge(1_000);
        const part = await voidIt(transactionId, 400);
        if (!gateway.capabilities.partialVoid) return expect(rejection(part)).toBe('unsupported');
        expect(part.kind).toBe('approved');
        expect(rejection(await voidIt(transactionId, 601))).toBe('exceeds');
        expect(await lookup(ref)).toMatchObject({ found: true, state: 'approved' });
        await under.closeBatch();
        expect((await settledSales(ref)).map(({ grossCents }) => grossCents)).toEqual([600]);
        expect(rejection(await refund(transactionId, 601))).toBe('exceeds');
        expect((await refund(transactionId, 600)).kind).toBe('approved');
      });

      test('voids that race never take more than there is', async () => {
        if (!gateway.capabilities.partialVoid) return;
        const { transactionId } = await approvedCharge(1_000);
        const outcomes = await Promise.all(Array.from({ length: PARALLEL }, () => voidIt(transactionId, 300)));
        expect(outcomes.filter(({ kind }) => kind === 'approved')).toHaveLength(3);
        expect((await voidIt(transactionId, 100)).kind).toBe('approved');
      });

      test('a settled charge is not voided', async () => {
        const { transactionId } = await approvedCharge(1_000);
        await under.closeBatch();
        expect(rejection(await voidIt(transactionId))).toBe('already_settled');
      });

      test('a charge that does not exist is neither voided nor refunded', async () => {
        expect(rejection(await voidIt('nosuchcharge'))).toBe('not_found');
        expect(rejection(await refund('nosuchcharge', 1))).toBe('not_found');
      });
    });

    describe('refunds', () => {
      test('only a settled charge is refunded, unless the gateway can do more', async () => {
        const { transactionId } = await approvedCharge(1_000);
        const early = await refund(transactionId, 400);
        expect(rejection(early)).toBe(gateway.capabilities.refundUnsettled ? 'approved' : 'not_settled');
      });

      test('refunds in parts, up to the amount', async () => {
        const { ref, transactionId } = await approvedCharge(1_000);
        await under.closeBatch();
        expect((await refund(transactionId, 400)).kind).toBe('approved');
        expect(rejection(await refund(transactionId, 601))).toBe('exceeds');
        expect((await refund(transactionId, 600)).kind).toBe('approved');
        expect(rejection(await refund(transactionId, 1))).toBe('already_reversed');
        expect(await lookup(ref)).toMatchObject({ found: true, state: 'settled', transactionId });
      });

      test('refunds that race never return more than there is', async () => {
        const { transactionId } = await approvedCharge(1_000);
        await under.closeBatch();
        const outcomes = await Promise.all(Array.from({ length: PARALLEL }, () => refund(transactionId, 300)));
        expect(outcomes.filter(({ kind }) => kind === 'approved')).toHaveLength(3);
      });
    });

    describe('look-up', () => {
      test('knows nothing of a reference that was never used', async () => {
        expect(await lookup(drawRef())).toEqual({ found: false });
      });

      test('shows approved, declined and settled', async () => {
        const { ref, transactionId } = await approvedCharge(1_000);
        expect(await lookup(ref)).toMatchObject({ found: true, state: 'approved', transactionId, amountCents: 1_000 });
        const declinedRef = drawRef();
        await charge(700, declinedRef, under.declined);
        expect(await lookup(declinedRef)).toMatchObject({ found: true, state: 'declined' });
        await under.closeBatch();
        const [sale] = await settledSales(ref);
        expect(await lookup(ref)).toMatchObject({ found: true, state: 'settled', transactionId, amountCents: 1_000, batchId: sale!.batchId });
      });
    });

    describe('a transaction by its own id', () => {
      test('shows a charge and its refund with our references, amount, state and charge', async () => {
        if (!under.namesTransactions) return void expect('transaction' in gateway).toBe(false);
        const named = (transactionId: string) => gateway.transaction!(account, transactionId, soon());
        const { ref, transactionId } = await approvedCharge(1_000);
        const charged = { transactionId, ref, op: 'charge', state: 'approved', amountCents: 1_000, chargeTransactionId: null };
        expect(await named(transactionId)).toEqual(charged);
        await under.closeBatch();
        expect(await named(transactionId)).toEqual({ ...charged, state: 'settled' });
        const refundRef = drawRef();
        const refunded = await refund(transactionId, 400, refundRef);
        if (refunded.kind !== 'approved') throw new Error('not refunded');
        const returned = {
          transactionId: refunded.txn.transactionId,
          ref: refundRef,
          op: 'refund',
          amountCents: 400,
          chargeTransactionId: transactionId,
        };
        expect(await named(refunded.txn.transactionId)).toMatchObject(returned);
        const voided = await approvedCharge(1_000);
        expect((await voidIt(voided.transactionId)).kind).toBe('approved');
        expect(await named(voided.transactionId)).toMatchObject({ ref: voided.ref, op: 'charge', state: 'voided' });
      });

      test('knows nothing of an id that was never given, or of another account, and throws if it cannot ask', async () => {
        if (!under.namesTransactions) return void expect('transaction' in gateway).toBe(false);
        expect(await gateway.transaction!(account, 'nosuchtransaction', soon())).toBeNull();
        expect(await gateway.transaction!(account, 'no id / of any gateway', soon())).toBeNull();
        const { transactionId } = await approvedCharge(1_000);
        expect(await gateway.transaction!({ ...account, merchantAccount: 'another' }, transactionId, soon())).toBeNull();
        await expect(gateway.transaction!(account, transactionId, AbortSignal.abort())).rejects.toThrow();
      });
    });

    describe('settlements', () => {
      test('name our references, sales and refunds, oldest batch first, after the cursor', async () => {
        await under.closeBatch();
        const before = (await records()).at(-1)?.batchId ?? null;
        const first = await approvedCharge(2_000);
        const second = await approvedCharge(3_000);
        await under.closeBatch();
        const refundRef = drawRef();
        expect((await refund(first.transactionId, 500, refundRef)).kind).toBe('approved');
        const third = await approvedCharge(4_000);
        await under.closeBatch();

        const fresh = await records(before);
        expect(fresh.map(({ ref, type, grossCents }) => ({ ref, type, grossCents }))).toEqual([
          { ref: first.ref, type: 'sale', grossCents: 2_000 },
          { ref: second.ref, type: 'sale', grossCents: 3_000 },
          { ref: refundRef, type: 'refund', grossCents: -500 },
          { ref: third.ref, type: 'sale', grossCents: 4_000 },
        ]);
        for (const record of fresh) {
          expect(record.accepted).toBe(true);
          expect(record.netCents).toBe(record.grossCents - record.feeCents);
          expect(record.closedAt).toMatch(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
        }
        const [batchOfFirst, batchOfThird] = [fresh[0]!.batchId, fresh[3]!.batchId];
        expect(new Set(fresh.map(({ batchId }) => batchId))).toEqual(new Set([batchOfFirst, batchOfThird]));
        expect((await records(batchOfFirst)).map(({ ref }) => ref)).toEqual([refundRef, third.ref]);
        expect(await records(batchOfThird)).toEqual([]);
      });
    });

    describe('deadlines', () => {
      test('a call after its deadline sends nothing', async () => {
        const ref = drawRef();
        const call = { ref, leg: 'principal', account, amountCents: 1_000, instrument: under.approved } as const;
        expect(await gateway.charge(call, AbortSignal.abort())).toMatchObject({ kind: 'not_processed', answered: false });
        expect(await finalize(ref)).toEqual({ kind: 'never' });
      });

      test('finalize that cannot ask cannot tell, and does not throw', async () => {
        expect(await gateway.finalize({ ref: drawRef(), account, op: 'charge' }, AbortSignal.abort())).toEqual({ kind: 'cannot_tell' });
      });
    });
  });
};

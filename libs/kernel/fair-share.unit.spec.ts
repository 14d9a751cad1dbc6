/** Slots are shared among accounts (C65): no account takes the slots of the others, and an account that is alone loses nothing. */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { FairShare, type Lane, type SlotRequest } from './index.js';

const LIMITS = { slots: 20, waitingAlone: 100, waitingShared: 10 };
const of = (accountId: string, lane: Lane = 'partner', slots = 1): SlotRequest => ({ accountId, lane, slots });
const many = (count: number, accountId: string, lane: Lane = 'partner') => Array.from({ length: count }, () => of(accountId, lane));
const enter = (share: FairShare<SlotRequest>, requests: readonly SlotRequest[]) => requests.map((request) => share.enter(request));
const count = (entries: readonly string[], which: string) => entries.filter((entry) => entry === which).length;

describe('an account that is alone', () => {
  test('gets four fifths of the slots, and its payers’ pages two thirds', () => {
    expect(count(enter(new FairShare(LIMITS), many(30, 'A')), 'admitted')).toBe(16);
    expect(count(enter(new FairShare(LIMITS), many(30, 'A', 'payer')), 'admitted')).toBe(13);
  });

  test('may have far more waiting than its share, as long as no other account has work', () => {
    const share = new FairShare(LIMITS);
    expect(count(enter(share, many(16 + 100, 'A')), 'refused')).toBe(0);
    expect(share.enter(of('A'))).toBe('refused');
  });

  test('is refused beyond its share as soon as another account has work; the other one is not', () => {
    const share = new FairShare(LIMITS);
    enter(share, many(16 + 20, 'A'));
    const other = of('B');
    expect(share.enter(other)).toBe('admitted');
    expect(share.enter(of('A'))).toBe('refused');
    expect(count(enter(share, many(7, 'B')), 'refused')).toBe(0);
    share.leave(other);
  });
});

describe('an account that has been alone for some time', () => {
  const alone = () => {
    const share = new FairShare({ ...LIMITS, slotsAlone: 40 });
    share.isAlone = true;
    return share;
  };

  test('gets four fifths of more slots, but not for requests of several slots', () => {
    expect(count(enter(alone(), many(50, 'A')), 'admitted')).toBe(32);
    const lists = Array.from({ length: 50 }, () => of('A', 'partner', 2));
    expect(count(enter(alone(), lists), 'admitted')).toBe(count(enter(new FairShare(LIMITS), lists), 'admitted'));
  });

  test('is not alone while another account holds a slot', () => {
    const share = alone();
    enter(share, [of('B')]);
    expect(count(enter(share, many(50, 'A')), 'admitted')).toBe(15);
  });

  test('gets no further slot once another account has work, until it keeps its share again', () => {
    const share = alone();
    const calls = many(33, 'A');
    enter(share, calls);
    share.isAlone = false;
    expect(enter(share, [of('B'), of('B')])).toEqual(['admitted', 'waiting']);
    const admitted: SlotRequest[] = [];
    // 32 requests of A and one of B are inside. The second one of B fits when 18 are left.
    for (const call of calls.slice(0, 14)) admitted.push(...share.leave(call));
    expect(admitted).toEqual([]);
    expect(share.leave(calls[14]!).map(({ accountId }) => accountId)).toEqual(['B']);
  });
});

test('whatever one account does, the next account is admitted at once', () =>
  fc.assert(
    fc.property(
      fc.array(fc.record({ lane: fc.constantFrom<Lane>('reversal', 'partner', 'payer'), slots: fc.integer({ min: 1, max: 17 }) }), {
        maxLength: 60,
      }),
      fc.boolean(),
      (requests, isAlone) => {
        const share = new FairShare({ ...LIMITS, slots: 64, slotsAlone: 80 });
        share.isAlone = isAlone;
        for (const { lane, slots } of requests) share.enter(of('A', lane, slots));
        share.isAlone = false;
        expect(share.enter(of('B'))).toBe('admitted');
      },
    ),
  ));

test('the pages of an account’s payers leave slots for its API, and the two take turns', () => {
  const share = new FairShare(LIMITS);
  const pages = many(30, 'A', 'payer');
  enter(share, pages);
  expect(share.enter(of('A'))).toBe('admitted');
  const [calls, served] = [many(10, 'A'), [] as Lane[]];
  enter(share, calls);
  for (let left = 0; left < 12; left++) served.push(...share.leave(pages[left]!).map(({ lane }) => lane));
  // After each turn of the API, the account is above the limit of its pages. So a page is served only when one more slot is free.
  expect(count(served, 'payer')).toBeGreaterThan(0);
  expect(count(served, 'partner')).toBeGreaterThan(count(served, 'payer'));
});

test('the first call of an API needs one free slot, whatever the payers of its account hold', () => {
  const share = new FairShare(LIMITS);
  enter(share, many(30, 'A', 'payer'));
  expect(enter(share, [of('A', 'partner', 4), of('A', 'partner', 4)])).toEqual(['admitted', 'waiting']);
});

test('accounts are served in turn, however many requests of one of them wait', () => {
  const share = new FairShare({ slots: 2, waitingAlone: 100, waitingShared: 100 });
  const holding = [of('X'), of('Y')];
  enter(share, holding);
  const [a, b, c] = [many(9, 'A'), many(3, 'B'), many(3, 'C')];
  expect(new Set([...enter(share, a), ...enter(share, b), ...enter(share, c)])).toEqual(new Set(['waiting']));
  const order: string[] = [];
  for (let request: SlotRequest | undefined = holding[0]; request;) {
    const [next] = share.leave(request);
    if (next) order.push(next.accountId);
    request = next;
  }
  expect(order.slice(0, 9).join('')).toBe('ABCABCABC');
});

test('a request of an attempt that has begun, and then a reversal, go before every other request', () => {
  const share = new FairShare({ slots: 1, waitingAlone: 100, waitingShared: 100 });
  const holding = of('X');
  share.enter(holding);
  const [create, other, reversal, begun] = [of('A'), of('B'), of('B', 'reversal'), of('B', 'begun')];
  enter(share, [create, other, reversal, begun]);
  const order: SlotRequest[] = [];
  for (let request: SlotRequest | undefined = holding; request; [request] = share.leave(request)) order.push(request);
  expect(order).toEqual([holding, begun, reversal, create, other]);
});

test('a request of an attempt that has begun is never refused', () => {
  const share = new FairShare({ slots: 1, waitingAlone: 1, waitingShared: 1 });
  enter(share, [of('A'), of('B')]);
  expect(count(enter(share, many(100, 'A', 'begun')), 'refused')).toBe(0);
});

test('a large request waits until it fits, and smaller ones of its account do not pass it', () => {
  const share = new FairShare({ slots: 10, waitingAlone: 100, waitingShared: 100 });
  const first = of('A', 'partner', 7);
  const [large, small] = [of('A', 'partner', 7), of('A')];
  expect(enter(share, [first, large, small])).toEqual(['admitted', 'waiting', 'waiting']);
  expect(share.leave(first)).toEqual([large, small]);
});

test('a large request of the API is not passed for ever by payers’ pages, also while other accounts are busy', () => {
  const share = new FairShare({ slots: 64, waitingAlone: 4_096, waitingShared: 512 });
  for (const other of ['B', 'C', 'D', 'E', 'F']) enter(share, many(10, other));
  // A call of its API is inside. Without one, the list would need one free slot only.
  enter(share, [of('A')]);
  const inside: SlotRequest[] = [];
  const view = () => {
    const page = of('A', 'payer');
    if (share.enter(page) === 'admitted') inside.push(page);
  };
  for (let page = 0; page < 60; page++) view();
  const [list, create] = [of('A', 'partner', 4), of('A')];
  expect(enter(share, [list, create])).toEqual(['waiting', 'waiting']);
  const admitted = new Set<SlotRequest>();
  // Each page that ends is followed by a new one.
  for (let step = 0; step < 200 && !admitted.has(create); step++) {
    for (const next of share.leave(inside.shift()!)) {
      admitted.add(next);
      inside.push(next);
    }
    view();
  }
  expect([admitted.has(list), admitted.has(create)]).toEqual([true, true]);
});

describe('any history', () => {
  const step = fc.record({
    account: fc.constantFrom('A', 'B', 'C', 'D'),
    lane: fc.constantFrom<Lane>('begun', 'reversal', 'partner', 'payer'),
    slots: fc.integer({ min: 1, max: 5 }),
    /** Which earlier request leaves. Without one, a new request enters. */
    leaves: fc.option(fc.nat(200)),
    isAlone: fc.boolean(),
  });

  test('holds the limits, serves a lane of an account in order, and forgets nothing', () =>
    fc.assert(
      fc.property(fc.array(step, { maxLength: 150 }), (steps) => {
        const limits = { slots: 12, slotsAlone: 17, waitingAlone: 8, waitingShared: 6 };
        const share = new FairShare<SlotRequest>(limits);
        const [held, waiting]: [Set<SlotRequest>, Set<SlotRequest>] = [new Set(), new Set()];
        const admit = (request: SlotRequest) => {
          const before = [...waiting].find(({ accountId, lane }) => accountId === request.accountId && lane === request.lane);
          expect(before).toBe(request);
          waiting.delete(request);
          held.add(request);
        };
        const leave = (request: SlotRequest) => {
          held.delete(request);
          waiting.delete(request);
          share.leave(request).forEach(admit);
          expect(share.leave(request)).toEqual([]);
        };
        for (const { account, lane, slots, leaves, isAlone } of steps) {
          share.isAlone = isAlone;
          const present = [...held, ...waiting];
          if (leaves !== null) {
            if (present.length > 0) leave(present[leaves % present.length]!);
          } else {
            const request = of(account, lane, slots);
            const entry = share.enter(request);
            if (entry === 'admitted') held.add(request);
            if (entry === 'waiting') waiting.add(request);
            if (entry === 'refused') expect(lane).not.toBe('begun');
          }
          const used = [...held].reduce((sum, request) => sum + request.slots, 0);
          // Only one request may overdraw, and only by what it takes.
          expect(used).toBeLessThan(limits.slotsAlone + 5);
          for (const lane of ['reversal', 'partner', 'payer'] as const) {
            expect(share.waiting(lane)).toBe([...waiting].filter((one) => one.lane === lane).length);
            for (const account of ['A', 'B', 'C', 'D'])
              expect([...waiting].filter((one) => one.lane === lane && one.accountId === account).length).toBeLessThanOrEqual(limits.waitingAlone);
          }
          // While a slot is free, an account that holds nothing never waits, and its API waits only for calls of its own.
          if (used < limits.slotsAlone)
            for (const { accountId, lane } of waiting)
              expect([...held].some((one) => one.accountId === accountId && (lane === 'payer' || one.lane !== 'payer'))).toBe(true);
        }
        share.isAlone = false;
        // When holders leave, every request that waits is admitted in the end. Then the share is as at its beginning.
        for (let left = 1_000; held.size > 0 && left > 0; left--) leave([...held][0]!);
        expect([held.size, waiting.size]).toEqual([0, 0]);
        expect(count(enter(share, many(12, 'E')), 'admitted')).toBe(9);
      }),
      { numRuns: 300 },
    ));
});

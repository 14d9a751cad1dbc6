/** Unit tests of the session's decider: the events of each command, and the page of each state. */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { fold, ServiceError } from '#kernel';
import {
  type Checkout,
  checkout,
  type CheckoutCommand,
  type CheckoutContent,
  type CheckoutEvent,
  type CheckoutTerms,
  codeFor,
  type KnownCheckout,
  MAX_ATTEMPTS,
  MAX_EXTENSIONS,
  mayLeave,
  OFFER_TO_LEAVE_AFTER_MS,
  SESSION_LIFE_MS,
  viewOf,
} from './checkout.js';
import { cancellationOf } from './way-back.js';

const START = Date.parse('2026-11-20T10:00:00.000Z');
const at = (minutes: number) => new Date(START + minutes * 60_000).toISOString();
const terms: CheckoutTerms = {
  checkoutId: 'cs_x',
  intake: 'form',
  signed: false,
  portalId: '018f0000-0000-7000-8000-00000000000a',
  accountId: '018f0000-0000-7000-8000-00000000000b',
  amountCents: 12_500,
  content: 'hash',
  fingerprint: null,
};
const content: CheckoutContent = {
  referenceId: 'CASE-7',
  lineItems: [{ amountCents: 12_500, referenceId: 'W-1', description: null, metadata: null }],
  payer: {},
  returnUrl: 'https://shop.test/done',
  cancelUrl: 'https://shop.test/cancelled',
  state: 's',
  locale: null,
};

const started = (intake: CheckoutTerms['intake'] = 'form'): CheckoutEvent => ({
  type: 'CheckoutStarted',
  at: at(0),
  data: { ...terms, intake, opened: intake !== 'json', expiresAt: at(60) },
});
const attempt = (number: number, minutes = 1): CheckoutEvent => ({
  type: 'AttemptStarted',
  at: at(minutes),
  data: { attemptId: `a${number}`, paymentId: `p${number}` },
});
const declined = (number: number): CheckoutEvent => ({
  type: 'AttemptDeclined',
  at: at(2),
  data: { attemptId: `a${number}`, code: 'PAYMENT_DECLINED', declineCode: 'generic_decline' },
});
const unknown: CheckoutEvent = { type: 'OutcomeUnknown', at: at(2), data: { attemptId: 'a1', paymentId: 'p1' } };
const paid: CheckoutEvent = { type: 'CheckoutPaid', at: at(2), data: { attemptId: 'a1', paymentId: 'p1' } };
const left: CheckoutEvent = { type: 'PayerLeft', at: at(3), data: {} };
const cancelled: CheckoutEvent = { type: 'CheckoutCancelled', at: at(3), data: {} };
const expired: CheckoutEvent = { type: 'CheckoutExpired', at: at(61), data: {} };
const extended = (minutes: number): CheckoutEvent => ({ type: 'CheckoutExtended', at: at(minutes), data: { expiresAt: at(minutes + 60) } });

const given = (...events: CheckoutEvent[]) => ({
  when: (command: CheckoutCommand) => ({
    then: (...expected: CheckoutEvent[]) => expect(checkout.decide(fold(checkout, events), command)).toEqual(expected),
    thenRefused: (message: RegExp) => {
      let refused: unknown;
      try {
        checkout.decide(fold(checkout, events), command);
      } catch (error) {
        refused = error;
      }
      expect(refused).toBeInstanceOf(ServiceError);
      expect(refused).toMatchObject({ code: 'INVALID_STATE', message: expect.stringMatching(message) });
    },
  }),
});
const after = (...events: CheckoutEvent[]) => fold(checkout, events) as KnownCheckout;
const viewAt = (minutes: number, ...events: CheckoutEvent[]) => viewOf({ checkout: after(...events), content }, START + minutes * 60_000);

describe('a checkout begins', () => {
  test('with an hour to live; a form comes with its browser, JSON does not', () => {
    given()
      .when({ type: 'Start', at: at(0), terms })
      .then(started());
    given()
      .when({ type: 'Start', at: at(0), terms: { ...terms, intake: 'json' } })
      .then(started('json'));
    expect(SESSION_LIFE_MS).toBe(3_600_000);
  });
  test('once', () =>
    given(started())
      .when({ type: 'Start', at: at(1), terms })
      .thenRefused(/begun already/));
  test('and is opened by one browser', () => {
    given(started('json'))
      .when({ type: 'Open', at: at(1) })
      .then({ type: 'CheckoutOpened', at: at(1), data: {} });
    given(started('json'), { type: 'CheckoutOpened', at: at(1), data: {} })
      .when({ type: 'Open', at: at(2) })
      .then();
    given(started())
      .when({ type: 'Open', at: at(1) })
      .then();
  });
});

describe('an attempt', () => {
  const start: CheckoutCommand = { type: 'StartAttempt', at: at(1), attemptId: 'a1', paymentId: 'p1' };
  test('begins out of open only, one at a time', () => {
    given(started()).when(start).then(attempt(1));
    const again = { ...start, attemptId: 'a2', paymentId: 'p2' };
    for (const history of [
      [attempt(1)],
      [attempt(1), unknown],
      [attempt(1), paid],
      [attempt(1), unknown, paid],
      [attempt(1), unknown, left],
      [cancelled],
      [expired],
    ])
      given(started(), ...history)
        .when(again)
        .thenRefused(/takes no card now/);
    given()
      .when(start)
      .thenRefused(/no such checkout/);
  });
  test('that was made once is not made again, declined or not', () =>
    given(started(), attempt(1), declined(1))
      .when({ ...start, paymentId: 'p2' })
      .thenRefused(/made already/));
  test('declined: open again, another card', () => {
    given(started(), attempt(1))
      .when({ type: 'RecordDeclined', at: at(2), attemptId: 'a1', code: 'PAYMENT_DECLINED', declineCode: 'generic_decline' })
      .then(declined(1));
    expect(after(started(), attempt(1), declined(1))).toMatchObject({
      phase: 'open',
      attemptIds: ['a1'],
      lastRefusal: { code: 'PAYMENT_DECLINED', declineCode: 'generic_decline' },
    });
    given(started(), attempt(1), declined(1))
      .when({ ...start, attemptId: 'a2', paymentId: 'p2' })
      .then(attempt(2));
  });
  test('is not begun after the hour, nor after ten', () => {
    given(started())
      .when({ ...start, at: at(60) })
      .thenRefused(/takes no card now/);
    const ten = Array.from({ length: MAX_ATTEMPTS }, (_, number) => [attempt(number), declined(number)]).flat();
    given(started(), ...ten)
      .when({ ...start, attemptId: 'a11', paymentId: 'p11' })
      .thenRefused(/takes no card now/);
    expect(viewAt(3, started(), ...ten)).toBe('attempts_used_up');
  });
  test('is recorded once: a second request records nothing', () => {
    for (const history of [[paid], [declined(1)]]) {
      given(started(), attempt(1), ...history)
        .when({ type: 'RecordDeclined', at: at(3), attemptId: 'a1', code: 'PAYMENT_DECLINED', declineCode: null })
        .then();
      given(started(), attempt(1), ...history)
        .when({ type: 'RecordPaid', at: at(3) })
        .then();
    }
    given(started(), attempt(1), unknown)
      .when({ type: 'RecordUnknown', at: at(3) })
      .then();
    // This is the outcome of an earlier attempt.
    given(started(), attempt(1), declined(1), attempt(2))
      .when({ type: 'RecordDeclined', at: at(3), attemptId: 'a1', code: 'PAYMENT_DECLINED', declineCode: null })
      .then();
  });
});

describe('an unknown outcome', () => {
  test('takes no card, and is resolved either way', () => {
    given(started(), attempt(1))
      .when({ type: 'RecordUnknown', at: at(2) })
      .then(unknown);
    given(started(), attempt(1), unknown)
      .when({ type: 'RecordPaid', at: at(2) })
      .then(paid);
    expect(after(started(), attempt(1), unknown, declined(1)).phase).toBe('open');
  });
  test('lets the payer go after 30 seconds, and the session is over for cards then, however it ends', () => {
    const waiting = after(started(), attempt(1), unknown);
    const begun = START + 60_000;
    expect(mayLeave(waiting, begun + OFFER_TO_LEAVE_AFTER_MS - 1)).toBe(false);
    expect(mayLeave(waiting, begun + OFFER_TO_LEAVE_AFTER_MS)).toBe(true);
    given(started(), attempt(1), unknown)
      .when({ type: 'Leave', at: at(1.2) })
      .thenRefused(/still being looked for/);
    given(started(), attempt(1), unknown)
      .when({ type: 'Leave', at: at(3) })
      .then(left);
    given(started(), attempt(1), unknown, left)
      .when({ type: 'Leave', at: at(4) })
      .then();
    given(started(), attempt(1))
      .when({ type: 'Leave', at: at(3) })
      .thenRefused(/still being looked for/);
    const closed = after(started(), attempt(1), unknown, left, declined(1));
    expect(closed).toMatchObject({ phase: 'cancelled', afterUnknown: true });
    expect(cancellationOf(closed, content)).toMatchObject({ result: 'failed', error: 'PAYMENT_TIMEOUT' });
    expect(after(started(), attempt(1), unknown, left, paid).phase).toBe('paid');
  });
});

describe('time', () => {
  test('more of it, while it is open, so and so often', () => {
    given(started())
      .when({ type: 'Extend', at: at(20) })
      .then(extended(20));
    given(started())
      .when({ type: 'Extend', at: at(0.5) })
      .then();
    for (const history of [[attempt(1)], [attempt(1), paid], [cancelled], [expired]])
      given(started(), ...history)
        .when({ type: 'Extend', at: at(20) })
        .thenRefused(/Only an open/);
    const many = Array.from({ length: MAX_EXTENSIONS }, (_, index) => extended(2 * (index + 1)));
    given(started(), ...many)
      .when({ type: 'Extend', at: at(100) })
      .thenRefused(/too often/);
    expect(viewAt(65, started(), extended(20))).toBe('pay');
  });
  test('a session that only ran out of time can go on; one whose partner got a result cannot', () => {
    expect(viewAt(60, started())).toBe('expired');
    given(started())
      .when({ type: 'Extend', at: at(300) })
      .then(extended(300));
    given(started())
      .when({ type: 'Expire', at: at(61) })
      .then(expired);
    given(started(), expired)
      .when({ type: 'Expire', at: at(62) })
      .then();
    given(started())
      .when({ type: 'Expire', at: at(59) })
      .thenRefused(/has not expired/);
    given(started(), attempt(1))
      .when({ type: 'Expire', at: at(90) })
      .thenRefused(/has not expired/);
  });
});

test('leaving is possible while nothing is on its way', () => {
  given(started())
    .when({ type: 'Cancel', at: at(3) })
    .then(cancelled);
  given(started(), cancelled)
    .when({ type: 'Cancel', at: at(4) })
    .then();
  for (const history of [[attempt(1)], [attempt(1), unknown], [attempt(1), paid], [expired]])
    given(started(), ...history)
      .when({ type: 'Cancel', at: at(3) })
      .thenRefused(/Only an open/);
  expect(cancellationOf(after(started(), cancelled), content)).toMatchObject({ result: 'cancelled', error: null, checkoutId: 'cs_x', state: 's' });
  expect(cancellationOf(after(started(), expired), content)).toMatchObject({ result: 'expired', error: null });
  expect(cancellationOf(after(started()), content)).toBeNull();
});

test.each<[string, CheckoutEvent[], string]>([
  ['open', [], 'pay'],
  ['processing', [attempt(1)], 'processing'],
  ['unknown', [attempt(1), unknown], 'processing'],
  ['paid', [attempt(1), paid], 'receipt'],
  ['cancelled', [cancelled], 'cancelled'],
  ['expired', [expired], 'expired'],
])('%s shows one page, long after the hour too', (_, history, view) => {
  expect(viewAt(4, started(), ...history)).toBe(view);
  if (view !== 'pay') expect(viewAt(600, started(), ...history)).toBe(view);
});

test('a session without its content takes no card and leads nowhere; what became of its money is still shown', () => {
  const views = [[], [cancelled], [expired], [attempt(1)], [attempt(1), unknown], [attempt(1), paid]].map((history) =>
    viewOf({ checkout: after(started(), ...history), content: null }, START + 60_000),
  );
  expect(views).toEqual(['expired', 'expired', 'expired', 'processing', 'processing', 'receipt']);
});

test('without a valid signature, nobody learns whether a case is blocked or held', () => {
  const codes = ['PAYMENT_BLOCKED', 'PAYMENT_HELD', 'PAYMENT_NOT_ALLOWED', 'PAYMENT_DECLINED'] as const;
  expect(codes.map((code) => codeFor({ signed: true }, code))).toEqual(codes);
  expect(codes.map((code) => codeFor({ signed: false }, code))).toEqual([...Array<string>(3).fill('PAYMENT_NOT_ALLOWED'), 'PAYMENT_DECLINED']);
});

test('any commands in any order: at most one attempt at a time, at most one is paid, and nothing begins after that', () => {
  const command = fc.oneof(
    fc.record({ type: fc.constant('StartAttempt' as const), attemptId: fc.constantFrom('a', 'b', 'c'), paymentId: fc.constantFrom('p', 'q', 'r') }),
    fc.record({
      type: fc.constant('RecordDeclined' as const),
      attemptId: fc.constantFrom('a', 'b', 'c'),
      code: fc.constant('PAYMENT_DECLINED' as const),
      declineCode: fc.constant(null),
    }),
    fc.record({ type: fc.constantFrom('RecordUnknown' as const, 'RecordPaid', 'Leave', 'Cancel', 'Expire', 'Extend', 'Open') }),
  );
  fc.assert(
    fc.property(fc.array(fc.tuple(command, fc.integer({ min: 0, max: 40 }))), (asked) => {
      const events: CheckoutEvent[] = [started()];
      let state: Checkout = fold(checkout, events);
      let minutes = 0;
      for (const [ask, later] of asked) {
        minutes += later;
        try {
          for (const event of checkout.decide(state, { ...ask, at: at(minutes) })) {
            state = checkout.evolve(state, event);
            events.push(event);
          }
        } catch (error) {
          if (!(error instanceof ServiceError)) throw error;
        }
      }
      const begun = events.filter(({ type }) => type === 'AttemptStarted').map(({ data }) => (data as { attemptId: string }).attemptId);
      expect(new Set(begun).size).toBe(begun.length);
      const paidAt = events.findIndex(({ type }) => type === 'CheckoutPaid');
      if (paidAt >= 0) expect(paidAt).toBe(events.length - 1);
      const leftAt = events.findIndex(({ type }) => type === 'PayerLeft');
      if (leftAt >= 0) expect(events.slice(leftAt).some(({ type }) => type === 'AttemptStarted')).toBe(false);
    }),
  );
});

test('an impossible history is a fault', () => {
  for (const history of [
    [attempt(1)],
    [started(), started()],
    [started(), paid],
    [started(), attempt(1), attempt(2)],
    [started(), attempt(1), declined(2)],
    [started(), attempt(1), declined(1), attempt(1)],
    [started(), attempt(1), { ...paid, data: { attemptId: 'a1', paymentId: 'p9' } }],
    [started(), attempt(1), left],
    [started(), cancelled, expired],
  ] as CheckoutEvent[][])
    expect(() => fold(checkout, history)).toThrow(/cannot follow/);
});

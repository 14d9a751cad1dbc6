/** Unit tests: which events become notifications, when deliveries are attempted, and how they are signed (C55, C56, C57). */
import { describe, expect, test } from '@jest/globals';
import fc from 'fast-check';
import { systemIds, newKeyRing } from '#platform';
import type { PaymentEvent, ReversalEnd } from '#payments';
import { printable } from './deliveries.js';
import { bodyOf, notificationOf } from './notification.js';
import { fateOf, MAX_ATTEMPTS } from './schedule.js';
import { eventIdOf, headersOf, signatureOf } from './signature.js';

const PAYMENT = '7b0c2f5e-6f0a-4a86-9a56-0d7c9a1f2b11';
const AT = '2026-11-20T10:00:00.000Z';
const END: ReversalEnd = {
  attemptId: 'a',
  operation: 'refund',
  outcome: 'completed',
  reversalType: 'refund',
  amountCents: 12_500,
  personal: null,
  initiatedBy: 'staff',
};
const ended = (change: Partial<ReversalEnd>): PaymentEvent => ({ type: 'ReversalEnded', at: AT, data: { ...END, ...change } });

describe('notified', () => {
  test('an attempt of staff that returned money, with its amount (C56)', () => {
    expect(notificationOf(PAYMENT, ended({}), 'duplicate')).toEqual({
      type: 'payment.refunded',
      data: { id: PAYMENT, reversalType: 'refund', amountCents: 12_500, currency: 'USD', reason: 'duplicate', initiatedBy: 'staff' },
    });
    expect(notificationOf(PAYMENT, ended({ outcome: 'partial', amountCents: 12_137 }), '')?.data).toMatchObject({ amountCents: 12_137 });
    expect(notificationOf(PAYMENT, ended({ operation: 'void', reversalType: 'void' }), '')?.data).toMatchObject({ reversalType: 'void' });
    expect(notificationOf(PAYMENT, ended({}), '')?.data).toMatchObject({ reason: '' });
  });
  test.each<[string, PaymentEvent]>([
    ['an attempt of the partner', ended({ initiatedBy: 'partner' })],
    ['an attempt that returned nothing', ended({ outcome: 'never_executed', reversalType: null, amountCents: 0 })],
    ['a rejected one', ended({ outcome: 'rejected', reversalType: null, amountCents: 0 })],
    [
      'a leg that came back, also by timeout reversal',
      { type: 'PaymentVoided', at: AT, data: { attemptId: 'a', leg: 'principal', principalCents: 1, feeCents: 0, transactionId: 't' } },
    ],
    ['a decision of staff', { type: 'PaymentResolved', at: AT, data: { as: 'voided', charge: null, evidence: 'e', by: 'b', forced: false } }],
  ])('no notification of %s', (_what, event) => expect(notificationOf(PAYMENT, event, '')).toBeNull());
  test('a dispute, as it stands after the change (C57)', () => {
    const dispute = {
      disputeId: 'd0a3b1de-2c1a-4b6e-8f58-b0c3c9f1a111',
      status: 'in_dispute',
      stage: 'representment',
      reasonCode: '10.4',
      disputedAmountCents: 500,
      openedOn: '2026-11-01',
      dueDate: '2026-11-21',
    } as const;
    expect(notificationOf(PAYMENT, { type: 'PaymentDisputed', at: AT, data: { ...dispute, personal: null } }, 'fraud')).toEqual({
      type: 'payment.disputed',
      data: { id: PAYMENT, ...dispute, reason: 'fraud', currency: 'USD' },
    });
  });
});

describe('signatures', () => {
  test('the vectors: the key is the whole secret, whsec_ included (C55)', () => {
    expect(signatureOf('whsec_test', 1_766_000_000, '{"id":"evt_1","type":"payment.refunded"}')).toBe(
      '6efdbe95439a01bc358cb2db7206f67538524c5a8db51940093d1d7f83f43275',
    );
    const body = bodyOf('evt_01', AT, notificationOf(PAYMENT, ended({}), 'duplicate')!);
    expect(body).toBe(
      `{"id":"evt_01","type":"payment.refunded","createdAt":"${AT}","data":{"id":"${PAYMENT}","reversalType":"refund","amountCents":12500,"currency":"USD","reason":"duplicate","initiatedBy":"staff"}}`,
    );
    expect(signatureOf('whsec_test', 1_795_168_800, body)).toBe('da1247d74be12c09e6374a6bc9271667f0e1142fb0bb4457b05cb9d6ca852823');
  });
  test('the headers of an attempt', () => {
    const body = Buffer.from('{"reason":"für Müller"}');
    expect(headersOf({ id: 'evt_1', type: 'payment.refunded', body }, 'whsec_test', 1_766_000_000)).toEqual({
      'Content-Type': 'application/json',
      'Content-Length': '25',
      'User-Agent': 'Payfold-Webhooks/1',
      'Service-Signature': `t=1766000000,v1=${signatureOf('whsec_test', 1_766_000_000, body)}`,
      'Service-Event-Id': 'evt_1',
      'Service-Event-Type': 'payment.refunded',
    });
  });
  test('an event id follows from the fact alone', () => {
    const id = eventIdOf('payment.refunded', `payment-${PAYMENT}`, 4n);
    expect(id).toMatch(/^evt_[\w-]{27}$/);
    expect(eventIdOf('payment.refunded', `payment-${PAYMENT}`, 4n)).toBe(id);
    const others = [eventIdOf('payment.disputed', `payment-${PAYMENT}`, 4n), eventIdOf('payment.refunded', `payment-${PAYMENT}`, 5n), eventIdOf('payment.refunded', 'payment-x', 4n)]; // prettier-ignore
    expect(new Set([id, ...others]).size).toBe(4);
  });
  test('a sealed secret opens in its own place only', () => {
    const keys = newKeyRing();
    const id = systemIds(() => 0).uuid();
    const sealed = keys.seal('whsec_x', `webhook_endpoint_secret/${id}/ciphertext`);
    expect(sealed.ciphertext).not.toContain(Buffer.from('whsec').toString('base64').slice(0, 6));
    expect(() => keys.open(sealed, 'webhook_endpoint_secret/another/ciphertext')).toThrow();
  });
});

describe('the schedule (C55)', () => {
  test('five attempts, each 108–132 s after the end of the one before, then held', () =>
    fc.assert(
      fc.property(fc.double({ min: 0, max: 1, maxExcluded: true, noNaN: true }), fc.integer({ min: 1, max: MAX_ATTEMPTS }), (chance, attempt) => {
        const fate = fateOf({ attempt, succeeded: false, chance });
        if (attempt === 5) return expect(fate).toEqual({ state: 'held' });
        expect(fate.state).toBe('pending');
        const { waitMs } = fate as { waitMs: number };
        expect(waitMs).toBeGreaterThanOrEqual(108_000);
        expect(waitMs).toBeLessThanOrEqual(132_000);
      }),
    ));
  test('success ends it at any attempt', () => {
    for (let attempt = 1; attempt <= 5; attempt++) expect(fateOf({ attempt, succeeded: true, chance: 0.5 })).toEqual({ state: 'delivered' });
  });
});

test('an answer is shown as printable text', () => {
  expect(printable(Buffer.from('ok\r\n\u001b[31mred\u0000 \\ é'))).toBe('ok\\x0d\\x0a\\x1b[31mred\\x00 \\\\ \\xc3\\xa9');
});

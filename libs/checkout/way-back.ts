/** The addresses by which a payer goes back to the partner (C59). The portal's active secret signs their parameters. */
import { openSigningSecret, type Portal } from '#accounts';
import type { ErrorCode } from '#kernel';
import type { PaymentView } from '#payments';
import type { KeyRing } from '#platform';
import { vetAddress } from './addresses.js';
import { type CheckoutContent, type KnownCheckout, MAX_ATTEMPTS } from './checkout.js';
import { signedAddress } from './signature.js';

/** True if a browser may be sent to this address of a session. The portal's allow-list may have been narrowed since the intake. */
export const isAllowedNow = (portal: Pick<Portal, 'checkout'>, address: string): boolean => vetAddress(address, portal.checkout.allow).accepted;

/** The address behind "Done". Its amounts are those of the payment. If the payer changed an amount in the request, the partner notices it. */
export const returnAddress = (
  keys: KeyRing,
  portal: Portal,
  checkoutId: string,
  { returnUrl, referenceId, state }: CheckoutContent,
  result: 'paid' | 'unknown',
  payment: PaymentView,
  nowMs: number,
): string =>
  signedAddress(
    openSigningSecret(keys, portal),
    'return',
    returnUrl,
    {
      result,
      checkout_id: checkoutId,
      payment_id: payment.id,
      confirmation_number: result === 'paid' ? payment.confirmationNumber : null,
      reference_id: referenceId,
      amount_cents: String(payment.amountCents),
      service_fee_cents: String(payment.serviceFeeCents),
      total_charged_cents: String(payment.totalChargedCents),
      state,
    },
    nowMs,
  );

/** Parameters of a cancel address. `checkoutId` null: the intake was refused, and no checkout began. */
export interface Cancellation {
  readonly result: 'cancelled' | 'failed' | 'expired';
  readonly error: ErrorCode | null;
  readonly checkoutId: string | null;
  readonly paymentId: string | null;
  readonly referenceId: string | null;
  readonly state: string | null;
}

/** The result for the partner of a cancelled or expired checkout. null for any other checkout. */
export const cancellationOf = (checkout: KnownCheckout, { referenceId, state }: CheckoutContent): Cancellation | null => {
  const { terms, attemptIds } = checkout;
  const { checkoutId } = terms;
  const told = { error: null, checkoutId, paymentId: null, referenceId, state };
  if (checkout.phase === 'expired') return { ...told, result: 'expired' };
  if (checkout.phase !== 'cancelled') return null;
  // The partner had got `unknown` before. If nothing was charged in the end, the result is `failed`.
  if (checkout.afterUnknown) return { ...told, result: 'failed', error: 'PAYMENT_TIMEOUT' };
  return attemptIds.length >= MAX_ATTEMPTS ? { ...told, result: 'failed', error: 'PAYMENT_DECLINED' } : { ...told, result: 'cancelled' };
};

export const cancelAddress = (keys: KeyRing, portal: Portal, cancelUrl: string, told: Cancellation, nowMs: number): string =>
  signedAddress(
    openSigningSecret(keys, portal),
    'cancel',
    cancelUrl,
    {
      result: told.result,
      checkout_id: told.checkoutId,
      error: told.error,
      payment_id: told.paymentId,
      reference_id: told.referenceId,
      state: told.state,
    },
    nowMs,
  );

/** The payment methods of the double. The first ones are the vendor's own for tests, and can be used again. */

export interface PaymentMethod {
  readonly id: string;
  readonly brand: string;
  readonly last4: string;
  /** null: the charge succeeds. */
  readonly decline: { readonly code: string; readonly decline_code: string | null } | null;
  readonly zip: 'pass' | 'fail' | 'unavailable' | null;
  readonly cvc: 'pass' | 'fail' | 'unavailable' | null;
  readonly refunds: 'succeeded' | 'pending' | 'requires_action' | 'fails';
  /** True: a second use is refused. */
  readonly once: boolean;
}

const base = { brand: 'visa', last4: '4242', decline: null, zip: null, cvc: 'pass', refunds: 'succeeded', once: false } as const;
const declined = (decline_code: string, last4 = '0002') => ({ ...base, last4, decline: { code: 'card_declined', decline_code } });

export const TEST_METHODS: Readonly<Record<string, Omit<PaymentMethod, 'id'>>> = {
  pm_card_visa: base,
  pm_card_mastercard: { ...base, brand: 'mastercard', last4: '4444' },
  pm_card_amex: { ...base, brand: 'amex', last4: '8431' },
  pm_card_discover: { ...base, brand: 'discover', last4: '9424' },
  pm_card_avsZipFail: { ...base, last4: '0036', zip: 'fail' },
  pm_card_avsUnchecked: { ...base, last4: '0044', zip: 'unavailable' },
  pm_card_cvcCheckFail: { ...base, last4: '0101', cvc: 'fail' },
  pm_card_chargeDeclined: declined('generic_decline'),
  pm_card_chargeDeclinedInsufficientFunds: declined('insufficient_funds', '9995'),
  pm_card_chargeDeclinedFraudulent: declined('fraudulent', '0019'),
  pm_card_visa_chargeDeclinedVelocityLimitExceeded: declined('card_velocity_exceeded', '6975'),
  pm_card_chargeDeclinedExpiredCard: { ...base, last4: '0069', decline: { code: 'expired_card', decline_code: null } },
  pm_card_chargeDeclinedIncorrectCvc: { ...base, last4: '0127', decline: { code: 'incorrect_cvc', decline_code: null } },
  pm_card_chargeDeclinedProcessingError: { ...base, last4: '0119', decline: { code: 'processing_error', decline_code: null } },
  pm_card_authenticationRequired: { ...base, last4: '3184', decline: { code: 'authentication_required', decline_code: 'authentication_required' } },
  pm_card_pendingRefund: { ...base, last4: '7726', refunds: 'pending' },
  pm_card_refundFail: { ...base, last4: '5126', refunds: 'fails' },
};

export const onceMethod = (id: string, given: Readonly<Record<string, unknown>>): PaymentMethod => {
  const text = <T extends string>(name: string, otherwise: T | null) => (typeof given[name] === 'string' ? (given[name] as T) : otherwise);
  const decline_code = text('declineCode', null);
  const code = text('code', decline_code === null ? null : 'card_declined');
  return {
    id,
    brand: text('brand', base.brand)!,
    last4: text('last4', base.last4)!,
    decline: code === null ? null : { code, decline_code },
    zip: text<'pass' | 'fail' | 'unavailable'>('zip', null),
    cvc: text<'pass' | 'fail' | 'unavailable'>('cvc', 'pass'),
    refunds: text<PaymentMethod['refunds']>('refunds', 'succeeded')!,
    once: true,
  };
};

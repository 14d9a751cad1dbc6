/** Requests of payers: the partner's intake parameters (C58), and the form with the card. The card's fields are wrapped at once (C5). */
import { canonicalJson, type Json, ServiceError, sumCents } from '#kernel';
import { type IntakeContent, type IntakeKind, MAX_ADDRESS_LENGTH, type PayField, type FieldFault, type CheckoutPayer } from '#checkout';
import { type PaymentInstrument, refuseExpiredCard, Secret } from '#payments';
import { cardInText, controlsInText, holdsCardNumber, isEmail, MAX_EMAIL_LENGTH, passesLuhn, unseenInEmail } from '#platform';
import {
  CentsField,
  EnumField,
  type Fault,
  Field,
  type JsonObject,
  NestedField,
  parseStrictText,
  TextField,
  validated,
  validationError,
} from '#platform/http';
import { EmailField, MetadataField, UuidField } from '../partner/requests.js';

// ------------------------------------------------------------------------------------------------------------------------------------
// Intake.

class IntakeLineItem {
  @CentsField({ description: 'Principal of this item.' }) amount_cents!: number;
  @TextField({ min: 1, max: 255, free: true, description: "Partner's identifier of the case or invoice." }) reference_id!: string;
  @TextField({ optional: true, max: 500, free: true, multiline: true }) description?: string;
  @MetadataField('Free-form data, kept with the payment.') metadata?: Record<string, Json>;
}

const LANGUAGE_TAG = /^[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,4}$/;

const AddressField = (description: string) =>
  Field({
    schema: { type: 'string', format: 'uri', maxLength: MAX_ADDRESS_LENGTH, description },
    // `vetAddress` checks the address, the allow-list, and that there is no card number.
    check: (value) => (typeof value === 'string' ? null : 'must be an address'),
  });
const PayerField = (max: number) => TextField({ optional: true, max, free: true });

export class IntakeRequest {
  @UuidField({ description: 'Portal whose hosted checkout is used.' }) portal_id!: string;
  @NestedField(() => IntakeLineItem, { array: { min: 1, max: 50 } }) line_items!: IntakeLineItem[];
  @CentsField({ description: 'Principal; must equal the sum of the line items.' }) amount_cents!: number;
  @AddressField('Where Done leads; https, on the allow-list of the portal.') return_url!: string;
  @AddressField('Where a cancelled or refused checkout leads; https, on the allow-list of the portal.') cancel_url!: string;
  @EnumField({ optional: true, values: ['USD'], schema: 'Currency', description: 'Only `USD`, which is also the default.' }) currency?: string;
  @TextField({ optional: true, min: 1, max: 255, free: true, description: 'Payment-level identifier, also used for case-specific restrictions.' })
  reference_id?: string;
  @PayerField(100) payer_first_name?: string;
  @PayerField(100) payer_last_name?: string;
  @EmailField() payer_email?: string;
  @PayerField(40) payer_phone?: string;
  @PayerField(200) payer_line1?: string;
  @PayerField(200) payer_line2?: string;
  @PayerField(100) payer_city?: string;
  @PayerField(100) payer_state?: string;
  @PayerField(20) payer_zip?: string;
  @TextField({ optional: true, max: 512, free: true, description: 'Echoed in `return_url` and `cancel_url`.' }) state?: string;
  @Field({
    optional: true,
    schema: { type: 'string', description: 'Language of the pages, `en` or `es`; any language tag is taken.' },
    check: (value) => (typeof value === 'string' && LANGUAGE_TAG.test(value) ? cardInText(value) : 'must be a language tag'),
  })
  locale?: string;
  @Field({
    optional: true,
    schema: { type: 'integer', format: 'int64', description: 'Unix seconds, at most 7 days ahead. Required for links.' },
    check: (value) => ((typeof value === 'string' || typeof value === 'number') && /^\d{1,12}$/.test(String(value)) ? null : 'must be unix seconds'),
  })
  exp?: number | string;
  @TextField({ optional: true, min: 16, max: 64, description: 'Starts one checkout. Required for links.' }) nonce?: string;
  @TextField({ optional: true, max: 64, description: 'Signature. Required for links, and where the portal requires signed intake.' }) sig?: string;
}

/** Every top-level value as the text that the signature covers (C58). Strings stay as they are. Other JSON values are written by RFC 8785. */
export const pairsOf = (body: JsonObject): ReadonlyMap<string, string> =>
  new Map(Object.entries(body).map(([name, value]) => [name, typeof value === 'string' ? value : canonicalJson(value)]));

/** Reads the content of an intake. In a form or a link, numbers and lines are text. Throws VALIDATION_ERROR with every fault. */
export const intakeContentOf = (kind: IntakeKind, fields: JsonObject): IntakeContent => {
  const body = kind === 'json' ? fields : typed(fields);
  refuseAmount(body);
  const request = validated(IntakeRequest, body, ({ line_items, amount_cents }): Fault[] =>
    sumCents(line_items, (line) => line.amount_cents) === amount_cents
      ? []
      : [{ field: 'amount_cents', message: 'must equal the sum of line_items[].amount_cents' }],
  );
  const payer: CheckoutPayer = {
    firstName: request.payer_first_name,
    lastName: request.payer_last_name,
    email: request.payer_email,
    phone: request.payer_phone,
    line1: request.payer_line1,
    line2: request.payer_line2,
    city: request.payer_city,
    state: request.payer_state,
    zip: request.payer_zip,
  };
  return {
    referenceId: request.reference_id ?? null,
    amountCents: request.amount_cents,
    lineItems: request.line_items.map((line) => ({
      amountCents: line.amount_cents,
      referenceId: line.reference_id,
      description: line.description ?? null,
      metadata: line.metadata ?? null,
    })),
    payer: Object.fromEntries(Object.entries(payer).filter(([, value]) => value !== undefined && value !== '')),
    state: request.state ?? null,
    locale: request.locale ?? null,
  };
};

const WHOLE_NUMBER = /^(0|[1-9]\d{0,14})$/;

/** Converts the texts of a form into JSON types. A form cannot leave out a field, so an empty field counts as not sent. */
const typed = (fields: JsonObject): JsonObject => {
  const body: JsonObject = Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== ''));
  if (typeof body.amount_cents === 'string' && WHOLE_NUMBER.test(body.amount_cents)) body.amount_cents = Number(body.amount_cents);
  if (typeof body.line_items === 'string') {
    try {
      body.line_items = parseStrictText(body.line_items);
    } catch (error) {
      if (error instanceof ServiceError) throw validationError([{ field: 'line_items', message: 'must be valid JSON' }]);
      throw error;
    }
  }
  return body;
};

/** Refuses the key `amount` (C3) in an intake, where names follow C58. */
const refuseAmount = (body: JsonObject): void => {
  const lines = Array.isArray(body.line_items) ? (body.line_items as unknown[]) : [];
  const found = Object.hasOwn(body, 'amount')
    ? 'amount'
    : lines.some((line) => line !== null && typeof line === 'object' && Object.hasOwn(line, 'amount'))
      ? 'line_items[].amount'
      : null;
  if (found) throw validationError([{ field: found, message: 'is not a field of this service; money fields end in _cents' }]);
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The card form.

/** The values that a page may show to the payer again. They hold nothing of the card. */
export interface PayerValues {
  readonly postal_code: string;
  readonly first_name: string;
  readonly last_name: string;
  readonly email: string;
}

export interface PayForm {
  readonly values: PayerValues;
  readonly faults: Readonly<Partial<Record<PayField, FieldFault>>>;
  /** null if a field of the card has a fault. */
  readonly instrument: PaymentInstrument | null;
}

const LIMITS = { postal_code: 20, first_name: 100, last_name: 100, email: MAX_EMAIL_LENGTH } as const;
const CARD_NUMBER = /^\d{12,19}$/;
/** Payers and browsers write `0429`, `04/29`, `04 / 29` or `04/2029`. */
const EXPIRY = /^(0[1-9]|1[0-2]) ?\/? ?(?:20)?(\d{2})$/;

/** Reads the form of the pay page. `now` decides whether the card has expired (C5). */
export const payFormOf = (form: ReadonlyMap<string, string>, now: number): PayForm => {
  const faults: Partial<Record<PayField, FieldFault>> = {};
  const field = (name: string) => (form.get(name) ?? '').trim();
  const digits = field('card_number').replace(/[\s-]/g, '');
  if (!CARD_NUMBER.test(digits) || !passesLuhn(digits)) faults.card_number = 'card_number';
  const expiry = EXPIRY.exec(field('expiry'));
  if (!expiry) faults.expiry = 'expiry';
  const cvv = field('security_code');
  if (!/^\d{3,4}$/.test(cvv)) faults.security_code = 'security_code';
  let instrument: PaymentInstrument | null = null;
  if (expiry && Object.keys(faults).length === 0) {
    const month = Number(expiry[1]);
    instrument = { type: 'card', number: new Secret(digits), expiry: { month, year: 2000 + Number(expiry[2]) }, cvv: new Secret(cvv) };
    try {
      refuseExpiredCard(instrument, now);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      faults.expiry = 'expired';
      instrument = null;
    }
  }

  const values = { postal_code: '', first_name: '', last_name: '', email: '' };
  for (const name of Object.keys(LIMITS) as (keyof PayerValues)[]) {
    const value = field(name);
    if (value.length > LIMITS[name]) faults[name] = 'too_long';
    // A card number in the wrong field is neither kept nor sent back, even with CARD_IN_TEXT_CHECK=off.
    else if (holdsCardNumber(value) || (digits.length >= 12 && value.replace(/\D/g, '').includes(digits))) faults[name] = 'card_in_text';
    else {
      values[name] = value;
      if (name === 'email' && value !== '' && (!isEmail(value) || unseenInEmail(value) !== null)) faults.email = 'email';
      else if (controlsInText(value) !== null) faults[name] = 'control_in_text';
    }
  }
  return { values, faults, instrument };
};

/**
 * Requests of partners: fields and their rules (specification, Endpoints; C4–C9). Each decorator validates a field and documents it in the OpenAPI
 * document.
 */
import { ApiPropertyOptional } from '@nestjs/swagger';
import { isUuid, type Json, MAX_AMOUNT_CENTS, ServiceError, sumCents } from '#kernel';
import {
  type ChargeRequest,
  DEFAULT_PAGE,
  type ListFilters,
  type ListRequest,
  MAX_PAGE,
  PAYMENT_STATUSES,
  type PaymentStatus,
  type QuoteRequest,
  Secret,
} from '#payments';
import { cardInText, DIGITS_ONLY, isEmail, MAX_EMAIL_LENGTH, passesLuhn, unseenInEmail } from '#platform';
import {
  CentsField,
  EnumField,
  type Fault,
  Field,
  keyFault,
  laterTextFault,
  MAX_KEY_LENGTH,
  NestedField,
  TextField,
  validated,
  validatedQuery,
  validationError,
} from '#platform/http';

export const UuidField = (options: { optional?: boolean; description?: string } = {}) =>
  Field({
    ...options,
    schema: { type: 'string', format: 'uuid', ...(options.description ? { description: options.description } : {}) },
    check: (value) => (isUuid(value) ? null : 'must be a UUID'),
  });

export const EmailField = () =>
  Field({
    optional: true,
    schema: { type: 'string', format: 'email', maxLength: MAX_EMAIL_LENGTH, description: 'The domain may be international (UTS 46).' },
    check: (value) => (isEmail(value) ? cardInText(value, DIGITS_ONLY) : 'must be an e-mail address'),
    later: (value) => unseenInEmail(value as string) ?? cardInText(value as string),
  });

class AddressRequest {
  @TextField({ optional: true, max: 200, free: true }) line1?: string;
  @TextField({ optional: true, max: 200, free: true }) line2?: string;
  @TextField({ optional: true, max: 100, free: true }) city?: string;
  @TextField({ optional: true, max: 100, free: true }) state?: string;
  @TextField({ optional: true, max: 20, free: true }) zip?: string;
  @TextField({ optional: true, max: 100, free: true, description: 'Default `US`.' }) country?: string;
}

class PayerRequest {
  @TextField({ optional: true, max: 100, free: true }) firstName?: string;
  @TextField({ optional: true, max: 100, free: true }) lastName?: string;
  @EmailField() email?: string;
  @TextField({ optional: true, max: 40, free: true }) phone?: string;
  @NestedField(() => AddressRequest, { optional: true }) address?: AddressRequest;
}

const MAX_METADATA_KEYS = 50;
const MAX_METADATA_BYTES = 8 * 1024;
const MAX_METADATA_DEPTH = 8;

/** Checks the number of keys, the size and the depth of metadata, and that it holds no card number (C8, C9). Returns the fault, or null. */
const checkMetadata = (value: unknown): string | null => {
  if (value === null || typeof value !== 'object' || Array.isArray(value)) return 'must be an object';
  if (Object.keys(value).length > MAX_METADATA_KEYS) return `must have at most ${MAX_METADATA_KEYS} keys`;
  if (Buffer.byteLength(JSON.stringify(value)) > MAX_METADATA_BYTES) return `must be at most ${MAX_METADATA_BYTES} bytes`;
  if (depthOf(value) > MAX_METADATA_DEPTH) return `must be nested at most ${MAX_METADATA_DEPTH} levels deep`;
  return faultWithin(value, (text) => cardInText(text, DIGITS_ONLY));
};

const depthOf = (value: unknown): number => (value !== null && typeof value === 'object' ? 1 + Math.max(0, ...Object.values(value).map(depthOf)) : 0);
/** The first fault of a text, a key or a number in the value. null: there is none. */
const faultWithin = (value: unknown, faultOf: (text: string) => string | null): string | null => {
  if (typeof value === 'string' || typeof value === 'number') return faultOf(String(value));
  if (value === null || typeof value !== 'object') return null;
  for (const [key, item] of Object.entries(value)) {
    const fault = faultOf(key) ?? faultWithin(item, faultOf);
    if (fault !== null) return fault;
  }
  return null;
};

export const MetadataField = (description: string) =>
  Field({
    optional: true,
    schema: { type: 'object', additionalProperties: true, description },
    check: checkMetadata,
    later: (value) => faultWithin(value, (text) => laterTextFault(text, true)),
  });

class LineItemRequest {
  @CentsField({ description: 'Principal of this item.' }) amountCents!: number;
  @TextField({ min: 1, max: 255, free: true, description: "Caller's identifier of the case or invoice." }) referenceId!: string;
  @TextField({ optional: true, max: 500, free: true, multiline: true }) description?: string;
  @MetadataField(`Free-form data, returned exactly: at most ${MAX_METADATA_KEYS} keys, ${MAX_METADATA_BYTES} bytes, ${MAX_METADATA_DEPTH} levels.`)
  metadata?: Record<string, Json>;
}

const METHOD_TYPES = ['card', 'card_token', 'vault'] as const;

const DIGITS = /^\d{12,19}$/;
const EXPIRATION = /^(0[1-9]|1[0-2])\/?(\d{2})$/;

/** The three kinds of payment method. `type` selects one of them, and only the fields of that kind are read. */
class PaymentMethodRequest {
  @EnumField({ values: METHOD_TYPES }) type!: (typeof METHOD_TYPES)[number];
  @ApiPropertyOptional({ type: 'string', description: '`card`: 12 to 19 digits, spaces ignored.' }) cardNumber?: unknown;
  @ApiPropertyOptional({ type: 'string', description: '`card`: `MM/YY` or `MMYY`, current month or later.' }) expirationDate?: unknown;
  @ApiPropertyOptional({ type: 'string', description: '`card`: 3 or 4 digits.' }) cvv?: unknown;
  @ApiPropertyOptional({ type: 'string', description: '`card_token`: a supported card token.' }) token?: unknown;
  @ApiPropertyOptional({ type: 'string', description: '`vault`: always refused with 501.' }) vaultId?: unknown;
}

const MAX_TOKEN_LENGTH = 255;

/** Reads the card's fields from the raw body and wraps each value in a {@link Secret} at once (C5). No fault repeats a value. */
const instrumentOf = (raw: Record<string, unknown>, faults: Fault[]): ChargeRequest['instrument'] | null => {
  const fault = (field: string, message: string) => {
    faults.push({ field: `paymentMethod.${field}`, message });
    return null;
  };
  if (raw.type === 'card_token') {
    if (typeof raw.token !== 'string' || raw.token.length < 1 || raw.token.length > MAX_TOKEN_LENGTH)
      return fault('token', `must be a string of 1 to ${MAX_TOKEN_LENGTH} characters`);
    if (cardInText(raw.token, DIGITS_ONLY)) return fault('token', 'must not hold a card number');
    return { type: 'card_token', token: new Secret(raw.token) };
  }
  const digits = typeof raw.cardNumber === 'string' ? raw.cardNumber.replaceAll(' ', '') : '';
  if (!DIGITS.test(digits) || !passesLuhn(digits)) fault('cardNumber', 'must be a valid card number of 12 to 19 digits');
  const expiry = typeof raw.expirationDate === 'string' ? EXPIRATION.exec(raw.expirationDate) : null;
  if (!expiry) fault('expirationDate', 'must be MM/YY or MMYY');
  if (typeof raw.cvv !== 'string' || !/^\d{3,4}$/.test(raw.cvv)) fault('cvv', 'must be 3 or 4 digits');
  if (faults.length > 0 || !expiry || typeof raw.cvv !== 'string') return null;
  return { type: 'card', number: new Secret(digits), expiry: { month: Number(expiry[1]), year: 2000 + Number(expiry[2]) }, cvv: new Secret(raw.cvv) };
};

const CAPTURES = ['sale', 'auth'] as const;

export class CreatePaymentRequest {
  @UuidField({ description: 'Portal to charge.' }) portalId!: string;
  @TextField({ optional: true, max: 255, free: true, description: 'Payment-level identifier, also used for case-specific restrictions.' })
  referenceId?: string;
  @CentsField({ description: 'Principal; must equal the sum of the line items.' }) amountCents!: number;
  @EnumField({ optional: true, values: ['USD'], schema: 'Currency', description: 'Only `USD`, which is also the default.' }) currency?: string;
  @EnumField({ optional: true, values: CAPTURES, description: '`sale` if it is left out. `auth` is refused with 501.' }) capture?: string;
  @EnumField({ optional: true, values: CAPTURES, deprecated: true, description: 'Alias of `capture`.' }) captureMode?: string;
  @NestedField(() => PaymentMethodRequest) paymentMethod!: PaymentMethodRequest;
  @NestedField(() => LineItemRequest, { array: { min: 1, max: 50 } }) lineItems!: LineItemRequest[];
  @NestedField(() => PayerRequest, { optional: true }) payer?: PayerRequest;
}

/**
 * Reads a request to charge (E5). A faulty field gives 400. A valid request for a feature that we do not offer gives 501. `later` gets the faults that are
 * refused in E7.
 */
export const chargeRequestOf = (accountId: string, body: Record<string, unknown>, later?: Fault[]): ChargeRequest => {
  refuseAmount(body);
  let instrument: ChargeRequest['instrument'] | null = null;
  const further = (value: CreatePaymentRequest): readonly Fault[] => {
    const faults: Fault[] = [];
    if (sumCents(value.lineItems, (line) => line.amountCents) !== value.amountCents)
      faults.push({ field: 'amountCents', message: 'must equal the sum of lineItems[].amountCents' });
    if (value.capture !== undefined && value.captureMode !== undefined && value.capture !== value.captureMode)
      faults.push({ field: 'captureMode', message: 'differs from capture' });
    if (value.paymentMethod.type !== 'vault') {
      const cardFaults: Fault[] = [];
      instrument = instrumentOf(body.paymentMethod as Record<string, unknown>, cardFaults);
      faults.push(...cardFaults);
    }
    return faults;
  };
  const request = validated(CreatePaymentRequest, body, further, [], later);
  if (request.capture === 'auth' || request.captureMode === 'auth')
    throw new ServiceError('CAPTURE_NOT_SUPPORTED', 'Only immediate sales are supported.');
  if (instrument === null) throw new ServiceError('VAULT_NOT_SUPPORTED', 'Stored cards are not supported.');
  return {
    accountId,
    portalId: request.portalId.toLowerCase(),
    referenceId: request.referenceId ?? null,
    amountCents: request.amountCents,
    lineItems: request.lineItems.map((line) => ({
      amountCents: line.amountCents,
      referenceId: line.referenceId,
      description: line.description ?? null,
      metadata: line.metadata ?? null,
    })),
    payer: request.payer ? payerOf(request.payer) : null,
    instrument,
  };
};

const payerOf = ({ address, ...payer }: PayerRequest): ChargeRequest['payer'] => ({
  ...defined(payer),
  ...(address ? { address: { ...defined(address), country: address.country ?? 'US' } } : {}),
});

const defined = <T extends object>(fields: T): T => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined)) as T;

/** Refuses the key `amount` in every object of a body, except inside `lineItems[].metadata` (C3). The fault repeats no name that could hold data. */
export const refuseAmount = (value: unknown, path: readonly (string | number)[] = []): void => {
  if (Array.isArray(value)) value.forEach((item, index) => refuseAmount(item, [...path, index]));
  else if (value !== null && typeof value === 'object')
    for (const [key, item] of Object.entries(value)) {
      if (key === 'amount')
        throw validationError([{ field: fieldOf([...path, key]), message: 'is not a field of this service; money fields end in Cents' }]);
      if (key !== 'metadata' || !isLineItem(path)) refuseAmount(item, [...path, key]);
    }
};
const isLineItem = (path: readonly (string | number)[]) => path.length === 2 && path[0] === 'lineItems' && typeof path[1] === 'number';
const fieldOf = (path: readonly (string | number)[]) =>
  path.map((name, index) => (typeof name === 'number' ? `[${name}]` : (index === 0 ? '' : '.') + (FIELD_NAME.test(name) ? name : '…'))).join('');
/** Names that a fault may repeat. They have no digits, so a name cannot be a card number. */
const FIELD_NAME = /^[A-Za-z]{1,40}$/;

/** Equal to a `feeType` that was left out (C36). It stands first: a client that fills the field with the first word must not return the fee. */
export const NO_FEE = 'none';
const FEE_TYPES = [NO_FEE, 'include_fee'] as const;

export class RefundRequest {
  @CentsField({ optional: true, description: 'Principal cents; left out, all remaining principal.' }) amountCents?: number;
  @EnumField({
    optional: true,
    values: FEE_TYPES,
    description: '`include_fee` returns the service fee too, with everything that remains. `none` is the same as leaving it out.',
  })
  feeType?: string;
  @TextField({ optional: true, max: 1000, free: true, multiline: true }) reason?: string;
}

export class VoidRequest {
  @TextField({ optional: true, max: 1000, free: true, multiline: true }) reason?: string;
}

/** Each field of a query, as text. */
type Sent<Fields> = { readonly [Name in keyof Fields]: string | undefined };

export class ListQuery implements Sent<Omit<ListRequest, 'accountId' | 'filters'> & ListFilters> {
  @UuidField({ optional: true, description: 'Only payments of this portal.' }) portalId: string | undefined;
  @Field({
    optional: true,
    schema: { type: 'string', description: 'Inclusive; RFC 3339 with offset, or `YYYY-MM-DD` (00:00:00Z).' },
    check: (value) => instantFault(value),
  })
  from: string | undefined;
  @Field({ optional: true, schema: { type: 'string', description: 'Exclusive; as `from`.' }, check: (value) => instantFault(value) })
  to: string | undefined;
  @EnumField({ optional: true, values: PAYMENT_STATUSES, schema: 'PaymentStatus', description: 'Only payments with this status.' }) status:
    PaymentStatus | undefined;
  @TextField({ optional: true, min: 1, max: 1024, description: '`nextCursor` of the page before, with the same filters.' }) cursor:
    string | undefined;
  @Field({
    optional: true,
    schema: { type: 'integer', minimum: 1, maximum: MAX_PAGE, description: `Payments of a page, ${DEFAULT_PAGE} if it is left out.` },
    check: (value) => (wholeNumber(value) <= MAX_PAGE ? null : `must be 1 to ${MAX_PAGE}`),
  })
  limit: string | undefined;
  @Field({
    optional: true,
    schema: {
      type: 'string',
      minLength: 1,
      maxLength: MAX_KEY_LENGTH,
      pattern: '^[!-~]+$',
      description: 'The payment that the create with this `Idempotency-Key` made, and `keyState`. No other parameter may stand beside it.',
    },
    check: (value) => keyFault(value as string),
  })
  idempotencyKey: string | undefined;
}

/** The key that a list asks about (C44). null: it asks for a page. */
export const askedKeyOf = (query: Readonly<Record<string, unknown>>): string | null => {
  if (!Object.hasOwn(query, 'idempotencyKey')) return null;
  const { idempotencyKey, ...others } = validatedQuery(ListQuery, query);
  if (Object.values(others).some((value) => value !== undefined))
    throw validationError([{ field: 'idempotencyKey', message: 'takes no other parameter beside it' }]);
  return idempotencyKey ?? null;
};

/** Parses a whole number from 1. Returns Infinity for any other text. */
const wholeNumber = (value: unknown): number => (typeof value === 'string' && /^[1-9]\d*$/.test(value) ? Number(value) : Number.POSITIVE_INFINITY);

const INSTANT = /^(\d{4})-(\d{2})-(\d{2})(?:[Tt](\d{2}):(\d{2}):(\d{2})(?:\.\d{1,9})?(?:[Zz]|[+-]\d{2}:\d{2}))?$/;
/** In a query, `+` means a space. So a time with an offset that was not escaped arrives with a space before the offset. */
const UNESCAPED_PLUS = /T[\d:.]* \d{2}:\d{2}$/i;
const instantFault = (value: unknown): string | null => {
  if (typeof value === 'string' && instantOf(value) !== null) return null;
  const hint = typeof value === 'string' && UNESCAPED_PLUS.test(value) ? '; write + as %2B in a query' : '';
  return `must be RFC 3339 with offset, or YYYY-MM-DD${hint}`;
};

/** The limits are the years 1 to 9999 in UTC. RFC 3339 can write these years, and the database can hold them. */
const FIRST_INSTANT = Date.parse('0001-01-01T00:00:00Z');
const LAST_INSTANT = Date.parse('9999-12-31T23:59:59.999Z');

/** Milliseconds since 1970. null: the text is not a valid time within the limits above. */
export const instantOf = (text: string): number | null => {
  const parts = INSTANT.exec(text);
  if (!parts) return null;
  const [, year, month, day, hour = '00', , second = '00'] = parts;
  // Date.parse turns 31 February into a day of March. Such a date must be refused.
  const date = new Date(Date.UTC(Number(year), Number(month) - 1, Number(day)));
  if (date.getUTCMonth() !== Number(month) - 1 || date.getUTCDate() !== Number(day) || Number(hour) > 23 || Number(second) > 59) return null;
  const time = Date.parse(text.toUpperCase());
  return time >= FIRST_INSTANT && time <= LAST_INSTANT ? time : null;
};

export class QuoteQuery implements Sent<Omit<QuoteRequest, 'accountId'>> {
  @UuidField({ description: 'Portal to charge.' }) portalId!: string;
  @Field({
    schema: { type: 'integer', format: 'int64', minimum: 1, maximum: MAX_AMOUNT_CENTS, description: 'Principal.' },
    check: (value) => (wholeNumber(value) <= MAX_AMOUNT_CENTS ? null : `must be 1 to ${MAX_AMOUNT_CENTS} cents`),
  })
  amountCents!: string;
}

export const listRequestOf = (accountId: string, query: Readonly<Record<string, unknown>>): ListRequest => {
  const { portalId, from, to, status, cursor, limit } = validatedQuery(ListQuery, query);
  const filters: ListFilters = {
    portalId: portalId?.toLowerCase() ?? null,
    from: from === undefined ? null : instantOf(from),
    to: to === undefined ? null : instantOf(to),
    status: status ?? null,
  };
  if (filters.from !== null && filters.to !== null && filters.from > filters.to)
    throw validationError([{ field: 'from', message: 'must not lie after to' }]);
  return { accountId, filters, cursor: cursor ?? null, limit: limit === undefined ? null : Number(limit) };
};

/**
 * Reads a request for a quote. Unknown parameters are ignored. Only `amount` is refused, because a partner could mistake it for the principal (C3).
 */
export const quoteRequestOf = (accountId: string, query: Readonly<Record<string, unknown>>): QuoteRequest => {
  if ('amount' in query) refuseAmount(query);
  const { portalId, amountCents } = validatedQuery(QuoteQuery, query, { ignoreUnknown: true });
  return { accountId, portalId: portalId.toLowerCase(), amountCents: Number(amountCents) };
};

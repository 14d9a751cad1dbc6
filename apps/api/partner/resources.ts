/**
 * Answers to partners, for the OpenAPI document. Each class implements the lib's type of the answer, so the compiler reports a missing field.
 *
 * Words of answers are open strings with the known words listed (docs/decisions/0044). A generated client must not fail at a word that was added
 * later: the card was charged already.
 */
import { ApiProperty, ApiPropertyOptional } from '@nestjs/swagger';
import { STATUS_OF } from '#kernel';
import type { TokenGrant } from '#accounts';
import {
  DECLINE_CODES,
  type FeeQuote as FeeQuoteView,
  KEY_STATES,
  type LineItemView,
  type Payer,
  PAYMENT_STATUSES,
  type PaymentPage as PaymentPageView,
  type PaymentView,
  type RefundView,
  SETTLEMENT_STATUSES,
  type VoidView,
} from '#payments';

const uuid = { type: 'string', format: 'uuid' } as const;
const cents = { type: 'integer', format: 'int64', minimum: 0 } as const;
const dateTime = { type: 'string', format: 'date-time' } as const;
const text = { type: 'string' } as const;
/** A union of the schema and null. The decorator would read a list of types (`["string", "null"]`) as "array of". */
const orNull = (schema: { type: string; [keyword: string]: unknown }) => ({ oneOf: [schema, { type: 'null' }] }) as object;

const words = (description: string, known: readonly string[]) => ({
  type: 'string' as const,
  description: `${description} Known words: ${known.map((word) => `\`${word}\``).join(', ')}. Later releases may add others.`,
  'x-extensible-enum': [...known],
});

/** The named vocabularies of answers. */
export const WORDS = {
  PaymentStatus: words('Where the payment stands.', PAYMENT_STATUSES),
  SettlementStatus: words(
    '`settled`: a void is no longer possible, refund instead. `rejected`: the money never came. `unsettled` promises no void.',
    SETTLEMENT_STATUSES,
  ),
  KeyState: words(
    'What is known of the key. `completed`: its payment has an outcome. `reserved`: it never charges again; read its payment, if there is one. `absent` promises nothing.',
    KEY_STATES,
  ),
  Currency: words('ISO 4217.', ['USD']),
  CaptureMode: words('Payments are immediate sales.', ['sale', 'auth']),
  PaymentMethodType: words('Kind of the payment method.', ['card', 'card_token', 'vault']),
  ReversalType: words('How the gateway returned the money.', ['void', 'refund']),
  ErrorCode: words('The kind of error. Decide by it, never by `message`.', Object.keys(STATUS_OF)),
  DeclineCode: words('Why the card was declined.', DECLINE_CODES),
  SuggestedAction: words('The request to send next.', ['refund', 'retry_void']),
  VelocityScope: words('The subject of the limit.', ['case', 'card']),
} as const;

/** A property whose schema is a named vocabulary. */
const word = (name: keyof typeof WORDS, description?: string) => ({
  allOf: [{ $ref: `#/components/schemas/${name}` }],
  ...(description && { description }),
});

class Address {
  @ApiPropertyOptional(text) line1?: string;
  @ApiPropertyOptional(text) line2?: string;
  @ApiPropertyOptional(text) city?: string;
  @ApiPropertyOptional(text) state?: string;
  @ApiPropertyOptional(text) zip?: string;
  @ApiPropertyOptional(text) country?: string;
}

class PayerInfo implements Payer {
  @ApiPropertyOptional(text) firstName?: string;
  @ApiPropertyOptional(text) lastName?: string;
  @ApiPropertyOptional(text) email?: string;
  @ApiPropertyOptional(text) phone?: string;
  @ApiPropertyOptional({ type: Address }) address?: Address;
}

class PaymentMethod {
  @ApiProperty(word('PaymentMethodType')) type!: string;
  @ApiProperty(text) brand!: string;
  @ApiProperty(text) last4!: string;
}

class GatewayInfo {
  @ApiProperty(orNull(text)) transactionId!: string | null;
  @ApiProperty(orNull(text)) authCode!: string | null;
}

class GatewayTransaction {
  @ApiProperty(text) transactionId!: string;
}

class LineItem implements LineItemView {
  @ApiProperty(uuid) id!: string;
  @ApiProperty(cents) amountCents!: number;
  @ApiProperty(cents) serviceFeeCents!: number;
  @ApiProperty(word('PaymentStatus')) status!: PaymentView['status'];
  @ApiProperty(cents) refundedAmountCents!: number;
  @ApiProperty(cents) remainingRefundableAmountCents!: number;
  @ApiProperty(text) referenceId!: string;
  @ApiProperty(orNull({ type: 'string', maxLength: 500 })) description!: string | null;
  @ApiProperty(orNull({ type: 'object', additionalProperties: true })) metadata!: LineItemView['metadata'];
}

class Settlement {
  @ApiProperty(word('SettlementStatus')) status!: NonNullable<PaymentView['settlement']>['status'];
  @ApiProperty({ ...orNull(dateTime), description: 'When the batch of the first settled charge closed; null if none is settled.' })
  settledAt!: string | null;
}

export class Payment implements PaymentView {
  @ApiProperty(uuid) id!: string;
  @ApiProperty(word('PaymentStatus')) status!: PaymentView['status'];
  @ApiProperty(word('CaptureMode')) captureMode!: 'sale';
  @ApiProperty(word('Currency')) currency!: 'USD';
  @ApiProperty(cents) amountCents!: number;
  @ApiProperty(cents) serviceFeeCents!: number;
  @ApiProperty(cents) totalChargedCents!: number;
  @ApiProperty({ ...cents, description: 'Returned so far by refund or void, with the service fee.' }) refundedAmountCents!: number;
  @ApiProperty({ ...cents, description: 'Cents that can still be refunded, with the service fee.' }) remainingRefundableAmountCents!: number;
  @ApiProperty(cents) authorizedAmountCents!: 0;
  @ApiProperty(cents) capturedAmountCents!: number;
  @ApiProperty(orNull(text)) confirmationNumber!: string | null;
  @ApiProperty(uuid) portalId!: string;
  @ApiProperty(orNull(text)) referenceId!: string | null;
  @ApiProperty({ oneOf: [{ $ref: '#/components/schemas/PayerInfo' }, { type: 'null' }] }) payer!: PayerInfo | null;
  @ApiProperty({ type: PaymentMethod }) paymentMethod!: PaymentMethod;
  @ApiProperty({ type: GatewayInfo }) gateway!: GatewayInfo;
  @ApiProperty({ type: LineItem, isArray: true }) lineItems!: LineItem[];
  @ApiProperty({ oneOf: [{ $ref: '#/components/schemas/Settlement' }, { type: 'null' }], description: 'null until the payment is charged.' })
  settlement!: Settlement | null;
  @ApiProperty(orNull(dateTime)) expiresAt!: PaymentView['expiresAt'];
  @ApiProperty(orNull(dateTime)) capturedAt!: string | null;
  @ApiProperty(dateTime) createdAt!: string;
  @ApiProperty(dateTime) updatedAt!: string;
  @ApiPropertyOptional({
    ...dateTime,
    description: 'When personal data of the payment was erased: `payer` and texts of lines are null then. Absent otherwise.',
  })
  personalDataErasedAt?: string;
}

export class PaymentPage implements PaymentPageView {
  @ApiProperty({ type: Payment, isArray: true }) payments!: Payment[];
  @ApiProperty({ ...orNull(text), description: 'Pass it as `cursor`, with the same filters; null on the last page.' }) nextCursor!: string | null;
  @ApiPropertyOptional(word('KeyState', 'Only in the answer to `idempotencyKey`.')) keyState?: string;
}

export class RefundResult implements RefundView {
  @ApiProperty(uuid) id!: string;
  @ApiProperty({ ...text, description: 'Always `group`: the refund is of the whole payment, not of one line item.' }) target!: 'group';
  @ApiProperty(word('ReversalType')) reversalType!: 'void' | 'refund';
  @ApiProperty(cents) amountCents!: number;
  @ApiProperty(word('Currency')) currency!: 'USD';
  @ApiProperty(orNull(text)) reason!: string | null;
  @ApiProperty({
    ...text,
    description:
      'Status of the refund, not of the payment: `succeeded`, or `pending` if the processor took it and has not carried it out yet. A refund without success is an error.',
  })
  status!: RefundView['status'];
  @ApiProperty({ ...cents, description: 'Cents that can still be refunded, with the service fee.' }) remainingRefundableAmountCents!: number;
  @ApiProperty({ type: GatewayTransaction }) gateway!: GatewayTransaction;
  @ApiProperty(dateTime) createdAt!: string;
}

class VoidedLineItem {
  @ApiProperty(uuid) id!: string;
  @ApiProperty(cents) amountCents!: number;
}

export class VoidResult implements VoidView {
  @ApiProperty(uuid) id!: string;
  @ApiProperty(cents) amountCents!: number;
  @ApiProperty(word('Currency')) currency!: 'USD';
  @ApiProperty(orNull(text)) reason!: string | null;
  @ApiProperty({ ...text, description: 'Status of the void: `voided`. A void without success is an error.' }) status!: 'voided';
  @ApiProperty({ type: VoidedLineItem, isArray: true }) voidedLineItems!: VoidedLineItem[];
  @ApiProperty(cents) voidedServiceFeeCents!: number;
  @ApiProperty({ type: GatewayTransaction }) gateway!: GatewayTransaction;
  @ApiProperty(dateTime) createdAt!: string;
}

export class FeeQuote implements FeeQuoteView {
  @ApiProperty(uuid) portalId!: string;
  @ApiProperty(cents) amountCents!: number;
  @ApiProperty(cents) serviceFeeCents!: number;
  @ApiProperty(cents) totalChargedCents!: number;
  @ApiProperty(word('Currency')) currency!: 'USD';
}

export class AccessTokenGrant implements TokenGrant {
  @ApiProperty(text) accessToken!: string;
  @ApiProperty({ ...text, description: 'Always `Bearer`.' }) tokenType!: 'Bearer';
  @ApiProperty({ type: 'integer', minimum: 1, description: 'Seconds.' }) expiresIn!: number;
  @ApiProperty(dateTime) expiresAt!: string;
}

class FieldFault {
  @ApiProperty({ ...text, description: 'Path of the field, such as `lineItems[0].referenceId`.' }) field!: string;
  @ApiProperty(text) message!: string;
}

/** The fields that come with each code: specification, Errors; C16, C53, C54, C62. */
class ErrorDetails {
  @ApiProperty(word('ErrorCode')) code!: string;
  @ApiPropertyOptional({ ...uuid, description: 'The payment that was recorded, or that is to be checked.' }) id?: string;
  @ApiPropertyOptional(word('DeclineCode', 'On `PAYMENT_DECLINED`.')) declineCode?: string;
  @ApiPropertyOptional({ type: 'boolean', description: 'On `VOID_FAILED` and `PARTIAL_REFUND_PENDING`.' }) retryable?: boolean;
  @ApiPropertyOptional(word('SuggestedAction', 'As `retryable`.')) suggestedAction?: string;
  @ApiPropertyOptional({ ...cents, description: 'On `PARTIAL_REFUND_PENDING`.' }) remainingRefundableAmountCents?: number;
  @ApiPropertyOptional(word('VelocityScope', 'On `VELOCITY_LIMIT`.')) scope?: string;
  @ApiPropertyOptional({ type: 'integer', minimum: 1, description: 'On `VELOCITY_LIMIT`.' }) windowSeconds?: number;
  @ApiPropertyOptional({ ...dateTime, description: 'On `VELOCITY_LIMIT`, and on `DECLINE_BLOCKED` and `PAYMENT_HELD` when known.' }) retryAt?: string;
  @ApiPropertyOptional({ type: FieldFault, isArray: true, description: 'On `VALIDATION_ERROR`, what is wrong with which field.' })
  errors?: FieldFault[];
}

export class ErrorEnvelope {
  @ApiProperty({ type: 'boolean', description: '`false`.' }) success!: boolean;
  @ApiProperty(text) message!: string;
  @ApiPropertyOptional({ type: ErrorDetails, description: 'Absent on 401 and on 403 of authentication.' }) details?: ErrorDetails;
}

/** The envelope of each successful answer, by name. */
const envelope = ({ name }: { name: string }) => ({
  type: 'object' as const,
  required: ['success', 'data'],
  properties: {
    success: { type: 'boolean' as const, description: '`true`.' },
    data: { $ref: `#/components/schemas/${name}` },
    message: { type: 'string' as const },
  },
});
export const ENVELOPES = {
  PaymentEnvelope: envelope(Payment),
  PaymentPageEnvelope: envelope(PaymentPage),
  RefundEnvelope: envelope(RefundResult),
  VoidEnvelope: envelope(VoidResult),
  FeeQuoteEnvelope: envelope(FeeQuote),
  AccessTokenEnvelope: envelope(AccessTokenGrant),
};

/** Models that other models use. */
export const RESOURCES = [PayerInfo, Settlement, Payment, PaymentPage, RefundResult, VoidResult, FeeQuote, AccessTokenGrant, ErrorEnvelope];

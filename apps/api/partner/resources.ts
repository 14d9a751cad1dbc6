/** Answers to partners, for the OpenAPI document. Each class implements the lib's type of the answer, so the compiler reports a missing field. */
import { ApiProperty, ApiPropertyOptional } from '@nestjs/swagger';
import { STATUS_OF } from '#kernel';
import type { TokenGrant } from '#accounts';
import {
  DECLINE_CODES,
  type FeeQuote as FeeQuoteView,
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
const cents = { type: 'integer', minimum: 0 } as const;
const dateTime = { type: 'string', format: 'date-time' } as const;
const text = { type: 'string' } as const;
/** A union of the schema and null. The decorator would read a list of types (`["string", "null"]`) as "array of". */
const orNull = (schema: { type: string; [keyword: string]: unknown }) => ({ oneOf: [schema, { type: 'null' }] }) as object;
const oneOf = (...values: string[]) => ({ type: 'string' as const, enum: values });

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
  @ApiProperty(oneOf('card', 'card_token', 'vault')) type!: string;
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
  @ApiProperty(oneOf(...PAYMENT_STATUSES)) status!: PaymentView['status'];
  @ApiProperty(cents) refundedAmountCents!: number;
  @ApiProperty(cents) remainingRefundableAmountCents!: number;
  @ApiProperty(text) referenceId!: string;
  @ApiProperty(orNull({ type: 'string', maxLength: 500 })) description!: string | null;
  @ApiProperty(orNull({ type: 'object', additionalProperties: true })) metadata!: LineItemView['metadata'];
}

class Settlement {
  @ApiProperty({
    ...oneOf(...SETTLEMENT_STATUSES),
    description: '`settled`: a void is no longer possible, refund instead. `rejected`: the money never came. `unsettled` promises no void.',
  })
  status!: NonNullable<PaymentView['settlement']>['status'];
  @ApiProperty({ ...orNull(dateTime), description: 'When the batch of the first settled charge closed; null if none is settled.' })
  settledAt!: string | null;
}

export class Payment implements PaymentView {
  @ApiProperty(uuid) id!: string;
  @ApiProperty(oneOf(...PAYMENT_STATUSES)) status!: PaymentView['status'];
  @ApiProperty(oneOf('sale', 'auth')) captureMode!: 'sale';
  @ApiProperty(oneOf('USD')) currency!: 'USD';
  @ApiProperty(cents) amountCents!: number;
  @ApiProperty(cents) serviceFeeCents!: number;
  @ApiProperty(cents) totalChargedCents!: number;
  @ApiProperty(cents) refundedAmountCents!: number;
  @ApiProperty(cents) remainingRefundableAmountCents!: number;
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
}

export class PaymentPage implements PaymentPageView {
  @ApiProperty({ type: Payment, isArray: true }) payments!: Payment[];
  @ApiProperty({ ...orNull(text), description: 'Pass it as `cursor`, with the same filters; null on the last page.' }) nextCursor!: string | null;
}

export class RefundResult implements RefundView {
  @ApiProperty(uuid) id!: string;
  @ApiProperty(oneOf('group')) target!: 'group';
  @ApiProperty(oneOf('void', 'refund')) reversalType!: 'void' | 'refund';
  @ApiProperty(cents) amountCents!: number;
  @ApiProperty(oneOf('USD')) currency!: 'USD';
  @ApiProperty(orNull(text)) reason!: string | null;
  @ApiProperty(oneOf('succeeded')) status!: 'succeeded';
  @ApiProperty(cents) remainingRefundableAmountCents!: number;
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
  @ApiProperty(oneOf('USD')) currency!: 'USD';
  @ApiProperty(orNull(text)) reason!: string | null;
  @ApiProperty(oneOf('voided')) status!: 'voided';
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
  @ApiProperty(oneOf('USD')) currency!: 'USD';
}

export class AccessTokenGrant implements TokenGrant {
  @ApiProperty(text) accessToken!: string;
  @ApiProperty(oneOf('Bearer')) tokenType!: 'Bearer';
  @ApiProperty({ type: 'integer' }) expiresIn!: number;
  @ApiProperty(dateTime) expiresAt!: string;
}

class FieldFault {
  @ApiProperty({ ...text, description: 'Path of the field, such as `lineItems[0].referenceId`.' }) field!: string;
  @ApiProperty(text) message!: string;
}

/** The fields that come with each code: specification, Errors; C16, C53, C54, C62. */
class ErrorDetails {
  @ApiProperty(oneOf(...Object.keys(STATUS_OF))) code!: string;
  @ApiPropertyOptional({ ...uuid, description: 'The payment that was recorded, or that is to be checked.' }) id?: string;
  @ApiPropertyOptional({ ...oneOf(...DECLINE_CODES), description: 'On `PAYMENT_DECLINED`.' }) declineCode?: string;
  @ApiPropertyOptional({ type: 'boolean', description: 'On `VOID_FAILED` and `PARTIAL_REFUND_PENDING`.' }) retryable?: boolean;
  @ApiPropertyOptional({ ...oneOf('refund', 'retry_void'), description: 'As `retryable`.' }) suggestedAction?: string;
  @ApiPropertyOptional({ ...cents, description: 'On `PARTIAL_REFUND_PENDING`.' }) remainingRefundableAmountCents?: number;
  @ApiPropertyOptional({ ...oneOf('case', 'card'), description: 'On `VELOCITY_LIMIT`.' }) scope?: string;
  @ApiPropertyOptional({ type: 'integer', minimum: 1, description: 'On `VELOCITY_LIMIT`.' }) windowSeconds?: number;
  @ApiPropertyOptional({ ...dateTime, description: 'On `VELOCITY_LIMIT`, and on `DECLINE_BLOCKED` and `PAYMENT_HELD` when known.' }) retryAt?: string;
  @ApiPropertyOptional({ type: FieldFault, isArray: true, description: 'On `VALIDATION_ERROR`, what is wrong with which field.' })
  errors?: FieldFault[];
}

export class ErrorEnvelope {
  @ApiProperty({ type: 'boolean', enum: [false] }) success!: boolean;
  @ApiProperty(text) message!: string;
  @ApiPropertyOptional({ type: ErrorDetails, description: 'Absent on 401 and on 403 of authentication.' }) details?: ErrorDetails;
}

/** Models that other models use. */
export const RESOURCES = [PayerInfo, Settlement, Payment, PaymentPage, RefundResult, VoidResult, FeeQuote, AccessTokenGrant, ErrorEnvelope];

/** A payment on one page, for a person who answers a caller: in dollars, in the time zone that is named. */
import { dollars } from '#kernel';
import type { PaymentView, ReversalInWords, VisiblePayment } from '#payments';
import type { DeliveryRow } from '#webhooks';
import { fields, table, timeIn } from './terminal.js';

export interface PaymentPage {
  readonly view: PaymentView & { readonly accountId: string };
  readonly payment: VisiblePayment;
  readonly reversals: readonly ReversalInWords[];
  /** Name of the person who asked for a refund or void, by attempt. */
  readonly askedBy: ReadonlyMap<string, string>;
  /** null: an earlier state is shown, and webhooks are known only for now. */
  readonly webhooks: readonly DeliveryRow[] | null;
  readonly accountName: string;
  readonly portalName: string;
  readonly zone: string;
  readonly showsPersonal: boolean;
}

const HIDDEN = 'hidden: --with-personal shows it';
const words = (name: string): string => name.replaceAll('_', ' ');

export const paymentPage = (page: PaymentPage): string => {
  const { view, payment, reversals, askedBy, webhooks, zone, showsPersonal } = page;
  const at = (time: string | null): string => (time === null ? '' : timeIn(zone, time));
  const personal = (text: string | null): string => (showsPersonal ? (text ?? '') : HIDDEN);
  const charge = payment.phase === 'charged' ? payment : null;
  const payer = view.payer && [view.payer.firstName, view.payer.lastName, view.payer.email, view.payer.phone].filter(Boolean).join(', ');
  const section = (title: string, headings: readonly string[], rows: readonly (readonly string[])[]): string[] =>
    rows.length === 0 ? [] : [`${title}\n${table(headings, rows)}`];
  return [
    fields([
      ['payment', view.id],
      ['status', words(view.status)],
      ...(payment.phase === 'failed' ? [['why', payment.declineCode === null ? 'not charged' : `declined: ${words(payment.declineCode)}`] as const] : []), // prettier-ignore
      ['card', `${view.paymentMethod.brand} ${view.paymentMethod.last4}`.trim()],
      ['charged', charge ? `${dollars(view.capturedAmountCents)} on ${at(view.capturedAt)}` : 'nothing'],
      ['of it', `${dollars(view.amountCents)} and a service fee of ${dollars(view.serviceFeeCents)}`],
      ['returned', `${dollars(view.refundedAmountCents)}; ${dollars(view.remainingRefundableAmountCents)} remain`],
      ['settlement', view.settlement === null ? '' : `${view.settlement.status} ${at(view.settlement.settledAt)}`.trim()],
      ['confirmation', view.confirmationNumber ?? ''],
      ['reference', view.referenceId ?? ''],
      ['payer', view.personalDataErasedAt === undefined ? personal(payer) : `erased ${at(view.personalDataErasedAt)}`],
      ['account', `${page.accountName} ${view.accountId}`],
      ['portal', `${page.portalName} ${view.portalId}`],
      ['created', at(view.createdAt)],
      ['updated', at(view.updatedAt)],
      ['times', `in ${zone}${zone === 'UTC' ? '; --zone names another' : ''}`],
    ]),
    ...section(
      'LINES',
      ['REFERENCE', 'AMOUNT', 'FEE', 'RETURNED', 'STATUS'],
      view.lineItems.map((line) => [line.referenceId, dollars(line.amountCents), dollars(line.serviceFeeCents), dollars(line.refundedAmountCents), words(line.status)]), // prettier-ignore
    ),
    ...section(
      'CHARGES',
      ['LEG', 'AMOUNT', 'TRANSACTION', 'AUTHORIZATION', 'BATCH', 'BATCH CLOSED'],
      (charge?.legs ?? []).map((leg) => [
        leg.leg,
        dollars(leg.principalCents + leg.feeCents),
        leg.transactionId,
        leg.authCode,
        leg.settlementRejected ? 'rejected' : (leg.settledBatchId ?? 'not settled'),
        at(leg.settledAt),
      ]),
    ),
    ...section(
      'REFUNDS AND VOIDS',
      ['ASKED', 'WHAT', 'BY', 'OUTCOME', 'RETURNED', 'HOW', 'REASON'],
      reversals.map((one) => [
        at(one.requestedAt),
        one.operation,
        askedBy.get(one.attemptId) ?? one.initiatedBy,
        words(one.outcome),
        dollars(one.amountCents),
        one.legs.map(({ leg, means, amountCents, transactionId, status }) => `${leg} ${dollars(amountCents)} by ${means} ${transactionId}${status === 'succeeded' ? '' : ` ${status}`}`).join(', '), // prettier-ignore
        personal(one.reason),
      ]),
    ),
    ...section(
      'DISPUTES',
      ['OPENED', 'STATUS', 'STAGE', 'AMOUNT', 'REASON CODE', 'ANSWER DUE', 'DISPUTE'],
      (charge?.disputes ?? []).map((one) => [one.openedOn, words(one.status), one.stage, dollars(one.disputedAmountCents), one.reasonCode, one.dueDate, one.disputeId]), // prettier-ignore
    ),
    ...section(
      'WEBHOOKS',
      ['CREATED', 'TYPE', 'STATE', 'ATTEMPTS', 'DELIVERED', 'URL'],
      (webhooks ?? []).map((one) => [at(one.createdAt), one.type, one.state, String(one.attempts), at(one.deliveredAt), one.url]),
    ),
  ].join('\n\n');
};

/** `payfold payments`: what the ledger knows of a payment, now or at an earlier time. */
import type { Command } from 'commander';
import { decimal, ServiceError } from '#kernel';
import { fields, moment, table, type Terminal, UsageError, uuid } from './terminal.js';

interface ShowOptions {
  readonly asOf?: string;
  readonly revision?: string;
  readonly events?: boolean;
}

export const addPayments = (program: Command, { action }: Terminal): void => {
  const payments = program.command('payments').description('payments');
  payments
    .command('show')
    .description('a payment, folded from its events')
    .argument('<payment>', 'payment id', uuid)
    .option('--as-of <time>', 'as it was known at a time: RFC 3339, or a day', moment)
    .option('--revision <number>', 'as it was after its event of that number, from 0')
    .option('--events', 'its events too')
    .action(
      action(async ({ store }, id: string, { asOf, revision, events: withEvents = false }: ShowOptions) => {
        if (asOf !== undefined && revision !== undefined) throw new UsageError('--as-of and --revision exclude each other');
        if (revision !== undefined && !/^\d{1,9}$/.test(revision)) throw new UsageError('--revision must be a whole number');
        const { isVisible, payment: decider, paymentStream, paymentView, toPaymentEvent } = await import('#payments');
        const events = [];
        for await (const event of store.read(paymentStream(id))) {
          if (revision !== undefined && event.revision > BigInt(revision)) break;
          if (asOf !== undefined && event.meta.recordedAt > asOf) break;
          events.push(event);
        }
        const payment = events.map(toPaymentEvent).reduce(decider.evolve, decider.initial);
        if (!isVisible(payment)) throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
        const view = { ...paymentView(id, payment), accountId: payment.terms.accountId };
        const history = events.map((event) => ({
          revision: Number(event.revision),
          position: event.position,
          type: event.type,
          version: event.v,
          ...event.meta,
          data: event.data,
        }));
        const text = fields([
          ['payment', id],
          ['status', view.status],
          ['account', view.accountId],
          ['portal', view.portalId],
          ['principal', decimal(view.amountCents)],
          ['service fee', decimal(view.serviceFeeCents)],
          ['captured', decimal(view.capturedAmountCents)],
          ['returned', decimal(view.refundedAmountCents)],
          ['remaining', decimal(view.remainingRefundableAmountCents)],
          ['confirmation', view.confirmationNumber ?? ''],
          ['created', view.createdAt],
          ['updated', view.updatedAt],
        ]);
        const timeline = table(
          ['#', 'RECORDED', 'EVENT', 'ACTOR'],
          history.map((event) => [String(event.revision), event.recordedAt, event.type, `${event.actor.type} ${event.actor.id}`]),
        );
        return { json: withEvents ? { ...view, events: history } : view, text: withEvents ? `${text}\n\n${timeline}` : text };
      }),
    );
};

/** The begins of endpoints' answers, which are kept with the delivery attempts. An endpoint may have sent back what it got. */
import type { Queryable } from '#platform';

/** Empties the answers to all notifications of these payments. */
export const forgetResponses = async (db: Queryable, paymentIds: readonly string[]): Promise<void> => {
  if (paymentIds.length === 0) return;
  await db.query(
    `update webhook_attempt set response_head = null where response_head is not null and delivery_id in (
       select d.id from webhook_delivery d join webhook_event e on e.id = d.event_id where e.payment_id = any ($1::uuid[]))`,
    [paymentIds],
  );
};

/** Runs the contract of deliveries (test/support/deliveries.contract.ts) on Postgres, with the real outbox and the real operator commands. */
import { resetCheckpoint } from '#eventstore';
import { transaction } from '#platform';
import { deliveriesContract } from '../../test/support/deliveries.contract.js';
import { openWebhookGround, openWebhookStage, type WebhookStage } from '../../test/support/webhooks.js';
import { postgresDeliveries, redeliver } from './deliveries.js';
import { WEBHOOK_OUTBOX } from './outbox.js';

const VERBS = { paused: 'pause', enabled: 'resume', disabled: 'disable' } as const;

const tablesOf = async (stage: WebhookStage) => {
  const { id: paymentId } = await stage.house.charge();
  let happened = 0;
  return {
    workers: [postgresDeliveries(stage.pool, 'one'), postgresDeliveries(stage.pool, 'two')] as const,
    register: async (url: string) => {
      // Insert the row without the check of its URL, which target.unit.spec.ts tests.
      const id = stage.house.ids.uuid();
      const head = await stage.house.store.head();
      await stage.query(`insert into webhook_endpoint (id, account_id, url, created_at, registered_at_position) values ($1, $2, $3, now(), $4)`, [
        id,
        stage.house.accountId,
        url,
        head,
      ]);
      await stage.query(
        `insert into webhook_endpoint_secret (id, endpoint_id, kid, ciphertext, hint, state, created_at) values ($1, $2, 'k', 'c', 'hint', 'active', now())`,
        [stage.house.ids.uuid(), id],
      );
      return id;
    },
    change: (endpointId: string, to: keyof typeof VERBS) => stage.endpoints[VERBS[to]](endpointId),
    happen: () => stage.dispute(paymentId, { stage: `s${++happened}` }),
    tell: () => stage.tell(),
    replay: async () => {
      await transaction(stage.pool, (client) => resetCheckpoint(client, WEBHOOK_OUTBOX, null));
      await stage.tell();
    },
    pass: (seconds: number) =>
      stage.query(
        `update webhook_delivery set due_at = due_at - $1::int * interval '1 s', lease_until = lease_until - $1::int * interval '1 s' where state in ('pending', 'in_flight')`,
        [seconds],
      ),
    redeliver: (deliveryId: string) =>
      redeliver(stage.staff, [deliveryId]).then(
        () => true,
        () => false,
      ),
    rows: async () =>
      (await stage.rows()).map(({ id, endpoint_id: endpointId, state, round, attempts, lease_losses: losses }) => ({
        id,
        endpointId,
        state,
        round,
        attempts,
        losses,
      })),
    counts: async () => {
      const [counts] = await stage.query<{ events: string; attempts: string }>(
        // After a replay, webhook_event also holds payments of earlier runs. Count only the rows of this payment.
        'select (select count(*) from webhook_event where payment_id = $1) as events, (select count(*) from webhook_attempt) as attempts',
        [paymentId],
      );
      return { events: Number(counts!.events), attempts: Number(counts!.attempts) };
    },
  };
};

deliveriesContract(
  'Postgres’',
  async () => {
    const ground = await openWebhookGround();
    const stage = await openWebhookStage(ground);
    return {
      fresh: async () => {
        await stage.query(
          'truncate webhook_attempt, webhook_delivery, webhook_event, webhook_endpoint_secret, webhook_endpoint, webhook_purged cascade',
        );
        return tablesOf(stage);
      },
      close: async () => {
        await stage.close();
        await ground.close();
      },
    };
  },
  25,
);

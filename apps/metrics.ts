/** Prometheus metrics of a role. Labels are routes and codes, but never ids or a caller's text. */
import { postgresChargeStops } from '#accounts';
import { unfinishedSessions } from '#checkout';
import { ACKNOWLEDGED_TASKS, OPEN_STATES, openAttempts, openStaffTasks, type StaffTaskReason } from '#payments';
import client, { type Registry } from 'prom-client';
import { LANES } from '#kernel';
import type { Slots } from '#platform';
import { driftFigures, findAlerts, passFigures, unsignedEvents } from '#audit';
import { suspenseCents } from '#ledger';
import type { Answered } from '#platform/http';
import { batchFigures, exceptionFigures, feedsOf } from '#settlement';
import { deliveryFigures } from '#webhooks';
import type { MetLimit } from './audit/limits.js';
import { checkAll } from './health.js';
import { countMaskedLines } from './lifecycle.js';
import type { Services } from './services.js';

export interface Metrics {
  /** Figures of this process. */
  readonly own: Registry;
  /** Figures of the installation, read from the database. Every process shows the same figures. */
  readonly shared: Registry;
  readonly answered: (request: Answered) => void;
  /** Shows these rate limits of hosted checkout. */
  readonly limitedBy: (limits: Limits) => void;
  readonly auditLimited: (limit: MetLimit) => void;
}

interface Limits {
  lowered(): number;
}

/** Time between two samples of the event loop. At prom-client's default of 10 ms, the samples cost an idle process half a percent of a core. */
const LOOP_SAMPLE_MS = 50;
/** Tasks that a decision or an acknowledgement ends. */
const STAFF_TASKS: readonly StaffTaskReason[] = ['charge_cannot_be_undone', 'settled_while_unknown', 'outcome_overdue', ...ACKNOWLEDGED_TASKS];
const LATENCY_BUCKETS_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30];

interface Collected {
  readonly labelNames: readonly string[];
  collect?: () => unknown;
  reset(): void;
  remove(): void;
}

/** If the database cannot be read now, its figures are absent, and the others are shown. */
const leaveOutUnread = (registry: Registry): void => {
  for (const metric of registry.getMetricsAsArray() as unknown as Collected[]) {
    const { collect } = metric;
    if (collect)
      metric.collect = async () => {
        try {
          await collect.call(metric);
        } catch {
          metric.reset();
          // A metric without labels would be 0 now.
          if (metric.labelNames.length === 0) metric.remove();
        }
      };
  }
};

export const createMetrics = (services: Services): Metrics => {
  const [own, shared] = [new client.Registry(), new client.Registry()];
  client.collectDefaultMetrics({ register: own, eventLoopMonitoringPrecision: LOOP_SAMPLE_MS });
  countMaskedLines(own);
  const seconds = new client.Histogram({
    name: 'payfold_http_request_duration_seconds',
    help: 'Time to answer, by method, route and status',
    labelNames: ['method', 'route', 'status'],
    buckets: LATENCY_BUCKETS_SECONDS,
    registers: [own],
  });
  const errors = new client.Counter({
    name: 'payfold_http_errors_total',
    help: 'Error envelopes that were answered, by code; none: a failed authentication',
    labelNames: ['code', 'status'],
    registers: [own],
  });
  new client.Counter({
    name: 'payfold_personal_keys_missing_total',
    help: 'Keys of personal data that were looked up, and that are neither kept nor erased',
    registers: [own],
    collect() {
      this.reset();
      this.inc(services.personal.missing);
    },
  });
  new client.Gauge({
    name: 'payfold_ready',
    help: '1 if payments can use this part of the service, by check of /readyz',
    labelNames: ['check'],
    registers: [shared],
    async collect() {
      for (const [check, result] of await checkAll(services.readiness, services.clock)) this.set({ check }, result === 'ok' ? 1 : 0);
    },
  });
  new client.Gauge({
    name: 'payfold_projection_lag_milliseconds',
    help: 'Age of the oldest event that a projection has not applied',
    labelNames: ['projection'],
    registers: [shared],
    async collect() {
      for (const projection of [...services.readModels.all(), ...Object.values(services.reactors)]) {
        const { lagMs } = await projection.status();
        // null: the checkpoint is not in the log, which is an incident.
        if (lagMs === null) this.remove({ projection: projection.name });
        else this.set({ projection: projection.name }, lagMs);
      }
    },
  });
  new client.Gauge({
    name: 'payfold_open_attempts',
    help: 'Charges and reversals without an outcome, by state, and the age of the oldest in seconds',
    labelNames: ['state', 'figure'],
    registers: [shared],
    async collect() {
      const open = await openAttempts(services.pool, services.clock.now());
      for (const state of OPEN_STATES) {
        this.set({ state, figure: 'count' }, open[state].count);
        this.set({ state, figure: 'oldest_seconds' }, open[state].oldestSeconds);
      }
    },
  });
  new client.Gauge({
    name: 'payfold_staff_tasks',
    help: 'Open tasks of staff about payments, by task, and the age of the oldest in seconds',
    labelNames: ['task', 'figure'],
    registers: [shared],
    async collect() {
      const open = await openStaffTasks(services.pool, services.clock.now());
      for (const task of STAFF_TASKS) {
        const { count, oldestSeconds } = open.find((one) => one.task === task) ?? { count: 0, oldestSeconds: 0 };
        this.set({ task, figure: 'count' }, count);
        this.set({ task, figure: 'oldest_seconds' }, oldestSeconds);
      }
    },
  });
  new client.Gauge({
    name: 'payfold_store_incident',
    help: '1 while the event store is not the log of this installation, or has lost events; nothing is charged then',
    registers: [shared],
    collect() {
      this.set(services.ownLog.incident ? 1 : 0);
    },
  });
  addWebhookMetrics({ own, shared }, services);
  addLedgerMetrics(shared, services);
  addSettlementMetrics(shared, services);
  addAlertMetrics(shared, services);
  addGatewayMetrics(own, services);
  addStopMetric(shared, services);
  addSlotMetrics(own, services);
  new client.Gauge({
    name: 'payfold_checkout_unfinished',
    help: 'Hosted checkouts whose attempt has no outcome yet, and the age of the oldest in seconds',
    labelNames: ['figure'],
    registers: [shared],
    async collect() {
      const { count, oldestSeconds } = await unfinishedSessions(services.pool, services.clock.now());
      this.set({ figure: 'count' }, count);
      this.set({ figure: 'oldest_seconds' }, oldestSeconds);
    },
  });
  const outcomes = new client.Counter({
    name: 'payfold_checkout_outcomes_total',
    help: 'What became of hosted checkouts, as this process recorded it',
    labelNames: ['outcome'],
    registers: [own],
  });
  const declines = new client.Counter({
    name: 'payfold_checkout_declines',
    help: 'Cards that were declined in hosted checkout, as this process recorded it',
    registers: [own],
  });
  services.checkout.sessions.watch((outcome) => {
    outcomes.inc({ outcome });
    if (outcome === 'declined') declines.inc();
  });
  for (const registry of [own, shared]) leaveOutUnread(registry);
  let limits: Limits | null = null;
  new client.Gauge({
    name: 'payfold_checkout_lowered_portals',
    help: 'Portals for which this process has lowered the limits of hosted checkout by address',
    registers: [own],
    collect() {
      this.set(limits?.lowered() ?? 0);
    },
  });
  const limited = new client.Counter({
    name: 'payfold_audit_limited_total',
    help: 'Requests of the audit API that met a limit: refused (exports, queries, waits), or an export cut off (rate, time)',
    labelNames: ['limit'],
    registers: [own],
  });
  return {
    own,
    shared,
    limitedBy: (found) => {
      limits = found;
    },
    answered: ({ method, route, status, seconds: took, errorCode }) => {
      seconds.observe({ method, route, status: String(status) }, took);
      if (errorCode !== undefined) errors.inc({ code: errorCode ?? 'none', status: String(status) });
    },
    auditLimited: (limit) => limited.inc({ limit }),
  };
};

const addGatewayMetrics = (own: Registry, { gatewayCalls }: Services): void => {
  const seconds = new client.Histogram({
    name: 'payfold_gateway_call_duration_seconds',
    help: 'Duration of calls to card processors, by processor, operation and kind of outcome',
    labelNames: ['gateway', 'operation', 'outcome'],
    buckets: LATENCY_BUCKETS_SECONDS,
    registers: [own],
  });
  gatewayCalls.watch(({ seconds: took, ...call }) => seconds.observe(call, took));
  new client.Counter({
    name: 'payfold_gateway_refused_credentials_total',
    help: 'Calls that a processor refused because of the credentials of a merchant account',
    labelNames: ['gateway', 'account'],
    registers: [own],
    collect() {
      this.reset();
      // A series that begins with 0 lets the alarm see the first refusal.
      for (const { count, ...labels } of gatewayCalls.refusedCredentials) this.inc(labels, count);
    },
  });
  new client.Counter({
    name: 'payfold_gateway_alarms_total',
    help: 'Answers that need a person at once, by merchant account: in test mode, or with the transaction of another charge',
    labelNames: ['gateway', 'account'],
    registers: [own],
    collect() {
      this.reset();
      for (const { count, ...labels } of gatewayCalls.alarmingAnswers) this.inc(labels, count);
    },
  });
  new client.Counter({
    name: 'payfold_gateway_held_total',
    help: 'Charges that a processor held for review, by merchant account; each was undone at once',
    labelNames: ['gateway', 'account'],
    registers: [own],
    collect() {
      this.reset();
      for (const { count, ...labels } of gatewayCalls.heldCharges) this.inc(labels, count);
    },
  });
};

/** The metrics of slots. `queue`: `service`, `gateway`, or `gateway-house` for the share of recovery and staff. */
const addSlotMetrics = (own: Registry, { slots, payments }: Services): void => {
  const queues: { readonly queue: string; readonly slots: Slots }[] = [];
  new client.Gauge({
    name: 'payfold_waiting_requests',
    help: 'Requests that wait for a slot of this process or at the gateway, by queue and lane',
    labelNames: ['queue', 'lane'],
    registers: [own],
    collect() {
      this.reset();
      for (const lane of LANES) for (const one of queues) this.inc({ queue: one.queue, lane }, one.slots.waiting(lane));
    },
  });
  const refused = new client.Counter({
    name: 'payfold_rate_limited_total',
    help: 'Requests that found no slot. share: their account had more than its share waiting; time: no slot became free in time',
    labelNames: ['queue', 'reason'],
    registers: [own],
  });
  const watch = (queue: string, watched: Slots) => {
    queues.push({ queue, slots: watched });
    watched.watch((reason) => refused.inc({ queue, reason }));
  };
  watch('service', slots);
  payments.ports.slots.watch((watched, share) => watch(share === 'house' ? 'gateway-house' : 'gateway', watched));
};

const addSettlementMetrics = (shared: Registry, { pool, clock, directory }: Services): void => {
  const registers = [shared];
  new client.Gauge({
    name: 'payfold_settlement_exceptions',
    help: 'Settlement exceptions that nobody has resolved, by kind, and the age of the oldest in seconds',
    labelNames: ['kind', 'figure'],
    registers,
    async collect() {
      for (const { kind, count, oldestSeconds } of await exceptionFigures(pool, clock.now())) {
        this.set({ kind, figure: 'count' }, count);
        this.set({ kind, figure: 'oldest_seconds' }, oldestSeconds);
      }
    },
  });
  let look: ReturnType<typeof batchFigures> | null = null;
  const figures = () => (look ??= batchFigures(pool, clock.now()).finally(() => (look = null)));
  new client.Gauge({
    name: 'payfold_settlement_last_batch_seconds',
    help: 'Age of the newest batch that a processor listed; absent before the first',
    registers,
    async collect() {
      const { lastBatchSeconds } = await figures();
      if (lastBatchSeconds === null) this.remove();
      else this.set(lastBatchSeconds);
    },
  });
  new client.Gauge({
    name: 'payfold_settlement_waiting_seconds',
    help: 'How long money has waited for a batch that moved after the newest batch was recorded; 0: none waits',
    registers,
    async collect() {
      this.set((await figures()).waitingSeconds);
    },
  });
  new client.Gauge({
    name: 'payfold_gateway_feed_age_seconds',
    help: 'Seconds since the batches or the disputes of a merchant account were last read to their end',
    labelNames: ['account', 'feed'],
    registers,
    async collect() {
      const disabled = (await directory.merchantAccounts())
        .filter(({ status }) => status === 'disabled')
        .map(({ merchantAccount }) => merchantAccount);
      this.reset();
      for (const { merchantAccount, feed, ageSeconds } of await feedsOf(pool, null))
        if (!disabled.includes(merchantAccount)) this.set({ account: merchantAccount, feed }, ageSeconds);
    },
  });
};

/** `payfold_gateway_charges_stopped`: absent while no account is stopped. */
const addStopMetric = (shared: Registry, { pool }: Services): void => {
  const stops = postgresChargeStops(pool);
  new client.Gauge({
    name: 'payfold_gateway_charges_stopped',
    help: '1 for a merchant account through which no new charge begins, since its processor refuses to show transactions',
    labelNames: ['gateway', 'account'],
    registers: [shared],
    async collect() {
      const stopped = await stops.all();
      this.reset();
      for (const { gateway, merchantAccount: account } of stopped) this.set({ gateway, account }, 1);
    },
  });
};

const addAlertMetrics = (shared: Registry, { store, pool, clock, config }: Services): void => {
  const registers = [shared];
  // Both gauges of one scrape share one look.
  let look: ReturnType<typeof findAlerts> | null = null;
  const alerts = () => (look ??= findAlerts({ store, db: pool, nowMs: clock.now(), thresholds: config.alerts }).finally(() => (look = null)));
  new client.Gauge({
    name: 'payfold_alert',
    help: 'Number of things for which an alert of payfold alerts fires; 0: it does not fire',
    labelNames: ['name'],
    registers,
    async collect() {
      for (const { name, count } of await alerts()) this.set({ name }, count);
    },
  });
  new client.Gauge({
    name: 'payfold_alert_oldest_seconds',
    help: 'Age of the oldest thing for which an alert fires; 0: the alert does not fire, or the age is unknown',
    labelNames: ['name'],
    registers,
    async collect() {
      for (const { name, oldestAt } of await alerts())
        this.set({ name }, oldestAt === null ? 0 : Math.max(0, clock.now() - Date.parse(oldestAt)) / 1_000);
    },
  });
};

const ATTEMPT_BUCKETS_SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10];

const addWebhookMetrics = ({ own, shared }: Pick<Metrics, 'own' | 'shared'>, { webhooks, reactors, pool }: Services): void => {
  const registers = [shared];
  const attempts = new client.Counter({
    name: 'payfold_webhook_attempts_total',
    help: 'Attempts to deliver a webhook, by outcome',
    labelNames: ['outcome'],
    registers: [own],
  });
  const seconds = new client.Histogram({
    name: 'payfold_webhook_attempt_seconds',
    help: 'Duration of attempts to deliver a webhook',
    buckets: ATTEMPT_BUCKETS_SECONDS,
    registers: [own],
  });
  const leases = new client.Counter({
    name: 'payfold_webhook_lease_lost_total',
    help: 'Webhook deliveries whose worker was lost, or ended too late',
    registers: [own],
  });
  webhooks.watch({
    attempted: ({ outcome, seconds: took }) => {
      attempts.inc({ outcome });
      seconds.observe(took);
    },
    leaseLost: () => leases.inc(),
  });
  // All webhook gauges of one scrape share one query.
  let look: ReturnType<typeof deliveryFigures> | null = null;
  const figures = () => (look ??= deliveryFigures(pool).finally(() => (look = null)));
  new client.Gauge({
    name: 'payfold_webhook_oldest_due_seconds',
    help: 'How long the oldest webhook delivery has been due that its endpoint could have had',
    registers,
    async collect() {
      this.set((await figures()).oldestDueSeconds);
    },
  });
  new client.Gauge({
    name: 'payfold_webhook_held',
    help: 'Webhook deliveries that wait for staff',
    registers,
    async collect() {
      this.set((await figures()).open.held);
    },
  });
  new client.Gauge({
    name: 'payfold_webhook_deliveries',
    help: 'Webhook deliveries that are open, by state',
    labelNames: ['state'],
    registers,
    async collect() {
      for (const [state, count] of Object.entries((await figures()).open)) this.set({ state }, count);
    },
  });
  new client.Gauge({
    name: 'payfold_webhook_outbox_lag_events',
    help: 'Events of all streams that the webhook outbox has not looked at; absent where positions do not count events',
    registers,
    async collect() {
      const { lagEvents } = await reactors.webhookOutbox.status();
      if (lagEvents === null) this.remove();
      else this.set(lagEvents);
    },
  });
};

const addLedgerMetrics = (shared: Registry, { reactors, pool, seal }: Services): void => {
  const registers = [shared];
  let look: ReturnType<typeof driftFigures> | null = null;
  const figures = () => (look ??= driftFigures(seal).finally(() => (look = null)));
  new client.Gauge({
    name: 'payfold_drift_differences',
    help: 'Payments, by kind, that are shown otherwise than their events say; any is a fault, or tampering',
    registers,
    async collect() {
      this.set((await figures()).differences);
    },
  });
  new client.Gauge({
    name: 'payfold_drift_last_run_seconds',
    help: 'How long ago a pass last came to the end of all payments; absent before the first time',
    registers,
    async collect() {
      const { lastRunSeconds } = await figures();
      if (lastRunSeconds === null) this.remove();
      else this.set(lastRunSeconds);
    },
  });
  new client.Gauge({
    name: 'payfold_drift_oldest_seconds',
    help: 'Age of the oldest change of a payment that was not compared yet; 0 if there is none; absent before the first comparison',
    registers,
    async collect() {
      const { oldestSeconds } = await figures();
      if (oldestSeconds === null) this.remove();
      else this.set(oldestSeconds);
    },
  });
  new client.Gauge({
    name: 'payfold_verify_failed_checks',
    help: 'Checks that failed in the last verification pass; absent until a pass is due',
    labelNames: ['pass'],
    registers,
    async collect() {
      for (const { pass, failedChecks } of await passFigures(pool)) this.set({ pass }, failedChecks);
    },
  });
  new client.Gauge({
    name: 'payfold_verify_last_run_seconds',
    help: 'How long ago a verification pass last ended; absent until a pass is due',
    labelNames: ['pass'],
    registers,
    async collect() {
      for (const { pass, lastRunSeconds } of await passFigures(pool)) this.set({ pass }, lastRunSeconds);
    },
  });
  new client.Gauge({
    name: 'payfold_seal_lag_seconds',
    help: 'Age of the oldest event that is not in the sealed log',
    registers,
    async collect() {
      const { lagMs } = await reactors.logSeal.status();
      if (lagMs === null) this.remove();
      else this.set(lagMs / 1_000);
    },
  });
  new client.Gauge({
    name: 'payfold_seal_unsigned_events',
    help: 'Sealed events that no signed head covers yet',
    registers,
    async collect() {
      this.set(await unsignedEvents(pool));
    },
  });
  new client.Gauge({
    name: 'payfold_suspense_cents',
    help: 'Settled money that nobody has explained yet, in cents, of all merchant accounts',
    registers,
    async collect() {
      this.set(await suspenseCents(pool));
    },
  });
};

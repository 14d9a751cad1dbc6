/**
 * The tables of webhooks under simulation: endpoints, their secrets, events, deliveries, attempts. What the dispatcher does with them goes through the port of
 * `libs/webhooks/deliveries.ts` and keeps its contract suite; what the outbox and staff write comes as their SQL, a statement at a time.
 */
import {
  type Claimed,
  type Deliveries,
  type DeliveryState,
  type Ended,
  type EndpointStatus,
  FAILING_AFTER,
  LEASE_MS,
  MAX_LEASE_LOSSES,
  RETRY_SPREAD,
} from '#webhooks';
import type { Rng } from './simulator.js';
import type { Run, Statement } from './stores.js';

interface EndpointRow {
  readonly id: string;
  readonly accountId: string;
  readonly url: string;
  readonly createdAt: string;
  readonly registeredAt: string;
  /** When the row could be seen, by the tables' clock. */
  readonly seenFrom: number;
  status: EndpointStatus;
  failures: number;
}

interface SecretRow {
  readonly id: string;
  readonly endpointId: string;
  readonly kid: string;
  ciphertext: string | null;
  readonly hint: string;
  state: 'staged' | 'active' | 'retired';
}

export interface EventRow {
  readonly id: string;
  readonly type: string;
  readonly accountId: string;
  readonly paymentId: string;
  readonly payload: Buffer;
  readonly stream: string;
  readonly revision: string;
  readonly position: string;
}

export interface DeliveryRow {
  readonly id: string;
  readonly eventId: string;
  readonly endpointId: string;
  state: DeliveryState;
  round: number;
  attempts: number;
  leaseLosses: number;
  /** Of all rounds, which the product does not count. */
  lostInAll: number;
  dueAt: number;
  lease: { readonly token: string; readonly until: number } | null;
}

export interface AttemptRow extends Pick<Ended, 'outcome' | 'startedAtMs' | 'durationMs'> {
  readonly deliveryId: string;
  readonly round: number;
  readonly attempt: number;
}

/** As `max_in_flight` of an endpoint that nobody has changed, and `CLOCK_TOLERANCE_MS` of the product. */
const SHARE = 8;
const CLOCK_TOLERANCE_MS = 5_000;

/** What all replicas share, and one clock. Each method is one statement. */
export class WebhookTables {
  readonly endpoints = new Map<string, EndpointRow>();
  readonly secrets = new Map<string, SecretRow>();
  readonly events = new Map<string, EventRow>();
  readonly deliveries = new Map<string, DeliveryRow>();
  readonly attempts: AttemptRow[] = [];
  private leases = 0;

  constructor(
    readonly now: () => number,
    private readonly rng: Rng,
  ) {}

  /** The outbox: events and their deliveries, each once. */
  tell(told: readonly EventRow[]): void {
    for (const event of told) {
      if (!this.events.has(event.id)) this.events.set(event.id, event);
      for (const { id: endpointId, accountId, status, registeredAt } of this.endpoints.values()) {
        if (accountId !== event.accountId || status === 'disabled' || registeredAt >= event.position) continue;
        if ([...this.deliveries.values()].some((one) => one.eventId === event.id && one.endpointId === endpointId)) continue;
        const id = String(this.deliveries.size + 1);
        this.deliveries.set(id, { id, eventId: event.id, endpointId, state: 'pending', round: 1, attempts: 0, leaseLosses: 0, lostInAll: 0, dueAt: this.now(), lease: null }); // prettier-ignore
      }
    }
  }

  private of(endpointId: string, state: DeliveryState): DeliveryRow[] {
    return [...this.deliveries.values()].filter((one) => one.endpointId === endpointId && one.state === state);
  }

  activeSecret(endpointId: string): SecretRow | undefined {
    return [...this.secrets.values()].find((one) => one.endpointId === endpointId && one.state === 'active');
  }

  claimDue(slots: number): Claimed[] {
    const now = this.now();
    const enabled = [...this.endpoints.values()].filter(({ status }) => status === 'enabled');
    const inAnyOrder = enabled.map((endpoint) => ({ endpoint, place: this.rng.next() })).sort((a, b) => a.place - b.place);
    const picked = inAnyOrder.flatMap(({ endpoint: { id, failures } }) => {
      const free = (failures >= FAILING_AFTER ? 1 : SHARE) - this.of(id, 'in_flight').length;
      return this.of(id, 'pending')
        .filter(({ dueAt }) => dueAt <= now)
        .sort((a, b) => a.dueAt - b.dueAt || Number(a.id) - Number(b.id))
        .slice(0, Math.max(0, free));
    });
    return picked.slice(0, slots).map((one) => {
      const token = `lease ${++this.leases}`;
      Object.assign(one, { state: 'in_flight', lease: { token, until: now + LEASE_MS } });
      const { id: eventId, type, payload } = this.events.get(one.eventId)!;
      const { id: endpointId, url, failures: consecutiveFailures } = this.endpoints.get(one.endpointId)!;
      const { id: secretId, kid, ciphertext } = this.activeSecret(endpointId)!;
      const { id: deliveryId, round, attempts } = one;
      return { deliveryId, token, round, attempts, eventId, type, payload, endpointId, url, consecutiveFailures, secretId, sealed: { kid, ciphertext: ciphertext! }, claimedAtMs: now, chance: this.rng.next() }; // prettier-ignore
    });
  }

  private held({ deliveryId, token }: { readonly deliveryId: string; readonly token: string }): DeliveryRow | undefined {
    const row = this.deliveries.get(deliveryId);
    return row?.state === 'in_flight' && row.lease?.token === token ? row : undefined;
  }

  complete(ended: readonly Ended[]): boolean[] {
    return ended.map((one) => {
      const row = this.held(one);
      if (!row) return false;
      const { fate, outcome, startedAtMs, durationMs } = one;
      const dueAt = fate.state === 'pending' ? this.now() + fate.waitMs : row.dueAt;
      Object.assign(row, { state: fate.state, attempts: row.attempts + 1, lease: null, dueAt });
      this.attempts.push({ deliveryId: row.id, round: row.round, attempt: row.attempts, outcome, startedAtMs, durationMs });
      return true;
    });
  }

  release(claimed: readonly Pick<Claimed, 'deliveryId' | 'token'>[], waitMs: number): void {
    for (const one of claimed) {
      const row = this.held(one);
      if (row) Object.assign(row, { state: 'pending', lease: null, dueAt: this.now() + waitMs });
    }
  }

  recordHealth(results: Parameters<Deliveries['recordHealth']>[0]): Awaited<ReturnType<Deliveries['recordHealth']>> {
    return [...new Set(results.map(({ endpointId }) => endpointId))].map((endpointId) => {
      const endpoint = this.endpoints.get(endpointId)!;
      const mine = results.filter((one) => one.endpointId === endpointId);
      const before = endpoint.failures;
      endpoint.failures = mine.some(({ succeeded }) => succeeded) ? 0 : before + mine.length;
      return { endpointId, before, after: endpoint.failures };
    });
  }

  expired(): { deliveryId: string; token: string }[] {
    return [...this.deliveries.values()].flatMap(({ id, lease }) =>
      lease && lease.until < this.now() ? [{ deliveryId: id, token: lease.token }] : [],
    );
  }

  reap(leases: Parameters<Deliveries['reap']>[0]): { deliveryId: string; held: boolean }[] {
    return leases.flatMap((lease) => {
      const row = this.held(lease);
      if (!row || row.lease!.until >= this.now()) return [];
      const held = row.leaseLosses + 1 >= MAX_LEASE_LOSSES;
      Object.assign(row, { state: held ? 'held' : 'pending', leaseLosses: row.leaseLosses + 1, lostInAll: row.lostInAll + 1, lease: null, dueAt: this.now() }); // prettier-ignore
      return [{ deliveryId: row.id, held }];
    });
  }

  tidy(retrySeconds: number): void {
    this.cancelForDisabled();
    const now = this.now();
    const longestWaitMs = Math.ceil(retrySeconds * 1000 * (1 + RETRY_SPREAD));
    for (const row of this.deliveries.values()) {
      if (row.state === 'pending' && row.dueAt > now + longestWaitMs + CLOCK_TOLERANCE_MS) row.dueAt = now + longestWaitMs;
      if (row.lease && row.lease.until > now + LEASE_MS + CLOCK_TOLERANCE_MS) row.lease = { ...row.lease, until: now + LEASE_MS };
    }
  }

  cancelForDisabled(): void {
    for (const row of this.deliveries.values())
      if (row.state === 'pending' && this.endpoints.get(row.endpointId)!.status === 'disabled') row.state = 'canceled';
  }

  canReopen({ state, endpointId }: DeliveryRow): boolean {
    return (state === 'held' || state === 'delivered') && this.endpoints.get(endpointId)!.status !== 'disabled';
  }

  reopen(row: DeliveryRow): void {
    Object.assign(row, { state: 'pending', round: row.round + 1, attempts: 0, leaseLosses: 0, dueAt: this.now() });
  }
}

/** One replica's way to the tables. */
export const simulatedDeliveries = (tables: WebhookTables, statement: Statement): Deliveries => ({
  claimDue: (slots) => statement('claimDue', () => tables.claimDue(slots), true),
  complete: (ended) => statement('complete', () => tables.complete(ended)),
  release: (claimed, waitMs) => statement('release', () => tables.release(claimed, waitMs)),
  recordHealth: (results) => statement('recordHealth', () => tables.recordHealth(results)),
  expired: () => statement('expired', () => tables.expired(), true),
  reap: (leases) => statement('reap', () => tables.reap(leases)),
  tidy: (retrySeconds) => statement('tidy', () => tables.tidy(retrySeconds), true),
});

const rowsOf = (rows: readonly object[]) => ({ rows, rowCount: rows.length });
const done = (rowCount = 1) => ({ rows: [], rowCount });
const text = (value: unknown) => value as string;
const texts = (value: unknown) => value as readonly string[];

/** Rows of one transaction that changes deliveries or an endpoint are not another's until it ends. */
const REDELIVERY = 'redelivery';

/** What the outbox and staff say to Postgres, by how the statement begins, white space made one. */
export const WEBHOOK_STATEMENTS: readonly (readonly [string, Run])[] = [
  ['with told as ( select * from unnest', (tables, [ids, types, accounts, payments, payloads, , streams, revisions, positions], transaction) => {
    const told = texts(ids).map((id, index) => ({
      id,
      type: texts(types)[index]!,
      accountId: texts(accounts)[index]!,
      paymentId: texts(payments)[index]!,
      payload: (payloads as readonly Buffer[])[index]!,
      stream: texts(streams)[index]!,
      revision: texts(revisions)[index]!,
      position: texts(positions)[index]!,
    }));
    tables.write(transaction, () => tables.webhooks.tell(told));
    return done(told.length);
  }],
  ["select pg_notify('webhook_due'", (tables, _values, transaction) => {
    tables.write(transaction, () => tables.ring());
    return done();
  }],
  ['select pg_advisory_xact_lock', async (tables, [name], transaction) => {
    await tables.lock(text(name), transaction);
    return done();
  }],
  ['select from webhook_endpoint where account_id = $1 and url = $2', ({ webhooks }, [accountId, url]) =>
    done([...webhooks.endpoints.values()].filter((one) => one.accountId === accountId && one.url === url && one.status !== 'disabled').length)],
  ['insert into webhook_endpoint (id,', (tables, [id, accountId, url, , createdAt, registeredAt], transaction) => {
    const row: EndpointRow = { id: text(id), accountId: text(accountId), url: text(url), createdAt: text(createdAt), registeredAt: text(registeredAt), seenFrom: 0, status: 'enabled', failures: 0 }; // prettier-ignore
    tables.write(transaction, () => tables.webhooks.endpoints.set(row.id, { ...row, seenFrom: tables.now }));
    return done();
  }],
  ['insert into webhook_endpoint_secret (id,', (tables, [id, endpointId, kid, ciphertext, hint, state], transaction) => {
    const row: SecretRow = { id: text(id), endpointId: text(endpointId), kid: text(kid), ciphertext: text(ciphertext), hint: text(hint), state: state as SecretRow['state'] }; // prettier-ignore
    tables.write(transaction, () => tables.webhooks.secrets.set(row.id, row));
    return done();
  }],
  ['select status from webhook_endpoint where id = $1 for update', async (tables, [id], transaction) => {
    await tables.lock(`webhook_endpoint ${text(id)}`, transaction);
    const found = tables.webhooks.endpoints.get(text(id));
    return rowsOf(found ? [{ status: found.status }] : []);
  }],
  ['update webhook_endpoint set status = $2', (tables, [id, status], transaction) => {
    tables.write(transaction, () => Object.assign(tables.webhooks.endpoints.get(text(id))!, { status, failures: 0 }));
    return done();
  }],
  ["update webhook_delivery set state = 'canceled'", (tables, _values, transaction) => {
    tables.write(transaction, () => tables.webhooks.cancelForDisabled());
    return done();
  }],
  ['select id from webhook_endpoint_secret where endpoint_id = $1 and state = \'staged\'', ({ webhooks }, [endpointId]) =>
    rowsOf([...webhooks.secrets.values()].filter((one) => one.endpointId === endpointId && one.state === 'staged').map(({ id }) => ({ id })))],
  ["update webhook_endpoint_secret set state = 'retired'", (tables, [endpointId, state], transaction) => {
    tables.write(transaction, () => {
      for (const row of tables.webhooks.secrets.values())
        if (row.endpointId === endpointId && row.state === state) Object.assign(row, { state: 'retired', ciphertext: null });
    });
    return done();
  }],
  ["update webhook_endpoint_secret set state = 'active'", (tables, [id], transaction) => {
    tables.write(transaction, () => (tables.webhooks.secrets.get(text(id))!.state = 'active'));
    return done();
  }],
  ['select e.id as "endpointId", e.account_id as "accountId"', ({ webhooks }, [accountId]) =>
    rowsOf([...webhooks.endpoints.values()]
      .filter((one) => accountId === null || one.accountId === accountId)
      .map((one) => ({ endpointId: one.id, accountId: one.accountId, url: one.url, status: one.status, createdAt: new Date(one.createdAt) })))],
  ['select d.id::text as id from webhook_delivery d join webhook_endpoint e on e.id = d.endpoint_id where d.state = \'held\'', async (tables, [limit], transaction) => {
    await tables.lock(REDELIVERY, transaction);
    const { webhooks } = tables;
    return rowsOf([...webhooks.deliveries.values()].filter((one) => one.state === 'held' && webhooks.canReopen(one)).slice(0, Number(limit)).map(({ id }) => ({ id })));
  }],
  ["update webhook_delivery d set state = 'pending', round = d.round + 1", (tables, [ids], transaction) => {
    const { webhooks } = tables;
    const rows = texts(ids).map((id) => webhooks.deliveries.get(id)!).filter((row) => webhooks.canReopen(row));
    tables.write(transaction, () => rows.forEach((row) => webhooks.canReopen(row) && webhooks.reopen(row)));
    return rowsOf(rows.map(({ id: deliveryId, eventId, endpointId, round }) => ({ deliveryId, eventId, endpointId, round: round + 1 })));
  }],
]; // prettier-ignore

/** The tables of webhooks in memory, and the ports of `libs/webhooks` over them. The ports pass the contract suites of the real ones. */
import {
  type Claimed,
  type Deliveries,
  type DeliveryState,
  type DueSignal,
  type Ended,
  type Endpoint,
  type EndpointStatus,
  FAILING_AFTER,
  LEASE_MS,
  MAX_LEASE_LOSSES,
  type OutboxEvent,
  type OutboxRows,
  RETRY_SPREAD,
  type StaffRows,
  type StaffTables,
} from '#webhooks';
import type { Rng } from './simulator.js';
import type { Statement } from './stores.js';
import { type Database, port, type Run, type Tables } from './tables.js';

interface EndpointRow {
  readonly id: string;
  readonly accountId: string;
  readonly url: string;
  readonly description: string | null;
  readonly createdAt: string;
  readonly registeredAt: string;
  /** When the row became visible, by the tables' clock. */
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

export interface DeliveryRow {
  readonly id: string;
  readonly eventId: string;
  readonly endpointId: string;
  state: DeliveryState;
  round: number;
  attempts: number;
  leaseLosses: number;
  /** Lost leases in all rounds. The product counts only those of the present round. */
  lostInAll: number;
  dueAt: number;
  heldAt: number | null;
  lease: { readonly token: string; readonly until: number } | null;
}

export interface AttemptRow extends Pick<Ended, 'outcome' | 'startedAtMs' | 'durationMs'> {
  readonly deliveryId: string;
  readonly round: number;
  readonly attempt: number;
}

/** The default `max_in_flight` of an endpoint, and `CLOCK_TOLERANCE_MS` of the product. */
const SHARE = 8;
const CLOCK_TOLERANCE_MS = 5_000;

/** The rows and the clock that all replicas share. Each method is one SQL statement of the product. */
export class WebhookTables {
  readonly endpoints = new Map<string, EndpointRow>();
  readonly secrets = new Map<string, SecretRow>();
  readonly events = new Map<string, OutboxEvent>();
  readonly deliveries = new Map<string, DeliveryRow>();
  readonly attempts: AttemptRow[] = [];
  private leases = 0;

  constructor(
    readonly now: () => number,
    private readonly rng: Rng,
  ) {}

  /**
   * Writes each event once, with one delivery for each endpoint of its account. An endpoint gets none if it is disabled, or was registered after the
   * event.
   */
  tell(told: readonly OutboxEvent[]): void {
    for (const event of told) {
      if (!this.events.has(event.id)) this.events.set(event.id, event);
      for (const { id: endpointId, accountId, status, registeredAt } of this.endpoints.values()) {
        if (accountId !== event.accountId || status === 'disabled' || registeredAt >= event.position) continue;
        if ([...this.deliveries.values()].some((one) => one.eventId === event.id && one.endpointId === endpointId)) continue;
        const id = String(this.deliveries.size + 1);
        this.deliveries.set(id, { id, eventId: event.id, endpointId, state: 'pending', round: 1, attempts: 0, leaseLosses: 0, lostInAll: 0, dueAt: this.now(), heldAt: null, lease: null }); // prettier-ignore
      }
    }
  }

  private of(endpointId: string, state: DeliveryState): DeliveryRow[] {
    return [...this.deliveries.values()].filter((one) => one.endpointId === endpointId && one.state === state);
  }

  secret(endpointId: string, state: SecretRow['state']): SecretRow | undefined {
    return [...this.secrets.values()].find((one) => one.endpointId === endpointId && one.state === state);
  }

  /** Oldest first. */
  list(accountId: string | null): Endpoint[] {
    return [...this.endpoints.values()]
      .filter((one) => accountId === null || one.accountId === accountId)
      .sort((a, b) => (a.createdAt < b.createdAt ? -1 : a.createdAt > b.createdAt ? 1 : a.id < b.id ? -1 : 1))
      .map(({ id: endpointId, failures: consecutiveFailures, accountId, url, description, status, createdAt }) => {
        const secretHint = this.secret(endpointId, 'active')!.hint;
        const stagedSecretHint = this.secret(endpointId, 'staged')?.hint ?? null;
        return { endpointId, accountId, url, description, status, consecutiveFailures, createdAt, secretHint, stagedSecretHint };
      });
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
      const { id: eventId, type, payload, stream, revision } = this.events.get(one.eventId)!;
      const { id: endpointId, url, failures: consecutiveFailures } = this.endpoints.get(one.endpointId)!;
      const { id: secretId, kid, ciphertext } = this.secret(endpointId, 'active')!;
      const { id: deliveryId, round, attempts } = one;
      return { deliveryId, token, round, attempts, eventId, type, payload, stream, revision, endpointId, url, consecutiveFailures, secretId, sealed: { kid, ciphertext: ciphertext! }, claimedAtMs: now, chance: this.rng.next() }; // prettier-ignore
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
      Object.assign(row, { state: fate.state, attempts: row.attempts + 1, lease: null, dueAt, heldAt: fate.state === 'held' ? this.now() : null });
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
      Object.assign(row, { state: held ? 'held' : 'pending', leaseLosses: row.leaseLosses + 1, lostInAll: row.lostInAll + 1, lease: null, dueAt: this.now(), heldAt: held ? this.now() : null }); // prettier-ignore
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
    Object.assign(row, { state: 'pending', round: row.round + 1, attempts: 0, leaseLosses: 0, dueAt: this.now(), heldAt: null });
  }
}

/** One replica's access to the tables. */
export const simulatedDeliveries = (tables: WebhookTables, statement: Statement): Deliveries => ({
  claimDue: (slots) => statement('claimDue', () => tables.claimDue(slots), true),
  complete: (ended) => statement('complete', () => tables.complete(ended)),
  release: (claimed, waitMs) => statement('release', () => tables.release(claimed, waitMs)),
  recordHealth: (results) => statement('recordHealth', () => tables.recordHealth(results)),
  expired: () => statement('expired', () => tables.expired(), true),
  reap: (leases) => statement('reap', () => tables.reap(leases)),
  tidy: (retrySeconds) => statement('tidy', () => tables.tidy(retrySeconds), true),
});

export const simulatedOutboxRows = (tables: Tables, run: Run): OutboxRows =>
  port<OutboxRows>('outbox', run, ['announceDue'], {
    write: ({ writes }, events) => void writes.push(() => tables.webhooks.tell(events)),
    announceDue: ({ writes }) => void writes.push(() => tables.ring()),
  });

export const simulatedDueSignal = ({ run, tables, process }: Database): DueSignal => ({
  listen: async (ring, stop) => {
    await run('due.listen', () => void tables.listeners.set(process, ring));
    ring();
    await new Promise<void>((end) => (stop.aborted ? end() : stop.addEventListener('abort', () => end(), { once: true })));
  },
});

export const simulatedStaffTables = (database: Database): StaffTables => ({
  change: (work) => database.transaction((run) => work(simulatedStaffRows(database.tables, run))),
  ...port<Omit<StaffTables, 'change'>>('webhooks', database.run, ['endpoints'], {
    endpoints: (_, accountId) => database.tables.webhooks.list(accountId),
  }),
});

/** The lock that lets only one command at a time send deliveries again. */
const REDELIVERY = 'redelivery';

const simulatedStaffRows = (tables: Tables, run: Run): StaffRows => {
  const { webhooks } = tables;
  const all = () => [...webhooks.deliveries.values()];
  const isDisabled = (endpointId: string) => webhooks.endpoints.get(endpointId)!.status === 'disabled';
  const looks = ['lockAccount', 'hasEndpoint', 'lockEndpoint', 'stagedSecret', 'findDeliveries', 'heldDeliveries', 'deliveryState', 'announceDue'] as const; // prettier-ignore
  return port<StaffRows>('webhooks', run, looks, {
    lockAccount: (transaction, accountId) => tables.lock(`webhook_endpoint ${accountId}`, transaction),
    hasEndpoint: (_, accountId, url) =>
      [...webhooks.endpoints.values()].some((one) => one.accountId === accountId && one.url === url && one.status !== 'disabled'),
    addEndpoint: ({ writes }, { endpointId: id, registeredAtPosition: registeredAt, ...row }) =>
      void writes.push(() => webhooks.endpoints.set(id, { ...row, id, registeredAt, seenFrom: tables.now, status: 'enabled', failures: 0 })),
    lockEndpoint: async (transaction, endpointId) => {
      await tables.lock(`webhook_endpoint ${endpointId}`, transaction);
      return webhooks.endpoints.get(endpointId)?.status ?? null;
    },
    setStatus: ({ writes }, endpointId, status) =>
      void writes.push(() => Object.assign(webhooks.endpoints.get(endpointId)!, { status, failures: 0 })),
    cancelForDisabled: ({ writes }) => void writes.push(() => webhooks.cancelForDisabled()),
    addSecret: ({ writes }, { secretId: id, at: _, ...secret }) => void writes.push(() => webhooks.secrets.set(id, { ...secret, id })),
    stagedSecret: (_, endpointId) => webhooks.secret(endpointId, 'staged')?.id ?? null,
    retireSecret: ({ writes }, endpointId, state) => {
      writes.push(() => {
        const secret = webhooks.secret(endpointId, state);
        if (secret) Object.assign(secret, { state: 'retired', ciphertext: null });
      });
    },
    activateSecret: ({ writes }, secretId) => void writes.push(() => (webhooks.secrets.get(secretId)!.state = 'active')),
    findDeliveries: (_, name) =>
      all()
        .filter(({ id, eventId, endpointId }) => id === name || (eventId === name && !isDisabled(endpointId)))
        .map(({ id }) => id),
    heldDeliveries: async (transaction, limit) => {
      await tables.lock(REDELIVERY, transaction);
      return all()
        .filter((row) => row.state === 'held' && webhooks.canReopen(row))
        .sort((a, b) => a.heldAt! - b.heldAt! || Number(a.id) - Number(b.id))
        .slice(0, limit)
        .map(({ id }) => id);
    },
    reopen: async (transaction, deliveryIds) => {
      await tables.lock(REDELIVERY, transaction);
      const rows = deliveryIds.map((id) => webhooks.deliveries.get(id)!).filter((row) => webhooks.canReopen(row));
      transaction.writes.push(() => rows.forEach((row) => webhooks.canReopen(row) && webhooks.reopen(row)));
      return rows.map(({ id, eventId, endpointId, round }) => ({ deliveryId: Number(id), eventId, endpointId, round: round + 1 }));
    },
    deliveryState: (_, deliveryIds) => {
      const { id, state, endpointId } = all().find((row) => deliveryIds.includes(row.id))!;
      return { id, state, status: webhooks.endpoints.get(endpointId)!.status };
    },
    announceDue: ({ writes }) => void writes.push(() => tables.ring()),
  });
};

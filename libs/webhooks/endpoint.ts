/**
 * Webhook endpoints of an account, their secrets, and the commands of operators on them.
 *
 * They are kept in Postgres beside the deliveries and are not rebuilt from the log. Every change by an operator is also an event in a stream
 * `staff-webhook-<id>`, appended inside the transaction that makes the change. So there is no change without its record. If a record's commit was
 * lost, the repeated command records it again.
 *
 * A secret is shown once: `whsec_` and 256 random bits. It is kept sealed (AES-256-GCM under the master key ring). Rotation has no gap. *Stage* makes
 * a new secret, which the partner adds to those that it accepts. *Activate* makes it sign everything from the next attempt on, and the old one is
 * deleted.
 */
import { newSecret } from '#accounts';
import { type Clock, type Ids, ServiceError, timestamp } from '#kernel';
import type { KeyRing, Migration } from '#platform';
import { type Actor, defineEvents, type EventStore, recordOnce } from '#eventstore';
import { NoAddress, Refused } from './target.js';
import type { Sender } from './safe-request.js';
import type { StaffRows, StaffTables } from './staff-rows.js';

export const webhookEndpointMigration: Migration = {
  name: '0080-webhook-endpoint',
  sql: `
create table webhook_endpoint (
  id                     uuid primary key,
  account_id             uuid not null,
  url                    text not null,
  description            text,
  status                 text not null default 'enabled' check (status in ('enabled', 'paused', 'disabled')),
  max_in_flight          int not null default 8 check (max_in_flight between 1 and 64),
  consecutive_failures   int not null default 0,
  created_at             timestamptz not null,
  registered_at_position text collate "C" not null
);
create index webhook_endpoint_account on webhook_endpoint (account_id);

create table webhook_endpoint_secret (
  id           uuid primary key,
  endpoint_id  uuid not null references webhook_endpoint,
  kid          text not null,
  ciphertext   text,
  hint         text not null,
  state        text not null check (state in ('staged', 'active', 'retired')),
  created_at   timestamptz not null,
  activated_at timestamptz,
  retired_at   timestamptz,
  check ((state = 'retired') = (ciphertext is null))
);
create unique index webhook_endpoint_secret_active on webhook_endpoint_secret (endpoint_id) where state = 'active';
create unique index webhook_endpoint_secret_staged on webhook_endpoint_secret (endpoint_id) where state = 'staged';
`,
};

export const ENDPOINT_STATUSES = ['enabled', 'paused', 'disabled'] as const;
export type EndpointStatus = (typeof ENDPOINT_STATUSES)[number];

export interface Endpoint {
  readonly endpointId: string;
  readonly accountId: string;
  readonly url: string;
  readonly description: string | null;
  readonly status: EndpointStatus;
  readonly consecutiveFailures: number;
  readonly createdAt: string;
  /** The last four characters of the secret that signs, to distinguish secrets. */
  readonly secretHint: string;
  readonly stagedSecretHint: string | null;
}

export interface EndpointSecret {
  readonly endpointId: string;
  readonly secretId: string;
  /** In the clear: shown once, kept sealed. */
  readonly secret: string;
}

/** A delivery that an operator sends again. */
export interface Redelivered {
  readonly deliveryId: number;
  readonly eventId: string;
  readonly endpointId: string;
  readonly round: number;
}

interface About {
  readonly endpointId: string;
}

/** A change of webhooks by an operator; the actor is in the event's metadata. Before 0.2.0 the actor was `staff`. */
export type WebhookStaffEvent =
  | { readonly type: 'WebhookEndpointAdded'; readonly data: About & { readonly accountId: string; readonly url: string; readonly secretId: string } }
  | { readonly type: 'WebhookEndpointPaused' | 'WebhookEndpointResumed' | 'WebhookEndpointDisabled'; readonly data: About }
  | { readonly type: 'WebhookSecretStaged' | 'WebhookSecretActivated'; readonly data: About & { readonly secretId: string } }
  | { readonly type: 'WebhookRedeliveryRequested'; readonly data: { readonly deliveries: readonly Redelivered[] } };

export const webhookStaffEvents = defineEvents<WebhookStaffEvent>({
  WebhookEndpointAdded: [],
  WebhookEndpointPaused: [],
  WebhookEndpointResumed: [],
  WebhookEndpointDisabled: [],
  WebhookSecretStaged: [],
  WebhookSecretActivated: [],
  WebhookRedeliveryRequested: [],
});

export const STAFF_STREAM = 'staff-webhook-';
const MAX_DESCRIPTION_LENGTH = 200;
const HINT_LENGTH = 4;

export interface StaffDeps {
  readonly tables: StaffTables;
  readonly store: EventStore;
  readonly clock: Clock;
  readonly ids: Ids;
  readonly actor: Actor;
}

export interface EndpointDeps extends StaffDeps {
  readonly keys: KeyRing;
  readonly sender: Pick<Sender, 'vet'>;
}

/** Records a change by an operator. Called last inside the transaction of the change. */
export const recordStaffAction = async ({ store, clock, ids, actor }: StaffDeps, event: WebhookStaffEvent): Promise<void> => {
  const eventId = ids.uuid();
  // A stream of its own, so that the store recognises a repetition by its revision.
  await recordOnce({ store, clock }, webhookStaffEvents, STAFF_STREAM + eventId, event, eventId, { actor, correlationId: ids.uuid() });
};

const secretContext = (secretId: string) => `webhook_endpoint_secret/${secretId}/ciphertext`;

/** The secret in the clear, for signing. Never log it. */
export const openWebhookSecret = (keys: KeyRing, secretId: string, sealed: { readonly kid: string; readonly ciphertext: string }): string =>
  keys.open(sealed, secretContext(secretId));

const noSuchEndpoint = () => new ServiceError('VALIDATION_ERROR', 'There is no such webhook endpoint.', {}, { status: 404 });
const notNow = (message: string) => new ServiceError('INVALID_STATE', message);

/** Throws a ServiceError for a mistake of the operator, and the errors of the stores. A change to the present state succeeds and changes nothing. */
export class Endpoints {
  constructor(private readonly deps: EndpointDeps) {}

  /**
   * Registers a URL for an account. It gets events from now on: the position in the log is noted, since two positions can be compared and two clocks
   * cannot. Refuses a URL by rule, a host that resolves to nothing or to an address that is not public, and a URL that the account has already.
   */
  async add(accountId: string, url: string, description: string | null = null): Promise<EndpointSecret & { readonly url: string }> {
    const { tables, store, clock, ids, sender } = this.deps;
    if (description !== null && (description.length > MAX_DESCRIPTION_LENGTH || /\p{Cc}/u.test(description)))
      throw new ServiceError('VALIDATION_ERROR', `The description must have at most ${MAX_DESCRIPTION_LENGTH} characters on one line.`);
    await sender.vet(url).catch((error: unknown) => {
      if (error instanceof Refused) throw new ServiceError('VALIDATION_ERROR', error.message);
      if (error instanceof NoAddress) throw new ServiceError('VALIDATION_ERROR', `The host does not resolve: ${error.message}.`);
      throw error;
    });
    const { href } = new URL(url);
    const endpointId = ids.uuid();
    const head = await store.head();
    const made = await tables.change(async (rows) => {
      await rows.lockAccount(accountId);
      if (await rows.hasEndpoint(accountId, href)) throw notNow('The account has an endpoint with this URL.');
      const createdAt = timestamp(clock.now());
      await rows.addEndpoint({ endpointId, accountId, url: href, description, createdAt, registeredAtPosition: head ?? '' });
      const secret = await this.addSecret(rows, endpointId, 'active');
      await recordStaffAction(this.deps, { type: 'WebhookEndpointAdded', data: { endpointId, accountId, url: href, secretId: secret.secretId } });
      return secret;
    });
    return { ...made, url: href };
  }

  /** All endpoints, or those of an account, oldest first. */
  list(accountId: string | null = null): Promise<Endpoint[]> {
    return this.deps.tables.endpoints(accountId);
  }

  async find(endpointId: string): Promise<Endpoint> {
    const found = (await this.list()).find((endpoint) => endpoint.endpointId === endpointId);
    if (!found) throw noSuchEndpoint();
    return found;
  }

  /** Sends nothing to it. Notifications are kept for it. */
  pause(endpointId: string): Promise<Endpoint> {
    return this.change(endpointId, 'paused', 'WebhookEndpointPaused');
  }

  /** Sends its backlog. */
  resume(endpointId: string): Promise<Endpoint> {
    return this.change(endpointId, 'enabled', 'WebhookEndpointResumed');
  }

  /** Ends it for good: its waiting deliveries are cancelled, and it gets no further ones. */
  disable(endpointId: string): Promise<Endpoint> {
    return this.change(endpointId, 'disabled', 'WebhookEndpointDisabled');
  }

  private async change(
    endpointId: string,
    to: EndpointStatus,
    event: 'WebhookEndpointPaused' | 'WebhookEndpointResumed' | 'WebhookEndpointDisabled',
  ): Promise<Endpoint> {
    await this.deps.tables.change(async (rows) => {
      const status = await lockEndpoint(rows, endpointId);
      if (status === to) return;
      if (status === 'disabled') throw notNow('A disabled endpoint stays disabled; add it again.');
      // A resumed endpoint starts with a clean record, since its earlier failures were the reason for the pause.
      await rows.setStatus(endpointId, to);
      if (to === 'disabled') await rows.cancelForDisabled();
      if (to === 'enabled') await rows.announceDue();
      await recordStaffAction(this.deps, { type: event, data: { endpointId } });
    });
    return this.find(endpointId);
  }

  /** A new secret, shown once. It signs nothing before it is activated. An earlier staged one is retired. */
  stageSecret(endpointId: string): Promise<EndpointSecret> {
    return this.deps.tables.change(async (rows) => {
      const status = await lockEndpoint(rows, endpointId);
      if (status === 'disabled') throw notNow('The endpoint is disabled.');
      await rows.retireSecret(endpointId, 'staged', this.now());
      const made = await this.addSecret(rows, endpointId, 'staged');
      await recordStaffAction(this.deps, { type: 'WebhookSecretStaged', data: { endpointId, secretId: made.secretId } });
      return made;
    });
  }

  /** The staged secret signs everything from the next attempt on; the one before it is retired. */
  async activateSecret(endpointId: string): Promise<Endpoint> {
    await this.deps.tables.change(async (rows) => {
      await lockEndpoint(rows, endpointId);
      const secretId = await rows.stagedSecret(endpointId);
      if (secretId === null) throw notNow('No secret is staged for this endpoint.');
      await rows.retireSecret(endpointId, 'active', this.now());
      await rows.activateSecret(secretId, this.now());
      await recordStaffAction(this.deps, { type: 'WebhookSecretActivated', data: { endpointId, secretId } });
    });
    return this.find(endpointId);
  }

  private async addSecret(rows: StaffRows, endpointId: string, state: 'staged' | 'active'): Promise<EndpointSecret> {
    const secretId = this.deps.ids.uuid();
    const secret = `whsec_${newSecret()}`;
    const { kid, ciphertext } = this.deps.keys.seal(secret, secretContext(secretId));
    await rows.addSecret({ secretId, endpointId, kid, ciphertext, hint: secret.slice(-HINT_LENGTH), state, at: this.now() });
    return { endpointId, secretId, secret };
  }

  private now(): string {
    return timestamp(this.deps.clock.now());
  }
}

const lockEndpoint = async (rows: StaffRows, endpointId: string): Promise<EndpointStatus> => {
  const status = await rows.lockEndpoint(endpointId);
  if (status === null) throw noSuchEndpoint();
  return status;
};

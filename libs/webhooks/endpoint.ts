/**
 * Webhook endpoints of accounts, their secrets, and the operator commands on them.
 *
 * Endpoints are rows in Postgres and are not rebuilt from the log. Every change by an operator is also an event in a stream `staff-webhook-<id>`. The
 * event is appended inside the transaction of the change. If the transaction then fails, the log holds an event without a change. A repeated command
 * appends another event.
 *
 * A secret is `whsec_` and 256 random bits as text. It is shown once and stored encrypted (AES-256-GCM with the master key ring). A new secret is
 * first *staged*: the partner adds it to the receiver. When it is *activated*, it signs all further attempts, and the old secret is deleted.
 */
import { newSecret } from '#accounts';
import { type Clock, type Ids, ServiceError, timestamp } from '#kernel';
import { cardInText, controlsInText, type KeyRing, type Migration } from '#platform';
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
  /** The last four characters of the active secret. They tell secrets apart. */
  readonly secretHint: string;
  readonly stagedSecretHint: string | null;
}

export interface EndpointSecret {
  readonly endpointId: string;
  readonly secretId: string;
  /** The secret as plain text, which is shown once. */
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

/** An operator's change of webhooks. The event's metadata names the actor. Before 0.2.0, the actor was `staff`. */
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

/** Records a change by an operator. Call this as the last step of the transaction. */
export const recordStaffAction = async ({ store, clock, ids, actor }: StaffDeps, event: WebhookStaffEvent): Promise<void> => {
  const eventId = ids.uuid();
  // Each event has its own stream. The store recognises a repeated append by the revision.
  await recordOnce({ store, clock }, webhookStaffEvents, STAFF_STREAM + eventId, event, eventId, { actor, correlationId: ids.uuid() });
};

const secretContext = (secretId: string) => `webhook_endpoint_secret/${secretId}/ciphertext`;

/** Decrypts a secret for signing. Never log the result. */
export const openWebhookSecret = (keys: KeyRing, secretId: string, sealed: { readonly kid: string; readonly ciphertext: string }): string =>
  keys.open(sealed, secretContext(secretId));

const noSuchEndpoint = () => new ServiceError('VALIDATION_ERROR', 'There is no such webhook endpoint.', {}, { status: 404 });
const notNow = (message: string) => new ServiceError('INVALID_STATE', message);

/**
 * Operator commands on endpoints. They throw a ServiceError for a mistake of the operator, and the errors of the stores. If the endpoint already has
 * the requested status, a command changes nothing.
 */
export class Endpoints {
  constructor(private readonly deps: EndpointDeps) {}

  /**
   * Registers a URL for an account. The endpoint gets only events after the log's present head. Positions are compared, since clocks of two machines
   * may differ. Refuses a URL that breaks a rule, that the account already has, or whose host has no allowed address.
   */
  async add(accountId: string, url: string, description: string | null = null): Promise<EndpointSecret & { readonly url: string }> {
    const { tables, store, clock, ids, sender } = this.deps;
    if (description !== null && (description.length > MAX_DESCRIPTION_LENGTH || controlsInText(description)))
      throw new ServiceError('VALIDATION_ERROR', `The description must have at most ${MAX_DESCRIPTION_LENGTH} characters on one line.`);
    const card = cardInText(url) ?? cardInText(description ?? '');
    if (card) throw new ServiceError('VALIDATION_ERROR', `The URL or the description ${card}.`);
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

  /** Stops sending to the endpoint. Its deliveries wait. */
  pause(endpointId: string): Promise<Endpoint> {
    return this.change(endpointId, 'paused', 'WebhookEndpointPaused');
  }

  /** Sends the waiting deliveries and new ones. */
  resume(endpointId: string): Promise<Endpoint> {
    return this.change(endpointId, 'enabled', 'WebhookEndpointResumed');
  }

  /** Ends the endpoint for ever. Its pending deliveries are canceled, and it gets no new ones. */
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
      // `setStatus` also sets the failures to 0, so a resumed endpoint starts without earlier failures.
      await rows.setStatus(endpointId, to);
      if (to === 'disabled') await rows.cancelForDisabled();
      if (to === 'enabled') await rows.announceDue();
      await recordStaffAction(this.deps, { type: event, data: { endpointId } });
    });
    return this.find(endpointId);
  }

  /** Makes a new secret, which is shown once. It signs nothing before it is activated. A secret that was staged before is retired. */
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

  /** Makes the staged secret active and retires the old one. The new secret signs all further attempts. */
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

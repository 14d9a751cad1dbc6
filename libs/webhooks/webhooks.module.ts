/** The Nest module of webhooks (`#webhooks/module`). */
import { Global, Module } from '@nestjs/common';
import type { EventStore, LogGate } from '#eventstore';
import { EVENT_STORE, LOG_GATE, type OpenReactor, PERSONAL_KEYS, REACTOR } from '#eventstore/module';
import type { Config, PersonalKeys } from '#platform';
import { ProcessContext } from '#platform/module';
import { postgresDeliveries } from './deliveries.js';
import { createDispatcher, type Dispatcher, type DispatcherWatch } from './dispatcher.js';
import { postgresDueSignal } from './due.js';
import { webhookOutbox } from './outbox.js';
import type { PayloadPorts } from './payload.js';
import { createSender } from './safe-request.js';
import { createResolve } from './target.js';

/** One connection claims, two record results, one listens, and one checks leases. */
const POOL_CONNECTIONS = 5;

/** The dispatcher of this process, and the metrics that observe it. */
export class Webhooks {
  constructor(
    readonly dispatcher: Dispatcher,
    private readonly watchers: Set<DispatcherWatch>,
  ) {}

  watch(watcher: DispatcherWatch): void {
    this.watchers.add(watcher);
  }
}
/** The subscriber that writes the outbox. */
export const OUTBOX = Symbol('webhook outbox');

@Global()
@Module({
  providers: [
    {
      provide: OUTBOX,
      inject: [REACTOR, EVENT_STORE, PERSONAL_KEYS],
      useFactory: (reactor: OpenReactor, store: EventStore, personal: PersonalKeys) => reactor(webhookOutbox(store, personal)),
    },
    // The dispatcher needs the tables of the schema, which exist when LOG_GATE is provided.
    {
      provide: Webhooks,
      inject: [ProcessContext, LOG_GATE, EVENT_STORE, PERSONAL_KEYS],
      useFactory: (context: ProcessContext, ownLog: LogGate, store: EventStore, personal: PersonalKeys) =>
        openWebhooks(context, ownLog, { store, personal }),
    },
  ],
  exports: [OUTBOX, Webhooks],
})
export class WebhooksModule {}

const openWebhooks = (context: ProcessContext, ownLog: LogGate, payloads: PayloadPorts): Webhooks => {
  const { config, keys, clock, ids, log } = context;
  const pool = context.pool({ name: 'webhooks', max: POOL_CONNECTIONS, byKey: true });
  const watchers = new Set<DispatcherWatch>();
  const dispatcher = createDispatcher({
    deliveries: context.guarded(postgresDeliveries(pool, ids.uuid())),
    sender: context.guarded(createSender({ settings: config.webhooks, resolve: createResolve(config.webhooks.dnsServers, clock), clock })),
    due: postgresDueSignal(pool),
    payloads,
    keys,
    clock,
    log,
    watch: {
      attempted: (attempt) => watchers.forEach((watcher) => watcher.attempted(attempt)),
      leaseLost: () => watchers.forEach((watcher) => watcher.leaseLost()),
    },
    retrySeconds: config.webhooks.retrySeconds,
    // During an incident, the event of a delivery may be lost (C76).
    paused: () => ownLog.incident !== null,
  });
  if (config.webhooks.privateTargets.length > 0)
    log.warn({ targets: config.webhooks.privateTargets.map(targetText) }, 'webhooks may be sent to private addresses');
  return new Webhooks(dispatcher, watchers);
};

// The word in the middle keeps the digits apart. Else a port and an address may look like a card number, and be masked.
const targetText = ({ host, port, network }: Config['webhooks']['privateTargets'][number]) =>
  `${host}:${port} in ${network.address}/${network.prefix}`;

/** The Nest module of the sealed log and of audit keys (`#audit/module`). */
import { Global, Module } from '@nestjs/common';
import { Command } from '@nestjs/cqrs';
import type { Actor, EventStore, Position } from '#eventstore';
import { EVENT_STORE, type OpenReactor, POOL, REACTOR } from '#eventstore/module';
import type { Pool } from '#platform';
import { commandHandler, ProcessContext } from '#platform/module';
import { type AuditKeyPorts, type IssuedAuditKey, issueAuditKey, type KeyTerms, revokeAuditKey } from './audit-key.js';
import { logSeal, type ProvePorts, resumeSeal, signLog, type SignedLog } from './seal.js';

/** Token of {@link ProvePorts}: event store, database, key ring, and the folder of signed heads. */
export const SEAL = Symbol('seal');
/** Token of the subscriber that seals the log. */
export const SEALER = Symbol('sealer');
export const AUDIT_KEY_PORTS = Symbol('audit key ports');

/** Signs a head over all sealed events. null: no head was signed (see {@link signLog}). */
export class SignLog extends Command<SignedLog | null> {}

export class IssueAuditKey extends Command<IssuedAuditKey> {
  constructor(
    readonly key: KeyTerms,
    readonly actor: Actor,
  ) {
    super();
  }
}

export class RevokeAuditKey extends Command<Position> {
  constructor(
    readonly keyId: string,
    readonly actor: Actor,
  ) {
    super();
  }
}

@Global()
@Module({
  providers: [
    {
      provide: SEAL,
      inject: [ProcessContext, EVENT_STORE, POOL],
      useFactory: async ({ config, keys, clock }: ProcessContext, store: EventStore, db: Pool): Promise<ProvePorts> => {
        const seal = { store, db, keys, folder: config.headsDir, now: () => clock.now() };
        await resumeSeal(seal);
        return seal;
      },
    },
    { provide: SEALER, inject: [REACTOR, SEAL], useFactory: (reactor: OpenReactor) => reactor(logSeal) },
    {
      provide: AUDIT_KEY_PORTS,
      inject: [ProcessContext, EVENT_STORE, POOL],
      useFactory: ({ clock, ids, keys, config: { environment } }: ProcessContext, store: EventStore, db: Pool): AuditKeyPorts => ({
        store,
        db,
        clock,
        ids,
        keys,
        environment,
      }),
    },
    commandHandler(SignLog, SEAL, (seal: ProvePorts) => signLog(seal)),
    commandHandler(IssueAuditKey, AUDIT_KEY_PORTS, (ports: AuditKeyPorts, { key, actor }) => issueAuditKey(ports, key, actor)),
    commandHandler(RevokeAuditKey, AUDIT_KEY_PORTS, (ports: AuditKeyPorts, { keyId, actor }) => revokeAuditKey(ports, keyId, actor)),
  ],
  exports: [SEAL, SEALER, AUDIT_KEY_PORTS],
})
export class AuditModule {}

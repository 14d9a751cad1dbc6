/** Erasure of personal data, and the commands and queries of the buses, for Nest (`#privacy/module`). */
import { Global, Module } from '@nestjs/common';
import { Command, Query } from '@nestjs/cqrs';
import type { Directory } from '#accounts';
import { DIRECTORY } from '#accounts/module';
import { type EventStore, ReadModels } from '#eventstore';
import { EVENT_STORE, POOL } from '#eventstore/module';
import type { Pool } from '#platform';
import { commandHandler, ProcessContext, queryHandler } from '#platform/module';
import { erase, type EraseRequest, type ErasureAnswer, type ErasurePlan, type PrivacyPorts } from './erase.js';
import { erasureModel } from './erasures.js';
import { personalUseModel } from './personal-use.js';
import { type Replayed, replayErasures, type ReplayRequest } from './replay.js';
import { countOverdue } from './retention.js';

export const PRIVACY_PORTS = Symbol('privacy ports');

/** Erases personal data of payments, or plans it. */
export class ErasePersonalData extends Command<ErasureAnswer | ErasurePlan> {
  constructor(readonly request: EraseRequest) {
    super();
  }
}

/** Erases again what an erasure file names, after a restore. */
export class ReplayErasures extends Command<Replayed> {
  constructor(readonly request: ReplayRequest) {
    super();
  }
}

/** Counts the payments that would be erased tonight under a retention. */
export class CountOverdue extends Query<number> {
  constructor(
    readonly accountId: string,
    readonly years: number,
  ) {
    super();
  }
}

const HANDLERS = [
  commandHandler(ErasePersonalData, PRIVACY_PORTS, (ports: PrivacyPorts, { request }) => erase(ports, request)),
  commandHandler(ReplayErasures, PRIVACY_PORTS, (ports: PrivacyPorts, { request }) => replayErasures(ports, request)),
  queryHandler(CountOverdue, PRIVACY_PORTS, (ports: PrivacyPorts, { accountId, years }) => countOverdue(ports, accountId, years)),
];

@Global()
@Module({
  providers: [
    {
      provide: PRIVACY_PORTS,
      inject: [ProcessContext, EVENT_STORE, POOL, ReadModels, DIRECTORY],
      useFactory: (context: ProcessContext, store: EventStore, db: Pool, readModels: ReadModels, directory: Directory): PrivacyPorts => {
        const { config, keys, clock, ids } = context;
        const { erasuresDir: folder, backupRetentionDays: backupDays } = config;
        const models = { use: personalUseModel(keys), erasures: erasureModel(folder) };
        return { store, db, clock, ids, keys, directory, readModels, models, folder, backupDays };
      },
    },
    ...HANDLERS,
  ],
  exports: [PRIVACY_PORTS],
})
export class PrivacyModule {}

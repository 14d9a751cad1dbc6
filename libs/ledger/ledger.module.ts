/** The books, for Nest (`#ledger/module`). */
import { Global, Module } from '@nestjs/common';
import { Command } from '@nestjs/cqrs';
import { type EventStore, ReadModels } from '#eventstore';
import { EVENT_STORE, POOL } from '#eventstore/module';
import type { Pool } from '#platform';
import { commandHandler, ProcessContext } from '#platform/module';
import { journalModel } from './journal.js';
import { adjustBooks, type Adjustment, type Balance, closePeriod, type PeriodPorts } from './periods.js';

/** How long the journal may take to reach a position of the log. */
const CAUGHT_UP_MS = 10 * 60_000;

export const PERIOD_PORTS = Symbol('period ports');

export class AdjustBooks extends Command<void> {
  constructor(readonly adjustment: Adjustment) {
    super();
  }
}

/** Closes the books to a time (RFC 3339, exclusive). */
export class ClosePeriod extends Command<Balance> {
  constructor(
    readonly to: string,
    readonly by: string,
  ) {
    super();
  }
}

@Global()
@Module({
  providers: [
    {
      provide: PERIOD_PORTS,
      inject: [ProcessContext, EVENT_STORE, POOL, ReadModels],
      useFactory: ({ clock, ids }: ProcessContext, store: EventStore, db: Pool, readModels: ReadModels): PeriodPorts => ({
        store,
        db,
        clock,
        ids,
        journalReached: (position) => readModels.of(journalModel).runUntil(position, { timeoutMs: CAUGHT_UP_MS }),
      }),
    },
    commandHandler(AdjustBooks, PERIOD_PORTS, (ports: PeriodPorts, { adjustment }) => adjustBooks(ports, adjustment)),
    commandHandler(ClosePeriod, PERIOD_PORTS, (ports: PeriodPorts, { to, by }) => closePeriod(ports, to, by)),
  ],
  exports: [PERIOD_PORTS],
})
export class LedgerModule {}

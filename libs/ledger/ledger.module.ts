/** The books, for Nest (`#ledger/module`). */
import { Global, Module } from '@nestjs/common';
import { Command } from '@nestjs/cqrs';
import { type EventStore, ReadModels } from '#eventstore';
import { EVENT_STORE, POOL } from '#eventstore/module';
import type { Pool } from '#platform';
import { commandHandler, ProcessContext } from '#platform/module';
import { journalModel } from './journal.js';
import { paymentRegisterModel } from '#settlement';
import { adjustBooks, type Adjustment, type Balance, closePeriod, type PeriodPorts } from './periods.js';
import {
  remit,
  type Remitted,
  type RemitPorts,
  type RemitRequest,
  type Reversed,
  reverseRemittance,
  type ReverseRemittanceRequest,
} from './remit.js';

/** How long the journal may take to reach a position of the log. */
const CAUGHT_UP_MS = 10 * 60_000;

export const PERIOD_PORTS = Symbol('period ports');
const REMIT_PORTS = Symbol('remit ports');

export class AdjustBooks extends Command<void> {
  constructor(
    readonly adjustment: Adjustment,
    readonly old = false,
  ) {
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

/** Records that an agency was paid. */
export class RemitToAgency extends Command<Remitted> {
  constructor(readonly request: RemitRequest) {
    super();
  }
}

export class ReverseRemittance extends Command<Reversed> {
  constructor(readonly request: ReverseRemittanceRequest) {
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
    {
      provide: REMIT_PORTS,
      inject: [PERIOD_PORTS, POOL, ReadModels],
      useFactory: (ports: PeriodPorts, db: Pool, readModels: ReadModels): RemitPorts => ({
        ...ports,
        db,
        registerReached: (position) => readModels.of(paymentRegisterModel).runUntil(position, { timeoutMs: CAUGHT_UP_MS }),
      }),
    },
    commandHandler(AdjustBooks, PERIOD_PORTS, (ports: PeriodPorts, { adjustment, old }) => adjustBooks(ports, adjustment, old)),
    commandHandler(ClosePeriod, PERIOD_PORTS, (ports: PeriodPorts, { to, by }) => closePeriod(ports, to, by)),
    commandHandler(RemitToAgency, REMIT_PORTS, (ports: RemitPorts, { request }) => remit(ports, request)),
    commandHandler(ReverseRemittance, REMIT_PORTS, (ports: RemitPorts, { request }) => reverseRemittance(ports, request)),
  ],
  exports: [PERIOD_PORTS],
})
export class LedgerModule {}

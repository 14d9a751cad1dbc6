/** The Nest module of settlement and disputes (`#settlement/module`). */
import { Global, Module } from '@nestjs/common';
import { Command } from '@nestjs/cqrs';
import { type EventStore, type Origin, ReadModels } from '#eventstore';
import { EVENT_STORE, POOL } from '#eventstore/module';
import {
  acknowledgeStaffTask,
  type AcknowledgeRequest,
  atStableTime,
  type PaymentPorts,
  type PaymentView,
  resolvePayment,
  type ResolveRequest,
} from '#payments';
import { PAYMENT_PORTS } from '#payments/module';
import type { Pool } from '#platform';
import { commandHandler } from '#platform/module';
import { type DisputeChange, type DisputeFacts, type DisputeTerms, openDispute, updateDispute } from './dispute.js';
import {
  changeException,
  type ExceptionChange,
  exceptionModel,
  type FileImported,
  importSettlementFile,
  type ImportOptions,
  openExceptions,
} from './matching.js';
import { postgresFeedRows } from './feeds.js';
import { type BatchSummary, type Funding, type FundingOptions, recordAnnouncedFunding, type SettlementPorts } from './record.js';
import { recordDisputes, recordSettlements, type RoundOptions } from './rounds.js';
import { sendRefund, type SendRequest, type SentRefund } from './send.js';
import { paymentRegisterModel, postgresRegister } from './register.js';

/** Time limit for the register to reach the log's head. At the first start after an upgrade, it may have to read the whole log. */
const CAUGHT_UP_MS = 120_000;

export const SETTLEMENT_PORTS = Symbol('settlement ports');
/** Token of the function that opens exceptions. It returns the number of opened exceptions. */
export const OPEN_EXCEPTIONS = Symbol('open exceptions');
export type OpenExceptions = (stop?: AbortSignal) => Promise<number>;

/** Staff decide the outcome of a payment whose outcome is unknown. */
export class ResolvePayment extends Command<PaymentView> {
  constructor(readonly request: ResolveRequest) {
    super();
  }
}

/** Staff have dealt with a task about a batch. */
export class AcknowledgeTask extends Command<AcknowledgeRequest> {
  constructor(readonly request: AcknowledgeRequest) {
    super();
  }
}

export class OpenDispute extends Command<DisputeFacts> {
  constructor(
    readonly paymentId: string,
    readonly dispute: DisputeTerms,
    readonly origin: Origin,
    readonly old = false,
  ) {
    super();
  }
}

export class UpdateDispute extends Command<DisputeFacts & { readonly paymentId: string }> {
  constructor(
    readonly disputeId: string,
    readonly change: DisputeChange,
    readonly origin: Origin,
  ) {
    super();
  }
}

/** Sends the refund of a settled sale through the gateway, and resolves its exception. */
export class SendRefund extends Command<SentRefund> {
  constructor(
    readonly request: SendRequest,
    readonly origin: Origin,
  ) {
    super();
  }
}

/** Records all batches that processors have closed. */
export class RecordSettlements extends Command<BatchSummary[]> {
  constructor(
    readonly signal: AbortSignal,
    readonly options: RoundOptions = {},
  ) {
    super();
  }
}

/** Opens and moves the disputes that processors list. The answer is their number. */
export class RecordDisputes extends Command<number> {
  constructor(
    readonly signal: AbortSignal,
    readonly options: RoundOptions = {},
  ) {
    super();
  }
}

/** Staff record when the money of batches reached the bank. The answer is the number of recorded batches. */
export class RecordFunding extends Command<number> {
  constructor(
    readonly fundings: readonly Funding[],
    readonly origin: Origin,
    readonly options: FundingOptions = {},
  ) {
    super();
  }
}

export class ImportSettlementFile extends Command<FileImported> {
  constructor(
    readonly file: string,
    readonly options: ImportOptions,
    readonly signal: AbortSignal,
  ) {
    super();
  }
}

export class ChangeException extends Command<void> {
  constructor(
    readonly exceptionId: string,
    readonly change: ExceptionChange,
    readonly origin: Origin,
  ) {
    super();
  }
}

const HANDLERS = [
  commandHandler(ResolvePayment, SETTLEMENT_PORTS, ({ payments, register }: SettlementPorts, { request }) =>
    atStableTime(payments, () => resolvePayment(payments, register, request)),
  ),
  commandHandler(AcknowledgeTask, SETTLEMENT_PORTS, ({ payments, store }: SettlementPorts, { request }) =>
    acknowledgeStaffTask(payments, store, request),
  ),
  commandHandler(OpenDispute, SETTLEMENT_PORTS, ({ payments }: SettlementPorts, { paymentId, dispute, origin, old }) =>
    openDispute(payments, paymentId, dispute, origin, old),
  ),
  commandHandler(UpdateDispute, SETTLEMENT_PORTS, ({ payments, register }: SettlementPorts, { disputeId, change, origin }) =>
    updateDispute(payments, register, disputeId, change, origin),
  ),
  commandHandler(RecordSettlements, SETTLEMENT_PORTS, (ports: SettlementPorts, { signal, options }) => recordSettlements(ports, signal, options)),
  commandHandler(RecordDisputes, SETTLEMENT_PORTS, (ports: SettlementPorts, { signal, options }) => recordDisputes(ports, signal, options)),
  commandHandler(RecordFunding, SETTLEMENT_PORTS, (ports: SettlementPorts, { fundings, origin, options }) =>
    recordAnnouncedFunding(ports, fundings, origin, options),
  ),
  commandHandler(ImportSettlementFile, SETTLEMENT_PORTS, (ports: SettlementPorts, { file, options, signal }) =>
    importSettlementFile(ports, file, options, signal),
  ),
  commandHandler(SendRefund, SETTLEMENT_PORTS, (ports: SettlementPorts, { request, origin }) =>
    atStableTime(ports.payments, () => sendRefund(ports, request, origin)),
  ),
  commandHandler(ChangeException, SETTLEMENT_PORTS, (ports: SettlementPorts, { exceptionId, change, origin }) =>
    changeException(ports, exceptionId, change, origin),
  ),
];

@Global()
@Module({
  providers: [
    {
      provide: SETTLEMENT_PORTS,
      inject: [PAYMENT_PORTS, EVENT_STORE, POOL, ReadModels],
      useFactory: (payments: PaymentPorts, store: EventStore, pool: Pool, readModels: ReadModels): SettlementPorts => ({
        payments,
        store,
        register: postgresRegister(pool, async () => void (await readModels.caughtUp(paymentRegisterModel, CAUGHT_UP_MS))),
        feeds: postgresFeedRows(pool),
      }),
    },
    {
      provide: OPEN_EXCEPTIONS,
      inject: [SETTLEMENT_PORTS, POOL, ReadModels],
      useFactory:
        (ports: SettlementPorts, pool: Pool, readModels: ReadModels): OpenExceptions =>
        (stop) =>
          openExceptions(ports, pool, { caughtUp: async () => void (await readModels.caughtUp(exceptionModel, CAUGHT_UP_MS)) }, stop),
    },
    ...HANDLERS,
  ],
  exports: [SETTLEMENT_PORTS, OPEN_EXCEPTIONS],
})
export class SettlementModule {}

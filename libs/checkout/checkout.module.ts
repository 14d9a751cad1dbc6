/** The Nest module of hosted checkout (`#checkout/module`). */
import { Global, Module } from '@nestjs/common';
import { Command } from '@nestjs/cqrs';
import type { Directory } from '#accounts';
import { DIRECTORY } from '#accounts/module';
import type { EventStore, Origin } from '#eventstore';
import { EVENT_STORE, POOL } from '#eventstore/module';
import type { PaymentPorts } from '#payments';
import { PAYMENT_PORTS } from '#payments/module';
import type { KeyRing, Pool } from '#platform';
import { commandHandler, ProcessContext } from '#platform/module';
import type { CheckoutCommand } from './checkout.js';
import { postgresIntakeRows } from './intake-rows.js';
import { type IntakeOutcome, type IntakeRequest, takeIn } from './intake.js';
import { type CheckoutPorts, followNow, pay, type PayRequest } from './pay.js';
import { CheckoutSessions, type Session, type WithoutTime } from './sessions.js';

export const CHECKOUT_PORTS = Symbol('checkout ports');
const INTAKE_PORTS = Symbol('intake ports');
type IntakePorts = CheckoutPorts & { readonly keys: KeyRing };

/** Starts a session from an intake, or refuses it. */
export class StartCheckout extends Command<IntakeOutcome> {
  constructor(
    readonly request: IntakeRequest,
    readonly origin: Origin,
  ) {
    super();
  }
}

/** Charges the payer's card as an attempt of the session. */
export class PayCheckout extends Command<Session> {
  constructor(
    readonly session: Session,
    readonly request: PayRequest,
    readonly origin: Origin,
  ) {
    super();
  }
}

/** If the outcome of the session's last attempt is known, records it in the session. */
export class FollowCheckout extends Command<Session> {
  constructor(
    readonly session: Session,
    readonly origin: Origin,
  ) {
    super();
  }
}

/** Opens, extends, leaves, cancels or ends a session. */
export class ChangeCheckout extends Command<Session> {
  constructor(
    readonly session: Session,
    readonly change: WithoutTime<CheckoutCommand>,
    readonly origin: Origin,
  ) {
    super();
  }
}

@Global()
@Module({
  providers: [
    {
      provide: CHECKOUT_PORTS,
      inject: [ProcessContext, PAYMENT_PORTS, EVENT_STORE, DIRECTORY, POOL],
      useFactory: (context: ProcessContext, payments: PaymentPorts, store: EventStore, directory: Directory, pool: Pool): CheckoutPorts => {
        const { clock, ids, log } = context;
        const rows = context.guarded(postgresIntakeRows(pool));
        return {
          payments,
          sessions: new CheckoutSessions({ store, ownLog: payments.ownLog, rows, personal: payments.personal, clock, ids, log }),
          directory,
        };
      },
    },
    {
      provide: INTAKE_PORTS,
      inject: [CHECKOUT_PORTS, ProcessContext],
      useFactory: (ports: CheckoutPorts, { keys }: ProcessContext): IntakePorts => ({ ...ports, keys }),
    },
    commandHandler(StartCheckout, INTAKE_PORTS, (ports: IntakePorts, { request, origin }) => takeIn(ports, ports.keys, request, origin)),
    commandHandler(PayCheckout, CHECKOUT_PORTS, (ports: CheckoutPorts, { session, request, origin }) => pay(ports, session, request, origin)),
    commandHandler(FollowCheckout, CHECKOUT_PORTS, (ports: CheckoutPorts, { session, origin }) => followNow(ports, session, origin)),
    commandHandler(ChangeCheckout, CHECKOUT_PORTS, ({ sessions }: CheckoutPorts, { session, change, origin }) =>
      sessions.execute(session, change, origin),
    ),
  ],
  exports: [CHECKOUT_PORTS],
})
export class CheckoutModule {}

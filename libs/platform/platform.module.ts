/**
 * The context of a process, for every other module. The Nest module of each lib has a path of its own (`#platform/module`), so that other code does
 * not load Nest.
 */
import { type DynamicModule, Global, Inject, Injectable, type InjectionToken, Module, type Type } from '@nestjs/common';
import { type Command, CommandHandler, type ICommandHandler, type IQueryHandler, type Query, QueryHandler } from '@nestjs/cqrs';
import { type Clock, type Ids, systemClock } from '#kernel';
import type { Config } from './config.js';
import { withFailpoint } from './failpoints.js';
import { systemIds } from './ids.js';
import type { KeyRing } from './keys.js';
import type { Logger } from './logging.js';
import { createPool, type Pool, type PoolOptions } from './postgres/pool.js';
import { SandboxTime } from './postgres/sandbox-time.js';

/** The addresses of the database and of the simulator. `simulatorUrl` null: there is no simulator. */
export interface Places {
  readonly databaseUrl: string;
  readonly simulatorUrl: string | null;
}

export interface ProcessOptions {
  /** The clock of the process. Tests may replace it. */
  readonly clock?: Clock;
  /** The time of the sandbox that this process follows already. */
  readonly sandboxTime?: SandboxTime;
  /** The role of a process that keeps running, recorded for `payfold upgrade`. Absent for a command. */
  readonly role?: string;
  /** Replaces the addresses of gateways, by name. Tests only: no setting of an operator does this in production. */
  readonly gatewayEndpoints?: Readonly<Record<string, string>>;
  /** The owner of the leases on projections (`SubscriberOptions.owner`). */
  readonly leaseOwner?: string;
  /** Aborts when the process must end, even if the process is still starting. */
  readonly stop?: AbortSignal;
}

/** The settings of a process, and the resources that it must close at its end. */
export class ProcessContext {
  readonly clock: Clock;
  /** null: production, whose time never moves. */
  readonly sandboxTime: SandboxTime | null;
  readonly ids: Ids;
  private readonly closers: (() => Promise<unknown>)[] = [];
  private closed = false;

  constructor(
    readonly config: Config,
    readonly places: Places,
    readonly keys: KeyRing,
    readonly log: Logger,
    readonly options: ProcessOptions = {},
  ) {
    this.sandboxTime = options.sandboxTime ?? (config.environment === 'sandbox' ? new SandboxTime(log, options.clock) : null);
    this.clock = this.sandboxTime?.clock ?? options.clock ?? systemClock;
    this.ids = systemIds(() => this.clock.realNow());
  }

  /** Registers `close` for the end of the process. The last registered function runs first. */
  atEnd(close: () => Promise<unknown>): void {
    // A start that was interrupted may open a resource after the others were closed. Close this resource at once.
    if (this.closed) void close().catch(() => undefined);
    else this.closers.push(close);
  }

  /** A pool on the database of the installation. */
  pool(options: PoolOptions): Pool {
    const pool = createPool(this.places.databaseUrl, options);
    this.atEnd(() => pool.end());
    return pool;
  }

  /** Wraps a port. A call that the configuration names as fail point kills the process. */
  guarded<T extends object>(port: T): T {
    return withFailpoint(this.config.failpoint, port);
  }

  async close(): Promise<void> {
    this.closed = true;
    for (const close of this.closers.splice(0).reverse()) await close();
  }

  /** Nest calls this when the application closes. */
  onApplicationShutdown(): Promise<void> {
    return this.close();
  }
}

@Global()
@Module({})
export class PlatformModule {
  static of(context: ProcessContext): DynamicModule {
    return { module: PlatformModule, providers: [{ provide: ProcessContext, useValue: context }], exports: [ProcessContext] };
  }
}

/** Makes the handler of a command. Nest calls `run` with the ports that `token` provides. */
export const commandHandler = <Ports, Result, C extends Command<Result>>(
  command: Type<C>,
  token: InjectionToken<Ports>,
  run: (ports: Ports, command: C) => Promise<Result>,
): Type<ICommandHandler> => decorated(CommandHandler(command), `${command.name}Handler`, token, run);

/** Makes the handler of a query. Nest calls `run` with the ports that `token` provides. */
export const queryHandler = <Ports, Result, Q extends Query<Result>>(
  query: Type<Q>,
  token: InjectionToken<Ports>,
  run: (ports: Ports, query: Q) => Promise<Result>,
): Type<IQueryHandler> => decorated(QueryHandler(query), `${query.name}Handler`, token, run);

const decorated = <Ports, Asked, Result>(
  decorate: ClassDecorator,
  name: string,
  token: InjectionToken<Ports>,
  run: (ports: Ports, asked: Asked) => Promise<Result>,
) => {
  class Handler {
    constructor(private readonly ports: Ports) {}

    execute(asked: Asked): Promise<Result> {
      return run(this.ports, asked);
    }
  }
  Object.defineProperty(Handler, 'name', { value: name });
  Injectable()(Handler);
  Inject(token)(Handler, undefined, 0);
  decorate(Handler);
  return Handler;
};

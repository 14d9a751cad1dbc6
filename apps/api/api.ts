/** The HTTP service: Nest on Fastify with the partner endpoints, the payer's pages, health checks and the OpenAPI document. */
import { type DynamicModule, Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import { CommandBus, QueryBus } from '@nestjs/cqrs';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import type { FastifyInstance } from 'fastify';
import type { AuthenticationDeps } from '#accounts';
import { AUTHENTICATION } from '#accounts/module';
import type { CheckoutPorts } from '#checkout';
import type { Clock } from '#kernel';
import type { Claims } from '#payments';
import { type Config, Convoy, type KeyRing, type Logger, type Slots } from '#platform';
import { createHttpAdapter, ErrorsFilter, type ServerOptions } from '#platform/http';
import { serveOpenApi } from '../api-docs.js';
import { gracefulClose } from '../graceful-close.js';
import { Health } from '../health.js';
import { HealthController, untilBuilt } from './health.controller.js';
import { buildOpenApi } from './openapi.js';
import { AuthController } from './partner/auth.controller.js';
import { FeesController } from './partner/fees.controller.js';
import { PaymentsController } from './partner/payments.controller.js';
import { UnsupportedController } from './partner/unsupported.controller.js';
import { CheckoutController } from './payer/checkout.controller.js';
import { addSecurityHeaders, CHECKOUT_SERVICES, type CheckoutServices, isForPayers, pageHeaders, routeOf } from './payer/http.js';
import { IntakeController } from './payer/intake.controller.js';
import { PayerPages } from './payer/pages.js';
import { createRateLimits, type RateLimits } from './payer/rate-limits.js';
import { HandlerWatch, SLOTS } from './slots.js';

export interface ApiParts {
  readonly authentication: AuthenticationDeps;
  readonly commands: CommandBus;
  readonly queries: QueryBus;
  readonly checkout: CheckoutPorts;
  readonly keys: KeyRing;
  readonly health: Health;
  readonly claims: Claims;
  readonly readModels: { areBuilt(): Promise<boolean> };
  /** The slots of this process, for requests of partners and payers. */
  readonly slots: Slots;
  readonly clock: Clock;
  readonly log: Logger;
  /** The address at which partners and payers reach this service. */
  readonly publicUrl: string;
  readonly config: Pick<
    Config,
    | 'environment'
    | 'apiDocs'
    | 'webhooks'
    | 'checkoutRatePerAddress'
    | 'checkoutUnsignedPerPortal'
    | 'checkoutDeclinesPerPortal'
    | 'proxyHops'
    | 'connectionsPerAddress'
  >;
  readonly onAnswer?: ServerOptions['onAnswer'];
  readonly timeouts?: ServerOptions['timeouts'];
}

/** The authentication schemes of partners, for the header `WWW-Authenticate`. */
const CHALLENGE = 'ApiKey realm="payfold", Bearer realm="payfold"';

/** A spec makes the OpenAPI document from them. */
export const CONTROLLERS = [
  PaymentsController,
  FeesController,
  AuthController,
  UnsupportedController,
  IntakeController,
  CheckoutController,
  HealthController,
];

@Module({})
class ApiModule {
  static of(parts: ApiParts, checkout: CheckoutServices, health: Health): DynamicModule {
    return {
      module: ApiModule,
      controllers: CONTROLLERS,
      providers: [
        { provide: AUTHENTICATION, useValue: parts.authentication },
        // All HTTP interfaces of the process share one command bus and one query bus.
        { provide: CommandBus, useValue: parts.commands },
        { provide: QueryBus, useValue: parts.queries },
        { provide: Convoy, useValue: new Convoy(parts.clock) },
        { provide: SLOTS, useValue: parts.slots },
        { provide: CHECKOUT_SERVICES, useValue: checkout },
        PayerPages,
        { provide: Health, useValue: health },
      ],
    };
  }
}

export interface Api {
  readonly app: NestFastifyApplication;
  readonly health: Health;
  /** The rate limits of hosted checkout, for metrics. */
  readonly limits: RateLimits;
  listen(port: number, host: string): Promise<string>;
  /** Makes the readiness check fail, then closes the server with {@link gracefulClose}. */
  close(graceMs?: number): Promise<void>;
}

export const createApi = async (parts: ApiParts): Promise<Api> => {
  const { log, clock, config, publicUrl } = parts;
  const checkout: CheckoutServices = {
    ports: parts.checkout,
    slots: parts.slots,
    keys: parts.keys,
    publicUrl,
    sandbox: config.environment === 'sandbox',
    limits: createRateLimits(
      {
        perAddress: config.checkoutRatePerAddress,
        unsignedPerPortal: config.checkoutUnsignedPerPortal,
        declinesPerPortal: config.checkoutDeclinesPerPortal,
        onLowered: (portalId, by) => log.error({ portalId, reason: by }, 'the limits of hosted checkout are lowered for a portal'),
      },
      clock,
    ),
    proxyHops: config.proxyHops,
  };
  parts.checkout.sessions.watch((outcome, portalId) => {
    if (outcome === 'declined') checkout.limits.declined(portalId);
  });
  const { health } = parts;
  const adapter = createHttpAdapter({
    log,
    now: () => clock.realNow(),
    connectionsPerAddress: config.connectionsPerAddress,
    badUrlHeaders: pageHeaders(publicUrl),
    ...(parts.onAnswer ? { onAnswer: parts.onAnswer } : {}),
    ...(parts.timeouts ? { timeouts: parts.timeouts } : {}),
  });
  const close = gracefulClose(adapter.getInstance<FastifyInstance>(), clock);
  addSecurityHeaders(adapter.getInstance<FastifyInstance>(), publicUrl);
  const routes: { method: string; url: string }[] = [];
  adapter.getInstance<FastifyInstance>().addHook('onRoute', ({ method, url }) => {
    for (const one of [method].flat()) routes.push({ method: one, url });
  });
  const app = await NestFactory.create<NestFastifyApplication>(ApiModule.of(parts, checkout, health), adapter, {
    bodyParser: false,
    logger: false,
    abortOnError: false,
  });
  const pages = app.get(PayerPages);
  app.useGlobalFilters(
    new ErrorsFilter(log, routes, CHALLENGE, {
      covers: (request, status) => isForPayers(routeOf(request), status),
      send: (request, reply, status) => pages.failed(request, reply, status),
    }),
  );
  app.useGlobalInterceptors(new HandlerWatch());
  app.useGlobalGuards(untilBuilt(parts.readModels));
  serveOpenApi(adapter.getInstance<FastifyInstance>(), buildOpenApi(app, publicUrl), { apiDocs: config.apiDocs, publicUrl });
  await app.init();
  await parts.claims.begun();
  await adapter.getInstance<FastifyInstance>().ready();
  return {
    app,
    health,
    limits: checkout.limits,
    listen: async (port, host) => {
      await app.listen(port, host);
      const { address, port: bound, family } = app.getHttpServer().address() as { address: string; port: number; family: string };
      return `http://${family === 'IPv6' ? `[${address}]` : address}:${bound}`;
    },
    close: async (graceMs = 0) => {
      health.drain();
      await close(app, graceMs);
    },
  };
};

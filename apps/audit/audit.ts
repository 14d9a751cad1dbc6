/** The audit listener: `/audit/v1` on its own port, for finance tools and auditors, with its own OpenAPI document. */
import { type DynamicModule, Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import { DocumentBuilder, SwaggerModule } from '@nestjs/swagger';
import type { FastifyInstance } from 'fastify';
import { FeedWaits } from '#audit';
import { createHttpAdapter, ErrorsFilter, type ServerOptions } from '#platform/http';
import { API_VERSION, finished } from '../api/openapi.js';
import { ErrorEnvelope } from '../api/partner/resources.js';
import { serveOpenApi } from '../api-docs.js';
import { gracefulClose } from '../graceful-close.js';
import type { Services } from '../services.js';
import { AuditController, AuditGuard } from './audit.controller.js';
import { AUDITED, LimitRunning, type MetLimit, ON_LIMIT, Pace } from './limits.js';

const CHALLENGE = 'AuditKey realm="payfold audit"';

@Module({})
class AuditModule {
  static of(services: Services, { onLimit = () => undefined }: AuditOptions): DynamicModule {
    return {
      module: AuditModule,
      controllers: [AuditController],
      providers: [
        // Nothing here may use the connections of payments.
        { provide: AUDITED, useValue: { ...services, pool: services.auditPool } },
        { provide: ON_LIMIT, useValue: onLimit },
        AuditGuard,
        LimitRunning,
        Pace,
        { provide: FeedWaits, useValue: new FeedWaits({ store: services.store, db: services.auditPool }, services.clock) },
      ],
    };
  }
}

export interface AuditOptions extends Pick<ServerOptions, 'onAnswer'> {
  /** Called for each request that met a limit, for metrics. */
  readonly onLimit?: (limit: MetLimit) => void;
}

export interface Audit {
  readonly app: NestFastifyApplication;
  listen(port: number, host: string): Promise<string>;
  /** Closes the server with {@link gracefulClose}. An export that has begun is completed. */
  close(graceMs?: number): Promise<void>;
}

export const createAudit = async (services: Services & AuditOptions): Promise<Audit> => {
  const { log, clock, onAnswer } = services;
  const { connectionsPerAddress } = services.config;
  const adapter = createHttpAdapter({ log, now: () => clock.realNow(), connectionsPerAddress, ...(onAnswer && { onAnswer }) });
  const close = gracefulClose(adapter.getInstance<FastifyInstance>(), clock);
  const routes: { method: string; url: string }[] = [];
  adapter.getInstance<FastifyInstance>().addHook('onRoute', ({ method, url }) => {
    for (const one of [method].flat()) routes.push({ method: one, url });
  });
  const app = await NestFactory.create<NestFastifyApplication>(AuditModule.of(services, services), adapter, {
    bodyParser: false,
    logger: false,
    abortOnError: false,
  });
  app.useGlobalFilters(new ErrorsFilter(log, routes, CHALLENGE));
  const builder = new DocumentBuilder()
    .setOpenAPIVersion('3.1.0')
    .setTitle('Payfold audit')
    .setDescription('Read-only: payments as they were, the books, settlement and its exceptions. Money is integer cents of USD.')
    .setVersion(API_VERSION)
    .addSecurity('auditKey', { type: 'apiKey', in: 'header', name: 'Authorization', description: '`AuditKey pa_…`, or the key alone' });
  const document = finished(SwaggerModule.createDocument(app, builder.build(), { extraModels: [ErrorEnvelope] }));
  serveOpenApi(adapter.getInstance<FastifyInstance>(), document, services.config);
  await app.init();
  await adapter.getInstance<FastifyInstance>().ready();
  return {
    app,
    listen: async (port, host) => {
      await app.listen(port, host);
      const { address, port: bound, family } = app.getHttpServer().address() as { address: string; port: number; family: string };
      return `http://${family === 'IPv6' ? `[${address}]` : address}:${bound}`;
    },
    close: async (graceMs = 0) => {
      // Readers that wait are in flight, and would hold up the close.
      await app.get(FeedWaits).close();
      await close(app, graceMs);
    },
  };
};

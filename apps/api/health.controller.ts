/** Liveness and readiness, for load balancers and operators. */
import { type CanActivate, Controller, type ExecutionContext, Get, Inject, Res } from '@nestjs/common';
import { ApiExcludeController } from '@nestjs/swagger';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { ServiceError } from '#kernel';
import { Health, type HealthReport } from '../health.js';

@ApiExcludeController()
@Controller()
export class HealthController {
  constructor(@Inject(Health) private readonly health: Health) {}

  /** 200 if the event loop of the process runs. */
  @Get('healthz')
  live(@Res() reply: FastifyReply): void {
    this.send(reply, this.health.live());
  }

  /**
   * 200 if the process can take payments: idempotency keys can be written, events can be read and appended, and the schema is that of this release.
   */
  @Get('readyz')
  async ready(@Res() reply: FastifyReply): Promise<void> {
    this.send(reply, await this.health.ready());
  }

  private send(reply: FastifyReply, report: HealthReport): void {
    void reply
      .status(report.ok ? 200 : 503)
      .header('content-type', 'application/json; charset=utf-8')
      .send(JSON.stringify(report));
  }
}

const RETRY_SECONDS = 2;

/**
 * Refuses all requests except health checks until the read models are built. A half-built directory may lack a valid API key or accept a revoked one.
 */
export const untilBuilt = (readModels: { areBuilt(): Promise<boolean> }): CanActivate => ({
  canActivate: async (context: ExecutionContext) => {
    if (context.getClass() === HealthController) return true;
    const keyed = context.switchToHttp().getRequest<FastifyRequest>().headers['idempotency-key'] !== undefined;
    try {
      if (await readModels.areBuilt()) return true;
    } catch (error) {
      // The database cannot be reached. For a request with a key, a plain 500 would mean that work may have begun (C16, C19).
      if (!keyed) throw error;
    }
    throw new ServiceError(
      keyed ? 'IDEMPOTENCY_UNAVAILABLE' : 'INTERNAL_ERROR',
      'The service is not ready. Nothing was done. Send the request again.',
      {},
      { status: 503, retryAfterSeconds: RETRY_SECONDS },
    );
  },
});

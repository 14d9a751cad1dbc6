/** Liveness and readiness, for load balancers and operators. */
import { type CanActivate, Controller, type ExecutionContext, Get, Inject, Res } from '@nestjs/common';
import { ApiExcludeController } from '@nestjs/swagger';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { ServiceError } from '#kernel';
import { Health, type HealthReport } from './health.js';

@ApiExcludeController()
@Controller()
export class HealthController {
  constructor(@Inject(Health) private readonly health: Health) {}

  /** The event loop of the process runs. */
  @Get('healthz')
  live(@Res() reply: FastifyReply): void {
    this.send(reply, this.health.live());
  }

  /** The process can take payments: keys can be written, events read and appended, the schema is ours. */
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
 * Refuses every request but those for health until the read models are built. A directory that is half built knows no key, or still accepts a revoked
 * one. A load balancer that follows `/readyz` sends nothing before then.
 */
export const untilBuilt = (readModels: { areBuilt(): Promise<boolean> }): CanActivate => ({
  canActivate: async (context: ExecutionContext) => {
    if (context.getClass() === HealthController) return true;
    const keyed = context.switchToHttp().getRequest<FastifyRequest>().headers['idempotency-key'] !== undefined;
    try {
      if (await readModels.areBuilt()) return true;
    } catch (error) {
      // The database is away. For a request with a key, a bare 500 would mean that it may have begun (C16, C19).
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

/** Liveness and readiness, for whoever runs the process. */
import { Controller, Get, Inject, Res } from '@nestjs/common';
import { ApiExcludeController } from '@nestjs/swagger';
import type { FastifyReply } from 'fastify';
import { Health, type HealthReport } from './health.js';

@ApiExcludeController()
@Controller()
export class HealthController {
  constructor(@Inject(Health) private readonly health: Health) {}

  /** The process turns its event loop. */
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

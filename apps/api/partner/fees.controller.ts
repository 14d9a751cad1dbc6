/** The service fee, before it is charged (specification, Endpoints). */
import { Controller, Get, Inject, Query, Res } from '@nestjs/common';
import { QueryBus } from '@nestjs/cqrs';
import { ApiOperation, ApiQuery, ApiTags } from '@nestjs/swagger';
import type { FastifyReply } from 'fastify';
import type { Caller } from '#accounts';
import { QuoteFee } from '#payments/module';
import { successAnswer } from '#platform';
import { sendAnswer } from '#platform/http';
import { Answers, CallerOf, Partner } from './http.js';
import { QuoteQuery, quoteRequestOf } from './requests.js';

@Partner()
@ApiTags('Fees')
@Controller('api/partner/v1/fees')
export class FeesController {
  constructor(@Inject(QueryBus) private readonly queries: QueryBus) {}

  @Get('quote')
  @ApiOperation({
    summary: 'Quote the service fee',
    description: 'The fee that a charge of this amount has now. A quote reserves nothing.',
    operationId: 'quoteFee',
  })
  @ApiQuery({ type: QuoteQuery })
  @Answers({ result: 'FeeQuoteEnvelope', errors: [429] })
  async quote(@CallerOf() caller: Caller, @Query() query: Record<string, unknown>, @Res() reply: FastifyReply): Promise<void> {
    sendAnswer(reply, successAnswer(await this.queries.execute(new QuoteFee(quoteRequestOf(caller.accountId, query)))));
  }
}

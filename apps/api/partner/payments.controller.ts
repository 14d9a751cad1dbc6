/** Payments: create, read, list, refund, void (specification, Endpoints). */
import { Controller, Get, Inject, Param, Post, Query, Res } from '@nestjs/common';
import { CommandBus, QueryBus } from '@nestjs/cqrs';
import { ApiOperation, ApiParam, ApiQuery, ApiTags } from '@nestjs/swagger';
import type { FastifyReply } from 'fastify';
import type { Caller } from '#accounts';
import { ChargePayment, FindPayment, ListPayments, ReversePayment } from '#payments/module';
import { type Answer, successAnswer } from '#platform';
import { sendAnswer, validated } from '#platform/http';
import { answerOf } from '../../answers.js';
import { Answers, CallerOf, Partner, type PartnerRequest, receivedOf, RequestOf } from './http.js';
import { chargeRequestOf, CreatePaymentRequest, ListQuery, listRequestOf, refuseAmount, RefundRequest, VoidRequest } from './requests.js';
import { Payment, PaymentPage, RefundResult, VoidResult } from './resources.js';

@Partner()
@ApiTags('Payments')
@Controller('api/partner/v1/payments')
export class PaymentsController {
  constructor(
    @Inject(CommandBus) private readonly commands: CommandBus,
    @Inject(QueryBus) private readonly queries: QueryBus,
  ) {}

  @Post()
  @ApiOperation({ summary: 'Create a payment', operationId: 'createPayment' })
  @Answers({ result: Payment, errors: [402, 409, 422, 429, 501, 502, 503, 504], body: CreatePaymentRequest, keyed: true })
  async create(@CallerOf() caller: Caller, @RequestOf({}) request: PartnerRequest, @Res() reply: FastifyReply): Promise<void> {
    const charge = chargeRequestOf(caller.accountId, request.body);
    sendAnswer(reply, answerOf(await this.commands.execute(new ChargePayment(charge, receivedOf(request)))));
  }

  @Get(':id')
  @ApiOperation({ summary: 'Read a payment', operationId: 'getPayment' })
  @ApiParam({ name: 'id', schema: { type: 'string', format: 'uuid' } })
  @Answers({ result: Payment, errors: [404, 429, 503] })
  async find(@CallerOf() caller: Caller, @Param('id') id: string, @Res() reply: FastifyReply): Promise<void> {
    sendAnswer(reply, successAnswer(await this.queries.execute(new FindPayment(caller.accountId, id))));
  }

  @Get()
  @ApiOperation({ summary: "List the account's payments, newest first", operationId: 'listPayments' })
  @ApiQuery({ type: ListQuery })
  @Answers({ result: PaymentPage, headers: ['Ledger-Position', 'Ledger-Lag'], errors: [429] })
  async list(@CallerOf() caller: Caller, @Query() query: Record<string, unknown>, @Res() reply: FastifyReply): Promise<void> {
    const { page, ledger } = await this.queries.execute(new ListPayments(listRequestOf(caller.accountId, query)));
    void reply.header('ledger-position', ledger.position ?? '').header('ledger-lag', String(ledger.lag));
    sendAnswer(reply, successAnswer(page));
  }

  @Post(':id/refund')
  @ApiOperation({ summary: 'Refund a payment in full or in part', operationId: 'refundPayment' })
  @ApiParam({ name: 'id', schema: { type: 'string', format: 'uuid' } })
  @Answers({ result: RefundResult, errors: [404, 409, 422, 429, 502, 503, 504], body: RefundRequest, keyed: true })
  async refund(
    @CallerOf() caller: Caller,
    @Param('id') id: string,
    @RequestOf({ emptyIsObject: true }) request: PartnerRequest,
    @Res() reply: FastifyReply,
  ): Promise<void> {
    refuseAmount(request.body);
    const { amountCents, feeType, reason } = validated(RefundRequest, request.body);
    sendAnswer(
      reply,
      await this.reverse(caller, id, request, {
        operation: 'refund',
        amountCents: amountCents ?? null,
        includeFee: feeType === 'include_fee',
        reason: reason ?? null,
      }),
    );
  }

  @Post(':id/void')
  @ApiOperation({ summary: 'Void a payment before its batch settles', operationId: 'voidPayment' })
  @ApiParam({ name: 'id', schema: { type: 'string', format: 'uuid' } })
  @Answers({ result: VoidResult, errors: [404, 409, 422, 429, 502, 503, 504], body: VoidRequest, keyed: true })
  async void(
    @CallerOf() caller: Caller,
    @Param('id') id: string,
    @RequestOf({ emptyIsObject: true }) request: PartnerRequest,
    @Res() reply: FastifyReply,
  ): Promise<void> {
    refuseAmount(request.body);
    const { reason } = validated(VoidRequest, request.body);
    sendAnswer(reply, await this.reverse(caller, id, request, { operation: 'void', amountCents: null, includeFee: true, reason: reason ?? null }));
  }

  private async reverse(
    { accountId }: Caller,
    paymentId: string,
    request: PartnerRequest,
    asked: Pick<ReversePayment['request'], 'operation' | 'amountCents' | 'includeFee' | 'reason'>,
  ): Promise<Answer> {
    const command = new ReversePayment({ ...asked, paymentId, accountId, initiatedBy: 'partner' }, receivedOf(request));
    return answerOf(await this.commands.execute(command));
  }
}

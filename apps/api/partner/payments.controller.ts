/** Payments: create, read, list, refund, void (specification, Endpoints). */
import { Controller, Get, Inject, Param, Post, Query, Res } from '@nestjs/common';
import { CommandBus, QueryBus } from '@nestjs/cqrs';
import { ApiOperation, ApiParam, ApiQuery, ApiTags } from '@nestjs/swagger';
import type { FastifyReply } from 'fastify';
import type { Caller } from '#accounts';
import { ChargePayment, FindByKey, FindPayment, ListPayments, ReversePayment } from '#payments/module';
import { type Answer, successAnswer } from '#platform';
import { sendAnswer, validated } from '#platform/http';
import { answerOf } from '../../answers.js';
import { Answers, CallerOf, Partner, type PartnerRequest, receivedOf, RequestOf } from './http.js';
import {
  askedKeyOf,
  chargeRequestOf,
  CreatePaymentRequest,
  ListQuery,
  listRequestOf,
  NO_FEE,
  refuseAmount,
  RefundRequest,
  VoidRequest,
} from './requests.js';

const KEY_IS_ABSENT =
  'No create with this key is known. That promises nothing: the request may still arrive, or its key was forgotten after 24 hours. Charge again with the same key only.';

@Partner()
@ApiTags('Payments')
@Controller('api/partner/v1/payments')
export class PaymentsController {
  constructor(
    @Inject(CommandBus) private readonly commands: CommandBus,
    @Inject(QueryBus) private readonly queries: QueryBus,
  ) {}

  @Post()
  @ApiOperation({
    summary: 'Create a payment',
    description:
      'Charges the card with the principal and the service fee. Send an `Idempotency-Key`, and set the timeout of your client to 40 s or more.',
    operationId: 'createPayment',
  })
  @Answers({ result: 'PaymentEnvelope', errors: [402, 409, 422, 429, 501, 502, 503, 504], body: CreatePaymentRequest, keyed: true })
  async create(@CallerOf() caller: Caller, @RequestOf({}) request: PartnerRequest, @Res() reply: FastifyReply): Promise<void> {
    const charge = chargeRequestOf(caller.accountId, request.body, request.later);
    sendAnswer(reply, answerOf(await this.commands.execute(new ChargePayment(charge, receivedOf(request)))));
  }

  @Get(':id')
  @ApiOperation({ summary: 'Read a payment', description: 'The payment as it stands now.', operationId: 'getPayment' })
  @ApiParam({ name: 'id', description: 'The `id` of the payment.', schema: { type: 'string', format: 'uuid' } })
  @Answers({ result: 'PaymentEnvelope', errors: [404, 429, 503] })
  async find(@CallerOf() caller: Caller, @Param('id') id: string, @Res() reply: FastifyReply): Promise<void> {
    sendAnswer(reply, successAnswer(await this.queries.execute(new FindPayment(caller.accountId, id))));
  }

  @Get()
  @ApiOperation({
    summary: "List the account's payments, newest first",
    description:
      'While `nextCursor` is not null, send it as `cursor` with the same filters. With `idempotencyKey`: the payment of that key, if there is one.',
    operationId: 'listPayments',
  })
  @ApiQuery({ type: ListQuery })
  @Answers({ result: 'PaymentPageEnvelope', headers: ['Ledger-Position', 'Ledger-Lag'], errors: [409, 429] })
  async list(@CallerOf() caller: Caller, @Query() query: Record<string, unknown>, @Res() reply: FastifyReply): Promise<void> {
    const key = askedKeyOf(query);
    if (key !== null) {
      const found = await this.queries.execute(new FindByKey(caller.accountId, key));
      return sendAnswer(reply, successAnswer(found, found.keyState === 'absent' ? KEY_IS_ABSENT : undefined));
    }
    const { page, ledger } = await this.queries.execute(new ListPayments(listRequestOf(caller.accountId, query)));
    void reply.header('ledger-position', ledger.position ?? '').header('ledger-lag', String(ledger.lag));
    sendAnswer(reply, successAnswer(page));
  }

  @Post(':id/refund')
  @ApiOperation({
    summary: 'Refund a payment in full or in part',
    description:
      'Returns principal; the service fee only with `feeType: include_fee` and everything that remains. Before settlement the gateway voids instead: `reversalType` says which.',
    operationId: 'refundPayment',
  })
  @ApiParam({ name: 'id', description: 'The `id` of the payment.', schema: { type: 'string', format: 'uuid' } })
  @Answers({ result: 'RefundEnvelope', errors: [404, 409, 422, 429, 502, 503, 504], body: RefundRequest, keyed: true })
  async refund(
    @CallerOf() caller: Caller,
    @Param('id') id: string,
    @RequestOf({ emptyIsObject: true, neutral: { feeType: NO_FEE } }) request: PartnerRequest,
    @Res() reply: FastifyReply,
  ): Promise<void> {
    refuseAmount(request.body);
    const { amountCents, feeType, reason } = validated(RefundRequest, request.body, undefined, [], request.later);
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
  @ApiOperation({
    summary: 'Void a payment before its batch settles',
    description: 'Returns principal and service fee. Never refunds by itself.',
    operationId: 'voidPayment',
  })
  @ApiParam({ name: 'id', description: 'The `id` of the payment.', schema: { type: 'string', format: 'uuid' } })
  @Answers({ result: 'VoidEnvelope', errors: [404, 409, 422, 429, 502, 503, 504], body: VoidRequest, keyed: true })
  async void(
    @CallerOf() caller: Caller,
    @Param('id') id: string,
    @RequestOf({ emptyIsObject: true }) request: PartnerRequest,
    @Res() reply: FastifyReply,
  ): Promise<void> {
    refuseAmount(request.body);
    const { reason } = validated(VoidRequest, request.body, undefined, [], request.later);
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

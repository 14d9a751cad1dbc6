/** Endpoints of the specification that this service does not offer. They answer 401 without credentials, and otherwise 501 (C6). */
import { Controller, Post } from '@nestjs/common';
import { ApiOperation, ApiParam, ApiTags } from '@nestjs/swagger';
import { ServiceError } from '#kernel';
import { Answers, Partner } from './http.js';

@Partner()
@ApiTags('Unsupported')
@Controller('api/partner/v1')
export class UnsupportedController {
  @Post('payments/:id/capture')
  @ApiOperation({
    summary: 'Capture a payment: not supported',
    description: 'Always 501. All payments are immediate sales.',
    operationId: 'capturePayment',
  })
  @ApiParam({ name: 'id', description: 'The `id` of the payment.', schema: { type: 'string' } })
  @Answers({ errors: [501] })
  capture(): never {
    throw new ServiceError('CAPTURE_NOT_SUPPORTED', 'Only immediate sales are supported.');
  }

  @Post('vault')
  @ApiOperation({ summary: 'Store a card: not supported', description: 'Always 501.', operationId: 'storeCard' })
  @Answers({ errors: [501] })
  vault(): never {
    throw new ServiceError('VAULT_NOT_SUPPORTED', 'Stored cards are not supported.');
  }
}

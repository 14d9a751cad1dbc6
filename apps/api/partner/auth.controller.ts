/** Access tokens (specification, Authentication; C50). */
import { Controller, Inject, Post, Req, Res } from '@nestjs/common';
import { ApiOperation, ApiSecurity, ApiTags } from '@nestjs/swagger';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { type AuthenticationDeps, exchange } from '#accounts';
import { AUTHENTICATION } from '#accounts/module';
import { successAnswer } from '#platform';
import { headerLines, parseStrictJson, receiveBody, receivedBody, refuseOtherContentTypes, sendAnswer } from '#platform/http';
import { Answers } from './http.js';
import { refuseAmount } from './requests.js';

@ApiTags('Authentication')
@ApiSecurity('apiKey')
@Controller('api/partner/v1/auth')
export class AuthController {
  constructor(@Inject(AUTHENTICATION) private readonly deps: AuthenticationDeps) {}

  @Post('token')
  @ApiOperation({
    summary: 'Exchange an API key for an access token',
    description: 'The token is valid for one hour. An access token cannot obtain another one.',
    operationId: 'createAccessToken',
  })
  @Answers({ result: 'AccessTokenEnvelope', errors: [] })
  async token(@Req() request: FastifyRequest, @Res() reply: FastifyReply): Promise<void> {
    const grant = await exchange(headerLines(request.raw.rawHeaders, 'authorization'), this.deps);
    await receiveBody(request, reply);
    const bytes = receivedBody(request);
    refuseOtherContentTypes(request.headers['content-type'], request.headers['content-encoding'], bytes);
    refuseAmount(parseStrictJson(bytes, { emptyIsObject: true }));
    sendAnswer(reply, successAnswer(grant));
  }
}

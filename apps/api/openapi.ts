/** The OpenAPI 3.1 document, generated from the controllers and the request classes. */
import { DocumentBuilder, type OpenAPIObject, SwaggerModule } from '@nestjs/swagger';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import { RESOURCES } from './partner/resources.js';

export const API_VERSION = '1.0.0';

export const buildOpenApi = (app: NestFastifyApplication, publicUrl: string): OpenAPIObject => {
  const builder = new DocumentBuilder()
    .setOpenAPIVersion('3.1.0')
    .setTitle('Payfold partner payments')
    .setDescription('Card payments, voids, refunds and fee quotes for a partner backend. Money is integer cents of USD.')
    .setVersion(API_VERSION)
    .addServer(publicUrl)
    .addSecurity('apiKey', { type: 'apiKey', in: 'header', name: 'Authorization', description: '`ApiKey pc_…`, or the key alone' })
    .addSecurity('accessToken', { type: 'http', scheme: 'bearer', bearerFormat: 'JWT' });
  return SwaggerModule.createDocument(app, builder.build(), { extraModels: RESOURCES });
};

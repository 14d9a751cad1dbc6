/** The OpenAPI documents, generated from the controllers and the request classes: 3.1, and the same in 3.0 for generators that need it. */
import { DocumentBuilder, type OpenAPIObject, SwaggerModule } from '@nestjs/swagger';
import type { NestFastifyApplication } from '@nestjs/platform-fastify';
import { DISPUTE_STATUSES } from '#payments';
import { EXAMPLES } from './partner/examples.js';
import { ENVELOPES, RESOURCES, WORDS } from './partner/resources.js';

export const API_VERSION = '1.0.0';

type Json = Readonly<Record<string, unknown>>;
type Operation = Record<string, unknown> & { readonly operationId: string };

export const buildOpenApi = (app: NestFastifyApplication, publicUrl: string): OpenAPIObject => {
  const builder = new DocumentBuilder()
    .setOpenAPIVersion('3.1.0')
    .setTitle('Payfold partner payments')
    .setDescription(
      'Card payments, voids, refunds and fee quotes for a partner backend. Money is integer cents of USD. Answers may gain fields and words: a client must accept them.',
    )
    .setVersion(API_VERSION)
    .setLicense('Apache-2.0', 'https://www.apache.org/licenses/LICENSE-2.0')
    .addServer(publicUrl)
    .addTag('Payments', 'Create, read, list, refund and void payments.')
    .addTag('Fees', 'The service fee before it is charged.')
    .addTag('Authentication', 'Access tokens.')
    .addTag('Hosted checkout', 'The payer pays on a page of this service.')
    .addTag('Unsupported', 'Always 501.')
    .addSecurity('apiKey', { type: 'apiKey', in: 'header', name: 'Authorization', description: '`ApiKey pc_…`, or the key alone' })
    .addSecurity('accessToken', { type: 'http', scheme: 'bearer', bearerFormat: 'JWT' });
  const document = finished(SwaggerModule.createDocument(app, builder.build(), { extraModels: RESOURCES }));
  Object.assign(document.components!.schemas!, ENVELOPES);
  for (const operation of operationsOf(document)) {
    operation.security ??= [];
    if (operation.operationId === 'startCheckoutByLink') operation.parameters = linkParameters(document);
    const { request, answer } = EXAMPLES[operation.operationId] ?? {};
    if (request) withExample(operation.requestBody, request);
    if (answer) withExample((operation.responses as Json)['200'], answer);
  }
  return { ...document, webhooks: WEBHOOKS as never };
};

const operationsOf = (document: OpenAPIObject): Operation[] =>
  Object.values(document.paths).flatMap((methods) => Object.values(methods as Record<string, Operation>));

const withExample = (holder: unknown, example: object): void => {
  const { content } = (holder ?? {}) as { content?: Record<string, Record<string, unknown>> };
  if (content?.['application/json']) content['application/json'].example = example;
};

/** The fields of an intake as parameters of a query, where `line_items` is JSON text. A link must have `exp`, `nonce` and `sig`. */
const linkParameters = (document: OpenAPIObject): object[] => {
  const { properties, required } = document.components!.schemas!.IntakeRequest as unknown as {
    properties: Record<string, Json>;
    required: readonly string[];
  };
  const demanded = [...required, 'exp', 'nonce', 'sig'];
  return Object.entries(properties).map(([name, { description, ...schema }]) => ({
    name,
    in: 'query',
    required: demanded.includes(name),
    description:
      name === 'line_items' ? 'JSON text: 1 to 50 line items, as in `POST /api/v1/payer/intake`.' : (description ?? 'As in the body of an intake.'),
    schema: name === 'line_items' ? { type: 'string' } : schema,
  }));
};

/** Adds the named words, and writes references and nullable values in the plainest form of 3.1. */
export const finished = (document: OpenAPIObject): OpenAPIObject => {
  const plain = mapSchemas(document, (schema) => {
    const { type, allOf, oneOf, ...rest } = schema;
    if (isList(allOf) && allOf.length === 1 && allOf[0]!.$ref !== undefined) return { ...rest, ...allOf[0] };
    if (isList(oneOf) && oneOf.length === 2 && oneOf[1]!.type === 'null' && oneOf[0]!.$ref === undefined)
      return { ...oneOf[0], ...rest, type: [oneOf[0]!.type, 'null'] };
    return type === undefined ? schema : { type, ...rest, ...(allOf !== undefined && { allOf }), ...(oneOf !== undefined && { oneOf }) };
  }) as OpenAPIObject;
  const { components } = plain;
  return { ...plain, components: { ...components, schemas: { ...components!.schemas, ...(WORDS as object) } } };
};

/** The same document in OpenAPI 3.0. It has no webhooks, no list of types, and no keyword beside a reference. */
export const inOpenApi30 = (document: OpenAPIObject): OpenAPIObject => {
  const { webhooks: _, ...rest } = document;
  const converted = mapSchemas(rest, (schema) => {
    const { $ref, type, oneOf, ...others } = schema;
    if ($ref !== undefined) return Object.keys(others).length === 0 ? schema : { ...others, allOf: [{ $ref }] };
    if (Array.isArray(type)) return { type: type[0] as unknown, nullable: true, ...others };
    if (isList(oneOf) && oneOf.length === 2 && oneOf[1]!.type === 'null') return { type: 'object', nullable: true, ...others, allOf: [oneOf[0]] };
    return schema;
  }) as OpenAPIObject;
  return { ...converted, openapi: '3.0.3' };
};

const isList = (value: unknown): value is Json[] => Array.isArray(value);

/** Applies a change to every object of the document from the inside out. Examples are data, so they stay as they are. */
const mapSchemas = (node: unknown, change: (schema: Json) => Json): unknown => {
  if (Array.isArray(node)) return node.map((item) => mapSchemas(item, change));
  if (node === null || typeof node !== 'object') return node;
  return change(Object.fromEntries(Object.entries(node).map(([key, value]) => [key, key === 'example' ? value : mapSchemas(value, change)])));
};

const text = (description: string) => ({ type: 'string', description });
const known = (description: string, values: readonly string[]) => ({ ...text(description), 'x-extensible-enum': [...values] });
const uuid = (description: string) => ({ type: 'string', format: 'uuid', description });
const cents = (description: string) => ({ type: 'integer', format: 'int64', minimum: 1, description });
const date = (description: string) => ({ type: 'string', format: 'date', description });

/** A webhook. The payload has no references: some generators cannot follow them here. */
const webhook = (type: string, summary: string, data: Record<string, object>, example: object) => ({
  post: {
    operationId: type.replace('.', '_'),
    summary,
    description: 'How to verify the signature, and how often it is sent: docs/webhooks.md.',
    tags: ['Webhooks'],
    security: [],
    parameters: [
      ['Service-Signature', '`t=<Unix seconds>,v1=<hex HMAC-SHA256 of t.body>`. Further fields may follow.'],
      ['Service-Event-Id', 'The `id` of the event.'],
      ['Service-Event-Type', 'The `type` of the event.'],
    ].map(([name, description]) => ({ name, in: 'header', required: true, description, schema: { type: 'string' } })),
    requestBody: {
      required: true,
      content: {
        'application/json': {
          schema: {
            type: 'object',
            required: ['id', 'type', 'createdAt', 'data'],
            properties: {
              id: text('Begins with `evt_`. The same in every delivery of the event.'),
              type: text(`\`${type}\`.`),
              createdAt: { type: 'string', format: 'date-time', description: 'When it happened.' },
              data: { type: 'object', required: Object.keys(data), properties: data },
            },
          },
          example: { id: 'evt_W5rCIlLEXYZ_7mHNQmX4vDkvtI0', type, createdAt: '2026-11-20T10:00:00.000Z', data: example },
        },
      },
    },
    responses: { '2XX': { description: 'Any 2xx within 10 seconds: the event was taken.' } },
  },
});

const PAYMENT_ID = '7b0c2f5e-6f0a-4a86-9a56-0d7c9a1f2b11';
const WEBHOOKS = {
  'payment.refunded': webhook(
    'payment.refunded',
    'Staff returned money',
    {
      id: uuid('The payment.'),
      reversalType: known('How the gateway returned the money.', ['void', 'refund']),
      amountCents: cents('Returned by this attempt, with the service fee.'),
      currency: known('ISO 4217.', ['USD']),
      reason: text('As staff gave it; may be empty.'),
      initiatedBy: known('Initiator.', ['staff']),
    },
    { id: PAYMENT_ID, reversalType: 'refund', amountCents: 12_500, currency: 'USD', reason: 'duplicate', initiatedBy: 'staff' },
  ),
  'payment.disputed': webhook(
    'payment.disputed',
    'A dispute was opened, or its status or stage changed',
    {
      id: uuid('The payment.'),
      disputeId: uuid('The dispute.'),
      status: known('Where the dispute stands.', DISPUTE_STATUSES),
      stage: text("The processor's word for the latest step, at most 64 characters."),
      reasonCode: text("The card brand's code."),
      reason: text('The code in words.'),
      disputedAmountCents: cents('The amount that the cardholder disputes.'),
      currency: known('ISO 4217.', ['USD']),
      openedOn: date('Day on which it was opened.'),
      dueDate: date('Last day for an answer to it.'),
    },
    {
      id: PAYMENT_ID,
      disputeId: 'd0a3b1de-2c1a-4b6e-8f58-b0c3c9f1a111',
      status: 'in_dispute',
      stage: 'representment',
      reasonCode: '10.4',
      reason: 'fraud',
      disputedAmountCents: 500,
      currency: 'USD',
      openedOn: '2026-11-01',
      dueDate: '2026-11-21',
    },
  ),
};

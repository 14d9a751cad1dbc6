/** Rules of the OpenAPI documents that generated clients need (docs/decisions/0044), and the examples against their schemas. */
import { beforeAll, describe, expect, test } from '@jest/globals';
import { FastifyAdapter, type NestFastifyApplication } from '@nestjs/platform-fastify';
import { Test } from '@nestjs/testing';
import { Ajv2020 } from 'ajv/dist/2020.js';
import formats from 'ajv-formats';
import { STATUS_OF } from '#kernel';
import { DECLINE_CODES, PAYMENT_STATUSES } from '#payments';
import { notificationOf } from '#webhooks';
import { withKnownWords } from '../../test/support/openapi.js';
import { CONTROLLERS } from './api.js';
import { buildOpenApi, inOpenApi30 } from './openapi.js';

interface Schema {
  readonly [keyword: string]: unknown;
}
interface Operation {
  readonly operationId: string;
  readonly summary?: string;
  readonly description?: string;
  readonly security?: readonly object[];
  readonly parameters?: readonly { readonly name: string; readonly in: string; readonly required?: boolean; readonly schema: Schema }[];
  readonly requestBody?: { readonly content: Readonly<Record<string, { readonly schema: Schema; readonly example?: unknown }>> };
  readonly responses: Readonly<
    Record<
      string,
      { readonly description: string; readonly content?: Readonly<Record<string, { readonly schema: Schema; readonly example?: unknown }>> }
    >
  >;
}
interface OpenApi {
  readonly openapi: string;
  readonly info: { readonly license?: object };
  readonly paths: Readonly<Record<string, Readonly<Record<string, Operation>>>>;
  readonly webhooks?: Readonly<Record<string, { readonly post: Operation }>>;
  readonly components: { readonly schemas: Readonly<Record<string, Schema>> };
}

let document: OpenApi;
let older: OpenApi;
beforeAll(async () => {
  // Nothing is called: the document follows from the decorators.
  const module = await Test.createTestingModule({ controllers: CONTROLLERS })
    .useMocker(() => ({}))
    .compile();
  const app = module.createNestApplication<NestFastifyApplication>(new FastifyAdapter());
  const built = buildOpenApi(app, 'http://127.0.0.1:3000');
  document = JSON.parse(JSON.stringify(built)) as OpenApi;
  older = JSON.parse(JSON.stringify(inOpenApi30(built))) as OpenApi;
});

const operations = (): Operation[] => Object.values(document.paths).flatMap((methods) => Object.values(methods));
const webhooks = (): Operation[] => Object.values(document.webhooks ?? {}).map(({ post }) => post);

/** All objects of the document with their paths, without examples. */
const objectsOf = (node: unknown, path = ''): [string, Schema][] => {
  if (Array.isArray(node)) return node.flatMap((item, index) => objectsOf(item, `${path}/${index}`));
  if (node === null || typeof node !== 'object') return [];
  const inside = Object.entries(node).filter(([key]) => key !== 'example');
  return [[path, node as Schema], ...inside.flatMap(([key, value]) => objectsOf(value, `${path}/${key}`))];
};

test('the first word of feeType returns no fee: some clients fill a field with the first word', () =>
  expect(document.components.schemas.RefundRequest).toMatchObject({ properties: { feeType: { enum: ['none', 'include_fee'] } } }));

test('has the named schemas that clients use', () => {
  expect(Object.keys(document.components.schemas)).toEqual(
    expect.arrayContaining([
      'PaymentStatus',
      'SettlementStatus',
      'ErrorCode',
      'DeclineCode',
      'Currency',
      'ReversalType',
      'Payment',
      'PaymentEnvelope',
      'PaymentPageEnvelope',
      'RefundEnvelope',
      'VoidEnvelope',
      'FeeQuoteEnvelope',
      'AccessTokenEnvelope',
      'ErrorEnvelope',
      'CreatePaymentRequest',
      'RefundRequest',
    ]),
  );
});

test('every successful JSON answer is a named envelope, so that generators give it a name', () => {
  for (const { operationId, responses } of operations()) {
    const schema = responses['200']?.content?.['application/json']?.schema;
    if (schema) expect([operationId, schema]).toEqual([operationId, { $ref: expect.stringMatching(/Envelope$/) }]);
  }
});

test('words of answers are open strings, and list all words that the service knows (0044)', () => {
  const { schemas } = document.components;
  const known = (name: string) => [schemas[name]!.type, schemas[name]!.enum, schemas[name]!['x-extensible-enum']];
  expect(known('PaymentStatus')).toEqual(['string', undefined, PAYMENT_STATUSES]);
  expect(known('ErrorCode')).toEqual(['string', undefined, Object.keys(STATUS_OF)]);
  expect(known('DeclineCode')).toEqual(['string', undefined, DECLINE_CODES]);
  const inAnswers = (name: string) => !/Request$/.test(name);
  for (const [name, schema] of Object.entries(schemas).filter(([name]) => inAnswers(name)))
    for (const [path, part] of objectsOf(schema, name)) expect([path, part.enum, part.const]).toEqual([path, undefined, undefined]);
  for (const [path, part] of objectsOf(operations().map(({ responses }) => responses))) expect([path, part.enum]).toEqual([path, undefined]);
});

test('`success` is a plain boolean', () => {
  const found = objectsOf(document.components.schemas).filter(([path]) => path.endsWith('/properties/success'));
  expect(found.length).toBe(7);
  for (const [path, schema] of found) expect([path, { ...schema, description: '' }]).toEqual([path, { type: 'boolean', description: '' }]);
});

test('no field and no parameter has a default', () => {
  for (const [path, schema] of objectsOf(document)) expect([path, 'default' in schema]).toEqual([path, false]);
});

test('every number of cents is int64', () => {
  const found = objectsOf(document).filter(([path]) => /\/\w*(Cents|amount_cents)$/.test(path));
  expect(found.length).toBeGreaterThan(25);
  for (const [path, { format }] of found) expect([path, format]).toEqual([path, 'int64']);
  for (const { name, schema } of operations().flatMap(({ parameters = [] }) => parameters))
    if (/cents$/i.test(name)) expect([name, schema.format]).toEqual([name, 'int64']);
});

test('the list filters by the named status', () => {
  const list = operations().find(({ operationId }) => operationId === 'listPayments')!;
  expect(list.parameters!.find(({ name }) => name === 'status')!.schema).toEqual({ $ref: '#/components/schemas/PaymentStatus' });
});

test('every operation names its credentials: a key, a token, or `security: []`', () => {
  const open = operations().filter(({ security }) => security?.length === 0);
  expect(open.map(({ operationId }) => operationId).sort()).toEqual(['startCheckout', 'startCheckoutByLink']);
  for (const { operationId, security } of operations()) expect([operationId, security]).toEqual([operationId, expect.any(Array)]);
  expect(document.info.license).toMatchObject({ name: 'Apache-2.0' });
});

test('the key has its advice and its pattern', () => {
  for (const operationId of ['createPayment', 'refundPayment', 'voidPayment']) {
    const operation = operations().find((one) => one.operationId === operationId)!;
    expect(operation.parameters).toContainEqual({
      name: 'Idempotency-Key',
      in: 'header',
      required: false,
      description: expect.stringContaining('Without a key'),
      schema: { type: 'string', minLength: 1, maxLength: 255, pattern: '^[!-~]+$' },
    });
  }
});

test('the intake is documented as JSON, with its 429; a link has every parameter of an intake', () => {
  const one = (id: string) => operations().find(({ operationId }) => operationId === id)!;
  expect(Object.keys(one('startCheckout').requestBody!.content)).toEqual(['application/json']);
  const link = one('startCheckoutByLink').parameters!;
  const { properties } = document.components.schemas.IntakeRequest as unknown as { properties: object };
  expect(link.map(({ name }) => name)).toEqual(Object.keys(properties));
  expect(
    link
      .filter(({ required }) => required)
      .map(({ name }) => name)
      .sort(),
  ).toEqual(['amount_cents', 'cancel_url', 'exp', 'line_items', 'nonce', 'portal_id', 'return_url', 'sig']);
  for (const { responses } of [one('startCheckout'), one('startCheckoutByLink')]) expect(Object.keys(responses)).toEqual(['303', '429']);
});

test('every operation, answer and parameter has a description', () => {
  for (const { operationId, summary, description, responses, parameters = [] } of [...operations(), ...webhooks()]) {
    expect([operationId, summary, description]).toEqual([operationId, expect.stringMatching(/./), expect.stringMatching(/./)]);
    for (const [status, answer] of Object.entries(responses))
      expect([operationId, status, answer.description]).toEqual([operationId, status, expect.stringMatching(/./)]);
    for (const parameter of parameters) expect(parameter).toMatchObject({ name: parameter.name, description: expect.stringMatching(/./) });
  }
});

describe.each(['3.1', '3.0'])('examples (%s)', (version) => {
  test('each operation has an example of its body and of its answers, and each is as its schema says', () => {
    const ajv = new Ajv2020({ allErrors: true, strict: false });
    formats.default(ajv);
    const checked: string[] = [];
    const spec = withKnownWords(version === '3.1' ? document : nullableAsUnion(older));
    ajv.addSchema({ $id: 'openapi', components: spec.components });
    const all = [
      ...Object.values(spec.paths).flatMap((methods) => Object.values(methods)),
      ...Object.values(spec.webhooks ?? {}).map(({ post }) => post),
    ];
    for (const { operationId, requestBody, responses } of all)
      for (const [where, holder] of [['body', requestBody] as const, ...Object.entries(responses)]) {
        const json = holder?.content?.['application/json'];
        if (!json) continue;
        expect([operationId, where, typeof json.example]).toEqual([operationId, where, 'object']);
        const validate = ajv.compile(JSON.parse(JSON.stringify(json.schema).replaceAll('"#/components', '"openapi#/components')) as object);
        expect([operationId, where, validate(json.example), validate.errors]).toEqual([operationId, where, true, null]);
        checked.push(`${operationId} ${where}`);
      }
    expect(checked).toEqual(expect.arrayContaining(['createPayment body', 'createPayment 200', 'createPayment 504', 'startCheckout body']));
  });
});

/** Reads the `nullable` of OpenAPI 3.0, which JSON Schema does not know. */
const nullableAsUnion = (spec: OpenApi): OpenApi =>
  JSON.parse(JSON.stringify(spec), (_, value: unknown) => {
    if (value === null || typeof value !== 'object' || !('nullable' in value)) return value;
    const { nullable: __, ...rest } = value as Schema;
    return { anyOf: [rest, { type: 'null' }] };
  }) as OpenApi;

test('the webhooks of the document are those that the service sends, without references', () => {
  const AT = '2026-11-20T10:00:00.000Z';
  const paymentId = '7b0c2f5e-6f0a-4a86-9a56-0d7c9a1f2b11';
  const sent = [
    notificationOf(
      paymentId,
      {
        type: 'ReversalEnded',
        at: AT,
        data: {
          attemptId: 'a',
          operation: 'refund',
          outcome: 'completed',
          reversalType: 'refund',
          amountCents: 12_500,
          personal: null,
          initiatedBy: 'staff',
        },
      },
      'duplicate',
    ),
    notificationOf(
      paymentId,
      {
        type: 'PaymentDisputed',
        at: AT,
        data: {
          disputeId: 'd0a3b1de-2c1a-4b6e-8f58-b0c3c9f1a111',
          status: 'in_dispute',
          stage: 'representment',
          reasonCode: '10.4',
          personal: null,
          disputedAmountCents: 500,
          openedOn: '2026-11-01',
          dueDate: '2026-11-21',
        },
      },
      'fraud',
    ),
  ];
  expect(Object.keys(document.webhooks!)).toEqual(sent.map((one) => one!.type));
  expect(JSON.stringify(document.webhooks)).not.toContain('$ref');
  for (const one of sent) {
    const { schema, example } = document.webhooks![one!.type]!.post.requestBody!.content['application/json']!;
    const { data } = schema.properties as { data: { properties: object } };
    expect(Object.keys(data.properties)).toEqual(Object.keys(one!.data));
    expect(example).toMatchObject({ type: one!.type, data: one!.data });
  }
});

test('the 3.0 document has the same operations and schemas, and only features of 3.0', () => {
  expect(older.openapi).toBe('3.0.3');
  expect(Object.keys(older.components.schemas)).toEqual(Object.keys(document.components.schemas));
  expect(Object.keys(older.paths)).toEqual(Object.keys(document.paths));
  for (const [path, schema] of objectsOf(older)) {
    expect([path, Array.isArray(schema.type), schema.type === 'null', 'const' in schema, 'webhooks' in schema]).toEqual([
      path,
      false,
      false,
      false,
      false,
    ]);
    if ('$ref' in schema) expect([path, Object.keys(schema)]).toEqual([path, ['$ref']]);
  }
});

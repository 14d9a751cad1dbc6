/** Checks status, content type and body of every e2e answer against the served OpenAPI document. An undocumented field is a fault. */
import { Ajv2020, type ValidateFunction } from 'ajv/dist/2020.js';
import formats from 'ajv-formats';

type Schema = { [keyword: string]: unknown };

interface Documented {
  readonly headers?: Readonly<Record<string, unknown>>;
  readonly content?: Readonly<Record<string, { readonly schema: Schema }>>;
}
interface OpenApiDocument {
  readonly openapi: string;
  readonly paths: Readonly<Record<string, Readonly<Record<string, { readonly responses: Readonly<Record<string, Documented>> }>>>>;
  readonly components: { readonly schemas: Readonly<Record<string, Schema>> };
}

export interface Judged {
  readonly method: string;
  /** The path, with or without a query. */
  readonly path: string;
  readonly status: number;
  readonly contentType: string | undefined;
  readonly headers?: Readonly<Record<string, unknown>>;
  readonly text: string;
}

export interface OpenApiJudge {
  readonly document: OpenApiDocument;
  /** Throws if the answer is not as documented. */
  check(answer: Judged): void;
}

const JSON_TYPE = 'application/json; charset=utf-8';
/** Headers with a meaning for clients. An answer may have one of them only if the document names it for this answer. */
const TELLING_HEADERS = ['idempotent-replayed', 'ledger-lag', 'ledger-position', 'retry-after', 'www-authenticate', 'x-request-id'];
/** Statuses of refusals outside any operation: the operation does not exist (404, 405), or the request did not reach it (C65). */
const WITHOUT_OPERATION = [400, 404, 405, 408, 413, 417, 431, 505];

/** Forbids unknown fields in every object that lists its properties. An object with `additionalProperties` (metadata) stays open. */
const closed = (schema: unknown): unknown => {
  if (Array.isArray(schema)) return schema.map(closed);
  if (schema === null || typeof schema !== 'object') return schema;
  const copy = Object.fromEntries(Object.entries(schema).map(([keyword, value]) => [keyword, closed(value)]));
  return copy.properties !== undefined && copy.additionalProperties === undefined ? { ...copy, additionalProperties: false } : copy;
};

/** Reads the known words of open strings (`x-extensible-enum`) as the only ones. So specs refuse a word that is not documented. */
export const withKnownWords = <T>(document: T): T =>
  JSON.parse(JSON.stringify(document), (_, value: unknown) => {
    if (value === null || typeof value !== 'object' || !('x-extensible-enum' in value)) return value;
    const { 'x-extensible-enum': words, ...schema } = value;
    return { ...schema, enum: words };
  }) as T;

export const createOpenApiJudge = (served: OpenApiDocument): OpenApiJudge => {
  const document = withKnownWords(served);
  const ajv = new Ajv2020({ allErrors: true, strict: false });
  formats.default(ajv);
  ajv.addSchema({ $id: 'openapi', components: closed(document.components) as Schema });
  const validators = new Map<string, ValidateFunction>();
  const validatorFor = (schema: Schema): ValidateFunction => {
    // References in the document are local. The validator knows the components by the id `openapi`, so add this id.
    const text = JSON.stringify(closed(schema)).replaceAll('"#/components', '"openapi#/components');
    let validator = validators.get(text);
    if (!validator) validators.set(text, (validator = ajv.compile(JSON.parse(text) as Schema)));
    return validator;
  };
  const operationOf = (method: string, path: string) => {
    const parts = path.split('/');
    const fits = (template: string) => {
      const names = template.split('/');
      return names.length === parts.length && names.every((name, index) => name === parts[index] || (name.startsWith('{') && parts[index] !== ''));
    };
    // As in the router, a path with a fixed name comes before a path with a parameter in the same place.
    const [template] = Object.keys(document.paths)
      .filter(fits)
      .sort((a, b) => a.split('{').length - b.split('{').length);
    return template === undefined ? undefined : document.paths[template]![method.toLowerCase()];
  };

  return {
    document,
    check: ({ method, path, status, contentType, headers = {}, text }) => {
      const where = `${method} ${path} → ${status}`;
      if (contentType !== JSON_TYPE) throw new Error(`${where}: content type ${contentType}, not ${JSON_TYPE}`);
      const operation = operationOf(method, path.split('?')[0]!);
      const documented = operation?.responses[String(status)];
      let schema: Schema;
      if (documented) {
        const found = documented.content?.['application/json']?.schema;
        if (!found) throw new Error(`${where}: the document has no JSON body for it`);
        schema = found;
        const known = new Set(Object.keys(documented.headers ?? {}).map((name) => name.toLowerCase()));
        const untold = TELLING_HEADERS.filter((name) => headers[name] !== undefined && !known.has(name));
        if (untold.length > 0) throw new Error(`${where}: the document does not name its ${untold.join(', ')}`);
      } else {
        if (operation || !WITHOUT_OPERATION.includes(status)) throw new Error(`${where} is not documented`);
        schema = { $ref: '#/components/schemas/ErrorEnvelope' };
      }
      const validate = validatorFor(schema);
      if (!validate(JSON.parse(text)))
        throw new Error(`${where} is not as documented: ${ajv.errorsText(validate.errors, { dataVar: 'body' })}\n${text.slice(0, 2_000)}`);
    },
  };
};

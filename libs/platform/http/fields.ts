/**
 * Fields of request bodies and queries. Each decorator describes a field for the validator (class-validator) and for the OpenAPI document.
 *
 * Bodies are copied field by field into their class. class-transformer would break on a `metadata` key named `constructor`
 * (docs/contract.md#the-http-edge).
 */
import { ApiProperty, ApiPropertyOptional, type ApiPropertyOptions } from '@nestjs/swagger';
import { ValidateIf, type ValidationArguments, validateSync, registerDecorator } from 'class-validator';
import { isCents, MAX_AMOUNT_CENTS, ServiceError } from '#kernel';
import { cardInText, DIGITS_ONLY, holdsCardNumber } from '../card-text.js';
import { controlsInText } from '../controls.js';

type Class<T = object> = abstract new (...args: never[]) => T;
interface FieldInfo {
  readonly name: string;
  readonly nested?: () => new () => object;
  readonly array?: boolean;
  readonly later?: Check;
}

const fieldsOf = new WeakMap<object, FieldInfo[]>();

/** A check returns the fault ("must be …"), or null. */
export type Check = (value: unknown) => string | null;

interface FieldOptions {
  readonly optional?: boolean;
  readonly schema: ApiPropertyOptions;
  readonly check: Check;
  /** A younger rule. The rows of keys may belong to requests that it refuses: see `validated`. It gets values that the check accepts. */
  readonly later?: Check;
  readonly nested?: () => new () => object;
  readonly array?: boolean;
}

/**
 * The decorator that all others use. It makes the OpenAPI property, the class-validator rule, and the entry by which `validated` copies the field.
 */
export const Field =
  ({ optional = false, schema, check, later, nested, array }: FieldOptions): PropertyDecorator =>
  (prototype, property) => {
    const name = String(property);
    const known = fieldsOf.get(prototype) ?? [];
    fieldsOf.set(prototype, [...known, { name, ...(nested && { nested }), ...(array && { array }), ...(later && { later }) }]);
    (optional ? ApiPropertyOptional : ApiProperty)(schema)(prototype, property);
    // null is not an absent field. The check refuses it as a wrong type.
    if (optional) ValidateIf((_, value) => value !== undefined)(prototype, property);
    registerDecorator({
      name: 'field',
      target: prototype.constructor,
      propertyName: name,
      validator: {
        validate: (value: unknown) => check(value) === null,
        defaultMessage: ({ value }: ValidationArguments) => (value === undefined ? 'is required' : (check(value) ?? 'is invalid')),
      },
    });
  };

/** A JSON integer of 1…99,999,999 cents (C4). */
export const CentsField = (options: { optional?: boolean; description?: string } = {}) =>
  Field({
    ...options,
    schema: {
      type: 'integer',
      format: 'int64',
      minimum: 1,
      maximum: MAX_AMOUNT_CENTS,
      ...(options.description ? { description: options.description } : {}),
    },
    check: (value) => (isCents(value) ? null : `must be an integer of 1 to ${MAX_AMOUNT_CENTS} cents`),
  });

/** The younger rules of a text: no control character, and no card number with a letter O as a zero (C8, C9). */
export const laterTextFault = (text: string, multiline: boolean): string | null => controlsInText(text, { multiline }) ?? cardInText(text);

/** Text of bounded length in UTF-16 units (C8). With `free`, the text is searched for card numbers (C9). `multiline`: tabs and line breaks are allowed. */
export const TextField = (options: { optional?: boolean; min?: number; max: number; free?: boolean; multiline?: boolean; description?: string }) => {
  const { optional, min = 0, max, free = false, multiline = false, description } = options;
  return Field({
    ...(free && { later: (value) => laterTextFault(value as string, multiline) }),
    ...(optional === undefined ? {} : { optional }),
    schema: { type: 'string', ...(min > 0 ? { minLength: min } : {}), maxLength: max, ...(description ? { description } : {}) },
    check: (value) => {
      if (typeof value !== 'string') return 'must be a string';
      if (value.length < min || value.length > max) return `must have ${min} to ${max} characters`;
      return free ? cardInText(value, DIGITS_ONLY) : null;
    },
  });
};

/** One of the given words. `schema`: the named schema of the OpenAPI document that lists them, if answers use the same words. */
export const EnumField = (options: {
  optional?: boolean;
  values: readonly string[];
  schema?: string;
  description?: string;
  deprecated?: boolean;
}) => {
  const { optional, values, description, deprecated } = options;
  return Field({
    ...(optional === undefined ? {} : { optional }),
    schema: {
      ...(options.schema ? { allOf: [{ $ref: `#/components/schemas/${options.schema}` }] } : { type: 'string', enum: [...values] }),
      ...(description ? { description } : {}),
      ...(deprecated ? { deprecated } : {}),
    },
    check: (value) =>
      typeof value === 'string' && values.includes(value) ? null : `must be ${values.map((word) => JSON.stringify(word)).join(' or ')}`,
  });
};

/** An object of another class, or an array of them. */
export const NestedField = (type: () => new () => object, options: { optional?: boolean; array?: { min: number; max: number } } = {}) => {
  const { optional, array } = options;
  return Field({
    ...(optional === undefined ? {} : { optional }),
    nested: type,
    array: array !== undefined,
    schema: array ? { type: () => type() as never, isArray: true, minItems: array.min, maxItems: array.max } : { type: () => type() as never },
    check: (value) => {
      if (!array) return isObject(value) ? null : 'must be an object';
      if (!Array.isArray(value)) return 'must be an array';
      if (value.length < array.min || value.length > array.max) return `must have ${array.min} to ${array.max} items`;
      return value.every(isObject) ? null : 'must hold objects only';
    },
  });
};

const isObject = (value: unknown): value is Record<string, unknown> => value !== null && typeof value === 'object' && !Array.isArray(value);

export interface Fault {
  readonly field: string;
  readonly message: string;
}

/**
 * Copies the declared fields of a parsed body into an instance of the class. Throws a VALIDATION_ERROR that names every fault. Ignores unknown fields
 * (C3). `further` checks rules across fields. It runs only if each field is valid. `known`: faults that were found before. `later` gets the faults by
 * younger rules, which are refused only after the look at the key (E7). Default: they are thrown with the others.
 */
export const validated = <T extends object>(
  type: new () => T,
  body: Record<string, unknown>,
  further?: (value: T) => readonly Fault[],
  known: readonly Fault[] = [],
  later?: Fault[],
): T => {
  const faults: Fault[] = [...known];
  const value = build(type, body, '', { faults, later: later ?? faults });
  if (faults.length === 0 && further) faults.push(...further(value));
  if (faults.length > 0) throw validationError(faults);
  return value;
};

/** Maximum number of faults that one answer names. */
const MAX_FAULTS = 50;

export const validationError = (faults: readonly Fault[]): ServiceError => {
  const [first] = faults;
  return new ServiceError('VALIDATION_ERROR', `${first!.field} ${first!.message}.`, { errors: faults.slice(0, MAX_FAULTS) });
};

interface Found {
  readonly faults: Fault[];
  readonly later: Fault[];
}

const build = <T extends object>(type: new () => T, source: Record<string, unknown>, path: string, found: Found): T => {
  const target = new type();
  const values = target as Record<string, unknown>;
  const fields = allFields(type);
  for (const { name } of fields) if (Object.hasOwn(source, name)) values[name] = source[name];
  const wrong = new Set<string>();
  for (const { property, constraints } of validateSync(target, { validationError: { target: false, value: false }, forbidUnknownValues: false })) {
    wrong.add(property);
    found.faults.push({ field: path + property, message: Object.values(constraints ?? {})[0] ?? 'is invalid' });
  }
  for (const { name, nested, array, later } of fields) {
    if (wrong.has(name) || values[name] === undefined) continue;
    const message = later?.(values[name]) ?? null;
    if (message !== null) found.later.push({ field: path + name, message });
    if (!nested) continue;
    values[name] = array
      ? (values[name] as Record<string, unknown>[]).map((item, index) => build(nested(), item, `${path}${name}[${index}].`, found))
      : build(nested(), values[name] as Record<string, unknown>, `${path}${name}.`, found);
  }
  return target;
};

const allFields = (type: Class): readonly FieldInfo[] => fieldsOf.get(type.prototype as object) ?? [];

/** A parameter name that an answer may repeat. */
const PARAMETER_NAME = /^[A-Za-z]\w{0,63}$/;

/** Validates a query. A field may be sent only once. Unknown fields are refused by name, or ignored with `ignoreUnknown` (C44, ASVS 15.3.7). */
export const validatedQuery = <T extends object>(type: new () => T, query: Readonly<Record<string, unknown>>, { ignoreUnknown = false } = {}): T => {
  const names = allFields(type).map(({ name }) => name);
  const faults: Fault[] = [];
  const single: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(query)) {
    if (names.includes(name)) {
      if (typeof value === 'string') single[name] = value;
      else throw validationError([...faults, { field: name, message: 'was sent more than once' }]);
    } else if (!ignoreUnknown)
      faults.push({ field: PARAMETER_NAME.test(name) && !holdsCardNumber(name) ? name : 'query', message: 'is not a supported parameter' });
  }
  return validated(type, single, undefined, faults);
};

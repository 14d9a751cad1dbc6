/** The event types that libs declare with `defineEvents`. Each has a JSON schema, made from the TypeScript type of its data. */
import { resolve } from 'node:path';
import ts from 'typescript';
import { createFormatter, createParser, DEFAULT_CONFIG, SchemaGenerator } from 'ts-json-schema-generator';
import type { DomainEvent, EventTypes } from '#eventstore';

export type Schema = { readonly [key: string]: unknown };

/** An event type in its newest version. */
export interface DeclaredEvent {
  readonly type: string;
  readonly version: number;
  /** The source file of the event type, relative to the repository's root. */
  readonly file: string;
  /** The folder of the type's schemas and golden files. */
  readonly folder: string;
  readonly events: EventTypes<DomainEvent>;
  readonly schema: Schema;
}

export const schemaFile = ({ type, folder }: DeclaredEvent, version: number): string => `${folder}/${type}.v${version}.schema.json`;
export const goldenFile = ({ type, folder }: DeclaredEvent, version: number): string => `${folder}/${type}.v${version}.json`;

/** All event types below `libs/`. The current directory must be the root of the repository. */
export const declaredEvents = async (): Promise<readonly DeclaredEvent[]> => {
  const config = ts.getParsedCommandLineOfConfigFile(resolve('tsconfig.json'), {}, { ...ts.sys, onUnRecoverableConfigFileDiagnostic: refuse })!;
  const libs = resolve('libs');
  const program = ts.createProgram(
    config.fileNames.filter((name) => name.startsWith(libs) && !name.includes('.spec.')),
    config.options,
  );
  const schemaOf = schemas(program);
  const declared: DeclaredEvent[] = [];
  for (const source of program.getSourceFiles().filter(({ fileName }) => fileName.startsWith(libs)))
    for (const { constant, union } of declarations(source)) {
      const file = source.fileName.slice(resolve().length + 1);
      const module = (await import(`../../${file.replace(/\.ts$/, '.js')}`)) as Record<string, EventTypes<DomainEvent> | undefined>;
      const events = module[constant];
      if (!events) throw new Error(`${file}: export ${constant}, so that its events can be checked`);
      const byType = schemaOf(union);
      for (const type of events.names)
        declared.push({
          type,
          version: events.version(type),
          file,
          folder: `${file.split('/', 2).join('/')}/events`,
          events,
          schema: byType.get(type)!,
        });
    }
  return declared;
};

const refuse = ({ messageText }: ts.Diagnostic): never => {
  throw new Error(ts.flattenDiagnosticMessageText(messageText, '\n'));
};

/** Each `const name = defineEvents<Union>(…)` of a file. */
const declarations = (source: ts.SourceFile): { readonly constant: string; readonly union: ts.TypeNode }[] => {
  const found: { constant: string; union: ts.TypeNode }[] = [];
  const visit = (node: ts.Node): void => {
    if (ts.isCallExpression(node) && node.expression.getText() === 'defineEvents') {
      const union = node.typeArguments?.[0];
      if (!union || !ts.isVariableDeclaration(node.parent))
        throw new Error(`${source.fileName}: write const name = defineEvents<Union>(…), so that the type of its events is known`);
      found.push({ constant: node.parent.name.getText(), union });
    }
    ts.forEachChild(node, visit);
  };
  visit(source);
  return found;
};

/** Comments are left out. Otherwise a changed comment would change the schema. */
const CONFIG = {
  ...DEFAULT_CONFIG,
  expose: 'all',
  jsDoc: 'none',
  topRef: false,
  skipTypeCheck: true,
  encodeRefs: false,
  functions: 'fail',
} as const;

/** Schemas of the data of a union of events, by event type. */
const schemas = (program: ts.Program): ((union: ts.TypeNode) => ReadonlyMap<string, Schema>) => {
  const generator = new SchemaGenerator(program, createParser(program, CONFIG), createFormatter(CONFIG), CONFIG);
  return (union) => {
    const { $schema, definitions = {}, ...schema } = generator.createSchemaFromNodes([union]) as Schema & { readonly definitions?: Definitions };
    const expanded = expand(schema, definitions);
    const members = (expanded.anyOf ?? [expanded]) as readonly { readonly properties: Readonly<Record<'type' | 'data', Schema>> }[];
    const byType = new Map<string, Schema[]>();
    for (const { properties } of members)
      for (const type of (properties.type.enum as string[] | undefined) ?? [properties.type.const as string])
        byType.set(type, [...(byType.get(type) ?? []), properties.data]);
    return new Map(
      [...byType].map(([type, data]) => [
        type,
        ordered({ $schema, ...(data.length === 1 ? data[0] : { anyOf: data }), ...recursion(data, definitions) }),
      ]),
    );
  };
};

type Definitions = Readonly<Record<string, Schema>>;

const REFERENCE = '#/definitions/';

const referencesIn = (schema: unknown): readonly string[] => {
  const names: string[] = [];
  JSON.stringify(schema, (key, value: unknown) => {
    if (key === '$ref') names.push((value as string).slice(REFERENCE.length));
    return value;
  });
  return names;
};

/** The names of all definitions that these schemas need, directly or indirectly. */
const reached = (schema: unknown, definitions: Definitions, names = new Set<string>()): ReadonlySet<string> => {
  for (const name of referencesIn(schema))
    if (!names.has(name)) {
      names.add(name);
      reached(definitions[name], definitions, names);
    }
  return names;
};

/** Replaces references by their definitions, except those of recursive types. */
const expand = <Value>(value: Value, definitions: Definitions): Value => {
  if (Array.isArray(value)) return value.map((one: unknown) => expand(one, definitions)) as Value;
  if (typeof value !== 'object' || value === null) return value;
  const { $ref: reference } = value as { $ref?: string };
  const name = reference?.slice(REFERENCE.length);
  if (name !== undefined && !reached(definitions[name], definitions).has(name)) return expand(definitions[name], definitions) as Value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, expand(one as unknown, definitions)])) as Value;
};

const recursion = (data: unknown, definitions: Definitions): { readonly definitions?: Definitions } => {
  const names = [...reached(data, definitions)];
  return names.length === 0 ? {} : { definitions: Object.fromEntries(names.map((name) => [name, expand(definitions[name]!, definitions)])) };
};

/** Keywords of JSON Schema whose lists have no order. */
const SETS: readonly string[] = ['anyOf', 'enum', 'required', 'type'];

/** The schema with its keys and unordered lists sorted, so that their order in the source does not matter. */
const ordered = <Value>(value: Value, key = ''): Value => {
  if (Array.isArray(value)) {
    const items = value.map((one: unknown) => ordered(one));
    return (SETS.includes(key) ? items.sort((a, b) => (JSON.stringify(a) < JSON.stringify(b) ? -1 : 1)) : items) as Value;
  }
  if (typeof value !== 'object' || value === null) return value;
  const fields = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
  return Object.fromEntries(fields.map(([name, one]) => [name, ordered(one as unknown, name)])) as Value;
};

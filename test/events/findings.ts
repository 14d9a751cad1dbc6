/** Finds faults in the committed schemas and golden files. Each finding names its repair. */
import { isDeepStrictEqual } from 'node:util';
import { Ajv } from 'ajv';
import type { Json } from '#kernel';
import { type DeclaredEvent, goldenFile, type Schema, schemaFile } from './schemas.js';

/** The data of an event: `stored` by an old version, and `read` as the newest version. Without `read` both are equal. */
export interface Golden {
  readonly stored: Json;
  readonly read?: Json;
}

const RECIPE = 'docs/changing.md#a-new-version-of-an-event';
const ajv = new Ajv({ allowUnionTypes: true });

/** `files`: the parsed files in the folders of events, by path. */
export const findings = (declared: readonly DeclaredEvent[], files: ReadonlyMap<string, unknown>): readonly string[] => {
  const known = new Set<string>();
  const file = (path: string): unknown => {
    known.add(path);
    return files.get(path);
  };
  const found = declared.flatMap((event) =>
    Array.from({ length: event.version }, (_, index) => index + 1).flatMap((version) => {
      const schema = file(schemaFile(event, version)) as Schema | undefined;
      const golden = file(goldenFile(event, version)) as Golden | undefined;
      return [
        ...(schema ? [] : [lackOfSchema(event, version)]),
        ...(golden ? [] : [`${event.type} has no golden file of version ${version}: add ${goldenFile(event, version)} as ${RECIPE} says`]),
        ...(schema && version === event.version && JSON.stringify(schema) !== JSON.stringify(event.schema) ? [changed(event)] : []),
        ...(schema && golden ? goldenFindings(event, version, golden, schema) : []),
      ];
    }),
  );
  const left = [...files.keys()].filter((path) => !known.has(path)).map((path) => `${path} belongs to no event type and version`);
  return [...found, ...left];
};

const lackOfSchema = ({ type, version: newest }: DeclaredEvent, version: number): string =>
  `${type} has no schema of version ${version}: ${version === newest ? 'run npm run events:schemas' : 'bring it back, it is never deleted'}`;

const changed = ({ type, version, file }: DeclaredEvent): string =>
  `${type} changed and its version did not: raise it to ${version + 1} in ${file} as ${RECIPE} says. ` +
  `If no release has written version ${version} yet, run npm run events:schemas instead`;

const goldenFindings = (event: DeclaredEvent, version: number, { stored, read = stored }: Golden, schema: Schema): readonly string[] => {
  const { type, events } = event;
  const name = goldenFile(event, version);
  const breaks = (what: string, value: Json, of: Schema) => (ajv.validate(of, value) ? [] : [`${name}: ${what} ${ajv.errorsText(ajv.errors)}`]);
  const recorded = { type, v: version, data: stored, meta: { recordedAt: '' } } as Parameters<typeof events.read>[0];
  const { data } = events.read(recorded) as { readonly data: unknown };
  return [
    ...breaks('`stored` breaks the schema of its version:', stored, schema),
    ...breaks('`read` breaks the schema of the newest version:', read, event.schema),
    ...(isDeepStrictEqual(data, read) ? [] : [`${name}: readers make ${JSON.stringify(data)} of \`stored\`, not \`read\``]),
  ];
};

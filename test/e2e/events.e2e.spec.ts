/** The events of a running service match their JSON schemas. */
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { readdirSync, readFileSync } from 'node:fs';
import { Ajv, type ValidateFunction } from 'ajv';
import type { Recorded } from '#eventstore';
import { NOT_WRITTEN_YET, startWithEveryEvent } from '../support/every-event.js';
import type { Service } from '../support/service.js';

const ajv = new Ajv({ allowUnionTypes: true });
/** The schemas by event type and version. */
const schemas = new Map<string, ValidateFunction>();
const newest = new Map<string, number>();
for (const file of readdirSync('libs', { recursive: true, encoding: 'utf8' })) {
  const [, type, version] = /\/events\/(\w+)\.v(\d+)\.schema\.json$/.exec(file) ?? [];
  if (type === undefined) continue;
  schemas.set(`${type} v${version}`, ajv.compile(JSON.parse(readFileSync(`libs/${file}`, 'utf8')) as object));
  newest.set(type, Math.max(Number(version), newest.get(type) ?? 0));
}

let service: Service;
const events: Recorded[] = [];
beforeAll(async () => {
  service = await startWithEveryEvent();
  for await (const page of service.services.store.readAll(null)) events.push(...page);
}, 600_000);
afterAll(() => service?.stop());

test('every type of event is written, in its newest version', () => {
  const written = new Set(events.map(({ type, v }) => `${type} v${v}`));
  const types = [...newest].filter(([type]) => !NOT_WRITTEN_YET.includes(type));
  expect([...written].sort()).toEqual(types.map(([type, version]) => `${type} v${version}`).sort());
});

test('the data of every event fits its schema', () => {
  const wrong = events.flatMap(({ stream, revision, type, v, data }) => {
    const validate = schemas.get(`${type} v${v}`);
    return validate?.(data) ? [] : [`${stream}@${revision} ${type} v${v}: ${ajv.errorsText(validate?.errors)}`];
  });
  expect(wrong).toEqual([]);
});

/** `npm run events:schemas`: writes the JSON schema of every event type in its newest version. Schemas of older versions stay unchanged. */
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { format, resolveConfig } from 'prettier';
import { declaredEvents, schemaFile } from './schemas.js';

for (const event of await declaredEvents()) {
  const file = schemaFile(event, event.version);
  const text = await format(JSON.stringify(event.schema), { ...(await resolveConfig(file)), parser: 'json' });
  if (existsSync(file) && readFileSync(file, 'utf8') === text) continue;
  mkdirSync(event.folder, { recursive: true });
  writeFileSync(file, text);
  console.log(file);
}

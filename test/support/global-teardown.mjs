import { rm } from 'node:fs/promises';

export default async function teardown() {
  if (!globalThis.testPostgres) return;
  await globalThis.testPostgres.postgres.stop();
  await rm(globalThis.testPostgres.directory, { recursive: true, force: true });
}

/** `npm run release:freeze [-- <checkout of a release>]`: writes `test/upgrade/<release>/`. The checkout must be built. Default: this checkout. */
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { startEmbeddedPostgres } from '#platform';
import { freeze } from './freeze.js';

const here = new URL('../../../', import.meta.url).pathname;
const root = resolve(process.argv[2] ?? here);
const { version } = JSON.parse(await readFile(join(root, 'package.json'), 'utf8')) as { version: string };
const folder = join(here, 'test/upgrade', version);
const directory = await mkdtemp(join(tmpdir(), 'payfold-freeze-'));
const postgres = await startEmbeddedPostgres(join(directory, 'postgres'), { settings: { fsync: 'off' } });
try {
  process.env.TEST_POSTGRES_URL = postgres.adminUrl;
  await freeze(root, folder);
  console.log(folder);
} finally {
  await postgres.stop();
  await rm(directory, { recursive: true, force: true });
}

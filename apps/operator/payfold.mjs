#!/usr/bin/env node
/** Starts the command line. Its code is in `dist`, which `npm run build` makes. */
import { existsSync } from 'node:fs';

const main = new URL('../../dist/apps/operator/main.js', import.meta.url);
if (existsSync(main)) {
  await import(main.href);
} else {
  process.stderr.write('error: Payfold is not built; run `npm run build` first\n');
  process.exitCode = 1;
}

/**
 * Runs the README's tour as written, against the process tree of `npm start`. Each block of commands must print the text of the next block. `…`
 * stands for any text on one line.
 */
import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { readFile, symlink, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { freePort } from '#platform';
import { eventsInPostgres, type FreshKurrentDb, freshKurrentDb } from '../support/kurrentdb-server.js';
import { DataDir, type RunningProcess, start, welcomeOf } from '../support/processes.js';

const ROOT = join(import.meta.dirname, '../..');
/** Only a guard against a tour that hangs. */
const TOUR_MS = 300_000;

if (eventsInPostgres) process.stdout.write('KURRENTDB_FRESH is not set: the services of the end-to-end specs kept their events in Postgres only\n');

let dataDir: DataDir;
let kurrentDb: FreshKurrentDb;
let service: RunningProcess;
beforeAll(async () => {
  dataDir = await DataDir.create();
  kurrentDb = await freshKurrentDb();
  service = await start('standalone', dataDir, kurrentDb.env);
}, 600_000);
afterAll(async () => {
  await dataDir.remove();
  await kurrentDb?.stop();
});

const blocks = [
  ...readFileSync(join(ROOT, 'README.md'), 'utf8')
    .split('## The command line')[0]!
    .split('## A tour')[1]!
    .matchAll(/```(sh|text)([^\n]*)\n([\s\S]*?)```/g),
].map(([, language, flag, text]) => ({ language, flag: flag!.trim(), text: text! }));

const asPattern = (text: string) =>
  new RegExp(
    `^${text
      .trim()
      .replace(/[.*+?^${}()|[\]\\]/g, '\\$&')
      .replaceAll('…', '[^\\n]*')}$`,
  );

/** Runs a script in the folder of the data. Resolves when the script and its background processes have closed their output. */
const bash = (script: string, env: Record<string, string>): Promise<{ stdout: string; stderr: string }> =>
  new Promise((resolve, reject) => {
    const shell = spawn('bash', ['-c', script], {
      cwd: dataDir.path,
      env: { PATH: process.env.PATH, HOME: process.env.HOME, ...env },
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    const output = { stdout: '', stderr: '' };
    shell.stdout.on('data', (chunk: Buffer) => (output.stdout += chunk.toString()));
    shell.stderr.on('data', (chunk: Buffer) => (output.stderr += chunk.toString()));
    shell.once('error', reject).once('close', () => resolve(output));
  });

test(
  'the tour gives the shown output',
  async () => {
    const { apiKey, portalId } = welcomeOf(service.stdout())!;
    const marker = '=====';
    const commands = blocks.filter(({ language, flag }) => language === 'sh' && flag !== 'setup').map(({ text }) => text);
    // A small `npx` that runs the launcher of this checkout. The real npx would take longer.
    await writeFile(join(dataDir.path, 'npx'), `#!/bin/sh\nshift\nexec ${process.execPath} ${ROOT}/apps/operator/payfold.mjs "$@"\n`, {
      mode: 0o755,
    });
    // The tour expects these two folders, as in a checkout of this repository.
    await symlink(join(ROOT, 'apps'), join(dataDir.path, 'apps'));
    await symlink(dataDir.data, join(dataDir.path, '.payfold'));
    const { auditUrl } = JSON.parse(await readFile(join(dataDir.data, 'runtime.json'), 'utf8')) as { auditUrl: string };
    const setup = `
      set +m
      AUDIT=${auditUrl}/audit/v1
      API=${service.url}/api/partner/v1 KEY=${apiKey} PORTAL=${portalId}
      export HOOK=${await freePort()}
      PATH=${dataDir.path}:$PATH
    `;
    const { stdout, stderr } = await bash(setup + commands.join(`\necho ${marker}\n`), { DATA_DIR: dataDir.data, ...kurrentDb.env });
    const outputs = stdout.replaceAll('\r', '').split(`${marker}\n`);
    const expected = blocks.filter(({ flag }) => flag !== 'setup');
    // The closing batch holds a charge whose outcome is unknown. So an alarm is correct here.
    expect(stderr.replaceAll(/^\{.*"a payment needs a decision by staff"\}\n/gm, '')).toBe('');
    expect(commands.length).toBeGreaterThan(10);
    let index = -1;
    for (const block of expected) {
      if (block.language === 'sh') index += 1;
      else expect(outputs[index]!.trim()).toMatch(asPattern(block.text));
    }
  },
  TOUR_MS,
);

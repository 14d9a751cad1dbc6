/** The README's tour, typed as written: each block of commands must print what the block after it says. `…` stands for anything on one line. */
import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from '@jest/globals';
import { startService, type Service } from '../support/service.js';

let service: Service;
beforeAll(async () => {
  service = await startService();
});
afterAll(() => service.stop());

const blocks = [
  ...readFileSync(join(import.meta.dirname, '../../README.md'), 'utf8')
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

/** The service answers from this process, so the shell must not block it. */
const bash = (script: string): Promise<{ stdout: string; stderr: string }> =>
  new Promise((resolve, reject) => {
    const shell = spawn('bash', ['-c', script], { stdio: ['ignore', 'pipe', 'pipe'] });
    const output = { stdout: '', stderr: '' };
    shell.stdout.on('data', (chunk: Buffer) => (output.stdout += chunk.toString()));
    shell.stderr.on('data', (chunk: Buffer) => (output.stderr += chunk.toString()));
    shell.once('error', reject).once('close', () => resolve(output));
  });

test('the tour gives what it says', async () => {
  const account = await service.account();
  const portalId = await service.portal(account);
  const marker = '=====';
  const commands = blocks.filter(({ language, flag }) => language === 'sh' && flag !== 'setup').map(({ text }) => text);
  const setup = `API=${service.urls[0]}/api/partner/v1\nKEY=${account.apiKey}\nPORTAL=${portalId}\n`;
  const { stdout, stderr } = await bash(setup + commands.join(`\necho ${marker}\n`));
  const outputs = stdout.replaceAll('\r', '').split(`${marker}\n`);
  const expected = blocks.filter(({ flag }) => flag !== 'setup');
  expect(stderr).toBe('');
  expect(commands.length).toBeGreaterThan(8);
  let index = -1;
  for (const block of expected) {
    if (block.language === 'sh') index += 1;
    else expect(outputs[index]!.trim()).toMatch(asPattern(block.text));
  }
});

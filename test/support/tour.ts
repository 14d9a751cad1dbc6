/**
 * Runs the commands of a document as written. Each block of commands must print the text of the next block. `…` stands for any text on one line.
 */
import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { symlink } from 'node:fs/promises';
import { join } from 'node:path';
import { expect } from '@jest/globals';
import type { DataDir, Environment } from './processes.js';

const ROOT = join(import.meta.dirname, '../..');

export interface Block {
  readonly language: string;
  /** The word after the language. `setup`: the reader types this, but not the spec. */
  readonly flag: string;
  readonly text: string;
}

/** The blocks of a document between two headings. */
export const blocksOf = (document: string, from: string, to: string): readonly Block[] =>
  [
    ...readFileSync(join(ROOT, document), 'utf8')
      .split(from)[1]!
      .split(to)[0]!
      .matchAll(/```(sh|text)([^\n]*)\n([\s\S]*?)```/g),
  ].map(([, language, flag, text]) => ({ language: language!, flag: flag!.trim(), text: text! }));

const asPattern = (text: string) =>
  new RegExp(
    `^${text
      .trim()
      .replace(/[.*+?^${}()|[\]\\]/g, '\\$&')
      .replaceAll('…', '[^\\n]*')}$`,
  );

/** Runs a script in the folder of the data. Resolves when the script and its background processes have closed their output. */
const bash = (script: string, dataDir: DataDir, env: Environment): Promise<{ stdout: string; stderr: string }> =>
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

const MARKER = '=====';

/**
 * Runs the blocks against the service on `dataDir`, after `setup`. `stderrMayHold`: lines that are right there.
 */
export const playTour = async (
  blocks: readonly Block[],
  { dataDir, env, setup, stderrMayHold }: { dataDir: DataDir; env: Environment; setup: string; stderrMayHold?: RegExp },
): Promise<void> => {
  const commands = blocks.filter(({ language, flag }) => language === 'sh' && flag !== 'setup').map(({ text }) => text);
  // The tour expects these, as in a checkout of this repository.
  for (const folder of ['apps', 'examples', 'payfold']) await symlink(join(ROOT, folder), join(dataDir.path, folder));
  await symlink(dataDir.data, join(dataDir.path, '.payfold'));
  const script = `set +m\nPATH=${dataDir.path}:$PATH\n${setup}\n${commands.join(`\necho ${MARKER}\n`)}`;
  const { stdout, stderr } = await bash(script, dataDir, { DATA_DIR: dataDir.data, ...env });
  const outputs = stdout.replaceAll('\r', '').split(`${MARKER}\n`);
  expect(stderrMayHold ? stderr.replaceAll(stderrMayHold, '') : stderr).toBe('');
  let index = -1;
  for (const block of blocks.filter(({ flag }) => flag !== 'setup')) {
    if (block.language === 'sh') index += 1;
    else expect(outputs[index]!.trim()).toMatch(asPattern(block.text));
  }
};

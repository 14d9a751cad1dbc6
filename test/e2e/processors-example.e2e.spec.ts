/** The example that drives the adapters of the card processors from outside, as a program of its own. */
import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from '@jest/globals';

const SCRIPT = join(import.meta.dirname, '../../examples/processors/drive.mjs');

test('the example drives both adapters against their doubles', async () => {
  const { stdout, stderr } = await promisify(execFile)(process.execPath, [SCRIPT], { timeout: 60_000 });
  expect(stderr).toBe('');
  const said = stdout
    .trim()
    .split('\n')
    .map((line) => /^(\S+): ([^:]+): (.*)$/.exec(line)!.slice(1))
    .map(([name, what, answer]) => ({ name, what, answer: JSON.parse(answer!) as unknown }));
  const approved = { kind: 'approved', txn: expect.anything() };
  const steps = (name: string, id: RegExp, undo: string, ended: object, never: object) => {
    const transactionId = expect.stringMatching(id);
    return [
      { name, what: 'charged', answer: transactionId },
      { name, what: 'looked up', answer: expect.objectContaining({ found: true, amountCents: 1_250 }) },
      { name, what: undo, answer: approved },
      { name, what: 'finalized the charge', answer: ended },
      { name, what: 'finalized a reference that was never sent', answer: never },
      { name, what: 'charged', answer: transactionId },
      { name, what: 'settled', answer: expect.objectContaining({ type: 'sale', accepted: true, grossCents: 4_000, transactionId }) },
    ];
  };
  expect(said).toEqual([
    ...steps(
      'authorize-net',
      /^\d{5,}$/,
      'void',
      expect.objectContaining({ kind: 'undone' }),
      expect.objectContaining({ kind: 'cannot_tell', until: expect.any(String) }),
    ),
    ...steps('stripe', /^pi_/, 'refund', { kind: 'executed', result: approved }, { kind: 'never' }),
  ]);
});

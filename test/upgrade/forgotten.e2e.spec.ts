/**
 * Each test changes a copy of the sources and leaves out one step of docs/changing.md. A spec must then fail, with a message that names the
 * instructions in docs/changing.md.
 */
import { expect, test } from '@jest/globals';
import { execFile } from 'node:child_process';
import { buildOf, type Patch } from './builds.js';

/** Runs specs in a patched copy. They must fail. Returns their output. */
const failureOf = async (patches: readonly Patch[], ...specs: string[]): Promise<string> => {
  const copy = await buildOf(patches, { compile: false });
  try {
    return await new Promise<string>((resolve, reject) => {
      const args = ['--experimental-vm-modules', 'node_modules/jest/bin/jest.js', '--runInBand', '--no-cache', ...specs];
      execFile(process.execPath, args, { cwd: copy.path, env: { ...process.env, TEST_PLACE: 'held' }, timeout: 110_000 }, (error, stdout, stderr) =>
        error?.code === 1 ? resolve(stdout + stderr) : reject(new Error(`the specs did not fail:\n${stdout}${stderr}`)),
      );
    });
  } finally {
    await copy.remove();
  }
};

test('a field of an event without a version, and a line of evolve without a shape', async () => {
  const said = await failureOf(
    [
      {
        file: 'libs/payments/payment.ts',
        from: `        readonly declineCode: DeclineCode;\n`,
        to: `        readonly declineCode: DeclineCode;\n        readonly hint?: string;\n`,
      },
      {
        file: 'libs/payments/payment.ts',
        from: `return charged(pending(payment, event), event.data, at);`,
        to: `return { ...charged(pending(payment, event), event.data, at), hint: 1 };`,
      },
    ],
    'test/events/events.unit',
    'test/upgrade/shapes',
  );
  expect(said).toMatch(
    /PaymentDeclined changed and its version did not: raise it to \d+ in libs\/payments\/stream\.ts as docs\/changing\.md#a-new-version-of-an-event says/,
  );
  expect(said).toMatch(
    /payment-list@\d+ makes other rows than test\/upgrade\/shapes\.json says: raise the shape of the model.*\(docs\/changing\.md, A read model\)/,
  );
});

test('a column of a table without a migration', async () => {
  const column: Patch = { file: 'libs/audit/seal.ts', from: `note text not null);`, to: `note text not null, hint text);` };
  expect(await failureOf([column], 'test/upgrade/shapes')).toContain(
    'migration 0101-log-seal differs from the one that this database was made with; nothing was changed; a released migration never changes (docs/changing.md, A migration)',
  );
});

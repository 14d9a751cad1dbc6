/** `payfold keyfile`: makes and describes the file of the master key. Opens no store. */
import { resolve } from 'node:path';
import type { Command } from 'commander';
import { ServiceError } from '#kernel';
import { createKeyFile, readConfig, readKeyRing } from '#platform';
import { type Answer, fields, table, Terminal } from './terminal.js';

export const addKeyfile = (program: Command): void => {
  const { action } = new Terminal(async () => ({ close: async () => undefined }));
  const keyfile = program.command('keyfile').description('the file of the master key, which every process and command must have');

  keyfile
    .command('create')
    .description('make a key file with one random key, mode 600. An existing file is never changed. Keep a second copy apart from the data')
    .argument('[file]', 'default: MASTER_KEY_FILE, else DATA_DIR/master.key')
    .action(
      action(async (_, named?: string) => {
        const file = fileOf(named);
        if (!createKeyFile(file)) throw new ServiceError('INVALID_STATE', `${file} exists already; it was not changed.`);
        const made = describe(file);
        return { ...made, text: `${made.text}\n\nKeep a second copy of the file, apart from the data. A lost key file cannot be replaced.` };
      }),
    );

  keyfile
    .command('show')
    .description('describe a key file without its keys. The check of a key is equal on every host that has the same key')
    .argument('[file]', 'default: MASTER_KEY_FILE, else DATA_DIR/master.key')
    .action(action(async (_, named?: string) => describe(fileOf(named))));
};

/** A named file needs no valid environment. */
const fileOf = (named: string | undefined): string => (named === undefined ? readConfig(process.env).masterKeyFile : resolve(named));

const describe = (file: string): Answer => {
  const ring = readKeyRing(file);
  const keys = ring.kids.map((kid) => ({ kid, current: kid === ring.current, check: ring.check(kid) }));
  const rows = keys.map(({ kid, current, check }) => [kid, current ? 'current' : 'older', check]);
  return { json: { file, current: ring.current, keys }, text: `${fields([['file', file]])}\n\n${table(['KEY', 'USE', 'CHECK'], rows)}` };
};

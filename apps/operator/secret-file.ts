/** Reads a file that holds a secret. */
import { readFile, stat } from 'node:fs/promises';
import { text as textOf } from 'node:stream/consumers';
import { ServiceError } from '#kernel';

const MAX_SECRET_BYTES = 64 * 1024;
const MODE_OF_OTHERS = 0o077;

/** The text of a file, or of standard input for `-`. `what`: the kind of file, for messages. Its content is never part of a message. */
export const readSecret = async (file: string, what: 'credentials' | 'card' = 'credentials'): Promise<string> => {
  const refuse = (why: string) => new ServiceError('VALIDATION_ERROR', `The ${what} file ${file === '-' ? 'on standard input' : file} ${why}.`);
  if (file === '-') {
    const text = await textOf(process.stdin);
    if (text.length > MAX_SECRET_BYTES) throw refuse(`has more than ${MAX_SECRET_BYTES} bytes`);
    return text;
  }
  try {
    const status = await stat(file);
    if (!status.isFile()) throw refuse('is not a file');
    if (status.size > MAX_SECRET_BYTES) throw refuse(`has more than ${MAX_SECRET_BYTES} bytes`);
    if (process.getuid && (status.mode & MODE_OF_OTHERS) !== 0)
      process.stderr.write(`warning: ${file} can be read by its group or by others; make it private with: chmod 600 ${file}\n`);
    return await readFile(file, 'utf8');
  } catch (error) {
    if (error instanceof ServiceError) throw error;
    throw refuse(`cannot be read (${(error as NodeJS.ErrnoException).code})`);
  }
};

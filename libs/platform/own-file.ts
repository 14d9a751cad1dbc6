/**
 * Files that only we and the operator may have written: keys, passwords, addresses of processes. Another user of the machine could put a link, a pipe
 * or a file of his own in their place. So no link in the place of a file is followed, and the owner is checked on the open file. Folders above it are the
 * operator's.
 */
import { randomBytes } from 'node:crypto';
import {
  closeSync,
  constants,
  fstatSync,
  fsyncSync,
  lstatSync,
  openSync,
  readFileSync,
  readSync,
  renameSync,
  rmSync,
  statSync,
  type Stats,
  writeSync,
} from 'node:fs';
import process from 'node:process';

/** Bits of a mode that let the group or others read, write or run a file. */
const MODE_OF_OTHERS = 0o077;
const WRITABLE_BY_ALL = 0o002;

/** Windows has neither such owners nor such modes. */
const me = (): number | undefined => process.getuid?.();

/** A file or folder of another user. The message has one line. */
export class NotOurs extends Error {
  constructor(place: string, why: string) {
    super(`${place} ${why}`);
    this.name = 'NotOurs';
  }
}

/** root may own a file of any user: it can change every file anyway. */
const refuseOwner = (place: string, { uid }: Stats, owners: readonly number[]): void => {
  if (me() !== undefined && uid !== me() && uid !== 0 && !owners.includes(uid))
    throw new NotOurs(
      place,
      `belongs to another user (uid ${uid}); it is not trusted: check what it holds, then chown it to the user that runs Payfold`,
    );
};

/**
 * Opens a file without following a link and without waiting for a pipe. Throws {@link NotOurs} for anything but a file of ours. null: there is none.
 * `owners`: other users whose file is accepted. `secret`: its group and others must not have any right. `append`: each write goes to the
 * end, and a missing file is made.
 */
export const openOwnFile = (
  file: string,
  {
    owners = [],
    secret = false,
    append = false,
    write = append,
  }: { owners?: readonly number[]; secret?: boolean; append?: boolean; write?: boolean } = {},
): number | null => {
  const { O_APPEND, O_CREAT, O_RDONLY, O_RDWR, O_NONBLOCK, O_NOFOLLOW = 0 } = constants;
  let descriptor: number;
  try {
    descriptor = openSync(file, (write ? O_RDWR : O_RDONLY) | (append ? O_APPEND | O_CREAT : 0) | O_NONBLOCK | O_NOFOLLOW, 0o600);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === 'ENOENT') return null;
    if (code === 'ELOOP') throw new NotOurs(file, 'is a link, which is not followed; put the file itself there');
    // A pipe without a reader, or a socket.
    if (code === 'ENXIO') throw new NotOurs(file, 'is not a file');
    throw error;
  }
  try {
    const status = fstatSync(descriptor);
    if (!status.isFile()) throw new NotOurs(file, 'is not a file');
    refuseOwner(file, status, owners);
    // Another name of this file may lie where we may not write.
    if (write && status.nlink > 1) throw new NotOurs(file, 'has a second name (a hard link)');
    if (secret && me() !== undefined && (status.mode & MODE_OF_OTHERS) !== 0)
      throw new NotOurs(file, `can be read by its group or by others; make it private with: chmod 600 ${file}`);
    return descriptor;
  } catch (error) {
    closeSync(descriptor);
    throw error;
  }
};

/** Appends a text to a file of ours, durably. If the file does not end with a line feed, a line was cut off there; a new line is begun. */
export const appendOwnFile = (file: string, text: string): void => {
  const descriptor = openOwnFile(file, { append: true })!;
  try {
    const { size } = fstatSync(descriptor);
    const last = Buffer.alloc(1);
    if (size > 0) readSync(descriptor, last, 0, 1, size - 1);
    writeSync(descriptor, size > 0 && last.toString() !== '\n' ? `\n${text}` : text);
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
};

/** The text of a file of ours. null: there is none. Throws as {@link openOwnFile}. */
export const readOwnFile = (file: string, options: { owners?: readonly number[]; secret?: boolean } = {}): string | null => {
  const descriptor = openOwnFile(file, options);
  if (descriptor === null) return null;
  try {
    return readFileSync(descriptor, 'utf8');
  } finally {
    closeSync(descriptor);
  }
};

/** Writes a file that only we can read. What lies there is replaced, not written through. The file is complete at once. */
export const writeOwnFile = (file: string, text: string): void => {
  const draft = `${file}.new-${randomBytes(6).toString('hex')}`;
  const descriptor = openSync(draft, 'wx', 0o600);
  try {
    writeSync(descriptor, text);
    fsyncSync(descriptor);
  } finally {
    closeSync(descriptor);
  }
  try {
    renameSync(draft, file);
  } catch (error) {
    rmSync(draft, { force: true });
    throw error;
  }
};

/** Throws {@link NotOurs} if another user owns the folder, or if every user may write into it. A link to the folder is followed if we or root made it. */
export const requireOwnFolder = (folder: string): void => {
  const status = lstatSync(folder);
  if (status.isSymbolicLink()) refuseOwner(folder, status, []);
  requireOurs(folder, statSync(folder));
};

/** As {@link requireOwnFolder}, for a folder that we make ourselves. It may be missing, and a link in its place is refused. */
export const requireOwnFolderOrNone = (folder: string): void => {
  const status = lstatSync(folder, { throwIfNoEntry: false });
  if (status?.isSymbolicLink()) throw new NotOurs(folder, 'is a link; replace it by the folder itself');
  if (status) requireOurs(folder, status);
};

const requireOurs = (folder: string, status: Stats): void => {
  if (!status.isDirectory()) throw new NotOurs(folder, 'is not a folder');
  refuseOwner(folder, status, []);
  if (me() !== undefined && (status.mode & WRITABLE_BY_ALL) !== 0)
    throw new NotOurs(folder, `can be written by every user; it is not trusted: use another folder, or chmod o-w ${folder}`);
};

/**
 * The double's own durable file. Each line of JSON holds the objects that one request has changed, with the stored answer of its key. A request is
 * answered after its line is written. So a process that is killed loses nothing that was answered.
 */
import { closeSync, existsSync, ftruncateSync, mkdirSync, openSync, readFileSync, writeSync } from 'node:fs';
import { dirname } from 'node:path';

export interface Change {
  readonly account: string;
  readonly table: string;
  readonly id: string;
  readonly value: unknown;
}

export class ChangeFile {
  private readonly fd: number;
  private waiting: Change[] = [];

  /** Calls `load` for each change that the file holds. A last line without its end was never answered, and is cut off. */
  constructor(path: string, load: (change: Change) => void) {
    mkdirSync(dirname(path), { recursive: true });
    const bytes = existsSync(path) ? readFileSync(path) : Buffer.alloc(0);
    const end = bytes.lastIndexOf(10) + 1;
    for (const line of bytes.subarray(0, end).toString('utf8').split('\n'))
      if (line !== '') for (const change of JSON.parse(line) as Change[]) load(change);
    this.fd = openSync(path, 'a', 0o600);
    ftruncateSync(this.fd, end);
  }

  add(change: Change): void {
    this.waiting.push(change);
  }

  /** Writes what was added, as one line. */
  write(): void {
    if (this.waiting.length === 0) return;
    const line = Buffer.from(`${JSON.stringify(this.waiting)}\n`);
    this.waiting = [];
    for (let from = 0; from < line.length;) from += writeSync(this.fd, line, from);
  }

  close(): void {
    closeSync(this.fd);
  }
}

/** The double's own durable file: one line of JSON for each change. A process that is killed loses no line that was answered. */
import { closeSync, existsSync, ftruncateSync, mkdirSync, openSync, readFileSync, writeSync } from 'node:fs';
import { dirname } from 'node:path';

export class ChangeFile {
  private readonly fd: number;
  /** The changes that the file held at the start. A last line without its end was never answered, and is cut off. */
  readonly changes: unknown[];

  constructor(path: string) {
    mkdirSync(dirname(path), { recursive: true });
    const bytes = existsSync(path) ? readFileSync(path) : Buffer.alloc(0);
    const end = bytes.lastIndexOf(10) + 1;
    this.changes = bytes
      .subarray(0, end)
      .toString('utf8')
      .split('\n')
      .filter((line) => line !== '')
      .map((line) => JSON.parse(line) as unknown);
    this.fd = openSync(path, 'a', 0o600);
    ftruncateSync(this.fd, end);
  }

  append(change: unknown): void {
    writeSync(this.fd, `${JSON.stringify(change)}\n`);
  }

  close(): void {
    closeSync(this.fd);
  }
}

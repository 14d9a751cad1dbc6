/** Clients that misuse connections, and what a process holds meanwhile. The clients of a flood have loopback addresses of their own. */
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { connect, type Socket } from 'node:net';

const MIB = 1024 * 1024;
const KIB_PER_MIB = 1024;

const statusOf = (pid: number, field: string): number =>
  Number(new RegExp(String.raw`^${field}:\s+(\d+) kB$`, 'm').exec(readFileSync(`/proc/${pid}/status`, 'utf8'))![1]) / KIB_PER_MIB;

/** Memory of a process now, and at its highest since the last {@link forgetPeak}, in MiB. */
export const memoryOf = (pid: number): number => statusOf(pid, 'VmRSS');
export const peakMemoryOf = (pid: number): number => statusOf(pid, 'VmHWM');

export const forgetPeak = (pid: number): void => writeFileSync(`/proc/${pid}/clear_refs`, RESET_PEAK);
/** Linux: resets VmHWM. */
const RESET_PEAK = '5';

export const descriptorsOf = (pid: number): number => readdirSync(`/proc/${pid}/fd`).length;

/** A connection that sends bytes, and reads the answers only if it is asked to. */
export class FloodSocket {
  /** Everything that was read. */
  received = '';
  /** Bytes that were read. */
  bytes = 0;
  closed = false;
  private constructor(readonly socket: Socket) {
    socket
      .on('error', () => undefined)
      .on('close', () => (this.closed = true))
      .on('data', (chunk: Buffer) => {
        this.bytes += chunk.length;
        if (this.bytes < MIB) this.received += chunk.toString('latin1');
      });
  }

  /** Resolves when the connection stands or was refused. `from`: the client's address. It reads no answers until {@link read}. */
  static open(url: string, from: string, text: string | Buffer = ''): Promise<FloodSocket> {
    const { hostname, port } = new URL(url);
    const flood = new FloodSocket(connect({ host: hostname, port: Number(port), localAddress: from }).pause());
    return new Promise((resolve) => {
      flood.socket.once('connect', () => {
        flood.socket.write(text);
        resolve(flood);
      });
      flood.socket.once('close', () => resolve(flood));
    });
  }

  /** Opens so many connections, a few at a time. */
  static async openMany(count: number, url: string, from: string, text: string | Buffer = ''): Promise<FloodSocket[]> {
    const opened: FloodSocket[] = [];
    while (opened.length < count) {
      const some = Math.min(AT_ONCE, count - opened.length);
      opened.push(...(await Promise.all(Array.from({ length: some }, () => FloodSocket.open(url, from, text)))));
    }
    return opened;
  }

  read(): this {
    this.socket.resume();
    return this;
  }

  close(): void {
    this.socket.destroy();
  }
}

/** The backlog of a listener is 511 connections. */
const AT_ONCE = 128;

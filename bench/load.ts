/**
 * Makes load over HTTP/1.1 on bare sockets. The client must cost little, since it runs on the same machine as the service.
 *
 * A closed loop measures throughput. An open loop measures latency: each request has a due time, and its latency counts from that time, even if the
 * request is sent later.
 */
import { connect, type Socket } from 'node:net';

export interface Load {
  readonly host: string;
  readonly port: number;
  readonly connections: number;
  /** The request as text. `number` counts the requests. */
  readonly request: (number: number) => string;
}

export interface LoadResult {
  readonly seconds: number;
  readonly answered: number;
  /** Number of answers by HTTP status. */
  readonly statuses: ReadonlyMap<number, number>;
  /** Milliseconds, sorted. */
  readonly latencies: Float64Array;
  readonly perSecond: number;
}

export const percentile = (sorted: Float64Array, share: number): number =>
  sorted.length === 0 ? Number.NaN : sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))]!;

/** Sends requests for `seconds`. Each connection sends its next request when the last one is answered. */
export const closedLoop = async (load: Load, seconds: number): Promise<LoadResult> => {
  const clients = await openClients(load);
  const recorder = new Recorder();
  const started = performance.now();
  const end = started + seconds * 1_000;
  let number = 0;
  await Promise.all(
    clients.map(async (client) => {
      while (performance.now() < end) {
        const sent = performance.now();
        recorder.add(await client.ask(load.request(number++)), performance.now() - sent);
      }
    }),
  );
  for (const client of clients) client.close();
  return recorder.result((performance.now() - started) / 1_000);
};

/** A request of an open loop. Times are milliseconds since 1970. */
export interface Answered {
  readonly number: number;
  readonly dueMs: number;
  readonly answeredMs: number;
}

/** Sends `rate` requests per second at their due times, for `seconds` or until `stop` aborts. */
export const openLoop = async (
  load: Load,
  rate: number,
  seconds: number,
  onAnswered: (answered: Answered) => void = () => undefined,
  stop: AbortSignal | null = null,
): Promise<LoadResult> => {
  const clients = await openClients(load);
  const recorder = new Recorder();
  const total = Math.round(rate * seconds);
  const started = performance.now();
  let number = 0;
  await Promise.all(
    clients.map(async (client) => {
      for (;;) {
        const mine = number++;
        if (mine >= total || stop?.aborted) return;
        const due = started + (mine * 1_000) / rate;
        const wait = due - performance.now();
        if (wait > 0) await new Promise((wake) => setTimeout(wake, wait));
        const status = await client.ask(load.request(mine));
        const now = performance.now();
        recorder.add(status, now - due);
        onAnswered({ number: mine, dueMs: performance.timeOrigin + due, answeredMs: performance.timeOrigin + now });
      }
    }),
  );
  for (const client of clients) client.close();
  return recorder.result((performance.now() - started) / 1_000);
};

class Recorder {
  private readonly statuses = new Map<number, number>();
  private readonly latencies: number[] = [];

  add(status: number, ms: number): void {
    this.statuses.set(status, (this.statuses.get(status) ?? 0) + 1);
    this.latencies.push(ms);
  }

  result(seconds: number): LoadResult {
    const latencies = Float64Array.from(this.latencies).sort();
    return { seconds, answered: latencies.length, statuses: this.statuses, latencies, perSecond: latencies.length / seconds };
  }
}

const openClients = async ({ host, port, connections }: Load): Promise<Client[]> =>
  Promise.all(Array.from({ length: connections }, () => Client.open(host, port)));

/** One connection with one request at a time. */
class Client {
  private buffer: Buffer = Buffer.alloc(0);
  private answer: { resolve: (status: number) => void; reject: (error: Error) => void } | null = null;

  private socket: Socket | null = null;

  private constructor(
    private readonly host: string,
    private readonly port: number,
  ) {}

  static async open(host: string, port: number): Promise<Client> {
    const client = new Client(host, port);
    client.socket = await client.connected();
    return client;
  }

  private connected(): Promise<Socket> {
    const { host, port } = this;
    return new Promise((resolve, reject) => {
      const socket = connect({ host, port, noDelay: true }, () => {
        socket.off('error', reject);
        socket.on('data', (chunk) => this.receive(chunk));
        socket.on('error', (error) => this.answer?.reject(error));
        socket.on('close', () => this.answer?.reject(new Error('the connection was closed')));
        resolve(socket);
      });
      socket.once('error', reject);
    });
  }

  /** Sends a request. If the service asked to close the last connection, opens a new one. */
  async ask(request: string): Promise<number> {
    const socket = (this.socket ??= await this.connected());
    return new Promise((resolve, reject) => {
      this.answer = { resolve, reject };
      socket.write(request);
    });
  }

  close(): void {
    this.answer = null;
    this.socket?.destroy();
    this.socket = null;
  }

  private receive(chunk: Buffer): void {
    this.buffer = this.buffer.length === 0 ? chunk : Buffer.concat([this.buffer, chunk]);
    const head = this.buffer.indexOf('\r\n\r\n');
    if (head < 0) return;
    const text = this.buffer.toString('latin1', 0, head);
    const length = Number(/\r\ncontent-length: *(\d+)/i.exec(text)?.[1] ?? 0);
    if (this.buffer.length < head + 4 + length) return;
    this.buffer = this.buffer.subarray(head + 4 + length);
    const { answer } = this;
    this.answer = null;
    if (/\r\nconnection: *close/i.test(text)) this.close();
    answer?.resolve(Number(text.slice(9, 12)));
  }
}

/** The slope of the least-squares line through the points, in units of y per unit of x. */
export const slope = (points: readonly (readonly [x: number, y: number])[]): number => {
  const mean = (axis: 0 | 1) => points.reduce((sum, point) => sum + point[axis], 0) / points.length;
  const [x, y] = [mean(0), mean(1)];
  return points.reduce((sum, point) => sum + (point[0] - x) * (point[1] - y), 0) / points.reduce((sum, point) => sum + (point[0] - x) ** 2, 0);
};

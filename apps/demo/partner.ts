/** A partner's HTTP client: keeps connections, waits out `IDEMPOTENCY_IN_PROGRESS`, and knows an answer when it sees one. */
import { Agent, request } from 'node:http';

export interface Reply {
  readonly status: number;
  readonly text: string;
  readonly replayed: boolean;
  readonly data: Readonly<Record<string, unknown>>;
  readonly code: string | null;
  /** `details.id`, or null. */
  readonly paymentId: string | null;
}

const MAX_WAITS = 20;
const REQUEST_TIMEOUT_MS = 60_000;

export class Partner {
  private readonly agent = new Agent({ keepAlive: true });

  constructor(
    private readonly base: string,
    private readonly apiKey: string,
  ) {}

  get(path: string): Promise<Reply> {
    return this.send('GET', path, null, null);
  }

  /** `again`: further codes after which it is sent again under its key. */
  async post(path: string, body: unknown, idempotencyKey: string, again: readonly string[] = []): Promise<Reply> {
    for (let waits = 0; ; waits++) {
      const reply = await this.send('POST', path, JSON.stringify(body), idempotencyKey);
      if ((reply.code !== 'IDEMPOTENCY_IN_PROGRESS' && !again.includes(reply.code ?? '')) || waits === MAX_WAITS) return reply;
      await new Promise((wake) => setTimeout(wake, 1_000));
    }
  }

  private send(method: string, path: string, body: string | null, idempotencyKey: string | null): Promise<Reply> {
    return new Promise((resolve, reject) => {
      const headers: Record<string, string> = { authorization: `ApiKey ${this.apiKey}` };
      if (body !== null) Object.assign(headers, { 'content-type': 'application/json', 'content-length': String(Buffer.byteLength(body)) });
      if (idempotencyKey !== null) headers['idempotency-key'] = idempotencyKey;
      const call = request(`${this.base}/${path}`, { method, headers, agent: this.agent, timeout: REQUEST_TIMEOUT_MS }, (response) => {
        let text = '';
        response.setEncoding('utf8').on('data', (chunk: string) => (text += chunk));
        response.once('error', reject).once('end', () => {
          const { data = {}, details } = JSON.parse(text) as { data?: Record<string, unknown>; details?: { code?: string; id?: string } };
          resolve({
            status: response.statusCode!,
            text,
            replayed: response.headers['idempotent-replayed'] === 'true',
            data,
            code: details?.code ?? null,
            paymentId: details?.id ?? null,
          });
        });
      });
      call.once('timeout', () => call.destroy(new Error(`${method} ${path}: no answer within ${REQUEST_TIMEOUT_MS / 1000} s`)));
      call.once('error', reject);
      call.end(body ?? undefined);
    });
  }
}

/**
 * A partner's HTTP client. While a key is in progress (`IDEMPOTENCY_IN_PROGRESS`), it waits. If an answer was lost, it sends the request again under
 * its key (docs/api.md, "After a create").
 */
import { Agent, request } from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';

export interface Reply {
  readonly status: number;
  readonly text: string;
  readonly replayed: boolean;
  readonly data: Readonly<Record<string, unknown>>;
  readonly code: string | null;
  /** `details.id` of an error. null: there is none. */
  readonly paymentId: string | null;
  /** True if an earlier try of the request got no answer, or an answer without an outcome. */
  readonly repeated: boolean;
}

/** Thrown if no complete answer arrived. The request may have been executed. */
class AnswerLost extends Error {}

const PAUSE_MS = 1_000;
const MAX_WAITS = 20;
const REQUEST_TIMEOUT_MS = 60_000;

export class Partner {
  private readonly agent = new Agent({ keepAlive: true });

  constructor(
    private readonly base: string,
    private readonly apiKey: string,
    /** How long a request is tried again after a lost answer, or while its key is in progress. With 0, a lost answer throws at once. */
    private readonly patienceMs = 0,
  ) {}

  get(path: string): Promise<Reply> {
    return this.sendPatiently('GET', path, null, null);
  }

  /** Sends a POST. `again`: further error codes after which the request is sent again. */
  async post(path: string, body: unknown, idempotencyKey: string, again: readonly string[] = []): Promise<Reply> {
    const maxWaits = Math.max(MAX_WAITS, this.patienceMs / PAUSE_MS);
    let repeated = false;
    for (let waits = 0; ; waits++) {
      const reply = await this.sendPatiently('POST', path, JSON.stringify(body), idempotencyKey);
      repeated ||= reply.repeated;
      if ((reply.code !== 'IDEMPOTENCY_IN_PROGRESS' && !again.includes(reply.code ?? '')) || waits >= maxWaits) return { ...reply, repeated };
      repeated ||= reply.status >= 500;
      await sleep(PAUSE_MS);
    }
  }

  /** Sends the same request until it is answered or `patienceMs` have passed. The service may be restarting. */
  private async sendPatiently(method: string, path: string, body: string | null, idempotencyKey: string | null): Promise<Reply> {
    const since = performance.now();
    for (let repeated = false; ; repeated = true) {
      try {
        return { ...(await this.send(method, path, body, idempotencyKey)), repeated };
      } catch (error) {
        if (!(error instanceof AnswerLost) || performance.now() - since >= this.patienceMs) throw error;
        await sleep(PAUSE_MS);
      }
    }
  }

  private send(method: string, path: string, body: string | null, idempotencyKey: string | null): Promise<Omit<Reply, 'repeated'>> {
    return new Promise((resolve, reject) => {
      const lost = (error: Error) => reject(new AnswerLost(error.message, { cause: error }));
      const headers: Record<string, string> = { authorization: `ApiKey ${this.apiKey}` };
      if (body !== null) Object.assign(headers, { 'content-type': 'application/json', 'content-length': String(Buffer.byteLength(body)) });
      if (idempotencyKey !== null) headers['idempotency-key'] = idempotencyKey;
      const call = request(`${this.base}/${path}`, { method, headers, agent: this.agent, timeout: REQUEST_TIMEOUT_MS }, (response) => {
        let text = '';
        response.setEncoding('utf8').on('data', (chunk: string) => (text += chunk));
        response.once('error', lost).once('end', () => {
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
      call.once('error', lost);
      call.end(body ?? undefined);
    });
  }
}

/**
 * Sends one POST to a URL that a partner chose. The POST must not give access to our network.
 *
 * The URL and its addresses are checked (target.ts), and the connection goes to a checked address. TLS is verified for the host name. Redirects are
 * not followed, and no proxy is used. The answer is limited in size and time. The code uses `node:https`, not fetch: the abort signal then ends every
 * phase (connection, handshake, answer), and the name is not resolved again.
 */
import { readFileSync } from 'node:fs';
import { Agent, request as httpsRequest, type RequestOptions } from 'node:https';
import { BlockList, isIP, type Socket } from 'node:net';
import { connect as tlsConnect, createSecureContext, rootCertificates, type SecureContext } from 'node:tls';
import type { Clock } from '#kernel';
import type { WebhookSettings } from '#platform';
import { ATTEMPT_BUDGET_MS } from './schedule.js';
import { checkUrl, NoAddress, Refused, type Resolve, type Target, vetAddresses } from './target.js';

/** The status code decides: 2xx is `ok`, even if the body is cut off. `blocked`: our own rules refused the target, and nothing was sent. */
export const OUTCOMES = ['ok', 'http_3xx', 'http_4xx', 'http_5xx', 'timeout', 'connect', 'tls', 'dns', 'blocked'] as const;
export type Outcome = (typeof OUTCOMES)[number];

/** The result of a POST. A fault of the network or the receiver is a result, not an error. */
export interface Posted {
  readonly outcome: Outcome;
  readonly statusCode: number | null;
  /** For example `ECONNREFUSED`, `CERT_HAS_EXPIRED` or `url_port`. For a timeout: the phase that did not end. null: an answer came. */
  readonly errorCode: string | null;
  readonly remoteIp: string | null;
  /** First bytes of the answer's body, for operators only. The answer could come from an internal server. */
  readonly responseHead: Buffer | null;
}

export interface Post {
  readonly url: string;
  /** Each endpoint has its own kept connections, so endpoints cannot affect each other. */
  readonly endpointId: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Uint8Array;
}

/** The result of an attempt to reach a URL without a request. `steps`: each step, and whether it succeeded. */
export interface AddressCheck {
  readonly ok: boolean;
  readonly steps: readonly { readonly step: 'url' | 'dns' | 'tcp' | 'tls'; readonly ok: boolean; readonly detail: string; readonly ms: number }[];
}

export interface Sender {
  post(post: Post): Promise<Posted>;
  /** Checks the URL and its addresses by the rules of an attempt. Throws {@link Refused} or {@link NoAddress}. */
  vet(url: string): Promise<void>;
  /** Tries the URL rules, the look-up, TCP and TLS. Sends no request. */
  check(url: string): Promise<AddressCheck>;
  /** Closes idle connections. */
  close(): void;
}

export interface SenderOptions {
  readonly settings: WebhookSettings;
  readonly resolve: Resolve;
  readonly clock: Clock;
}

/** `https.request` also accepts `secureContext`, but its types do not declare this field. */
type PostOptions = RequestOptions & { readonly secureContext: SecureContext };

type Phase = 'dns' | 'connect' | 'tls' | 'answer';
interface Progress {
  phase: Phase;
  remoteIp: string | null;
}

const MAX_HEADER_BYTES = 16_384;
const MAX_BODY_BYTES = 16_384;
const KEPT_BODY_BYTES = 2_048;
/** An idle connection is closed after this time, or earlier if the receiver requests so. */
const KEEP_ALIVE_MS = 15_000;
/** An attempt that has not ended this long after its abort is abandoned. */
const HEED_MS = 1_000;
/** Maximum number of kept agents. Beyond it, the least recently used agent is closed. */
const MAX_AGENTS = 1_000;
/** Maximum number of a host's addresses that are tried. */
const MAX_ADDRESSES_TRIED = 4;
/** Error codes of an unreachable address. Another address of the same name may work. */
const NOT_THERE = new Set(['ECONNREFUSED', 'EHOSTUNREACH', 'ENETUNREACH', 'EADDRNOTAVAIL', 'EAFNOSUPPORT']);
const MIN_TLS = 'TLSv1.2';

const TIMED_OUT = new Error('the attempt took too long');

export const createSender = ({ settings, resolve, clock }: SenderOptions): Sender => {
  const usual = createSecureContext({ minVersion: MIN_TLS });
  const extra =
    settings.extraCaFile === null
      ? usual
      : createSecureContext({ minVersion: MIN_TLS, ca: [...rootCertificates, readFileSync(settings.extraCaFile, 'utf8')] });
  /** Certificates of the extra authority are accepted only for private targets. */
  const contextOf = ({ hostname, port }: Target): SecureContext =>
    settings.privateTargets.some((target) => target.host === hostname && target.port === port) ? extra : usual;

  const agents = new Map<string, Agent>();
  const agentOf = (endpointId: string, { hostname, port }: Target, address: string): Agent => {
    const key = `${endpointId} ${hostname} ${port} ${address}`;
    const agent = agents.get(key) ?? new Agent({ keepAlive: true, timeout: KEEP_ALIVE_MS });
    // The map stays in the order of last use.
    agents.delete(key);
    agents.set(key, agent);
    for (const [oldest, idle] of agents) {
      if (agents.size <= MAX_AGENTS) break;
      agents.delete(oldest);
      idle.destroy();
    }
    return agent;
  };

  const targetOf = async (url: string, progress: Progress, signal: AbortSignal): Promise<{ target: Target; addresses: readonly string[] }> => {
    const target = checkUrl(url, settings);
    progress.phase = 'dns';
    const addresses = vetAddresses(target, await orAbort(resolve(target.hostname), signal), settings);
    return { target, addresses: addresses.slice(0, MAX_ADDRESSES_TRIED) };
  };

  /** Runs `work` within the time of an attempt. If `work` does not end after the abort, it is abandoned. */
  const budgeted = async <T>(work: (signal: AbortSignal) => Promise<T>): Promise<T> => {
    const budget = new AbortController();
    const timer = new AbortController();
    void clock.sleep(ATTEMPT_BUDGET_MS, timer.signal).then(() => budget.abort(TIMED_OUT));
    const heedless = new Promise<never>((_, reject) => {
      void clock.sleep(ATTEMPT_BUDGET_MS + HEED_MS, timer.signal).then(() => reject(TIMED_OUT));
    });
    try {
      return await Promise.race([work(budget.signal), heedless]);
    } finally {
      timer.abort('done');
    }
  };

  const post = async ({ url, endpointId, headers, body }: Post): Promise<Posted> => {
    const progress: Progress = { phase: 'dns', remoteIp: null };
    try {
      return await budgeted(async (signal) => {
        const { target, addresses } = await targetOf(url, progress, signal);
        const options: PostOptions = {
          method: 'POST',
          port: target.port,
          path: target.path,
          servername: target.hostname,
          headers: { Host: target.host, ...headers },
          secureContext: contextOf(target),
          minVersion: MIN_TLS,
          maxHeaderSize: MAX_HEADER_BYTES,
          signal,
        };
        for (let next = 0; ; next++) {
          const address = addresses[next]!;
          const agent = agentOf(endpointId, target, address);
          try {
            return await exchange({ ...options, host: address, agent }, body, progress);
          } catch (error) {
            if (error instanceof StaleConnection) {
              // The kept connection ended without an answer. Send the request once more on a new connection.
              return await exchange({ ...options, host: address, agent: false }, body, progress);
            }
            if (next + 1 >= addresses.length || progress.phase !== 'connect' || !NOT_THERE.has(codeOf(error))) throw error;
          }
        }
      });
    } catch (error) {
      return { ...failureOf(error, progress), statusCode: null, remoteIp: progress.remoteIp, responseHead: null };
    }
  };

  const check = async (url: string): Promise<AddressCheck> => {
    const steps: AddressCheck['steps'][number][] = [];
    let begun = clock.monotonic();
    const note = (step: AddressCheck['steps'][number]['step'], ok: boolean, detail: string) => {
      steps.push({ step, ok, detail, ms: Math.round(clock.monotonic() - begun) });
      begun = clock.monotonic();
    };
    const progress: Progress = { phase: 'dns', remoteIp: null };
    try {
      await budgeted(async (signal) => {
        const target = checkUrl(url, settings);
        note('url', true, target.href);
        const { addresses } = await targetOf(url, progress, signal);
        note('dns', true, addresses.join(', '));
        progress.phase = 'connect';
        const tls = await handshake(target, addresses[0]!, contextOf(target), signal, () => {
          progress.phase = 'tls';
          note('tcp', true, `${addresses[0]} port ${target.port}`);
        });
        note('tls', true, tls);
      });
    } catch (error) {
      const { errorCode } = failureOf(error, progress);
      const step = steps.length === 0 ? 'url' : progress.phase === 'connect' ? 'tcp' : progress.phase === 'tls' ? 'tls' : 'dns';
      note(
        step,
        false,
        error === TIMED_OUT || (error as Error).name === 'AbortError' ? 'no answer in time' : `${(error as Error).message} (${errorCode})`,
      );
    }
    return { ok: steps.every(({ ok }) => ok), steps };
  };

  return {
    post,
    check,
    vet: async (url) => {
      const progress: Progress = { phase: 'dns', remoteIp: null };
      await budgeted((signal) => targetOf(url, progress, signal)).catch((error: unknown) => {
        throw error === TIMED_OUT ? new NoAddress('ETIMEOUT', new URL(url).hostname) : error;
      });
    },
    close: () => {
      for (const agent of agents.values()) agent.destroy();
      agents.clear();
    },
  };
};

/** Thrown if a kept connection ended without an answer. The receiver had probably closed it before the request. */
class StaleConnection extends Error {}

/** Sends one request and reads the answer. Rejects if no answer comes. */
const exchange = (options: PostOptions, body: Uint8Array, progress: Progress): Promise<Posted> =>
  new Promise((resolve, reject) => {
    progress.phase = 'connect';
    const request = httpsRequest(options);
    request.once('socket', (socket: Socket) => {
      const vetAgain = () => {
        progress.remoteIp = socket.remoteAddress ?? null;
        // If the connected address is not the checked one, send nothing.
        if (!sameAddress(socket.remoteAddress, options.host!)) request.destroy(new Refused('address_changed', 'connected to another address'));
      };
      if (socket.connecting) {
        socket.once('connect', () => {
          progress.phase = 'tls';
          vetAgain();
        });
        socket.once('secureConnect', () => (progress.phase = 'answer'));
      } else {
        progress.phase = 'answer';
        vetAgain();
      }
    });
    /** Set when the status code has arrived. Resolves with that status, even if the body is cut off later. */
    let decided: (() => void) | null = null;
    request.once('error', (error) => {
      if (decided) return decided();
      const stale = request.reusedSocket && ['ECONNRESET', 'EPIPE'].includes(codeOf(error)) && options.agent !== false;
      reject(stale ? new StaleConnection() : error);
    });
    // Some servers switch to another protocol unasked. Without this handler, Node would close the connection without an error.
    request.once('upgrade', ({ statusCode = 0 }, socket) => {
      socket.destroy();
      resolve({ outcome: outcomeOf(statusCode), statusCode, errorCode: null, remoteIp: progress.remoteIp, responseHead: null });
    });
    request.once('close', () => {
      if (!decided) reject(Object.assign(new Error('closed without an answer'), { code: 'ECONNRESET' }));
    });
    request.once('response', (response) => {
      const statusCode = response.statusCode!;
      const kept: Buffer[] = [];
      let keptBytes = 0;
      let bytes = 0;
      const done = () => {
        response.destroy();
        const responseHead = keptBytes > 0 ? Buffer.concat(kept) : null;
        resolve({ outcome: outcomeOf(statusCode), statusCode, errorCode: null, remoteIp: progress.remoteIp, responseHead });
      };
      decided = done;
      response.on('data', (chunk: Buffer) => {
        bytes += chunk.length;
        if (keptBytes < KEPT_BODY_BYTES) {
          // Copy the part. Otherwise it would keep the whole chunk in memory.
          const part = Buffer.from(chunk.subarray(0, KEPT_BODY_BYTES - keptBytes));
          kept.push(part);
          keptBytes += part.length;
        }
        if (bytes > MAX_BODY_BYTES) done();
      });
      // The connection is kept only if the body was read to its end. The status code decides the outcome in all cases.
      response.once('end', done).once('close', done).once('error', done);
    });
    request.end(body);
  });

const outcomeOf = (statusCode: number): Outcome =>
  statusCode < 200 || statusCode >= 500 ? 'http_5xx' : statusCode < 300 ? 'ok' : statusCode < 400 ? 'http_3xx' : 'http_4xx';

const handshake = (target: Target, address: string, secureContext: SecureContext, signal: AbortSignal, onTcp: () => void): Promise<string> =>
  new Promise((resolve, reject) => {
    const socket = tlsConnect({ host: address, port: target.port, servername: target.hostname, secureContext, minVersion: MIN_TLS });
    const abort = () => socket.destroy(TIMED_OUT);
    signal.addEventListener('abort', abort, { once: true });
    socket.once('connect', onTcp);
    socket.once('error', reject);
    socket.once('close', () => signal.removeEventListener('abort', abort));
    socket.once('secureConnect', () => {
      const { subject, valid_to: until } = socket.getPeerCertificate();
      const name = [subject?.CN ?? ''].flat()[0];
      socket.end();
      resolve(`${socket.getProtocol()}, certificate ${name ? `of ${name} ` : ''}valid until ${until}`);
    });
  });

const orAbort = <T>(work: Promise<T>, signal: AbortSignal): Promise<T> =>
  new Promise((resolve, reject) => {
    const abort = () => reject(TIMED_OUT);
    if (signal.aborted) return abort();
    signal.addEventListener('abort', abort, { once: true });
    work.then(resolve, reject).finally(() => signal.removeEventListener('abort', abort));
  });

const sameAddress = (remote: string | undefined, vetted: string): boolean => {
  if (remote === undefined || isIP(remote) === 0) return false;
  const list = new BlockList();
  list.addAddress(vetted, isIP(vetted) === 6 ? 'ipv6' : 'ipv4');
  return list.check(remote, isIP(remote) === 6 ? 'ipv6' : 'ipv4');
};

const codeOf = (error: unknown): string => (error as { code?: unknown }).code?.toString() ?? 'UNKNOWN';

const PHASE_OUTCOME: Readonly<Record<Phase, Outcome>> = { dns: 'dns', connect: 'connect', tls: 'tls', answer: 'connect' };

const failureOf = (error: unknown, { phase }: Progress): { outcome: Outcome; errorCode: string } => {
  if (error instanceof Refused) return { outcome: 'blocked', errorCode: error.code };
  if (error instanceof NoAddress) return { outcome: 'dns', errorCode: error.code };
  if (error === TIMED_OUT || (error as Error).name === 'AbortError') return { outcome: 'timeout', errorCode: phase };
  return { outcome: PHASE_OUTCOME[phase], errorCode: codeOf(error) };
};

/**
 * Sends one POST to a URL that a partner chose. The POST must not become a way into our network.
 *
 * The URL and its addresses are checked (target.ts), and the connection goes to a checked address. TLS is verified for the host name. Redirects are
 * not followed, and no proxy is used. The answer is limited in size and time. The code uses `node:https` and not fetch: with `node:https`, the abort
 * signal ends every phase (connection, handshake, answer), and the name is not resolved a second time.
 */
import { readFileSync } from 'node:fs';
import { Agent, request as httpsRequest, type RequestOptions } from 'node:https';
import { BlockList, isIP, type Socket } from 'node:net';
import { connect as tlsConnect, createSecureContext, rootCertificates, type SecureContext } from 'node:tls';
import type { Clock } from '#kernel';
import type { WebhookSettings } from '#platform';
import { ATTEMPT_BUDGET_MS } from './schedule.js';
import { checkUrl, NoAddress, Refused, type Resolve, type Target, vetAddresses } from './target.js';

/** The status code decides: 2xx is `ok`, even if the body is cut off. `blocked`: our own rules refused the target before anything was sent. */
export const OUTCOMES = ['ok', 'http_3xx', 'http_4xx', 'http_5xx', 'timeout', 'connect', 'tls', 'dns', 'blocked'] as const;
export type Outcome = (typeof OUTCOMES)[number];

/** The result of a POST. Faults of the network or the receiver are results, not errors. */
export interface Posted {
  readonly outcome: Outcome;
  readonly statusCode: number | null;
  /** For example `ECONNREFUSED`, `CERT_HAS_EXPIRED` or `url_port`. For a timeout, the phase that did not end. null if an answer came. */
  readonly errorCode: string | null;
  readonly remoteIp: string | null;
  /** First bytes of the answer's body. Only operators may see them, since the answer could come from an internal server. */
  readonly responseHead: Buffer | null;
}

export interface Post {
  readonly url: string;
  /** Each endpoint has its own kept connections. So an endpoint can neither use up nor observe the connections of another. */
  readonly endpointId: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Uint8Array;
}

/** The result of trying to reach a URL without sending a request: each step, and whether it succeeded. */
export interface AddressCheck {
  readonly ok: boolean;
  readonly steps: readonly { readonly step: 'url' | 'dns' | 'tcp' | 'tls'; readonly ok: boolean; readonly detail: string; readonly ms: number }[];
}

export interface Sender {
  post(post: Post): Promise<Posted>;
  /** Checks the URL and its addresses by the same rules as an attempt. Throws {@link Refused} or {@link NoAddress}. */
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

/** `https.request` passes `secureContext` to the handshake, although its types do not declare this. */
type PostOptions = RequestOptions & { readonly secureContext: SecureContext };

type Phase = 'dns' | 'connect' | 'tls' | 'answer';
interface Progress {
  phase: Phase;
  remoteIp: string | null;
}

const MAX_HEADER_BYTES = 16_384;
const MAX_BODY_BYTES = 16_384;
const KEPT_BODY_BYTES = 2_048;
/** An idle connection is closed after this time, or sooner if the receiver's answer says so. */
const KEEP_ALIVE_MS = 15_000;
/** When the time of an attempt is over, the attempt is aborted. If it has not ended this long after the abort, it is abandoned. */
const HEED_MS = 1_000;
/** Connections are kept for at most this many pairs of endpoint and address. Beyond that, the pair that was unused for longest is dropped. */
const MAX_AGENTS = 1_000;
/** Only this many of a host's addresses are tried. */
const MAX_ADDRESSES_TRIED = 4;
/** Errors that say that an address cannot be reached. Another address of the same name may work. */
const NOT_THERE = new Set(['ECONNREFUSED', 'EHOSTUNREACH', 'ENETUNREACH', 'EADDRNOTAVAIL', 'EAFNOSUPPORT']);
const MIN_TLS = 'TLSv1.2';

const TIMED_OUT = new Error('the attempt took too long');

export const createSender = ({ settings, resolve, clock }: SenderOptions): Sender => {
  const usual = createSecureContext({ minVersion: MIN_TLS });
  const extra =
    settings.extraCaFile === null
      ? usual
      : createSecureContext({ minVersion: MIN_TLS, ca: [...rootCertificates, readFileSync(settings.extraCaFile, 'utf8')] });
  /** Certificates of the extra (private) authority are accepted for private targets only. */
  const contextOf = ({ hostname, port }: Target): SecureContext =>
    settings.privateTargets.some((target) => target.host === hostname && target.port === port) ? extra : usual;

  const agents = new Map<string, Agent>();
  const agentOf = (endpointId: string, { hostname, port }: Target, address: string): Agent => {
    const key = `${endpointId} ${hostname} ${port} ${address}`;
    const agent = agents.get(key) ?? new Agent({ keepAlive: true, timeout: KEEP_ALIVE_MS });
    // Move the agent to the end, so that the map stays in the order of last use.
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

  /** Runs `work` within the time of an attempt. If `work` does not end after the abort, it is abandoned, so that its slot becomes free. */
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
              // The kept connection ended before an answer came. Send the request once more on a new connection.
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

/** Thrown if a kept connection ended before an answer came. The receiver had probably closed the connection before the request. */
class StaleConnection extends Error {}

/** Sends one request and reads the answer. Rejects if no answer comes. */
const exchange = (options: PostOptions, body: Uint8Array, progress: Progress): Promise<Posted> =>
  new Promise((resolve, reject) => {
    progress.phase = 'connect';
    const request = httpsRequest(options);
    request.once('socket', (socket: Socket) => {
      const vetAgain = () => {
        progress.remoteIp = socket.remoteAddress ?? null;
        // A second check: if the connection leads to another address than the checked one, nothing is sent.
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
    /** Set when the status code has arrived. It resolves the promise with that status, even if the body is cut off later. */
    let decided: (() => void) | null = null;
    request.once('error', (error) => {
      if (decided) return decided();
      const stale = request.reusedSocket && ['ECONNRESET', 'EPIPE'].includes(codeOf(error)) && options.agent !== false;
      reject(stale ? new StaleConnection() : error);
    });
    // We did not ask for another protocol. Without this handler, Node would close the connection without an error.
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
          // A copy, since a part of a chunk would keep the whole chunk in memory.
          const part = Buffer.from(chunk.subarray(0, KEPT_BODY_BYTES - keptBytes));
          kept.push(part);
          keptBytes += part.length;
        }
        if (bytes > MAX_BODY_BYTES) done();
      });
      // If the body was read to its end, the connection is kept. If it was cut off, too slow or too long, the connection is closed. In both cases the
      // status code decides the outcome.
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

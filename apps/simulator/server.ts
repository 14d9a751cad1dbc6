/**
 * The sandbox card processor over HTTP. It stands for a bank and has its own durable file. If Payfold's processes lose data, this file still shows
 * what happened to the money.
 *
 * Merchant calls (`/v1/…`) carry `Authorization: Sandbox <merchant account>:<sandbox key>`. The key of a merchant account is
 * `sk_sandbox_<merchant account>`. The operator's controls (`/control/…`) carry `Authorization: Control <key>`. The key is in the file `control.key`
 * beside the books. It is made at the first start.
 * Bodies are JSON. An operation is executed at most once for each merchant account and reference.
 *
 * | merchant call | does |
 * |---|---|
 * | `POST /v1/charges`, `/v1/voids`, `/v1/refunds` | `{ref, op, outcome}`: 200 approved, 402 declined, 422 rejected, 502 not processed |
 * | `POST /v1/references/{ref}/finalize` `{op}` | `{ref, finalized: executed \| never \| cannot_tell, status?, outcome?}` |
 * | `GET /v1/references/{ref}?op=` | `{ref, found: true \| false \| "cannot_tell", …}` |
 * | `GET /v1/transactions/{id}` | a charge or refund by the processor's own id: `{found: true, ref, op, …}` or `{found: false}` |
 * | `POST /v1/batches/close` | closes the open batch: `{batch}` or `{batch: null}` |
 * | `GET /v1/batches?after=` · `GET /v1/batches/{id}?from=` | closed batches, oldest first · the lines of one; in pages |
 * | `GET /v1/disputes` | disputes |
 *
 * | operator's control | does |
 * |---|---|
 * | `POST, GET, DELETE /control/faults` | arm a fault (faults.ts) · list · clear |
 * | `POST /control/processing` `{enabled}` | refuse everything under `/v1` with a clear 503, nothing executed |
 * | `GET /control/charges?from=&limit=` | the true state: every executed operation and tombstone |
 * | `POST /control/batches/close` | closes every open batch |
 * | `GET /control/disputes` · `POST /control/disputes/{id}` `{status?, stage?}` | disputes of all accounts · changes one |
 *
 * A refusal that executed nothing and stored nothing is `{error: {code, message}}`.
 *
 * A merchant call from this host may carry `sandbox-ahead-ms`: how far the caller's business time is ahead. When the
 * processor executes a call, its time is never behind the caller's. It never goes back, and is kept in the file `ahead` beside the books. If the time
 * moves past the daily closing time, the open batches are closed as of that closing time.
 */
import { createHash, randomBytes, timingSafeEqual } from 'node:crypto';
import { unlink } from 'node:fs/promises';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { isCents, SandboxClock, systemClock, timestamp, type Clock } from '#kernel';
import { brandOf, crockford, isLoopback, readOwnFile, writeOwnFile } from '#platform';
import { readOrCreateControlKey } from './control.js';
import { CALLS, Faults, MISBEHAVIOURS, type CallFacts, type Fault } from './faults.js';
import { fixtureFor, TOKENS } from './fixtures.js';
import { readJournal } from './journal.js';
import {
  Processor,
  type Answer,
  type AskedBy,
  type Batch,
  type Card,
  type Leg,
  type Operation,
  type ProcessorRecord,
  type Result,
  type ReversalAsked,
} from './processor.js';
import { openStore, StoreFailed, type Store } from './store.js';

const DAY_MS = 86_400_000;
const MAX_BODY_BYTES = 16 * 1024;
/** Clients drop idle connections after 15 s, long before this time. So the server never closes a connection on which a client starts a request. */
const KEEP_ALIVE_MS = 65_000;
const REQUEST_TIMEOUT_MS = 30_000;
/** How long a stop waits for answers in flight. */
const STOP_GRACE_MS = 2_000;
/** With these limits, a page is smaller than 64 KiB, the most that a client reads of one answer. */
const BATCHES_PER_PAGE = 100;
const LINES_PER_PAGE = 200;
const TRUTH_PER_PAGE = 1_000;
const MAX_TRUTH_PER_PAGE = 10_000;
const OVERSIZED_BYTES = 2 * 1024 * 1024;
const DRIP_EVERY_MS = 250;
const MAX_FAULT_DELAY_MS = 600_000;
const RANDOM_ID_BYTES = 12;
const RANDOM_ID_CHARACTERS = 16;
/** A settled batch is forgotten this long after it closed, with the charges and references that only it needs. */
const KEPT_MS = 30 * DAY_MS;
const FORGET_EVERY_MS = 60 * 60_000;

const STATUS_OF_RESULT = { approved: 200, declined: 402, rejected: 422, not_processed: 502 } as const satisfies Record<Result['kind'], number>;

export interface SimulatorOptions {
  /** The directory of the books, created if missing. Only one simulator at a time can use it. */
  readonly directory: string;
  readonly host?: string;
  /** 0 or omitted: any free port. */
  readonly port?: number;
  readonly onLog?: (line: string) => void;
  readonly clock?: Clock;
  /** Default true. */
  readonly partialVoid?: boolean;
  /** Default false. */
  readonly refundUnsettled?: boolean;
  /** Time of day in UTC (`HH:MM` or `HH:MM:SS`) at which every open batch is closed. null or omitted: batches close only on request. */
  readonly closeBatchesAt?: string | null;
  /** Whether the operator's endpoints are served. Default true. */
  readonly controls?: boolean;
  /** Called when the books can no longer be read or written. The process should then end and start again. */
  readonly onFailure?: (error: Error) => void;
}

export interface Simulator {
  readonly url: string;
  /** The key for the operator's controls. */
  readonly controlKey: string;
  /** Stops accepting requests, waits for answers in flight, drops delayed calls, and closes the file. */
  close(): Promise<void>;
}

/** A refused call. Nothing was executed or stored. */
class Refusal extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

const invalid = (message: string) => new Refusal(400, 'invalid_request', message);

type Fields = Readonly<Record<string, unknown>>;

/** The answer of a handler. null: the handler has sent it, or has cut the connection. */
type Reply = { readonly status: number; readonly body: unknown } | null;

interface Request {
  readonly merchantAccount: string;
  readonly parameters: readonly string[];
  readonly query: URLSearchParams;
  readonly body: Fields;
  readonly response: ServerResponse;
}

type MaybeAsync<T> = T | Promise<T>;

type Handler = (request: Request) => Reply | Promise<Reply>;

const LEGS: readonly Leg[] = ['principal', 'fee', 'combined'];
const ASKED_BY: readonly AskedBy[] = ['void', 'refund', 'reversal'];
const OPERATIONS = { charge: 'charge', void: 'void', reversal: 'void', refund: 'refund' } as const satisfies Record<string, Operation>;

const oneOf = <T extends string>(field: string, value: unknown, allowed: readonly T[]): T => {
  if ((allowed as readonly unknown[]).includes(value)) return value as T;
  throw invalid(`${field} must be one of ${allowed.join(', ')}`);
};
const text = (field: string, value: unknown, pattern: RegExp): string => {
  if (typeof value === 'string' && pattern.test(value)) return value;
  throw invalid(`${field} is missing or malformed`);
};
const cents = (value: unknown): number => {
  if (isCents(value)) return value;
  throw invalid('amountCents must be whole cents, 1 to 99999999');
};
const integer = (field: string, value: unknown, from: number, to: number, otherwise: number): number => {
  if (value === undefined || value === null) return otherwise;
  const number = typeof value === 'string' && /^\d{1,12}$/.test(value) ? Number(value) : value;
  if (typeof number === 'number' && Number.isSafeInteger(number) && number >= from && number <= to) return number;
  throw invalid(`${field} must be an integer, ${from} to ${to}`);
};
const fields = (field: string, value: unknown): Fields => {
  if (value !== null && typeof value === 'object' && !Array.isArray(value)) return value as Fields;
  throw invalid(`${field} must be an object`);
};

const REF = /^[0-9A-Za-z_-]{1,64}$/;
const TRANSACTION = /^[0-9A-Za-z_-]{1,64}$/;

const operationOf = (value: unknown): Operation => OPERATIONS[oneOf('op', value, ['charge', 'void', 'reversal', 'refund'])];

const instrumentOf = (value: unknown): { instrument: { number: string } | { token: string }; card: Card } => {
  const instrument = fields('instrument', value);
  if (typeof instrument.token === 'string') {
    const { token } = instrument;
    return { instrument: { token }, card: Object.hasOwn(TOKENS, token) ? { brand: 'visa', last4: '4242' } : { brand: 'unknown', last4: '0000' } };
  }
  const number = text('instrument.number', instrument.number, /^\d{12,19}$/);
  // The fixtures decide about a card. A card without its required fields is a malformed request.
  integer('instrument.expiryMonth', instrument.expiryMonth ?? 0, 1, 12, 0);
  integer('instrument.expiryYear', instrument.expiryYear ?? 0, 2000, 2099, 0);
  text('instrument.cvv', instrument.cvv, /^\d{3,4}$/);
  return { instrument: { number }, card: { brand: brandOf(number), last4: number.slice(-4) } };
};

const faultOf = (body: Fields): Fault => {
  const match = fields('match', body.match ?? {});
  const probability = body.probability ?? 1;
  if (typeof probability !== 'number' || !(probability > 0 && probability <= 1)) throw invalid('probability must be above 0 and at most 1');
  if (body.effect !== undefined && typeof body.effect !== 'boolean') throw invalid('effect must be true or false');
  const answer = body.answer === undefined || body.answer === null ? null : oneOf('answer', body.answer, MISBEHAVIOURS);
  return {
    match: {
      ...(match.call !== undefined && { call: oneOf('match.call', match.call, CALLS) }),
      ...(match.leg !== undefined && { leg: oneOf('match.leg', match.leg, LEGS) }),
      ...(match.askedBy !== undefined && { askedBy: oneOf('match.askedBy', match.askedBy, ASKED_BY) }),
      ...(match.ref !== undefined && { ref: text('match.ref', match.ref, REF) }),
      ...(match.last4 !== undefined && { last4: text('match.last4', match.last4, /^\d{4}$/) }),
      ...(match.merchantAccount !== undefined && { merchantAccount: text('match.merchantAccount', match.merchantAccount, MERCHANT_ACCOUNT) }),
    },
    skip: integer('skip', body.skip, 0, Number.MAX_SAFE_INTEGER, 0),
    times: body.times === null ? null : integer('times', body.times, 1, Number.MAX_SAFE_INTEGER, 1),
    probability,
    delayBeforeMs: integer('delayBeforeMs', body.delayBeforeMs, 0, MAX_FAULT_DELAY_MS, 0),
    delayAfterMs: integer('delayAfterMs', body.delayAfterMs, 0, MAX_FAULT_DELAY_MS, 0),
    effect: answer === 'disabled' ? false : body.effect !== false,
    answer,
  };
};

const MERCHANT_ACCOUNT = /^[0-9A-Za-z_.-]{1,100}$/;

/** The merchant account of a caller. Throws a 401 if the key is wrong. */
const callerOf = (authorization: string | undefined): string => {
  const [, name = '', key] = /^Sandbox ([^:\s]+):(\S+)$/.exec(authorization ?? '') ?? [];
  if (!MERCHANT_ACCOUNT.test(name) || key !== `sk_sandbox_${name}`)
    throw new Refusal(401, 'unauthorized', 'a merchant account and its sandbox key are needed');
  return name;
};

/** Throws a 401 for an absent or wrong key. Keys of merchant accounts are no keys for controls. */
const refuseOthers = (authorization: string | undefined, controlKey: string): void => {
  const [given, right] = [authorization ?? '', `Control ${controlKey}`].map((text) => createHash('sha256').update(text).digest());
  if (!timingSafeEqual(given!, right!))
    throw new Refusal(401, 'unauthorized', 'the key for controls is needed, from the file control.key beside the books');
};

const readBody = async (request: IncomingMessage): Promise<Fields> => {
  const chunks: Buffer[] = [];
  let size = 0;
  for await (const chunk of request as AsyncIterable<Buffer>) {
    size += chunk.length;
    if (size > MAX_BODY_BYTES) throw new Refusal(413, 'too_large', `a body has at most ${MAX_BODY_BYTES} bytes`);
    chunks.push(chunk);
  }
  if (size === 0) return {};
  let value: unknown;
  try {
    value = JSON.parse(Buffer.concat(chunks).toString('utf8'));
  } catch {
    // Do not pass on the parser's message. It repeats text that may hold a card number.
    throw invalid('the body is not JSON');
  }
  return fields('the body', value);
};

const summary = ({ batchId, closedAt, fundedOn, count, grossCents, feeCents, netCents }: Batch) => ({
  batchId,
  closedAt,
  fundedOn,
  count,
  grossCents,
  feeCents,
  netCents,
});

/** The address of a simulator that runs on this directory. null: none answers. */
export const findSimulator = async (directory: string): Promise<string | null> => {
  try {
    const { url } = JSON.parse(readOwnFile(join(directory, ADDRESS_FILE)) ?? 'null') as { url: string };
    const answer = await fetch(`${url}/healthz`, { signal: AbortSignal.timeout(FIND_TIMEOUT_MS) });
    return ((await answer.json()) as { service?: unknown }).service === SERVICE ? url : null;
  } catch {
    return null;
  }
};

/** The next occurrence of this time of day in UTC, in milliseconds since 1970. If it is exactly this time now: a day later. */
const nextTimeOfDay = (timeOfDay: string, now: number): number => {
  const [hours = 0, minutes = 0, seconds = 0] = timeOfDay.split(':').map(Number);
  const wanted = ((hours * 60 + minutes) * 60 + seconds) * 1_000;
  return now + DAY_MS - ((now - wanted) % DAY_MS);
};

const SERVICE = 'payfold-simulator';
const FIND_TIMEOUT_MS = 2_000;
const ADDRESS_FILE = 'address.json';
const AHEAD_FILE = 'ahead';
const AHEAD_HEADER = 'sandbox-ahead-ms';

/**
 * Starts the processor on its directory. Throws `StoreRefused` if another simulator holds the directory or its files are damaged. Throws the system's
 * error if the port is taken.
 */
export const startSimulator = async (options: SimulatorOptions): Promise<Simulator> => {
  const {
    directory,
    host = '127.0.0.1',
    port = 0,
    onLog = () => undefined,
    clock: hostClock = systemClock,
    controls = true,
    closeBatchesAt = null,
    onFailure = () => undefined,
  } = options;
  const openProcessor = (store: Store) =>
    Processor.open(
      { partialVoid: options.partialVoid ?? true, refundUnsettled: options.refundUnsettled ?? false },
      store,
      (prefix) => prefix + crockford(randomBytes(RANDOM_ID_BYTES), RANDOM_ID_CHARACTERS),
    );
  const store = await openStore(directory, async (journal, empty) => {
    const older = await openProcessor(empty);
    for await (const records of readJournal<ProcessorRecord>(journal, onLog)) {
      for (const record of records) older.apply(record);
      await empty.durable();
    }
    onLog(`carried ${journal} over`);
  });
  let controlKey: string;
  try {
    controlKey = readOrCreateControlKey(directory);
  } catch (error) {
    await store.close();
    throw error;
  }
  const processor = await openProcessor(store);

  const clock = new SandboxClock(hostClock);
  const aheadFile = join(directory, AHEAD_FILE);
  // If the file cannot be read, no harm is done: the next call carries the time again.
  clock.moveTo(Number(/^\d+$/.exec(readOwnFile(aheadFile) ?? '')?.[0] ?? 0));
  const faults = new Faults();
  const stopping = new AbortController();
  /** Aborts when the time has moved. */
  let moved = new AbortController();
  let enabled = true;

  const now = () => timestamp(clock.now());
  const wait = async (ms: number): Promise<void> => {
    if (ms > 0) await clock.sleep(ms, stopping.signal);
    // If the simulator stops while a call waits, the call is dropped before it changes anything.
    if (stopping.signal.aborted) throw new Refusal(503, 'stopping', 'the processor is stopping');
  };

  const closeAllBatches = (at = now()) =>
    processor.merchantAccounts().flatMap((merchantAccount) => {
      const batch = processor.closeBatch(merchantAccount, at);
      return batch ? [{ merchantAccount, ...summary(batch) }] : [];
    });

  /** Closes all open batches every day at this time. */
  const closeDaily = async (timeOfDay: string): Promise<void> => {
    while (!stopping.signal.aborted) {
      const { signal } = moved;
      await clock.sleep(nextTimeOfDay(timeOfDay, clock.now()) - clock.now(), AbortSignal.any([stopping.signal, signal]));
      if (stopping.signal.aborted || signal.aborted) continue;
      onLog(`closed ${closeAllBatches().length} batches, as every day at ${timeOfDay} UTC`);
      await store.durable();
    }
  };

  /** Takes over the time of a caller that is ahead. First closes the batches that should have closed in between. */
  const hear = async (aheadMs: number): Promise<void> => {
    if (aheadMs <= clock.aheadMs) return;
    const due = closeBatchesAt === null ? Number.POSITIVE_INFINITY : nextTimeOfDay(closeBatchesAt, clock.now());
    const closed = due <= clock.now() + aheadMs - clock.aheadMs ? closeAllBatches(timestamp(due)) : [];
    clock.moveTo(aheadMs);
    moved.abort('moved');
    moved = new AbortController();
    onLog(`the time was moved to ${now()}; closed ${closed.length} batches in between`);
    // The closed batches are stored before the time. So a crash in between leaves no batch open.
    await store.durable();
    writeOwnFile(aheadFile, String(clock.aheadMs));
  };

  /** Forgets what settled {@link KEPT_MS} ago. */
  const forgetOld = async (): Promise<void> => {
    while (!stopping.signal.aborted) {
      // The books are kept by real time. Otherwise a move of the time could drop operations that Payfold has not asked for yet.
      const forgotten = await processor.forget(timestamp(clock.realNow() - KEPT_MS), stopping.signal);
      if (forgotten > 0) onLog(`forgot ${forgotten} operations of batches that closed more than 30 days ago`);
      await clock.sleep(FORGET_EVERY_MS, stopping.signal);
    }
  };

  /**
   * Executes a call, with the fault that hits it, if any. `execute` changes the state before it waits for anything. The change is on disk before the
   * answer is sent.
   */
  const perform = async (
    response: ServerResponse,
    facts: CallFacts,
    delayMs: number,
    execute: () => MaybeAsync<{ status: number; body: unknown }>,
  ): Promise<Reply> => {
    if (!enabled) throw new Refusal(503, 'disabled', 'processing is disabled');
    const fault = faults.take(facts);
    if (fault?.answer === 'disabled') throw new Refusal(503, 'disabled', 'processing is disabled');
    await wait(delayMs + (fault?.delayBeforeMs ?? 0));
    const reply = fault?.effect === false ? { status: 200, body: { ref: facts.ref, outcome: { kind: 'approved' } } } : await execute();
    // Wait for the disk even for a repeated answer. The record of the first answer may not be on disk yet.
    await store.durable();
    if (!fault) return reply;
    await wait(fault.delayAfterMs);
    return misbehave(response, fault, reply);
  };

  const misbehave = async (response: ServerResponse, fault: Fault, reply: { status: number; body: unknown }): Promise<Reply> => {
    switch (fault.answer ?? (fault.effect ? null : 'cut')) {
      case null:
        return reply;
      case 'cut':
        response.socket?.resetAndDestroy();
        return null;
      case 'bare_500':
        response.writeHead(500, { 'content-type': 'text/plain' }).end('Internal Server Error');
        return null;
      case 'not_json':
        response.writeHead(200, { 'content-type': 'application/json' }).end('<html>OK</html>');
        return null;
      case 'missing_fields':
        return {
          status: 200,
          body: { ...(reply.body as Fields), outcome: { kind: 'approved' }, finalized: 'executed', found: true, batches: null, batch: {} },
        };
      case 'other_reference':
        return { status: reply.status, body: { ...(reply.body as Fields), ref: 'another-reference' } };
      case 'oversized':
        return { status: reply.status, body: { ...(reply.body as Fields), padding: 'x'.repeat(OVERSIZED_BYTES) } };
      case 'drip':
        response.writeHead(reply.status, { 'content-type': 'application/json' });
        for (const character of JSON.stringify(reply.body)) {
          if (response.destroyed) return null;
          response.write(character);
          await wait(DRIP_EVERY_MS);
        }
        response.end();
        return null;
      default:
        throw new Error('unreachable: a disabled call was refused before');
    }
  };

  const answered = (ref: string, op: Operation, { result, incomplete }: Answer) =>
    incomplete
      ? { status: 200, body: { ref, op, outcome: { kind: 'approved' } } }
      : { status: STATUS_OF_RESULT[result.kind], body: { ref, op, outcome: result } };

  const charge: Handler = ({ merchantAccount, body, response }) => {
    const ref = text('ref', body.ref, REF);
    const leg = oneOf('leg', body.leg, LEGS);
    const { instrument, card } = instrumentOf(body.instrument);
    const command = { ref, leg, amountCents: cents(body.amountCents), instrument, card, postalCodeGiven: typeof body.postalCode === 'string' };
    const delayMs = processor.isAnswered(merchantAccount, ref) ? 0 : (fixtureFor(instrument, leg).delayMs ?? 0);
    return perform(response, { call: 'charge', merchantAccount, ref, leg, last4: card.last4 }, delayMs, () =>
      answered(ref, 'charge', processor.charge(merchantAccount, now(), command)),
    );
  };

  const reverse =
    (op: 'void' | 'refund'): Handler =>
    ({ merchantAccount, body, response }) => {
      const ref = text('ref', body.ref, REF);
      const asked: ReversalAsked = {
        op,
        leg: oneOf('leg', body.leg, LEGS),
        chargeTransactionId: text('chargeTransactionId', body.chargeTransactionId, TRANSACTION),
        amountCents: op === 'void' && (body.amountCents === undefined || body.amountCents === null) ? null : cents(body.amountCents),
        askedBy: op === 'refund' ? 'refund' : oneOf('askedBy', body.askedBy, ASKED_BY),
      };
      const last4 = processor.cardOf(merchantAccount, asked.chargeTransactionId)?.last4;
      return perform(response, { call: op, merchantAccount, ref, leg: asked.leg, askedBy: asked.askedBy, ...(last4 && { last4 }) }, 0, () =>
        answered(ref, op, processor.reverse(merchantAccount, now(), { ref, asked })),
      );
    };

  const finalize: Handler = ({ merchantAccount, parameters: [ref = ''], body, response }) => {
    const op = operationOf(body.op);
    return perform(response, { call: 'finalize', merchantAccount, ref }, 0, () => {
      const finalized = processor.finalize(merchantAccount, now(), ref, op);
      if (finalized.kind !== 'executed') return { status: 200, body: { ref, finalized: finalized.kind } };
      const { status, body: executed } = answered(ref, op, { result: finalized.result, incomplete: false });
      return { status: 200, body: { ...executed, finalized: 'executed', status } };
    });
  };

  const lookup: Handler = ({ merchantAccount, parameters: [ref = ''], query, response }) => {
    const op = operationOf(query.get('op'));
    return perform(response, { call: 'lookup', merchantAccount, ref }, 0, () => ({
      status: 200,
      body: { ref, ...processor.lookup(merchantAccount, ref, op) },
    }));
  };

  const transaction: Handler = ({ merchantAccount, parameters: [transactionId = ''], response }) =>
    perform(response, { call: 'transaction', merchantAccount }, 0, () => {
      const found = processor.transaction(merchantAccount, transactionId);
      return { status: 200, body: found ? { found: true, ...found } : { found: false } };
    });

  const batches = (execute: (request: Request) => unknown): Handler => {
    return (request) =>
      perform(request.response, { call: 'batches', merchantAccount: request.merchantAccount }, 0, async () => ({
        status: 200,
        body: await execute(request),
      }));
  };

  const closeBatch = batches(({ merchantAccount }) => {
    const batch = processor.closeBatch(merchantAccount, now());
    return { batch: batch && summary(batch) };
  });

  const listBatches = batches(async ({ merchantAccount, query }) => {
    const list = await processor.batchesAfter(merchantAccount, query.get('after'), BATCHES_PER_PAGE + 1);
    if (!list) throw new Refusal(404, 'not_found', 'no such batch');
    return { batches: list.slice(0, BATCHES_PER_PAGE).map(summary), more: list.length > BATCHES_PER_PAGE };
  });

  const batchLines = batches(async ({ merchantAccount, parameters: [batchId = ''], query }) => {
    const from = integer('from', query.get('from'), 0, Number.MAX_SAFE_INTEGER, 0);
    const page = await processor.linesOf(merchantAccount, batchId, from, LINES_PER_PAGE);
    if (!page) throw new Refusal(404, 'not_found', 'no such batch');
    return { batchId, ...page };
  });

  /** Makes a handler for the operator only. */
  const control =
    (execute: (request: Request) => unknown): Handler =>
    async (request) => {
      const body = await execute(request);
      await store.durable();
      return { status: 200, body };
    };

  const routes: readonly (readonly [method: string, pattern: RegExp, handler: Handler])[] = [
    ['POST', /^\/v1\/charges$/, charge],
    ['POST', /^\/v1\/voids$/, reverse('void')],
    ['POST', /^\/v1\/refunds$/, reverse('refund')],
    ['POST', /^\/v1\/references\/([0-9A-Za-z_-]{1,64})\/finalize$/, finalize],
    ['GET', /^\/v1\/references\/([0-9A-Za-z_-]{1,64})$/, lookup],
    ['GET', /^\/v1\/transactions\/([0-9A-Za-z_-]{1,64})$/, transaction],
    ['POST', /^\/v1\/batches\/close$/, closeBatch],
    ['GET', /^\/v1\/batches$/, listBatches],
    ['GET', /^\/v1\/batches\/([0-9A-Za-z_-]{1,64})$/, batchLines],
    ['GET', /^\/v1\/disputes$/, batches(async ({ merchantAccount }) => ({ disputes: await processor.listDisputes(merchantAccount) }))],
    ...(controls
      ? ([
          ['POST', /^\/control\/faults$/, control(({ body }) => ({ id: faults.arm(faultOf(body)) }))],
          ['GET', /^\/control\/faults$/, control(() => faults.list())],
          ['DELETE', /^\/control\/faults$/, control(() => (faults.clear(), {}))],
          [
            'POST',
            /^\/control\/processing$/,
            control(({ body }) => {
              if (typeof body.enabled !== 'boolean') throw invalid('enabled must be true or false');
              enabled = body.enabled;
              return { enabled };
            }),
          ],
          [
            'GET',
            /^\/control\/charges$/,
            control(async ({ query }) => {
              const from = integer('from', query.get('from'), 0, Number.MAX_SAFE_INTEGER, 0);
              const limit = integer('limit', query.get('limit'), 1, MAX_TRUTH_PER_PAGE, TRUTH_PER_PAGE);
              const operations = await processor.truth(from, limit);
              return { operations, next: operations.length === limit ? operations.at(-1)!.number + 1 : null };
            }),
          ],
          ['POST', /^\/control\/batches\/close$/, control(() => ({ batches: closeAllBatches() }))],
          ['GET', /^\/control\/disputes$/, control(async () => ({ disputes: await processor.listDisputes(null) }))],
          [
            'POST',
            /^\/control\/disputes\/([0-9A-Za-z_-]{1,64})$/,
            control(({ parameters: [disputeId = ''], body }) => {
              const dispute = processor.changeDispute(now(), disputeId, {
                ...(body.status !== undefined && { status: oneOf('status', body.status, ['debited', 'in_dispute', 'lost', 'recovered']) }),
                ...(body.stage !== undefined && {
                  stage: oneOf('stage', body.stage, ['retrieval', 'chargeback', 'representment', 'pre_arbitration', 'arbitration']),
                }),
              });
              if (!dispute) throw new Refusal(404, 'not_found', 'no such dispute');
              return { dispute };
            }),
          ],
        ] as const)
      : []),
  ];

  const route = async (request: IncomingMessage, response: ServerResponse): Promise<Reply> => {
    const [, path = '', query = ''] = /^([^?]*)\??(.*)$/s.exec(request.url ?? '') ?? [];
    if (request.method === 'GET' && path === '/healthz') return { status: 200, body: { service: SERVICE, ok: true } };
    const controlled = path.startsWith('/control/');
    if (controlled && controls) refuseOthers(request.headers.authorization, controlKey);
    const merchantAccount = controlled ? '' : callerOf(request.headers.authorization);
    const ahead = request.headers[AHEAD_HEADER];
    if (controls && !controlled && ahead !== undefined && isLoopback((request.socket.remoteAddress ?? '').replace(/^::ffff:/, '')))
      await hear(integer(AHEAD_HEADER, ahead, 0, Number.MAX_SAFE_INTEGER, 0));
    for (const [method, pattern, handler] of routes) {
      const parameters = method === request.method && pattern.exec(path)?.slice(1);
      if (!parameters) continue;
      if (method === 'POST' && !/^application\/json\b/i.test(request.headers['content-type'] ?? 'application/json'))
        throw new Refusal(415, 'not_json', 'send JSON');
      return handler({
        merchantAccount,
        parameters,
        query: new URLSearchParams(query),
        body: method === 'POST' ? await readBody(request) : {},
        response,
      });
    }
    throw new Refusal(404, 'not_found', 'no such call');
  };

  const serve = async (request: IncomingMessage, response: ServerResponse): Promise<void> => {
    try {
      const reply = await route(request, response);
      if (reply) send(response, reply.status, reply.body);
    } catch (error) {
      if (error instanceof Refusal && error.code !== 'stopping')
        return send(response, error.status, { error: { code: error.code, message: error.message } });
      // The outcome is uncertain. Send no answer and cut the connection.
      response.socket?.destroy();
      if (error instanceof Refusal || request.errored) return;
      onLog(`a call failed: ${error instanceof Error ? (error.stack ?? error.message) : 'unknown'}`);
      if (error instanceof StoreFailed) onFailure(error);
    }
  };

  const inFlight = new Set<Promise<void>>();
  const server = createServer({ keepAliveTimeout: KEEP_ALIVE_MS, requestTimeout: REQUEST_TIMEOUT_MS }, (request, response) => {
    const served = serve(request, response).finally(() => inFlight.delete(served));
    inFlight.add(served);
  });

  const stop = async () => {
    stopping.abort();
    const closed = new Promise<void>((resolve) => server.close(() => resolve()));
    server.closeIdleConnections();
    const graceOver = new AbortController();
    await Promise.race([Promise.allSettled([...inFlight]), systemClock.sleep(STOP_GRACE_MS, graceOver.signal)]);
    graceOver.abort();
    server.closeAllConnections();
    await closed;
    await store.close();
  };

  try {
    await new Promise<void>((resolve, reject) => server.once('error', reject).listen(port, host, resolve));
  } catch (error) {
    await store.close();
    throw error;
  }
  const address = server.address() as AddressInfo;
  const url = `http://${address.family === 'IPv6' ? `[${address.address}]` : address.address}:${address.port}`;
  const addressFile = join(directory, ADDRESS_FILE);
  writeOwnFile(addressFile, JSON.stringify({ url, pid: process.pid }));

  const daily = closeBatchesAt === null ? Promise.resolve() : closeDaily(closeBatchesAt).catch(onFailure);
  const forgetting = forgetOld().catch((error: Error) => {
    if (!stopping.signal.aborted) onFailure(error);
  });

  let closing: Promise<void> | null = null;
  return {
    url,
    controlKey,
    close: () =>
      (closing ??= (async () => {
        await unlink(addressFile).catch(() => undefined);
        await stop();
        await Promise.all([daily, forgetting]);
      })()),
  };
};

const send = (response: ServerResponse, status: number, body: unknown): void => {
  if (response.destroyed || response.headersSent) return;
  const bytes = Buffer.from(JSON.stringify(body));
  response.writeHead(status, { 'content-type': 'application/json', 'content-length': bytes.length }).end(bytes);
};

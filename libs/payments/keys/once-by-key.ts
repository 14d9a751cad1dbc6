/** `onceByKey`: claims a request's key, runs the request, finishes the key (C12–C20). */
import { type LogGate, StoreIncident, Unavailable } from '#eventstore';
import { type Ids, internalError, nothingBegun, ServiceError } from '#kernel';
import { isReadOnly, type Logger, type PersonalKey, type PersonalKeys, type SandboxTime } from '#platform';
import type { RecordedKey } from '../payment.js';
import { type AnswerPlace, boxedAnswer, openedAnswer } from '../personal.js';
import type { Claims } from './claims.js';
import {
  type Claim,
  type ClaimRequest,
  type HoldsKey,
  type IdempotencyStore,
  type KeyAttempt,
  type KeyName,
  MAX_RETRY_AFTER_SECONDS,
  type Operation,
  type Owned,
  type KeyEnding,
  type StoredAnswer,
} from './key-store.js';

/** Encodes answers as the edge sends them. A replay sends the same bytes. */
export interface AnswerEncoder {
  success(view: unknown): StoredAnswer;
  failure(error: ServiceError): StoredAnswer;
}

export interface KeyPorts {
  readonly ownLog: LogGate;
  readonly claims: Claims;
  readonly idempotency: IdempotencyStore;
  readonly answers: AnswerEncoder;
  readonly personal: Pick<PersonalKeys, 'open'>;
  readonly ids: Ids;
  readonly log: Logger;
}

/**
 * `replayed`: an earlier request executed this. The edge then marks the answer as a replay (specification, Idempotency 1). `key`: seals the stored
 * answer. Null or absent: the answer has no personal data.
 */
export interface Executed<View> {
  readonly view: View;
  readonly replayed: boolean;
  readonly key?: PersonalKey | null;
}

/** The view that a request made, or the stored answer of an earlier request under its key. A refusal is thrown as a ServiceError. */
export type Answered<View> = Executed<View> | { readonly stored: StoredAnswer };

export type Result<View> = { readonly view: View; readonly key?: PersonalKey | null } | { readonly error: ServiceError };

/**
 * The owner of a claimed key. `recorded`: the key as the intent names it. `renew` binds the key to a new attempt and returns its id. `holds`: asks
 * whether the key still belongs to this attempt; null: the key cannot be lost without the log.
 */
export type Owner = Owned & { readonly recorded: RecordedKey; renew(): Promise<string>; readonly holds: HoldsKey | null };

/** The work of a claimed request. It throws refusals as ServiceErrors. */
export interface KeyedWork<View> {
  /** Executes the request. `owner`: the claim with its payment and attempt; null: the request has no key. */
  run(owner: Owner | null): Promise<Executed<View>>;
  /**
   * Finishes a create whose owner vanished, from its stream. The create is never executed again (T7). Refunds and voids continue in `run` instead.
   */
  takeOver?(owner: Owned): Promise<Result<View> | 'reserved' | 'cannot_tell'>;
  /** Makes the view of a boxed answer again from the stream, without the texts that were erased (C77). */
  viewAgain?(bound: { readonly paymentId: string; readonly attemptId: string }): Promise<View>;
  /** The refusal for a reserved key (C16, C64). */
  reconciliationRequired?(bound: KeyAttempt): Promise<ServiceError>;
}

/** Runs a request at most once for its key. A request without a key is run without this protection. Throws ServiceErrors only. */
export const onceByKey = async <View>(
  ports: KeyPorts,
  request: Omit<ClaimRequest, 'key'> & { readonly key: string | null },
  work: KeyedWork<View>,
): Promise<Answered<View>> => {
  const { idempotency, answers, claims, ids, log } = ports;
  const { key } = request;
  if (ports.ownLog.incident) return lookOnly(ports, key === null ? null : { ...request, key }, work, storeIncident);
  if (key === null) return valueOf(await resultOf(() => work.run(null), log));

  if (!claims.isOpen) await claims.begun();
  if (!claims.isOpen) return lookOnly(ports, { ...request, key }, work, idempotencyUnavailable);
  const claim = await idempotency.claim({ ...request, key }).catch((error: unknown) => {
    log.warn({ err: error }, 'the idempotency store did not answer a claim');
    throw idempotencyUnavailable();
  });
  switch (claim.kind) {
    case 'mismatch':
      throw mismatch();
    case 'in_progress':
      throw inProgress(claim.retryAfterSeconds);
    case 'replay':
      return { stored: await replayed(ports, request.operation, claim, work).catch(failedInside(log)) };
    case 'reserved':
      throw await work.reconciliationRequired!(claim);
    case 'owned':
      break;
  }
  const name = idempotency.name(request.accountId, key);
  const owned = claim;
  if (!claims.isOpen) {
    // Claims were closed while this claim waited for a connection. A new row is deleted, since it may hide a lost row of the same key.
    if (!owned.tookOver) await finishOrLeave(ports, name, owned, { to: 'given_back' });
    throw idempotencyUnavailable();
  }
  if (owned.tookOver && work.takeOver) return finishTakenOver(ports, name, owned, request.operation, work);

  let { attemptId } = owned;
  const renew = async (): Promise<string> => {
    const renewed = ids.uuid();
    if (!(await idempotency.renewAttempt(name, owned.fence, renewed))) throw inProgress(MAX_RETRY_AFTER_SECONDS);
    attemptId = renewed;
    return renewed;
  };
  const holds: HoldsKey | null = claims.mayBeLost ? (intent) => idempotency.holds(name, owned.fence, attemptId, intent) : null;
  const result = await resultOf(() => work.run({ ...owned, recorded: idempotency.recorded({ ...request, key }), renew, holds }), log);
  const ending = endingOf({ paymentId: owned.paymentId, operation: request.operation }, result, answers);
  // After a refused retry, the key stays bound to the attempt of the first try (C17). Otherwise the next retry could return money a second time.
  const stillBound = owned.tookOver && ending.to === 'given_back';
  await finishOrLeave(ports, name, owned, stillBound ? { to: 'released' } : ending);
  return valueOf(result);
};

/**
 * Answers during an incident of the event store, or while claims are closed. No request begins then (C76). Gives the key's stored answer again.
 * Without one, throws `otherwise()`: the log or the key store may have lost the key's request.
 */
const lookOnly = async <View>(
  ports: KeyPorts,
  request: ClaimRequest | null,
  work: KeyedWork<View>,
  otherwise: () => ServiceError,
): Promise<Answered<View>> => {
  const found = request && (await ports.idempotency.look(request).catch(() => null));
  const stored = found?.kind === 'replay' ? await replayed(ports, request!.operation, found, work).catch(() => null) : null;
  if (stored) return { stored };
  if (found?.kind === 'mismatch') throw mismatch();
  // The payment of the key is named also in an incident. The answer never invites to charge again (C74).
  if (found?.kind === 'reserved' && ports.ownLog.incident) throw await work.reconciliationRequired!(found);
  throw otherwise();
};

/** Finishes the key. If that fails, only logs a warning. After the lease, a takeover finishes the key from the payment's stream (S5). */
const finishOrLeave = ({ idempotency, log }: KeyPorts, name: KeyName, { fence }: Owned, ending: KeyEnding): Promise<unknown> =>
  idempotency.finish(name, fence, ending).catch((error: unknown) => log.warn({ err: error }, 'an idempotency key could not be finished'));

/** T7: the stream decides the result of a create whose owner vanished. */
const finishTakenOver = async <View>(
  ports: KeyPorts,
  name: KeyName,
  owned: Owned,
  operation: Operation,
  work: KeyedWork<View>,
): Promise<Answered<View>> => {
  const found = await work.takeOver!(owned).catch((error: unknown) => {
    if (error instanceof StoreIncident) throw storeIncident();
    ports.log.warn({ err: error }, 'a create that was taken over cannot be finished yet');
    return 'cannot_tell' as const;
  });
  if (found === 'cannot_tell') throw inProgress(MAX_RETRY_AFTER_SECONDS);
  if (found === 'reserved') {
    await finishOrLeave(ports, name, owned, { to: 'reserved' });
    throw await work.reconciliationRequired!(owned);
  }
  const answer = toStore(found, ports.answers, { paymentId: owned.paymentId, operation });
  await finishOrLeave(ports, name, owned, { to: 'completed', answer });
  return { stored: encode(found, ports.answers) };
};

/** The answer of an earlier request, as it was sent. Where its texts were erased, it shows null (C77). Throws C19 if the keys cannot be read now. */
const replayed = async <View>(
  ports: KeyPorts,
  operation: Operation,
  { answer, paymentId, attemptId }: Extract<Claim, { kind: 'replay' }>,
  work: KeyedWork<View>,
): Promise<StoredAnswer> => {
  const open = (keyIds: readonly string[]) =>
    ports.personal.open(keyIds).catch((error: unknown) => {
      ports.log.warn({ err: error }, 'the key of a stored answer cannot be read now');
      throw idempotencyUnavailable();
    });
  const opened = await openedAnswer({ personal: { open } }, answer, { paymentId, operation });
  return opened ?? { status: answer.status, body: ports.answers.success(await work.viewAgain!({ paymentId, attemptId })).body };
};

const failedInside =
  (log: Logger) =>
  (error: unknown): never => {
    if (error instanceof ServiceError) throw error;
    if (error instanceof StoreIncident) throw storeIncident();
    if (error instanceof Unavailable) throw idempotencyUnavailable();
    log.error({ err: error }, 'a stored answer cannot be shown');
    throw internalError();
  };

/** C19. */
export const idempotencyUnavailable = () =>
  new ServiceError(
    'IDEMPOTENCY_UNAVAILABLE',
    'Requests with an Idempotency-Key cannot be processed safely at the moment; nothing was charged or refunded.',
    {},
    { retryAfterSeconds: 1 },
  );

/** C76. */
const INCIDENT_RETRY_SECONDS = 60;
export const storeIncident = () =>
  new ServiceError(
    'IDEMPOTENCY_UNAVAILABLE',
    'Payments cannot be processed safely at the moment; nothing was charged or refunded by this request.',
    {},
    { retryAfterSeconds: INCIDENT_RETRY_SECONDS },
  );

const timeIsMoved = () =>
  new ServiceError(
    'IDEMPOTENCY_UNAVAILABLE',
    'The time of this sandbox is being moved or cannot be read; nothing was charged or refunded by this request.',
    {},
    { retryAfterSeconds: 1 },
  );

/** Runs work that may move money. Refuses it while the time of a sandbox is being moved (docs/decisions/0048-two-clocks.md). */
export const atStableTime = <T>({ sandboxTime }: { readonly sandboxTime?: Pick<SandboxTime, 'run'> }, work: () => Promise<T>): Promise<T> =>
  sandboxTime ? sandboxTime.run(work, timeIsMoved) : work();

const mismatch = () => new ServiceError('IDEMPOTENCY_MISMATCH', 'This Idempotency-Key was used with a different request.');

export const inProgress = (retryAfterSeconds: number) =>
  new ServiceError('IDEMPOTENCY_IN_PROGRESS', 'The first request with this Idempotency-Key is still being processed.', {}, { retryAfterSeconds });

/** The end of a key after its request (C15–C17). */
const endingOf = (place: AnswerPlace, result: Result<unknown>, answers: AnswerEncoder): KeyEnding => {
  if ('view' in result || isFinal(result.error))
    // A void of a settled leg is refused without an event, so a takeover could not make this answer again. A later request could get another answer
    // (C27).
    return { to: 'completed', answer: toStore(result, answers, place), unrecorded: 'error' in result && result.error.code === 'VOID_FAILED' };
  const { code, status } = result.error;
  const refusedBeforeAnything = status === 501 || status === 503;
  if (status >= 500 && !refusedBeforeAnything) return { to: place.operation === 'create' ? 'reserved' : 'released' };
  // A takeover has fenced the stream or will fence it, so no request may begin under this key again.
  if (code === 'IDEMPOTENCY_RECONCILIATION_REQUIRED') return { to: 'reserved' };
  return { to: 'given_back' };
};

/** True if the key keeps this refusal as its answer: a decline, or a `VOID_FAILED` that no retry can change (C15). */
const isFinal = ({ code, details }: ServiceError): boolean =>
  code === 'PAYMENT_DECLINED' || (code === 'VOID_FAILED' && details.suggestedAction === 'refund');

const encode = (result: Result<unknown>, answers: AnswerEncoder): StoredAnswer =>
  'view' in result ? answers.success(result.view) : answers.failure(result.error);

/** The answer as the row of its key holds it: in a box, if it has personal data. */
export const toStore = (result: Result<unknown>, answers: AnswerEncoder, place: AnswerPlace): StoredAnswer =>
  boxedAnswer(encode(result, answers), 'view' in result ? (result.key ?? null) : null, place);

/** Logs a fault of ours with its cause. The caller gets only INTERNAL_ERROR. */
const resultOf = async <View>(run: () => Promise<Executed<View>>, log: Logger): Promise<Executed<View> | { readonly error: ServiceError }> => {
  try {
    return await run();
  } catch (error) {
    if (error instanceof ServiceError) return { error };
    // This request has sent no charge, refund or void to a gateway. Otherwise the error would be PAYMENT_TIMEOUT.
    if (error instanceof StoreIncident) return { error: storeIncident() };
    if (isReadOnly(error)) {
      log.warn({ err: error }, 'a request was refused: the database takes no writes');
      return { error: nothingBegun() };
    }
    log.error({ err: error }, 'a request failed inside');
    return { error: internalError() };
  }
};

const valueOf = <View>(result: Executed<View> | { readonly error: ServiceError }): Executed<View> => {
  if ('error' in result) throw result.error;
  return result;
};

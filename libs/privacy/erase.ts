/** Commands of staff: erase personal data of payments. */
import { type EventStore, execute, type Position, type ReadModel } from '#eventstore';
import { type Clock, type Ids, ServiceError, timestamp } from '#kernel';
import { paymentIdOf, staff } from '#payments';
import { type KeyRing, MAX_EMAIL_LENGTH, type Pool } from '#platform';
import { ERASURE_STREAM, type ErasureCause, type ReasonCode, REASON_CODES, subjectGroups } from './erasure.js';
import { destroyed } from './erasures.js';
import { mailMac, PAGE_PAYMENTS, paymentsOfMail } from './personal-use.js';
import { cutoffs, overduePayments, type RetentionPorts } from './retention.js';
import { judge, type Judged, type Obstacle, OBSTACLES } from './subjects.js';

export interface PrivacyPorts extends RetentionPorts {
  readonly store: EventStore;
  readonly db: Pool;
  readonly clock: Clock;
  readonly ids: Ids;
  readonly keys: KeyRing;
  /** The index of personal data, and the projection that destroys keys. */
  readonly models: { readonly use: ReadModel; readonly erasures: ReadModel };
  /** `ERASURES_DIR`. */
  readonly folder: string;
  /** Days for which backups are kept. */
  readonly backupDays: number;
}

/** The payments to erase: by id, by the e-mail address of the payer, or all whose retention is over. */
export type Chosen = { readonly payments: readonly string[] } | { readonly email: string } | 'retention';

export interface EraseRequest {
  readonly chosen: Chosen;
  readonly reasonCode: ReasonCode;
  readonly by: string;
  /** False: only the plan. Nothing is recorded. */
  readonly apply: boolean;
}

export interface Skipped {
  readonly paymentId: string;
  readonly why: Obstacle;
}

export interface ErasureAnswer {
  /** null: nothing was erased. */
  readonly erasureId: string | null;
  /** Number of payments whose personal data was erased by this command. Those of one checkout are erased together. */
  readonly erased: number;
  readonly skipped: readonly Skipped[];
  /** RFC 3339: from then on, no backup holds the keys. */
  readonly completeOn: string;
}

/** What {@link erase} would do. */
export interface ErasurePlan {
  readonly erasureId: null;
  readonly erased: 0;
  readonly wouldErase: number;
  /** The first payments, at most {@link PLANNED_SHOWN}. */
  readonly payments: readonly string[];
  readonly skipped: readonly Skipped[];
  readonly completeOn: string;
}

const PLANNED_SHOWN = 100;
/** How long to wait for the index to reach the head of the log. */
const CAUGHT_UP_MS = 30_000;
const DAY_MS = 86_400_000;
export const MAX_PAYMENTS_NAMED = 10_000;

/** Throws VALIDATION_ERROR for a text that is no e-mail address. The message does not repeat it. */
const refuseWrongEmail = (email: string): void => {
  if (email.length > MAX_EMAIL_LENGTH || !/^[^\s@]+@[^\s@]+$/.test(email.trim()))
    throw new ServiceError('VALIDATION_ERROR', 'The e-mail address must look like name@example.org.');
};

/**
 * Erases personal data, or plans it. Throws VALIDATION_ERROR; for a single payment PAYMENT_NOT_FOUND or INVALID_STATE if it has an obstacle; INVALID_STATE
 * if the index of personal data does not reach the head of the log that was read first; the errors of the store and of the database.
 */
export const erase = async (ports: PrivacyPorts, { chosen, reasonCode, by, apply }: EraseRequest): Promise<ErasureAnswer | ErasurePlan> => {
  const origin = staff(by, ports.ids.uuid());
  if (!REASON_CODES.includes(reasonCode)) throw new ServiceError('VALIDATION_ERROR', `reasonCode must be one of ${REASON_CODES.join(', ')}.`);
  await useIsLevel(ports);
  const erasureId = ports.ids.uuid();
  const skipped: Skipped[] = [];
  const planned: string[] = [];
  const erased = new Set<string>();
  let loaded = { id: erasureId, state: ERASURE_STREAM.decider.initial, revision: null as bigint | null, position: null as Position | null };
  for await (const page of pagesOf(ports, chosen)) {
    const judged = await judge(ports, page, ports.clock.now());
    if (typeof chosen === 'object' && 'payments' in chosen && chosen.payments.length === 1) refuseObstacle(judged[0]!);
    skipped.push(...judged.flatMap(({ paymentId, obstacle }) => (obstacle === null ? [] : [{ paymentId, why: obstacle }])));
    for (const { paymentId, subjects } of judged) {
      // A payment of the same checkout may have been recorded with an earlier page.
      if (subjects.length === 0 || erased.has(paymentId)) continue;
      if (planned.length < PLANNED_SHOWN) planned.push(paymentId);
      for (const { stream } of subjects) if (stream.startsWith(PAYMENTS)) erased.add(paymentIdOf(stream));
    }
    if (apply)
      for (const subjects of subjectGroups(judged)) {
        const command = { type: 'Erase', erasureId, cause: causeOf(chosen), reasonCode, subjects } as const;
        loaded = await execute(ports, ERASURE_STREAM, loaded, [command], origin);
      }
  }
  const completeOn = completeOnOf(ports);
  if (!apply) return { erasureId: null, erased: 0, wouldErase: erased.size, payments: planned, skipped, completeOn };
  if (loaded.position !== null) await destroyed(ports, loaded.position, { erasureId });
  return { erasureId: erased.size === 0 ? null : erasureId, erased: erased.size, skipped, completeOn };
};
const PAYMENTS = 'payment-';

const causeOf = (chosen: Chosen): ErasureCause => (chosen === 'retention' ? 'retention' : 'email' in chosen ? 'email' : 'payment');

export const completeOnOf = ({ clock, backupDays }: Pick<PrivacyPorts, 'clock' | 'backupDays'>): string =>
  timestamp(clock.now() + backupDays * DAY_MS);

/** Brings the index up to the head of the log. A use that it does not know would stay readable. */
const useIsLevel = async ({ readModels, models }: Pick<PrivacyPorts, 'readModels' | 'models'>): Promise<void> => {
  try {
    await readModels.caughtUp(models.use, CAUGHT_UP_MS);
  } catch (error) {
    throw new ServiceError(
      'INVALID_STATE',
      `The index of personal data has not reached the end of the log, so nothing was erased: ${(error as Error).message}.`,
    );
  }
};

const refuseObstacle = ({ paymentId, obstacle }: Judged): void => {
  if (obstacle === 'not_found') throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
  if (obstacle !== null) throw new ServiceError('INVALID_STATE', `${OBSTACLES[obstacle]}.`, { paymentId, why: obstacle });
};

async function* pagesOf(ports: PrivacyPorts, chosen: Chosen): AsyncGenerator<readonly string[], void, void> {
  if (chosen === 'retention') return yield* overduePayments(ports, await cutoffs(ports));
  if ('email' in chosen) return yield* mailPages(ports, chosen.email);
  const ids = [...new Set(chosen.payments)];
  if (ids.length > MAX_PAYMENTS_NAMED) throw new ServiceError('VALIDATION_ERROR', `Name at most ${MAX_PAYMENTS_NAMED} payments.`);
  for (let from = 0; from < ids.length; from += PAGE_PAYMENTS) yield ids.slice(from, from + PAGE_PAYMENTS);
}

async function* mailPages({ db, keys }: PrivacyPorts, email: string): AsyncGenerator<readonly string[], void, void> {
  refuseWrongEmail(email);
  const mac = mailMac(keys, email);
  for (let before: string | null = null; ;) {
    const page: readonly string[] = await paymentsOfMail(db, mac, before, PAGE_PAYMENTS);
    if (page.length > 0) yield page;
    if (page.length < PAGE_PAYMENTS) return;
    before = page.at(-1)!;
  }
}

/** The hash by which payments of an e-mail address are found. The index holds all that happened before. Throws VALIDATION_ERROR. */
export const hashOfMail = async (ports: Pick<PrivacyPorts, 'keys' | 'readModels' | 'models'>, email: string): Promise<Buffer> => {
  refuseWrongEmail(email);
  await useIsLevel(ports);
  return mailMac(ports.keys, email);
};

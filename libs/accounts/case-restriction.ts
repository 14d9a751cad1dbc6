/**
 * An agency's restriction of one case: its payments are blocked or held. A case is a `referenceId` of payments of a portal (specification, Errors 2).
 * The stream is `case-<portalId>-<first 32 hex digits of SHA-256 of the reference id>`. Its events have both ids in full.
 */
import { type Decider, isSamePersonal, type Personal, ServiceError, unreachable } from '#kernel';

/** Longest `referenceId` of a payment (specification, Limits), in UTF-16 units. */
export const MAX_REFERENCE_LENGTH = 255;
/** Longest reason of a restriction, in UTF-16 units. */
export const MAX_REASON_LENGTH = 1_000;

export interface Restriction {
  /** `blocked` → PAYMENT_BLOCKED, `held` → PAYMENT_HELD. */
  readonly kind: 'blocked' | 'held';
  /** End of the restriction, RFC 3339, exclusive. null: in force until it is removed. */
  readonly until: string | null;
}

/** A restriction with its reason, in a box. */
export interface CaseRestriction extends Restriction {
  readonly personal: Personal<CaseReason>;
}

export interface CaseReason {
  readonly reason: string;
}

/** The context of the box of a case's reason. `caseId`: the id of its stream. */
export const caseReasonContext = (caseId: string): string => `case-${caseId}/reason`;

// Events.

interface CaseName {
  readonly portalId: string;
  readonly referenceId: string;
}

export type CaseEvent =
  | {
      readonly type: 'CaseBlocked' | 'CaseHeld';
      readonly data: CaseName & { readonly until: string | null; readonly personal: Personal<CaseReason> };
    }
  | { readonly type: 'CaseAllowed'; readonly data: CaseName & { readonly personal: Personal<CaseReason> } };

// State.

export interface Case {
  readonly portalId: string;
  readonly referenceId: string;
  /** null: no restriction. */
  readonly restriction: CaseRestriction | null;
}

const evolve = (_: Case | null, event: CaseEvent): Case => {
  const { portalId, referenceId } = event.data;
  switch (event.type) {
    case 'CaseBlocked':
    case 'CaseHeld': {
      const { until, personal } = event.data;
      return { portalId, referenceId, restriction: { kind: event.type === 'CaseBlocked' ? 'blocked' : 'held', until, personal } };
    }
    case 'CaseAllowed':
      return { portalId, referenceId, restriction: null };
    default:
      return unreachable(event);
  }
};

/**
 * The strictest restriction in force at a moment, of those of a case and of its look-alikes (C53). Blocked is stricter than held, then the latest end
 * counts. null: there is none, or all have ended.
 */
export const restrictionInForce = (restrictions: readonly Restriction[], epochMs: number): Restriction | null => {
  const endOf = ({ until }: Restriction) => (until === null ? Number.POSITIVE_INFINITY : Date.parse(until));
  const rank = (one: Restriction) => (one.kind === 'blocked' ? 1 : 0);
  const inForce = restrictions.filter((one) => epochMs < endOf(one));
  return inForce.sort((one, other) => rank(other) - rank(one) || endOf(other) - endOf(one) || 0)[0] ?? null;
};

// Commands. `at` is the present time, RFC 3339.

export type CaseCommand =
  | ({
      readonly type: 'BlockCase' | 'HoldCase';
      readonly until: string | null;
      readonly personal: Personal<CaseReason>;
      readonly at: string;
    } & CaseName)
  | ({ readonly type: 'AllowCase'; readonly personal: Personal<CaseReason> } & CaseName);

const decide = (state: Case | null, command: CaseCommand): readonly CaseEvent[] => {
  const { portalId, personal } = command;
  const referenceId = validReference(command.referenceId);
  const present = state?.restriction ?? null;
  if (command.type === 'AllowCase') return present ? [{ type: 'CaseAllowed', data: { portalId, referenceId, personal } }] : [];

  const { until, at } = command;
  if (until !== null && !(Date.parse(until) > Date.parse(at))) throw new ServiceError('VALIDATION_ERROR', 'until must lie in the future.');
  const kind = command.type === 'BlockCase' ? 'blocked' : 'held';
  if (present?.kind === kind && present.until === until && isSamePersonal(present.personal, personal)) return [];
  return [{ type: kind === 'blocked' ? 'CaseBlocked' : 'CaseHeld', data: { portalId, referenceId, until, personal } }];
};

const UNSTORABLE = /[\0\p{Surrogate}]/u;

/** Checks the rules for the `referenceId` of a payment (C8). */
const validReference = (referenceId: string): string => {
  if (referenceId.length < 1 || referenceId.length > MAX_REFERENCE_LENGTH)
    throw new ServiceError('VALIDATION_ERROR', `referenceId must have 1 to ${MAX_REFERENCE_LENGTH} characters.`);
  if (UNSTORABLE.test(referenceId)) throw new ServiceError('VALIDATION_ERROR', 'referenceId must not hold NUL or lone surrogates.');
  return referenceId;
};

/** Checks a reason before it is sealed. Throws VALIDATION_ERROR. */
export const validReason = (reason: string | null): string | null => {
  if (reason === null) return null;
  if (reason.length < 1 || reason.length > MAX_REASON_LENGTH)
    throw new ServiceError('VALIDATION_ERROR', `reason must have 1 to ${MAX_REASON_LENGTH} characters.`);
  if (UNSTORABLE.test(reason)) throw new ServiceError('VALIDATION_ERROR', 'reason must not hold NUL or lone surrogates.');
  return reason;
};

export const caseRestriction: Decider<Case | null, CaseCommand, CaseEvent> = { initial: null, decide, evolve };

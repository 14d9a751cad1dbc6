/**
 * Remittances: money that the operator pays to an agency out of what it owes the agency (R20). Pure.
 *
 * All remittances of a portal share one stream, `remittance-<portalId>`, which keeps them in order. So two remittances
 * can never use the same money.
 */
import { type Cents, type Decider, lookAlike, ServiceError, unreachable, wrongDate } from '#kernel';
import { beginOf } from './days.js';

type Fact<Type extends string, Data> = { readonly type: Type; readonly at: string; readonly data: Data };

export type RemittanceEvent =
  /** The operator paid the agency. */
  | Fact<
      'AgencyRemitted',
      {
        readonly remittanceId: string;
        readonly portalId: string;
        readonly cents: Cents;
        /** Name of the payment at the bank. No two of a portal look alike. */
        readonly reference: string;
        /** YYYY-MM-DD: the day of the payment. */
        readonly on: string;
        /** True if a person allowed more than the funded part of the balance. */
        readonly advance: boolean;
        readonly by: string;
      }
    >
  /** A remittance was taken back, because it did not take place, or because the money came back. */
  | Fact<
      'AgencyRemittanceReversed',
      {
        readonly remittanceId: string;
        readonly portalId: string;
        readonly cents: Cents;
        /** YYYY-MM-DD: the day from which it counts as taken back. */
        readonly on: string;
        readonly reason: string;
        readonly by: string;
      }
    >;

export interface Remittance {
  readonly remittanceId: string;
  readonly cents: Cents;
  readonly on: string;
  readonly reference: string;
  readonly reversed: boolean;
}

/** The remittances of one portal, oldest first. */
export type Remittances = readonly Remittance[];

/**
 * The balance that we owe to an agency, in cents. The settled part is the balance less charges that are in no batch. The funded part is the settled
 * part less charges and adopted lines whose batch is not funded, less amounts that a batch settled too little, and less principal in open disputes. A
 * part is negative if more was paid than it holds.
 */
export interface Standing {
  readonly payableCents: number;
  readonly settledCents: number;
  readonly fundedCents: number;
}

export type RemittanceCommand =
  | { readonly type: 'Remit'; readonly at: string; readonly remittance: Extract<RemittanceEvent, { type: 'AgencyRemitted' }>['data']; readonly standing: Standing; readonly closedTo: string | null; readonly old: boolean } // prettier-ignore
  | { readonly type: 'Reverse'; readonly at: string; readonly portalId: string; readonly remittanceId: string; readonly on: string; readonly reason: string; readonly by: string; readonly closedTo: string | null; readonly old: boolean }; // prettier-ignore

/** The largest remittance, in cents. A larger amount is more likely a typing error. */
const MAX_REMITTANCE_CENTS = 100_000_000_000;

const refuseDay = (on: string, { at, closedTo, old }: RemittanceCommand, paidOn: string | null): void => {
  const why = wrongDate(on, Date.parse(at), { old, ...(paidOn !== null && { notBefore: { date: paidOn, what: 'the payment' } }) });
  if (why !== null) throw new ServiceError('VALIDATION_ERROR', `${why}.`);
  if (closedTo !== null && beginOf(on) < closedTo) throw new ServiceError('INVALID_STATE', `The books are closed to ${closedTo}; name a later day.`);
};

const decide = (remittances: Remittances, command: RemittanceCommand): readonly RemittanceEvent[] => {
  const { at } = command;
  if (command.type === 'Reverse') {
    const { portalId, remittanceId, on, reason, by } = command;
    const found = remittances.find((one) => one.remittanceId === remittanceId);
    if (!found) throw new ServiceError('INVALID_STATE', `The portal has no remittance ${remittanceId}.`);
    if (found.reversed) throw new ServiceError('INVALID_STATE', `Remittance ${remittanceId} was taken back already.`);
    refuseDay(on, command, found.on);
    return [{ type: 'AgencyRemittanceReversed', at, data: { remittanceId, portalId, cents: found.cents, on, reason, by } }];
  }
  const { remittance, standing } = command;
  const { cents, reference, on, advance } = remittance;
  if (!Number.isSafeInteger(cents) || cents < 1 || cents > MAX_REMITTANCE_CENTS)
    throw new ServiceError('VALIDATION_ERROR', `A remittance has 1 to ${MAX_REMITTANCE_CENTS} cents.`);
  refuseDay(on, command, null);
  const same = remittances.find((one) => lookAlike(one.reference) === lookAlike(reference));
  if (same)
    throw new ServiceError('INVALID_STATE', `Remittance ${same.remittanceId} of ${same.cents} cents has the reference ${same.reference} already.`, {
      remittanceId: same.remittanceId,
    });
  if (cents > standing.fundedCents && !advance)
    throw new ServiceError(
      'INVALID_STATE',
      `${cents} cents are more than the funded part: ${standing.payableCents} payable, of it ${standing.settledCents} settled, of it ${standing.fundedCents} funded. Only an advance (--advance) may pay more.`,
      { ...standing },
    );
  return [{ type: 'AgencyRemitted', at, data: remittance }];
};

const evolve = (remittances: Remittances, event: RemittanceEvent): Remittances => {
  const { remittanceId, cents } = event.data;
  switch (event.type) {
    case 'AgencyRemitted':
      return [...remittances, { remittanceId, cents, on: event.data.on, reference: event.data.reference, reversed: false }];
    case 'AgencyRemittanceReversed':
      return remittances.map((one) => (one.remittanceId === remittanceId ? { ...one, reversed: true } : one));
    default:
      return unreachable(event);
  }
};

export const remittances: Decider<Remittances, RemittanceCommand, RemittanceEvent> = { initial: [], decide, evolve };

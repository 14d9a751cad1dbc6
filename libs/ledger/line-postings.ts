/**
 * What the rows of the line-item register say about the accounts of the books. The tie compares this with the journal (libs/audit/tie.ts). Pure, and
 * without any code of the journal.
 */
import { unreachable } from '#kernel';
import type { Family, Movement } from './line-movements.js';

/** The sums of rows that agree in the other fields. Postings are linear in the cents, so those of a sum are the sums of the postings. */
export interface LineSums extends Pick<Movement, 'movement' | 'rule' | 'merchantAccount' | 'portalId' | 'ledgerAccount'> {
  readonly principalCents: number;
  readonly feeCents: number;
  readonly processorFeeCents: number;
}

export interface LinePosting {
  readonly account: string;
  readonly rule: string;
  /** Debit positive. */
  readonly cents: number;
}

/** A name in the name of an account: other characters than these are written as their code. */
const named = (text: string | null): string =>
  (text ?? '').replace(/[^\w.@+-]/g, (character) => `%${character.charCodeAt(0).toString(16).padStart(2, '0')}`);

const BANK = 'assets:bank:operating';

/** What the rows post, without zeros. */
export const postingsOf = ({ movement, rule, merchantAccount, portalId, ledgerAccount, ...cents }: LineSums): LinePosting[] => {
  const { principalCents: principal, feeCents: fee, processorFeeCents: processorFee } = cents;
  const both = principal + fee;
  const [mid, portal] = [named(merchantAccount), named(portalId)];
  const unsettled = `assets:processor:${mid}:unsettled`;
  const inTransit = `assets:processor:${mid}:in_transit`;
  const disputes = `assets:disputes:${mid}`;
  const suspense = `liabilities:suspense:${mid}`;
  const payable = `liabilities:agency:${portal}:payable`;
  const serviceFee = `revenue:service_fee:${portal}`;
  const loss = `expense:chargeback_loss:${portal}`;
  const postings: LinePosting[] = [];
  const post = (account: string, sum: number, of: string = rule) => {
    if (sum !== 0) postings.push({ account, rule: of, cents: sum });
  };
  /** Money that agency and operator bear, by its parts. */
  const borne = () => {
    post(payable, -principal);
    post(loss, -fee);
  };
  if (rule !== 'R13' && rule !== 'R17') {
    post(inTransit, processorFee, 'R5');
    post(`expense:processing:${mid}`, -processorFee, 'R5');
  }
  switch (rule) {
    case 'R1':
      post(unsettled, principal);
      post(payable, -principal);
      post(unsettled, fee, 'R2');
      post(serviceFee, -fee, 'R2');
      break;
    case 'R3':
    case 'R14':
      post(unsettled, both);
      post(payable, -principal);
      post(serviceFee, -fee);
      break;
    case 'R7':
      post(unsettled, principal);
      post(payable, -principal);
      post(unsettled, fee, 'R8');
      post(`revenue:service_fee_refunded:${portal}`, -fee, 'R8');
      break;
    case 'R4':
    case "R4'":
    case 'R21':
      post(inTransit, both);
      post(unsettled, -both);
      break;
    case 'R6':
      post(inTransit, principal);
      post(BANK, -principal);
      break;
    case "R6'":
      post(inTransit, principal);
      post(payable, -principal);
      break;
    case 'R9':
    case 'R12':
      post(disputes, -both);
      post(inTransit, both);
      break;
    case 'R11':
      borne();
      post(disputes, both);
      break;
    case "R12'":
      borne();
      post(inTransit, both);
      break;
    case "R12''":
      // Two movements: the loss is taken back, and the dispute is open again.
      if (movement === 'dispute_won_back') borne();
      else post(disputes, -both);
      break;
    case 'R13':
      post(inTransit, processorFee);
      post(`expense:dispute_fee:${mid}`, -processorFee);
      break;
    case 'R15':
      post(inTransit, principal);
      post(suspense, -principal);
      break;
    case 'R16':
      post(suspense, both);
      if (movement === 'adopted') {
        post(payable, -principal);
        post(serviceFee, -fee);
      } else post(unsettled, -both);
      break;
    case 'R17': {
      const { column, sign } = columnOf(ledgerAccount!);
      post(ledgerAccount!, sign * cents[column]);
      break;
    }
    case 'R20':
      post(payable, -principal);
      post(BANK, principal);
      break;
    case 'R22':
      post(`assets:dispute_suspense:${mid}`, -principal);
      post(inTransit, principal);
      break;
    case 'R5': // posted above
      break;
    default:
      return unreachable(rule);
  }
  return postings;
};

interface AdjustedColumn {
  readonly family: Family;
  readonly column: 'principalCents' | 'feeCents' | 'processorFeeCents';
  /** −1: a debit of the account is negative in the column. */
  readonly sign: 1 | -1;
}

/** How an adjustment of an account stands in the register, by the beginning of the account's name. */
const ADJUSTED: readonly (readonly [account: RegExp, AdjustedColumn])[] = [
  [/^liabilities:agency:/, { family: 'owed', column: 'principalCents', sign: -1 }],
  [/^(?:revenue:|expense:chargeback_loss:)/, { family: 'owed', column: 'feeCents', sign: -1 }],
  [/^expense:/, { family: 'in_transit', column: 'processorFeeCents', sign: -1 }],
  [/^assets:processor:.*:in_transit$/, { family: 'in_transit', column: 'principalCents', sign: 1 }],
  [/^assets:dispute(?:s|_suspense):/, { family: 'disputes', column: 'principalCents', sign: -1 }],
  [/^liabilities:suspense:/, { family: 'suspense', column: 'principalCents', sign: 1 }],
  [/^/, { family: 'other', column: 'principalCents', sign: 1 }],
];

export const columnOf = (account: string): AdjustedColumn => ADJUSTED.find(([pattern]) => pattern.test(account))![1];

const OF_A_PORTAL =
  /^(?:liabilities:agency|revenue:service_fee|revenue:service_fee_refunded|expense:chargeback_loss):([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?::|$)/;

/** The portal whose account it is. null: it is no account of a portal. */
export const portalIn = (account: string): string | null => OF_A_PORTAL.exec(account)?.[1] ?? null;

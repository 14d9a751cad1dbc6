/**
 * The chart of accounts: the accounts, their kinds and their names. Pure.
 *
 * Parameters of the names: `mid` is a merchant account at the processor, `portalId` is the portal of one agency, and `bankAccount` names a bank
 * account. Amounts are USD in whole cents. A debit is positive.
 */

/** The kind of an account. Assets and expenses normally have a debit balance, all others a credit balance. */
export type AccountType = 'assets' | 'liabilities' | 'revenue' | 'expense' | 'equity';

/** The operator's bank account. All funding that does not go to an agency goes to this account. */
export const OPERATING_BANK = 'operating';

/** Escapes a name from outside. In hledger's text, a colon separates segments, and two spaces end the account's name. */
const segment = (text: string): string =>
  /^[\w.@+-]*$/.test(text) ? text : text.replace(/[^\w.@+-]/g, (character) => `%${character.charCodeAt(0).toString(16).padStart(2, '0')}`);

export const account = {
  /** Approved charges that are not settled yet. Refunds that wait for a batch can make the balance negative. */
  unsettled: (mid: string) => `assets:processor:${segment(mid)}:unsettled`,
  /** Settled money that is not funded yet. */
  inTransit: (mid: string) => `assets:processor:${segment(mid)}:in_transit`,
  /** The operator's bank account. It holds only funded money. */
  bank: (bankAccount: string) => `assets:bank:${segment(bankAccount)}`,
  /** Disputed money that the processor took back, while the dispute is open. */
  disputes: (mid: string) => `assets:disputes:${segment(mid)}`,
  /** Money that disputes took beyond what remained of the payment, since it was returned before. Staff decide about it. */
  disputeSuspense: (mid: string) => `assets:dispute_suspense:${segment(mid)}`,
  /** Principal that we owe to the agency. A debit balance means that the agency owes us. */
  payable: (portalId: string) => `liabilities:agency:${segment(portalId)}:payable`,
  /** Settlement lines that are not explained yet. */
  suspense: (mid: string) => `liabilities:suspense:${segment(mid)}`,
  /** Charged fees, less voided fees. */
  serviceFee: (portalId: string) => `revenue:service_fee:${segment(portalId)}`,
  /** Fees given back after settlement. They reduce revenue. */
  serviceFeeRefunded: (portalId: string) => `revenue:service_fee_refunded:${segment(portalId)}`,
  /** The processor's own fee for its service. */
  processing: (mid: string) => `expense:processing:${segment(mid)}`,
  disputeFee: (mid: string) => `expense:dispute_fee:${segment(mid)}`,
  /** Service fees lost in disputes. The operator bears them. The agency bears the lost principal. */
  chargebackLoss: (portalId: string) => `expense:chargeback_loss:${segment(portalId)}`,
  /** The other side of adjustments by hand. */
  adjustment: () => 'equity:adjustment',
} as const;

const SEGMENT = String.raw`(?:[\w.@+-]|%[0-9a-f]{2,4})+`;
const NAMES = new RegExp(
  `^(?:assets:processor:${SEGMENT}:(?:unsettled|in_transit)|assets:bank:${SEGMENT}|assets:(?:disputes|dispute_suspense):${SEGMENT}|liabilities:agency:${SEGMENT}:payable|` +
    `liabilities:suspense:${SEGMENT}|revenue:service_fee(?:_refunded)?:${SEGMENT}|expense:(?:processing|dispute_fee|chargeback_loss):${SEGMENT}|equity:adjustment)$`,
);

/** True if the text names an account of this chart. */
export const isAccount = (text: string): boolean => NAMES.test(text);

export const typeOf = (name: string): AccountType => name.slice(0, name.indexOf(':')) as AccountType;

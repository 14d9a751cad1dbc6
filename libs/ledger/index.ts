export type { AccountBalance } from './adjustment.js';
export { type Balance, balances, balancesBefore, bookSumCents, type Movement, movements, movementsByDay, suspenseCents } from './books.js';
export { account } from './chart.js';
export { PERIODS, RULE_CHANGES } from './events.js';
export {
  applyJournal,
  entriesAt,
  entriesOfPayments,
  entryLine,
  ISO,
  JOURNAL_END,
  JOURNAL_START,
  type JournalEntry,
  journalise,
  journalModel,
  journalPage,
  journalPages,
  journalPayments,
  type JournalPlace,
  linesOfPayments,
  policyAt,
  type PolicyFrom,
  readPolicies,
  rulePolicies,
} from './journal.js';
export { FIRST_FUNDING, lineRegisterModel } from './line-register.js';
export { type LineSums, postingsOf as linePostings } from './line-postings.js';
export { adjustBooks, changePostingRules, type Check, closePeriod, type PeriodPorts, recordedBalances, verifyPeriods } from './periods.js';
export {
  remit,
  type Remitted,
  type RemitPorts,
  type RemitRequest,
  type Reversed,
  reverseRemittance,
  type ReverseRemittanceRequest,
  standingOf,
} from './remit.js';
export { type Books, type Entry, firstRules, POSTING_RULES, type PostingRules, postPayment, postSettlement, type Rule } from './postings.js';
export { type Cell, csvLine, type JournalFormat, journalHeading, journalText, ndjsonLines } from './text.js';
export { partsOf } from './sums.js';

export { RULE_CHANGES } from './events.js';
export {
  applyJournal,
  balances,
  bookSumCents,
  entriesOfPayments,
  entryLine,
  ISO,
  JOURNAL_START,
  type JournalEntry,
  journalise,
  journalModel,
  journalPage,
  journalPayments,
  type JournalPlace,
  linesOfPayments,
  policyAt,
  type PolicyFrom,
  readPolicies,
  rulePolicies,
  suspenseCents,
} from './journal.js';
export { adjustBooks, changePostingRules, type Check, closePeriod, type PeriodPorts, verifyPeriods } from './periods.js';
export { type Books, type Entry, firstRules, POSTING_RULES, type PostingRules, postPayment, postSettlement, type Rule } from './postings.js';
export { type Cell, csvLine, type JournalFormat, journalHeading, journalText, ndjsonLines } from './text.js';

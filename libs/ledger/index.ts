export {
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
  type JournalPlace,
  linesOfPayments,
  suspenseCents,
} from './journal.js';
export { adjustBooks, type Check, closePeriod, type PeriodPorts, verifyPeriods } from './periods.js';
export { type Books, type Entry, postPayment, postSettlement, type Rule } from './postings.js';
export { type Cell, csvLine, type JournalFormat, journalHeading, journalText, ndjsonLines } from './text.js';

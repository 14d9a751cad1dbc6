/**
 * The journal and its figures as text for other tools: CSV (RFC 4180), NDJSON without loss, and hledger's plain text. No CSV cell works as a formula.
 * hledger is independent of our code, so it can check the sums of the books. Pure.
 */
import { decimal } from '#kernel';
import { withEscapes } from '#platform';
import type { JournalEntry } from './journal.js';
import { RULE_WORDS } from './postings.js';

export type Cell = string | number | boolean | null;

/**
 * A spreadsheet executes a text that begins like a formula, perhaps after blanks, line feeds or quotes, or with a full-width sign. Such a text gets an
 * apostrophe in front (ASVS 1.2.10). A text that begins with an apostrophe gets one more, so that no two texts share a cell. Numbers stay unchanged.
 */
const GUARDED = /^(?:'|[\s\p{Cc}\p{Cf}"]*[=+\-@＝＋－＠]|[\t\r])/u;
/**
 * The same after a character inside the text that ends a cell for some spreadsheets. For them, quotes in the middle of a field are ordinary characters,
 * so our quotes do not hold the text together.
 */
const GUARDED_INSIDE = /([;\t-\r\x85\u2028\u2029])(?='|(?:(?![\t-\r\x85\u2028\u2029])[\s\p{Cc}\p{Cf}"])*[=+\-@＝＋－＠])/gu;
/** A text that reads like one of our escapes. */
const LIKE_ESCAPE = /\\u[\da-f]{4}/;
/** Characters that need quotes. Some spreadsheets separate cells at `;` or a tab. */
const NEEDS_QUOTES = /[",;\t\r\n]/;

/** Most cells are ids, times and codes. Nothing in such a text begins a formula, ends a cell or needs quotes. */
const PLAIN = /^\w[\w.: -]*$/;

const csvCell = (value: Cell): string => {
  if (value === null) return '';
  if (typeof value !== 'string') return String(value);
  if (PLAIN.test(value)) return value;
  const inside = value.replace(GUARDED_INSIDE, "$1'");
  const guarded = GUARDED.test(value) ? `'${inside}` : inside;
  // Where a cell has escapes, each backslash of the text itself is doubled.
  const safe = withEscapes(LIKE_ESCAPE.test(withEscapes(guarded)) ? guarded.replaceAll('\\', '\\\\') : guarded);
  return NEEDS_QUOTES.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

export const csvLine = (cells: readonly Cell[]): string => `${cells.map(csvCell).join(',')}\r\n`;

/** Turns rows with these columns into lines of JSON. */
export const ndjsonLines = (columns: readonly string[]): ((cells: readonly Cell[]) => string) => {
  const names = columns.map((column, index) => `${index === 0 ? '{' : ','}${JSON.stringify(column)}:`);
  return (cells) => {
    let line = '';
    for (let index = 0; index < names.length; index++) line += names[index]! + JSON.stringify(cells[index]);
    return `${line}}\n`;
  };
};

export type JournalFormat = 'csv' | 'ndjson' | 'hledger';

const CSV_HEADINGS = [
  'position', 'entry_id', 'event_id', 'rule', 'description', 'payment_id', 'recorded_at', 'effective_at', 'booked_at', 'account', 'debit_cents', 'credit_cents',
]; // prettier-ignore

/** The text before the first entry. */
export const journalHeading = (format: JournalFormat): string =>
  format === 'csv' ? csvLine(CSV_HEADINGS) : format === 'hledger' ? '; USD\ncommodity USD 1000.00\n\n' : '';

/**
 * Returns a function that writes the entries of one text, in order. In CSV each posting is a line. In hledger's text each account is declared before
 * its first use, as `hledger check --strict` requires.
 */
export const journalText = (format: JournalFormat): ((entry: JournalEntry) => string) => {
  if (format !== 'hledger') return (entry) => entryText(format, entry);
  const declared = new Set<string>();
  return (entry) => {
    const used = entry.postings.map(({ account }) => account).filter((account) => !declared.has(account));
    for (const account of used) declared.add(account);
    const declarations = [...new Set(used)].map((account) => `account ${account}\n`).join('');
    return `${declarations === '' ? '' : `${declarations}\n`}${entryText(format, entry)}`;
  };
};

const entryText = (format: JournalFormat, one: JournalEntry): string => {
  const { position, entryId, eventId, rule, part, paymentId, recordedAt, effectiveAt, bookedAt, postings } = one;
  switch (format) {
    case 'csv':
      return postings
        .map(
          ({ account, cents }) =>
          csvLine([
            position, entryId, eventId, rule, RULE_WORDS[rule], paymentId, recordedAt, effectiveAt, bookedAt, account, Math.max(cents, 0), Math.max(-cents, 0),
          ]), // prettier-ignore
        )
        .join('');
    case 'ndjson':
      return `${JSON.stringify({ position, entryId, eventId, rule, part, description: RULE_WORDS[rule], paymentId, recordedAt, effectiveAt, bookedAt, postings })}\n`;
    case 'hledger': {
      const lines = [
        `${bookedAt.slice(0, 10)} * (${rule}) ${RULE_WORDS[rule]}${paymentId === null ? '' : ` | ${paymentId}`}`,
        `    ; entry: ${entryId}, event: ${eventId}, position: ${position}`,
        `    ; recorded: ${recordedAt}, effective: ${effectiveAt}`,
        ...postings.map(({ account, cents }) => `    ${account}  USD ${decimal(cents)}`),
      ];
      return `${lines.join('\n')}\n\n`;
    }
  }
};

/**
 * A verification pass: the sealed log, and what follows from it. `payfold audit verify` and the worker run the same pass.
 *
 * A full pass reads everything. An incremental pass begins at a signed head: it reads the events, tiles and heads after it, and compares the payments
 * that changed since then, the days of the journal since then, the line items since then, and the periods that were closed since then.
 *
 * A pass is done in pages. Its state is plain JSON, so another process can go on after the last page whose state was stored. No transaction lasts
 * longer than a page.
 */
import { UnreadableEvent } from '#eventstore';
import { type Check, verifyPeriods } from '#ledger';
import type { Pool } from '#platform';
import { type BooksPlace, checkBooks } from './check-books.js';
import {
  checkOtherEntries,
  checkPayments,
  checkRead,
  type Checked,
  type CountedPart,
  type Difference,
  type DriftKind,
  type DriftPorts,
  newestPaymentId,
  readCheckpoints,
  readPages,
} from './drift.js';
import { checkTie } from './tie.js';
import {
  checkOf,
  find,
  type Findings,
  LOG_START,
  logChecks,
  type LogPlace,
  type LogProgress,
  logProgress,
  LogVerification,
  noFindings,
  type VerifyPorts,
} from './verify.js';

export interface PassPorts extends VerifyPorts, DriftPorts {
  readonly db: Pool;
}

type PassStep = 'log' | 'payments' | 'entries' | 'books' | 'lines' | 'periods' | 'done';

/** The state of a pass, as plain JSON. */
export interface PassState {
  readonly full: boolean;
  step: PassStep;
  readonly log: LogProgress;
  /** Root over the events that were read, base64. */
  root: string;
  /** Journal entries of events up to this position are counted. */
  readonly journal: string;
  /** A full pass compares payments up to this id. */
  readonly lastPayment: string | null;
  payment: string | null;
  payments: number;
  /** Full pass: number of compared payments with their first event in the verified part of the log. */
  begun: number;
  /** Settlement, exceptions and adjustments were compared up to this position. */
  others: string;
  /** Number of journal entries that follow from the events. */
  entries: number;
  books: BooksPlace | null;
  /** The line-item register is compared with the journal up to `tied`. The pass compares it up to `lines`. */
  tied: string;
  readonly lines: string;
  /** The result of the check of closed periods. */
  periods: string;
  readonly found: {
    readonly models: Findings;
    readonly journal: Findings;
    readonly balances: Findings;
    /** Warnings. */
    readonly before: Findings;
    readonly books: Findings;
    readonly lines: Findings;
    readonly periods: Findings;
  };
}

/** The settings of a pass. A worker reads small pages and pauses between them. */
export interface PassOptions {
  /** Number of events whose hashes are compared in a page. */
  readonly eventsAtOnce: number;
  /** Number of payments that are compared between two calls of `goOn`. */
  readonly paymentsAtOnce: number;
  /** Awaited within pages, so that other work can go on. May throw to end the pass. */
  readonly goOn?: () => Promise<void>;
  /** Called with the result of each group of payments. */
  readonly onCompared?: (ids: readonly string[], checked: Checked) => Promise<void>;
  readonly onProgress?: (what: 'events' | 'payments', done: number) => void;
}

/**
 * The state of a pass that begins after `from` (null: a full pass) and ends at `end`. The read models should have applied all events up to `end`. What
 * is added later is not compared.
 */
export const beginPass = async (ports: PassPorts, from: LogPlace | null, end: LogPlace): Promise<PassState> => {
  const { journal: applied, lines } = await readCheckpoints(ports);
  // The next incremental pass may begin at the end of this one. So this one counts no later entry, else it would count twice.
  const journal = from !== null && end.position < applied ? end.position : applied;
  const begin = from ?? LOG_START;
  return {
    full: from === null,
    step: 'log',
    log: logProgress(begin, end),
    root: '',
    journal,
    lastPayment: from === null ? await newestPaymentId(ports.db) : null,
    payment: null,
    payments: 0,
    begun: 0,
    others: begin.position,
    entries: 0,
    books: null,
    tied: begin.position,
    lines: lines < journal ? lines : journal,
    periods: '',
    found: {
      models: noFindings(),
      journal: noFindings(),
      balances: noFindings(),
      before: noFindings(),
      books: noFindings(),
      lines: noFindings(),
      periods: noFindings(),
    },
  };
};

const CHECK_OF: Readonly<Record<DriftKind, 'models' | 'journal' | 'balances' | 'before' | 'books' | 'lines'>> = {
  list: 'models',
  settlement: 'models',
  journal: 'journal',
  amounts: 'journal',
  balances: 'balances',
  balance_before: 'before',
  books: 'books',
  lines: 'lines',
};

const inWords = ({ paymentId, position, message }: Pick<Difference, 'paymentId' | 'position' | 'message'>): string =>
  `${paymentId === null ? '' : `payment ${paymentId}: `}${message}${position === null ? '' : ` (position ${position})`}`;

/** Runs a pass to its end. Yields after each page, when `state` may be stored. */
export const runPass = async function* (ports: PassPorts, state: PassState, options: PassOptions): AsyncGenerator<void, void, void> {
  while (state.step !== 'done') yield* STEPS[state.step](ports, state, options);
};

type Step = (ports: PassPorts, state: PassState, options: PassOptions) => AsyncGenerator<void, void, void>;

const STEPS: Readonly<Record<Exclude<PassStep, 'done'>, Step>> = {
  log: async function* (ports, state, options) {
    const { log } = state;
    const verification = new LogVerification(ports, log);
    while (!log.over) {
      const after = log.reached.position;
      const changed = await verification.next(options.eventsAtOnce);
      if (!state.full) {
        const until = log.reached.position < state.journal ? log.reached.position : state.journal;
        await comparePayments(ports, state, options, changed, { since: log.from.position, after, until });
      }
      options.onProgress?.('events', log.reached.size - log.from.size);
      if (log.over) {
        state.root = (await verification.root()).toString('base64');
        state.step = state.full ? 'payments' : 'entries';
      }
      await options.goOn?.();
      yield;
    }
  },

  payments: async function* (ports, state, options) {
    for await (const page of readPages(ports, state.payment, state.lastPayment, options.paymentsAtOnce)) {
      const checked = await checkRead(ports, page, { since: '', after: '', until: state.journal });
      await report(state, options, page.ids, checked);
      state.payments += page.ids.length;
      state.begun += page.streams.filter(([event]) => event && event.position <= state.log.end.position).length;
      state.entries += checked.entries;
      state.payment = page.ids.at(-1)!;
      options.onProgress?.('payments', state.payments);
      await options.goOn?.();
      yield;
    }
    const { payments: streams } = state.log;
    if (streams > state.begun) find(state.found.models, `the log holds ${streams} payments, list and journal know ${state.begun}`);
    state.step = 'entries';
    yield;
  },

  entries: async function* (ports, state, { goOn }) {
    for await (const { position, entries, differences } of checkOtherEntries(ports, state.others, state.journal)) {
      for (const difference of differences) find(state.found.journal, inWords(difference));
      state.entries += entries;
      state.others = position;
      await goOn?.();
      yield;
    }
    state.step = 'books';
    yield;
  },

  books: async function* ({ db }, state, { goOn }) {
    const { entries: expected, full } = state;
    const query = { after: state.log.from.position, until: state.journal, expected, full, ...(state.books && { place: state.books }) };
    for await (const { place, wrong } of checkBooks(db, query)) {
      for (const one of wrong) find(state.found.books, inWords({ paymentId: null, ...one }));
      state.books = place ?? state.books;
      await goOn?.();
      yield;
    }
    state.step = 'lines';
    yield;
  },

  lines: async function* ({ db }, state, { goOn }) {
    for await (const { position, wrong } of checkTie(db, state.tied, state.lines)) {
      for (const one of wrong) find(state.found.lines, inWords({ paymentId: null, ...one }));
      state.tied = position;
      await goOn?.();
      yield;
    }
    state.step = 'periods';
    yield;
  },

  periods: async function* (ports, state, { goOn }) {
    const { ok, detail } = await verifyPeriods(ports, { after: state.log.from.position, ...(goOn && { goOn }) }).catch((error: unknown) => {
      if (!(error instanceof UnreadableEvent)) throw error;
      return { ok: false, detail: error.message };
    });
    if (!ok) find(state.found.periods, detail);
    state.periods = detail;
    state.step = 'done';
    yield;
  },
};

const comparePayments = async (ports: PassPorts, state: PassState, options: PassOptions, changed: readonly string[], part: CountedPart) => {
  for (let from = 0; from < changed.length; from += options.paymentsAtOnce) {
    const ids = changed.slice(from, from + options.paymentsAtOnce);
    const checked = await checkPayments(ports, ids, part);
    await report(state, options, ids, checked);
    state.payments += checked.first;
    state.entries += checked.entries;
    options.onProgress?.('payments', state.payments);
    await options.goOn?.();
  }
};

const report = async (state: PassState, { onCompared }: PassOptions, ids: readonly string[], checked: Checked): Promise<void> => {
  for (const difference of checked.differences) find(state.found[CHECK_OF[difference.kind]], inWords(difference));
  await onCompared?.(ids, checked);
};

/** The results of a pass. Before its end: the results of the part that is done. */
export const passChecks = ({ log, found, payments, entries, full, periods }: PassState): Check[] => {
  const { before } = found;
  const warning = before.count === 0 ? '' : `; warning, disputes from before the rule: ${checkOf('', before, '').detail}`;
  const which = full ? 'payments' : 'changed payments';
  return [
    ...logChecks(log),
    checkOf('read models', found.models, `the list and the settlement of ${payments} ${which} equal their replay`),
    checkOf('journal', found.journal, `${entries} entries equal their replay`),
    checkOf('balances', found.balances, `no agency's balance of a payment is below 0 or above its principal${warning}`),
    checkOf('books', found.books, 'they sum to 0'),
    checkOf('lines', found.lines, 'the line items sum to the journal, by account, rule and day'),
    checkOf('periods', found.periods, periods),
  ];
};

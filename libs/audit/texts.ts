/**
 * Personal data in reports: the columns that are filled when a report is read, and only for a reader who may open them. The tables of reports hold no
 * such text.
 */
import { caseEvents, caseReasonContext } from '#accounts';
import { type EventStore, readStreams, type Recorded } from '#eventstore';
import { fold, keysIn, type Personal, type Reveal } from '#kernel';
import type { Cell } from '#ledger';
import {
  disputeContext,
  isVisible,
  keysOfPayment,
  payment as decider,
  paymentEvents,
  paymentIdOf,
  paymentStream,
  type Reason,
  termsContext,
  textOf,
  type VisiblePayment,
} from '#payments';
import type { PersonalKeys } from '#platform';

export type OpensKeys = Pick<PersonalKeys, 'open'>;

/** Number of streams that one statement reads. */
const STREAMS_AT_ONCE = 250;

type Row = readonly Cell[];
interface TextPorts {
  readonly store: EventStore;
  readonly personal: OpensKeys;
}

/** Fills one column of a page. `columns`: the names of the columns, in order. */
export type FillTexts = (ports: TextPorts, columns: readonly string[], rows: readonly Row[]) => Promise<readonly Row[]>;

/** The rows with a column that `textFor` fills where it is empty. */
const filled = (
  columns: readonly string[],
  rows: readonly Row[],
  name: string,
  textFor: (cell: (column: string) => Cell) => string | null,
): Row[] => {
  const place = columns.indexOf(name);
  return rows.map((row) => {
    const text = row[place] === null ? textFor((column) => row[columns.indexOf(column)]!) : null;
    return text === null ? row : row.with(place, text);
  });
};

const named = (columns: readonly string[], rows: readonly Row[], column: string): string[] => [
  ...new Set(rows.flatMap((row) => (row[columns.indexOf(column)] as string | null) ?? [])),
];

/** The events of streams, in the order of their names. */
const eventsOf = async (store: EventStore, streams: readonly string[]): Promise<ReadonlyMap<string, readonly Recorded[]>> => {
  const found = new Map<string, readonly Recorded[]>();
  for (let from = 0; from < streams.length; from += STREAMS_AT_ONCE) {
    const some = streams.slice(from, from + STREAMS_AT_ONCE);
    for (const [index, events] of (await readStreams(store, some)).entries()) found.set(some[index]!, events);
  }
  return found;
};

const paymentsOf = async (
  { store, personal }: TextPorts,
  ids: readonly string[],
): Promise<{ readonly payments: ReadonlyMap<string, VisiblePayment>; readonly reveal: Reveal }> => {
  const payments = new Map<string, VisiblePayment>();
  for (const [stream, events] of await eventsOf(store, ids.map(paymentStream))) {
    const payment = fold(decider, events.map(paymentEvents.read));
    if (isVisible(payment)) payments.set(paymentIdOf(stream), payment);
  }
  return { payments, reveal: await personal.open([...new Set([...payments.values()].flatMap(keysOfPayment))]) };
};

/** The descriptions of lines. */
export const fillDescriptions: FillTexts = async (ports, columns, rows) => {
  const { payments, reveal } = await paymentsOf(ports, named(columns, rows, 'payment_id'));
  return filled(columns, rows, 'description', (cell) => {
    const id = cell('payment_id') as string | null;
    const terms = id === null ? undefined : payments.get(id)?.terms;
    const index = terms?.lineItems.findIndex((line) => line.id === cell('line_id')) ?? -1;
    return index < 0 ? null : (reveal.content(terms!.personal, termsContext(id!))?.lines[index]?.description ?? null);
  });
};

/** The reasons of disputes. */
export const fillDisputeReasons: FillTexts = async (ports, columns, rows) => {
  const { payments, reveal } = await paymentsOf(ports, named(columns, rows, 'payment_id'));
  return filled(columns, rows, 'reason', (cell) => {
    const [id, disputeId] = [cell('payment_id') as string, cell('dispute_id') as string];
    const payment = payments.get(id);
    const dispute = payment?.phase === 'charged' ? payment.disputes.find((one) => one.disputeId === disputeId) : undefined;
    return dispute ? (reveal.content(dispute.personal, disputeContext(id, disputeId))?.reason ?? null) : null;
  });
};

/** The reasons that staff gave for refunds, voids, disputes and decisions about cases. */
export const fillStaffReasons: FillTexts = async ({ store, personal }, columns, rows) => {
  const streams = named(columns, rows, 'stream').filter((stream) => stream.startsWith(PAYMENTS) || stream.startsWith(CASES));
  const texts = new Map<string, { readonly personal: Personal<unknown>; readonly context: string }>();
  for (const events of (await eventsOf(store, streams)).values())
    for (const event of events) {
      const text = textOfAny(event);
      if (text) texts.set(event.id, text);
    }
  const wanted = new Set(named(columns, rows, 'event_id'));
  const reveal = await personal.open(keysIn([...texts].flatMap(([id, text]) => (wanted.has(id) ? [text.personal] : []))));
  return filled(columns, rows, 'reason', (cell) => {
    const text = texts.get(cell('event_id') as string);
    return (text && reveal.content(text.personal as Personal<Reason>, text.context)?.reason) ?? null;
  });
};

const PAYMENTS = paymentStream('');
const CASES = 'case-';

const textOfAny = (event: Recorded): ReturnType<typeof textOf> =>
  event.stream.startsWith(PAYMENTS)
    ? textOf(paymentIdOf(event.stream), paymentEvents.read(event))
    : { personal: caseEvents.read(event).data.personal, context: caseReasonContext(event.stream.slice(CASES.length)) };

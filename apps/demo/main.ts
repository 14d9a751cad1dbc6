/**
 * `npm run demo`: a mid-size city's back office (water bills, parking citations, permits). Like any partner, it uses the running service over HTTP.
 * At the end it compares the whole payment list with its own books, to the cent. Exit code 1 on any difference.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { SingleBar } from 'cli-progress';
import { NO_FEE } from '#accounts';
import { decimal } from '#kernel';
import type { PaymentView } from '#payments';
import { openContext } from '../operator/context.js';
import { readRuntime } from '../data-dir.js';
import { whenNpmIsGone } from '../npm-parent.js';
import { Partner } from './partner.js';
import { Random, requestFor, SERVICES, type Plan } from './city.js';

const DEFAULT_PAYMENTS = 1_000;
const MAX_PAYMENTS = 1_000_000;
const DEFAULT_CONCURRENCY = 16;
/**
 * How long a request is tried again. The service may be killed and started again during the demo. A key that it left in progress can be taken over
 * after a minute.
 */
const PATIENCE_MS = 180_000;
const LOOK_AGAIN_MS = 1_000;
/** At most this many differences are printed. */
const SHOWN_DIFFERENCES = 20;

/** A payment in the city's own books. */
interface Book {
  readonly plan: Plan;
  readonly id: string | null;
  readonly serviceFeeCents: number;
  readonly capturedCents: number;
  refundedCents: number;
  /** True if the outcome is unknown. The service may then void the charge during the comparison. */
  readonly unknown: boolean;
  voided: boolean;
}

const main = async (): Promise<number> => {
  const { values } = parseArgs({ options: { payments: { type: 'string' }, concurrency: { type: 'string' }, seed: { type: 'string' } } });
  const count = whole('--payments', values.payments, DEFAULT_PAYMENTS, MAX_PAYMENTS);
  const concurrency = whole('--concurrency', values.concurrency, DEFAULT_CONCURRENCY, 256);
  const seed = whole('--seed', values.seed, Date.now() % 1_000_000, Number.MAX_SAFE_INTEGER);

  const { apiUrl, apiKey, portals } = await openShop();
  const partner = new Partner(`${apiUrl}/api/partner/v1`, apiKey, PATIENCE_MS);
  const random = new Random(seed);
  const plans = Array.from({ length: count }, (_, index) => requestFor(random, index, portals));
  process.stdout.write(`${count} payments against ${apiUrl}, ${concurrency} at a time, seed ${seed}\n`);

  const faults: string[] = [];
  const books: Book[] = [];
  const started = performance.now();
  await inParallel('paying    ', plans, concurrency, async (plan) => books.push(await pay(partner, plan, faults)));
  const paySeconds = (performance.now() - started) / 1000;
  const reversible = books.filter((book) => book.plan.afterwards !== null && book.capturedCents > 0);
  await inParallel('returning ', reversible, concurrency, (book) => reverse(partner, book, faults));
  const listed = await listAll(partner, count);
  faults.push(...reconcile(books, listed));
  report(books, listed, paySeconds);
  for (const fault of faults.slice(0, SHOWN_DIFFERENCES)) process.stdout.write(`  ✗ ${fault}\n`);
  process.stdout.write(faults.length === 0 ? '\n0 differences\n' : `\n${faults.length} differences\n`);
  return faults.length === 0 ? 0 : 1;
};

const whole = (name: string, text: string | undefined, otherwise: number, most: number): number => {
  if (text === undefined) return otherwise;
  const value = Number(text);
  if (!Number.isSafeInteger(value) || value < 1 || value > most) throw new Error(`${name} must be 1 to ${most}`);
  return value;
};

/** Sets up the city's account and one portal for each kind of bill, like an operator. */
const openShop = async (): Promise<{ apiUrl: string; apiKey: string; portals: string[] }> => {
  const context = await openContext('demo');
  try {
    const runtime = readRuntime(context.config.dataDir);
    if (!runtime?.apiUrl) throw new Error(`no service is running on ${context.config.dataDir}; start one with npm start`);
    const { state: account } = await context.administration.createAccount('City of Riverton');
    const portals: string[] = [];
    for (const { name, fee } of SERVICES) {
      const { state } = await context.administration.createPortal({
        accountIds: [account.accountId],
        name: `Riverton ${name}`,
        gateway: 'simulator',
        fee: { ...NO_FEE, ...fee },
      });
      portals.push(state.portalId);
    }
    const { apiKey, position } = await context.administration.issueKey(account.accountId);
    await context.inForce(position);
    return { apiUrl: runtime.apiUrl, apiKey, portals };
  } finally {
    await context.close();
  }
};

/** After these codes, the demo sends the same request again under its key. Either nothing had begun (C19), or the next answer has the outcome. */
const SEND_AGAIN = ['IDEMPOTENCY_UNAVAILABLE', 'INTERNAL_ERROR'];
const RECONCILE = 'IDEMPOTENCY_RECONCILIATION_REQUIRED';

const pay = async (partner: Partner, plan: Plan, faults: string[]): Promise<Book> => {
  const book = { plan, id: null as string | null, serviceFeeCents: 0, capturedCents: 0, refundedCents: 0, unknown: false, voided: false };
  const answer = await partner.post('payments', plan.body, plan.key, SEND_AGAIN);
  if (plan.sentTwice) {
    const again = await partner.post('payments', plan.body, plan.key, SEND_AGAIN);
    const replayed = again.replayed && again.text === answer.text;
    const reserved = (answer.status >= 500 || answer.code === RECONCILE) && again.code === RECONCILE;
    if (!replayed && !reserved) faults.push(`${plan.key}: sent twice, answered ${answer.status} and then ${again.status} ${again.code ?? ''}`);
  }
  // The first answer was lost, and a second request under this key never charges. If the first request began a payment, read that payment.
  if (answer.repeated && answer.code === RECONCILE) return answer.paymentId === null ? book : { ...book, ...(await look(partner, answer.paymentId)) };
  if (!plan.expected.includes(answer.status)) faults.push(`${plan.key}: ${plan.scenario} answered ${answer.status} ${answer.code ?? ''}`);
  if (answer.status === 200) {
    const payment = answer.data as unknown as PaymentView;
    if (payment.totalChargedCents !== payment.amountCents + payment.serviceFeeCents) faults.push(`${plan.key}: total is not principal plus fee`);
    return { ...book, id: payment.id, serviceFeeCents: payment.serviceFeeCents, capturedCents: payment.totalChargedCents };
  }
  return { ...book, id: answer.paymentId, unknown: answer.status === 504 };
};

/** Reads a payment whose answer was lost, until it is decided. */
const look = async (partner: Partner, id: string): Promise<Pick<Book, 'id' | 'serviceFeeCents' | 'capturedCents' | 'unknown'>> => {
  const until = performance.now() + PATIENCE_MS;
  for (;;) {
    const { status, serviceFeeCents, capturedAmountCents } = (await partner.get(`payments/${id}`)).data as unknown as Partial<PaymentView>;
    if (status === 'succeeded') return { id, serviceFeeCents: serviceFeeCents!, capturedCents: capturedAmountCents!, unknown: false };
    // A `pending` payment may still succeed. No other status becomes `succeeded` later. An answer without a status was an error.
    const isDecided = status !== undefined && status !== 'pending';
    if (isDecided || performance.now() > until) return { id, serviceFeeCents: 0, capturedCents: 0, unknown: true };
    await sleep(LOOK_AGAIN_MS);
  }
};

const reverse = async (partner: Partner, book: Book, faults: string[]): Promise<void> => {
  const { plan, id } = book;
  const { operation, body } = plan.afterwards!;
  // Unlike a create, a repeated reversal continues the same attempt, even if the first request failed (C17).
  const answer = await partner.post(`payments/${id}/${operation}`, body, `${plan.key}-${operation}`, [...SEND_AGAIN, 'PAYMENT_TIMEOUT']);
  if (answer.status === 200) {
    book.refundedCents += Number(answer.data.amountCents);
    book.voided = operation === 'void';
    return;
  }
  if (!plan.afterwards!.mayFail.includes(answer.code ?? '')) faults.push(`${plan.key}: ${operation} answered ${answer.status} ${answer.code ?? ''}`);
};

const listAll = async (partner: Partner, expected: number): Promise<Map<string, PaymentView>> => {
  const listed = new Map<string, PaymentView>();
  const bar = progress('listing   ', expected);
  for (let cursor: string | null = null; ;) {
    const { data } = await partner.get(`payments?limit=100${cursor ? `&cursor=${cursor}` : ''}`);
    const page = data as unknown as { payments: PaymentView[]; nextCursor: string | null };
    for (const payment of page.payments) {
      if (listed.has(payment.id)) throw new Error(`${payment.id} was listed twice`);
      listed.set(payment.id, payment);
    }
    bar.update(Math.min(listed.size, expected));
    cursor = page.nextCursor;
    if (cursor === null) break;
  }
  bar.stop();
  return listed;
};

/** Returns the differences between our books and the list: wrong figures, missing payments and unknown payments. */
const reconcile = (books: readonly Book[], listed: ReadonlyMap<string, PaymentView>): string[] => {
  const faults: string[] = [];
  const known = new Set<string>();
  for (const book of books) {
    if (book.id === null) continue;
    known.add(book.id);
    const payment = listed.get(book.id);
    const differs = (what: string, ours: unknown, theirs: unknown) =>
      ours !== theirs && faults.push(`${book.id} ${what}: ours ${String(ours)}, listed ${String(theirs)}`);
    if (!payment) {
      faults.push(`${book.id} is not in the list`);
      continue;
    }
    differs('principal', book.plan.amountCents, payment.amountCents);
    differs('captured', book.capturedCents, payment.capturedAmountCents);
    differs('returned', book.refundedCents, payment.refundedAmountCents);
    differs('remaining', book.capturedCents - book.refundedCents, payment.remainingRefundableAmountCents);
    differs(
      'lines',
      payment.totalChargedCents,
      payment.lineItems.reduce((sum, line) => sum + line.amountCents + line.serviceFeeCents, 0),
    );
    const allowed = book.unknown
      ? ['unknown', 'voided', 'failed', 'pending']
      : book.capturedCents === 0
        ? ['failed']
        : book.voided
          ? ['voided']
          : book.refundedCents === 0
            ? ['succeeded']
            : book.refundedCents === book.capturedCents
              ? ['refunded']
              : ['partially_refunded'];
    if (!allowed.includes(payment.status)) faults.push(`${book.id} status: ours ${allowed.join(' or ')}, listed ${payment.status}`);
  }
  for (const id of listed.keys()) if (!known.has(id)) faults.push(`${id} is in the list and not in our books`);
  return faults;
};

const report = (books: readonly Book[], listed: ReadonlyMap<string, PaymentView>, paySeconds: number): void => {
  const sum = (figure: (book: Book) => number) => books.reduce((total, book) => total + figure(book), 0);
  const theirs = (figure: (payment: PaymentView) => number) => [...listed.values()].reduce((total, payment) => total + figure(payment), 0);
  const row = (name: string, ours: string, listedFigure: string) =>
    process.stdout.write(`  ${name.padEnd(34)}${ours.padStart(16)}${listedFigure.padStart(16)}\n`);
  process.stdout.write('\n');
  row('', 'our books', 'the list');
  row('payments', String(books.filter(({ id }) => id !== null).length), String(listed.size));
  row('charged, principal and fee', decimal(sum((book) => book.capturedCents)), decimal(theirs((payment) => payment.capturedAmountCents)));
  row(
    'of it service fee',
    decimal(sum((book) => book.serviceFeeCents)),
    decimal(theirs((payment) => (payment.capturedAmountCents > 0 ? payment.serviceFeeCents : 0))),
  );
  row('returned', decimal(sum((book) => book.refundedCents)), decimal(theirs((payment) => payment.refundedAmountCents)));
  row('kept', decimal(sum((book) => book.capturedCents - book.refundedCents)), decimal(theirs((payment) => payment.remainingRefundableAmountCents)));
  process.stdout.write('\n');
  const scenarios = new Map<string, number>();
  for (const { plan } of books) scenarios.set(plan.scenario, (scenarios.get(plan.scenario) ?? 0) + 1);
  for (const [scenario, count] of [...scenarios].sort((a, b) => b[1] - a[1]))
    process.stdout.write(`  ${scenario.padEnd(34)}${String(count).padStart(16)}\n`);
  process.stdout.write(`\n  ${(books.length / paySeconds).toFixed(0)} payments per second\n`);
};

const progress = (name: string, total: number): SingleBar => {
  const bar = new SingleBar({
    format: `${name} {bar} {value}/{total}`,
    barCompleteChar: '█',
    barIncompleteChar: '░',
    hideCursor: true,
    noTTYOutput: false,
    fps: 10,
  });
  if (process.stderr.isTTY) bar.start(total, 0);
  return bar;
};

const inParallel = async <T>(name: string, items: readonly T[], concurrency: number, work: (item: T) => Promise<unknown>): Promise<void> => {
  const bar = progress(name, items.length);
  const queue = items.values();
  const one = async () => {
    for (const item of queue) {
      await work(item);
      bar.increment();
    }
  };
  await Promise.all(Array.from({ length: concurrency }, one));
  bar.stop();
};

// SIGTERM has its effect of that moment: while a context is open, the listener of the context closes it first.
whenNpmIsGone(() => process.kill(process.pid, 'SIGTERM'));
main().then(
  (code) => (process.exitCode = code),
  (error: unknown) => {
    process.stderr.write(`${error instanceof Error ? error.message : String(error)}\n`);
    process.exitCode = 1;
  },
);

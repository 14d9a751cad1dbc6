/**
 * The comparison after each round (A1 to A12). Answers to partners, events, the bank and the read models must agree to the cent. The comparison reads
 * the books without the proxies.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { paymentRegisterModel } from '#settlement';
import { journalModel } from '#ledger';
import { canonicalJson } from '#kernel';
import { findDrift } from '#audit';
import { isVisible, keysOfPayment, LEASE_SECONDS, paymentView } from '#payments';
import { Random } from '../../apps/demo/city.js';
import { type Book, type Books, readBooks } from '../support/truth.js';
import type { Installation } from './installation.js';
import { type Charge, inParallel, isStored, type KeyUse, type Partners, type Reply } from './partners.js';

/** How long projections may lag. A worker that has just started on a busy machine needs long. */
const CAUGHT_UP_MS = 60_000;
const PAGE = 100;
const AT_ONCE = 16;
const CALM = new Random(1);
/** How many times a page of the list is requested until there is an answer. */
const READ_TRIES = 3;
const SETTLE_ROUNDS = 8;
const ASK_AGAIN_MS = 1_000;

export interface Verdict {
  readonly violations: string[];
  readonly payments: number;
  readonly chargesAtBank: number;
  readonly netAtBankCents: number;
  /** The number of keys that were sent again. */
  readonly replayed: number;
}

/** Runs recovery and lets the partners repeat their open requests, at most SETTLE_ROUNDS times. Returns how many payments recovery resolved. */
export const bringToEnd = async (installation: Pick<Installation, 'recover'>, partners: Partners, random: Random): Promise<number> => {
  let resolved = 0;
  for (let round = 0; round < SETTLE_ROUNDS; round++) {
    resolved += await installation.recover();
    if ((await partners.settle(random)) === 0) break;
  }
  return resolved;
};

/** `since`: the number of charges at the start of the round. Only the keys of later charges and of the newest returns are sent again. */
export const judge = async (
  { stores, bank }: Pick<Installation, 'stores' | 'bank'>,
  partners: Partners,
  since = { charges: 0 },
): Promise<Verdict> => {
  const violations: string[] = [];
  let books: Books;
  try {
    books = await readBooks(stores, bank);
  } catch (error) {
    // After a failed assertion no other result can be trusted.
    return { violations: [firstLines((error as Error).message)], payments: 0, chargesAtBank: 0, netAtBankCents: 0, replayed: 0 };
  }
  const byReference = new Map<string, Book[]>();
  for (const book of books.payments) {
    if (!isVisible(book.payment)) continue;
    const reference = book.payment.terms.referenceId ?? '';
    byReference.set(reference, [...(byReference.get(reference) ?? []), book]);
  }

  for (const charge of partners.charges) violations.push(...judgeCharge(charge, byReference.get(charge.intention) ?? []));
  const known = new Set(partners.charges.map(({ intention }) => intention));
  for (const [reference] of byReference) if (!known.has(reference)) violations.push(`${reference}: a payment that nobody asked for`);

  const told = partners.charges.reduce(
    (sum, { payment, toldReturnedCents }) => sum + (payment ? payment.totalChargedCents - toldReturnedCents : 0),
    0,
  );
  if (told !== books.netAtBankCents) violations.push(`partners were told of ${told} cents in all, the bank holds ${books.netAtBankCents}`);

  violations.push(...(await judgeReadModels(stores, partners, books)));
  const stored = [
    ...partners.charges.slice(since.charges).flatMap(({ uses }) => uses),
    ...partners.returns.slice(-AT_ONCE * 10).map(({ use }) => use),
  ].filter(({ answers }) => answers.some(isStored));
  // Each of these keys had a final answer, and is sent once more. If Postgres lost the key's ending, the service makes the ending again from the
  // stream.
  await inParallel(stored, AT_ONCE, async (use) => {
    const reply = await askOut(partners, use);
    // If a refund's key was not finished in time, the service answers from the stream, without the header of a replay.
    if (reply === null || !isStored(reply) || (use.path === 'payments' && !reply.replayed))
      violations.push(`${use.key}: had an answer, and asked again says ${reply?.text ?? 'nothing'}`);
  });
  return {
    violations,
    payments: books.payments.length,
    chargesAtBank: books.chargesAtBank,
    netAtBankCents: books.netAtBankCents,
    replayed: stored.length,
  };
};

/** Sends a request again until the answer is not "in progress", or until the lease of the key must be over. */
const askOut = async (partners: Partners, use: KeyUse): Promise<Reply | null> => {
  for (const until = performance.now() + LEASE_SECONDS * 1_000 + CAUGHT_UP_MS; ;) {
    const reply = await partners.ask(use, CALM);
    if ((reply !== null && reply.code !== 'IDEMPOTENCY_IN_PROGRESS') || performance.now() > until) return reply;
    await sleep(reply?.retryAfterMs ?? ASK_AGAIN_MS);
  }
};

/** A1, A3: one intention has at most one standing charge. The log and the bank agree with the partner's answer. */
const judgeCharge = (charge: Charge, made: readonly Book[]): string[] => {
  const { intention, state, payment, toldReturnedCents, uses } = charge;
  const charged = made.filter((book) => book.payment.phase === 'charged');
  if (state === 'open') return [`${intention}: has no end: ${uses.at(-1)!.answers.at(-1)?.text ?? 'never answered'}`];
  if (charged.length > 1) return [`${intention}: was charged ${charged.length} times, as ${charged.map(({ paymentId }) => paymentId).join(', ')}`];
  if (state === 'declined') return charged.length === 0 ? [] : [`${intention}: was told to be declined, and was charged as ${charged[0]!.paymentId}`];
  const [book] = charged;
  if (!book || book.paymentId !== payment!.id) return [`${intention}: was told of payment ${payment!.id}, the log has ${book?.paymentId ?? 'none'}`];
  const expected = payment!.totalChargedCents - toldReturnedCents;
  if (book.netAtBankCents !== expected)
    return [`${intention}: was told of ${expected} cents that stand, the bank holds ${book.netAtBankCents} of ${book.paymentId}`];
  return [];
};

/** A8: list, journal, settlement and replay agree. Each payment in the list over HTTP equals the fold of its stream. */
const judgeReadModels = async (stores: Installation['stores'], partners: Partners, books: Books): Promise<string[]> => {
  const { readModels, store, payments, pool, personal, clock } = stores;
  const head = await store.head();
  const caughtUp = await Promise.all([
    payments.list.caughtUpTo(head!, CAUGHT_UP_MS),
    readModels.of(journalModel).caughtUpTo(head, CAUGHT_UP_MS),
    readModels.of(paymentRegisterModel).caughtUpTo(head, CAUGHT_UP_MS),
  ]);
  if (caughtUp.includes(false)) return [`read models do not follow: list, journal, register ${caughtUp.join(', ')}`];
  const { differences } = await findDrift({ store, db: pool, now: () => clock.now() });
  const violations = differences.map(({ kind, paymentId, message }) => `drift of ${kind}, payment ${paymentId}: ${message}`);

  const listed = new Map<string, unknown>();
  for (let cursor: string | null = ''; cursor !== null;) {
    const path = `payments?limit=${PAGE}${cursor === '' ? '' : `&cursor=${encodeURIComponent(cursor)}`}`;
    let page: Reply | null = null;
    // A kept-alive connection may lead to a killed process, so repeat the read.
    for (let tries = 0; page === null && tries < READ_TRIES; tries++) page = await partners.send('GET', path, null, null, CALM);
    if (page?.status !== 200) return [...violations, `a page of the list could not be read: ${page?.text ?? 'no answer'}`];
    for (const payment of page.data.payments as { id: string }[]) {
      if (listed.has(payment.id)) violations.push(`${payment.id}: is listed twice`);
      listed.set(payment.id, payment);
    }
    cursor = page.data.nextCursor as string | null;
  }
  let visible = 0;
  for (const { paymentId, payment } of books.payments) {
    if (!isVisible(payment)) continue;
    visible += 1;
    const folded = canonicalJson(paymentView(paymentId, payment, await personal.open(keysOfPayment(payment))));
    const shown = listed.has(paymentId) ? canonicalJson(listed.get(paymentId)) : 'nothing';
    if (folded !== shown) violations.push(`${paymentId}: the list shows ${shown}, the events say ${folded}`);
  }
  if (listed.size !== visible) violations.push(`the list shows ${listed.size} payments, the log has ${visible}`);
  return violations;
};

const firstLines = (text: string) => text.split('\n').slice(0, 30).join('\n').slice(0, 2_000);

// A job of finance that keeps its own copy of the payments and compares it with what Payfold says: with the list of payments, and with the settlement.
// Plain Node, no packages.
//
//   PAYFOLD_AUDIT_KEY=pa_… node examples/reconcile/reconcile.mjs
//
// PAYFOLD_AUDIT_URL   where /audit/v1 is (http://127.0.0.1:3001)
// RECONCILE_FILE      the copy (reconcile.ndjson). Without it, the job reads the log from its start.
// RECONCILE_LIMIT     events in a page, at most 1000 (1000)
//
// It prints each difference on a line of its own and exits with 1; without a difference it exits with 0. Run it again at any time: it goes on where it
// was. It may be killed at any time.
import { closeSync, existsSync, fsyncSync, ftruncateSync, openSync, readFileSync, writeSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';

const url = process.env.PAYFOLD_AUDIT_URL ?? 'http://127.0.0.1:3001';
const key = process.env.PAYFOLD_AUDIT_KEY;
const file = process.env.RECONCILE_FILE ?? 'reconcile.ndjson';
const limit = Number(process.env.RECONCILE_LIMIT ?? 1000);
/** How long the job waits for a service that is away, and for a list that is behind the log. */
const PATIENCE_MS = 120_000;

// ------------------------------------------------------------------------------------------------------------------------------------
// Asking.

/** The answer to a GET, once it is a success. Waits if the service is away or busy, as its Retry-After says. */
const ask = async (path) => {
  for (const end = Date.now() + PATIENCE_MS; ;) {
    let why;
    let pauseMs = 1_000;
    try {
      const answer = await fetch(`${url}/audit/v1/${path}`, { headers: { authorization: `AuditKey ${key}` } });
      const text = await answer.text();
      if (answer.ok) return { text, position: answer.headers.get('ledger-position') };
      why = `${answer.status} ${text}`;
      if (answer.status === 403) return null;
      if (answer.status !== 429 && answer.status < 500) throw new Error(`${path}: ${why}`, { cause: 'refused' });
      pauseMs = Number(answer.headers.get('retry-after') ?? 1) * 1_000;
    } catch (error) {
      if (error.cause === 'refused') throw error;
      why ??= String(error.cause ?? error);
    }
    if (Date.now() > end) throw new Error(`${path}: ${why}`);
    await sleep(pauseMs);
  }
};
const data = async (path) => JSON.parse((await ask(path)).text).data;
const query = (values) => new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null)).toString();

// ------------------------------------------------------------------------------------------------------------------------------------
// The copy. A line of the file is a page of the feed: its events, and the place after it. So the place always belongs to exactly the events before it,
// also if the job is killed while it writes: then the last line is not whole, and the page is read again.

/** By id: { sums: Map of revision → { charged, returned }, last: revision, settled: Map of `batch payment leg cents` → count }. Amounts are in cents. */
const payments = new Map();
/** By `gateway merchant-account batch`: { changes: [{ position, gross, fee, net, funded }], recordedAt: position }. */
const batches = new Map();
/** How many lines of batches are sales of a payment, by `batch payment leg cents`. */
const sales = new Map();
let next = null;

const add = (map, name, count) => map.set(name, (map.get(name) ?? 0) + count);

const takePayment = ({ stream, revision, type, data }) => {
  const id = stream.slice('payment-'.length);
  if (!payments.has(id)) payments.set(id, { sums: new Map(), last: -1, settled: new Map(), total: 0, charged: 0, returned: 0 });
  const payment = payments.get(id);
  if (revision !== payment.last + 1) throw new Error(`${stream}: revision ${revision} comes after ${payment.last}`);
  payment.last = revision;
  const isCharged = payment.charged > 0;
  if (type === 'PaymentInitiated') payment.total = data.amountCents + data.serviceFeeCents;
  if (type === 'PaymentCreated' || (type === 'PaymentResolved' && data.as === 'succeeded')) payment.charged = payment.total;
  // Before the charge is known to have happened, a void says that it was undone.
  if (isCharged && ['PaymentVoided', 'PaymentRefunded', 'FeeRefunded'].includes(type)) payment.returned += data.principalCents + data.feeCents;
  if (type === 'PaymentSettled') add(payment.settled, `${data.batchId} ${id} ${data.leg} ${data.grossCents}`, 1);
  if (type === 'SettlementWithdrawn') add(payment.settled, `${data.batchId} ${id} ${data.leg} ${data.grossCents}`, -1);
  payment.sums.set(revision, { charged: payment.charged, returned: payment.returned });
};

const takeBatch = ({ position, type, data }) => {
  const name = `${data.gateway} ${data.merchantAccount} ${data.batchId}`;
  if (!batches.has(name)) batches.set(name, { changes: [], recordedAt: null });
  const batch = batches.get(name);
  const change = (line, sign) => {
    if (line === null || !line.accepted) return;
    if (line.paymentId !== null && line.type === 'sale') add(sales, `${data.batchId} ${line.paymentId} ${line.leg} ${line.grossCents}`, sign);
    batch.changes.push({ position, gross: sign * line.grossCents, fee: sign * line.feeCents, net: sign * line.netCents, funded: 0 });
  };
  if (type === 'SettlementLinesRecorded') for (const line of data.lines) change(line, 1);
  if (type === 'SettlementLinesCorrected')
    for (const { before, after } of data.corrections) {
      change(before, -1);
      change(after, 1);
    }
  if (type === 'SettlementBatchRecorded') batch.recordedAt = position;
  if (type === 'BatchFunded') batch.changes.push({ position, gross: 0, fee: 0, net: 0, funded: data.netCents });
};

const take = (page) => {
  for (const event of page.events) {
    // An event may come twice.
    if (next !== null && event.position <= next) continue;
    if (event.stream.startsWith('payment-')) takePayment(event);
    else if (event.stream.startsWith('settlement-') && event.data.batchId !== undefined) takeBatch(event);
  }
  next = page.next;
};

/** Reads the copy, and cuts off a last line that is not whole. */
const open = () => {
  const text = existsSync(file) ? readFileSync(file) : Buffer.alloc(0);
  const end = text.lastIndexOf('\n') + 1;
  for (const line of text.subarray(0, end).toString().split('\n')) if (line !== '') take(JSON.parse(line));
  const handle = openSync(file, existsSync(file) ? 'r+' : 'w');
  ftruncateSync(handle, end);
  return { handle, end };
};

const copy = open();

/** Reads the feed to its end. The page stands in the file before it counts. */
const follow = async () => {
  for (;;) {
    const page = await data(`events?${query({ after: next, limit })}`);
    if (page.next !== next) {
      const line = Buffer.from(`${JSON.stringify({ next: page.next, events: page.events })}\n`);
      copy.end += writeSync(copy.handle, line, 0, line.length, copy.end);
      fsyncSync(copy.handle);
      take(page);
    }
    if (page.end) return;
  }
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Comparing.

const differences = [];
const differ = (text) => {
  differences.push(text);
  console.log(`DIFFERENCE ${text}`);
};

/** The list of payments, as the service shows it now. It is complete up to the place of the copy, or further. */
const readList = async (place) => {
  const list = new Map();
  const end = Date.now() + PATIENCE_MS;
  for (let after = null; ;) {
    const page = await data(`changed-payments?${query({ after, limit: 500 })}`);
    for (const one of page.payments) list.set(one.payment.id, one);
    const isStill = page.next === after;
    after = page.next;
    if (after === place || (after !== null && place !== null && after > place)) return list;
    if (isStill && Date.now() > end) {
      differ(`the list stands still at ${after}, and the log goes on to ${place}`);
      return list;
    }
    if (isStill) await sleep(500);
  }
};

/** `changed`: payments with events after the place up to which the list is complete at least. */
const compareList = (list, changed) => {
  for (const [id, { payment, revision }] of list) {
    const known = payments.get(id)?.sums.get(revision);
    if (!known) differ(`payment ${id}: the list has revision ${revision}, and the feed has not`);
    else if (known.charged !== payment.capturedAmountCents || known.returned !== payment.refundedAmountCents)
      differ(
        `payment ${id}, revision ${revision}: captured ${known.charged} and refunded ${known.returned} by the feed, ` +
          `${payment.capturedAmountCents} and ${payment.refundedAmountCents} in the list`,
      );
  }
  for (const [id, { total, last }] of payments) {
    // A payment with events after the place may have come after the list was read.
    if (total === 0 || changed.has(id)) continue;
    if (!list.has(id)) differ(`payment ${id}: the feed has it, and the list has not`);
    else if (list.get(id).revision < last) differ(`payment ${id}: the list has revision ${list.get(id).revision}, the feed ${last}`);
  }
};

/** Returns the number of compared batches. */
const compareSettlement = async () => {
  const answer = await ask(`exports/batches?${query({ format: 'ndjson' })}`);
  if (answer === null) {
    console.log('settlement was not compared: this key has a scope');
    return 0;
  }
  // The report is complete up to this place. The copy must be as well, and counts only what is up to there.
  while (answer.position > (next ?? '')) await follow();
  const rows = new Map();
  for (const line of answer.text.split('\n').filter(Boolean)) {
    const row = JSON.parse(line);
    rows.set(`${row.gateway} ${row.merchant_account} ${row.batch_id}`, row);
  }
  let compared = 0;
  for (const [name, { changes, recordedAt }] of batches) {
    if (recordedAt === null || recordedAt > answer.position) continue;
    compared += 1;
    const row = rows.get(name);
    rows.delete(name);
    if (!row) {
      differ(`batch ${name}: the feed has it, and the report has not`);
      continue;
    }
    const sum = (part) => changes.reduce((cents, change) => cents + (change.position <= answer.position ? change[part] : 0), 0);
    for (const [part, column] of Object.entries({ gross: 'reported_cents', fee: 'fee_cents', net: 'net_cents', funded: 'funded_cents' }))
      if (sum(part) !== (row[column] ?? 0)) differ(`batch ${name}: ${part} ${sum(part)} by the feed, ${row[column]} in the report`);
  }
  for (const name of rows.keys()) differ(`batch ${name}: the report has it, and the feed has not`);
  // Each settled charge of a payment is a line of its batch.
  const recorded = new Set([...batches].filter(([, { recordedAt }]) => recordedAt !== null).map(([name]) => name.split(' ').at(-1)));
  for (const { settled } of payments.values())
    for (const [name, count] of settled)
      if (count > 0 && recorded.has(name.split(' ')[0]) && !(sales.get(name) > 0))
        differ(`settled in batch, payment, leg, cents ${name}: the batch has no such line`);
  return compared;
};

if (!key) throw new Error('PAYFOLD_AUDIT_KEY is missing');
await follow();
const before = new Map([...payments].map(([id, { last }]) => [id, last]));
const list = await readList(next);
// The list may be newer than the copy. Then the copy follows, and each payment is compared at the revision that the list has.
await follow();
compareList(list, new Set([...payments].filter(([id, { last }]) => before.get(id) !== last).map(([id]) => id)));
const compared = await compareSettlement();
closeSync(copy.handle);
console.log(`${list.size} payments and ${compared} batches compared up to ${next}: ${differences.length} differences`);
process.exitCode = differences.length === 0 ? 0 : 1;

#!/usr/bin/env node
/**
 * Checks Payfold's proofs without Payfold's code. It is one file of plain Node with nothing to install. Use a copy that you trust, never the copy in
 * the pack that you check.
 *
 *   node verify.mjs prove FILE          checks the file of `payfold audit prove`: each event is in the log of the signed head
 *   node verify.mjs consistency FILE    checks the file of `payfold audit consistency --out`: the later log begins with the earlier one
 *   node verify.mjs head FILE           checks the signature of a signed head
 *   node verify.mjs pack FOLDER         checks an evidence pack: its manifest is signed, the files are those of the manifest, the events between its
 *                                       two heads are complete, and the journal and the trial balance follow from the events
 *
 * --key VKEY (or a file with several): the keys that you trust, because you noted them earlier. Without this option the keys in the file itself are
 * used. Then the check proves only that the file agrees with itself.
 *
 * Hashes are those of RFC 9162. Heads and the manifest's signature are C2SP signed notes with Ed25519.
 *
 * Order of this file: hashes and proofs; signed notes; files; the posting rules; the parts of a pack; the command.
 */
import { createHash, createPublicKey, verify as verifySignature } from 'node:crypto';
import { createReadStream, existsSync, lstatSync, readdirSync, readFileSync, realpathSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

/** Longest line that is read, in bytes. A longer line would fill the memory. */
const MAX_LINE_BYTES = 64 * 1024 * 1024;
/** Largest file that is read whole, in bytes: the manifest, the heads, the trial balance. */
const MAX_WHOLE_BYTES = 64 * 1024 * 1024;
/** The payments of so many events are kept in memory at once. A larger pack is read in several passes. */
const PAYMENTS_AT_ONCE = 200_000;

// ------------------------------------------------------------------------------------------------------------------------------------
// Hashes and proofs.

const sha256 = (...parts) => createHash('sha256').update(Buffer.concat(parts)).digest();
export const leafHash = (bytes) => sha256(Buffer.from([0]), bytes);
export const nodeHash = (left, right) => sha256(Buffer.from([1]), left, right);

/** RFC 8785: keys sorted, no white space. */
export const canonical = (value) => {
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(canonical).join(',')}]`;
  const keys = Object.keys(value).sort((a, b) => (a < b ? -1 : 1));
  return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`).join(',')}}`;
};
const eventHash = (event) => leafHash(Buffer.from(canonical(event), 'utf8'));

/** RFC 9162, 2.1.3.2: the root that follows from an inclusion proof. */
export const rootFromInclusion = (leaf, index, size, proof) => {
  if (!Number.isSafeInteger(index) || index < 0 || index >= size) throw new Error('the leaf lies beyond the tree');
  let [fn, sn, hash] = [index, size - 1, leaf];
  for (const sibling of proof) {
    if (sn === 0) throw new Error('the proof is too long');
    if (fn % 2 === 1 || fn === sn) {
      hash = nodeHash(sibling, hash);
      while (fn % 2 === 0 && fn !== 0) [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
    } else hash = nodeHash(hash, sibling);
    [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
  }
  if (sn !== 0) throw new Error('the proof is too short');
  return hash;
};

/** RFC 9162, 2.1.4.2: true if the tree of `second` leaves begins with the tree of `first` leaves. */
export const isConsistent = (first, firstRoot, second, secondRoot, given) => {
  if (first === second) return given.length === 0 && firstRoot.equals(secondRoot);
  if (first === 0) return given.length === 0;
  const proof = Number.isInteger(Math.log2(first)) ? [firstRoot, ...given] : [...given];
  let [fn, sn] = [first - 1, second - 1];
  while (fn % 2 === 1) [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
  if (proof.length === 0) return false;
  let [fr, sr] = [proof[0], proof[0]];
  for (const hash of proof.slice(1)) {
    if (sn === 0) return false;
    if (fn % 2 === 1 || fn === sn) {
      [fr, sr] = [nodeHash(hash, fr), nodeHash(hash, sr)];
      while (fn % 2 === 0 && fn !== 0) [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
    } else sr = nodeHash(sr, hash);
    [fn, sn] = [Math.floor(fn / 2), Math.floor(sn / 2)];
  }
  return sn === 0 && fr.equals(firstRoot) && sr.equals(secondRoot);
};

/** A tree that grows by appended leaves. `hashes`: the roots of its perfect subtrees, largest first, as the bits of `size` say. */
export const growingTree = (size, hashes) => {
  const subtrees = [];
  for (let height = 52; height >= 0; height--) if (Math.floor(size / 2 ** height) % 2 === 1) subtrees.push({ height, hash: hashes[subtrees.length] });
  if (subtrees.length !== hashes.length) throw new Error(`a tree of ${size} events has ${subtrees.length} subtrees, not ${hashes.length}`);
  return {
    add: (leaf) => {
      let [height, hash] = [0, leaf];
      for (; subtrees.at(-1)?.height === height; height++) hash = nodeHash(subtrees.pop().hash, hash);
      subtrees.push({ height, hash });
    },
    root: () => (subtrees.length === 0 ? sha256() : subtrees.map(({ hash }) => hash).reduceRight((right, left) => nodeHash(left, right))),
  };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Signed notes.

/** The text of a signed note, and the name of the trusted key that signed it. Throws if there is none. */
const openNote = (note, vkeys, what) => {
  const [, text, signatures] = /^([^]*?\n)\n((?:— [^\n]+\n)+)$/.exec(note) ?? [];
  if (!text) throw new Error(`this is no signed ${what}`);
  for (const vkey of vkeys) {
    const [, name, hash, key] = /^(.+?)\+([0-9a-f]{8})\+(.+)$/.exec(vkey.trim()) ?? [];
    const bytes = Buffer.from(key ?? '', 'base64');
    if (bytes[0] !== 1 || bytes.length !== 33) continue;
    if (
      sha256(Buffer.from(`${name}\n`), bytes)
        .toString('hex')
        .slice(0, 8) !== hash
    )
      continue;
    const publicKey = createPublicKey({
      key: Buffer.concat([Buffer.from('302a300506032b6570032100', 'hex'), bytes.subarray(1)]),
      format: 'der',
      type: 'spki',
    });
    for (const [, signer, value] of signatures.matchAll(/— (\S+) (\S+)\n/g)) {
      const signed = Buffer.from(value, 'base64');
      if (signer !== name || signed.subarray(0, 4).toString('hex') !== hash) continue;
      if (verifySignature(null, Buffer.from(text), publicKey, signed.subarray(4))) return { text, name };
    }
  }
  throw new Error(`no trusted key signed this ${what}`);
};

/** Opens a signed head: `{origin, size, root, at, position}`. Throws if no trusted key signed it. */
export const openHead = (note, vkeys) => {
  const { text, name } = openNote(note, vkeys, 'head');
  const [, origin, size, root, at, position] = /^(\S+)\n(0|[1-9]\d{0,15})\n(\S+)\nat (\S+)\nposition (\S*)\n$/.exec(text) ?? [];
  if (origin !== name) throw new Error('this is no signed head');
  return { origin, size: Number(size), root: Buffer.from(root, 'base64'), at, position };
};

const hashes = (texts) => texts.map((text) => Buffer.from(text, 'base64'));

/** Checks events with their proofs. Returns the head and the number of events. */
export const checkInclusion = ({ head: note, keys, events }, trusted = keys) => {
  const head = openHead(note, trusted);
  if (!Array.isArray(events) || events.length === 0) throw new Error('the proof has no events');
  const leaves = new Set();
  for (const one of events) {
    checkEvent(one, head);
    if (leaves.has(one.leaf)) throw new Error(`the event at position ${one.event.position} stands twice in the proof`);
    leaves.add(one.leaf);
  }
  return { head, count: events.length };
};

const checkEvent = ({ leaf, event, proof }, head) => {
  if (!rootFromInclusion(eventHash(event), leaf, head.size, hashes(proof)).equals(head.root))
    throw new Error(`the event at position ${event.position} is not in the log of ${head.at}`);
};

export const checkConsistency = ({ first, second, keys, proof }, trusted = keys) => {
  const [a, b] = [openHead(first, trusted), openHead(second, trusted)];
  if (a.origin !== b.origin || !isConsistent(a.size, a.root, b.size, b.root, hashes(proof)))
    throw new Error(`the log of ${b.size} events does not begin with the ${a.size} of ${a.at}`);
  return { first: a, second: b };
};

// ------------------------------------------------------------------------------------------------------------------------------------
// Files. Large ones are read line by line.

/** The lines of a file, cut at line feeds only. Other readers also cut at U+2028, which a text may hold. */
const linesOf = async function* (path) {
  let [pieces, held] = [[], 0];
  const line = () => {
    const text = Buffer.concat(pieces).toString('utf8');
    [pieces, held] = [[], 0];
    return text;
  };
  for await (let piece of createReadStream(path)) {
    for (let end = piece.indexOf(10); end >= 0; end = piece.indexOf(10)) {
      pieces.push(piece.subarray(0, end));
      yield line();
      piece = piece.subarray(end + 1);
    }
    held += piece.length;
    if (held > MAX_LINE_BYTES) throw new Error(`${path} has a line of more than ${MAX_LINE_BYTES} bytes`);
    if (piece.length > 0) pieces.push(piece);
  }
  if (held > 0) yield line();
};
const rowsOf = async function* (path) {
  for await (const line of linesOf(path)) yield JSON.parse(line);
};
const lineCount = async (path) => {
  const lines = linesOf(path);
  let found = 0;
  while (!(await lines.next()).done) found += 1;
  return found;
};
const whole = (path) => {
  if (lstatSync(path).size > MAX_WHOLE_BYTES) throw new Error(`${path} is too large`);
  return readFileSync(path, 'utf8');
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The books: how each event changes them, written from the table of rules in docs/finance.md. Cents; a debit is positive.

/** Every event that may change the books, and its newest version that this file knows. */
export const EVENTS = {
  PaymentInitiated: 4, PaymentCreated: 2, PaymentDeclined: 4, PaymentFailed: 2, PaymentOutcomeUnknown: 1, PaymentAbandoned: 1, PaymentLost: 1,
  ReconciliationStarted: 1, VoidRequested: 3, RefundRequested: 3, PaymentVoided: 2, PaymentRefunded: 2, FeeRefunded: 2, RefundFailed: 1, ReturnedElsewhere: 1, ReversalEnded: 2,
  ReversalAcknowledged: 2, PaymentSettled: 1, SettlementRejected: 1, SettlementWithdrawn: 1, PaymentDisputed: 3, PaymentResolved: 1, ReturnRequested: 1,
  SettlementLinesRecorded: 2, SettlementBatchRecorded: 1, SettlementBatchListed: 1, SettlementLinesCorrected: 2, BatchFunded: 1, BatchFundingWithdrawn: 1,
  SettlementFileImported: 1, ExceptionOpened: 3, ExceptionAssigned: 1, ExceptionExplained: 1, ExceptionSuperseded: 1, ExceptionResolved: 1,
  ExceptionRefundRequested: 1, ExceptionRefundEnded: 1,
  ManualAdjustment: 1, PeriodClosed: 1, TrialBalanceRecorded: 1, PostingRuleChanged: 1,
  AgencyRemitted: 1, AgencyRemittanceReversed: 1,
}; // prettier-ignore
const BOOK_STREAMS = /^(?:payment|settlement|exception|adjustment|remittance)-/;

const part = (text) => text.replace(/[^\w.@+-]/g, (one) => `%${one.charCodeAt(0).toString(16).padStart(2, '0')}`);
const unsettled = (mid) => `assets:processor:${part(mid)}:unsettled`;
const inTransit = (mid) => `assets:processor:${part(mid)}:in_transit`;
const disputed = (mid) => `assets:disputes:${part(mid)}`;
const disputeSuspense = (mid) => `assets:dispute_suspense:${part(mid)}`;
const suspense = (mid) => `liabilities:suspense:${part(mid)}`;
const processing = (mid) => `expense:processing:${part(mid)}`;
const disputeFee = (mid) => `expense:dispute_fee:${part(mid)}`;
const payable = (portal) => `liabilities:agency:${part(portal)}:payable`;
const serviceFee = (portal) => `revenue:service_fee:${part(portal)}`;
const feeRefunded = (portal) => `revenue:service_fee_refunded:${part(portal)}`;
const chargebackLoss = (portal) => `expense:chargeback_loss:${part(portal)}`;
const BANK = 'assets:bank:operating';

const sum = (parts, name) => parts.reduce((total, one) => total + one[name], 0);
const each = (shares, account) => shares.map(({ mid, principal, fee }) => [account(mid), principal + fee]);
const borne = ({ portal, shares }) => [[payable(portal), sum(shares, 'principal')], [chargebackLoss(portal), sum(shares, 'fee')]]; // prettier-ignore
const back = ({ portal, mid, principal, fee }) => [[[payable(portal), principal], [serviceFee(portal), fee]], [[unsettled(mid), principal + fee]]]; // prettier-ignore
const settled = ({ mid, cents }) => [[[inTransit(mid), cents]], [[unsettled(mid), cents]]];

/** Each rule: its words, then its versions from the first on. A version returns debits and credits. */
export const RULES = {
  R1: ['principal charged', ({ portal, legs }) => [legs.map(({ mid, principal }) => [unsettled(mid), principal]), [[payable(portal), sum(legs, 'principal')]]]],
  R2: ['service fee charged', ({ portal, legs }) => [legs.map(({ mid, fee }) => [unsettled(mid), fee]), [[serviceFee(portal), sum(legs, 'fee')]]]],
  R3: ['voided', back],
  R4: ['sale settled', settled],
  "R4'": ['refund settled', settled],
  R5: ['processor fee', ({ mid, cents }) => [[[processing(mid), cents]], [[inTransit(mid), cents]]]],
  R6: ['batch funded', ({ mid, cents }) => [[[BANK, cents]], [[inTransit(mid), cents]]]],
  "R6'": ['batch funded to the agency', ({ portal, mid, cents }) => [[[payable(portal), cents]], [[inTransit(mid), cents]]]],
  R7: ['principal refunded', ({ portal, mid, cents }) => [[[payable(portal), cents]], [[unsettled(mid), cents]]]],
  R8: ['service fee refunded', ({ portal, mid, cents }) => [[[feeRefunded(portal), cents]], [[unsettled(mid), cents]]]],
  R9: ['dispute: amount taken back', ({ shares }) => [each(shares, disputed), each(shares, inTransit)]],
  R11: ['dispute lost', (lost) => [borne(lost), each(lost.shares, disputed)]],
  R12: ['dispute recovered', ({ shares }) => [each(shares, inTransit), each(shares, disputed)]],
  "R12'": ['dispute recovered after it was lost', (lost) => [each(lost.shares, inTransit), borne(lost)]],
  "R12''": ['dispute reopened after it was lost', (lost) => [each(lost.shares, disputed), borne(lost)]],
  R13: ['dispute fee', ({ mid, cents }) => [[[disputeFee(mid), cents]], [[inTransit(mid), cents]]]],
  R14: ['settlement rejected', back],
  R15: ['unexplained settlement line', ({ mid, cents }) => [[[inTransit(mid), cents]], [[suspense(mid), cents]]]],
  R16: ['suspense resolved', ({ mid, cents, portal, fee }) => [
    [[suspense(mid), cents]],
    portal === null ? [[unsettled(mid), cents]] : [[payable(portal), cents - fee], [serviceFee(portal), fee]],
  ]],
  R17: ['adjustment by hand', ({ postings }) => [postings.map(({ account, cents }) => [account, cents]), []]],
  R20: ['agency paid', ({ portal, cents }) => [[[payable(portal), cents]], [[BANK, cents]]]],
  R21: ['undone charge settled', settled],
  R22: ['dispute: taken beyond what remained', ({ moved }) => [moved.map(([mid, cents]) => [disputeSuspense(mid), cents]), moved.map(([mid, cents]) => [inTransit(mid), cents])]],
}; // prettier-ignore

/** Postings of debits and credits: one for each account, in order, without zeros. */
const postingsOf = ([debits, credits]) => {
  const sums = new Map();
  for (const [account, cents] of debits) sums.set(account, (sums.get(account) ?? 0) + cents);
  for (const [account, cents] of credits) sums.set(account, (sums.get(account) ?? 0) - cents);
  return [...sums].filter(([, cents]) => cents !== 0);
};

/** UUID version 5 (RFC 9562). */
const uuid5 = (namespace, name) => {
  const hash = createHash('sha1')
    .update(Buffer.from(namespace.replaceAll('-', ''), 'hex'))
    .update(name)
    .digest()
    .subarray(0, 16);
  hash[6] = (hash[6] & 0x0f) | 0x50;
  hash[8] = (hash[8] & 0x3f) | 0x80;
  return hash.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
};

/**
 * The books as they follow from events, which are given in log order. `post` returns the entries of an event, as journal.ndjson shows them. `keeps`
 * says of which payments the state is kept: events of other payments post nothing here.
 */
export const createBooks = (keeps = () => true) => {
  const payments = new Map();
  const revisions = new Map();
  const versions = new Map();
  let closedTo = null;

  const post = (event) => {
    const { stream, type, version, revision, data, metadata } = event;
    if (!BOOK_STREAMS.test(stream)) return [];
    const of = `${type} at position ${event.position}`;
    if (!Object.hasOwn(EVENTS, type) || version > EVENTS[type]) throw new Error(`${of}: this verifier does not know it; take a newer verify.mjs`);
    const isPayment = stream.startsWith('payment-');
    if (isPayment && !keeps(stream)) return [];
    const now = metadata.recordedAt;
    const made = [];
    const add = (rule, postings, { at = now, number = null, paymentId = isPayment ? stream.slice('payment-'.length) : null } = {}) => {
      if (postings.length === 0) return;
      if (!postings.every(([, cents]) => Number.isSafeInteger(cents)) || postings.reduce((total, [, cents]) => total + cents, 0) !== 0)
        throw new Error(`${of}: ${rule} does not balance`);
      const effectiveAt = new Date(at).toISOString();
      made.push({
        position: event.position,
        entryId: uuid5(event.id, `${rule}.${versions.get(rule) ?? 1}${number === null ? '' : `/${number}`}`),
        eventId: event.id,
        rule,
        part: number,
        description: RULES[rule][0],
        paymentId,
        recordedAt: now,
        effectiveAt,
        bookedAt: closedTo !== null && effectiveAt < closedTo ? closedTo : effectiveAt,
        postings: postings.map(([account, cents]) => ({ account, cents })),
      });
    };
    const sides = (rule, input) => RULES[rule][versions.get(rule) ?? 1](input);
    const by = (rule, input, when) => add(rule, postingsOf(sides(rule, input)), when);

    if (isPayment || stream === 'adjustment-periods' || stream === 'adjustment-rules') {
      const [known, expected] = isPayment
        ? [payments.get(stream), (payments.get(stream)?.revision ?? -1) + 1]
        : [null, (revisions.get(stream) ?? -1) + 1];
      if (revision !== expected) throw new Error(`${of}: revision ${revision} of ${stream} does not follow; ${expected} is missing`);
      if (isPayment) {
        const books = known ?? { portal: null, charged: false, legs: [], disputes: null };
        books.revision = revision;
        payments.set(stream, books);
        postPayment(books, event, by, (rule, input, when) => add(rule, postingsOf(sides(rule, input).reverse()), when));
      } else revisions.set(stream, revision);
    }
    switch (type) {
      case 'SettlementLinesRecorded':
        for (const line of data.lines)
          for (const [rule, postings] of postLine(data.merchantAccount, line, sides))
            add(rule, postings, { at: data.closedAt, number: line.number, paymentId: line.paymentId });
        break;
      case 'SettlementLinesCorrected':
        for (const { before, after } of data.corrections) {
          // For each rule: what the new line posts, less what the old line posted.
          const [then, next] = [before, after].map((line) => (line === null ? [] : postLine(data.merchantAccount, line, sides)));
          const line = after ?? before;
          for (const rule of new Set([...then, ...next].map(([name]) => name))) {
            const all = (entries) => entries.filter(([name]) => name === rule).flatMap(([, postings]) => postings);
            add(rule, postingsOf([all(next), all(then)]), { at: data.closedAt, number: line.number, paymentId: line.paymentId });
          }
        }
        break;
      case 'BatchFunded':
      case 'BatchFundingWithdrawn': {
        const { merchantAccount: mid, netCents, agencyPortalId: portal, fundedOn } = data;
        const cents = type === 'BatchFunded' ? netCents : 0 - netCents;
        by(portal === undefined ? 'R6' : "R6'", { mid, cents, portal }, { at: `${fundedOn}T00:00:00.000Z` });
        break;
      }
      case 'ExceptionResolved': {
        const { resolution, merchantAccount: mid, suspenseCents: cents, portalId, feeCents: fee, paymentId } = data;
        if (resolution !== 'no_posting') by('R16', { mid, cents, fee, portal: resolution === 'adopt' ? portalId : null }, { paymentId });
        break;
      }
      case 'ManualAdjustment':
        by('R17', data, { at: data.effectiveAt });
        break;
      case 'AgencyRemitted':
      case 'AgencyRemittanceReversed': {
        const pair = sides('R20', { portal: data.portalId, cents: data.cents });
        add('R20', postingsOf(type === 'AgencyRemitted' ? pair : pair.reverse()), { at: `${data.on}T00:00:00.000Z` });
        break;
      }
      case 'PeriodClosed':
        closedTo = data.to;
        break;
      case 'PostingRuleChanged':
        if (!(data.version >= 1 && RULES[data.rule]?.[data.version]))
          throw new Error(`${of}: this verifier does not know version ${data.version} of ${data.rule}; take a newer verify.mjs`);
        versions.set(data.rule, data.version);
    }
    return made;
  };
  return { post };
};

/** Names that many payments share are kept once. */
const names = new Map();
const once = (name) => names.get(name) ?? (names.set(name, name), name);

/** Posts an event of a payment and changes its `books`. `mirrored` posts a rule with debits and credits exchanged. */
const postPayment = (books, { type, data, metadata, position }, by, mirrored) => {
  const { portal } = books;
  const leg = () => {
    const found = books.legs.find((one) => one.leg === data.leg);
    if (!found || !books.charged) throw new Error(`${type} at position ${position} is of a leg that was not charged`);
    return found;
  };
  const charge = () => {
    if (books.charged || portal === null) throw new Error(`${type} at position ${position} charges a payment twice, or one that did not begin`);
    books.charged = true;
    by('R1', books);
    by('R2', books);
  };
  switch (type) {
    case 'PaymentInitiated':
      books.portal = once(data.portalId);
      books.legs = data.legs.map((one) => ({ leg: once(one.leg), mid: once(one.account.merchantAccount), principal: one.principalCents, fee: one.feeCents, voided: [0, 0] })); // prettier-ignore
      break;
    case 'PaymentCreated':
      charge();
      break;
    case 'PaymentResolved':
      if (data.as === 'succeeded') charge();
      break;
    case 'PaymentVoided':
      // A charge that was pending or unknown was not posted. So nothing is taken back.
      if (books.charged) {
        const { mid, voided } = leg();
        voided[0] += data.principalCents;
        voided[1] += data.feeCents;
        by('R3', { portal, mid, principal: data.principalCents, fee: data.feeCents });
      }
      break;
    case 'PaymentRefunded':
    case 'FeeRefunded':
      by('R7', { portal, mid: leg().mid, cents: data.principalCents });
      by('R8', { portal, mid: leg().mid, cents: data.feeCents });
      break;
    case 'PaymentSettled':
      by('R4', { mid: leg().mid, cents: data.grossCents }, { at: data.closedAt });
      by('R5', { mid: leg().mid, cents: data.feeCents }, { at: data.closedAt });
      break;
    case 'SettlementWithdrawn':
      mirrored('R4', { mid: leg().mid, cents: data.grossCents }, { at: data.closedAt });
      by('R5', { mid: leg().mid, cents: -data.feeCents }, { at: data.closedAt });
      break;
    case 'SettlementRejected': {
      const { mid, principal, fee, voided } = leg();
      by('R14', { portal, mid, principal: principal - voided[0], fee: fee - voided[1] }, { at: data.closedAt });
      break;
    }
    case 'PaymentDisputed': {
      books.disputes ??= new Map();
      const known = books.disputes.get(data.disputeId);
      const named = data.taken?.map(({ leg: name, principalCents: principal, feeCents: fee, excessCents: late = 0 }) => {
        const on = books.legs.find((one) => one.leg === name);
        if (!on) throw new Error(`${type} at position ${position} takes from a leg that was not charged`);
        return { leg: name, mid: on.mid, principal, fee, late };
      });
      const shares = named ?? known?.shares ?? sharesOf(books, data);
      const stand = (status) => (status === undefined || status === 'recovered' ? 'kept' : status === 'lost' ? 'lost' : 'taken');
      const [was, is] = [stand(known?.status), stand(data.status)];
      const rules = (from, to) =>
        ({
          'kept taken': ['R9'],
          'kept lost': ['R9', 'R11'],
          'taken lost': ['R11'],
          'taken kept': ['R12'],
          'lost kept': ["R12'"],
          'lost taken': ["R12''"],
        })[`${from} ${to}`] ?? [];
      const at = known ? metadata.recordedAt : `${data.openedOn}T00:00:00.000Z`;
      const cents = (all) => all.map(({ leg: name, principal, fee, late = 0 }) => `${name} ${principal} ${fee} ${late}`).join();
      // A dispute that takes other cents than before gives the old ones back first.
      if (was !== 'kept' && is !== 'kept' && cents(known.shares) !== cents(shares)) {
        for (const rule of rules(was, 'kept')) by(rule, { portal, shares: known.shares }, { at });
        for (const rule of rules('kept', is)) by(rule, { portal, shares }, { at });
      } else for (const rule of rules(was, is)) by(rule, { portal, shares: was === 'kept' ? shares : known.shares }, { at });
      const late = (all, sign) => all.map((one) => [one.mid, sign * (one.late ?? 0)]);
      by('R22', { moved: [...(was === 'kept' ? [] : late(known.shares, -1)), ...(is === 'kept' ? [] : late(shares, 1))] }, { at });
      books.disputes.set(data.disputeId, { status: data.status, shares });
    }
  }
};

/**
 * The disputed cents of each leg, if the event does not say them. The named leg gives them, else first the principal's, then the fee's. Each gives at most what earlier disputes left.
 * One charge of principal and fee shares its cents pro rata; a remaining cent goes to the larger remainder.
 */
const sharesOf = ({ legs, disputes }, { leg: named, disputedAmountCents }) => {
  const earlier = [...disputes.values()].flatMap(({ status, shares }) => (status === 'recovered' ? [] : shares));
  const mine = legs.filter(({ leg }) => named === undefined || leg === named);
  let left = disputedAmountCents;
  const taken = mine.map(({ leg, principal, fee }) => {
    const gone = earlier.reduce((total, share) => total + (share.leg === leg ? share.principal + share.fee : 0), 0);
    const cents = Math.min(left, Math.max(0, principal + fee - gone));
    left -= cents;
    return cents;
  });
  taken[0] += left;
  return mine.flatMap(({ leg, mid, principal: of, fee }, index) => {
    if (taken[index] === 0) return [];
    const [product, charged] = [BigInt(taken[index]) * BigInt(of), BigInt(of + fee)];
    const up = (product % charged) * 2n >= charged ? 1n : 0n;
    const principal = Number(product / charged + up);
    return [{ leg, mid, principal, fee: taken[index] - principal }];
  });
};

/** The rules with postings of a settlement line. If a sale or a dispute fits a payment, the events of the payment post its amount. */
const postLine = (mid, { type, accepted, grossCents: gross, feeCents: fee, netCents: net, result, expectedCents, undone }, sides) => {
  const ones = (...pairs) => pairs.map(([rule, cents]) => [rule, postingsOf(sides(rule, { mid, cents }))]).filter(([, made]) => made.length > 0);
  if (!accepted) return [];
  if (result !== 'MATCHED' && result !== 'AMOUNT_MISMATCH') return ones(['R15', gross], ['R5', fee]);
  // Nothing of such a payment was posted, so its charge and its refund are posted here.
  if (undone && (type === 'sale' || type === 'refund')) return ones(['R21', gross], ['R5', fee]);
  switch (type) {
    case 'sale':
      return [];
    case 'refund':
      return ones(["R4'", gross], ['R5', fee]);
    case 'refund_failure':
      return ones(['R15', gross], ['R5', fee]);
    case 'chargeback':
    case 'chargeback_reversal':
      return ones(['R13', fee], ['R15', expectedCents === null ? 0 : gross - expectedCents]);
    case 'fee':
      return ones(['R5', -net]);
    case 'adjustment':
      return ones(['R15', net]);
    default:
      throw new Error(`a settlement line of type ${type}: this verifier does not know it; take a newer verify.mjs`);
  }
};

// ------------------------------------------------------------------------------------------------------------------------------------
// An evidence pack.

const REPORTS = ['payments', 'transactions', 'reversals', 'fees', 'payable', 'batches', 'disputes', 'open', 'trial-balance', 'attempts', 'webhooks', 'staff-actions', 'line-items', 'deposits']; // prettier-ignore
const OTHERS = ['journal.csv', 'journal.ndjson', 'journal.hledger', 'trial-balance.json', 'events.ndjson', 'other-events.ndjson', 'exceptions.ndjson', 'drift.json', 'head.txt', 'last-head.txt', 'verify.mjs']; // prettier-ignore
const FIRST_HEAD = 'first-head.txt';
const filesOf = (first) => [...REPORTS.flatMap((name) => [`${name}.csv`, `${name}.ndjson`]), ...OTHERS, ...(first > 0 ? [FIRST_HEAD] : [])];

/** Reads the manifest. Throws if it is not signed, or does not name exactly the files that a pack has. */
const openManifest = (folder, given) => {
  for (const name of ['manifest.json', 'manifest.note'])
    if (!existsSync(join(folder, name)) || !lstatSync(join(folder, name)).isFile())
      throw new Error(`${name} is missing${name === 'manifest.note' ? ': the manifest of this pack is not signed' : ''}`);
  const text = whole(join(folder, 'manifest.json'));
  const manifest = JSON.parse(text);
  const { text: signed, name: origin } = openNote(whole(join(folder, 'manifest.note')), given ?? manifest.keys, 'manifest');
  if (signed !== `payfold evidence pack\n${origin}\nmanifest.json sha256 ${sha256(Buffer.from(text)).toString('hex')}\n`)
    throw new Error('manifest.json is not the manifest that was signed');
  const names = manifest.files.map(({ file }) => file);
  for (const name of names)
    if (!/^[a-z][a-z-]*\.[a-z]+$/.test(name)) throw new Error(`the manifest names ${JSON.stringify(name)}: no file of a pack has a path`);
  const needed = filesOf(manifest.events.first);
  const held = readdirSync(folder).filter((name) => name !== 'manifest.json' && name !== 'manifest.note');
  for (const name of needed) if (!names.includes(name)) throw new Error(`the manifest does not name ${name}`);
  for (const name of names) if (!needed.includes(name)) throw new Error(`the manifest names ${name}, which no pack has`);
  if (names.length !== needed.length) throw new Error('the manifest names a file twice');
  for (const name of needed) if (!held.includes(name)) throw new Error(`${name} is missing`);
  for (const name of held) if (!needed.includes(name)) throw new Error(`${name} is in the folder, but the manifest does not name it`);
  return { manifest, origin };
};

const checkFile = async (folder, { file, bytes, sha256: expected }) => {
  if (!lstatSync(join(folder, file)).isFile()) throw new Error(`${file} is no ordinary file`);
  const hash = createHash('sha256');
  let read = 0;
  for await (const piece of createReadStream(join(folder, file))) {
    hash.update(piece);
    read += piece.length;
  }
  if (read !== bytes || hash.digest('hex') !== expected) throw new Error(`${file} is not the file that the manifest names`);
};

const checkRows = ({ file, rows }, found) => {
  if (rows !== found) throw new Error(`${file} has ${found} rows, not the ${rows} that the manifest names`);
};

/** The apostrophe before a formula or another apostrophe, in a text and after a character inside it that ends a cell for some spreadsheets. */
const apostrophes = (value) => {
  const inside = value.replace(/([;\t-\r\x85\u2028\u2029])(?='|(?:(?![\t-\r\x85\u2028\u2029])[\s\p{Cc}\p{Cf}"])*[=+\-@＝＋－＠])/gu, "$1'");
  return /^(?:'|[\s\p{Cc}\p{Cf}"]*[=+\-@＝＋－＠]|[\t\r])/u.test(value) ? `'${inside}` : inside;
};
/** Control characters as escapes. In a text with escapes, its own backslashes are doubled. */
const guarded = (value) => {
  const text = apostrophes(value);
  const control = /(?![\t\n\r])[\p{Cc}\u202d\u202e]/gu;
  if (!control.test(text) && !/\\u[\da-f]{4}/.test(text)) return text;
  return text.replaceAll('\\', '\\\\').replace(control, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, '0')}`);
};
/** Packs before that have no second apostrophe and no escapes. */
const guardedUnescaped = (value) => {
  const inside = value.replace(/([;\t-\r\x85\u2028\u2029])(?=(?:(?![\t-\r\x85\u2028\u2029])[\s\p{Cc}\p{Cf}"])*[=+\-@＝＋－＠])/gu, "$1'");
  return /^[\s\p{Cc}\p{Cf}"]*[=+\-@＝＋－＠]|^[\t\r]/u.test(value) ? `'${inside}` : inside;
};
/** Older packs have the apostrophe only at the begin of a text. */
const guardedBefore = (value) => (/^[\s\p{Cc}]*[=+\-@＝＋－＠]|^[\t\r]/u.test(value) ? `'${value}` : value);
/** CSV as RFC 4180. */
const csvCell = (value, guard) => {
  if (typeof value !== 'string') return value === null ? '' : String(value);
  const text = guard(value);
  return /[",;\t\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const csvLine = (cells, guard = guarded) => `${cells.map((cell) => csvCell(cell, guard)).join(',')}\r\n`;

/** Checks the number of rows and the sums of a report, and that both its forms hold the same. */
const checkReport = async (folder, name, file) => {
  const [csv, ndjson] = [file(`${name}.csv`), file(`${name}.ndjson`)];
  const sums = {};
  const forms = [guarded, guardedUnescaped, guardedBefore].map((guard) => ({ guard, hash: createHash('sha256') }));
  let rows = 0;
  for await (const row of rowsOf(join(folder, ndjson.file))) {
    for (const { guard, hash } of forms) {
      if (rows === 0) hash.update(csvLine(Object.keys(row), guard));
      hash.update(csvLine(Object.values(row), guard));
    }
    rows += 1;
    for (const [column, value] of Object.entries(row)) if (column.endsWith('_cents')) sums[column] = (sums[column] ?? 0) + (value ?? 0);
  }
  for (const one of [csv, ndjson]) {
    checkRows(one, rows);
    if (canonical(one.totals) !== canonical(sums)) throw new Error(`the sums of ${one.file} are not those that the manifest names`);
  }
  const same = rows === 0 ? /^[^\r\n]*\r\n$/.test(whole(join(folder, csv.file))) : forms.some(({ hash }) => hash.digest('hex') === csv.sha256);
  if (!same) throw new Error(`${csv.file} does not hold the rows of ${ndjson.file}`);
};

const count = (number, what) => `${number} ${what}${number === 1 ? '' : 's'}`;

/** Adds every event between the two heads to the tree of the first one. Returns the number of payments in the pack, and the events of closings. */
const checkEvents = async (folder, { events, query }, { first, last, head }, file) => {
  const tree = growingTree(events.first, hashes(events.subtrees));
  if (first && (first.size !== events.first || !tree.root().equals(first.root))) throw new Error('the pack does not begin at its first head');
  if (first && first.at > query.from) throw new Error(`the first head was signed at ${first.at}, after the period began`);
  let [leaf, payments, others] = [events.first, 0, 0];
  const closings = [];
  const look = (event) => {
    if (event.stream.startsWith('payment-') && event.revision === 0) payments += 1;
    if (event.stream === 'adjustment-periods') closings.push(event);
  };
  for await (const one of rowsOf(join(folder, 'events.ndjson'))) {
    if (one.leaf !== leaf) throw new Error(`events.ndjson goes on with event ${one.leaf} of the log, and event ${leaf} is missing`);
    tree.add(eventHash(one.event));
    leaf += 1;
    look(one.event);
  }
  if (leaf !== last.size || last.size !== events.last)
    throw new Error(`events.ndjson has ${leaf - events.first} of the ${last.size - events.first} events between the heads`);
  if (!tree.root().equals(last.root))
    throw new Error('the events of events.ndjson are not those between the heads: one was changed, put in or exchanged');
  if (!isConsistent(last.size, last.root, head.size, head.root, hashes(events.consistency)))
    throw new Error('head.txt does not begin with last-head.txt');
  const covers = ({ type, data }) => type === 'TrialBalanceRecorded' && data.to >= query.to;
  if (last.size !== head.size && !closings.some(covers))
    throw new Error('the events end before the newest head, and the period was not closed by then');
  for await (const one of rowsOf(join(folder, 'other-events.ndjson'))) {
    checkEvent(one, head);
    if (one.leaf >= events.first && one.leaf < events.last) throw new Error(`the event at position ${one.event.position} stands twice in the pack`);
    others += 1;
    look(one.event);
  }
  checkRows(file('events.ndjson'), leaf - events.first);
  checkRows(file('other-events.ndjson'), others);
  return { payments, closings };
};

/**
 * Posts the events of one part of the payments, and all events of other streams if `isFirst`, and compares with journal.ndjson. `balances` gets the
 * sums of the entries.
 */
const checkEntries = async (folder, { events, query: { from, to } }, { keeps, isFirst }, balances) => {
  const books = createBooks(keeps);
  for await (const { leaf, event } of rowsOf(join(folder, 'other-events.ndjson'))) if (leaf < events.first) books.post(event);
  const journal = linesOf(join(folder, 'journal.ndjson'));
  const read = async () => {
    const { value, done } = await journal.next();
    return done ? null : { line: value, position: JSON.parse(value).position };
  };
  let next = await read();
  for await (const { event } of rowsOf(join(folder, 'events.ndjson'))) {
    const posted = books.post(event);
    const isMine = event.stream.startsWith('payment-') ? keeps(event.stream) : isFirst;
    const booked = posted.filter(({ bookedAt }) => bookedAt >= from && bookedAt < to);
    if (isMine) for (const entry of posted) balances.add(entry, from, to);
    const found = [];
    for (; next?.position === event.position; next = await read()) found.push(next.line);
    if (!isMine) continue;
    for (const [index, entry] of booked.entries()) {
      const where = `${entry.rule} (${entry.description}) of the event at position ${event.position}`;
      if (index >= found.length) throw new Error(`the journal lacks the entry ${where}${next ? `; it goes on at position ${next.position}` : ''}`);
      if (found[index] !== JSON.stringify(entry)) throw new Error(`the journal's entry ${where} is not what the event posts`);
    }
    if (found.length > booked.length) throw new Error(`the journal has an entry at position ${event.position} that its event does not post`);
  }
  if (next) throw new Error(`the journal has an entry at position ${next.position} that no event between the heads posts`);
  return balances;
};

/** Sums of accounts, before the period and in it. */
const newBalances = () => {
  const accounts = new Map();
  return {
    accounts,
    entries: 0,
    earlier: 0,
    add({ bookedAt, postings }, from, to) {
      if (bookedAt >= to) return;
      if (bookedAt < from) this.earlier += 1;
      else this.entries += 1;
      for (const { account, cents } of postings) {
        let sums = accounts.get(account);
        if (!sums) accounts.set(account, (sums = { opening: 0, debit: 0, credit: 0 }));
        if (bookedAt < from) sums.opening += cents;
        else if (cents > 0) sums.debit += cents;
        else sums.credit -= cents;
      }
    },
  };
};

const JOURNAL_COLUMNS = ['position', 'entry_id', 'event_id', 'rule', 'description', 'payment_id', 'recorded_at', 'effective_at', 'booked_at', 'account', 'debit_cents', 'credit_cents']; // prettier-ignore
const dollars = (cents) => `${cents < 0 ? '-' : ''}${String(Math.abs(cents)).padStart(3, '0').replace(/(..)$/, '.$1')}`;

/** Checks that the journal says the same as CSV and as hledger's text. */
const checkJournalForms = async (folder, entries, file) => {
  const [csv, hledger] = [createHash('sha256'), createHash('sha256')];
  csv.update(csvLine(JOURNAL_COLUMNS));
  hledger.update('; USD\ncommodity USD 1000.00\n\n');
  const declared = new Set();
  for await (const one of rowsOf(join(folder, 'journal.ndjson'))) {
    const fresh = one.postings.map(({ account }) => account).filter((account) => !declared.has(account));
    for (const account of fresh) declared.add(account);
    if (fresh.length > 0) hledger.update(`${fresh.map((account) => `account ${account}\n`).join('')}\n`);
    hledger.update(
      `${one.bookedAt.slice(0, 10)} * (${one.rule}) ${one.description}${one.paymentId === null ? '' : ` | ${one.paymentId}`}\n` +
        `    ; entry: ${one.entryId}, event: ${one.eventId}, position: ${one.position}\n` +
        `    ; recorded: ${one.recordedAt}, effective: ${one.effectiveAt}\n` +
        `${one.postings.map(({ account, cents }) => `    ${account}  USD ${dollars(cents)}\n`).join('')}\n`,
    );
    for (const { account, cents } of one.postings)
      csv.update(csvLine([one.position, one.entryId, one.eventId, one.rule, one.description, one.paymentId, one.recordedAt, one.effectiveAt, one.bookedAt, account, Math.max(cents, 0), Math.max(-cents, 0)])); // prettier-ignore
  }
  for (const [name, hash] of Object.entries({ 'journal.csv': csv, 'journal.hledger': hledger }))
    if (file(name).sha256 !== hash.digest('hex')) throw new Error(`${name} does not hold the entries of journal.ndjson`);
  for (const name of ['journal.csv', 'journal.ndjson', 'journal.hledger']) checkRows(file(name), entries);
};

/** Compares the trial balance with the sums of the entries, and with what was recorded when a period was closed. */
const checkTrialBalance = (folder, { events, query: { from, to } }, balances, closings, file) => {
  const { from: begin, to: end, accounts } = JSON.parse(whole(join(folder, 'trial-balance.json')));
  if (begin !== from || end !== to) throw new Error('trial-balance.json is of another period');
  checkRows(file('trial-balance.json'), accounts.length);
  const same = createHash('sha256');
  for (const row of accounts) same.update(`${JSON.stringify({ account: row.account, opening_cents: row.openingCents, debit_cents: row.debitCents, credit_cents: row.creditCents, closing_cents: row.closingCents })}\n`); // prettier-ignore
  if (same.digest('hex') !== file('trial-balance.ndjson').sha256)
    throw new Error('trial-balance.json does not hold the rows of trial-balance.ndjson');
  const shown = new Map(accounts.map((row) => [row.account, row]));
  const NONE = { openingCents: 0, debitCents: 0, creditCents: 0, closingCents: 0 };
  const of = (account) => shown.get(account) ?? NONE;

  for (const account of new Set([...shown.keys(), ...balances.accounts.keys()])) {
    const { openingCents, debitCents, creditCents, closingCents } = of(account);
    const { debit, credit } = balances.accounts.get(account) ?? { debit: 0, credit: 0 };
    if (debitCents !== debit || creditCents !== credit)
      throw new Error(`${account}: its entries come to debits of ${debit} and credits of ${credit} cents, the trial balance says ${debitCents} and ${creditCents}`); // prettier-ignore
    if (closingCents !== openingCents + debit - credit) throw new Error(`${account}: its closing balance is not its opening and what moved`);
  }
  if (accounts.reduce((total, { openingCents }) => total + openingCents, 0) !== 0) throw new Error('the opening balances do not come to zero');
  const said = ['the trial balance follows from those entries'];

  const compare = (sums, column, what) => {
    for (const account of new Set([...sums.keys(), ...shown.keys()]))
      if (of(account)[column] !== (sums.get(account) ?? 0))
        throw new Error(`${account}: ${what} is ${sums.get(account) ?? 0} cents, the trial balance says ${of(account)[column]}`);
  };
  const closing = (event) => new Map(event.data.closing.map(({ account, debitCents, creditCents }) => [account, debitCents - creditCents]));
  const recorded = (end) => closings.find(({ type, data }) => type === 'TrialBalanceRecorded' && data.to === end);
  const before = recorded(from);
  if (events.first === 0) compare(new Map([...balances.accounts].map(([account, { opening }]) => [account, opening])), 'openingCents', 'its opening by the events'); // prettier-ignore
  if (before) compare(closing(before), 'openingCents', `its opening, recorded when the period to ${from} was closed,`);
  if (events.first === 0) said.push('the openings follow from the events: the pack begins where the log begins');
  else if (before) said.push(`the openings are those that the event at position ${before.position} recorded when the period to ${from} was closed`);
  else said.push('the openings are those of the signed manifest: they come from events before the pack, so this check does not make them again');

  const after = recorded(to);
  if (after) {
    compare(closing(after), 'closingCents', `its closing, recorded when the period to ${to} was closed,`);
    const closed = closings.find(({ type, data }) => type === 'PeriodClosed' && data.to === to);
    const isWhole = closed?.data.from === from || (closed?.data.from === null && events.first === 0 && balances.earlier === 0);
    if (isWhole && (after.data.entries !== balances.entries || after.data.digest !== file('journal.ndjson').sha256))
      throw new Error(`the journal is not the one whose digest was recorded when the period to ${to} was closed`);
    said.push(
      `the closing balances${isWhole ? ' and the digest of the journal' : ''} are those that were recorded when the period to ${to} was closed`,
    );
  }
  return said;
};

/** The line items sum to the journal, account by account: the manifest names both sums, and the trial balance has the journal's. */
const checkTie = (folder, { tie }) => {
  const { accounts } = JSON.parse(whole(join(folder, 'trial-balance.json')));
  const moved = new Map(accounts.map(({ account, debitCents, creditCents }) => [account, debitCents - creditCents]));
  for (const { account, journalCents, linesCents, differenceCents } of tie) {
    if (journalCents !== (moved.get(account) ?? 0)) throw new Error(`${account}: the tie says ${journalCents} cents of the journal, the trial balance says ${moved.get(account) ?? 0}`); // prettier-ignore
    if (linesCents - journalCents !== differenceCents || differenceCents !== 0) throw new Error(`${account}: the line items come to ${linesCents} cents, the journal to ${journalCents}`); // prettier-ignore
    moved.delete(account);
  }
  for (const [account, cents] of moved) if (cents !== 0) throw new Error(`${account}: the tie does not name it, and it moved ${cents} cents`);
  return `the line items come to the sums of the journal in ${count(tie.length, 'account')}, as the signed manifest names them`;
};

/** Checks a whole pack. Throws at the first fault. Memory does not grow with the pack: files are streamed, `paymentsAtOnce` are kept. */
export const checkPack = async (folder, given = null, paymentsAtOnce = PAYMENTS_AT_ONCE) => {
  const { manifest, origin } = openManifest(folder, given);
  const said = [given ? 'the manifest was signed with a key that you trust' : 'the manifest was signed with a key that it names itself: this proves nothing about its origin; use --key']; // prettier-ignore
  const { from, to } = manifest.query;
  const file = (name) => manifest.files.find((one) => one.file === name);
  for (const one of manifest.files) await checkFile(folder, one);
  for (const name of REPORTS) await checkReport(folder, name, file);
  const drift = JSON.parse(whole(join(folder, 'drift.json')));
  const rows = { 'exceptions.ndjson': await lineCount(join(folder, 'exceptions.ndjson')), 'drift.json': drift.differences.length, 'head.txt': 1, 'last-head.txt': 1, 'verify.mjs': 0, ...(manifest.events.first > 0 && { [FIRST_HEAD]: 1 }) }; // prettier-ignore
  for (const [name, found] of Object.entries(rows)) checkRows(file(name), found);
  if (drift.digest !== manifest.digest) throw new Error('drift.json has another digest than the manifest names');
  said.push(`${manifest.files.length} files are those of the manifest, with its numbers of rows and its sums`);

  const openAs = (name) => {
    const head = openHead(whole(join(folder, name)), given ?? manifest.keys);
    if (head.origin !== origin) throw new Error(`${name} is a head of another log`);
    return head;
  };
  const heads = { head: openAs('head.txt'), last: openAs('last-head.txt'), first: manifest.events.first > 0 ? openAs(FIRST_HEAD) : null };
  const { head, last, first } = heads;
  if (head.size !== manifest.size || head.root.toString('base64') !== manifest.root || head.position !== manifest.position)
    throw new Error('head.txt is not the head that the manifest names');
  said.push(`the newest head, of ${count(head.size, 'event')}, was signed at ${head.at}`);
  const { payments, closings } = await checkEvents(folder, manifest, heads, file);
  const begin = first ? `the head of ${first.size} events, signed at ${first.at},` : 'the begin of the log';
  said.push(
    `the ${count(last.size - manifest.events.first, 'event')} between ${begin} and the head of ${last.size} events, signed at ${last.at}, are complete`,
  );
  said.push(`${count(file('other-events.ndjson').rows, 'other event')} are in the log of the newest head`);

  const parts = Math.max(1, Math.ceil(payments / paymentsAtOnce));
  const balances = newBalances();
  for (let number = 0; number < parts; number++) {
    const keeps = (stream) => parts === 1 || sha256(Buffer.from(stream)).readUInt32BE(0) % parts === number;
    await checkEntries(folder, manifest, { keeps, isFirst: number === 0 }, balances);
  }
  await checkJournalForms(folder, balances.entries, file);
  said.push(`the ${balances.entries} entries of the journal from ${from} to ${to} are what those events post`);
  said.push(...checkTrialBalance(folder, manifest, balances, closings, file));
  said.push(checkTie(folder, manifest));
  said.push(
    `not made again here, only signed: the other reports, the exceptions, and the drift report, which names ${count(drift.differences.length, 'difference')}`,
  );
  return said;
};

// ------------------------------------------------------------------------------------------------------------------------------------
// The command.

const USE = 'use: node verify.mjs prove|consistency|head|pack PATH [--key VKEY]';
const main = async ([what, path, ...options]) => {
  const [flag, key, more] = options;
  if (options.length > 0 && (flag !== '--key' || !key || more)) throw new Error(USE);
  // A key has the form name+id+key. Anything else is the name of a file.
  if (key !== undefined && !existsSync(key) && !/^[^+]+\+[0-9a-f]{8}\+\S+/.test(key))
    throw new Error(`the file ${key} with the trusted keys does not exist`);
  const given = key === undefined ? null : (existsSync(key) ? readFileSync(key, 'utf8') : key).split('\n').filter(Boolean);
  const json = () => JSON.parse(readFileSync(path, 'utf8'));
  switch (path && what) {
    case 'prove': {
      const { head, count: proved } = checkInclusion(json(), given ?? json().keys);
      return [`${proved} events are in the log of ${head.size} events that was signed at ${head.at}`];
    }
    case 'consistency': {
      const { first, second } = checkConsistency(json(), given ?? json().keys);
      return [`the log of ${second.size} events begins with the ${first.size} that were signed at ${first.at}`];
    }
    case 'head':
      if (!given) throw new Error('a head needs the key that you trust: --key');
      return [`${openHead(readFileSync(path, 'utf8'), given).size} events, signed`];
    case 'pack':
      return checkPack(path, given);
    default:
      throw new Error(USE);
  }
};

/** Characters that a terminal obeys, or that are not displayed: control and format characters, ends of lines, and others without a look. */
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu;
/** A line as it is printed. Names and values of unverified files stand in it, so such characters are written as `\u001b`. */
const printable = (line) => line.replace(UNSEEN, (one) => one.replace(/[^]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`));

if (process.argv[1] && import.meta.url === pathToFileURL(realpathSync(process.argv[1])).href)
  main(process.argv.slice(2)).then(
    (said) => said.forEach((line) => console.log(printable(`ok: ${line}`))),
    (error) => {
      console.error(printable(`NOT OK: ${error.message}`));
      process.exitCode = 1;
    },
  );

/** Rules of an erasure that need no database: its events, its obstacles, the age of a payment, the hash of an address, and the erasure files. */
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { appendFileSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { checkout as checkoutDecider, type KnownCheckout } from '#checkout';
import { fold } from '#kernel';
import { payment as paymentDecider, type PaymentEvent, type VisiblePayment } from '#payments';
import { KeyRing, newKeyRing, NotOurs, systemIds } from '#platform';
import { AT, charged, declined, disputed, ended, fenced, initiated, move, refundRequested, unknown } from '../../test/support/given.js';
import { ERASURE_STREAM, type ErasureCommand, MAX_SUBJECTS, type Subject, subjectGroups } from './erasure.js';
import { appendErasures, type ErasureLine, erasureFiles, readErasures } from './erasure-files.js';
import { mailMac } from './personal-use.js';
import { cutoffOf } from './retention.js';
import { isCheckoutOpen, obstacleIn } from './subjects.js';

const ids = systemIds(() => Date.parse(AT));
const subjects = (count: number): Subject[] => Array.from({ length: count }, () => ({ stream: `payment-${ids.uuid()}`, keyId: ids.uuid() }));
const command = (of: readonly Subject[]): ErasureCommand => ({
  type: 'Erase',
  erasureId: '018f0000-0000-7000-8000-0000000000aa',
  cause: 'email',
  reasonCode: 'request',
  subjects: of,
});

describe('an event of an erasure', () => {
  const { decide } = ERASURE_STREAM.decider;

  test('names what is erased and why, and nothing else', () => {
    const [subject] = subjects(1);
    const { type: _, ...data } = command([subject!]);
    expect(decide(0, command([subject!]))).toEqual([{ type: 'PersonalDataErased', data }]);
    expect(Object.keys(data).sort()).toEqual(['cause', 'erasureId', 'reasonCode', 'subjects']);
  });
  test('has 1 to 500 subjects', () => {
    expect(decide(3, command(subjects(MAX_SUBJECTS)))).toHaveLength(1);
    for (const count of [0, MAX_SUBJECTS + 1]) expect(() => decide(0, command(subjects(count)))).toThrow('1 to 500 subjects');
  });
  test('a large erasure is shared out over events; a subject of two payments is named once', () => {
    const many = subjects(1_001);
    const groups = subjectGroups([{ subjects: many.slice(0, 600) }, { subjects: many.slice(500) }]);
    expect(groups.map(({ length }) => length)).toEqual([500, 500, 1]);
    expect(groups.flat()).toEqual(many);
    expect(subjectGroups([{ subjects: [] }])).toEqual([]);
  });
});

describe('the obstacle of a payment', () => {
  const ATTEMPT = '018f0000-0000-7000-8000-0000000000f1';
  const obstacle = (...facts: PaymentEvent[]) => obstacleIn(fold(paymentDecider, facts) as VisiblePayment);
  const refund = refundRequested(ATTEMPT, { legs: [move(ATTEMPT, 'principal', 10_000, 0, 'refund')], lines: [[3333, 0], [3333, 0], [3334, 0]] }); // prettier-ignore

  test('none: it has come to an end', () => {
    expect(obstacle(...charged())).toBeNull();
    expect(obstacle(initiated(), declined)).toBeNull();
    expect(obstacle(...charged(), refund, ended(ATTEMPT, { outcome: 'rejected' }))).toBeNull();
  });
  test('it is under way, or its outcome is unknown', () => {
    expect(obstacle(initiated())).toBe('under_way');
    expect(obstacle(initiated(), unknown)).toBe('unknown_outcome');
    expect(obstacle(initiated(), fenced())).toBe('unknown_outcome');
  });
  test('a refund is in progress', () => expect(obstacle(...charged(), refund)).toBe('open_reversal'));
  test('a dispute is not decided', () => {
    for (const status of ['debited', 'in_dispute'] as const) expect(obstacle(...charged(), disputed({ status }))).toBe('disputed');
    for (const status of ['lost', 'recovered'] as const) expect(obstacle(...charged(), disputed({ status }))).toBeNull();
    // A decided dispute may be reopened.
    expect(obstacle(...charged(), disputed({ status: 'lost' }), disputed({ status: 'in_dispute' }))).toBe('disputed');
  });
});

describe('an open checkout', () => {
  const now = Date.parse(AT);
  const session = (phase: KnownCheckout['phase'], expiresAt: number) => ({ phase, expiresAt: new Date(expiresAt).toISOString() }) as KnownCheckout;

  test('takes a card, or waits for an outcome', () => {
    expect(isCheckoutOpen(session('open', now + 1), now)).toBe(true);
    expect(isCheckoutOpen(session('open', now), now)).toBe(false);
    for (const phase of ['processing', 'unknown'] as const) expect(isCheckoutOpen(session(phase, now - 1), now)).toBe(true);
    for (const phase of ['paid', 'cancelled', 'expired'] as const) expect(isCheckoutOpen(session(phase, now + 1), now)).toBe(false);
    expect(checkoutDecider.initial.phase).toBe('none');
  });
});

describe('retention', () => {
  test.each([
    [1, '2025-01-05T10:00:00.000Z'],
    [7, '2019-01-05T10:00:00.000Z'],
    [99, '1927-01-05T10:00:00.000Z'],
  ])('of %i years counts whole calendar years', (years, cutoff) => expect(cutoffOf(Date.parse(AT), years)).toBe(cutoff));
  test('of a leap day ends on the first of March', () =>
    expect(cutoffOf(Date.parse('2028-02-29T00:00:00.000Z'), 1)).toBe('2027-03-01T00:00:00.000Z'));
});

describe('the hash of an e-mail address', () => {
  const keys = newKeyRing();
  test('is one for all ways to write the address', () => {
    const mac = mailMac(keys, 'zoé.müller@mail.example');
    for (const written of ['  Zoé.Müller@Mail.Example\n', 'ZOÉ.MÜLLER@MAIL.EXAMPLE', 'zoe\u0301.mu\u0308ller@mail.example'])
      expect(mailMac(keys, written)).toEqual(mac);
    expect(mailMac(keys, 'zoe.muller@mail.example')).not.toEqual(mac);
    expect(mac.toString('latin1')).not.toContain('mail');
  });
  test('stays when the ring gets a new key, and differs between rings', () => {
    const [old, fresh] = [Buffer.alloc(32, 1), Buffer.alloc(32, 2)];
    const before = new KeyRing('k1', new Map([['k1', old]])); // prettier-ignore
    const after = new KeyRing('k2', new Map([['k1', old], ['k2', fresh]])); // prettier-ignore
    expect(mailMac(after, 'a@b.example')).toEqual(mailMac(before, 'a@b.example'));
    expect(mailMac(keys, 'a@b.example')).not.toEqual(mailMac(before, 'a@b.example'));
  });
});

describe('erasure files', () => {
  let folder: string;
  beforeEach(() => {
    folder = join(mkdtempSync(join(tmpdir(), 'payfold-erasures-')), 'erasures');
  });
  afterEach(() => rmSync(join(folder, '..'), { recursive: true, force: true }));

  const line = (erasedAt = AT): ErasureLine => {
    const { type: _, ...data } = command(subjects(2));
    return { eventId: ids.uuid(), erasedAt, data };
  };
  const DAY = '2026-01-05.ndjson';
  const names = () => readdirSync(folder).sort();

  test('have a line for each event, by day; only their owner can read them', () => {
    const [one, two, later] = [line(), line(), line('2026-01-06T00:00:00.000Z')];
    appendErasures(folder, [one, two, later]);
    expect(names()).toEqual([DAY, '2026-01-06.ndjson']);
    expect(erasureFiles(folder).map(readErasures)).toEqual([[one, two], [later]]);
    expect(statSync(join(folder, DAY)).mode & 0o077).toBe(0);
    expect(statSync(folder).mode & 0o077).toBe(0);
  });
  test('name an event once, even if it is applied again', () => {
    const [one, two] = [line(), line()];
    appendErasures(folder, [one]);
    appendErasures(folder, [one, two]);
    appendErasures(folder, [two]);
    expect(readErasures(join(folder, DAY))).toEqual([one, two]);
  });
  test('a line that a crash cut off is passed over, and its event is written again', () => {
    const [one, two] = [line(), line()];
    appendErasures(folder, [one]);
    const cut = JSON.stringify(two);
    for (const length of [1, 30, 60, cut.lastIndexOf('},{') + 1, cut.length - 1]) {
      appendFileSync(join(folder, DAY), cut.slice(0, length));
      expect(readErasures(join(folder, DAY))).toEqual([one]);
      appendErasures(folder, [two]);
      expect(readErasures(join(folder, DAY))).toEqual([one, two]);
      writeFileSync(join(folder, DAY), `${JSON.stringify(one)}\n`);
    }
  });
  test.each([
    ['no JSON', 'erased}'],
    ['another value', '{"eventId":7}'],
    ['no id of a key', JSON.stringify(line()).replace(/"keyId":"[^"]*"/, '"keyId":"all"')],
    ['no name of a stream', JSON.stringify(line()).replace(/"stream":"[^"]*"/, '"stream":"account-1"')],
    ['another reason', JSON.stringify(line()).replace('"request"', '"whim"')],
    ['text', 'erase everything'],
  ])('a line that is %s is refused with its number', (_, wrong) => {
    appendErasures(folder, [line()]);
    appendFileSync(join(folder, DAY), `${wrong}\n`);
    expect(() => readErasures(join(folder, DAY))).toThrow(/2026-01-05\.ndjson, line 2: it is no line of an erasure; nothing was changed$/);
  });
  test('a missing file and other names are told apart; a missing folder has no files', () => {
    expect(erasureFiles(folder)).toEqual([]);
    expect(() => readErasures(join(folder, DAY))).toThrow(/does not exist$/);
    appendErasures(folder, [line()]);
    writeFileSync(join(folder, 'notes.txt'), 'mine');
    expect(erasureFiles(folder)).toEqual([join(folder, DAY)]);
  });
  test('nothing is written through a link', () => {
    const elsewhere = join(folder, '..', 'elsewhere');
    writeFileSync(elsewhere, '', { mode: 0o600 });
    appendErasures(folder, [line('2026-01-07T00:00:00.000Z')]);
    symlinkSync(elsewhere, join(folder, DAY));
    expect(() => appendErasures(folder, [line()])).toThrow(NotOurs);
    expect(readFileSync(elsewhere, 'utf8')).toBe('');
  });
});

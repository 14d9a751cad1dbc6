import { describe, expect, test } from '@jest/globals';
import { fold, ServiceError } from '#kernel';
import { type CaseCommand, type CaseEvent, caseRestriction, type Restriction, restrictionInForce, validReason } from './case-restriction.js';

const portalId = '018f0000-0000-7000-8000-00000000000a';
const referenceId = 'CASE-2024-1';
const at = '2026-01-05T10:00:00.000Z';
const later = '2026-01-06T10:00:00.000Z';
const name = { portalId, referenceId };

/** A box stands for its reason: equal reasons under one key make equal boxes. */
const sealed = (reason: string | null) => (reason === null ? null : { key: portalId, box: Buffer.from(reason).toString('base64') });
const blocked = (until: string | null = null, reason: string | null = null): CaseEvent => ({
  type: 'CaseBlocked',
  data: { ...name, until, personal: sealed(reason) },
});
const held = (until: string | null = null, reason: string | null = null): CaseEvent => ({
  type: 'CaseHeld',
  data: { ...name, until, personal: sealed(reason) },
});
const allowed: CaseEvent = { type: 'CaseAllowed', data: { ...name, personal: null } };
const block = { type: 'BlockCase', ...name, until: null, personal: null, at } as const;
const hold = { ...block, type: 'HoldCase' } as const;
const allow = { type: 'AllowCase', ...name, personal: null } as const;

const given = (...facts: CaseEvent[]) => ({
  when: (command: CaseCommand) => ({
    then: (...expected: CaseEvent[]) => expect(caseRestriction.decide(fold(caseRestriction, facts), command)).toEqual(expected),
    thenRefused: (message: RegExp) => {
      const run = () => caseRestriction.decide(fold(caseRestriction, facts), command);
      expect(run).toThrow(ServiceError);
      expect(run).toThrow(message);
    },
  }),
});

describe('a case of a portal (C70, Errors 2)', () => {
  test('is blocked', () =>
    given()
      .when({ ...block, personal: sealed('sold') })
      .then(blocked(null, 'sold')));
  test('is held until a moment', () =>
    given()
      .when({ ...hold, until: later })
      .then(held(later)));
  test('is held until further notice', () => given().when(hold).then(held()));
  test('a block takes the place of a hold, and the other way round', () => {
    given(held(later)).when(block).then(blocked());
    given(blocked())
      .when({ ...hold, until: later })
      .then(held(later));
  });
  test('allow removes a restriction', () => {
    given(blocked()).when(allow).then(allowed);
    given(held(later)).when(allow).then(allowed);
  });
  test('a repeated command changes nothing', () => {
    given(blocked(null, 'sold'))
      .when({ ...block, personal: sealed('sold') })
      .then();
    given().when(allow).then();
    given(blocked(), allowed).when(allow).then();
  });
  test('another end or reason is a new fact', () =>
    given(held(later))
      .when({ ...hold, until: later, personal: sealed('audit') })
      .then(held(later, 'audit')));
  test.each([at, '2026-01-05T09:59:59.999Z', 'tomorrow'])('the end must lie in the future: %s', (until) =>
    given()
      .when({ ...hold, until })
      .thenRefused(/future/),
  );
  test.each(['', 'x'.repeat(256), 'nul\0', 'half \ud83d'])('the reference id obeys the rules of a payment: %j', (bad) =>
    given()
      .when({ ...block, referenceId: bad })
      .thenRefused(/referenceId must/),
  );
  test.each(['', 'x'.repeat(1_001), 'half \udc00'])('so does the reason', (bad) => {
    expect(() => validReason(bad)).toThrow(/reason must/);
  });
});

test('a restriction is in force before its end, not at it (C53)', () => {
  const until = { kind: 'held', until: later } as const;
  expect(restrictionInForce([until], Date.parse(later) - 1)).toBe(until);
  expect(restrictionInForce([until], Date.parse(later))).toBeNull();
  expect(restrictionInForce([{ ...until, until: null }], Date.parse(later))).not.toBeNull();
  expect(restrictionInForce([], 0)).toBeNull();
});

test('of several restrictions the strictest one in force counts: blocked before held, then the latest end', () => {
  const [soon, late] = ['2026-02-01T00:00:00.000Z', '2026-03-01T00:00:00.000Z'];
  const held = (until: string | null) => ({ kind: 'held', until }) as const;
  const blocked = { kind: 'blocked', until: soon } as const;
  const at = (time: string, ...restrictions: readonly Restriction[]) => {
    for (const order of [restrictions, [...restrictions].reverse()])
      expect(restrictionInForce(order, Date.parse(time))).toEqual(restrictionInForce(restrictions, Date.parse(time)));
    return restrictionInForce(restrictions, Date.parse(time));
  };
  expect(at('2026-01-15T00:00:00Z', held(null), blocked, held(late))).toBe(blocked);
  expect(at(soon, blocked, held(late), held(soon))).toEqual(held(late));
  expect(at(soon, held(late), held(null), blocked)).toEqual(held(null));
  expect(at(late, held(late), blocked)).toBeNull();
});

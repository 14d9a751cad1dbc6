/** Tests how long each task for staff stays open (C29, C67). */
import { describe, expect, test } from '@jest/globals';
import { ATTEMPT, charged, initiated, principalRefunded, stateOf, unknown } from '../../test/support/given.js';
import { ACKNOWLEDGED_TASKS, isTaskOpen, STAFF_TASK_STREAM } from './staff.js';

test('a task for staff is open until its question is decided', () => {
  const waits = { evidence: [{}], acknowledged: null };
  const acknowledged = { reason: 'asked the bank', by: 'Dana' };
  const [unknownOne, charge] = [stateOf(initiated(), unknown), stateOf(...charged())];
  for (const reason of ['settled_while_unknown', 'charge_cannot_be_undone'] as const)
    expect([isTaskOpen(reason, unknownOne, waits), isTaskOpen(reason, charge, waits)]).toEqual([true, false]);
  for (const reason of ACKNOWLEDGED_TASKS)
    expect([isTaskOpen(reason, charge, waits), isTaskOpen(reason, charge, { ...waits, acknowledged })]).toEqual([true, false]);
});

test('a task about an overdue outcome is open while its attempt is', () => {
  const refunding = stateOf(...charged(), principalRefunded('refund-1')[0]!);
  const about = (attemptId: string) => ({ evidence: [{ attemptId: 'earlier' }, { attemptId }], acknowledged: null });
  expect(isTaskOpen('outcome_overdue', stateOf(initiated(), unknown), about(ATTEMPT))).toBe(true);
  expect(isTaskOpen('outcome_overdue', refunding, about('refund-1'))).toBe(true);
  expect(isTaskOpen('outcome_overdue', refunding, about(ATTEMPT))).toBe(false);
  expect(isTaskOpen('outcome_overdue', stateOf(...charged()), about(ATTEMPT))).toBe(false);
});

describe('a task', () => {
  const paymentId = '018f0000-0000-7000-8000-000000000001';
  const raise = (leg: string) => ({ type: 'Raise', paymentId, reason: 'settlement_rejected', evidence: { batchId: 'bat_1', leg } }) as const;
  const acknowledge = { type: 'Acknowledge', paymentId, task: 'settlement_rejected', reason: 'asked the bank', by: 'Dana' } as const;
  const { decider } = STAFF_TASK_STREAM;
  type Command = Parameters<typeof decider.decide>[1];
  const typesAfter = (...commands: Command[]) => {
    let state = decider.initial;
    const types: string[] = [];
    for (const command of commands)
      for (const event of decider.decide(state, command)) {
        types.push(event.type);
        state = decider.evolve(state, event);
      }
    return types;
  };
  test('about a batch is raised once while it waits, and acknowledged once', () => {
    expect(typesAfter(raise('principal'), raise('principal'), raise('fee'))).toEqual(['StaffTaskRaised']);
    expect(typesAfter(raise('principal'), acknowledge, acknowledge)).toEqual(['StaffTaskRaised', 'StaffTaskAcknowledged']);
  });
  test('about a batch is raised again after its acknowledgement by other facts only', () => {
    expect(typesAfter(raise('principal'), acknowledge, raise('principal'))).toEqual(['StaffTaskRaised', 'StaffTaskAcknowledged']);
    expect(typesAfter(raise('principal'), acknowledge, raise('fee'), acknowledge)).toEqual([
      'StaffTaskRaised',
      'StaffTaskAcknowledged',
      'StaffTaskRaised',
      'StaffTaskAcknowledged',
    ]);
  });
  test('about an overdue outcome is raised once for each attempt', () => {
    const overdue = (attemptId: string, why: string) =>
      ({ type: 'Raise', paymentId, reason: 'outcome_overdue', evidence: { attemptId, why } }) as const;
    const [first, later] = [overdue('a', 'not_visible'), overdue('b', 'not_visible')];
    expect(typesAfter(first, first, overdue('a', 'unreachable'))).toEqual(['StaffTaskRaised']);
    expect(typesAfter(first, later, first, later)).toEqual(['StaffTaskRaised', 'StaffTaskRaised']);
  });
  test('cannot be acknowledged before it is raised', () => expect(() => typesAfter(acknowledge)).toThrow(/no such task/));
});

/** Tests how long each task for staff stays open (C29, C67). */
import { describe, expect, test } from '@jest/globals';
import { charged, initiated, stateOf, unknown } from '../../test/support/given.js';
import { ACKNOWLEDGED_TASKS, isTaskOpen, STAFF_TASK_STREAM } from './staff.js';

test('a task for staff is open until its question is decided', () => {
  const [unknownOne, charge] = [stateOf(initiated(), unknown), stateOf(...charged())];
  for (const reason of ['settled_while_unknown', 'charge_cannot_be_undone'] as const)
    expect([isTaskOpen(reason, unknownOne, null), isTaskOpen(reason, charge, null)]).toEqual([true, false]);
  for (const reason of ACKNOWLEDGED_TASKS)
    expect([isTaskOpen(reason, charge, null), isTaskOpen(reason, charge, { reason: 'asked the bank', by: 'Dana' })]).toEqual([true, false]);
});

describe('a task about a batch', () => {
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
  test('is raised once while it waits, and acknowledged once', () => {
    expect(typesAfter(raise('principal'), raise('principal'), raise('fee'))).toEqual(['StaffTaskRaised']);
    expect(typesAfter(raise('principal'), acknowledge, acknowledge)).toEqual(['StaffTaskRaised', 'StaffTaskAcknowledged']);
  });
  test('is raised again after its acknowledgement by other facts only', () => {
    expect(typesAfter(raise('principal'), acknowledge, raise('principal'))).toEqual(['StaffTaskRaised', 'StaffTaskAcknowledged']);
    expect(typesAfter(raise('principal'), acknowledge, raise('fee'), acknowledge)).toEqual([
      'StaffTaskRaised',
      'StaffTaskAcknowledged',
      'StaffTaskRaised',
      'StaffTaskAcknowledged',
    ]);
  });
  test('cannot be acknowledged before it is raised', () => expect(() => typesAfter(acknowledge)).toThrow(/no such task/));
});

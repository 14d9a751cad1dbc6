/** Tests how long each task for staff stays open (C29, C67). */
import { expect, test } from '@jest/globals';
import { charged, initiated, stateOf, unknown } from '../../test/support/given.js';
import { isTaskOpen } from './staff.js';

test('a task for staff is open until its question is decided', () => {
  const [unknownOne, charge] = [stateOf(initiated(), unknown), stateOf(...charged())];
  expect([isTaskOpen('settled_while_unknown', unknownOne), isTaskOpen('settled_while_unknown', charge)]).toEqual([true, false]);
  expect([isTaskOpen('charge_cannot_be_undone', unknownOne), isTaskOpen('charge_cannot_be_undone', charge)]).toEqual([true, false]);
  expect(isTaskOpen('settlement_rejected', charge)).toBe(true);
});

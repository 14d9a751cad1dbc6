/** A wait after a call of a gateway takes nothing from the time of the call. */
import { afterEach, beforeEach, expect, test } from '@jest/globals';
import { foundWhole } from '#eventstore';
import { Deadline } from '#kernel';
import { MovableClock } from '../../../test/support/clock.js';
import { callGateway, REQUEST_DEADLINE_MS } from './call.js';

let clock: MovableClock;
let ticking: NodeJS.Timeout;
beforeEach(() => {
  clock = new MovableClock();
  ticking = setInterval(() => clock.advance(100), 1);
});
afterEach(() => clearInterval(ticking));

test('an approval in time counts, also if its request then waits for a slot beyond the limit of the call', async () => {
  const during = async <T>(wait: () => Promise<T>): Promise<T> => {
    const answer = await wait();
    await clock.sleep(2 * REQUEST_DEADLINE_MS);
    return answer;
  };
  const approved = { kind: 'approved', txn: { transactionId: 'ch_1' } } as never;
  const ports = { clock, ownLog: foundWhole, during };
  const outcome = await callGateway(ports, new Deadline(clock, REQUEST_DEADLINE_MS), null, async () => {
    await clock.sleep(19_900);
    return approved;
  });
  expect(outcome).toBe(approved);
});

/** A vendor whose lists never end: ever-new ids, page after page. */
import { afterEach, expect, test } from '@jest/globals';
import { systemClock } from '#kernel';
import type { Fields } from './answers.js';
import { PAGE_LIMIT } from './requests.js';
import { batchPages, type Lists, MAX_PAGES, Scans, UnreadableList } from './scans.js';

let asked = 0;
const page = (): Fields => {
  asked += 1;
  const transactions = Array.from({ length: PAGE_LIMIT }, (_, at) => ({
    transId: `${asked}${String(at).padStart(4, '0')}`,
    submitTimeUTC: '2026-11-29T10:00:00Z',
  }));
  return { transactions, totalNumInResultSet: PAGE_LIMIT };
};
const endless: Lists = { unsettled: async () => page(), batch: async () => page(), batches: async () => ({ batchList: [] }) };
const never = new AbortController().signal;
let scans: Scans | null = null;
afterEach(() => scans?.close());

test('a batch that does not end is refused after the last page', async () => {
  asked = 0;
  const read = async () => {
    let lines = 0;
    for await (const list of batchPages(endless, '7', never)) lines += list.length;
    return lines;
  };
  await expect(read()).rejects.toThrow(`more than ${MAX_PAGES} pages of batch 7`);
  expect(asked).toBe(MAX_PAGES);
});

test('unsettled transactions that do not end are refused, and the next question asks again', async () => {
  asked = 0;
  scans = new Scans(endless, systemClock);
  const question = { ref: 'R', begunMs: systemClock.now(), decidesAfterMs: systemClock.now() };
  const ask = () => scans!.ask(question, never).catch((error: unknown) => error);
  const until = async (isSo: () => boolean) => {
    while (!isSo()) await systemClock.sleep(10);
  };
  // The scan may take longer than a question waits.
  for (const round of [1, 2]) {
    const answer = await ask();
    if (!(answer instanceof UnreadableList)) expect(answer).toMatchObject({ kind: 'in_flight' });
    await until(() => asked >= round * MAX_PAGES);
    await systemClock.sleep(50);
    expect(asked).toBe(round * MAX_PAGES);
  }
});

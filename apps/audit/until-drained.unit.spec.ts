/** An export that waits for a slow reader many times leaves no listeners on the connection. */
import { expect, test } from '@jest/globals';
import { PassThrough } from 'node:stream';
import { untilDrained } from './audit.controller.js';

const EVENTS = ['drain', 'close', 'error'] as const;

test('each wait takes its listeners away, and ends when the reader takes more or is gone', async () => {
  const stream = new PassThrough({ highWaterMark: 1 });
  const listeners = () => EVENTS.map((event) => stream.listenerCount(event));
  const before = listeners();
  for (let wait = 0; wait < 3; wait++) {
    expect(stream.write('a piece')).toBe(false);
    const waited = untilDrained(stream);
    stream.read();
    await waited;
    expect(listeners()).toEqual(before);
  }
  expect(stream.write('a piece')).toBe(false);
  const waited = untilDrained(stream);
  stream.destroy();
  await waited;
});

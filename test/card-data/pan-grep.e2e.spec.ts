/** One round of the search for card data (main.ts). It must find every planted leak and no other card number. */
import { execFile } from 'node:child_process';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, expect, test } from '@jest/globals';
import { newCard, SPELLINGS } from './drive.js';
import { CardSearch, securityCodes } from './scan.js';

const MAIN = new URL('../../dist/test/card-data/main.js', import.meta.url).pathname;
const RUN_MS = 150_000;

test(
  'card data is nowhere but in the request',
  async () => {
    const cwd = await mkdtemp(join(tmpdir(), 'payfold-pan-'));
    try {
      const { code, output } = await new Promise<{ code: number; output: string }>((done) => {
        execFile(process.execPath, [MAIN, '--rounds', '1'], { cwd, timeout: RUN_MS }, (error, stdout, stderr) =>
          done({ code: error ? Number(error.code ?? 99) : 0, output: stdout + stderr }),
        );
      });
      expect([code, output]).toEqual([0, expect.stringMatching(/: 0 hits, (\d+) of \1 planted leaks found/)]);
    } finally {
      await rm(cwd, { recursive: true, force: true });
    }
  },
  RUN_MS + 10_000,
);

describe('the search sees a card number', () => {
  const card = '4242424242424242';
  test.each([
    ['as it is', card],
    ['in a longer run of digits', `999${card}1`],
    ['in groups', '4242 4242-4242 4242'],
    ['percent-encoded groups', '4242%204242%204242%204242'],
    ['as hex', Buffer.from(card).toString('hex')],
    ...[0, 1, 2].map((pad) => [`as base64 after ${pad} bytes`, Buffer.from('x'.repeat(pad) + card).toString('base64')] as [string, string]),
    ['as base64url in JSON', JSON.stringify({ t: Buffer.from(`{"n":"${card}"}`).toString('base64url') })],
    ['backwards', [...card].reverse().join('')],
    ['in two-byte characters', Buffer.from(card, 'utf16le').toString('latin1')],
    ...SPELLINGS.map((spell) => [`as ${spell(card)}`, Buffer.from(spell(card)).toString('latin1')] as [string, string]),
  ])('%s', (_, text) => {
    expect(new CardSearch([card]).scan(Buffer.from(`before ${text} after`, 'latin1')).map(({ digits }) => digits)).toContain(card);
  });
  test('and none where there is none', () => {
    const other = newCard();
    expect(new CardSearch([card]).scan(Buffer.from(`${other} INV-1766000000123 ${'0123456789'.repeat(50)}`))).toEqual([]);
  });
  test('a security code under its name', () => {
    expect(securityCodes(Buffer.from('{"cvv":"123"} cvv=4567 securityCode: 999'))).toHaveLength(3);
    expect(securityCodes(Buffer.from('cvv must be 3 or 4 digits; "cvv":"match"'))).toEqual([]);
  });
});

import { describe, expect, test } from '@jest/globals';
import { contactInText } from './contact-text.js';

describe('a text for the log in clear', () => {
  test.each(['ask ada@example.org', '<ada.lovelace+tax@mail.example.co.uk> wrote', 'ada＠example.org', 'jürgen@exämple.de'])(
    '%s holds an e-mail address',
    (text) => {
      expect(contactInText(text)).toMatch(/e-mail address/);
    },
  );

  test.each([
    'call 512-555-0100',
    'call (512) 555-0100.',
    '(512)555-0100',
    '1 512 555 0100',
    '512.555.0100',
    'tel:+15125550100',
    '+49 30 1234567',
    '+44 (0)20 7946 0958',
    '512‑555‑0100',
    '512 555 0100',
  ])('%s holds a telephone number', (text) => {
    expect(contactInText(text)).toMatch(/telephone number/);
  });

  test.each([
    'transaction 40012345678 of 2026-03-01',
    'line 5125550100 of the file',
    '01890a5d-ac96-774b-bcce-b302099a8057',
    '51255501-0000-7000-8000-512555010000',
    'reported 1234.56, expected 512.55 on 2026-01-31T12:00:00.000Z',
    'C@B, 3 @ 20.00',
    'batches 212 555 and 0100',
    '+5 cents',
  ])('%s may stay', (text) => {
    expect(contactInText(text)).toBeNull();
  });
});

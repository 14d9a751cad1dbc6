import { expect, test } from '@jest/globals';
import { controlsInText, withEscapes } from './controls.js';

/** U+0000 to U+001F, U+007F to U+009F and the bidi overrides, but tab, line feed and carriage return. */
const CONTROLS = [...Array(0xa0).keys(), 0x202d, 0x202e].filter((code) => (code < 0x20 || code > 0x7e) && ![9, 10, 13].includes(code));

test('each control character is refused in every text, and shown as an escape', () => {
  expect(CONTROLS).toHaveLength(29 + 1 + 32 + 2);
  for (const code of CONTROLS) {
    const text = `a${String.fromCharCode(code)}b`;
    expect([code, controlsInText(text), controlsInText(text, { multiline: true })]).toEqual([code, expect.any(String), expect.any(String)]);
    expect(withEscapes(text)).toBe(`a\\u${code.toString(16).padStart(4, '0')}b`);
  }
});

test('tabs and line breaks are refused in a text of one line only, and stay as they are', () => {
  for (const text of ['a\tb', 'a\nb', 'a\r\nb']) {
    expect([controlsInText(text), controlsInText(text, { multiline: true })]).toEqual([expect.any(String), null]);
    expect(withEscapes(text)).toBe(text);
  }
});

test.each(['Müller–Łódź 東京 🚰', 'a\u2066b\u2069', '\u200fשלום\u202b', 'a\u200db', 'a\u2028b', '\\u001b', ''])('%j passes', (text) => {
  expect([controlsInText(text), controlsInText(text, { multiline: true })]).toEqual([null, null]);
  expect(withEscapes(text)).toBe(text);
});

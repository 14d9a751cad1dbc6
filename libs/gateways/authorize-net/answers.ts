/**
 * Reads the vendor's JSON. The reader is liberal: a byte order mark may come first; null, absent and an empty text are the same; a number may be text,
 * and text may be a number; one element of a list may stand without its list. It never guesses: what is no id, amount or time is null.
 */

import { parseExactly } from '#platform';

export type Fields = Readonly<Record<string, unknown>>;

const isFields = (value: unknown): value is Fields => value !== null && typeof value === 'object' && !Array.isArray(value);

/** The object in an answer. null: the answer is no JSON object. */
export const readAnswer = (text: string): Fields | null => {
  try {
    const value = parseExactly(text.startsWith('\ufeff') ? text.slice(1) : text);
    return isFields(value) ? value : null;
  } catch {
    return null;
  }
};

/** Text, or a number as text. Everything else is empty. */
export const textOf = (value: unknown): string => {
  if (typeof value === 'string') return value.trim();
  return typeof value === 'number' && (Number.isSafeInteger(value) || !Number.isInteger(value)) ? String(value) : '';
};

export const fieldsOf = (value: unknown): Fields => (isFields(value) ? value : {});

/** The objects of a list. null: the value is no list. */
export const listOf = (value: unknown): readonly Fields[] | null => {
  if (value === undefined || value === null || value === '') return [];
  const list: readonly unknown[] = Array.isArray(value) ? value : [value];
  return list.every(isFields) ? list : null;
};

/** An id of the vendor: digits, and not `0`. */
export const idOf = (value: unknown): string | null => {
  const text = textOf(value);
  return /^[1-9]\d{0,19}$/.test(text) ? text : null;
};

/** Dollars in decimals to whole cents, without floats. null: no amount, or a part of a cent. */
export const centsOf = (value: unknown): number | null => {
  const match = /^(\d{1,12})(?:\.(\d{1,6}))?$/.exec(textOf(value));
  if (!match) return null;
  const fraction = (match[2] ?? '').padEnd(2, '0');
  if (!/^\d\d0*$/.test(fraction)) return null;
  const cents = Number(match[1]! + fraction.slice(0, 2));
  return Number.isSafeInteger(cents) ? cents : null;
};

/** A time in milliseconds since the epoch. A time without a zone is UTC. null: no time. */
export const instantOf = (value: unknown): number | null => {
  const match = /^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,7})?)(Z|[+-]\d\d:\d\d)?$/.exec(textOf(value));
  if (!match) return null;
  const ms = Date.parse(`${match[1]!.replace(/(\.\d{3})\d+$/, '$1')}${match[2] ?? 'Z'}`);
  return Number.isNaN(ms) ? null : ms;
};

const ENTITIES: Readonly<Record<string, string>> = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'" };

/** Text in which the vendor has escaped characters as XML entities. */
export const plainTextOf = (value: unknown): string =>
  textOf(value).replace(/&(?:(amp|lt|gt|quot|apos)|#(\d{1,7})|#x([\da-f]{1,6}));/gi, (entity, name?: string, decimal?: string, hex?: string) => {
    if (name !== undefined) return ENTITIES[name.toLowerCase()]!;
    const code = decimal !== undefined ? Number(decimal) : Number.parseInt(hex!, 16);
    return code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff) ? String.fromCodePoint(code) : entity;
  });

/** `resultCode` is Ok. */
export const isOk = (answer: Fields): boolean => textOf(fieldsOf(answer.messages).resultCode) === 'Ok';

/** The codes of the messages, such as `I00001` or `E00007`. */
export const messageCodes = (answer: Fields): readonly string[] => (listOf(fieldsOf(answer.messages).message) ?? []).map(({ code }) => textOf(code));

/** The code of the first message. */
export const messageCode = (answer: Fields): string => messageCodes(answer)[0] ?? '';

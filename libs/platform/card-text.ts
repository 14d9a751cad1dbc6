/** Finds card numbers in text, where they are not allowed (C9), and determines the brand of a number (C11). */

export type Brand = 'visa' | 'mastercard' | 'amex' | 'discover' | 'diners' | 'jcb' | 'unionpay' | 'unknown';

const inRange = (digits: string, from: number, to: number) => {
  const prefix = Number(digits.slice(0, String(from).length));
  return prefix >= from && prefix <= to;
};

/** Each brand's leading digits and lengths, as C9 lists them. */
const BRANDS: readonly { brand: Brand; lengths: readonly number[]; begins: (digits: string) => boolean }[] = [
  { brand: 'visa', lengths: [13, 16, 19], begins: (d) => d.startsWith('4') },
  { brand: 'mastercard', lengths: [16], begins: (d) => inRange(d, 51, 55) || inRange(d, 2221, 2720) },
  { brand: 'amex', lengths: [15], begins: (d) => d.startsWith('34') || d.startsWith('37') },
  { brand: 'discover', lengths: [16, 17, 18, 19], begins: (d) => d.startsWith('6011') || inRange(d, 644, 649) || d.startsWith('65') },
  { brand: 'diners', lengths: [14, 15, 16, 17, 18, 19], begins: (d) => inRange(d, 300, 305) || d.startsWith('36') || inRange(d, 38, 39) },
  { brand: 'jcb', lengths: [16, 17, 18, 19], begins: (d) => inRange(d, 3528, 3589) },
  { brand: 'unionpay', lengths: [16, 17, 18, 19], begins: (d) => d.startsWith('62') || d.startsWith('81') },
];

/** Brand by leading digits and length; `unknown` if none fits. */
export const brandOf = (digits: string): Brand =>
  BRANDS.find(({ lengths, begins }) => lengths.includes(digits.length) && begins(digits))?.brand ?? 'unknown';

export const passesLuhn = (digits: string): boolean => {
  let sum = 0;
  for (let index = 0; index < digits.length; index++) {
    let digit = digits.charCodeAt(digits.length - 1 - index) - 48;
    if (index % 2 === 1) digit = digit > 4 ? digit * 2 - 9 : digit * 2;
    sum += digit;
  }
  return sum % 10 === 0;
};

const looksLikeCard = (digits: string) => brandOf(digits) !== 'unknown' && passesLuhn(digits);

/**
 * Patterns of card numbers: 13–19 digits in a row, or groups of digits as a card shows them (4-4-4-4…, 4-6-5). No letter or digit may stand directly
 * before or after them. A lookahead lets matches overlap, because other digit groups, such as a year, may stand beside the card number.
 */
const SHAPES = [
  String.raw`\d{13,19}`,
  String.raw`\d{4}(?<sep>[ -])\d{4}\k<sep>\d{4}\k<sep>\d{4}\k<sep>\d{1,3}`,
  String.raw`\d{4}(?<sep>[ -])\d{4}\k<sep>\d{4}\k<sep>\d{1,4}`,
  String.raw`\d{4}(?<sep>[ -])\d{6}\k<sep>\d{4,5}`,
].map((shape) => new RegExp(String.raw`(?<![\p{L}\p{N}])(?=(?<digits>${shape})(?![\p{L}\p{N}]))`, 'gu'));
/** Matches every text that holds a card number. The patterns above are tried only if this one matches. */
const ENOUGH_DIGITS = /(?:\d[ -]?){13}/;

/** Start and end index of each card number in the text. */
const cardsIn = function* (text: string): Generator<readonly [from: number, to: number]> {
  if (!ENOUGH_DIGITS.test(text)) return;
  for (const shape of SHAPES)
    for (const { index, groups } of text.matchAll(shape)) {
      const { digits } = groups as { digits: string };
      if (looksLikeCard(digits.replace(/[ -]/g, ''))) yield [index, index + digits.length];
    }
};

/** True if the text holds a card number that C9 refuses. */
export const holdsCardNumber = (text: string): boolean => !cardsIn(text).next().done;

/** The text with any card number replaced by `[card]`. */
export const maskCardNumbers = (text: string): string => {
  let masked = '';
  let end = 0;
  for (const [from, to] of [...cardsIn(text)].sort(([a], [b]) => a - b)) {
    if (from >= end) masked += `${text.slice(end, from)}[card]`;
    end = Math.max(end, to);
  }
  return masked + text.slice(end);
};

/** `on`: free text is searched for card numbers (`CARD_IN_TEXT_CHECK`). Set once at start-up. */
export const cardInTextCheck = { on: true };

/** The fault of a text that holds a card number (C9). null: there is no fault. The fault does not repeat the number. */
export const cardInText = (text: string): string | null => (cardInTextCheck.on && holdsCardNumber(text) ? 'must not hold a card number' : null);

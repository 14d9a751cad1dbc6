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

const luhnSum = (digits: ArrayLike<number>, begin: number, end: number): number => {
  let sum = 0;
  for (let index = end - 1, doubled = false; index >= begin; index--, doubled = !doubled) {
    const digit = digits[index]!;
    sum += doubled ? (digit > 4 ? digit * 2 - 9 : digit * 2) : digit;
  }
  return sum;
};
export const passesLuhn = (digits: string): boolean => luhnSum(Array.from(digits, Number), 0, digits.length) % 10 === 0;

/** Card numbers that text must not hold either. They are no brands of C11, because a payment shows such a brand as `unknown`. */
const FURTHER_CARDS: readonly { lengths: readonly number[]; begins: (digits: string) => boolean }[] = [
  // Maestro.
  { lengths: [13, 14, 15, 16, 17, 18, 19], begins: (d) => d.startsWith('50') || inRange(d, 56, 59) || d.startsWith('63') || d.startsWith('67') },
  // Mir.
  { lengths: [16, 17, 18, 19], begins: (d) => inRange(d, 2200, 2204) },
  // RuPay. Its ranges 353, 356, 508, 65 and 81 are among those of other brands.
  { lengths: [16], begins: (d) => d.startsWith('60') || d.startsWith('82') },
];

const isCard = (digits: string): boolean =>
  brandOf(digits) !== 'unknown' || FURTHER_CARDS.some(({ lengths, begins }) => lengths.includes(digits.length) && begins(digits));
/** Whether numbers of a length with four leading digits are cards. 1: yes, -1: no, 0: not worked out yet. No rule above looks at further digits. */
const begins = new Int8Array(20 * 10_000);
const beginsLikeCard = (digits: readonly number[], begin: number, length: number): boolean => {
  const leading = digits[begin]! * 1_000 + digits[begin + 1]! * 100 + digits[begin + 2]! * 10 + digits[begin + 3]!;
  const place = length * 10_000 + leading;
  if (begins[place] === 0) begins[place] = isCard(String(leading).padStart(4, '0').padEnd(length, '0')) ? 1 : -1;
  return begins[place] === 1;
};

const MIN_DIGITS = 13;
const MAX_DIGITS = 19;
/** Number of characters that may stand between two digits of one number. */
const MAX_SEPARATORS = 3;

/** Each of our ids has this form, and so have most ids of partners. A text of this form that has only digits may hold card numbers. */
const UUID = /(?<![\p{L}\p{N}])[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}(?![\p{L}\p{N}])/giu;
const withoutIds = (text: string): string => text.replace(UUID, (uuid) => (/[a-f]/i.test(uuid) ? 'x'.repeat(uuid.length) : uuid));

/** Matches each ASCII text that holds enough digits for a card number. Most texts hold fewer, and their search ends here. */
const ENOUGH_DIGITS = /\d(?:[^\dA-Za-z]{0,3}\d){12}/;
/** The same, if the letter O stands for zero. */
const ENOUGH_WITH_O = /\d(?:[^\dA-Za-z]{0,3}[\dOo]){12}/;
/** Circled numbers that NFKC leaves as they are: on a dark ground, in a double circle, and those of Zapf Dingbats. */
const CIRCLED = /[\u2776-\u2793\u24eb-\u24ff\u{1f10b}\u{1f10c}]/gu;
const circledValue = (code: number): number => {
  if (code >= 0x2776 && code <= 0x2793) return ((code - 0x2776) % 10) + 1;
  if (code < 0x24f5) return code - 0x24eb + 11;
  return code < 0x24ff ? code - 0x24f5 + 1 : 0;
};
/** The text with digits of other forms as decimal digits: `⑯` and `⓰` are 1 and 6. */
const withPlainDigits = (text: string): string => text.normalize('NFKC').replace(CIRCLED, (one) => String(circledValue(one.codePointAt(0)!)));

const NOT_ASCII = /[^\0-\x7f]/;
const mayHoldCards = (text: string, withO: boolean): boolean => {
  if (!NOT_ASCII.test(text)) return withO ? LETTER_O.test(text) && ENOUGH_WITH_O.test(text) : ENOUGH_DIGITS.test(text);
  let [digits, hasO] = [0, !withO];
  for (const character of text)
    for (const kind of kindsOf(character.codePointAt(0)!)) {
      if (withO && kind === OH) hasO = true;
      if (kind >= 0 || (withO && kind === OH)) digits += 1;
      if (digits >= MIN_DIGITS && hasO) return true;
    }
  return false;
};

/** A decimal digit of any script. Unicode puts the ten digits of a script side by side, from zero to nine. */
const DECIMAL = /^\p{Nd}$/u;
const valueOf = (code: number): number => {
  let zero = code;
  while (DECIMAL.test(String.fromCodePoint(zero - 1))) zero -= 1;
  return (code - zero) % 10;
};
/** Modifier letters do not count as letters here: the prolonged sound mark of Japanese looks like a dash. */
const LETTER_OR_NUMBER = /^[\p{Lu}\p{Ll}\p{Lt}\p{Lo}\p{N}]$/u;
/** Characters that are not displayed, such as a soft hyphen. */
const INVISIBLE = /^\p{Default_Ignorable_Code_Point}$/u;

/** A character as the search sees it: 0 to 9 for a digit, or one of the kinds below. */
const EDGE = -1;
const SEPARATOR = -2;
const IGNORED = -3;
/** The letter O, of Latin, Greek or Cyrillic script. */
const OH = -4;
const LETTER_O = /[OoΟοОо]/;
const kindOf = (code: number): number => {
  const character = String.fromCodePoint(code);
  if (DECIMAL.test(character)) return valueOf(code);
  if (LETTER_O.test(character)) return OH;
  return INVISIBLE.test(character) ? IGNORED : LETTER_OR_NUMBER.test(character) ? EDGE : SEPARATOR;
};

/**
 * One character may stand for several: `⑯` is 1 and 6. Each character is normalized alone: NFKC takes seconds to sort thousands of accents. The kinds of
 * a character are worked out once, since a text may hold 80,000 different ones.
 */
const kindsOf = (code: number): readonly number[] => {
  const place = known[code]!;
  if (place > SEVERAL) return ONE[place]!;
  if (place === SEVERAL) return several.get(code)!;
  const character = String.fromCodePoint(code);
  const plain = withPlainDigits(character);
  const kinds = plain === character ? [kindOf(code)] : Array.from(plain, (one) => kindOf(one.codePointAt(0)!));
  if (kinds.length === 1) known[code] = kinds[0]! - OH + SEVERAL + 1;
  else {
    known[code] = SEVERAL;
    several.set(code, kinds);
  }
  return kinds;
};
/** By code point, what is known: 0: nothing, {@link SEVERAL}, or the place of its kind in {@link ONE}. */
const known = new Int8Array(0x110000);
const SEVERAL = 1;
const ONE: readonly (readonly number[])[] = [[], [], [OH], [IGNORED], [SEPARATOR], [EDGE], [0], [1], [2], [3], [4], [5], [6], [7], [8], [9]];
const several = new Map<number, readonly number[]>();

/** Digits with at most {@link MAX_SEPARATORS} separators between neighbours. */
class Chain {
  readonly digits: number[] = [];
  /** For each digit the place of its character in the text. */
  readonly from: number[] = [];
  readonly to: number[] = [];
  /** Indexes of the digits that begin a group: no digit stands directly before them. */
  readonly groups: number[] = [];
  /** The number of digits up to the last one that is no letter O. */
  sure = 0;

  /** Removes letters at the end: they do not stand between digits. Returns true if the rest is long enough. */
  ends(): boolean {
    this.digits.length = this.sure;
    while (this.groups.length > 0 && this.groups.at(-1)! >= this.sure) this.groups.pop();
    return this.sure >= MIN_DIGITS;
  }
}

/** All chains of the text that are long enough for a card number. `withO`: the letter O between digits counts as zero, otherwise as an edge. */
const chainsIn = function* (text: string, withO: boolean): Generator<Chain> {
  let chain = new Chain();
  let separators = 0;
  // The end of the text is an edge.
  for (let from = 0, to: number; from <= text.length; from = to) {
    const code = text.codePointAt(from);
    to = from + (code !== undefined && code > 0xffff ? 2 : 1);
    for (const kind of code === undefined ? EDGES : kindsOf(code)) {
      if (kind >= 0 || (kind === OH && withO && chain.sure > 0)) {
        if (chain.digits.length === 0 || separators > 0) chain.groups.push(chain.digits.length);
        chain.digits.push(Math.max(kind, 0));
        chain.from.push(from);
        chain.to.push(to);
        if (kind >= 0) chain.sure = chain.digits.length;
        separators = 0;
      } else if (kind === EDGE || kind === OH || (kind === SEPARATOR && ++separators > MAX_SEPARATORS)) {
        if (chain.ends()) yield chain;
        if (chain.digits.length > 0) chain = new Chain();
        separators = 0;
      }
    }
  }
};
const EDGES: readonly number[] = [EDGE];

/** Start and end index of each card number in the text. Linear time: a group begins at most {@link MAX_DIGITS} candidates. */
const cardsIn = function* (original: string, withO = false): Generator<readonly [from: number, to: number]> {
  if (!mayHoldCards(original, withO)) return;
  const text = withoutIds(original);
  for (const chain of chainsIn(text, withO))
    for (let first = 0; first < chain.groups.length; first++) {
      const begin = chain.groups[first]!;
      for (let next = first + 1; next <= chain.groups.length; next++) {
        const end = chain.groups[next] ?? chain.digits.length;
        if (end - begin > MAX_DIGITS) break;
        if (end - begin < MIN_DIGITS || !beginsLikeCard(chain.digits, begin, end - begin)) continue;
        if (luhnSum(chain.digits, begin, end) % 10 !== 0) continue;
        const from = chain.from[begin]!;
        // A telephone number. Those of Germany and Austria begin as cards of 13 digits do.
        if (end - begin === MIN_DIGITS && text[from - 1] === '+') continue;
        yield [from, chain.to[end - 1]!];
      }
    }
};

/**
 * Two readings of a text: a letter O ends a number, and a letter O between digits is a zero. The second reading alone would miss a number that an O follows.
 */
const READINGS = [false, true] as const;

/** True if the text holds a card number that C9 refuses. `readings`: without the second one, a number with a letter O in it is not found. */
export const holdsCardNumber = (text: string, readings: readonly boolean[] = READINGS): boolean =>
  readings.some((withO) => !cardsIn(text, withO).next().done);

/** The text with any card number replaced by `[card]`. */
export const maskCardNumbers = (text: string): string => {
  let masked = '';
  let end = 0;
  for (const [from, to] of READINGS.flatMap((withO) => [...cardsIn(text, withO)]).sort(([a], [b]) => a - b)) {
    if (from >= end) masked += `${text.slice(end, from)}[card]`;
    end = Math.max(end, to);
  }
  return masked + text.slice(end);
};

/** `on`: free text is searched for card numbers (`CARD_IN_TEXT_CHECK`). Set once at start-up. */
export const cardInTextCheck = { on: true };

/** The fault of a text that holds a card number (C9). null: there is no fault. The fault does not repeat the number. `readings`: as above. */
export const cardInText = (text: string, readings = READINGS as readonly boolean[]): string | null =>
  cardInTextCheck.on && holdsCardNumber(text, readings) ? 'must not hold a card number' : null;
/** The reading that keys of older releases were judged by. */
export const DIGITS_ONLY = [false] as const;

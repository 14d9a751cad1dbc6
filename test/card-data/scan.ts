/**
 * Looks for known card numbers in any bytes: as digits, in groups, with up to four separators between digits, in digits of any script,
 * percent-encoded, as hex, as base64 at any alignment, backwards, and in two-byte characters. All cards are in one set, so one pass searches for
 * thousands of them.
 */
export interface Found {
  readonly digits: string;
  readonly form: 'digits' | 'groups' | 'spelled' | 'hex' | 'base64' | 'two-byte' | 'backwards';
  /** The text around the number. */
  readonly around: string;
}

const CHUNK_BYTES = 8 * 1024 * 1024;
/** Longer than any form of a card number. */
const OVERLAP_BYTES = 256;
const MAX_FOUND = 100;
/** One more than the service refuses. */
const MAX_SEPARATORS = 4;

/** The value of each decimal digit of Unicode. Unicode puts the ten digits of a script side by side. */
const VALUE_OF = new Map<number, number>();
for (let code = 0, value = 0; code <= 0x10ffff; code++)
  if (/^\p{Nd}$/u.test(String.fromCodePoint(code))) VALUE_OF.set(code, value++ % 10);
  else value = 0;

export class CardSearch {
  private readonly cards: ReadonlySet<string>;
  private readonly lengths: readonly number[];

  constructor(cards: Iterable<string>) {
    this.cards = new Set(cards);
    this.lengths = [...new Set([...this.cards].map(({ length }) => length))].sort((a, b) => b - a);
  }

  /** All matches, at most {@link MAX_FOUND}. */
  scan(bytes: Buffer): Found[] {
    const found: Found[] = [];
    for (let from = 0; from < bytes.length; from += CHUNK_BYTES) {
      const chunk = bytes.subarray(from, from + CHUNK_BYTES + OVERLAP_BYTES);
      this.scanChunk(chunk, found);
      this.scanSpelled(chunk.toString('utf8').normalize('NFKC'), found);
      if (found.length >= MAX_FOUND) break;
    }
    return found;
  }

  private scanChunk(bytes: Buffer, found: Found[]): void {
    const text = bytes.toString('latin1');
    const take = (form: Found['form'], digits: string | null, at: number, source = text) => {
      if (digits !== null) found.push({ digits, form, around: source.slice(Math.max(0, at - 40), at + 60).replaceAll(/[^\x20-\x7e]/g, '·') });
    };
    for (const match of text.matchAll(/\d{12,}/g)) {
      take('digits', this.known(match[0]), match.index);
      take('backwards', this.known([...match[0]].reverse().join('')), match.index);
    }
    // Groups have at most one separator between two digits. A separator may be percent-encoded or escaped.
    for (const match of text.matchAll(/\d(?:(?: |-|\+|\.|_|%20|%2D|\\u0020)?\d){11,18}/gi))
      if (/\D/.test(match[0])) take('groups', this.known(match[0].replaceAll(/%20|%2D|\\u0020/gi, '').replaceAll(/\D/g, '')), match.index);
    for (const match of text.matchAll(/(?:3\d){12,}/g)) take('hex', this.known(match[0].replaceAll(/3(\d)/g, '$1')), match.index);
    for (const match of text.matchAll(/(?:\d\0){12,}/g)) take('two-byte', this.known(match[0].replaceAll('\0', '')), match.index);
    for (const match of text.matchAll(/[A-Za-z0-9+/_-]{16,}/g))
      // Base64 has groups of four characters. A match may begin in the middle of a group.
      for (let shift = 0; shift < 4; shift++) {
        const decoded = Buffer.from(match[0].slice(shift), 'base64').toString('latin1');
        for (const run of decoded.matchAll(/\d{12,}/g)) take('base64', this.known(run[0]), run.index, decoded);
      }
  }

  private scanSpelled(text: string, found: Found[]): void {
    let digits = '';
    let separators = 0;
    for (let at = 0; at <= text.length; at++) {
      const code = text.codePointAt(at) ?? 0x61;
      const value = VALUE_OF.get(code);
      if (value !== undefined) {
        digits += String(value);
        separators = 0;
      } else if ((code < 128 ? /[a-z]/i.test(text[at] ?? 'a') : /\p{L}/u.test(String.fromCodePoint(code))) || ++separators > MAX_SEPARATORS) {
        const card = digits.length >= 12 ? this.known(digits) : null;
        if (card !== null) found.push({ digits: card, form: 'spelled', around: text.slice(Math.max(0, at - 60), at + 40) });
        digits = '';
      }
      if (code > 0xffff) at += 1;
    }
  }

  /** The card in a run of digits, if there is one. */
  private known(run: string): string | null {
    for (const length of this.lengths)
      for (let at = 0; at + length <= run.length; at++) {
        const digits = run.slice(at, at + length);
        if (this.cards.has(digits)) return digits;
      }
    return null;
  }
}

/** A security code after its field name, in the usual spellings: `cvv=123`, `"securityCode": "1234"`. */
const SECURITY_CODE = /(?:cvv|cvc|cvv2|security.?code|card.?code)["'\\]*\s*[:=]\s*["'\\]*\d{3,4}\b/gi;

export const securityCodes = (bytes: Buffer): string[] =>
  [...bytes.toString('latin1').matchAll(SECURITY_CODE)].map(([text]) => text).slice(0, MAX_FOUND);

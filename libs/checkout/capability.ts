/**
 * The browser's share of a session: a cookie, and a token in each form. Both are keyed hashes, so nothing is stored. The cookie binds a random part
 * to the session; the token binds the session, that cookie and the form's attempt id.
 *
 * Every answer may set a new cookie, which is as valid as the old one. A new cookie makes a browser drop the page that it keeps for "Back", with the
 * card number in it.
 */
import { timingSafeEqual } from 'node:crypto';
import type { KeyRing } from '#platform';

/** Longest cookie: 36 characters of id, a dot, 43 of the hash. */
const COOKIE = /^([0-9a-f-]{36})\.([\w-]{43})$/;

export class Capabilities {
  constructor(private readonly keys: KeyRing) {}

  /** A new cookie value of the session. `random` is any new id. */
  cookie(checkoutId: string, random: string): string {
    return `${random}.${this.hash('cookie', checkoutId, random)}`;
  }

  /** True if the value was made here for this session. */
  holds(checkoutId: string, cookie: string | null): cookie is string {
    const [, random, hash] = (cookie !== null && COOKIE.exec(cookie)) || [];
    return random !== undefined && hash !== undefined && equal(hash, this.hash('cookie', checkoutId, random));
  }

  /** The token of a form that was made for this cookie. */
  token(checkoutId: string, cookie: string, attemptId: string): string {
    return this.hash('form', checkoutId, cookie, attemptId);
  }

  isToken(checkoutId: string, cookie: string, attemptId: string, token: string): boolean {
    return equal(token, this.token(checkoutId, cookie, attemptId));
  }

  private hash(...parts: readonly string[]): string {
    return this.keys.mac('csrf', JSON.stringify(parts), this.keys.kids[0]).toString('base64url');
  }
}

const equal = (given: string, right: string): boolean => {
  const [a, b] = [Buffer.from(given), Buffer.from(right)];
  return a.length === b.length && timingSafeEqual(a, b);
};

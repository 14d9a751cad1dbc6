/**
 * Proofs that a browser may act in a session: a cookie, and a token in each form. Both are keyed hashes, so the server stores neither. The cookie
 * holds a random part, and a hash of this part and the session. The token is a hash of the session, the cookie and the form's attempt id.
 *
 * Every answer may set a new cookie, and old cookies stay valid. After a new cookie, a browser drops the page that it keeps for its Back button. That
 * page may hold the card number.
 */
import { timingSafeEqual } from 'node:crypto';
import type { KeyRing } from '#platform';

/** A cookie is a random id (36 characters), a dot, and the hash (43 characters). */
const COOKIE = /^([0-9a-f-]{36})\.([\w-]{43})$/;

export class Capabilities {
  constructor(private readonly keys: KeyRing) {}

  /** A new cookie for the session. `random`: any new id. */
  cookie(checkoutId: string, random: string): string {
    return `${random}.${this.hash('cookie', checkoutId, random)}`;
  }

  /** True if {@link cookie} made this value for this session. */
  holds(checkoutId: string, cookie: string | null): cookie is string {
    const [, random, hash] = (cookie !== null && COOKIE.exec(cookie)) || [];
    return random !== undefined && hash !== undefined && equal(hash, this.hash('cookie', checkoutId, random));
  }

  /** The token of a form, for the browser that holds this cookie. */
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

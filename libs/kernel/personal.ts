/**
 * Text about a person, such as a payer's name or a reason in words. Events and states hold it in a box: encrypted under a key that an erasure
 * destroys (docs/decisions/0050-personal-data.md). Deciders copy and compare boxes, and never open one.
 */
import { canonicalJson } from './json.js';

/** `key`: id of the key. `box`: nonce, ciphertext and tag as base64. The same content in the same context under the same key gives the same box. */
export interface Box {
  readonly key: string;
  readonly box: string;
}

/** null: there is no text. `clear`: an event of a version before boxes holds the text itself. It is shown as before, and cannot be erased. */
export type Personal<Content> = Box | { readonly clear: Content } | null;

/** The text of an event of a version before boxes. */
export const inClear = <Content>(content: Content): Personal<Content> => ({ clear: content });

export const isBox = (personal: Personal<unknown>): personal is Box => personal !== null && 'key' in personal;

/** The ids of the keys of these texts, each once. */
export const keysIn = (personal: readonly Personal<unknown>[]): readonly string[] => [...new Set(personal.filter(isBox).map(({ key }) => key))];

export const isSamePersonal = (one: Personal<unknown>, other: Personal<unknown>): boolean => canonicalJson(one) === canonicalJson(other);

/** What the readers of one request may see. Views get it as an argument. */
export interface Reveal {
  /**
   * The content. null: there is none, or its key is erased or missing. `context`: stream and field, as at the sealing. Throws if the box was changed
   * or belongs to another context.
   */
  content<Content>(personal: Personal<Content>, context: string): Content | null;
  /** When the newest of these keys was erased, RFC 3339. null: none of them was. */
  erasedAt(personal: readonly Personal<unknown>[]): string | null;
}

/** Opens no box. For readers that must not see personal data. Texts of events before boxes are not shown either. */
export const CLOSED: Reveal = { content: () => null, erasedAt: () => null };

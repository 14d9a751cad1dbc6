/**
 * Control characters in texts: U+0000 to U+001F, U+007F to U+009F, and the two marks that override the direction of text. New texts must not hold
 * them. Old texts, and texts of processors, are shown with escapes. Isolates and embeddings pass, since texts of right-to-left scripts need them.
 */
const CONTROLS = /[\p{Cc}\u202d\u202e]/u;
/** The same without tab, line feed and carriage return. */
const CONTROLS_BUT_BREAKS = /(?![\t\n\r])[\p{Cc}\u202d\u202e]/gu;

/** The fault of a text that holds a control character. `multiline`: tabs and line breaks are allowed. null: there is no fault. */
export const controlsInText = (text: string, { multiline = false } = {}): string | null =>
  multiline ? (text.search(CONTROLS_BUT_BREAKS) < 0 ? null : FAULT) : CONTROLS.test(text) ? FAULT : null;
const FAULT = 'must not hold control characters';

/** The text with each of these characters written like `\u001b`. Default: control characters, except tabs and line breaks. */
export const withEscapes = (text: string, characters = CONTROLS_BUT_BREAKS): string =>
  text.replace(characters, (one) => one.replace(/[^]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`));

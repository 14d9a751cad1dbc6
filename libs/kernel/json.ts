/** JSON as data, and its canonical text. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** Canonical JSON by RFC 8785: keys sorted by UTF-16 code units, numbers as ECMAScript writes them, no white space. Equal values have equal text. */
export const canonicalJson = (value: unknown): string => {
  if (typeof value === 'string') return quoted(value);
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  // The text is joined by hand for speed: the seal and the drift check make the text of every event and payment.
  let text = '';
  if (Array.isArray(value)) {
    for (const item of value) text += text === '' ? canonicalJson(item) : `,${canonicalJson(item)}`;
    return `[${text}]`;
  }
  const fields = value as Readonly<Record<string, unknown>>;
  for (const key of Object.keys(fields).sort())
    if (fields[key] !== undefined) text += `${text === '' ? '' : ','}${quoted(key)}:${canonicalJson(fields[key])}`;
  return `{${text}}`;
};

/** Matches ASCII text in which no character needs an escape. */
const PLAIN = /^[ !#-[\]-~]*$/;
const quoted = (text: string): string => (PLAIN.test(text) ? `"${text}"` : JSON.stringify(text));

/** JSON as data, and its canonical text. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** RFC 8785: keys sorted by UTF-16 code units, ECMAScript numbers, no white space. One meaning, one text. */
export const canonicalJson = (value: unknown): string => {
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(',')}]`;
  const fields = Object.entries(value)
    .filter(([, field]) => field !== undefined)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([key, field]) => `${JSON.stringify(key)}:${canonicalJson(field)}`);
  return `{${fields.join(',')}}`;
};

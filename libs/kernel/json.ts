/** JSON as data, and its canonical text. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** Canonical JSON by RFC 8785: keys sorted by UTF-16 code units, numbers as ECMAScript writes them, no white space. Equal values have equal text. */
export const canonicalJson = (value: unknown): string => {
  if (typeof value === 'string') return quoted(value);
  if (Number.isSafeInteger(value)) return String(value);
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  // The text is joined by hand for speed: the seal and the drift check make the text of every event and payment. Sorting keys is half of the work.
  let text = '';
  if (Array.isArray(value)) {
    for (const item of value) text += text === '' ? canonicalJson(item) : `,${canonicalJson(item)}`;
    return `[${text}]`;
  }
  const fields = value as Readonly<Record<string, unknown>>;
  for (const { key, label } of sortedFields(fields))
    if (fields[key] !== undefined) text += text === '' ? label + canonicalJson(fields[key]) : `,${label}${canonicalJson(fields[key])}`;
  return `{${text}}`;
};

/** A field's key, and the key as it is written. */
interface Field {
  readonly key: string;
  readonly label: string;
}

/** Objects that have the same keys in the same order have the same path through these shapes. */
interface Shape {
  readonly next: Map<string, Shape>;
  /** The fields of an object whose last key leads here, sorted. */
  fields: readonly Field[] | null;
}
const shapeOf = (): Shape => ({ next: new Map(), fields: null });
const NO_KEYS = shapeOf();
/** The keys of partners' metadata vary. Beyond this number of shapes, the keys of a new shape are sorted each time. */
const MAX_SHAPES = 2_000;
let shapes = 0;

const sortedFields = (object: object): readonly Field[] => {
  const keys = Object.keys(object);
  let shape = NO_KEYS;
  for (const key of keys) {
    let next = shape.next.get(key);
    if (!next) {
      if (shapes >= MAX_SHAPES) return sorted(keys);
      shapes += 1;
      shape.next.set(key, (next = shapeOf()));
    }
    shape = next;
  }
  return (shape.fields ??= sorted(keys));
};
const sorted = (keys: string[]): Field[] => keys.sort().map((key) => ({ key, label: `${quoted(key)}:` }));

/** Matches ASCII text in which no character needs an escape. */
const PLAIN = /^[ !#-[\]-~]*$/;
const quoted = (text: string): string => (PLAIN.test(text) ? `"${text}"` : JSON.stringify(text));

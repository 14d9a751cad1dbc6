/** Reads members of answers. Null, absent and empty are the same, and a number may be text. */

export type Fields = Readonly<Record<string, unknown>>;

export const isFields = (value: unknown): value is Fields => value !== null && typeof value === 'object' && !Array.isArray(value);

/** Empty if it is no text. */
export const textOf = (value: unknown): string => (typeof value === 'string' ? value : '');

/** null: no whole number. */
export const wholeOf = (value: unknown): number | null => {
  const number = typeof value === 'string' && /^-?\d{1,16}$/.test(value) ? Number(value) : value;
  return Number.isSafeInteger(number) ? (number as number) : null;
};

export const fieldsOf = (value: unknown): Fields => (isFields(value) ? value : {});

const ID = /^[A-Za-z][0-9A-Za-z]*_[0-9A-Za-z_]{1,60}$/;
/** An id of an object, also where the object itself stands in its place. null: none. */
export const idOf = (value: unknown): string | null => {
  const id = isFields(value) ? value.id : value;
  return typeof id === 'string' && ID.test(id) ? id : null;
};

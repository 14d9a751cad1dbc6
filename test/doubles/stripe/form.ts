/** Reads forms and queries as the vendor does: `a[b][0]=c` is a member of a member of a list. */
import type { Fields } from './vendor.js';

/** Throws if a name cannot be read. */
export const readForm = (text: string): Fields => {
  const form: Fields = {};
  for (const [name, value] of new URLSearchParams(text)) {
    const path = [...name.matchAll(/^[^[\]]+|\[([^[\]]*)\]/g)].map((part) => part[1] ?? part[0]);
    if (path.length === 0 || path.some((step) => ['__proto__', 'constructor', 'prototype'].includes(step)))
      throw new Error(`unreadable name ${name}`);
    let at: Fields = form;
    for (const step of path.slice(0, -1)) at = (at[step] ??= {}) as Fields;
    at[path.at(-1)!] = value;
  }
  return form;
};

/** A member of a form. Empty: it is absent, or has members of its own. */
export const textOf = (value: unknown): string => (typeof value === 'string' ? value : '');

/** The members of a list, `a[0]=…` or `a[]=…`. */
export const listOf = (value: unknown): string[] =>
  value === undefined ? [] : typeof value === 'string' ? [value] : Object.values(value as Fields).map(String);

/** The names of all members, `a[b]` for nested ones. */
export const namesOf = (form: Fields, within = ''): string[] =>
  Object.entries(form).flatMap(([name, value]) => {
    const whole = within === '' ? name : `${within}[${name}]`;
    return value !== null && typeof value === 'object' ? namesOf(value as Fields, whole) : [whole];
  });

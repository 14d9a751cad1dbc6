/**
 * E-mail addresses and telephone numbers in texts that the log keeps in clear for ever. A number is found if it is written as people write it: with
 * `+`, or in groups. A row of digits is not one, since it may be the number of a transaction.
 */

const EMAIL = /[^\s@<>()[\],;:"]{1,64}@[^\s@<>()[\],;:"]+\.[^\s@<>()[\],;:"]{2,}/u;
/** `+` and 8 to 15 digits, in any groups. */
const INTERNATIONAL = /(?<![\w+])\+\d(?:[ .()/-]{0,2}\d){7,14}(?!\d)/;
/** Area code, exchange and line, as in North America: `(512) 555-0100`. A UUID has letters or digits around its groups. */
const GROUPED = /(?<![\w.-])(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[ .-])[2-9]\d{2}[ .-]\d{4}(?![\w-]|\.\d)/;

/** What is wrong with a text: words for an error message after the name of its field. null: nothing. */
export const contactInText = (text: string): string | null => {
  const plain = text.normalize('NFKC').replaceAll(/[‐-―−]/gu, '-').replaceAll(/[\u00A0\u2000-\u200B]/gu, ' '); // prettier-ignore
  if (EMAIL.test(plain)) return 'must not hold an e-mail address, since it cannot be erased';
  if (INTERNATIONAL.test(plain) || GROUPED.test(plain)) return 'must not hold a telephone number, since it cannot be erased';
  return null;
};

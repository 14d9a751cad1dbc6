/** Characters without a glyph. They make a different text that looks the same. A blank control character, such as a tab, counts as a blank. */
const INVISIBLE = /[\p{Default_Ignorable_Code_Point}\uFFF9-\uFFFB]|(?!\p{White_Space})\p{Cc}/gu;
/** `\p{Dash}` lacks the modifier letter, the hyphen bullet and the heavy minus. */
const DASHES = /[\p{Pd}\p{Dash}\u02D7\u2043\u2796]/gu;
/** The blank of Braille has no property of a blank. */
const BLANKS = /[\p{White_Space}\u2800]+/gu;

/**
 * The form that two references share if a person cannot tell them apart, or writes them in another way. They may differ in case, width, blanks, dashes,
 * composed accents and invisible characters. Compare by it where a reference stops something. Never store or show it. Letters of different scripts,
 * such as Latin A and Greek A, stay different.
 */
export const lookAlike = (reference: string): string => {
  const plain = reference.replace(INVISIBLE, '').normalize('NFKC').replace(INVISIBLE, '').replace(DASHES, '-').replace(BLANKS, ' ').trim();
  // Lower, upper, lower: upper case alone makes SS of ß, but not of the capital ẞ. Another case may need to be composed again.
  return plain.toLowerCase().toUpperCase().toLowerCase().normalize('NFKC');
};

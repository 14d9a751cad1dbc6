/**
 * Reads an absolute URL. null: the text is none.
 *
 * `URL.canParse` is not used: once V8 has compiled it, Node 20 refuses every URL with a letter such as `ü`.
 */
export const parseUrl = (text: string): URL | null => {
  try {
    return new URL(text);
  } catch {
    return null;
  }
};

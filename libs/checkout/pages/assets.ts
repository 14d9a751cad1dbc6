/**
 * The three static files of the pages. Their names hold a hash of their content, so browsers may cache them for ever.
 *
 * The server puts the agency's colour into the stylesheet, and the stylesheet's name holds the colour. A second stylesheet would cost a round trip. A
 * style in the page would weaken the security policy.
 */
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import type { Frame } from './layout.js';

const read = (name: string) => readFileSync(new URL(`./${name}`, import.meta.url), 'utf8');
const hashOf = (text: string) => createHash('sha256').update(text).digest('base64url').slice(0, 12);

/** Removes comments and white space. */
const smaller = (css: string) =>
  css
    .replace(/\/\*[^]*?\*\//g, '')
    .replace(/\s+/g, ' ')
    .replace(/ ?([{};,]) ?/g, '$1')
    .replace(/: /g, ':');

const CSS = smaller(read('checkout.css'));
const JS = read('checkout.js')
  .replace(/^\s*\/\/.*$/gm, '')
  .replace(/\s*\n\s*/g, '\n');
const ICON = read('icon.svg').trim();

const CSS_HASH = hashOf(CSS);
const JS_NAME = `checkout-${hashOf(JS)}.js`;
const ICON_NAME = `icon-${hashOf(ICON)}.svg`;

/** The path of the controller that serves them. */
export const ASSETS_PATH = '/checkout/assets';
/** The colour of a portal that has none of its own. */
const OWN_COLOUR = '#17324d';

export const assetsFor = (colour: string | null): Frame['assets'] => ({
  css: `${ASSETS_PATH}/checkout-${CSS_HASH}-${(colour ?? OWN_COLOUR).slice(1)}.css`,
  js: `${ASSETS_PATH}/${JS_NAME}`,
  icon: `${ASSETS_PATH}/${ICON_NAME}`,
});

export interface Asset {
  readonly type: string;
  readonly body: string;
}

const STYLESHEET = /^checkout-([\w-]{12})-([0-9a-f]{6})\.css$/;

/** The file with this name. null: there is none, or the name is of an earlier release. */
export const assetNamed = (name: string): Asset | null => {
  if (name === JS_NAME) return { type: 'text/javascript; charset=utf-8', body: JS };
  if (name === ICON_NAME) return { type: 'image/svg+xml; charset=utf-8', body: ICON };
  const [, hash, hex] = STYLESHEET.exec(name) ?? [];
  if (hash !== CSS_HASH || hex === undefined) return null;
  return { type: 'text/css; charset=utf-8', body: `:root{--accent:#${hex};--on-accent:${onColour(hex)}}${CSS}` };
};

/** White if its contrast to the colour is at least 4.5, otherwise black. One of the two always reaches 4.5 (WCAG 1.4.3). */
const onColour = (hex: string): string => {
  const [red, green, blue] = [0, 2, 4].map((at) => {
    const part = Number.parseInt(hex.slice(at, at + 2), 16) / 255;
    return part <= 0.040_45 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }) as [number, number, number];
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return 1.05 / (luminance + 0.05) >= 4.5 ? '#fff' : '#000';
};

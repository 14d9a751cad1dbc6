/** A page as text. */
import type { VNode } from 'preact';
import { renderToString } from 'preact-render-to-string';

export const render = (page: VNode): string => `<!doctype html>${renderToString(page)}`;

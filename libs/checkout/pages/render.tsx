/** A page as text. */
import type { VNode } from 'preact';
import { renderToString } from 'preact-render-to-string';
import { withEscapes } from '#platform';

/** Control characters in old texts are shown as escapes. */
export const render = (page: VNode): string => withEscapes(`<!doctype html>${renderToString(page)}`);

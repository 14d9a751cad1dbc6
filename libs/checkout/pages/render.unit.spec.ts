import { expect, test } from '@jest/globals';
import { h, type VNode } from 'preact';
import { render } from './render.js';

test('control characters of a text, in the page and in an attribute, are shown as escapes', () =>
  expect(render(h('p', { title: 'a\u001bb' }, 'due\u202e now\u007f\n') as VNode)).toBe(
    '<!doctype html><p title="a\\u001bb">due\\u202e now\\u007f\n</p>',
  ));

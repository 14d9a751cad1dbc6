export * from './assets.js';
export * from './format.js';
export * from './layout.js';
export * from './outcome.js';
export * from './pay.js';
export * from './render.js';
export * from './text.js';

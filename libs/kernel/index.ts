export * from './clock.js';
export * from './decider.js';
export * from './errors.js';
export * from './ids.js';
export * from './json.js';
export * from './money.js';

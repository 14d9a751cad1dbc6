export * from './envelope.js';
export * from './errors.filter.js';
export * from './fields.js';
export * from './form.js';
export * from './headers.js';
export * from './idempotency.js';
export * from './server.js';
export * from './strict-json.js';

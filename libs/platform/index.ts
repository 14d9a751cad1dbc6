export * from './card-text.js';
export * from './config.js';
export * from './ids.js';
export * from './keys.js';
export * from './logging.js';
export * from './postgres/embedded.js';
export * from './postgres/pool.js';
export * from './postgres/schema.js';

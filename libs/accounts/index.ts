export * from './access-token.js';
export * from './account.js';
export * from './administration.js';
export * from './api-key.js';
export * from './case-restriction.js';
export * from './directory.js';
export * from './events.js';
export * from './portal.js';

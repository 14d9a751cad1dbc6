export * from './adjustment.js';
export * from './chart.js';
export * from './exception.js';
export * from './journal.js';
export * from './postings.js';
export * from './text.js';

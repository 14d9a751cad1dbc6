/** `npm run storefaults`: every spec of this folder, also the long ones, which `npm test` leaves out. */
import base from '../../jest.config.mjs';

export default {
  ...base,
  rootDir: '../..',
  testRegex: String.raw`test/storefaults/.*\.spec\.ts$`,
  // They measure how soon a fault is noticed.
  maxWorkers: 1,
};

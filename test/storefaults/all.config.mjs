/** `npm run storefaults`: runs every spec of this folder, including the long ones that `npm test` leaves out. */
import base from '../../jest.config.mjs';

export default {
  ...base,
  rootDir: '../..',
  testRegex: String.raw`test/storefaults/.*\.spec\.ts$`,
  // One spec at a time, because the specs measure how soon a fault is noticed.
  maxWorkers: 1,
  // With one worker, specs run in the main process. There the native client of KurrentDB can keep Node from ending by itself.
  forceExit: true,
};

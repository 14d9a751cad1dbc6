/** ESM mode (NODE_OPTIONS=--experimental-vm-modules): NestJS 12 has no CommonJS build. */
export default {
  testEnvironment: '<rootDir>/test/support/take-turns.mjs',
  roots: ['<rootDir>/libs', '<rootDir>/apps', '<rootDir>/test'],
  testRegex: String.raw`\.(unit|int|e2e|fault)\.spec\.ts$|architecture\.spec\.ts$`,
  extensionsToTreatAsEsm: ['.ts', '.tsx'],
  transform: {
    '^.+\\.tsx?$': ['@swc/jest', { swcrc: true }],
  },
  moduleNameMapper: {
    '^#(kernel|platform|eventstore|accounts|payments|settlement|ledger|audit|gateways|webhooks|checkout|privacy)$': '<rootDir>/libs/$1/index.ts',
    '^#(\\w+)/module$': '<rootDir>/libs/$1/$1.module.ts',
    '^#platform/http$': '<rootDir>/libs/platform/http/index.ts',
    '^(\\.{1,2}/.*)\\.js$': '$1',
  },
  testSequencer: '<rootDir>/test/support/longest-first.mjs',
  globalSetup: '<rootDir>/test/support/global-setup.mjs',
  globalTeardown: '<rootDir>/test/support/global-teardown.mjs',
  // A guard against hanging, not an expectation: a busy machine starts a process in seconds.
  testTimeout: 300_000,
  maxWorkers: 3,
};

/**
 * Faults that the formatter cannot see: types, promises without `await`, and the walls of the house (the arrows themselves:
 * test/architecture.spec.ts).
 */
import eslint from '@eslint/js';
import tseslint from 'typescript-eslint';
import { PURE_FILES } from './pure-files.mjs';

export default tseslint.config(
  { ignores: ['test/upgrade/*/**', 'test/clients/programs/**', 'dist/**', 'dist.*/**', 'coverage/**', 'node_modules/**', '.payfold/**'] },
  eslint.configs.recommended,
  {
    files: ['**/*.ts', '**/*.tsx'],
    extends: [...tseslint.configs.recommendedTypeChecked],
    languageOptions: { parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname } },
    rules: {
      '@typescript-eslint/no-floating-promises': 'error',
      '@typescript-eslint/switch-exhaustiveness-check': ['error', { considerDefaultExhaustiveForUnions: true }],
      '@typescript-eslint/no-unused-vars': ['error', { argsIgnorePattern: '^_', varsIgnorePattern: '^_', ignoreRestSiblings: true }],
      // Ports return promises because some adapter must wait; one that need not is still async.
      '@typescript-eslint/require-await': 'off',
      // `!` marks what a check a line above has shown; noUncheckedIndexedAccess would need a branch that cannot be reached.
      '@typescript-eslint/no-non-null-assertion': 'off',
      'no-control-regex': 'off',
      'no-restricted-syntax': [
        'error',
        { selector: "Property[key.name='rejectUnauthorized'] > Literal[value=false]", message: 'TLS is verified, always (decision 0015).' },
        {
          selector:
            "CallExpression[callee.property.name='query'] > TemplateLiteral.arguments:first-child > TemplateElement[value.raw=/\\$\\{(?!.*(columns|where|schema))/]",
          message: 'Bind parameters.',
        },
      ],
      eqeqeq: 'error',
    },
  },
  {
    files: PURE_FILES,
    ignores: ['libs/kernel/clock.ts', '**/*.spec.ts'],
    rules: {
      'no-restricted-globals': ['error', 'setTimeout', 'setInterval', 'setImmediate', 'performance', 'process', 'fetch', 'crypto'],
      'no-restricted-properties': ['error', { object: 'Date', property: 'now' }, { object: 'Math', property: 'random' }],
      'no-restricted-imports': ['error', { patterns: ['node:*', '@nestjs/*', '#platform', '#eventstore'] }],
    },
  },
  {
    files: ['libs/**/*.{ts,tsx}'],
    ignores: ['libs/kernel/clock.ts', 'libs/platform/postgres/embedded.ts', '**/*.spec.ts'],
    rules: {
      'no-restricted-properties': [
        'error',
        { object: 'Date', property: 'now', message: 'Only the clock reads the time.' },
        { object: 'Math', property: 'random', message: 'Chance comes through a port.' },
      ],
    },
  },
  {
    files: ['libs/**/*.{ts,tsx}'],
    ignores: ['libs/platform/config.ts', '**/*.spec.ts', 'libs/platform/postgres/embedded.ts', 'libs/platform/logging.ts'],
    rules: { 'no-restricted-globals': ['error', { name: 'process', message: 'The environment is read in platform/config only.' }] },
  },
  {
    files: ['**/*.spec.ts', 'test/**/*.ts'],
    rules: {
      // A spec looks into answers of any shape.
      '@typescript-eslint/no-unsafe-assignment': 'off',
      '@typescript-eslint/no-unsafe-member-access': 'off',
      '@typescript-eslint/no-unsafe-argument': 'off',
      '@typescript-eslint/no-unsafe-call': 'off',
      '@typescript-eslint/no-unsafe-return': 'off',
    },
  },
  {
    // Runs in the payer's browser.
    files: ['libs/checkout/pages/checkout.js'],
    languageOptions: {
      globals: Object.fromEntries(
        ['document', 'window', 'location', 'fetch', 'setTimeout', 'addEventListener', 'URLSearchParams', 'FormData'].map((name) => [
          name,
          'readonly',
        ]),
      ),
    },
  },
  {
    files: ['**/*.mjs', '**/*.cjs'],
    languageOptions: {
      globals: {
        process: 'readonly',
        console: 'readonly',
        globalThis: 'readonly',
        AbortSignal: 'readonly',
        URL: 'readonly',
        URLSearchParams: 'readonly',
        fetch: 'readonly',
        Buffer: 'readonly',
        setTimeout: 'readonly',
        require: 'readonly',
        module: 'readonly',
      },
    },
  },
);

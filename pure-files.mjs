/** Files without time, chance, machine or framework: they import the kernel and each other. The linter and test/architecture.spec.ts both read this list. */
export const PURE_FILES = [
  ...['clock', 'dates', 'decider', 'errors', 'fair-share', 'ids', 'index', 'json', 'money', 'personal', 'reference', 'url'].map(
    (name) => `libs/kernel/${name}.ts`,
  ),
  ...['account', 'case-restriction', 'merchant-account', 'portal'].map((name) => `libs/accounts/${name}.ts`),
  ...['fee', 'payment', 'payment.view', 'taking'].map((name) => `libs/payments/${name}.ts`),
  ...['batch', 'exception'].map((name) => `libs/settlement/${name}.ts`),
  ...['adjustment', 'chart', 'days', 'line-movements', 'line-postings', 'postings', 'remittance'].map((name) => `libs/ledger/${name}.ts`),
  ...['notification', 'schedule'].map((name) => `libs/webhooks/${name}.ts`),
  ...['addresses', 'checkout'].map((name) => `libs/checkout/${name}.ts`),
  ...['format.ts', 'layout.tsx', 'outcome.tsx', 'pay.tsx', 'text.ts'].map((name) => `libs/checkout/pages/${name}`),
];

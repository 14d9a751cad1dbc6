/** The bills of a mid-size city: payers, cards, amounts, and later voids and refunds. A seed decides all of them, so a run can be repeated. */

/** The generator mulberry32. It is small, and the same seed gives the same numbers everywhere. */
export class Random {
  constructor(private state: number) {}

  next(): number {
    this.state = (this.state + 0x6d2b79f5) >>> 0;
    let value = this.state;
    value = Math.imul(value ^ (value >>> 15), value | 1);
    value ^= value + Math.imul(value ^ (value >>> 7), value | 61);
    return ((value ^ (value >>> 14)) >>> 0) / 4_294_967_296;
  }

  /** A whole number from `from` to `to`, both inclusive. */
  int(from: number, to: number): number {
    return from + Math.floor(this.next() * (to - from + 1));
  }

  pick<T>(items: readonly T[]): T {
    return items[this.int(0, items.length - 1)]!;
  }
}

interface Service {
  readonly name: string;
  readonly fee: {
    readonly flatCents?: number;
    readonly percentBps?: number;
    readonly minCents?: number;
    readonly maxCents?: number;
    readonly chargeMode?: 'separate' | 'combined';
  };
  readonly lines: { readonly from: number; readonly to: number };
  line(random: Random, index: number): { referenceId: string; description: string; amountCents: number };
}

const streets = ['Mill Road', 'Harbor Street', 'Oak Avenue', 'Station Lane', 'Bridge Street', 'Elm Court'];

/** Each service gets its own portal. The fee schedules cover both charge modes and a flat fee. */
export const SERVICES: readonly Service[] = [
  {
    name: 'water',
    fee: { flatCents: 50, percentBps: 250, chargeMode: 'separate' },
    lines: { from: 1, to: 3 },
    line: (random, index) => ({
      referenceId: `WTR-${100_000 + random.int(0, 899_999)}`,
      description: ['Water', 'Sewer', 'Stormwater'][index % 3]!,
      amountCents: random.int(1_850, 21_400),
    }),
  },
  {
    name: 'parking',
    fee: { flatCents: 195, chargeMode: 'combined' },
    lines: { from: 1, to: 2 },
    line: (random) => ({
      referenceId: `CIT-${random.int(2_000_000, 2_999_999)}`,
      description: `Citation, ${random.pick(streets)}`,
      amountCents: random.pick([2_500, 3_500, 4_500, 6_500, 12_000]),
    }),
  },
  {
    name: 'permits',
    fee: { percentBps: 299, minCents: 100, maxCents: 5_000, chargeMode: 'separate' },
    lines: { from: 1, to: 8 },
    line: (random, index) => ({
      referenceId: `PRM-${random.int(40_000, 59_999)}-${index + 1}`,
      description: random.pick(['Plan review', 'Building permit', 'Electrical permit', 'Sign permit', 'Street closure']),
      amountCents: random.int(3_500, 96_000),
    }),
  },
];

/** Sandbox cards and tokens, the statuses that they should give, and their share of 10,000 payments. */
const CARDS: readonly {
  readonly scenario: string;
  readonly share: number;
  readonly card?: string;
  readonly token?: string;
  readonly expected: readonly number[];
}[] = [
  { scenario: 'approved, Visa', share: 5_250, card: '4242424242424242', expected: [200] },
  { scenario: 'approved, Mastercard', share: 2_300, card: '5555555555554444', expected: [200] },
  { scenario: 'approved, Amex', share: 900, card: '378282246310005', expected: [200] },
  { scenario: 'approved, Discover', share: 300, card: '6011111111111117', expected: [200] },
  { scenario: 'approved, 19 digits', share: 60, card: '4000007770000000205', expected: [200] },
  { scenario: 'approved, card token', share: 250, token: 'tok_sandbox_approved', expected: [200] },
  { scenario: 'approved, settles at once', share: 150, card: '4000007770002001', expected: [200] },
  { scenario: 'approved, void rejected later', share: 60, card: '4000007770004221', expected: [200] },
  { scenario: 'approved, fee refund fails once', share: 40, card: '4000007770007026', expected: [200] },
  { scenario: 'declined', share: 220, card: '4000000000000002', expected: [402] },
  { scenario: 'declined, insufficient funds', share: 180, card: '4000000000009995', expected: [402] },
  { scenario: 'declined, card limit', share: 50, card: '4000000000006975', expected: [402] },
  { scenario: 'declined, expired at the issuer', share: 50, card: '4000000000000069', expected: [402] },
  { scenario: 'declined, security code', share: 60, card: '4000000000000127', expected: [402] },
  { scenario: 'declined, postal code', share: 40, card: '4000007770004619', expected: [402] },
  { scenario: 'gateway error', share: 30, card: '4000007770005020', expected: [502] },
  { scenario: 'gateway failure after 3 s', share: 10, card: '4000007770005129', expected: [502] },
  { scenario: 'unreadable answer', share: 25, card: '4000007770005046', expected: [504] },
  { scenario: 'unreadable, never reached', share: 15, card: '4000007770005244', expected: [504] },
  { scenario: 'incomplete answer, card token', share: 10, token: 'tok_sandbox_incomplete_response', expected: [504] },
];

export interface Plan {
  readonly key: string;
  readonly scenario: string;
  readonly expected: readonly number[];
  readonly amountCents: number;
  readonly body: unknown;
  /** True if the request is sent twice under the same key, as after a broken connection. */
  readonly sentTwice: boolean;
  readonly afterwards: { readonly operation: 'refund' | 'void'; readonly body: unknown; readonly mayFail: readonly string[] } | null;
}

const FIRST_NAMES = ['Maria', 'James', 'Aisha', 'Robert', 'Linda', 'Wei', 'Carlos', 'Emma', 'David', 'Fatima'];
const LAST_NAMES = ['Nguyen', 'Smith', 'García', 'Johnson', 'O’Neill', 'Kowalski', 'Brown', 'Lee', 'Martínez', 'Okafor'];

export const requestFor = (random: Random, index: number, portals: readonly string[]): Plan => {
  const which = random.pick([0, 0, 0, 1, 1, 2]);
  const service = SERVICES[which]!;
  const lineItems = Array.from({ length: random.int(service.lines.from, service.lines.to) }, (_, line) => ({
    ...service.line(random, line),
    metadata: { service: service.name, ward: random.int(1, 9), billed: '2026-10-31' },
  }));
  const amountCents = lineItems.reduce((sum, line) => sum + line.amountCents, 0);
  const card = draw(random);
  const [firstName, lastName] = [random.pick(FIRST_NAMES), random.pick(LAST_NAMES)];
  const body = {
    portalId: portals[which],
    referenceId: lineItems[0]!.referenceId,
    amountCents,
    currency: 'USD',
    paymentMethod: card.token
      ? { type: 'card_token', token: card.token }
      : {
          type: 'card',
          cardNumber: card.card,
          expirationDate: `${String(random.int(1, 12)).padStart(2, '0')}/${random.int(28, 33)}`,
          cvv: String(random.int(100, 999)),
        },
    lineItems,
    ...(random.next() < 0.8
      ? {
          payer: {
            firstName,
            lastName,
            email: `${firstName}.${index}@example.com`.toLowerCase(),
            address: { line1: `${random.int(1, 980)} ${random.pick(streets)}`, city: 'Riverton', state: 'OR', zip: '97001' },
          },
        }
      : {}),
  };
  const key = `riverton-${index}-${random.int(1e9, 2e9)}`;
  return {
    key,
    scenario: card.scenario,
    expected: card.expected,
    amountCents,
    body,
    sentTwice: random.next() < 0.05,
    afterwards: afterwards(random, card.scenario, amountCents),
  };
};

const draw = (random: Random): (typeof CARDS)[number] => {
  let ticket = random.next() * CARDS.reduce((sum, { share }) => sum + share, 0);
  for (const card of CARDS) if ((ticket -= card.share) < 0) return card;
  return CARDS[0]!;
};

/** The void or refund that follows the payment. null: none. */
const afterwards = (random: Random, scenario: string, amountCents: number): Plan['afterwards'] => {
  if (!scenario.startsWith('approved')) return null;
  const ticket = random.next();
  // A charge may have settled already. Then its void fails with this code.
  const mayFail = scenario.includes('settles') || scenario.includes('void rejected') ? ['VOID_FAILED'] : [];
  if (ticket < 0.02) return { operation: 'void', body: { reason: 'billed twice' }, mayFail };
  if (scenario.includes('fee refund')) return null;
  if (ticket < 0.04) return { operation: 'refund', body: { reason: 'meter misread' }, mayFail: [] };
  if (ticket < 0.05) return { operation: 'refund', body: { feeType: 'include_fee', reason: 'permit withdrawn' }, mayFail: [] };
  if (ticket < 0.08) return { operation: 'refund', body: { amountCents: random.int(1, amountCents), reason: 'partial adjustment' }, mayFail: [] };
  return null;
};

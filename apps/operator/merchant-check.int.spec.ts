/**
 * The check of guarantees in this process, against the doubles of both processors. For each guarantee a fault of the double that breaks it: only that
 * guarantee is named, with the calls that were made for it, and without a secret.
 *
 * The waits of the check cost no time here, as its clock jumps over them. `merchant-accounts.e2e.spec.ts` and `merchant-check.e2e.spec.ts` run the
 * command itself.
 */
import { randomBytes } from 'node:crypto';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, test } from '@jest/globals';
import { credentialsRefOf, type Vendor } from '#accounts';
import { type CheckedGuarantee, checkGuarantees, createVendorGateway } from '#gateways';
import { systemIds } from '#platform';
import { gatewayRef, type Op } from '#payments';
import type { FaultName as NetFault, Operation as NetOperation } from '../../test/doubles/authorize-net/faults.js';
import { DEFAULT_MERCHANTS, startAuthorizeNetDouble } from '../../test/doubles/authorize-net/server.js';
import { controlOf } from '../../test/doubles/stripe/control.js';
import type { FaultName as StripeFault, Operation as StripeOperation } from '../../test/doubles/stripe/faults.js';
import { startStripeDouble } from '../../test/doubles/stripe/server.js';
import { MovableClock } from '../../test/support/clock.js';
import { answerOf, termsOf } from './merchant-check.js';

const HOUR_MS = 3_600_000;
const NAMES = Array.from({ length: 13 }, (_, index) => `g${index + 1}`);
/** Nothing that the check prints may match it: keys, logins, card numbers, card codes, tokens. */
const SECRETS = /key-of-one|login-one|sk_test|4111111|"900"|pm_card|pm_0NoSuch/;

/** A sleep ends at once, and the monotonic clock has jumped over it. Business time does not jump. */
class JumpingClock extends MovableClock {
  private jumped = 0;

  override monotonic(): number {
    return super.monotonic() + this.jumped;
  }

  override async sleep(ms: number): Promise<void> {
    await pause(1);
    this.jumped += ms;
  }
}

let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'payfold-check-'));
});
afterAll(() => rm(folder, { recursive: true }));
const stops: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const stop of stops.splice(0)) await stop();
});
const fileOf = (): string => join(folder, `${randomBytes(6).toString('hex')}.jsonl`);

/** A double whose account is checked. */
interface Checked {
  readonly gateway: Vendor;
  readonly endpoint: string;
  readonly credentials: string;
  readonly cutOff: { readonly time: string; readonly timeZone: string } | null;
  readonly clock: MovableClock;
  fault(fault: Fault, ref: string | null): Promise<unknown>;
  heal(): Promise<unknown>;
  /** Moves the time past the batch, so that all can be told. */
  passBatch(): Promise<unknown>;
}

/** `of`: only calls about this charge or refund of the run. Default: any. */
interface Fault {
  readonly name: NetFault | StripeFault;
  readonly op?: NetOperation | StripeOperation;
  readonly of?: readonly [name: string, op: Op];
  readonly ms?: number;
  readonly code?: number;
  readonly reason?: number;
}

const authorizeNet = async (): Promise<Checked> => {
  const clock = new JumpingClock();
  const double = await startAuthorizeNetDouble({ file: fileOf() });
  stops.push(() => double.close());
  // The last cut-off was three hours ago, so that no test meets one by chance.
  const cutOff = { time: new Date(Date.now() - 3 * HOUR_MS).toISOString().slice(11, 16), timeZone: 'UTC' };
  const merchant = { ...DEFAULT_MERCHANTS[0]!, cutOff };
  double.vendor.setMerchant(merchant);
  const { apiLoginId, transactionKey } = merchant;
  return {
    gateway: 'authorize-net',
    endpoint: double.endpoint,
    credentials: JSON.stringify({ apiLoginId, transactionKey }),
    cutOff,
    clock,
    fault: async ({ name, op = '*', ms = 0, code = 2, reason = 2 }, ref) =>
      double.vendor.setFault({ name: name as NetFault, op: op as NetOperation, ref, times: null, ms, code, reason }),
    heal: async () => double.vendor.heal(null),
    passBatch: async () => {
      clock.advance(30 * HOUR_MS);
      double.vendor.moveTo(double.vendor.ahead + 30 * HOUR_MS);
      double.vendor.tick();
    },
  };
};

const stripe = async (): Promise<Checked> => {
  const double = await startStripeDouble({ file: fileOf() });
  stops.push(() => double.close());
  const control = controlOf(double.url);
  return {
    gateway: 'stripe',
    endpoint: double.url,
    credentials: '{"secretKey":"sk_test_double_one_0001"}',
    cutOff: null,
    clock: new JumpingClock(),
    fault: ({ name, op, ms }, ref) =>
      control.fault(name as StripeFault, {
        times: null,
        ...(op && { op: op as StripeOperation }),
        ...(ref !== null && { ref }),
        ...(ms !== undefined && { ms }),
      }),
    heal: () => control.heal(),
    passBatch: () => control.payOut(),
  };
};
const DOUBLES = { 'authorize-net': authorizeNet, stripe } as const;

interface Row {
  readonly faults: readonly Fault[];
  /** The faults stand only while this guarantee is checked. Default: in the whole part of the run. */
  readonly only?: string;
  /** The faults stand in the part of the run after the batch, and while it closes. */
  readonly afterBatch?: boolean;
  /** The check only reads. */
  readonly quick?: boolean;
}

/** Both parts of a run, or the first part only. Faults stand as a row says. */
const run = async (checked: Checked, { faults, only, afterBatch = false, quick = false }: Row, isWhole: boolean) => {
  const { gateway, endpoint, credentials, cutOff, clock } = checked;
  const runId = systemIds(() => clock.now()).uuid();
  const set = () => Promise.all(faults.map((fault) => checked.fault(fault, fault.of ? gatewayRef(`${runId}/${fault.of[0]}`, 'combined', fault.of[1]) : null))); // prettier-ignore
  const account = { gateway, merchantAccount: 'one', credentialsRef: credentialsRefOf('one'), environment: 'sandbox' } as const;
  const ports = {
    open: () => createVendorGateway({ ...account, settings: { cutOff, endpoint }, repeats: null }, credentials, { clock }),
    account,
    cutOffZone: cutOff?.timeZone ?? null,
    clock,
  };
  const terms = await termsOf(gateway, runId, 101);
  const part = async (before: readonly CheckedGuarantee[] | null, isFaulty: boolean) => {
    const found = await checkGuarantees(ports, terms, { quick, before }, async ({ guarantee }) => {
      const next = NAMES[NAMES.indexOf(guarantee) + 1];
      if (isFaulty && only !== undefined && next === only) await set();
      if (isFaulty && guarantee === only) await checked.heal();
    });
    await checked.heal();
    return found;
  };
  if (!afterBatch && only === undefined) await set();
  const first = await part(null, !afterBatch);
  if (!isWhole) return { runId, found: first };
  if (afterBatch && only === undefined) await set();
  await checked.passBatch();
  return { runId, found: await part(first, afterBatch) };
};

const brokenOf = (found: readonly CheckedGuarantee[]): string[] =>
  found.filter(({ result }) => result === 'broken').map(({ guarantee }) => guarantee);

/** For each guarantee the faults that break it, and nothing else. */
const BREAKS: Readonly<Record<Vendor, Readonly<Record<string, readonly (Row & { readonly detail: RegExp })[]>>>> = {
  'authorize-net': {
    g1: [
      { faults: [{ name: 'clock_wrong', ms: 600_000 }], detail: /clock of this host differs/ },
      { faults: [{ name: 'details_api_off' }], quick: true, detail: /"Transaction Details API" is off/ },
    ],
    g2: [{ faults: [{ name: 'no_duplicates', of: ['repeated', 'charge'] }], detail: /repeated charge was answered with approved/ }],
    g3: [{ faults: [{ name: 'no_duplicates', of: ['race', 'charge'] }], detail: /made 5 transactions/ }],
    g4: [
      { faults: [{ name: 'no_duplicates', of: ['elsewhere', 'charge'] }], detail: /with another transaction/ },
      { faults: [{ name: 'duplicate_foreign' }], only: 'g4', detail: /not_processed/ },
    ],
    g5: [{ faults: [{ name: 'hidden', of: ['look-3', 'charge'], ms: HOUR_MS }], detail: /could not be looked up after 180 s/ }],
    g6: [{ faults: [{ name: 'hidden', of: ['executed', 'charge'], ms: HOUR_MS }], detail: /finalised as cannot_tell/ }],
    g7: [{ faults: [{ name: 'http_503', op: 'unsettled' }], only: 'g7', detail: /finalised as cannot_tell/ }],
    g8: [{ faults: [{ name: 'refunds_repeat', of: ['once', 'refund'] }], afterBatch: true, detail: /repeated refund was answered with/ }],
    g9: [
      { faults: [{ name: 'no_ref', op: 'void' }], only: 'g9', detail: /void was answered with unknown/ },
      { faults: [{ name: 'undone_unlisted' }], only: 'g9', detail: /voided was finalised as cannot_tell/ },
    ],
    g10: [
      { faults: [{ name: 'void_settled' }], afterBatch: true, detail: /void after the batch was answered with approved/ },
      { faults: [{ name: 'reason', of: ['whole', 'refund'], code: 3, reason: 54 }], afterBatch: true, detail: /refund after the batch/ },
    ],
    g11: [{ faults: [{ name: 'refunds_exceed', of: ['over', 'refund'] }], afterBatch: true, detail: /more than remains was answered with approved/ }],
    g12: [
      { faults: [{ name: 'unknown_code', of: ['declined', 'charge'] }], detail: /always declined was answered with unknown/ },
      { faults: [{ name: 'undone_unlisted' }], only: 'g12', detail: /declined charge was finalised as cannot_tell/ },
    ],
    g13: [{ faults: [{ name: 'no_invoice', op: 'batch' }], only: 'g13', afterBatch: true, detail: /none of them carries our reference/ }],
  },
  stripe: {
    g1: [{ faults: [{ name: 'clock_wrong', ms: 600_000 }], detail: /clock of this host differs/ }],
    g2: [{ faults: [{ name: 'keys_forgotten', of: ['repeated', 'charge'] }], detail: /repeated charge was answered with approved/ }],
    g3: [{ faults: [{ name: 'keys_forgotten', of: ['race', 'charge'] }], detail: /made 5 transactions/ }],
    g4: [{ faults: [{ name: 'keys_forgotten', of: ['elsewhere', 'charge'] }], detail: /with another transaction/ }],
    g5: [{ faults: [{ name: 'no_ref', op: 'intents' }], only: 'g5', detail: /could not be looked up after 180 s/ }],
    g6: [{ faults: [{ name: 'keys_forgotten', of: ['executed', 'charge'] }], detail: /finalised as never/ }],
    g7: [{ faults: [{ name: 'keys_forgotten', of: ['never', 'charge'] }], detail: /under a closed reference was approved/ }],
    g8: [
      { faults: [{ name: 'keys_unbound' }], detail: /refund under a closed reference was made/ },
      { faults: [{ name: 'keys_forgotten', of: ['once', 'refund'] }], detail: /repeated refund was answered with/ },
    ],
    g11: [{ faults: [{ name: 'refunds_exceed' }], only: 'g11', detail: /more than remains was answered with approved/ }],
    g12: [
      { faults: [{ name: 'no_card', op: 'confirm', of: ['card', 'charge'] }], detail: /card behind a token is not named/ },
      { faults: [{ name: 'unknown_status', op: 'confirm', of: ['card', 'charge'] }], detail: /charge was answered with unknown/ },
      { faults: [{ name: 'no_error', op: 'cancel' }], only: 'g12', detail: /declined charge was finalised as never/ },
    ],
    g13: [{ faults: [{ name: 'no_ref', op: 'lines' }], afterBatch: true, detail: /none of them carries our reference/ }],
  },
};
/** Faults that stand in the whole run, and all that they break. */
const STANDING: Readonly<Record<Vendor, readonly (Row & { readonly broken: readonly string[] })[]>> = {
  'authorize-net': [
    { faults: [{ name: 'no_duplicates' }], broken: ['g2', 'g3', 'g4'] },
    { faults: [{ name: 'no_duplicates' }], afterBatch: true, broken: ['g8'] },
    // The adapter looks the reference up by itself.
    { faults: [{ name: 'duplicate_unnamed' }], broken: [] },
    // A transaction that has left the open list is in no batch yet.
    { faults: [{ name: 'batch_late', ms: 48 * HOUR_MS }], afterBatch: true, broken: ['g8', 'g10', 'g11'] },
  ],
  stripe: [{ faults: [{ name: 'keys_forgotten' }], broken: ['g2', 'g3', 'g4', 'g6', 'g7', 'g8', 'g12'] }],
};

describe.each(['authorize-net', 'stripe'] as const)('%s', (gateway) => {
  test('all guarantees hold after the batch; the last one that could not be told is told then', async () => {
    const { runId, found } = await run(await DOUBLES[gateway](), { faults: [] }, true);
    const notApplicable = gateway === 'stripe' ? ['g9', 'g10'] : [];
    expect(found.map(({ guarantee, result }) => [guarantee, result])).toEqual(
      NAMES.map((name) => [name, notApplicable.includes(name) ? 'not_applicable' : 'holds']),
    );
    expect(answerOf({ merchantAccount: 'one' }, runId, found)).toMatchObject({ exitCode: 0, json: { calls: {} } });
    const { detail } = found.find(({ guarantee }) => guarantee === 'g11')!;
    if (gateway === 'authorize-net') expect(detail).toMatch(/other last four digits is rejected \(response 3, reason 54\)/);
    expect(JSON.stringify(found)).not.toMatch(SECRETS);
  });

  const rows = Object.entries(BREAKS[gateway]).flatMap(([guarantee, all]) =>
    all.map((row) => [guarantee, row.faults.map(({ name, op }) => (op ? `${name} of ${op}` : name)).join(), row] as const),
  );
  test.each(rows)('%s is broken by %s, and by nothing else; the calls are printed', async (guarantee, _, row) => {
    const { runId, found } = await run(await DOUBLES[gateway](), row, row.afterBatch ?? false);
    expect(brokenOf(found)).toEqual([guarantee]);
    const broken = found.find((one) => one.guarantee === guarantee)!;
    expect(broken.detail).toMatch(row.detail);
    expect(broken.calls.length).toBeGreaterThan(0);
    const { exitCode, json, text } = answerOf({ merchantAccount: 'one' }, runId, found);
    expect([exitCode, (json as { calls: object }).calls]).toEqual([1, { [guarantee]: broken.calls }]);
    const printed = `${text.slice(text.indexOf(`\n${guarantee}:\n`))}\n`;
    for (const { call, answer } of broken.calls) expect(printed).toContain(`  ${call}\n    ${answer}\n`);
    expect(JSON.stringify(json) + text).not.toMatch(SECRETS);
  });

  test.each(STANDING[gateway].map((row) => [row.faults[0]!.name, row.broken.join() || 'nothing', row] as const))(
    'with %s in the whole part of the run, it breaks %s',
    async (_, _broken, row) => {
      const { found } = await run(await DOUBLES[gateway](), row, row.afterBatch ?? false);
      expect(brokenOf(found)).toEqual(row.broken);
    },
  );
});

test('each guarantee that applies has a fault that breaks it', () => {
  expect(Object.keys(BREAKS['authorize-net'])).toEqual(NAMES);
  expect(Object.keys(BREAKS.stripe)).toEqual(NAMES.filter((name) => name !== 'g9' && name !== 'g10'));
});

test('between the cut-off and the settlement of a batch, the resumed check finds its charges and waits', async () => {
  const checked = await authorizeNet();
  await checked.fault({ name: 'batch_pending' }, null);
  const { found } = await run({ ...checked, heal: async () => undefined }, { faults: [] }, true);
  const later = ['g7', 'g8', 'g10', 'g11', 'g13'];
  expect(found.map(({ guarantee, result }) => [guarantee, result])).toEqual(NAMES.map((name) => [name, later.includes(name) ? 'later' : 'holds']));
});

/** Observes the calls of gateways, for metrics. An observer gets the outcome and the duration of a call, but no data of the payment. */
import type { Clock } from '#kernel';
import { type GatewayAccount, type PaymentGateway, UnknownCursor } from './gateway.js';

export interface GatewayCall {
  /** `simulator`, `authorize-net` or `stripe`. */
  readonly gateway: string;
  readonly operation: 'charge' | 'void' | 'refund' | 'finalize' | 'lookup' | 'transaction' | 'settlements' | 'disputes' | 'describe';
  /**
   * The kind of the result, such as `approved`, `unknown` or `cannot_tell`. For a look-up and a transaction `found` or `not_found`, for settlements
   * and disputes `listed`, for a description `described`. `failed`: the gateway could not be asked.
   */
  readonly outcome: string;
  readonly seconds: number;
}

/** How often something happened at a merchant account since the start. */
export interface AccountCount {
  readonly gateway: string;
  readonly account: string;
  readonly count: number;
}

type CountedAccount = Pick<GatewayAccount, 'gateway' | 'merchantAccount'>;

const count = (counts: Map<string, AccountCount>, { gateway, merchantAccount: account }: CountedAccount, more: 0 | 1): void => {
  counts.set(account, { gateway, account, count: (counts.get(account)?.count ?? 0) + more });
};

export class GatewayCalls {
  private readonly watchers = new Set<(call: GatewayCall) => void>();
  private readonly refused = new Map<string, AccountCount>();
  private readonly held = new Map<string, AccountCount>();
  private readonly alarms = new Map<string, AccountCount>();

  /** Counts a call that the processor refused because of the credentials. `more`: 1 for such a call; 0 when the account is taken into use. */
  countRefused(account: CountedAccount, more: 0 | 1): void {
    count(this.refused, account, more);
  }

  /** Counts a charge that the processor held for review. `more`: as in {@link countRefused}. */
  countHeld(account: CountedAccount, more: 0 | 1): void {
    count(this.held, account, more);
  }

  /** Counts an answer that needs a person at once: in test mode, or with the transaction of another charge. `more`: as in {@link countRefused}. */
  countAlarm(account: CountedAccount, more: 0 | 1): void {
    count(this.alarms, account, more);
  }

  get alarmingAnswers(): readonly AccountCount[] {
    return [...this.alarms.values()];
  }

  get refusedCredentials(): readonly AccountCount[] {
    return [...this.refused.values()];
  }

  get heldCharges(): readonly AccountCount[] {
    return [...this.held.values()];
  }

  watch(watcher: (call: GatewayCall) => void): void {
    this.watchers.add(watcher);
  }

  /** The same gateway, with its calls observed. `name`: as {@link GatewayCall.gateway}. */
  observed<G extends PaymentGateway>(name: string, gateway: G, clock: Clock): G {
    const report = (operation: GatewayCall['operation'], outcome: string, ms: number) => {
      for (const watcher of this.watchers) watcher({ gateway: name, operation, outcome, seconds: ms / 1_000 });
    };
    const timed = async <T>(operation: GatewayCall['operation'], call: Promise<T>, outcomeOf: (result: T) => string): Promise<T> => {
      const begun = clock.monotonic();
      try {
        const result = await call;
        report(operation, outcomeOf(result), clock.monotonic() - begun);
        return result;
      } catch (error) {
        report(operation, 'failed', clock.monotonic() - begun);
        throw error;
      }
    };
    /** Passes a list on. Reports it when it has ended, with the time of its reads. The time that the caller spends on an item does not count. */
    const listed = async function* <T>(
      operation: GatewayCall['operation'],
      list: (timing: <I>(items: AsyncIterable<I>) => AsyncIterable<I>) => AsyncIterable<T>,
    ): AsyncIterable<T> {
      let [outcome, ms] = ['listed', 0];
      const timing = async function* <I>(items: AsyncIterable<I>): AsyncIterable<I> {
        const iterator = items[Symbol.asyncIterator]();
        try {
          for (;;) {
            const begun = clock.monotonic();
            const next = await iterator.next().finally(() => (ms += clock.monotonic() - begun));
            if (next.done) return;
            yield next.value;
          }
        } finally {
          await iterator.return?.();
        }
      };
      try {
        yield* list(timing);
      } catch (error) {
        outcome = error instanceof UnknownCursor ? 'unknown_cursor' : 'failed';
        throw error;
      } finally {
        report(operation, outcome, ms);
      }
    };
    return {
      ...gateway,
      charge: (call, signal) => timed('charge', gateway.charge(call, signal), ({ kind }) => kind),
      void: (call, signal) => timed('void', gateway.void(call, signal), ({ kind }) => kind),
      refund: (call, signal) => timed('refund', gateway.refund(call, signal), ({ kind }) => kind),
      finalize: (call, signal) => timed('finalize', gateway.finalize(call, signal), ({ kind }) => kind),
      lookup: (call, signal) =>
        timed('lookup', gateway.lookup(call, signal), ({ found }) => (found === true ? 'found' : found === false ? 'not_found' : found)),
      ...(gateway.transaction && {
        transaction: (transactionId: string, signal: AbortSignal) =>
          timed('transaction', gateway.transaction!(transactionId, signal), (found) => (found ? 'found' : 'not_found')),
      }),
      describe: (signal) => timed('describe', gateway.describe(signal), () => 'described'),
      ...(gateway.disputes && {
        disputes: (open: readonly string[], cursor: string | null, signal: AbortSignal) =>
          listed('disputes', (timing) => timing(gateway.disputes!(open, cursor, signal))),
      }),
      settlements: (cursor, signal) =>
        listed('settlements', async function* (timing) {
          for await (const batch of timing(gateway.settlements(cursor, signal))) yield { ...batch, lines: timing(batch.lines) };
        }),
    };
  }
}

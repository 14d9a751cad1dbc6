/** Observes the calls of gateways, for metrics. An observer gets the outcome and the duration of a call, but no data of the payment. */
import type { Clock } from '#kernel';
import { type GatewayAccount, type PaymentGateway, UnknownCursor } from './gateway.js';

export interface GatewayCall {
  readonly operation: 'charge' | 'void' | 'refund' | 'finalize' | 'lookup' | 'transaction' | 'settlements';
  /**
   * The kind of the result, such as `approved`, `unknown` or `cannot_tell`. For a look-up and a transaction `found` or `not_found`, for settlements `listed`.
   * `failed`: the gateway could not be asked.
   */
  readonly outcome: string;
  readonly seconds: number;
}

export class GatewayCalls {
  private readonly watchers = new Set<(call: GatewayCall) => void>();

  watch(watcher: (call: GatewayCall) => void): void {
    this.watchers.add(watcher);
  }

  /** The same gateway, with its calls observed. */
  observed<G extends PaymentGateway>(gateway: G, clock: Clock): G {
    const report = (operation: GatewayCall['operation'], outcome: string, ms: number) => {
      for (const watcher of this.watchers) watcher({ operation, outcome, seconds: ms / 1_000 });
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
    return {
      ...gateway,
      charge: (call, signal) => timed('charge', gateway.charge(call, signal), ({ kind }) => kind),
      void: (call, signal) => timed('void', gateway.void(call, signal), ({ kind }) => kind),
      refund: (call, signal) => timed('refund', gateway.refund(call, signal), ({ kind }) => kind),
      finalize: (call, signal) => timed('finalize', gateway.finalize(call, signal), ({ kind }) => kind),
      lookup: (call, signal) =>
        timed('lookup', gateway.lookup(call, signal), ({ found }) => (found === true ? 'found' : found === false ? 'not_found' : found)),
      ...(gateway.transaction && {
        transaction: (account: GatewayAccount, transactionId: string, signal: AbortSignal) =>
          timed('transaction', gateway.transaction!(account, transactionId, signal), (found) => (found ? 'found' : 'not_found')),
      }),
      settlements: async function* (account, cursor, signal) {
        const records = gateway.settlements(account, cursor, signal)[Symbol.asyncIterator]();
        let [outcome, ms] = ['listed', 0];
        try {
          for (;;) {
            // The time that the caller spends on a record does not count.
            const begun = clock.monotonic();
            const next = await records.next().finally(() => (ms += clock.monotonic() - begun));
            if (next.done) return;
            yield next.value;
          }
        } catch (error) {
          outcome = error instanceof UnknownCursor ? 'unknown_cursor' : 'failed';
          throw error;
        } finally {
          report('settlements', outcome, ms);
          await records.return?.();
        }
      },
    };
  }
}

/** Drives the control of a running double from a spec or a script. */
import type { Fault, FaultName, Operation } from './faults.js';
import type { Fields, Thing } from './vendor.js';

export interface StripeControl {
  /** `times` null: until it is cleared. Default 1, or null for a fault that stands. */
  fault(name: FaultName, more?: { op?: Operation; ref?: string; times?: number | null; ms?: number }): Promise<Fault>;
  heal(): Promise<unknown>;
  /** Moves the clock of the double forward. */
  advance(ms: number): Promise<unknown>;
  /** A payment method that can be used once. Returns its id. */
  method(given?: {
    declineCode?: string;
    code?: string;
    brand?: string;
    last4?: string;
    zip?: string;
    cvc?: string;
    refunds?: string;
  }): Promise<string>;
  intents(ref: string): Promise<Thing[]>;
  refunds(): Promise<Thing[]>;
  charges(): Promise<Thing[]>;
  failRefund(id: string): Promise<Thing>;
  payOut(given?: { status?: 'completed' | 'in_progress' | 'not_applicable'; currency?: string }): Promise<Thing | null>;
  changePayout(id: string, changes: Fields): Promise<Thing>;
  seed(count: number, amountCents: number, label: string): Promise<Thing>;
  dispute(intent: string, dispute?: Fields): Promise<Thing>;
  changeDispute(id: string, changes: Fields): Promise<Thing>;
  transaction(given: Fields): Promise<Thing>;
  account(keys: readonly string[], changes?: Fields): Promise<Fields>;
}

/** `account`: the account of the double that is driven. Default: the first one. */
export const controlOf = (url: string, account?: string): StripeControl => {
  const ask = async <T>(method: 'GET' | 'POST' | 'DELETE', path: string, body?: Fields): Promise<T> => {
    const query = method === 'GET' && account !== undefined ? `${path.includes('?') ? '&' : '?'}account=${account}` : '';
    const answer = await fetch(`${url}/_double${path}${query}`, {
      method,
      ...(body && { body: JSON.stringify({ ...(account !== undefined && { account }), ...body }) }),
    });
    if (!answer.ok) throw new Error(`${method} ${path}: ${await answer.text()}`);
    return (await answer.json()) as T;
  };
  const post = <T>(path: string, body: object): Promise<T> => ask<T>('POST', path, body as Fields);
  return {
    fault: (name, more = {}) => post('/faults', { name, ...more }),
    heal: () => ask('DELETE', '/faults'),
    advance: (ms) => post('/clock', { ms }),
    method: async (given = {}) => (await post<{ id: string }>('/methods', given)).id,
    intents: async (ref) => (await ask<{ intents: Thing[] }>('GET', `/intents?ref=${ref}`)).intents,
    refunds: async () => (await ask<{ refunds: Thing[] }>('GET', '/refunds')).refunds,
    charges: async () => (await ask<{ charges: Thing[] }>('GET', '/charges')).charges,
    failRefund: (id) => post('/refunds/fail', { id }),
    payOut: async (given = {}) => (await post<{ payout: Thing | null }>('/payouts', given)).payout,
    changePayout: async (id, changes) => (await post<{ payout: Thing }>('/payouts/change', { id, changes })).payout,
    seed: async (count, amountCents, label) => (await post<{ payout: Thing }>('/seed', { count, amountCents, label })).payout,
    dispute: (intent, dispute = {}) => post('/disputes', { intent, dispute }),
    changeDispute: (id, changes) => post('/disputes/change', { id, changes }),
    transaction: (given) => post('/transactions', given),
    account: (keys, changes = {}) => post('/accounts', { keys, changes }),
  };
};

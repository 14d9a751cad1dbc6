/**
 * Faults on demand, for tests and chaos runs. A fault delays the next matching calls or spoils their answers, and decides whether the operation is
 * executed. Faults are only in memory, so a restart removes them.
 */
import type { AskedBy, Leg } from './processor.js';

export const CALLS = ['charge', 'void', 'refund', 'finalize', 'lookup', 'transaction', 'batches'] as const;
export type Call = (typeof CALLS)[number];

/**
 * `cut`: the connection is reset without an answer · `not_json`: a 200 that is not JSON · `drip`: the true answer, a byte at a time · `bare_500`: a
 * 500 without JSON · `missing_fields`: a 200 that lacks its fields · `other_reference`: the answer names another reference · `oversized`: 2 MiB of
 * JSON · `disabled`: a clear refusal, nothing executed.
 */
export const MISBEHAVIOURS = ['cut', 'not_json', 'missing_fields', 'other_reference', 'oversized', 'bare_500', 'drip', 'disabled'] as const;
export type Misbehaviour = (typeof MISBEHAVIOURS)[number];

export interface CallFacts {
  readonly call: Call;
  readonly merchantAccount: string;
  readonly ref?: string;
  readonly leg?: Leg;
  readonly last4?: string;
  readonly askedBy?: AskedBy;
}

/** All given fields must match. If no field is given, every call matches. */
export type FaultMatch = Partial<CallFacts>;

export interface Fault {
  readonly match: FaultMatch;
  /** Number of matching calls that pass before the fault hits the first one. */
  readonly skip: number;
  /** Number of matching calls that the fault hits. null: all calls until faults are cleared. */
  readonly times: number | null;
  /** Chance, from 0 to 1, that a matching call counts. Other calls are not hit and change neither `skip` nor `times`. */
  readonly probability: number;
  /** Milliseconds before the operation is executed. */
  readonly delayBeforeMs: number;
  /** Milliseconds between the execution and its answer. */
  readonly delayAfterMs: number;
  /** False: the operation is not executed. If `answer` is null then, the connection is cut after the delays. */
  readonly effect: boolean;
  readonly answer: Misbehaviour | null;
}

export class Faults {
  private readonly armed: { readonly id: number; readonly fault: Fault; skip: number; left: number }[] = [];
  private count = 0;
  private harmed = 0;

  arm(fault: Fault): number {
    this.count += 1;
    this.armed.push({ id: this.count, fault, skip: fault.skip, left: fault.times ?? Infinity });
    return this.count;
  }

  clear(): void {
    this.armed.length = 0;
  }

  /** Returns the first armed fault that hits this call, and counts the hit. null: no fault hits it. */
  take(facts: CallFacts): Fault | null {
    for (const [index, armed] of this.armed.entries()) {
      const fits = Object.entries(armed.fault.match).every(([field, value]) => value === undefined || facts[field as keyof CallFacts] === value);
      if (!fits || Math.random() >= armed.fault.probability) continue;
      if (armed.skip > 0) {
        armed.skip -= 1;
        continue;
      }
      armed.left -= 1;
      this.harmed += 1;
      if (armed.left <= 0) this.armed.splice(index, 1);
      return armed.fault;
    }
    return null;
  }

  list(): { readonly harmedCalls: number; readonly armed: readonly { readonly id: number; readonly left: number | null; readonly fault: Fault }[] } {
    return { harmedCalls: this.harmed, armed: this.armed.map(({ id, left, fault }) => ({ id, left: Number.isFinite(left) ? left : null, fault })) };
  }
}

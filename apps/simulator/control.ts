/**
 * Controls a running simulator for tests and chaos runs: arms faults, closes batches, and reads the true state. Each directory of books has a key of
 * its own for this, in the file `control.key`.
 */
import { randomBytes } from 'node:crypto';
import { join } from 'node:path';
import { readOwnFile, writeOwnFile } from '#platform';
import type { Fault, FaultMatch } from './faults.js';
import type { Dispute, Truth } from './processor.js';

export interface ClosedBatchSummary {
  readonly merchantAccount: string;
  readonly batchId: string;
  readonly closedAt: string;
  readonly count: number;
  readonly grossCents: number;
  readonly feeCents: number;
  readonly netCents: number;
}

export interface SimulatorControl {
  /**
   * Arms a fault for matching calls. A fault without settings hits one call and does no harm (`times` 1, `effect` true). Returns the fault's number.
   */
  arm(fault: Partial<Omit<Fault, 'match'>> & { readonly match?: FaultMatch }): Promise<number>;
  clearFaults(): Promise<void>;
  /** Number of calls that a fault has hit since the simulator started. */
  harmedCalls(): Promise<number>;
  /** False: every merchant call gets a clear refusal, and nothing is executed. */
  setProcessing(enabled: boolean): Promise<void>;
  /** All executed operations and tombstones, oldest first, from number `from` on. */
  truth(from?: number): Promise<Truth[]>;
  closeBatches(): Promise<ClosedBatchSummary[]>;
  disputes(): Promise<Dispute[]>;
  changeDispute(disputeId: string, change: { readonly status?: string; readonly stage?: string }): Promise<Dispute>;
}

const PAGE = 10_000;

const KEY_FILE = 'control.key';
const KEY_BYTES = 32;

/** The key of the simulator in `DATA_DIR`. Throws if no simulator has run there. */
export const controlKeyOf = (dataDir: string): string => {
  const key = readOwnFile(join(dataDir, 'simulator', KEY_FILE), { secret: true });
  if (key === null) throw new Error(`no simulator has run in ${dataDir}`);
  return key.trim();
};

/** The key of this directory of books. The first start makes it. The caller holds the directory. */
export const readOrCreateControlKey = (directory: string): string => {
  const file = join(directory, KEY_FILE);
  const known = readOwnFile(file, { secret: true });
  if (known !== null) return known.trim();
  const key = randomBytes(KEY_BYTES).toString('base64url');
  writeOwnFile(file, `${key}\n`);
  return key;
};

/** `key`: of the simulator's directory ({@link controlKeyOf}). */
export const createSimulatorControl = (url: string, key: string): SimulatorControl => {
  const call = async <T>(method: string, path: string, body?: object): Promise<T> => {
    const answer = await fetch(new URL(path, url), {
      method,
      headers: { authorization: `Control ${key}`, ...(body && { 'content-type': 'application/json' }) },
      ...(body && { body: JSON.stringify(body) }),
    });
    if (!answer.ok) throw new Error(`${method} ${path}: HTTP ${answer.status} ${await answer.text()}`);
    return (await answer.json()) as T;
  };
  return {
    arm: async (fault) => (await call<{ id: number }>('POST', '/control/faults', fault)).id,
    clearFaults: async () => void (await call('DELETE', '/control/faults')),
    harmedCalls: async () => (await call<{ harmedCalls: number }>('GET', '/control/faults')).harmedCalls,
    setProcessing: async (enabled) => void (await call('POST', '/control/processing', { enabled })),
    truth: async (from = 0) => {
      const all: Truth[] = [];
      for (let next: number | null = from; next !== null;) {
        const page: { operations: Truth[]; next: number | null } = await call('GET', `/control/charges?from=${next}&limit=${PAGE}`);
        all.push(...page.operations);
        next = page.next;
      }
      return all;
    },
    closeBatches: async () => (await call<{ batches: ClosedBatchSummary[] }>('POST', '/control/batches/close', {})).batches,
    disputes: async () => (await call<{ disputes: Dispute[] }>('GET', '/control/disputes')).disputes,
    changeDispute: async (disputeId, change) => (await call<{ dispute: Dispute }>('POST', `/control/disputes/${disputeId}`, change)).dispute,
  };
};

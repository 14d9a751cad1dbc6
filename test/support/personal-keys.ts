/** Personal keys in memory, for specs and the simulation. The code above the rows is the real one. */
import { type Clock, type Ids, systemClock } from '#kernel';
import { createPersonalKeys, type KeyRing, newKeyRing, type PersonalKeyRows, type PersonalKeys, systemIds, type WrappedKey } from '#platform';

/** The rows of the port. They pass the contract of the real ones (personal-keys.contract.ts). */
export class MemoryPersonalKeyRows implements PersonalKeyRows {
  readonly keys = new Map<string, WrappedKey>();
  readonly erased = new Map<string, { readonly erasureId: string; readonly at: string }>();

  async insert(keys: readonly WrappedKey[]): Promise<void> {
    for (const key of keys) if (this.keys.has(key.keyId)) throw new Error(`key ${key.keyId} is there already`);
    for (const key of keys) this.keys.set(key.keyId, key);
  }

  async find(keyIds: readonly string[]) {
    return keyIds.map((keyId) => ({ keyId, key: this.keys.get(keyId) ?? null, erasedAt: this.erased.get(keyId)?.at ?? null }));
  }

  async discard(keyIds: readonly string[]): Promise<void> {
    for (const keyId of keyIds) this.keys.delete(keyId);
  }

  async forget(keyIds: readonly string[], erasure: { readonly erasureId: string; readonly at: string }): Promise<void> {
    for (const keyId of keyIds) {
      this.keys.delete(keyId);
      if (!this.erased.has(keyId)) this.erased.set(keyId, erasure);
    }
  }
}

const QUIET = { warn: () => undefined, error: () => undefined };

export const memoryPersonalKeys = ({
  keys = newKeyRing(),
  clock = systemClock,
  ids = systemIds(() => clock.realNow()),
}: { readonly keys?: KeyRing; readonly clock?: Clock; readonly ids?: Ids } = {}): PersonalKeys =>
  createPersonalKeys(new MemoryPersonalKeyRows(), { keys, ids, clock, log: QUIET, block: 1 });

/**
 * Rate limits of hosted checkout: intakes and card submissions per minute, for each address and each portal (C65). They are off unless an operator
 * sets them. Each process counts by itself, so N processes admit up to N times the limit.
 */
import type { Clock } from '#kernel';

export interface RateLimits {
  /** Counts the request. If a limit is reached, does not count it and returns the seconds to wait. null: admitted. */
  admit(key: { readonly address: string; readonly portalId: string | null }): number | null;
}

export interface RateLimitOptions {
  /** Requests per minute for each client address. null: no limit. */
  readonly perAddress: number | null;
  /** Requests per minute for each portal. null: no limit. */
  readonly perPortal: number | null;
}

const MINUTE_MS = 60_000;
/** If there are this many buckets, all are dropped. Each address and portal then starts again with a full bucket. */
const MAX_BUCKETS = 100_000;

interface Bucket {
  tokens: number;
  at: number;
}

/** Token buckets. Each holds the requests of one minute and refills evenly. */
export const createRateLimits = ({ perAddress, perPortal }: RateLimitOptions, clock: Pick<Clock, 'monotonic'>): RateLimits => {
  const buckets = new Map<string, Bucket>();
  const filled = (key: string, limit: number): Bucket => {
    const now = clock.monotonic();
    const bucket = buckets.get(key) ?? { tokens: limit, at: now };
    bucket.tokens = Math.min(limit, bucket.tokens + ((now - bucket.at) / MINUTE_MS) * limit);
    bucket.at = now;
    if (buckets.size >= MAX_BUCKETS) buckets.clear();
    buckets.set(key, bucket);
    return bucket;
  };
  return {
    admit: ({ address, portalId }) => {
      const asked: { bucket: Bucket; limit: number }[] = [];
      for (const [key, limit] of [
        [`address ${address}`, perAddress],
        [`portal ${portalId}`, portalId === null ? null : perPortal],
      ] as const) {
        if (limit === null) continue;
        const bucket = filled(key, limit);
        // A refused request takes nothing from any bucket. So tokens are taken only after this loop.
        if (bucket.tokens < 1) return Math.ceil(((1 - bucket.tokens) / limit) * 60);
        asked.push({ bucket, limit });
      }
      for (const { bucket } of asked) bucket.tokens -= 1;
      return null;
    },
  };
};

/**
 * The client's address. `hops` is the number of the operator's own proxies. With proxies, the address is entry number `hops` of `X-Forwarded-For`,
 * counted from the end. Earlier entries may be forged by the caller.
 */
export const clientAddress = (socketAddress: string, forwardedFor: string | undefined, hops: number): string => {
  if (hops === 0 || forwardedFor === undefined) return socketAddress;
  const addresses = forwardedFor.split(',').map((address) => address.trim());
  return addresses.at(-hops) ?? socketAddress;
};

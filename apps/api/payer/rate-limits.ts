/**
 * Rate limits of hosted checkout (C65). They count intakes and card submissions by client address. They never close a portal: its payers come from
 * many addresses. If strangers flood a portal, or test cards there, the limits by address for this portal drop to a tenth.
 *
 * Each process counts by itself, so N processes admit up to N times a limit.
 */
import type { Clock } from '#kernel';
import { addressGroup } from '#platform/http';

/** Why the limits for a portal have dropped. */
export type LoweredBy = 'unsigned intakes' | 'declines';

export interface RateLimits {
  /**
   * Counts an intake or a submission of an address. Over the limit, does not count it and returns the seconds to wait. null: admitted. `bytes`: the
   * body of an intake, or the content that a submission writes into the log. It counts once for each started {@link BYTES_PER_TOKEN}.
   */
  admit(address: string, bytes?: number): number | null;
  /** The same for pages, of which an address may have {@link PAGES_PER_REQUEST} times as many. */
  admitPage(address: string): number | null;
  /**
   * The same for a request at one portal: refuses it only while the limits for this portal are lowered. Intakes with a valid signature are not asked
   * for here.
   */
  admitAt(address: string, portalId: string, what: 'unsigned intake' | 'submit', bytes?: number): number | null;
  /** Counts a declined card. */
  declined(portalId: string): void;
  /** Number of portals whose limits are lowered now. */
  lowered(): number;
}

export interface RateLimitOptions {
  /** Requests per minute of each client address. null: no limit. */
  readonly perAddress: number | null;
  /** Over this many unsigned intakes per minute, the limits for a portal drop. null: never. */
  readonly unsignedPerPortal: number | null;
  /** Over this many declined cards per minute, the limits for a portal drop. null: never. */
  readonly declinesPerPortal: number | null;
  /** Called when the limits for a portal drop, and each minute while the reason lasts. */
  readonly onLowered: (portalId: string, by: LoweredBy) => void;
}

const MINUTE_MS = 60_000;
/** Pages that an address may open for each intake or submission that it may send. */
const PAGES_PER_REQUEST = 20;
/** Every declined card adds the content of its session to the log again, and a large body takes time to check. So each counts as several requests. */
const BYTES_PER_TOKEN = 8 * 1024;
const tokensFor = (bytes: number): number => Math.max(1, Math.ceil(bytes / BYTES_PER_TOKEN));
/** Lowered limits are this part of the usual ones. */
const LOWERED_TO = 1 / 10;
/** The limits for a portal stay lowered for this long after its number was last exceeded, in milliseconds. */
export const LOWERED_MS = 10 * MINUTE_MS;
/** Maximum number of buckets of addresses. The one that was not used for the longest time makes room. */
const MAX_BUCKETS = 100_000;

interface Bucket {
  tokens: number;
  at: number;
}

/** Token buckets. Each holds the requests of one minute and refills evenly. */
class Buckets {
  private readonly buckets = new Map<string, Bucket>();

  constructor(
    private readonly clock: Pick<Clock, 'monotonic'>,
    private readonly max: number,
  ) {}

  /** Takes tokens, at most as many as a bucket holds. If there are too few, takes none and returns the seconds until there are enough. */
  take(key: string, perMinute: number, tokens = 1): number | null {
    const cost = Math.min(tokens, perMinute);
    const now = this.clock.monotonic();
    const bucket = this.buckets.get(key) ?? { tokens: perMinute, at: now };
    bucket.tokens = Math.min(perMinute, bucket.tokens + ((now - bucket.at) / MINUTE_MS) * perMinute);
    bucket.at = now;
    // A map keeps its keys in the order in which they were set. So the first one is the oldest.
    this.buckets.delete(key);
    this.buckets.set(key, bucket);
    if (this.buckets.size > this.max) this.buckets.delete(this.buckets.keys().next().value!);
    if (bucket.tokens < cost) return Math.ceil(((cost - bucket.tokens) / perMinute) * 60);
    bucket.tokens -= cost;
    return null;
  }
}

export const createRateLimits = (options: RateLimitOptions, clock: Pick<Clock, 'monotonic'>): RateLimits => {
  const { perAddress, unsignedPerPortal, declinesPerPortal, onLowered } = options;
  const addresses = new Buckets(clock, MAX_BUCKETS);
  // Only portals that exist are counted, so their number is small.
  const portals = new Buckets(clock, Number.POSITIVE_INFINITY);
  const loweredUntil = new Map<string, number>();
  const announcedAt = new Map<string, number>();
  const timeIn = (times: ReadonlyMap<string, number>, key: string) => times.get(key) ?? Number.NEGATIVE_INFINITY;
  const isLowered = (portalId: string) => clock.monotonic() < timeIn(loweredUntil, portalId);

  const count = (portalId: string, by: LoweredBy, perMinute: number | null) => {
    const key = `${by} ${portalId}`;
    if (perMinute === null || portals.take(key, perMinute) === null) return;
    const now = clock.monotonic();
    loweredUntil.set(portalId, now + LOWERED_MS);
    if (now - timeIn(announcedAt, key) < MINUTE_MS) return;
    announcedAt.set(key, now);
    onLowered(portalId, by);
  };

  return {
    admit: (address, bytes = 0) => (perAddress === null ? null : addresses.take(address, perAddress, tokensFor(bytes))),
    admitPage: (address) => (perAddress === null ? null : addresses.take(`page ${address}`, perAddress * PAGES_PER_REQUEST)),
    admitAt: (address, portalId, what, bytes = 0) => {
      if (perAddress !== null && isLowered(portalId)) {
        const seconds = addresses.take(`${address} ${portalId}`, Math.max(1, Math.floor(perAddress * LOWERED_TO)), tokensFor(bytes));
        if (seconds !== null) return seconds;
      }
      if (what === 'unsigned intake') count(portalId, 'unsigned intakes', unsignedPerPortal);
      return null;
    },
    declined: (portalId) => count(portalId, 'declines', declinesPerPortal),
    lowered: () => [...loweredUntil.keys()].filter(isLowered).length,
  };
};

/**
 * The address for which a client counts. `hops` is the number of the operator's own proxies. With proxies, it is entry number `hops` of
 * `X-Forwarded-For`, counted from the end. Earlier entries may be forged by the caller.
 */
export const clientAddress = (socketAddress: string, forwardedFor: string | undefined, hops: number): string => {
  if (hops === 0 || forwardedFor === undefined) return countedAs(socketAddress);
  const addresses = forwardedFor.split(',').map((address) => address.trim());
  return countedAs(addresses.at(-hops) ?? socketAddress);
};

/** Some proxies write the port too: `192.0.2.1:4711`, `[2001:db8::1]:4711`. */
const WITH_PORT = /^(?:\[([^\]]+)\]|([\d.]+))(?::\d+)?$/;

const countedAs = (text: string): string => {
  const [, inBrackets, plain] = WITH_PORT.exec(text) ?? [];
  return addressGroup(inBrackets ?? plain ?? text);
};

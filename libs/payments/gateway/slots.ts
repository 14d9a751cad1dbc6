/**
 * Slots at the gateways. A slot is one connection for one attempt, for all of its calls. It is reserved before the intent: so an attempt that has begun
 * never waits for a connection, and is never refused (C43, C65).
 */
import type { Clock, Deadline, Lane } from '#kernel';
import { type Slot, Slots, type SlotsOptions, type Waiting } from '#platform';
import { GATEWAY_CALL_MS, MIN_CALL_MS, REQUEST_DEADLINE_MS } from './call.js';

export interface GatewaySlotLimits {
  readonly partners: SlotsOptions;
  readonly house: SlotsOptions;
}

/**
 * The limits for each gateway. Of 192 slots, one account alone gets 153, and its payers' pages alone get 128.
 */
export const GATEWAY_SLOTS: GatewaySlotLimits = {
  partners: {
    slots: 192,
    waitingAlone: 4_096,
    waitingShared: 512,
    refusal: 'Too many payments of this account wait for the card processor; nothing was begun. Try again later.',
    retryAfterSeconds: 5,
  },
  /** Recovery resolves at most 8 payments at once, and reads may start more of them. */
  house: {
    slots: 16,
    waitingAlone: 4_096,
    waitingShared: 512,
    refusal: 'Too many payments wait for a connection to the card processor; nothing was begun. Try again later.',
    retryAfterSeconds: 5,
  },
};

/** Without a slot at this time before the deadline, a request is refused. The rest is for the intent and the calls (C42). */
const AFTER_THE_WAIT_MS = REQUEST_DEADLINE_MS - GATEWAY_CALL_MS;

export class GatewaySlots {
  private readonly byGateway = new Map<string, { readonly partners: Slots; readonly house: Slots }>();
  private readonly watchers = new Set<(slots: Slots, share: keyof GatewaySlotLimits) => void>();

  constructor(
    private readonly clock: Clock,
    private readonly limits: GatewaySlotLimits = GATEWAY_SLOTS,
  ) {}

  /** Reserves a slot for an attempt that has not begun. Throws RATE_LIMITED. */
  reserve(gateway: string, accountId: string, lane: Exclude<Lane, 'begun'>, deadline: Deadline, during?: Waiting): Promise<Slot> {
    const waitMs = Math.min(GATEWAY_CALL_MS, deadline.leftMs - AFTER_THE_WAIT_MS);
    return this.of(gateway).partners.take({ accountId, lane, slots: 1 }, waitMs, during && { during });
  }

  /** Waits for a slot for an attempt that has begun. It goes before every attempt that has not. null: no call can be sent in time. */
  resume(gateway: string, accountId: string, deadline: Deadline, during?: Waiting): Promise<Slot | null> {
    return this.begun(this.of(gateway).partners, accountId, deadline, during);
  }

  /**
   * Waits for a slot of the share that recovery and staff have for themselves. null: no call can be sent in time. `accountId`: the owner of the payment.
   */
  ofHouse(gateway: string, accountId: string, deadline: Deadline, during?: Waiting): Promise<Slot | null> {
    return this.begun(this.of(gateway).house, accountId, deadline, during);
  }

  /** Runs `work` with a slot of {@link ofHouse}. null: no call can be sent in time, and `work` was not run. */
  async inHouse<T>(gateway: string, accountId: string, deadline: Deadline, work: () => Promise<T>, during?: Waiting): Promise<T | null> {
    const slot = await this.ofHouse(gateway, accountId, deadline, during);
    try {
      return slot && (await work());
    } finally {
      slot?.release();
    }
  }

  /** Calls `watcher` for the slots of each gateway, as soon as they are used. */
  watch(watcher: (slots: Slots, share: keyof GatewaySlotLimits) => void): void {
    this.watchers.add(watcher);
  }

  private begun(slots: Slots, accountId: string, deadline: Deadline, during?: Waiting): Promise<Slot | null> {
    return slots.take({ accountId, lane: 'begun', slots: 1 }, deadline.leftMs - MIN_CALL_MS, during && { during }).catch(() => null);
  }

  private of(gateway: string) {
    const known = this.byGateway.get(gateway);
    if (known) return known;
    const { partners, house } = this.limits;
    const made = { partners: new Slots(this.clock, partners), house: new Slots(this.clock, house) };
    this.byGateway.set(gateway, made);
    for (const watcher of this.watchers) for (const share of ['partners', 'house'] as const) watcher(made[share], share);
    return made;
  }
}

/**
 * The ports of a request that holds a slot of this process. It gives the slot back while it waits for the gateway, so that slow cards take no time of
 * the process.
 */
export const awayAtGateway = <Ports extends { readonly during?: Waiting }>(ports: Ports, slot: Slot | undefined): Ports =>
  slot ? { ...ports, during: (wait) => slot.away(wait) } : ports;

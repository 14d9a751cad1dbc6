/** The options that the adapters share, and the time limits that they give to the transport. */
import type { Clock } from '#kernel';
import { CHARGE_SENT_WITHIN_MS, GATEWAY_SLOTS, type GatewayAccount } from '#payments';
import { createTransport, type Transport } from './exchange.js';

/** Connections for batches and look-ups, which take no slot. */
const OTHER_CONNECTIONS = 16;
/** Every slot has its connection. If all connections are in use, a call waits for a free one until its deadline. */
const MAX_CONNECTIONS = GATEWAY_SLOTS.partners.slots + GATEWAY_SLOTS.house.slots + OTHER_CONNECTIONS;

export interface GatewayOptions {
  /** The URL that is called. */
  readonly endpoint: string;
  readonly account: GatewayAccount;
  readonly clock: Clock;
  readonly timeouts?: { readonly connectMs?: number; readonly silenceMs?: number };
  /** Default: one for each slot, and 16 for batches and look-ups. */
  readonly maxConnections?: number;
  /** The least time between two lists that are read in the background. Default: five lists a second. */
  readonly listGapMs?: number;
  /** Called with what a person should know. `fields` hold no card data and no secret. Default: nothing. */
  readonly log?: (message: string, fields: object) => void;
  /**
   * Called each time the processor refuses the credentials, beside a line of `log`. `isWhole`: for every call, so that no new charge may begin. Default:
   * nothing.
   */
  readonly onRefusedCredentials?: (refused: { readonly isWhole: boolean }) => void;
  /** Called each time the processor answers a call that moves money as an account in test mode does. Default: nothing. */
  readonly onTestMode?: () => void;
  /** Called each time the processor refuses its lists, so that no new charge may begin. Default: nothing. */
  readonly onRefusedLists?: () => void;
}

export const transportOf = ({
  endpoint,
  clock,
  timeouts,
  maxConnections = MAX_CONNECTIONS,
}: Pick<GatewayOptions, 'endpoint' | 'clock' | 'timeouts' | 'maxConnections'>): Transport =>
  createTransport({ endpoint, clock, maxConnections, ...(timeouts && { timeouts }) });

/** The last moment for the first byte of a charge, in milliseconds since the epoch. NaN, and so never, if `begunAt` is no time. */
export const latestCharge = (begunAt: string): number => Date.parse(begunAt) + CHARGE_SENT_WITHIN_MS;

/** The last moment for the first byte of a void or refund. undefined: no limit. */
export const latestOf = (notAfter: string | undefined): number | undefined => (notAfter === undefined ? undefined : Date.parse(notAfter));

/**
 * A TCP proxy with the toxics of Toxiproxy. It stands on one link of a running installation and needs no privilege. A toxic harms the connections
 * that are open when it is set, and those that open later. Healing ends every harmed connection, since a stream with missing bytes is useless. A seed
 * decides the proxy's choices.
 */
import { connect, createServer, type Socket } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Random } from '../../apps/demo/city.js';

/** `timeout`: no more bytes pass, and neither side gets an error. `slow_close`: a close is forwarded late. */
export type Toxic =
  | { readonly kind: 'latency'; readonly latencyMs: number; readonly jitterMs: number }
  | { readonly kind: 'bandwidth'; readonly bytesPerSecond: number }
  | { readonly kind: 'slicer'; readonly averageBytes: number; readonly delayMs: number }
  | { readonly kind: 'timeout' }
  | { readonly kind: 'reset_peer'; readonly afterMs: number }
  | { readonly kind: 'slow_close'; readonly delayMs: number }
  | { readonly kind: 'limit_data'; readonly bytes: number }
  | { readonly kind: 'down' };

export const TOXICS = [
  'latency',
  'bandwidth',
  'slicer',
  'timeout',
  'reset_peer',
  'slow_close',
  'limit_data',
  'down',
] as const satisfies Toxic['kind'][];

/** The harmed direction: to the server (`upstream`), to the client (`downstream`), or both. */
export type Direction = 'upstream' | 'downstream' | 'both';

export interface Proxy {
  readonly port: number;
  /** Sets the toxic, which replaces an earlier one. `share`: the probability that a connection is harmed, 0 to 1. */
  poison(toxic: Toxic, options?: { readonly direction?: Direction; readonly share?: number }): void;
  /** Removes the toxic, and ends every connection that it harmed. */
  heal(): void;
  /** Ends every connection, harmed or not. Data in flight is lost. */
  cut(): void;
  /** Cuts every connection. New connections go to the server on this port. */
  leadTo(port: number): void;
  /** Connections that a toxic has touched so far. */
  readonly harmed: number;
  close(): Promise<void>;
}

interface Poison {
  readonly toxic: Toxic;
  readonly direction: Direction;
  readonly share: number;
}

/** The pause of `bandwidth` between two parts of the data. */
const SLICE_MS = 50;

/** A client's connection, and its connection to the server. */
class Link {
  private readonly ended = new AbortController();
  private poison: Poison | null = null;
  /** True once a toxic has delayed, changed or ended this link. */
  harmed = false;
  private left = Number.POSITIVE_INFINITY;

  constructor(
    private readonly inbound: Socket,
    private readonly outbound: Socket,
    private readonly random: Random,
    private readonly onHarmed: () => void,
  ) {
    this.relay(inbound, outbound, 'upstream');
    this.relay(outbound, inbound, 'downstream');
  }

  set(poison: Poison | null): void {
    this.poison = poison;
    if (poison?.toxic.kind === 'limit_data') this.left = poison.toxic.bytes;
    if (poison?.toxic.kind === 'down') {
      this.harm();
      this.reset();
    }
    if (poison?.toxic.kind === 'reset_peer') {
      this.harm();
      void this.wait(poison.toxic.afterMs).then(() => this.reset());
    }
  }

  reset(): void {
    this.ended.abort();
    for (const socket of [this.inbound, this.outbound]) if (!socket.destroyed) socket.resetAndDestroy();
  }

  private harm(): void {
    if (!this.harmed) this.onHarmed();
    this.harmed = true;
  }

  private wait(ms: number): Promise<void> {
    return sleep(ms, undefined, { signal: this.ended.signal }).catch(() => undefined);
  }

  private toxicOf(direction: Direction): Toxic | null {
    return this.poison && (this.poison.direction === 'both' || this.poison.direction === direction) ? this.poison.toxic : null;
  }

  private relay(from: Socket, to: Socket, direction: 'upstream' | 'downstream'): void {
    let passing: Promise<unknown> = Promise.resolve();
    from.on('data', (chunk: Buffer) => {
      from.pause();
      passing = this.pass(chunk, to, this.toxicOf(direction)).finally(() => from.resume());
    });
    from.once('end', () => {
      void passing.then(async () => {
        const toxic = this.toxicOf(direction);
        if (toxic?.kind === 'slow_close' || toxic?.kind === 'timeout') this.harm();
        if (toxic?.kind === 'slow_close') await this.wait(toxic.delayMs);
        // A black hole does not forward a close either.
        if (toxic?.kind !== 'timeout') to.end();
      });
    });
    // An error on one side resets the other side too.
    from.once('error', () => this.reset());
    from.once('close', () => {
      if (this.inbound.destroyed && this.outbound.destroyed) this.ended.abort();
    });
  }

  private async pass(chunk: Buffer, to: Socket, toxic: Toxic | null): Promise<void> {
    if (toxic === null || toxic.kind === 'slow_close' || toxic.kind === 'reset_peer' || toxic.kind === 'down') return this.write(to, chunk);
    this.harm();
    switch (toxic.kind) {
      case 'timeout':
        return;
      case 'latency':
        await this.wait(Math.max(0, toxic.latencyMs + (this.random.next() * 2 - 1) * toxic.jitterMs));
        return this.write(to, chunk);
      case 'bandwidth':
        return this.trickle(chunk, to, () => Math.max(1, Math.floor((toxic.bytesPerSecond * SLICE_MS) / 1_000)), SLICE_MS);
      case 'slicer':
        return this.trickle(chunk, to, () => 1 + this.random.int(0, 2 * toxic.averageBytes - 2), toxic.delayMs);
      case 'limit_data': {
        const allowed = chunk.subarray(0, this.left);
        this.left -= allowed.length;
        await this.write(to, allowed);
        if (this.left > 0) return;
        // The receiver gets the data up to the limit. The sender's connection is reset.
        to.end();
        (to === this.outbound ? this.inbound : this.outbound).resetAndDestroy();
        return;
      }
    }
  }

  private async trickle(chunk: Buffer, to: Socket, size: () => number, pauseMs: number): Promise<void> {
    for (let at = 0; at < chunk.length && !to.destroyed;) {
      const part = chunk.subarray(at, at + size());
      at += part.length;
      await this.write(to, part);
      await this.wait(pauseMs);
    }
  }

  private write(to: Socket, chunk: Buffer): Promise<void> {
    if (to.destroyed || to.writableEnded || chunk.length === 0) return Promise.resolve();
    return new Promise((written) => to.write(chunk, () => written()));
  }
}

/** Forwards a free port of loopback to the server on `targetPort`. */
export const startProxy = async (targetPort: number, random: Random): Promise<Proxy> => {
  const links = new Set<Link>();
  let poison: Poison | null = null;
  let target = targetPort;
  let harmed = 0;
  const server = createServer({ allowHalfOpen: true, noDelay: true }, (inbound) => {
    const harm = poison !== null && random.next() < poison.share ? poison : null;
    if (harm?.toxic.kind === 'down') {
      harmed += 1;
      inbound.on('error', () => undefined).resetAndDestroy();
      return;
    }
    const outbound = connect({ port: target, host: '127.0.0.1', allowHalfOpen: true, noDelay: true });
    const link = new Link(inbound, outbound, random, () => (harmed += 1));
    links.add(link);
    for (const socket of [inbound, outbound])
      socket.once('close', () => {
        if (inbound.destroyed && outbound.destroyed) links.delete(link);
      });
    if (harm) link.set(harm);
  });
  await new Promise<void>((listening, fail) => server.once('error', fail).listen(0, '127.0.0.1', listening));
  const cut = () => {
    for (const link of links) link.reset();
  };
  return {
    port: (server.address() as { port: number }).port,
    poison: (toxic, { direction = 'both', share = 1 } = {}) => {
      poison = { toxic, direction, share };
      for (const link of links) link.set(random.next() < share ? poison : null);
    },
    heal: () => {
      poison = null;
      for (const link of links) {
        link.set(null);
        if (link.harmed) link.reset();
      }
    },
    cut,
    leadTo: (other) => {
      target = other;
      cut();
    },
    get harmed() {
      return harmed;
    },
    close: async () => {
      cut();
      await new Promise((closed) => server.close(closed));
    },
  };
};

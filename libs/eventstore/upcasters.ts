/**
 * Old events, read as if they had been written today. Stored bytes never change; a type whose shape changed gets one pure step per old version,
 * and readers only know the newest. Only the newest version is ever written.
 *
 * A lib that owns event types registers them when it is loaded, old versions or not:
 * `upcasters.register({ PaymentCreated: [fromV1, fromV2], PaymentVoided: [] })` says that PaymentCreated is at version 3, PaymentVoided at 1.
 * Readers call {@link upcast}. Every version that was ever shipped has a golden file (`golden/README.md`).
 */
import type { Json } from '#kernel';
import type { Recorded } from './event-store.js';

/** Data of one version into data of the next. Pure, total over what that version allowed. */
export type Upcast = (data: Json) => Json;

/** An event of a newer program: reading on with half the meaning would be a guess, so the reader stops. */
export class UnknownEventVersion extends Error {
  constructor(
    readonly event: Recorded,
    readonly newest: number,
  ) {
    super(
      `${event.stream}@${event.revision}: ${event.type} has version ${event.v}, this program knows versions up to ${newest}; it was written by a newer Payfold`,
    );
    this.name = 'UnknownEventVersion';
  }
}

export class Upcasters {
  private readonly steps = new Map<string, readonly Upcast[]>();

  /** Names types with their steps, from version 1 on. Throws where a type is named twice: two owners of one fact are a fault. */
  register(types: Readonly<Record<string, readonly Upcast[]>>): this {
    for (const [type, steps] of Object.entries(types)) {
      if (this.steps.has(type)) throw new Error(`event type ${type} is registered twice`);
      this.steps.set(type, steps);
    }
    return this;
  }

  /** Newest version of a type; undefined where nobody registered it. */
  newest(type: string): number | undefined {
    const steps = this.steps.get(type);
    return steps && steps.length + 1;
  }

  /** The event in its newest version. Types that nobody registered pass unchanged. Throws {@link UnknownEventVersion}. */
  upcast(event: Recorded): Recorded {
    const steps = this.steps.get(event.type);
    if (!steps || event.v === steps.length + 1) return event;
    if (event.v > steps.length + 1) throw new UnknownEventVersion(event, steps.length + 1);
    return { ...event, v: steps.length + 1, data: steps.slice(event.v - 1).reduce((data, step) => step(data), event.data) };
  }
}

/** The types of this process. */
export const upcasters = new Upcasters();

/** {@link Upcasters.upcast} with the types of this process. */
export const upcast = (event: Recorded): Recorded => upcasters.upcast(event);

/**
 * Slots of this process. Each request of a partner, and each request of a payer as soon as the portal's owner is known, takes one. So the time of the
 * process is shared fairly among accounts (C65).
 */
import { type CallHandler, type ExecutionContext, Injectable, type NestInterceptor } from '@nestjs/common';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { finalize, type Observable } from 'rxjs';
import type { Lane } from '#kernel';
import type { Convoy, Slot, Slots, SlotsOptions } from '#platform';

/**
 * One account gets 19 of 24 slots. If no other account has sent requests for 10 s, it gets 32 of 40 for requests that take one slot. Fewer slots make
 * statements and commits less shared, and more slots make the requests of other accounts slower (`npm run bench -- tenants`).
 */
export const SERVICE_SLOTS: SlotsOptions = {
  slots: 24,
  slotsAlone: 40,
  waitingAlone: 4_096,
  waitingShared: 512,
  refusal: 'Too many requests of this account are waiting; nothing was begun. Try again later.',
  retryAfterSeconds: 1,
  // A request that takes longer waits for something else, for example for a database that does not answer.
  leaseMs: 1_000,
};
/** Token of the {@link Slots} for Nest. */
export const SLOTS = Symbol('slots of this process');

/** A request waits at most this long. The rest of its 28 s is for its work (C42). */
const MAX_WAIT_MS = 20_000;
/**
 * A list takes this many slots. It holds one of the 20 connections of the main pool, so one account alone must not hold them all: 19 slots are nine lists.
 */
export const LIST_SLOTS = 2;
/** A body takes one slot more for each full 32 KiB. */
const BYTES_PER_SLOT = 32 * 1_024;

export type WithSlot = FastifyRequest & {
  slot?: Slot;
  /** True while the handler runs. */
  isHandled?: boolean;
};

/**
 * Gives the slot of a request back when its handler has ended. Not earlier: without its client, a statement still holds its connection. And not later: a
 * client that does not read its answers must not keep the slots of its account.
 */
@Injectable()
export class HandlerWatch implements NestInterceptor {
  intercept(context: ExecutionContext, next: CallHandler): Observable<unknown> {
    const request = context.switchToHttp().getRequest<WithSlot>();
    request.isHandled = true;
    return next.handle().pipe(
      finalize(() => {
        request.isHandled = false;
        request.slot?.release();
      }),
    );
  }
}

/**
 * Takes a slot, and then enters the convoy if there is one. Leaves the convoy when the answer is sent or the connection ends. {@link HandlerWatch}
 * gives the slot back. Throws RATE_LIMITED.
 *
 * If the connection ends, the answer to a pipelined request may emit no `close`, but the socket does.
 */
export const takeSlot = async (
  { slots, convoy }: { readonly slots: Slots; readonly convoy?: Convoy | null },
  request: WithSlot,
  reply: FastifyReply,
  accountId: string,
  lane: Lane,
  leastSlots = 1,
): Promise<void> => {
  const { socket } = request.raw;
  const response = reply.raw;
  const gone = new AbortController();
  let leave: (() => void) | null = null;
  const end = () => {
    response.off('close', end);
    socket.off('close', end);
    // Without a reason, Node would create a DOMException with a stack trace for every request.
    gone.abort('done');
    if (!request.isHandled) request.slot?.release();
    leave?.();
    leave = null;
  };
  response.once('close', end);
  socket.once('close', end);
  if (response.closed || response.destroyed || socket.destroyed) gone.abort('done');
  try {
    const bytes = Buffer.isBuffer(request.body) ? request.body.length : 0;
    request.slot = await slots.take({ accountId, lane, slots: leastSlots + Math.floor(bytes / BYTES_PER_SLOT) }, MAX_WAIT_MS, { gone: gone.signal });
    if (convoy) leave = await convoy.enter();
  } catch (error) {
    end();
    throw error;
  }
  // The client left while the request waited.
  if (gone.signal.aborted) end();
};

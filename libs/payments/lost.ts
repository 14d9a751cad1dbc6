/**
 * Intents that the log has lost, although their gateway calls may have begun. An empty stream alone does not say that nothing was charged. So the
 * references of the attempt are finalised at the gateway before its key or its checkout gets an answer (C64, T7).
 */
import { gatewaysOfAllTime } from '#accounts';
import { type KeptIntent, type Origin, Unavailable } from '#eventstore';
import { Deadline, ServiceError, timestamp } from '#kernel';
import { gatewayAccountsOf, gatewayRef, type PaymentPorts } from './charge.js';
import type { KeptEvent } from './gateway/call.js';
import { type Finalized, type GatewayAccount, LEGS } from './gateway/gateway.js';
import type { KeyAttempt } from './keys/key-store.js';
import { attemptOf, cents, type IntentEvent, type LegTerms, type LostCreate, openOf, type PaymentCommand } from './payment.js';
import { finalizeReference, resolveReversal } from './reverse.js';
import { raiseStaffTask } from './staff.js';
import type { LoadedPayment } from './stream.js';

/** Why the stream of a create was closed before it began. */
export const VANISHED = 'the request vanished before it began';

/** The portal of a create whose intent is not known. */
const NO_PORTAL = '00000000-0000-0000-0000-000000000000';

export interface EmptyCreate extends KeyAttempt {
  readonly accountId: string;
  /** The portal and its merchant accounts, if the intent is not known. Default: every merchant account that ever charged. */
  readonly portal?: { readonly portalId: string; readonly accounts: readonly GatewayAccount[] };
}

/**
 * Ends a create whose stream is empty: `abandoned`, if no call can have begun or the gateway promises that it never charges. Otherwise `lost`: the
 * payment is unknown, and staff get a task. If the gateway has charged, an incident opens. Throws StoreIncident if the log is not whole.
 */
export const finishEmptyCreate = async (
  ports: PaymentPorts,
  loaded: LoadedPayment,
  create: EmptyCreate,
  reason: string,
  origin: Origin,
  deadline: Deadline,
): Promise<'abandoned' | 'lost'> => {
  const { streams, clock, ownLog } = ports;
  const { paymentId, attemptId, accountId, begun } = create;
  const intent = createIntent(create);
  // A missing stream may be a lost one, so the log is checked first.
  await ownLog.verified(null);
  const found = begun === false ? null : await findCharge(ports, create, deadline);
  const at = timestamp(clock.now());
  if (!found) {
    // The stream is fenced, so that the intent cannot arrive later.
    await streams.execute(loaded, [{ type: 'Abandon', at, attemptId, accountId, reason }], origin, deadline);
    return 'abandoned';
  }
  const { references, charged } = found;
  const portalId = intent?.data.portalId ?? create.portal?.portalId ?? NO_PORTAL;
  const restored: PaymentCommand[] = intent ? [{ type: 'RestoreIntent', intent }] : [];
  const lost = { type: 'MarkLost', at, paymentId, attemptId, accountId, portalId, references } as const;
  await streams.execute(loaded, [...restored, lost], origin, deadline);
  await noteLost(ports, paymentId, attemptId, charged, origin);
  return 'lost';
};

/** {@link finishEmptyCreate} for a task of the service, if the stream is empty. null: it is not. `by`: the name of the task. */
export const finishIfEmpty = async (
  ports: PaymentPorts,
  create: EmptyCreate,
  reason: string,
  by: string,
  withinMs: number,
): Promise<'abandoned' | 'lost' | null> => {
  const loaded = await ports.streams.load(create.paymentId);
  if (loaded.revision !== null) return null;
  const origin = { actor: { type: 'recovery' as const, id: by }, correlationId: ports.ids.uuid() };
  return finishEmptyCreate(ports, loaded, create, reason, origin, new Deadline(ports.clock, withinMs));
};

/** A leg whose charge the gateway shows, and that it did not undo. */
export type FoundCharge = Readonly<Record<'leg' | 'transactionId' | 'why', string>>;

/** Raises the task of a lost create. `charged` empty: the gateway cannot tell yet. Otherwise, opens an incident with the first task. */
export const noteLost = async (
  ports: PaymentPorts,
  paymentId: string,
  attemptId: string,
  charged: readonly FoundCharge[],
  origin: Origin,
): Promise<void> => {
  const { store } = ports.streams;
  if (charged.length === 0)
    return void (await raiseStaffTask(ports, store, paymentId, 'outcome_overdue', { attemptId, why: 'lost', until: null }, origin));
  if (await raiseStaffTask(ports, store, paymentId, 'charge_cannot_be_undone', { legs: [...charged] }, origin))
    await ports.ownLog.report(`it does not hold the outcome of payment ${paymentId}, which the gateway has charged`);
};

const createIntent = ({ begun }: KeyAttempt) => (begun && begun.type === 'PaymentInitiated' ? begun : null);

type References = LostCreate['references'];

/** Finalises the references of the attempt's charges. null: none was or will be executed. Ends at the first that may have been executed. */
const findCharge = async (
  ports: PaymentPorts,
  create: EmptyCreate,
  deadline: Deadline,
): Promise<{ readonly references: References; readonly charged: readonly FoundCharge[] } | null> => {
  const intent = createIntent(create);
  const begunAt = intent?.at ?? create.claimedAt;
  const legs = intent?.data.legs ?? legsOf(create.attemptId, create.portal?.accounts ?? (await accountsOfAllTime(ports)));
  for (const [index, { leg, account, references, ...part }] of legs.entries()) {
    const left = legs.slice(index).map(({ leg: one, account: of, references: names }) => ({ leg: one, account: of, references: names }));
    const gateway = ports.gateways.find(account);
    if (!gateway) return { references: left, charged: [] };
    const call = {
      ref: references.charge,
      op: 'charge',
      leg,
      account,
      begunAt,
      amountCents: cents(part),
      chargeTransactionId: null,
      last4: null,
    } as const;
    const found = await finalizeReference(ports, gateway, call, deadline);
    if (isNoCharge(found)) continue;
    // No row says that a call may have begun. The next round asks again.
    if (create.portal && found.kind === 'cannot_tell' && found.why !== 'not_visible') throw new Unavailable('the gateway cannot tell now');
    const transactionId = chargedBy(found);
    return { references: left, charged: transactionId === null ? [] : [{ leg, transactionId, why: 'lost' }] };
  }
  return legs.length > 0 ? null : { references: [], charged: [] };
};

/** The gateway promised it, or its final answer was a refusal. */
const isNoCharge = (found: Finalized<unknown>): boolean =>
  found.kind === 'never' || (found.kind === 'executed' && ['declined', 'rejected', 'not_processed'].includes(found.result.kind));

const chargedBy = (found: Awaited<ReturnType<typeof finalizeReference>>): string | null => {
  if (found.kind !== 'executed') return null;
  const { result } = found;
  return result.kind === 'approved' ? result.txn.transactionId : result.kind === 'held' ? result.transactionId : null;
};

const accountsOfAllTime = async ({ streams }: PaymentPorts): Promise<readonly GatewayAccount[]> =>
  (await gatewaysOfAllTime(streams.store)).flatMap(gatewayAccountsOf);

/** The legs that an attempt may have charged. The intent is lost, and with it the amounts. */
const legsOf = (attemptId: string, accounts: readonly GatewayAccount[]): readonly LegTerms[] =>
  [...new Map(accounts.map((account) => [JSON.stringify(account), account])).values()].flatMap((account) =>
    LEGS.map((leg) => {
      const references = { charge: gatewayRef(attemptId, leg, 'charge'), reversal: gatewayRef(attemptId, leg, 'reversal') };
      return { leg, account, references, principalCents: 0, feeCents: 0 };
    }),
  );

/** Appends the lost intent of a refund or void again, and fences it. It is then resolved as any open attempt: nothing is sent anew (C61). */
export const restoreReversal = (
  { streams, clock }: PaymentPorts,
  loaded: LoadedPayment,
  intent: IntentEvent,
  origin: Origin,
  deadline: Deadline,
): Promise<LoadedPayment> => {
  const fence = { type: 'StartReconciliation', at: timestamp(clock.now()), attemptId: intent.data.attemptId } as const;
  return streams.execute(loaded, [{ type: 'RestoreIntent', intent }, fence], origin, deadline);
};

const RESTORE_MS = 60_000;

/** A payment whose request ended without its events: nothing can be charged, or it is in the log again for staff or recovery to decide. */
export interface Ended {
  readonly paymentId: string;
  readonly ended: 'abandoned' | 'lost';
}

/**
 * Appends kept intents again that the log lacks. Call this only after the log was found whole but for events that no check had found.
 */
export const restoreIntents = async (ports: PaymentPorts, kept: readonly KeptIntent[]): Promise<readonly Ended[]> => {
  const restored: Ended[] = [];
  for (const { paymentId, intent } of kept.map((one) => one.intent as unknown as KeptEvent)) {
    const { attemptId } = intent.data;
    let loaded = await ports.streams.load(paymentId);
    const origin = { actor: { type: 'recovery' as const, id: 'log-resume' }, correlationId: ports.ids.uuid() };
    const deadline = new Deadline(ports.clock, RESTORE_MS);
    if (intent.type !== 'PaymentInitiated') {
      if (attemptOf(loaded.payment, attemptId)) continue;
      // The log may have lost the end of an earlier refund or void, too.
      const open = openOf(loaded.payment);
      if (open) {
        await resolveReversal(ports, paymentId, open.attemptId, origin, deadline);
        loaded = await ports.streams.load(paymentId);
      }
      if (!attemptOf((await restoreReversal(ports, loaded, intent, origin, deadline)).payment, attemptId))
        throw new ServiceError(
          'INVALID_STATE',
          `An earlier refund or void of payment ${paymentId} is open, and its gateway cannot tell. Try again later.`,
        );
      restored.push({ paymentId, ended: 'lost' });
    } else {
      if (loaded.revision !== null) continue;
      const create = { paymentId, attemptId, accountId: intent.data.accountId, claimedAt: intent.at, begun: intent };
      restored.push({ paymentId, ended: await finishEmptyCreate(ports, loaded, create, 'the log lost its intent', origin, deadline) });
    }
  }
  return restored;
};

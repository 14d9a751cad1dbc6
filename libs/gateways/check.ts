/**
 * Checks at the processor itself that it keeps what Payfold relies on: the guarantees g1 to g13 (docs/processors.md#the-check). Many of them stand in no
 * document of a processor. The check makes real charges on the account, so it runs in the sandbox; a quick one only reads.
 *
 * All references of a run come from its id. So a run can be resumed after the batch has closed, and nothing else must be kept.
 */
import type { Guarantee, GuaranteeResult } from '#accounts';
import type { Cents, Clock } from '#kernel';
import { timestamp } from '#kernel';
import {
  type ChargeCall,
  type ChargeTxn,
  type GatewayAccount,
  gatewayRef,
  type Op,
  type Outcome,
  type Payer,
  type PaymentGateway,
  type PaymentInstrument,
  type ReferenceCall,
  type SettlementRecord,
} from '#payments';

const CALL_MS = 45_000;
/** The lists of a processor may be long. */
const LISTS_MS = 10 * 60_000;
/** Charges whose delay until they can be looked up is measured. */
const LOOKED_UP = 20;
/** A charge that cannot be looked up after this time would stay unknown for too long. */
const VISIBLE_WITHIN_MS = 180_000;
const LOOK_EVERY_MS = 250;
const AT_ONCE = 5;
/** So that a part of it can be refunded, and a charge stays above the least amount of every processor. */
export const LEAST_CHECK_CENTS = 101;

export interface CheckTerms {
  /** A new id, or the one of the run that is resumed: a UUID of version 7, which holds its time. */
  readonly runId: string;
  readonly amountCents: Cents;
  readonly instrument: PaymentInstrument;
  readonly last4: string;
  /** A charge that the processor's sandbox declines. */
  readonly declined: { readonly instrument: PaymentInstrument; readonly payer?: Payer };
  /** A token that does not exist. Absent: the processor takes no tokens. */
  readonly unknown?: PaymentInstrument;
}

export interface CheckPorts {
  /** Opens an adapter. A second one knows nothing of the first, as after a restart. */
  readonly open: () => PaymentGateway;
  readonly account: GatewayAccount;
  /** The time zone of the cut-off in our settings. null: no cut-off is known. */
  readonly cutOffZone: string | null;
  readonly clock: Clock;
}

/** A call that was made for a guarantee, and its answer. They hold no card data and no credentials. */
export interface CallMade {
  readonly call: string;
  readonly answer: string;
}

export interface CheckedGuarantee extends Guarantee {
  readonly calls: readonly CallMade[];
}

type Found = readonly [GuaranteeResult, detail: string];
const holds = (detail: string): Found => ['holds', detail];
const broken = (detail: string): Found => ['broken', detail];
const later = (detail: string): Found => ['later', detail];
const notApplicable = (detail: string): Found => ['not_applicable', detail];

/**
 * True: the time of day differs between two IANA time zones, now or in another season. A zone that this host does not know cannot be compared, so it
 * does not differ.
 */
const zonesDiffer = (one: string, other: string, nowMs: number): boolean => {
  const times = (timeZone: string) =>
    Array.from({ length: 12 }, (_, month) =>
      new Intl.DateTimeFormat('en-GB', { timeZone, dateStyle: 'short', timeStyle: 'short' }).format(nowMs + month * 30 * 86_400_000),
    ).join();
  try {
    return times(one) !== times(other);
  } catch {
    return false;
  }
};

const AFTER_THE_BATCH = 'only after the batch has closed: check again with --resume';

/** The time in the id of a run, ms since the epoch. */
const begunOf = (runId: string): number => Number.parseInt(runId.replaceAll('-', '').slice(0, 12), 16);

/** One run of the check. `gateway` and `other` are two adapters of one account. */
class Run {
  readonly gateway: PaymentGateway;
  readonly other: PaymentGateway;
  calls: CallMade[] = [];

  constructor(
    readonly ports: CheckPorts,
    readonly terms: CheckTerms,
  ) {
    this.gateway = ports.open();
    this.other = ports.open();
  }

  close(): void {
    this.gateway.close();
    this.other.close();
  }

  get amountCents(): Cents {
    return this.terms.amountCents;
  }

  private refOf(name: string, op: Op): string {
    return gatewayRef(`${this.terms.runId}/${name}`, 'combined', op);
  }

  private get now(): string {
    return timestamp(this.ports.clock.now());
  }

  /** When the run began. A reference of an earlier part of the run is asked about with this time. */
  private get begunAt(): string {
    return timestamp(begunOf(this.terms.runId));
  }

  private async noted<T>(call: string, made: Promise<T>): Promise<T> {
    try {
      const answer = await made;
      this.calls.push({ call, answer: JSON.stringify(answer) });
      return answer;
    } catch (error) {
      this.calls.push({ call, answer: `failed: ${(error as Error).message}` });
      throw error;
    }
  }

  describe() {
    return this.noted('describe the account', this.gateway.describe(AbortSignal.timeout(CALL_MS)));
  }

  charge(name: string, by = this.gateway, { begunAt = this.now, ...over }: Partial<ChargeCall> = {}): Promise<Outcome<ChargeTxn>> {
    const { amountCents, instrument } = this.terms;
    const call: ChargeCall = {
      ref: this.refOf(name, 'charge'),
      account: this.ports.account,
      leg: 'combined',
      begunAt,
      amountCents,
      instrument,
      ...over,
    };
    return this.noted(`charge ${call.ref} ${amountCents}`, by.charge(call, AbortSignal.timeout(CALL_MS)));
  }

  /** A charge that must be approved. Returns its transaction. */
  async charged(name: string, by?: PaymentGateway): Promise<ChargeTxn> {
    const outcome = await this.charge(name, by);
    if (outcome.kind !== 'approved') throw new Error(`a charge was answered with ${outcome.kind}`);
    return outcome.txn;
  }

  /** A charge of the first part of a run that is resumed. null: it has not settled. */
  async settled(name: string): Promise<string | null> {
    const found = await this.lookup(name, 'charge', this.begunAt);
    if (found.found !== true) throw new Error('a charge of this run cannot be found any more');
    return found.state === 'settled' ? found.transactionId : null;
  }

  private about(name: string, op: Op, begunAt: string, chargeTransactionId: string | null, amountCents: Cents): ReferenceCall {
    const { last4 } = this.terms;
    return { ref: this.refOf(name, op), op, leg: 'combined', account: this.ports.account, begunAt, amountCents, chargeTransactionId, last4 };
  }

  lookup(name: string, op: Op = 'charge', begunAt = this.now) {
    const call = this.about(name, op, begunAt, null, this.amountCents);
    return this.noted(`lookup ${call.ref}`, this.gateway.lookup(call, AbortSignal.timeout(CALL_MS)));
  }

  /** Asks again while the question is being answered. */
  async finalize(name: string, op: Op = 'charge', chargeTransactionId: string | null = null, begunAt = this.now) {
    const { clock } = this.ports;
    const call = this.about(name, op, begunAt, chargeTransactionId, this.amountCents);
    for (const begun = clock.monotonic(); ; await clock.sleep(LOOK_EVERY_MS)) {
      const ended = await this.noted(`finalize ${op} ${call.ref}`, this.gateway.finalize(call, AbortSignal.timeout(CALL_MS)));
      const isAnswered = ended.kind !== 'cannot_tell' || ended.why !== 'in_flight';
      if (isAnswered || clock.monotonic() - begun > VISIBLE_WITHIN_MS) return ended;
    }
  }

  void(name: string, chargeTransactionId: string) {
    const { account } = this.ports;
    const call = { ref: this.refOf(name, 'void'), account, leg: 'combined', begunAt: this.now, chargeTransactionId, amountCents: this.amountCents, askedBy: 'void' } as const; // prettier-ignore
    return this.noted(`void ${call.ref} of ${chargeTransactionId}`, this.gateway.void(call, AbortSignal.timeout(CALL_MS)));
  }

  refund(name: string, chargeTransactionId: string, amountCents: Cents, by = this.gateway, last4 = this.terms.last4) {
    const { account } = this.ports;
    const call = { ref: this.refOf(name, 'refund'), account, leg: 'combined', begunAt: this.now, chargeTransactionId, amountCents, last4 } as const;
    return this.noted(`refund ${call.ref} ${amountCents} of ${chargeTransactionId}`, by.refund(call, AbortSignal.timeout(CALL_MS)));
  }

  /** Milliseconds until a charge that was just approved can be looked up. null: too long. */
  async visibleAfter(name: string): Promise<number | null> {
    const { clock } = this.ports;
    const begun = clock.monotonic();
    while (clock.monotonic() - begun < VISIBLE_WITHIN_MS) {
      if ((await this.lookup(name)).found === true) return Math.round(clock.monotonic() - begun);
      await clock.sleep(LOOK_EVERY_MS);
    }
    return null;
  }

  /** The sales of the amount of this run, in all batches since it began. */
  sales(): Promise<readonly SettlementRecord[]> {
    // Some processors give the time in whole seconds.
    const from = timestamp(begunOf(this.terms.runId) - 1_000);
    const read = async () => {
      const found: SettlementRecord[] = [];
      const signal = AbortSignal.timeout(LISTS_MS);
      for await (const { closedAt, lines } of this.gateway.settlements(null, signal))
        for await (const line of lines) if (closedAt >= from && line.type === 'sale' && line.grossCents === this.amountCents) found.push(line);
      return found;
    };
    return this.noted(`sales of ${this.amountCents} in batches since ${from}`, read());
  }

  /** The reference of a charge, for a line of a batch. */
  chargeRef(name: string): string {
    return this.refOf(name, 'charge');
  }

  /** The time of a charge whose reference is finalised. A processor without an answer at once never gets a charge of an earlier time any more. */
  get lateBegunAt(): string {
    return this.gateway.capabilities.finalize === 'after_batch' ? this.begunAt : this.now;
  }
}

/** Charges of the first part of a run, which the resumed part goes on with after their batch has closed. */
const SETTLING = { whole: 'settling-whole', part: 'settling-part' } as const;

const refundOnce = async (run: Run, name: string, charge: string, cents: Cents): Promise<Found> => {
  const [first, again, elsewhere] = [
    await run.refund(name, charge, cents),
    await run.refund(name, charge, cents),
    await run.refund(name, charge, cents, run.other),
  ];
  if (first.kind !== 'approved') return broken(`a refund was answered with ${first.kind}`);
  const ids = [again, elsewhere].map((one) => (one.kind === 'approved' ? one.txn.transactionId : one.kind));
  const isOnce = ids.every((id) => id === first.txn.transactionId);
  return isOnce ? holds('a refund that was sent three times was made once') : broken(`a repeated refund was answered with ${ids.join(' and ')}`);
};

const partAndTooMuch = async (run: Run, charge: string, first: Cents): Promise<Found> => {
  if (first > 0) {
    const part = await run.refund('part', charge, first);
    if (part.kind !== 'approved') return broken(`a refund of a part was answered with ${part.kind}`);
  }
  const over = await run.refund('over', charge, run.amountCents);
  return over.kind === 'rejected'
    ? holds(`a part was refunded, and more than remains is refused: ${over.why}`)
    : broken(`a refund of more than remains was answered with ${over.kind}`);
};

type Judge = (run: Run) => Promise<Found>;

const lateCharge = async (run: Run): Promise<Found> => {
  const late = await run.charge('never', run.other, { begunAt: run.lateBegunAt });
  if (late.kind !== 'approved') return holds(`a reference that was never sent is closed; a charge under it is answered with ${late.kind}`);
  await run.void('late', late.txn.transactionId);
  return broken('a charge under a closed reference was approved');
};

/** The guarantees in their order. `again`: for a run that is resumed, if its first part said `later`. */
const GUARANTEES: readonly { readonly name: string; readonly first: Judge; readonly again?: Judge }[] = [
  {
    name: 'g1',
    first: async (run) => {
      const { cutOffZone, clock } = run.ports;
      const { externalId, name, timeZone, problems, testMode } = await run.describe();
      const isOtherZone = cutOffZone !== null && timeZone !== undefined && zonesDiffer(timeZone, cutOffZone, clock.now());
      const faults = [
        ...problems,
        ...(testMode ? ['The account is in test mode.'] : []),
        ...(isOtherZone ? [`The time zone of the account is ${timeZone} at the processor, and --time-zone of its cut-off is ${cutOffZone}.`] : []),
      ];
      return faults.length > 0 ? broken(faults.join(' ')) : holds(`account ${externalId}, ${name}${timeZone ? `, time zone ${timeZone}` : ''}`);
    },
  },
  {
    name: 'g2',
    first: async (run) => {
      const first = await run.charged('repeated');
      const again = await run.charge('repeated');
      const isSame = again.kind === 'approved' && again.txn.transactionId === first.transactionId;
      return isSame ? holds('a charge that was sent twice was made once') : broken(`a repeated charge was answered with ${again.kind}`);
    },
  },
  {
    name: 'g3',
    first: async (run) => {
      const outcomes = await Promise.all(
        Array.from({ length: AT_ONCE }, (_, index) => run.charge('race', index % 2 === 0 ? run.gateway : run.other)),
      );
      const ids = new Set(outcomes.flatMap((one) => (one.kind === 'approved' ? [one.txn.transactionId] : [])));
      const kinds = outcomes.map(({ kind }) => kind).join(', ');
      if (ids.size > 1) return broken(`${AT_ONCE} charges at once under one reference made ${ids.size} transactions`);
      return outcomes.some(({ kind }) => kind === 'declined') ? broken(`one was declined: ${kinds}`) : holds(`one transaction at most: ${kinds}`);
    },
  },
  {
    name: 'g4',
    first: async (run) => {
      const { transactionId } = await run.charged('elsewhere');
      const found = await run.charge('elsewhere', run.other);
      if (found.kind !== 'approved') return broken(`another process was answered with ${found.kind}`);
      return found.txn.transactionId === transactionId
        ? holds('another process finds the charge instead of a decline')
        : broken('another process was answered with another transaction');
    },
  },
  {
    name: 'g5',
    first: async (run) => {
      const delays: number[] = [];
      for (let index = 0; index < LOOKED_UP; index += 1) {
        await run.charged(`look-${index}`);
        const ms = await run.visibleAfter(`look-${index}`);
        if (ms === null) return broken(`a charge could not be looked up after ${VISIBLE_WITHIN_MS / 1_000} s`);
        delays.push(ms);
      }
      delays.sort((a, b) => a - b);
      return holds(`a charge can be looked up after ${delays[LOOKED_UP / 2]} ms (median), ${delays.at(-1)} ms (longest of ${LOOKED_UP})`);
    },
  },
  {
    name: 'g6',
    first: async (run) => {
      const { transactionId } = await run.charged('executed');
      await run.visibleAfter('executed');
      const ended = await run.finalize('executed');
      const isFound = ended.kind === 'executed' && ended.result.kind === 'approved' && ended.result.txn.transactionId === transactionId;
      return isFound ? holds('a charge that was made is found') : broken(`a charge that was made was finalised as ${ended.kind}`);
    },
  },
  {
    name: 'g7',
    first: async (run) => {
      const ended = await run.finalize('never');
      if (ended.kind === 'never') return lateCharge(run);
      if (ended.kind === 'cannot_tell' && ended.why === 'not_visible') return later(`the processor can tell from ${ended.until ?? 'a later time'}`);
      return broken(`a reference that was never sent was finalised as ${ended.kind}`);
    },
    again: async (run) => {
      const ended = await run.finalize('never', 'charge', null, run.lateBegunAt);
      if (ended.kind === 'never') return lateCharge(run);
      if (ended.kind === 'cannot_tell') return later(`the processor can tell from ${ended.until ?? 'a later time'}`);
      return broken(`a reference that was never sent was finalised as ${ended.kind}`);
    },
  },
  {
    name: 'g8',
    first: async (run) => {
      const { capabilities } = run.gateway;
      if (!capabilities.refundUnsettled) return later(AFTER_THE_BATCH);
      const { transactionId } = await run.charged('refunded');
      const found = await refundOnce(run, 'once', transactionId, 1);
      if (found[0] !== 'holds') return found;
      const ended = await run.finalize('closed', 'refund', transactionId);
      if (ended.kind !== 'never') return broken(`a refund that was never sent was finalised as ${ended.kind}`);
      const late = await run.refund('closed', transactionId, 1);
      return late.kind === 'approved' ? broken('a refund under a closed reference was made') : found;
    },
    again: async (run) => {
      const charge = await run.settled(SETTLING.part);
      return charge === null ? later(AFTER_THE_BATCH) : refundOnce(run, 'once', charge, 1);
    },
  },
  {
    name: 'g9',
    first: async (run) => {
      if (run.gateway.capabilities.voids === 'none') return notApplicable('the processor undoes a charge by a refund');
      const { transactionId } = await run.charged('voided');
      const [first, again] = [await run.void('once', transactionId), await run.void('once', transactionId)];
      if (first.kind !== 'approved' || again.kind !== 'approved')
        return broken(`a void was answered with ${first.kind}, and again with ${again.kind}`);
      await run.visibleAfter('voided');
      const ended = await run.finalize('voided');
      return ended.kind === 'undone'
        ? holds('a charge is voided before its batch; the same void again changes nothing; its reference still shows it')
        : broken(`a charge that was voided was finalised as ${ended.kind}`);
    },
  },
  {
    name: 'g10',
    first: async (run) => {
      if (run.gateway.capabilities.voids === 'none') return notApplicable('the processor undoes a charge by a refund');
      await run.charged(SETTLING.whole);
      await run.charged(SETTLING.part);
      return later(AFTER_THE_BATCH);
    },
    again: async (run) => {
      const charge = await run.settled(SETTLING.whole);
      if (charge === null) return later(AFTER_THE_BATCH);
      const voided = await run.void('too-late', charge);
      if (voided.kind !== 'rejected' || voided.why !== 'already_settled')
        return broken(`a void after the batch was answered with ${voided.kind === 'rejected' ? voided.why : voided.kind}`);
      const refunded = await run.refund('whole', charge, run.amountCents);
      return refunded.kind === 'approved'
        ? holds('after the batch a void is refused, and a refund is made')
        : broken(`a refund after the batch was answered with ${refunded.kind}`);
    },
  },
  {
    name: 'g11',
    first: async (run) => {
      if (!run.gateway.capabilities.refundUnsettled) return later(AFTER_THE_BATCH);
      const { transactionId } = await run.charged('parted');
      return partAndTooMuch(run, transactionId, run.amountCents - 1);
    },
    again: async (run) => {
      const charge = await run.settled(SETTLING.part);
      if (charge === null) return later(AFTER_THE_BATCH);
      // g8 has refunded a part of this charge.
      const [result, detail] = await partAndTooMuch(run, charge, 0);
      // Payfold always names the digits of the charge's own card. So it does not rely on this answer, and the detail only reports it.
      const other = await run.refund('other-card', charge, 1, run.gateway, run.terms.last4 === '0000' ? '0001' : '0000');
      return [result, `${detail}; a refund to other last four digits is ${other.kind}${'raw' in other && other.raw ? ` (${other.raw})` : ''}`];
    },
  },
  {
    name: 'g12',
    first: async (run) => {
      const { card } = await run.charged('card');
      const { capabilities } = run.gateway;
      if (!capabilities.rawCard && (!card || card.brand === 'unknown' || !/^\d{4}$/.test(card.last4)))
        return broken('the card behind a token is not named');
      const declined = await run.charge('declined', run.gateway, run.terms.declined);
      if (declined.kind !== 'declined') return broken(`a charge that is always declined was answered with ${declined.kind}`);
      await run.visibleAfter('declined');
      const ended = await run.finalize('declined');
      if (ended.kind !== 'executed' || ended.result.kind !== 'declined')
        return broken(`a declined charge was finalised as ${ended.kind === 'executed' ? ended.result.kind : ended.kind}`);
      if (run.terms.unknown) {
        const unknown = await run.charge('unknown', run.gateway, { instrument: run.terms.unknown });
        const isRefused = unknown.kind === 'not_processed' || (unknown.kind === 'declined' && unknown.decline.code === 'invalid_token');
        if (!isRefused) return broken(`a charge with a token that does not exist was answered with ${unknown.kind}`);
      }
      return holds(`declined as ${declined.decline.code}${card ? `; the card is ${card.brand} ${card.last4}` : ''}`);
    },
  },
  {
    name: 'g13',
    first: async ({ gateway }) => (gateway.capabilities.settlement === 'none' ? notApplicable('it lists no batches') : later(AFTER_THE_BATCH)),
    again: async (run) => {
      const sales = await run.sales();
      if (sales.some(({ ref }) => ref === run.chargeRef('repeated'))) return holds('the lines of the batch carry our references');
      return sales.length > 0 ? broken('the batch lists sales of this amount, and none of them carries our reference') : later(AFTER_THE_BATCH);
    },
  },
];

/** Guarantees of a check that only reads. */
const QUICK = ['g1'];

/**
 * Checks all guarantees, one after the other. `before`: what the first part of the run found; only what it left for later is checked then. `quick`:
 * only what needs no charge. An answer that breaks off the check of a guarantee counts as broken, with the calls that were made.
 */
export const checkGuarantees = async (
  ports: CheckPorts,
  terms: CheckTerms,
  { quick = false, before = null }: { readonly quick?: boolean; readonly before?: readonly Guarantee[] | null },
  onChecked: (checked: CheckedGuarantee) => unknown = () => undefined,
): Promise<readonly CheckedGuarantee[]> => {
  const run = new Run(ports, terms);
  const all: CheckedGuarantee[] = [];
  try {
    for (const { name, first, again } of GUARANTEES) {
      if (quick && !QUICK.includes(name)) continue;
      const known = before?.find(({ guarantee }) => guarantee === name);
      run.calls = [];
      const judge = known === undefined ? first : known.result === 'later' ? again : undefined;
      const [result, detail] = judge
        ? await judge(run).catch((error: unknown): Found => broken((error as Error).message))
        : [known!.result, known!.detail];
      const checked = { guarantee: name, result, detail, calls: run.calls };
      all.push(checked);
      await onChecked(checked);
    }
    return all;
  } finally {
    run.close();
  }
};

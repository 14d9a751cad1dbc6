/**
 * Shares slots among accounts, so that no account can take the time of the others. A slot is the right to use something scarce, such as a connection
 * to a gateway.
 *
 * The limit of an account is a multiple of the slots that are free ({@link SPREAD}). So one account alone gets four fifths of all slots, and the rest
 * stays free for an account that comes later. The more accounts hold slots, the less each may hold.
 *
 * Requests that must wait are served round robin by account. Urgent requests go first.
 */

/** `begun`: continues an attempt that has begun. `reversal`: a refund or void. `partner`: another call of the API. `payer`: from a page of a payer. */
export const LANES = ['begun', 'reversal', 'partner', 'payer'] as const;
export type Lane = (typeof LANES)[number];

/**
 * An account may hold this many times the slots that are free then. The payers' pages of an account stop earlier, so that they leave slots for its
 * API.
 */
const SPREAD: Readonly<Record<Lane, number>> = { begun: 4, reversal: 4, partner: 4, payer: 2 };

export interface SlotRequest {
  readonly accountId: string;
  readonly lane: Lane;
  /** The number of slots that the request takes, from 1. */
  readonly slots: number;
}

export interface FairShareLimits {
  readonly slots: number;
  /** The slots while one account is alone ({@link FairShare.isAlone}), for its requests that take one slot. Default: `slots`. */
  readonly slotsAlone?: number;
  /** How many requests of a lane may wait while no other account has work. */
  readonly waitingAlone: number;
  /** If several accounts have work, they share this number. So each may have an equal part of it waiting in a lane. */
  readonly waitingShared: number;
}

interface Account<Request> {
  readonly waiting: Readonly<Record<Lane, Set<Request>>>;
  readonly admitted: Set<Request>;
  /** The slots of all its requests, and those of its payers' pages. */
  held: number;
  heldByPayers: number;
  /** The lane that was served last, of the lanes `partner` and `payer`. They take turns. */
  last: Lane;
}

/** A request is recognised by its object, so each request must be an object of its own. */
export class FairShare<Request extends SlotRequest> {
  /** True if only one account has sent requests lately. */
  isAlone = false;
  /** Free slots. Counts those of `slotsAlone`. */
  private free: number;
  /** The additional slots of `slotsAlone`. The first request of an account may use them, too. */
  private readonly reserve: number;
  private inAll = 0;
  /** Accounts that hold slots or wait for them. */
  private readonly accounts = new Map<string, Account<Request>>();
  /** Accounts that wait. The first one was served the longest time ago. */
  private readonly ring = new Set<Account<Request>>();

  constructor(private readonly limits: FairShareLimits) {
    this.free = limits.slotsAlone ?? limits.slots;
    this.reserve = this.free - limits.slots;
  }

  /** Admits the request, lets it wait, or refuses it. A request of the lane `begun` is never refused. */
  enter(request: Request): 'admitted' | 'waiting' | 'refused' {
    const account = this.accounts.get(request.accountId) ?? emptyAccount();
    this.accounts.set(request.accountId, account);
    if (!isBehindOthers(account, request.lane) && this.fits(account, request)) {
      this.admit(account, request);
      return 'admitted';
    }
    if (request.lane !== 'begun' && !this.mayWait(account, request.lane)) {
      this.forgetIdle(request.accountId, account);
      return 'refused';
    }
    account.waiting[request.lane].add(request);
    this.inAll += 1;
    this.ring.add(account);
    return 'waiting';
  }

  /** Ends a request that was admitted or waits. Returns the requests that are admitted now. Does nothing if the request has ended before. */
  leave(request: Request): Request[] {
    const account = this.accounts.get(request.accountId);
    if (account?.admitted.delete(request)) {
      this.move(account, request, -request.slots);
    } else if (account?.waiting[request.lane].delete(request)) {
      this.inAll -= 1;
      if (!isWaiting(account)) this.ring.delete(account);
    } else return [];
    this.forgetIdle(request.accountId, account);
    const admitted: Request[] = [];
    for (let next = this.next(); next; next = this.next()) {
      this.admit(next.account, next.request);
      admitted.push(next.request);
    }
    return admitted;
  }

  /** True if no request holds a slot or waits for one. */
  get isIdle(): boolean {
    return this.accounts.size === 0;
  }

  /** How many requests of a lane wait. */
  waiting(lane: Lane): number {
    let count = 0;
    for (const { waiting } of this.ring) count += waiting[lane].size;
    return count;
  }

  /**
   * The first request of an account needs one free slot, and may overdraw. So may the first one of its API, whatever its payers hold. Any other one must
   * keep the account within its limit.
   */
  private fits({ held, heldByPayers }: Account<Request>, { lane, slots }: SlotRequest): boolean {
    const isFirst = lane === 'payer' ? held === 0 : held === heldByPayers;
    const mayUseReserve = this.isAlone && this.accounts.size === 1 && slots === 1;
    const free = mayUseReserve ? this.free : this.free - this.reserve;
    return isFirst ? this.free > 0 : held + slots <= SPREAD[lane] * (free - slots);
  }

  private mayWait(account: Account<Request>, lane: Lane): boolean {
    const { waitingAlone, waitingShared } = this.limits;
    // The first request of an account may always wait, whatever others have waiting.
    if (!isWaiting(account)) return true;
    const share = this.accounts.size === 1 ? waitingAlone : Math.max(1, Math.floor(waitingShared / this.accounts.size));
    return account.waiting[lane].size < share && this.inAll < waitingAlone + waitingShared;
  }

  private next(): { readonly account: Account<Request>; readonly request: Request } | null {
    for (const headOf of [urgentOf, ordinaryOf])
      for (const account of this.ring) for (const request of headOf(account)) if (this.fits(account, request)) return { account, request };
    return null;
  }

  private admit(account: Account<Request>, request: Request): void {
    account.admitted.add(request);
    this.move(account, request, request.slots);
    if (!account.waiting[request.lane].delete(request)) return;
    this.inAll -= 1;
    account.last = request.lane;
    this.ring.delete(account);
    if (isWaiting(account)) this.ring.add(account);
  }

  private move(account: Account<Request>, { lane }: Request, slots: number): void {
    account.held += slots;
    if (lane === 'payer') account.heldByPayers += slots;
    this.free -= slots;
  }

  private forgetIdle(accountId: string, account: Account<Request>): void {
    if (account.admitted.size === 0 && !isWaiting(account)) this.accounts.delete(accountId);
  }
}

const emptyAccount = <Request>(): Account<Request> => ({
  waiting: { begun: new Set(), reversal: new Set(), partner: new Set(), payer: new Set() },
  admitted: new Set(),
  held: 0,
  heldByPayers: 0,
  last: 'payer',
});

const isWaiting = <Request>({ waiting }: Account<Request>): boolean => LANES.some((lane) => waiting[lane].size > 0);

/** True if a request of this account waits that must be served before a new one of `lane`. */
const isBehindOthers = <Request>({ waiting }: Account<Request>, lane: Lane): boolean =>
  waiting[lane].size > 0 ||
  waiting.begun.size > 0 ||
  (lane !== 'begun' && waiting.reversal.size > 0) ||
  (lane === 'payer' && waiting.partner.size > 0);

/** The first request of an account in the lanes `begun` and `reversal`. */
const urgentOf = <Request>({ waiting }: Account<Request>): Request[] => [...first(waiting.begun), ...first(waiting.reversal)].slice(0, 1);

/** The first requests of an account in the other lanes, in the order in which they may be served. None if an urgent request waits. */
const ordinaryOf = <Request>({ waiting, last }: Account<Request>): Request[] => {
  if (waiting.begun.size > 0 || waiting.reversal.size > 0) return [];
  const [partner, payer] = [first(waiting.partner), first(waiting.payer)];
  // On the partner's turn, payers wait until its request fits. Otherwise their small requests would pass a large one for ever.
  return last === 'partner' || partner.length === 0 ? [...payer, ...partner] : partner;
};

const first = <Request>(requests: ReadonlySet<Request>): Request[] => {
  for (const request of requests) return [request];
  return [];
};

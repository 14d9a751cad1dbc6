/**
 * Canaries: bugs that are planted one at a time, by patches at run time. The simulation must find each of them, unless another guard makes the bug
 * harmless. The field `redundant` then names this guard, and the spec that tests it alone.
 */
import {
  foundWhole,
  Conflict,
  type EventStore,
  type Known,
  type LogGate,
  type MarkBook,
  type NewEvent,
  type Recorded,
  Unavailable,
} from '#eventstore';
import { type IdempotencyStore, type PaymentCommand, type PaymentGateway, PaymentStreams } from '#payments';
import { hashedUuid } from '#platform';
import type { Claimed, Deliveries, Fate, Posted } from '#webhooks';
import { type Bank, batchOf, type Result } from './bank.js';
import { clearText, type Seams, type World } from './service.js';
import type { LosingStore } from './work.js';

export interface Canary {
  readonly name: string;
  readonly seams: Seams;
  /** Only a fault of the log, or of the keys' database, can reveal this bug. */
  readonly lost?: LosingStore;
  /** The guard that makes this bug harmless, and the spec of this guard. */
  readonly redundant?: string;
}

const appends =
  (append: (inner: EventStore, ...args: Parameters<EventStore['append']>) => ReturnType<EventStore['append']>) =>
  (inner: EventStore): EventStore => ({ ...inner, append: (...args) => append(inner, ...args) });

/** Longer than the append of an event takes. */
const CONTENT_LATE_MS = 500;

const isOnly = (events: readonly NewEvent[], type: string) => events.every((event) => event.type === type);
const has = (events: readonly NewEvent[], ...types: readonly string[]) => events.some(({ type }) => types.includes(type));
const OUTCOMES = ['PaymentCreated', 'PaymentDeclined', 'PaymentFailed'] as const;

/** A made-up result, for an append that does not take place. */
const pretended = (expected: Parameters<EventStore['append']>[1], events: readonly NewEvent[]) => ({
  revision: (typeof expected === 'bigint' ? expected : -1n) + BigInt(events.length),
  position: '' as never,
});

const lastRevision = async (store: EventStore, stream: string): Promise<bigint | 'no_stream'> => {
  let last: bigint | 'no_stream' = 'no_stream';
  for await (const { revision } of store.read(stream)) last = revision;
  return last;
};

const claims =
  (change: (inner: IdempotencyStore, claim: Awaited<ReturnType<IdempotencyStore['claim']>>) => Awaited<ReturnType<IdempotencyStore['claim']>>) =>
  (inner: IdempotencyStore): IdempotencyStore => ({ ...inner, claim: async (request) => change(inner, await inner.claim(request)) });

const gateways =
  (change: (inner: PaymentGateway) => Partial<PaymentGateway>) =>
  (inner: PaymentGateway): PaymentGateway => ({ ...inner, ...change(inner) });

/** A patch that changes `load` or `execute` of the payment streams. */
const streams =
  (change: (inner: PaymentStreams) => Partial<Pick<PaymentStreams, 'load' | 'execute'>>) =>
  (inner: PaymentStreams): PaymentStreams =>
    Object.assign(Object.create(PaymentStreams.prototype) as PaymentStreams, inner, {
      load: inner.load.bind(inner),
      execute: inner.execute.bind(inner),
      events: inner.events.bind(inner),
      ...change(inner),
    });

/** What a canary remembers of a world. */
const ofWorld = <T>(all: WeakMap<World, T>, world: World, made: () => T): T => {
  const known = all.get(world) ?? made();
  all.set(world, known);
  return known;
};
const runningRefunds = new WeakMap<World, Set<string>>();
const storedErrors = new WeakMap<World, Set<string>>();
const scans = new WeakMap<World, Set<string>>();
/** The last refund of a world, for canaries. */
const lastRefund = new WeakMap<World, Parameters<PaymentGateway['refund']>[0]>();

const isFence = (commands: readonly PaymentCommand[]) => commands.length === 1 && commands[0]!.type === 'StartReconciliation';

const fates =
  (change: (fate: Fate) => Fate) =>
  (inner: Deliveries): Deliveries => ({ ...inner, complete: (ended) => inner.complete(ended.map((one) => ({ ...one, fate: change(one.fate) }))) });

const books =
  (change: (known: Known) => Known) =>
  (inner: MarkBook): MarkBook => ({ ...inner, read: async () => change(await inner.read()) });

const gated = (inner: LogGate, verified: LogGate['verified']): LogGate => ({
  get incident() {
    return inner.incident;
  },
  verified,
  verifiedRead: (last) => inner.verifiedRead(last),
  report: (message) => inner.report(message),
  refuse: () => inner.refuse(),
});

const claimed =
  (change: (one: Claimed, world: World) => Claimed) =>
  (inner: Deliveries, world: World): Deliveries => ({
    ...inner,
    claimDue: async (slots) => (await inner.claimDue(slots)).map((one) => change(one, world)),
  });

/** A patch that changes the refunds and voids of each loaded payment. */
const attemptsRead = (change: (attempt: Record<string, unknown>) => Record<string, unknown>) =>
  streams((inner) => ({
    load: async (paymentId) => {
      const loaded = await inner.load(paymentId);
      if (loaded.payment.phase !== 'charged') return loaded;
      const attempts = loaded.payment.attempts.map((attempt) => change(attempt as never) as never);
      return { ...loaded, payment: { ...loaded.payment, attempts } };
    },
  }));

export const CANARIES: readonly Canary[] = [
  // ---- the log
  {
    name: 'no intent: money moves before anything is on disk',
    seams: {
      log: (inner) => {
        const held = new Map<string, NewEvent[]>();
        return {
          ...inner,
          append: async (stream, expected, events, options) => {
            if (isOnly(events, 'PaymentInitiated')) {
              held.set(stream, [...events]);
              return pretended(expected, events);
            }
            const before = held.get(stream);
            held.delete(stream);
            return before ? inner.append(stream, 'no_stream', [...before, ...events], options) : inner.append(stream, expected, events, options);
          },
        };
      },
    },
  },
  {
    name: 'a 200 without a durable outcome',
    seams: {
      log: appends(async (inner, stream, expected, events, options) => {
        try {
          return await inner.append(stream, expected, events, options);
        } catch (error) {
          if (has(events, ...OUTCOMES)) return pretended(expected, events);
          throw error;
        }
      }),
    },
  },
  {
    name: 'an outcome is appended at any revision',
    seams: {
      log: appends(async (inner, stream, expected, events, options) => {
        try {
          return await inner.append(stream, expected, events, options);
        } catch (error) {
          if (!(error instanceof Conflict) || !has(events, ...OUTCOMES, 'PaymentVoided', 'PaymentRefunded')) throw error;
          return inner.append(stream, await lastRevision(inner, stream), events, options);
        }
      }),
    },
  },
  {
    name: 'the log does not compare revisions',
    seams: { log: appends((inner, stream, _expected, events, options) => inner.append(stream, 'any', events, options)) },
  },
  {
    name: 'event ids are the payment’s, not the owner’s',
    seams: {
      log: appends((inner, stream, expected, events, options) =>
        inner.append(
          stream,
          expected,
          events.map((event, index) => ({ ...event, id: hashedUuid(stream, event.type, String(expected), index) })),
          options,
        ),
      ),
    },
  },
  {
    name: 'a takeover of an empty stream fences nothing',
    seams: {
      log: appends(async (inner, stream, expected, events, options) =>
        isOnly(events, 'PaymentAbandoned') ? pretended(expected, events) : inner.append(stream, expected, events, options),
      ),
    },
  },
  {
    name: 'an append that the log lost is taken for done',
    seams: {
      log: appends(async (inner, stream, expected, events, options) => {
        try {
          return await inner.append(stream, expected, events, options);
        } catch (error) {
          if (error instanceof Unavailable && has(events, 'PaymentVoided', 'PaymentRefunded', 'FeeRefunded')) return pretended(expected, events);
          throw error;
        }
      }),
    },
  },
  {
    name: 'GET reads a replica that is behind',
    seams: {
      log: (inner) => ({
        ...inner,
        read: async function* (stream, from, max) {
          const events: Recorded[] = [];
          for await (const event of inner.read(stream, from, max)) events.push(event);
          yield* events.slice(0, Math.max(1, events.length - 1));
        },
      }),
    },
  },
  // ---- a log that loses events, or is exchanged
  { name: 'marks are not checked', lost: 'log', seams: { log: (inner) => ({ ...inner, missing: async () => [] }) } },
  {
    name: 'the mark is the append that it should check',
    lost: 'log',
    seams: { gate: (inner) => gated(inner, (intent, kept) => (intent === null ? inner.verified(null, kept) : Promise.resolve(inner.refuse()))) },
  },
  {
    name: 'the marks of others are not read',
    lost: 'log',
    seams: { book: books((known) => ({ ...known, marks: [] })) },
  },
  {
    name: 'a checkpoint beyond the end has no lag',
    lost: 'log',
    seams: { book: books((known) => ({ ...known, checkpoints: [] })) },
  },
  {
    name: 'recovery runs in an incident',
    lost: 'log',
    seams: {
      recovery: (ports, bare) => ({
        ...ports,
        ownLog: foundWhole,
        streams: new PaymentStreams(bare, ports.clock, ports.ids),
      }),
    },
  },
  // ---- fences
  {
    name: 'recovery fences when it is done, not when it begins',
    seams: {
      streams: streams((inner) => {
        const held = new Map<string, readonly PaymentCommand[]>();
        return {
          execute: async (loaded, commands, owner, deadline, budget) => {
            if (isFence(commands) && owner.actor.type === 'recovery' && loaded.payment.phase !== 'charged') {
              held.set(loaded.paymentId, commands);
              return { ...loaded, payment: { ...loaded.payment, phase: 'unknown', fenced: true } as never };
            }
            const before = held.get(loaded.paymentId);
            if (!before || owner.actor.type !== 'recovery') return inner.execute(loaded, commands, owner, deadline, budget);
            held.delete(loaded.paymentId);
            // Recovery appends its result, even if other requests have changed the stream since it began.
            const present = await inner.load(loaded.paymentId);
            return inner.execute(present, [...before, ...commands], owner, deadline, budget);
          },
        };
      }),
    },
  },
  {
    name: 'a takeover of an open intent fences nothing',
    seams: {
      streams: streams((inner) => ({
        execute: (loaded, commands, owner, deadline, budget) =>
          isFence(commands) && owner.actor.id !== 'recovery' && loaded.payment.phase === 'pending'
            ? Promise.resolve(loaded)
            : inner.execute(loaded, commands, owner, deadline, budget),
      })),
    },
    redundant: 'recovery fences before it finalises; libs/payments/charge.int.spec.ts, "S2, S4"',
  },
  // ---- keys
  { name: 'a takeover executes again', seams: { keys: claims((_, claim) => (claim.kind === 'owned' ? { ...claim, tookOver: false } : claim)) } },
  {
    name: 'a takeover executes again, as a new payment',
    seams: {
      keys: (inner, world) =>
        claims((_, claim) =>
          claim.kind === 'owned' && claim.tookOver
            ? { ...claim, tookOver: false, paymentId: world.sim.ids().uuid(), attemptId: world.sim.ids().uuid() }
            : claim,
        )(inner),
    },
  },
  {
    name: 'after a 5xx on create the key is given back',
    seams: {
      keys: (inner) => ({
        ...inner,
        finish: (name, fence, ending) => inner.finish(name, fence, ending.to === 'reserved' ? { to: 'given_back' } : ending),
      }),
    },
  },
  {
    name: 'a key is looked up first and claimed later',
    seams: {
      world: (world) => {
        const { keys } = world;
        const claim = keys.claim.bind(keys);
        // The look-up and the claim are 20 ms apart. Each request that finds no row in this time claims the key.
        const seen = new Map<string, number>();
        keys.claim = (row) => {
          const name = `${row.accountId}/${row.keyHash.toString('hex')}`;
          const before = keys.find(row);
          if (before?.state === 'in_progress' && world.sim.now - (seen.get(name) ?? 0) < 20) keys.rows.delete(name);
          if (!before) seen.set(name, world.sim.now);
          return claim(row);
        };
      },
    },
  },
  {
    name: 'what is stored for a key is not what was sent',
    seams: {
      keys: (inner, world) => ({
        ...inner,
        finish: (name, fence, ending) =>
          inner.finish(
            name,
            fence,
            ending.to === 'completed'
              ? { to: 'completed', answer: { ...ending.answer, body: ending.answer.body.replace(/.$/, `,"at":${world.sim.now}}`) } }
              : ending,
          ),
      }),
    },
  },
  {
    name: 'a key is finished by a request that does not own it any more',
    seams: {
      world: ({ keys }) => {
        keys.owned = (name) => keys.find(name);
      },
    },
    redundant: 'what a former owner may still settle is what the stream says as well; test/support/key-store.contract.ts, "T9, T10"',
  },
  {
    name: 'a reserved key is taken over after 24 hours',
    seams: {
      world: ({ keys }) => {
        keys.beginsAnew = (row) => row.expiresAt <= keys.now() && row.state !== 'in_progress';
      },
    },
  },
  {
    name: 'reserved keys are purged by time alone',
    seams: { keys: (inner) => ({ ...inner, purge: (limit) => inner.purge(limit, async () => true) }) },
  },
  {
    name: 'a fence begins at 1 again after a key was given back',
    seams: {
      world: ({ keys }) => {
        const giveBack = keys.giveBack.bind(keys);
        keys.giveBack = (name, fence) => {
          const gone = giveBack(name, fence);
          if (gone) keys.fences = 0;
          return gone;
        };
      },
    },
    redundant: 'only a settlement that runs late could meet the same fence again; test/support/key-store.contract.ts, "T9: given back"',
  },
  {
    name: 'two accounts share their keys',
    seams: {
      keys: (inner) => ({
        ...inner,
        name: (_accountId, key) => inner.name('shared', key),
        claim: (request) => inner.claim({ ...request, accountId: 'shared' }),
      }),
    },
  },
  {
    name: 'the body is not compared',
    seams: { keys: (inner) => ({ ...inner, claim: (request) => inner.claim({ ...request, fingerprintText: 'the same' }) }) },
  },
  {
    name: 'a retry keeps the attempt that was given up',
    seams: { keys: (inner) => ({ ...inner, renewAttempt: async () => true }) },
  },
  {
    name: 'attempts are the payment’s, not the key’s',
    seams: {
      keys: (inner) => ({
        ...inner,
        claim: async (request) => {
          const claim = await inner.claim(request);
          if (claim.kind !== 'owned' || request.operation === 'create') return claim;
          return { ...claim, attemptId: hashedUuid('attempt', request.operation) };
        },
      }),
    },
  },
  // ---- a database of the keys that goes back
  {
    name: 'keys are claimed before they were made from the log',
    lost: 'keys',
    seams: { claims: () => ({ isOpen: true, mayBeLost: true, begun: async () => undefined }) },
  },
  {
    name: 'claims open after a heartbeat instead of a place',
    lost: 'keys',
    seams: { claimsDatabase: (inner) => ({ ...inner, position: async () => '~' }) },
  },
  {
    name: 'claims stay open over a restart of the database of the keys',
    lost: 'keys',
    seams: {
      place: (inner) => async () => {
        const place = await inner();
        return typeof place === 'string' ? place : { ...place, startedAt: '' };
      },
    },
  },
  {
    name: 'a late intent calls the gateway although its key was claimed anew',
    lost: 'keys',
    seams: { keys: (inner) => ({ ...inner, holds: async () => true }) },
  },
  // ---- repeats without a key
  { name: 'a result is told to every repeat without a key', seams: { streams: attemptsRead((attempt) => ({ ...attempt, acknowledged: false })) } },
  { name: 'staff is told the partner’s result', seams: { streams: attemptsRead((attempt) => ({ ...attempt, initiatedBy: 'staff' })) } },
  { name: 'a repeat is told a result that its owner knew', seams: { streams: attemptsRead((attempt) => ({ ...attempt, fenced: true })) } },
  // ---- the gateway
  {
    name: 'a retry draws new references',
    seams: {
      gateway: (inner, world) => ({
        ...inner,
        void: (call, signal) => inner.void({ ...call, ref: fresh(world) }, signal),
        refund: (call, signal) => inner.refund({ ...call, ref: fresh(world) }, signal),
      }),
    },
  },
  {
    name: 'references are the payment’s, not the attempt’s',
    seams: {
      gateway: gateways((inner) => ({
        refund: (call, signal) => inner.refund({ ...call, ref: `R${call.chargeTransactionId}` }, signal),
        finalize: (call, signal) => inner.finalize(call, signal),
      })),
    },
  },
  { name: 'the gateway keeps no tombstone', seams: { world: ({ bank }) => void (bank.tombstones.add = () => bank.tombstones) } },
  {
    name: 'not found counts as never',
    seams: {
      gateway: gateways((inner) => ({
        finalize: async (call, signal) => {
          const found = await inner.lookup(call, signal).catch(() => ({ found: 'cannot_tell' as const }));
          if (found.found === 'cannot_tell') return { kind: 'cannot_tell', why: 'unreachable' };
          return found.found ? inner.finalize(call, signal) : { kind: 'never' };
        },
      })),
    },
  },
  {
    name: 'the second leg’s reference is not finalised',
    seams: {
      gateway: gateways((inner) => ({
        finalize: async (call, signal) => {
          if (!call.account.merchantAccount.startsWith('f-')) return inner.finalize(call, signal);
          const found = await inner.lookup(call, signal).catch(() => ({ found: 'cannot_tell' as const }));
          return found.found === true ? inner.finalize(call, signal) : { kind: 'never' };
        },
      })),
    },
  },
  {
    name: 'the switched operation’s reference is not finalised',
    seams: {
      gateway: gateways((inner) => ({
        finalize: async (call, signal) => {
          if (call.op !== 'refund') return inner.finalize(call, signal);
          const found = await inner.lookup(call, signal).catch(() => ({ found: 'cannot_tell' as const }));
          return found.found === true ? inner.finalize(call, signal) : { kind: 'never' };
        },
      })),
    },
  },
  {
    name: 'a reference is executed as often as it is sent',
    seams: {
      world: ({ bank }) => {
        const answers = bank.answers;
        const get = answers.get.bind(answers);
        bank.charge = repeated(bank.charge.bind(bank), answers, get);
        bank.refund = repeated<Parameters<Bank['refund']>[0], [Parameters<Bank['refund']>[1]], Result>(bank.refund.bind(bank), answers, get);
      },
    },
  },
  {
    name: 'no answer counts as not processed',
    seams: { gateway: gateways((inner) => ({ charge: async (call, signal) => certain(await inner.charge(call, signal)) })) },
  },
  {
    name: 'no answer to a refund counts as not processed',
    seams: { gateway: gateways((inner) => ({ refund: async (call, signal) => certain(await inner.refund(call, signal)) })) },
  },
  {
    name: 'no answer to a reversal counts as reversed',
    seams: {
      gateway: gateways((inner) => ({
        void: async (call, signal) => {
          const outcome = await inner.void(call, signal);
          return call.askedBy === 'reversal' && outcome.kind === 'unknown' ? { kind: 'approved', txn: { transactionId: 'vd_presumed' } } : outcome;
        },
      })),
    },
  },
  {
    name: 'a void of a part takes the whole',
    seams: {
      gateway: gateways((inner) => ({
        void: (call, signal) => {
          const { amountCents: _, ...whole } = call;
          return inner.void(whole, signal);
        },
      })),
    },
  },
  {
    name: 'recovery goes on with a leg that nobody sent',
    seams: {
      gateway: (inner, world) => ({
        ...inner,
        refund: (call, signal) => {
          lastRefund.set(world, call);
          return inner.refund(call, signal);
        },
        finalize: async (call, signal) => {
          const found = await inner.finalize(call, signal);
          const last = lastRefund.get(world);
          if (found.kind === 'never' && call.op === 'refund' && last) void inner.refund({ ...last, ref: `${call.ref}+` }, signal);
          return found;
        },
      }),
    },
  },
  // ---- banks like those of vendors
  {
    name: 'no trace counts as never before the batch is listed',
    seams: {
      gateway: gateways((inner) => ({
        finalize: async (call, signal) => {
          const found = await inner.finalize(call, signal);
          return found.kind === 'cannot_tell' && found.why === 'not_visible' && call.op === 'charge' ? { kind: 'never' } : found;
        },
      })),
    },
  },
  {
    name: 'a charge that is held for review counts as approved',
    seams: {
      gateway: gateways((inner) => ({
        charge: async (call, signal) => {
          const outcome = await inner.charge(call, signal);
          return outcome.kind === 'held' ? { kind: 'approved', txn: { transactionId: outcome.transactionId, authCode: 'H1' } } : outcome;
        },
      })),
    },
  },
  {
    name: 'a void of which there is no trace counts as never executed',
    seams: {
      gateway: gateways((inner) => ({
        finalize: async (call, signal) => {
          const found = await inner.finalize(call, signal);
          return found.kind === 'cannot_tell' && found.why === 'not_visible' && call.op !== 'charge' ? { kind: 'never' } : found;
        },
      })),
    },
  },
  {
    name: 'a refund of which there is no trace is sent again under a new reference',
    seams: {
      gateway: (inner, world) => ({
        ...inner,
        refund: (call, signal) => inner.refund(world.unseen.has(call.ref) ? { ...call, ref: fresh(world) } : call, signal),
      }),
    },
  },
  {
    name: 'a refund is repeated when the bank has forgotten it',
    seams: {
      gateway: gateways(({ capabilities }) => ({
        capabilities: { ...capabilities, repeatSafeMs: { void: Number.POSITIVE_INFINITY, refund: Number.POSITIVE_INFINITY } },
      })),
    },
  },
  {
    name: 'the key of a refund is forgotten while its attempt is open',
    seams: {
      world: ({ keys }) => {
        keys.beginsAnew = (row) => row.expiresAt <= keys.now() && (row.state === 'completed' || row.operation !== 'create');
      },
    },
  },
  {
    name: 'recovery looks again only when the gateway can tell',
    seams: {
      recoveryWork: (inner) => ({
        ...inner,
        record: (tried) => inner.record({ ...tried, nextTryAt: tried.until ?? tried.nextTryAt }),
        // A round that resolves another payment looks at all.
        hurry: async () => undefined,
      }),
    },
  },
  {
    name: 'a call that still runs under its reference counts as not processed',
    seams: {
      gateway: (inner, world) => ({
        ...inner,
        refund: async (call, signal) => {
          const running = ofWorld(runningRefunds, world, () => new Set<string>());
          if (running.has(call.ref)) return { kind: 'not_processed', answered: true };
          const outcome = await inner.refund(call, signal);
          if (outcome.kind === 'unknown') running.add(call.ref);
          return outcome;
        },
      }),
    },
  },
  {
    name: 'a duplicate of an own charge counts as declined',
    seams: {
      gateway: gateways((inner) => ({
        charge: async (call, signal) => {
          const outcome = await inner.charge(call, signal);
          if (outcome.kind !== 'unknown') return outcome;
          const again = await inner.charge(call, signal);
          return again.kind === 'approved' ? { kind: 'declined', decline: { code: 'generic_decline' } } : outcome;
        },
      })),
    },
  },
  {
    name: 'a cancel under a fixed key repeats its stored error',
    seams: {
      gateway: (inner, world) => ({
        ...inner,
        finalize: async (call, signal) => {
          const stored = ofWorld(storedErrors, world, () => new Set<string>());
          if (stored.has(call.ref)) return { kind: 'cannot_tell', why: 'unreachable' };
          const found = await inner.finalize(call, signal);
          if (found.kind === 'cannot_tell' && found.why === 'unreachable') stored.add(call.ref);
          return found;
        },
      }),
    },
  },
  {
    name: 'a scan that began before the question proves absence',
    seams: {
      gateway: (inner, world) => ({
        ...inner,
        finalize: async (call, signal) => {
          // The first scan answers all.
          const scan = ofWorld(scans, world, () => new Set(world.bank.answers.keys()));
          const found = await inner.finalize(call, signal);
          const isOver = call.op === 'charge' && world.sim.now >= batchOf(call.begunAt).listedAt;
          return inner.capabilities.finalize === 'after_batch' && isOver && !scan.has(call.ref) ? { kind: 'never' } : found;
        },
      }),
    },
  },
  // ---- projections, settlement
  { name: 'the checkpoint moves outside of the rows’ transaction', seams: { world: ({ tables }) => void (tables.splitTransactions = true) } },
  {
    name: 'a projection passes over an event',
    seams: {
      world: ({ tables }) => {
        const set = tables.list.set.bind(tables.list);
        let written = 0;
        tables.list.set = (id, row) => (++written % 40 === 0 ? tables.list : set(id, row));
      },
    },
  },
  {
    name: 'a settlement line is recorded twice',
    seams: {
      log: appends((inner, stream, expected, events, options) => {
        const twice = events.map((event) => {
          if (event.type !== 'SettlementLinesRecorded') return event;
          const data = event.data as unknown as { lines: { number: number }[] };
          const lines = data.lines.flatMap((line) => [line, line]).map((line, number) => ({ ...line, number }));
          return { ...event, data: { ...data, lines } };
        });
        return inner.append(stream, expected, twice, options);
      }),
    },
  },
  // ---- hosted checkout
  {
    name: 'a second form begins a second attempt',
    seams: {
      log: appends(async (inner, stream, expected, events, options) =>
        inner.append(stream, isOnly(events, 'AttemptStarted') ? await lastRevision(inner, stream) : expected, events, options),
      ),
    },
  },
  {
    name: 'the content of a checkout is written after its event',
    seams: {
      intakes: (inner, { sim }) => ({
        ...inner,
        write: async (row) => {
          void sim.wait(CONTENT_LATE_MS).then(() => inner.write(row).catch(() => undefined));
        },
      }),
    },
  },
  {
    name: 'a checkout whose request vanished is opened again without a fence',
    seams: {
      log: appends(async (inner, stream, expected, events, options) =>
        isOnly(events, 'PaymentAbandoned') && (events[0]!.data as { reason: string }).reason.includes('checkout')
          ? pretended(expected, events)
          : inner.append(stream, expected, events, options),
      ),
    },
  },
  {
    name: 'an unknown outcome is told to the payer as a decline',
    seams: {
      log: appends(async (inner, stream, expected, events, options) =>
        inner.append(
          stream,
          expected,
          events.map((event) =>
            event.type === 'OutcomeUnknown'
              ? { ...event, type: 'AttemptDeclined', data: { attemptId: (event.data as { attemptId: string }).attemptId, code: 'PAYMENT_TIMEOUT', declineCode: null } } // prettier-ignore
              : event,
          ),
          options,
        ),
      ),
    },
  },
  // ---- webhooks
  {
    name: 'an attempt that lost its lease still counts',
    seams: {
      world: ({ tables: { webhooks } }) => {
        webhooks.complete = (ended) =>
          ended.map(({ deliveryId, fate, outcome, startedAtMs, durationMs }) => {
            const row = webhooks.deliveries.get(deliveryId)!;
            const dueAt = fate.state === 'pending' ? webhooks.now() + fate.waitMs : row.dueAt;
            Object.assign(row, { state: fate.state, attempts: row.attempts + 1, lease: null, dueAt });
            webhooks.attempts.push({ deliveryId, round: row.round, attempt: row.attempts, outcome, startedAtMs, durationMs });
            return true;
          });
      },
    },
  },
  { name: 'no answer counts as taken', seams: { sender: (inner) => ({ ...inner, post: async (post) => believed(await inner.post(post)) }) } },
  { name: 'nobody takes over from a worker that died', seams: { deliveries: (inner) => ({ ...inner, expired: async () => [] }) } },
  {
    name: 'what failed is sent again at once',
    seams: { deliveries: fates((fate) => (fate.state === 'pending' ? { ...fate, waitMs: 1_000 } : fate)) },
  },
  { name: 'a sixth attempt', seams: { deliveries: fates((fate) => (fate.state === 'held' ? { state: 'pending', waitMs: 120_000 } : fate)) } },
  { name: 'a failure is the end', seams: { deliveries: fates((fate) => (fate.state === 'pending' ? { state: 'held' } : fate)) } },
  {
    name: 'the body is written anew for every attempt',
    seams: {
      deliveries: claimed((one, world) => {
        const body = clearText(world.opened, one.payload.toString(), `${one.stream}/webhook:${one.eventId}`);
        return { ...one, payload: Buffer.from(body + ' '.repeat(one.attempts)) };
      }),
    },
  },
  {
    name: 'a redelivery is another event',
    seams: { deliveries: claimed((one) => (one.round > 1 ? { ...one, eventId: `${one.eventId}${one.round}` } : one)) },
  },
  {
    name: 'an endpoint hears of what happened before it was added',
    seams: {
      world: ({ tables: { webhooks } }) => {
        const tell = webhooks.tell.bind(webhooks);
        webhooks.tell = (told) => {
          tell(told.map((event) => ({ ...event, position: '~' })));
          for (const event of told) webhooks.events.set(event.id, event);
        };
      },
    },
  },
  {
    name: 'the outbox passes over a fact',
    seams: {
      world: ({ tables: { webhooks } }) => {
        const tell = webhooks.tell.bind(webhooks);
        webhooks.tell = (told) => tell(told.filter(({ id }) => id.charCodeAt(4) % 4 > 0));
      },
    },
  },
  { name: 'nobody finishes what a payer left', seams: { world: ({ tables }) => void (tables.unfinished.set = () => tables.unfinished) } },
];

const believed = (posted: Posted): Posted => (posted.outcome === 'timeout' ? { ...posted, outcome: 'ok', statusCode: 200 } : posted);

const fresh = (world: World) => world.sim.ids().uuid().replaceAll('-', '').slice(-20);

const certain = <T extends { kind: string }>(outcome: T) =>
  outcome.kind === 'unknown' ? ({ kind: 'not_processed', answered: false } as const) : (outcome as Exclude<T, { kind: 'unknown' }>);

/** Removes the earlier answer of a reference, so the bank executes the call again. */
const repeated =
  <Call extends { ref: string }, Rest extends unknown[], Result>(
    execute: (call: Call, ...rest: Rest) => Result,
    answers: Map<string, unknown>,
    get: (ref: string) => unknown,
  ) =>
  (call: Call, ...rest: Rest): Result => {
    const before = get(call.ref) as { result?: { kind?: string } } | undefined;
    if (before?.result?.kind === 'approved') answers.delete(call.ref);
    return execute(call, ...rest);
  };

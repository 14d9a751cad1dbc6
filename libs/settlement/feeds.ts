/**
 * The feeds of processors: settled batches and disputes, of each merchant account. A row says when a feed is read next, and from which place. The rows
 * are notes: without its row, a feed is read from its beginning, and nothing is recorded twice.
 */
import type { GatewayAccount } from '#payments';
import type { Migration, Queryable } from '#platform';

const SECOND_MS = 1_000;
const MINUTE_MS = 60 * SECOND_MS;
/** How often a feed is read. Batches and disputes of real processors change once a day; the simulator also closes batches on a command. */
const SETTLEMENT_EVERY_MS = 15 * MINUTE_MS;
const SIMULATOR_EVERY_MS = 20 * SECOND_MS;
const DISPUTES_EVERY_MS = 60 * MINUTE_MS;
/** Longest pause after failures. Each failure doubles the pause. */
const MAX_PAUSE_MS = 6 * 60 * MINUTE_MS;
/** Pause if a batch waits for a payment that is being charged or reversed. */
const WAITING_MS = MINUTE_MS;
const MAX_ERROR_CHARACTERS = 500;

export type FeedName = 'settlement' | 'disputes';

export const gatewayFeedMigration: Migration = {
  name: '0110-gateway-feed',
  sql: `
    create table gateway_feed (
      gateway text not null, merchant_account text not null, feed text not null, next_at timestamptz not null, cursor text,
      begun_at timestamptz not null default clock_timestamp(), last_ok_at timestamptz, failures int not null default 0, last_error text,
      primary key (gateway, merchant_account, feed));
    create table gateway_dispute (
      gateway text not null, merchant_account text not null, external_id text not null, is_open boolean not null,
      primary key (gateway, merchant_account, external_id));
  `,
};

/** `waiting`: a batch goes on when a payment is no longer being charged. `failed`: the processor cannot be asked, or a batch cannot be recorded. */
export type FeedEnd = { readonly kind: 'read' } | { readonly kind: 'waiting' | 'failed'; readonly why: string };

export interface ClaimedFeed {
  /** null: the feed is read from its beginning. */
  readonly cursor: string | null;
  /** Failures since the feed was last read to its end. */
  readonly failures: number;
  /** Names the row. A row that was deleted and made anew has another name. */
  readonly row: string;
}

/** A port with two implementations: Postgres and the simulation. */
export interface FeedRows {
  /** Claims a feed, so that no other worker begins with it. `always`: also if it is not due, or is claimed. null: it is not due. */
  claim(account: GatewayAccount, feed: FeedName, always: boolean): Promise<ClaimedFeed | null>;
  /** Everything up to `cursor` is recorded. null: the feed begins again. No effect if the claimed row was deleted ({@link forgetFeeds}). */
  passed(account: GatewayAccount, feed: FeedName, claimed: ClaimedFeed, cursor: string | null): Promise<void>;
  ended(account: GatewayAccount, feed: FeedName, claimed: ClaimedFeed, end: FeedEnd): Promise<void>;
  /** Ids of the processor's disputes that are not decided. */
  openDisputes(account: GatewayAccount): Promise<readonly string[]>;
  disputeSeen(account: GatewayAccount, externalId: string, isOpen: boolean): Promise<void>;
}

const everyMs = ({ gateway }: GatewayAccount, feed: FeedName): number =>
  feed === 'disputes' ? DISPUTES_EVERY_MS : gateway === 'simulator' ? SIMULATOR_EVERY_MS : SETTLEMENT_EVERY_MS;

/** The time from the end of a reading until the next one, in ms. */
export const pauseAfter = (account: GatewayAccount, feed: FeedName, { failures }: ClaimedFeed, end: FeedEnd): number => {
  const usual = everyMs(account, feed);
  // The simulator is ours. It need not be spared, and a sandbox should go on as soon as it is back.
  if (end.kind === 'read' || account.gateway === 'simulator') return usual;
  return end.kind === 'waiting' ? Math.min(usual, WAITING_MS) : Math.min(MAX_PAUSE_MS, usual * 2 ** failures);
};

export const postgresFeedRows = (db: Queryable): FeedRows => {
  const nameOf = ({ gateway, merchantAccount }: GatewayAccount, feed: FeedName) => [gateway, merchantAccount, feed];
  return {
    claim: async (account, feed, always) => {
      const { rows } = await db.query<ClaimedFeed>(
        `insert into gateway_feed (gateway, merchant_account, feed, next_at) values ($1, $2, $3, clock_timestamp() + $4 * interval '1 ms')
         on conflict (gateway, merchant_account, feed) do update set next_at = excluded.next_at
           where $5 or gateway_feed.next_at <= clock_timestamp()
         returning cursor, failures, begun_at::text as row`,
        [...nameOf(account, feed), everyMs(account, feed), always],
      );
      return rows[0] ?? null;
    },
    passed: async (account, feed, { row }, cursor) => {
      await db.query(
        'update gateway_feed set cursor = $4 where gateway = $1 and merchant_account = $2 and feed = $3 and begun_at = $5::timestamptz',
        [...nameOf(account, feed), cursor, row],
      );
    },
    ended: async (account, feed, claimed, end) => {
      await db.query(
        `update gateway_feed set next_at = clock_timestamp() + $4 * interval '1 ms', failures = $5, last_error = $6,
           last_ok_at = case when $7 then clock_timestamp() else last_ok_at end
         where gateway = $1 and merchant_account = $2 and feed = $3`,
        [
          ...nameOf(account, feed),
          pauseAfter(account, feed, claimed, end),
          end.kind === 'read' ? 0 : claimed.failures + (end.kind === 'failed' ? 1 : 0),
          end.kind === 'read' ? null : end.why.slice(0, MAX_ERROR_CHARACTERS),
          end.kind === 'read',
        ],
      );
    },
    openDisputes: async ({ gateway, merchantAccount }) => {
      const { rows } = await db.query<{ id: string }>(
        'select external_id as id from gateway_dispute where gateway = $1 and merchant_account = $2 and is_open order by external_id',
        [gateway, merchantAccount],
      );
      return rows.map(({ id }) => id);
    },
    disputeSeen: async ({ gateway, merchantAccount }, externalId, isOpen) => {
      await db.query(
        `insert into gateway_dispute (gateway, merchant_account, external_id, is_open) values ($1, $2, $3, $4)
         on conflict (gateway, merchant_account, external_id) do update set is_open = excluded.is_open`,
        [gateway, merchantAccount, externalId, isOpen],
      );
    },
  };
};

/** Lets every feed begin anew. For a log that may lack events which the rows count as recorded. */
export const forgetFeeds = async (db: Queryable): Promise<void> => {
  await db.query('delete from gateway_feed');
};

export interface Feed {
  readonly merchantAccount: string;
  readonly feed: FeedName;
  /** RFC 3339. null: it was never read to its end. */
  readonly lastOkAt: string | null;
  /** RFC 3339: when a worker reads it next. */
  readonly nextAt: string;
  /** Why it was not read to its end the last time. null: it was. */
  readonly error: string | null;
  /** Seconds since it was last read to its end, or, if it never was, since it was first tried. */
  readonly ageSeconds: number;
}

/** `merchantAccount` null: of all accounts. */
export const feedsOf = async (db: Queryable, merchantAccount: string | null): Promise<readonly Feed[]> => {
  const { rows } = await db.query<{ merchant_account: string; feed: FeedName; last: Date | null; next: Date; error: string | null; age: string }>(
    `select merchant_account, feed, last_ok_at as last, next_at as next, last_error as error,
       extract(epoch from clock_timestamp() - coalesce(last_ok_at, begun_at)) as age
     from gateway_feed where $1::text is null or merchant_account = $1 order by gateway, merchant_account, feed`,
    [merchantAccount],
  );
  return rows.map(({ merchant_account, feed, last, next, error, age }) => ({
    merchantAccount: merchant_account,
    feed,
    lastOkAt: last?.toISOString() ?? null,
    nextAt: next.toISOString(),
    error,
    ageSeconds: Number(age),
  }));
};

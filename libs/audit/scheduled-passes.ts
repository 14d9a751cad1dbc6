/**
 * The verification that workers do by themselves: an incremental pass each night and a full pass each week. One worker does a pass, under a lease.
 *
 * After each page, the state of the pass is stored in its row. If the worker dies, the next one goes on after that page.
 *
 * A good pass ends at a signed head. It writes this head to a file beside the heads, outside the database. The next incremental pass begins there.
 * The stored state carries a MAC under a key of the service. So a change of a row cannot make a pass leave anything out that an earlier pass has not
 * verified: a pass whose state was changed begins again, and says so.
 */
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Clock, Ids } from '#kernel';
import type { Check } from '#ledger';
import type { Migration, Queryable } from '#platform';
import { type Checked, type Difference, keepDifferences, readCheckpoints, SWEPT_AT_ONCE } from './drift.js';
import { ForgedHead } from './head.js';
import { beginPass, passChecks, type PassPorts, type PassState, runPass } from './pass.js';
import { lastHead, logState } from './seal.js';
import { find, LOG_START, type LogPlace, trustedHead, UntrustedHead } from './verify.js';

export const verifyPassMigration: Migration = {
  name: '0107-verify-pass',
  sql: `
-- state: of the pass that runs now. null: none runs. failed_checks, checks: of the last pass that ended.
create table verify_pass (
  pass text primary key,
  due_at timestamptz,
  holder uuid,
  busy_until timestamptz,
  state json,
  finished_at timestamptz,
  failed_checks int,
  checks json
);
insert into verify_pass (pass) values ('incremental'), ('full');
`,
};

export type PassName = 'incremental' | 'full';

/** An incremental pass begins at this hour (UTC) of each day, a full pass at its hour of Sunday. */
const INCREMENTAL_HOUR = 2;
const FULL_HOUR = 3;
const SUNDAY = 0;
const DAYS = { incremental: 1, full: 7 } as const;

/** When the next pass is due after a time (milliseconds since 1970). Pure. */
export const nextPass = (pass: PassName, now: number): Date => {
  const at = new Date(now);
  at.setUTCHours(pass === 'full' ? FULL_HOUR : INCREMENTAL_HOUR, 0, 0, 0);
  if (pass === 'full') at.setUTCDate(at.getUTCDate() + ((SUNDAY - at.getUTCDay() + DAYS.full) % DAYS.full));
  if (at.getTime() <= now) at.setUTCDate(at.getUTCDate() + DAYS[pass]);
  return at;
};

/** A pass that shows no life for this time is taken over by another worker. */
const LEASE_SECONDS = 60;
const RENEW_MS = 15_000;
const EVENTS_AT_ONCE = 4_096;

/**
 * The file with the signed head at which the last good pass of this installation ended. All workers share it, in the folder of the heads. It is not
 * evidence. Neither its name nor its first line is that of a head, so it is never listed or read as a head.
 */
const verificationFile = (folder: string): string => join(folder, 'verification.txt');
const VERIFICATION_HEADING = 'payfold verification: the last good pass ended at this head\n';

/** The signed head in the file. null: there is no file. If the file is damaged, the text is not a head. */
const readVerified = (folder: string): string | null => {
  const file = verificationFile(folder);
  if (!existsSync(file)) return null;
  const text = readFileSync(file, 'utf8');
  return text.startsWith(VERIFICATION_HEADING) ? text.slice(VERIFICATION_HEADING.length) : '';
};

export interface PassWork extends PassPorts {
  readonly folder: string;
  readonly clock: Pick<Clock, 'monotonic' | 'realNow'>;
  readonly ids: Ids;
  /** Awaited within and between pages, so that other work can go on. If it returns false, the pass ends here and goes on later. */
  readonly goOn: () => Promise<boolean>;
  readonly onDifferences: (differences: readonly Difference[]) => void;
  /** Called once for each check that fails, as soon as it does. */
  readonly onFailed: (pass: PassName, check: Check) => void;
}

interface StoredState {
  readonly pass: PassState;
  /** The signed head at the end of the pass. null: the newest head is not at a place where a pass can end. */
  readonly note: string | null;
}

/** The JSON in the row of the pass. */
interface KeptState extends StoredState {
  readonly mac: string;
}

/** The lease was lost, or `goOn` returned false. */
class PassInterrupted extends Error {}

/** Does the passes that are due, unless another worker does them. */
export const runDuePasses = async (work: PassWork): Promise<void> => {
  const { db, ids, clock } = work;
  const { rows } = await db.query<{ pass: PassName; is_new: boolean }>(
    'select pass, due_at is null as is_new from verify_pass where due_at is null or due_at <= now() order by due_at, pass',
  );
  const failures: unknown[] = [];
  for (const { pass, is_new } of rows)
    if (is_new) await db.query('update verify_pass set due_at = $2 where pass = $1 and due_at is null', [pass, nextPass(pass, clock.realNow())]);
    // A pass that fails must not keep the other one from running.
    else await new ScheduledPass(work, pass, ids.uuid()).run().catch((error: unknown) => failures.push(error));
  if (failures.length > 0) throw failures[0];
};

class ScheduledPass {
  private renewed: number;

  constructor(
    private readonly work: PassWork,
    private readonly pass: PassName,
    private readonly holder: string,
  ) {
    this.renewed = work.clock.monotonic();
  }

  async run(): Promise<void> {
    const { work, pass } = this;
    const { rows } = await work.db.query<{ state: KeptState | null }>(
      `update verify_pass set holder = $2, busy_until = now() + $3::int * interval '1 second'
       where pass = $1 and due_at <= now() and (busy_until is null or busy_until < now()) returning state`,
      [pass, this.holder, LEASE_SECONDS],
    );
    if (!rows[0]) return;
    try {
      const kept = rows[0].state;
      const isChanged = kept !== null && !work.keys.kids.some((kid) => this.macOf(kept, kid) === kept.mac);
      // A release that knew no balances stored a state without them. Then the pass begins again.
      const goesOn = kept !== null && !isChanged && 'balances' in kept.pass.found;
      const state = goesOn ? kept : await this.begin();
      if (!state) return;
      if (isChanged) find(state.pass.log.found.heads, 'the stored state of this pass was changed by another program; the pass began again');
      const failed = new Set<string>();
      const options = {
        eventsAtOnce: EVENTS_AT_ONCE,
        paymentsAtOnce: SWEPT_AT_ONCE,
        goOn: () => this.goOn(),
        onCompared: async (compared: readonly string[], checked: Checked) => {
          // If this worker lost its lease, what it read may be old.
          if (checked.differences.length > 0) await this.renew('', []);
          await keepDifferences(work.db, compared, checked);
          work.onDifferences(checked.differences);
        },
      };
      for await (const _page of runPass(work, state.pass, options)) {
        for (const check of passChecks(state.pass)) if (!check.ok && failed.size < failed.add(check.name).size) work.onFailed(pass, check);
        await this.store(state);
      }
      await this.end(state);
    } catch (error) {
      if (!(error instanceof PassInterrupted)) throw error;
    } finally {
      // If this fails, the lease expires.
      await work.db
        .query('update verify_pass set holder = null, busy_until = null where pass = $1 and holder = $2', [pass, this.holder])
        .catch(() => undefined);
    }
  }

  /** null: nothing is signed yet, or the read models are behind the newest head. */
  private async begin(): Promise<StoredState | null> {
    const { work, pass } = this;
    const { size, position } = await logState(work.db);
    const newest = await lastHead(work).catch((error: unknown) => {
      if (error instanceof ForgedHead) return 'forged' as const;
      throw error;
    });
    if (newest === null) return null;
    const signed = newest === 'forged' || newest.head.size > size ? null : newest;
    const end: LogPlace = signed ? { size: signed.head.size, position: signed.head.position } : { size, position };
    const { list, journal, register, lines } = await readCheckpoints(work);
    if ([list, journal, register, lines].some((applied) => applied < end.position)) return null;
    let from: LogPlace | null = null;
    let untrusted: string | null = null;
    if (pass === 'incremental')
      try {
        const verified = readVerified(work.folder);
        const head = verified === null ? null : await trustedHead(work, verified);
        from = head ? { size: head.size, position: head.position } : LOG_START;
        if (from.size > end.size) throw new UntrustedHead(`the newest head covers ${end.size} events`);
      } catch (error) {
        if (!(error instanceof UntrustedHead)) throw error;
        from = LOG_START;
        untrusted = `the head of the last good verification: ${error.message}`;
      }
    const state = { pass: await beginPass(work, from, end), note: signed?.note ?? null };
    if (untrusted !== null) find(state.pass.log.found.heads, untrusted);
    return state;
  }

  private async end({ pass: state, note }: StoredState): Promise<void> {
    const { work, pass, holder } = this;
    const checks = passChecks(state);
    const failed = checks.filter(({ ok }) => !ok).length;
    if (state.full) await work.db.query('update drift_sweep set completed_at = now(), payments = $1', [state.payments]);
    if (failed === 0 && note !== null) writeVerified(work.folder, note, holder);
    await work.db.query(
      `update verify_pass set state = null, finished_at = now(), failed_checks = $3, checks = $4, due_at = $5 where pass = $1 and holder = $2`,
      [pass, holder, failed, JSON.stringify(checks), nextPass(pass, work.clock.realNow())],
    );
  }

  private async store(state: StoredState): Promise<void> {
    const kept: KeptState = { ...state, mac: this.macOf(state, this.work.keys.current) };
    await this.renew('state = $4, ', [JSON.stringify(kept)]);
  }

  private macOf({ pass: state, note }: StoredState, kid: string): string {
    return this.work.keys.mac('verify-pass', JSON.stringify([this.pass, state, note]), kid).toString('base64url');
  }

  private async goOn(): Promise<void> {
    if (!(await this.work.goOn())) throw new PassInterrupted('the worker stops');
    if (this.work.clock.monotonic() - this.renewed > RENEW_MS) await this.renew('', []);
  }

  private async renew(set: string, values: readonly string[]): Promise<void> {
    const { rowCount } = await this.work.db.query(
      `update verify_pass set ${set}busy_until = now() + $3::int * interval '1 second' where pass = $1 and holder = $2`,
      [this.pass, this.holder, LEASE_SECONDS, ...values],
    );
    if (rowCount === 0) throw new PassInterrupted('another worker does this pass');
    this.renewed = this.work.clock.monotonic();
  }
}

/** Replaces the file by a rename, so that it is never half written. A smaller head does not replace a larger one. `holder` names the draft. */
const writeVerified = (folder: string, note: string, holder: string): void => {
  const sizeOf = (text: string) => Number(text.split('\n')[1]);
  if (sizeOf(readVerified(folder) ?? '') > sizeOf(note)) return;
  mkdirSync(folder, { recursive: true, mode: 0o755 });
  const draft = join(folder, `.verification-${holder}`);
  writeFileSync(draft, `${VERIFICATION_HEADING}${note}`, { mode: 0o644, flush: true });
  renameSync(draft, verificationFile(folder));
};

export interface PassFigures {
  readonly pass: PassName;
  /** Seconds since a pass last ended, or since the first one was due. */
  readonly lastRunSeconds: number;
  /** Number of checks that failed in the last pass. */
  readonly failedChecks: number;
}

/** For metrics: the passes that have ended at least once, or are due. */
export const passFigures = async (db: Queryable): Promise<PassFigures[]> => {
  const { rows } = await db.query<{ pass: PassName; seconds: string; failed: number }>(
    `select pass, extract(epoch from now() - coalesce(finished_at, due_at)) as seconds, coalesce(failed_checks, 0) as failed
     from verify_pass where coalesce(finished_at, due_at) <= now()`,
  );
  return rows.map(({ pass, seconds, failed }) => ({ pass, lastRunSeconds: Number(seconds), failedChecks: failed }));
};

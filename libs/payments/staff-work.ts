/**
 * The read model of staff's work: all events that staff or operators caused, and the tasks that only a person may decide. It follows the whole log, so
 * that reports and figures need not read the log.
 */
import { type EventStore, load, type ReadModel, type Recorded } from '#eventstore';
import { fold, type Json, timestamp } from '#kernel';
import type { Queryable } from '#platform';
import { isVisible, payment as decider, type PaymentEvent, type PaymentStatus, statusOf } from './payment.js';
import {
  ACKNOWLEDGED_TASKS,
  type Acknowledgement,
  isTaskOpen,
  STAFF_TASK_STREAM,
  staffTaskEvents,
  staffTaskId,
  type StaffTaskReason,
} from './staff.js';
import { paymentEvents, paymentStream } from './stream.js';

const TABLES = `
  create table staff_action (
    position text collate "C" not null, recorded_at timestamptz not null, actor_type text not null, actor text not null, event text not null,
    stream text not null, reason text, event_id uuid not null);
  create table staff_task (payment_id uuid not null, reason text not null, raised_at timestamptz not null, acknowledged_at timestamptz)`;
const INDEXES = `
  alter table staff_action add constraint staff_action_pkey primary key (recorded_at, position);
  alter table staff_task add constraint staff_task_pkey primary key (payment_id, reason);
  create index staff_task_open on staff_task (reason, raised_at) where acknowledged_at is null`;

/** How long the read model gathers events. It reads the whole log, and nearly no event concerns it. */
const GATHER_MS = 500;

export const staffWorkModel: ReadModel = {
  name: 'staff-work',
  shape: 2,
  gatherMs: GATHER_MS,
  tables: ['staff_action', 'staff_task'],
  createTables: TABLES,
  createIndexes: INDEXES,
  apply: (client, events) => applyStaffWork(client, events),
};

const applyStaffWork = async (db: Queryable, events: readonly Recorded[]): Promise<void> => {
  const actions = events.filter(({ meta: { actor } }) => actor.type === 'staff' || actor.type === 'operator');
  if (actions.length > 0)
    await db.query(
      `insert into staff_action (position, recorded_at, actor_type, actor, event, stream, reason, event_id)
       select * from unnest($1::text[], $2::timestamptz[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::uuid[])`,
      [
        actions.map(({ position }) => position),
        actions.map(({ meta }) => meta.recordedAt),
        actions.map(({ meta }) => meta.actor.type),
        actions.map(({ meta }) => meta.actor.id),
        actions.map(({ type }) => type),
        actions.map(({ stream }) => stream),
        actions.map(whyOf),
        actions.map(({ id }) => id),
      ],
    );
  for (const recorded of events.filter(({ stream }) => stream.startsWith(STAFF_TASK_STREAM.prefix))) await applyTask(db, recorded);
};

/** There are few tasks, so each event has a statement of its own. A task that is raised again waits again. */
const applyTask = async (db: Queryable, recorded: Recorded): Promise<void> => {
  const { type, data } = staffTaskEvents.read(recorded);
  const { recordedAt } = recorded.meta;
  if (type === 'StaffTaskRaised')
    await db.query(
      `insert into staff_task (payment_id, reason, raised_at) values ($1, $2, $3)
       on conflict (payment_id, reason) do update set raised_at = excluded.raised_at, acknowledged_at = null`,
      [data.paymentId, data.reason, recordedAt],
    );
  else await db.query('update staff_task set acknowledged_at = $3 where payment_id = $1 and reason = $2', [data.paymentId, data.task, recordedAt]);
};

/** The words of staff in an event. null: there are none. */
const whyOf = ({ data }: Recorded): string | null => {
  const { reason, evidence } = (data ?? {}) as { reason?: unknown; evidence?: unknown };
  return typeof reason === 'string' ? reason : typeof evidence === 'string' ? evidence : null;
};

/** SQL for the reasons of tasks that wait while the payment is unknown. A decision ends them. */
const UNTIL_DECIDED = `('charge_cannot_be_undone', 'settled_while_unknown')`;
/**
 * SQL condition: the task `t` of an open payment `p` waits. An overdue outcome may also be that of a refund or void. A task that is older than the open
 * attempt is about an earlier one.
 */
const WAITS = `((t.reason = 'outcome_overdue' and t.raised_at >= p.open_since) or (p.status = 'unknown' and t.reason in ${UNTIL_DECIDED}))`;
/** SQL for the reasons of tasks that wait until a person acknowledges them. */
const UNTIL_ACKNOWLEDGED = `(${ACKNOWLEDGED_TASKS.map((task) => `'${task}'`).join(', ')})`;

/** SQL condition: a row `p` of the list waits for a decision by staff. Nothing else can bring such a payment to an end. */
export const WAITS_FOR_STAFF = `p.status = 'unknown' and exists (
  select from staff_task t where t.payment_id = p.payment_id and t.reason in ${UNTIL_DECIDED})`;

/** SQL for the open tasks: `payment_id`, `reason` and `raised_at`. It reads only open payments and open tasks. */
export const OPEN_STAFF_TASKS = `
  select t.payment_id, t.reason, t.raised_at from payment_list p join staff_task t on t.payment_id = p.payment_id
  where p.open_since is not null and ${WAITS}
  union all select payment_id, reason, raised_at from staff_task where reason in ${UNTIL_ACKNOWLEDGED} and acknowledged_at is null`;

export interface OpenStaffTasks {
  readonly task: StaffTaskReason;
  readonly count: number;
  /** Age of the oldest in seconds. */
  readonly oldestSeconds: number;
}

/** For metrics: the open tasks, by reason. */
export const openStaffTasks = async (db: Queryable, nowMs: number): Promise<readonly OpenStaffTasks[]> => {
  const { rows } = await db.query<{ task: StaffTaskReason; count: string; oldest: string }>(
    `select reason as task, count(*) as count, extract(epoch from $1::timestamptz - min(raised_at)) as oldest
     from (${OPEN_STAFF_TASKS}) as open group by reason order by reason`,
    [timestamp(nowMs)],
  );
  return rows.map(({ task, count, oldest }) => ({ task, count: Number(count), oldestSeconds: Number(oldest) }));
};

export interface StaffTask {
  readonly paymentId: string;
  readonly reason: StaffTaskReason;
  /** 'none': no reader can see the payment. */
  readonly status: PaymentStatus | 'none';
  readonly open: boolean;
  /** RFC 3339. */
  readonly raisedAt: string;
  readonly evidence: Readonly<Record<string, Json>>;
  /** null: no person has acknowledged the task. */
  readonly acknowledged: Acknowledgement | null;
}

/**
 * Tasks of staff, oldest first: the open ones, or `all` that were ever raised. The read models must have reached the end of the log. Payments and
 * evidence come from their streams. Throws Unavailable.
 */
export const staffTasks = async (
  { store, db }: { readonly store: EventStore; readonly db: Queryable },
  { all }: { readonly all: boolean },
): Promise<readonly StaffTask[]> => {
  const { rows } = await db.query<{ payment_id: string; reason: StaffTaskReason; raised_at: Date }>(
    all
      ? 'select payment_id, reason, raised_at from staff_task order by raised_at, payment_id, reason'
      : `${OPEN_STAFF_TASKS} order by raised_at, payment_id, reason`,
  );
  const tasks: StaffTask[] = [];
  for (const { payment_id: paymentId, reason, raised_at: raisedAt } of rows) {
    const facts: PaymentEvent[] = [];
    for await (const fact of store.read(paymentStream(paymentId))) facts.push(paymentEvents.read(fact));
    const payment = fold(decider, facts);
    const { state } = await load(store, STAFF_TASK_STREAM, staffTaskId(paymentId, reason));
    const open = isTaskOpen(reason, payment, state);
    if (!open && !all) continue;
    const status = isVisible(payment) ? statusOf(payment) : 'none';
    const { evidence, acknowledged } = state;
    tasks.push({ paymentId, reason, status, open, raisedAt: raisedAt.toISOString(), evidence: evidence.at(-1) ?? {}, acknowledged });
  }
  return tasks;
};

/**
 * Watches what each statement of this process reads: auto_explain sends the executed plan of each statement to the client that ran it. It counts rows
 * and blocks, never time.
 */
import pg from 'pg';

export interface Statement {
  readonly text: string;
  /** Rows that the statement answered or changed. */
  readonly answered: number;
  /** Rows that it read from each table, also those that it did not need. */
  readonly read: ReadonlyMap<string, number>;
  /** Blocks of 8 KiB that it read, from memory or disk. */
  readonly blocks: number;
  readonly plan: string;
}

export interface Watched {
  /** Every statement since the last call, of all connections of this process. */
  take(): Statement[];
  stop(): Promise<void>;
}

interface PlanNode {
  readonly 'Node Type': string;
  readonly 'Relation Name'?: string;
  readonly 'Index Name'?: string;
  readonly 'Actual Rows': number;
  readonly 'Actual Loops': number;
  readonly 'Rows Removed by Filter'?: number;
  readonly 'Rows Removed by Index Recheck'?: number;
  readonly 'Shared Hit Blocks'?: number;
  readonly 'Shared Read Blocks'?: number;
  readonly Plans?: readonly PlanNode[];
}

const SETTINGS = `
  load 'auto_explain'; set auto_explain.log_level = notice; set auto_explain.log_format = json; set auto_explain.log_analyze = on;
  set auto_explain.log_buffers = on; set auto_explain.log_timing = off; set auto_explain.log_parameter_max_length = 0;
  set auto_explain.log_min_duration = 0`;

const clients = new Set<pg.Client>();
let heard: Statement[] | null = null;

/** Call this before the first connection is made. */
export const registerConnections = (): void => {
  const prototype = pg.Client.prototype as unknown as { connect: (...given: unknown[]) => unknown };
  const { connect } = prototype;
  prototype.connect = function (this: pg.Client, ...given) {
    clients.add(this);
    this.once('end', () => clients.delete(this));
    this.on('notice', ({ message }) => {
      const json = /plan:\n(\{.*\})\s*$/s.exec(message ?? '')?.[1];
      if (json !== undefined) heard?.push(statementOf(JSON.parse(json) as { 'Query Text': string; Plan: PlanNode }));
    });
    const connected = connect.apply(this, given);
    // The queue of the client runs this right after it is connected.
    if (heard !== null) this.query(SETTINGS).catch(() => undefined);
    return connected;
  };
};

/** Begins to record every statement. */
export const watchStatements = async (): Promise<Watched> => {
  heard = [];
  await Promise.all([...clients].map((client) => client.query(SETTINGS).catch(() => undefined)));
  return {
    take: () => heard!.splice(0),
    stop: async () => {
      await Promise.all([...clients].map((client) => client.query('set auto_explain.log_min_duration = -1').catch(() => undefined)));
      heard = null;
    },
  };
};

const nodesOf = (node: PlanNode): PlanNode[] => [node, ...(node.Plans ?? []).flatMap(nodesOf)];

const statementOf = ({ 'Query Text': text, Plan: plan }: { 'Query Text': string; Plan: PlanNode }): Statement => {
  const read = new Map<string, number>();
  const nodes = nodesOf(plan);
  for (const node of nodes) {
    const table = node['Relation Name'];
    if (table === undefined || node['Node Type'] === 'ModifyTable') continue;
    const rows = node['Actual Rows'] + (node['Rows Removed by Filter'] ?? 0) + (node['Rows Removed by Index Recheck'] ?? 0);
    read.set(table, (read.get(table) ?? 0) + rows * node['Actual Loops']);
  }
  const first = plan['Node Type'] === 'ModifyTable' && plan['Actual Rows'] === 0 ? plan.Plans![0]! : plan;
  return {
    text: text.replace(/\s+/g, ' ').trim(),
    answered: first['Actual Rows'] * first['Actual Loops'],
    read,
    blocks: (plan['Shared Hit Blocks'] ?? 0) + (plan['Shared Read Blocks'] ?? 0),
    plan: nodes.map((node) => `${node['Node Type']} ${node['Index Name'] ?? node['Relation Name'] ?? ''}`.trim()).join(' < '),
  };
};

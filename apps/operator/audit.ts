/** `payfold audit`: the sealed log, its proofs, and whether the books are what the events say. */
import { readFileSync, writeFileSync } from 'node:fs';
import type { Command } from 'commander';
import type { Check, Difference, DriftKind, DriftReport } from '#ledger';
import type { Services } from '../services.js';
import { progressBar, table, type Terminal, UsageError, uuid } from './terminal.js';

/** A seal that never ran reads the whole log. */
const CATCH_UP_MS = 30 * 60_000;

export const addAudit = (program: Command, { action }: Terminal): void => {
  const audit = program.command('audit').description('proofs and checks of the ledger');

  audit
    .command('verify')
    .description('read every event again: the sealed log, its signed heads, the read models and the books')
    .action(
      action(async ({ services }) => {
        const all = await services();
        const { verifyLog } = await import('#ledger');
        const sealing = await sealed(all);
        const bar = progressBar('events', Number((await all.projections.logSeal.status()).position ?? 0) || null);
        const log = await verifyLog({ ...all.seal, headFolder: all.seal.folder }, (events) => bar.update(events)).finally(() => bar.stop());
        const { position, size, root } = log;
        const drift = await driftOf(all, log.payments);
        const of = (name: string, kinds: readonly DriftKind[], good: string): Check => {
          const found = drift.differences.filter(({ kind }) => kinds.includes(kind));
          return { name, ok: found.length === 0, detail: found.length === 0 ? good : found.slice(0, SHOWN_DIFFERENCES).map(inWords).join('; ') };
        };
        return reported({ position, size, root }, [
          ...sealing,
          ...log.checks,
          of('read models', ['list', 'settlement'], `the list and the settlement of ${drift.payments} payments equal their replay`),
          of('journal', ['journal', 'amounts'], `${drift.entries} entries equal their replay`),
          of('books', ['books'], 'they sum to 0'),
        ]);
      }),
    );

  audit
    .command('drift')
    .description('compare replay, list, journal and settlement of every payment; prints only differences')
    .action(
      action(async ({ services }) => {
        const { payments, position, digest, entries, differences } = await driftOf(await services(), null);
        const said = `verified ${payments} payments up to position ${position ?? 'none'}, ${entries} entries, digest ${digest}`;
        return {
          json: { ok: differences.length === 0, payments, position, entries, digest, differences },
          text: [...differences.map(inWords), said].join('\n'),
          exitCode: differences.length === 0 ? 0 : 1,
        };
      }),
    );

  audit
    .command('prove')
    .description('write the events of a payment with proofs that they are in the signed log; verify.mjs checks them')
    .argument('<payment>', 'payment id', uuid)
    .requiredOption('--out <file>', 'where to write')
    .action(
      action(async ({ services }, paymentId: string, { out }: { out: string }) => {
        const all = await services();
        const { provePayment, openHead, headKeys } = await import('#ledger');
        const checks = await sealed(all);
        const proofs = await provePayment(all.seal, paymentId);
        const head = openHead(proofs.head, headKeys(proofs.head.split('\n')[0]!, all.keys));
        writeFileSync(out, `${JSON.stringify(proofs, null, 1)}\n`);
        const detail = `${proofs.events.length} events are in the log of ${head.size} events, signed at ${head.at}; written to ${out}`;
        return reported({ position: head.position, size: head.size, root: head.root.toString('base64') }, [
          ...checks,
          { name: 'inclusion', ok: true, detail },
        ]);
      }),
    );

  audit
    .command('consistency')
    .description('prove that the later of two signed heads only appended to the earlier one')
    .argument('<head>', 'file of a signed head')
    .argument('<head>', 'file of another')
    .option('--out <file>', 'write the proof; verify.mjs checks it')
    .action(
      action(async ({ services }, first: string, second: string, { out }: { out?: string }) => {
        const notes = [first, second].map(readHead);
        const all = await services();
        const { proveConsistency } = await import('#ledger');
        const { heads, ...proof } = await proveConsistency(all.seal, notes[0]!, notes[1]!);
        if (out !== undefined) writeFileSync(out, `${JSON.stringify(proof, null, 1)}\n`);
        const [before, after] = heads;
        const detail = `the ${after.size} events signed at ${after.at} begin with the ${before.size} signed at ${before.at}`;
        return reported({ position: after.position, size: after.size, root: after.root.toString('base64') }, [
          { name: 'consistency', ok: true, detail },
        ]);
      }),
    );
};

/** Brings the read models up to everything that has been appended, and compares them. */
const driftOf = async (all: Services, streams: number | null): Promise<DriftReport> => {
  const { findDrift } = await import('#ledger');
  const head = await all.store.head();
  const { paymentList, paymentRegister, journal } = all.projections;
  if (head !== null) for (const projection of [paymentList, paymentRegister, journal]) await projection.runUntil(head, { timeoutMs: CATCH_UP_MS });
  const { rows } = await all.pool.query<{ count: string }>('select count(*) as count from journal_payment');
  const bar = progressBar('payments', Number(rows[0]!.count));
  try {
    return await findDrift(all.seal, { streams, onProgress: (payments) => bar.update(payments) });
  } finally {
    bar.stop();
  }
};

/** Of so many that no screen holds them, the first say where to look. */
const SHOWN_DIFFERENCES = 5;
const inWords = ({ paymentId, position, message }: Difference): string =>
  `${paymentId === null ? '' : `payment ${paymentId}: `}${message}${position === null ? '' : ` (position ${position})`}`;

const readHead = (file: string): string => {
  try {
    return readFileSync(file, 'utf8');
  } catch (error) {
    throw new UsageError(`${file} cannot be read (${(error as NodeJS.ErrnoException).code})`);
  }
};

/** Brings the seal up to everything that has been appended. A log that cannot be sealed on is a finding, and what was sealed before can still be verified. */
const sealed = async ({ store, projections }: Services): Promise<Check[]> => {
  const head = await store.head();
  const { ProjectionFailed } = await import('#eventstore');
  try {
    if (head !== null) await projections.logSeal.runUntil(head, { timeoutMs: CATCH_UP_MS });
    return [];
  } catch (error) {
    if (!(error instanceof ProjectionFailed)) throw error;
    return [{ name: 'seal', ok: false, detail: error.message }];
  }
};

export const reported = (state: { position: string | null; size: number; root: string }, checks: readonly Check[]) => {
  const ok = checks.every((check) => check.ok);
  return {
    json: { ok, ...state, checks },
    text: `${table(
      ['CHECK', 'RESULT', 'DETAIL'],
      checks.map(({ name, ok: good, detail }) => [name, good ? 'ok' : 'FAILED', detail]),
    )}\n\n${state.size} events, root ${state.root}`,
    exitCode: ok ? (0 as const) : (1 as const),
  };
};

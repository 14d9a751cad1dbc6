/** `payfold cases`: an agency's decisions about its cases. The `referenceId` of a payment names its case. */
import type { Command } from 'commander';
import type { CaseChange } from '#accounts';
import { fields, loginName, moment, type Terminal, UsageError, uuid } from './terminal.js';

interface CaseOptions {
  readonly portal: string;
  readonly reference: string;
  readonly until?: string;
  readonly reason?: string;
}

const VERBS: readonly { verb: CaseChange['kind']; description: string }[] = [
  { verb: 'block', description: 'refuse payments for a case, also under references that look the same (403 PAYMENT_BLOCKED)' },
  { verb: 'hold', description: 'refuse payments for a case for a while, also under references that look the same (409 PAYMENT_HELD)' },
  { verb: 'allow', description: 'remove the restrictions of a case and of all references that look the same' },
];

export const addCases = (program: Command, { action }: Terminal): void => {
  const cases = program.command('cases').description('restrictions of single cases');
  for (const { verb: kind, description } of VERBS)
    cases
      .command(kind)
      .description(description)
      .requiredOption('--portal <portal>', 'portal id', uuid)
      .requiredOption('--reference <reference>', 'the referenceId of the payments concerned')
      .option('--until <time>', 'when it ends by itself: RFC 3339, or a day', moment)
      .option('--reason <reason>', 'why; for the record')
      .action(
        action(async ({ administration, directory, caughtUp, inForce }, { portal: portalId, reference: referenceId, until, reason }: CaseOptions) => {
          if (kind === 'allow' && until !== undefined) throw new UsageError('--until does not go with allow: hold the case until then instead');
          const change = { portalId, referenceId, kind, until: until ?? null, reason: reason ?? null };
          // The actor is `staff`: an agency decides here about payments. An `operator` decides about the installation.
          await caughtUp();
          const restricted = (await directory.restrictedCases(portalId, referenceId)).map((one) => one.referenceId);
          const { state, position } = await administration.as({ type: 'staff', id: loginName() }).restrictCase(change, restricted);
          await inForce(position);
          const { kind: restriction = 'none', until: end = null } = state.restriction ?? {};
          const lookAlikes = restricted.filter((one) => one !== referenceId);
          const row = { portalId, referenceId, restriction, until: end, reason: state.restriction ? change.reason : null, lookAlikes };
          return {
            json: row,
            text: fields([
              ['portal', portalId],
              ['reference', referenceId],
              ['restriction', row.until === null ? row.restriction : `${row.restriction} until ${row.until}`],
              ...(row.reason === null ? [] : [['reason', row.reason] as const]),
              ...lookAlikes.map((one) => [kind === 'allow' ? 'removed too' : 'restricted too', one] as const),
            ]),
          };
        }),
      );
};

/** `payfold keys`: API keys, each shown once when it is made. Also restores idempotency keys that the database lost. */
import type { Command } from 'commander';
import { lastKeyUses, type NewKey } from '#accounts';
import { type Answer, fields, inForceOrShown, table, type Terminal, uuid, wholeNumber } from './terminal.js';

/** Default of `--hours`. An idempotency key is kept this long (C20). */
const REBUILD_HOURS = 24;

interface AccountOption {
  readonly account: string;
}

export const addKeys = (program: Command, { action }: Terminal): void => {
  const keys = program.command('keys').description('API keys of an account; idempotency keys that the database lost');

  keys
    .command('issue')
    .description('issue a further key')
    .requiredOption('--account <account>', 'account id', uuid)
    .action(
      action(async ({ administration, inForce }, { account }: AccountOption) => {
        const issued = await administration.issueKey(account);
        await inForceOrShown(inForce(issued.position), 'API key', issued.apiKey, issued.keyId);
        return answer(issued);
      }),
    );

  keys
    .command('rotate')
    .description('end every key of the account and issue a new one; access tokens already issued stay valid until they expire')
    .requiredOption('--account <account>', 'account id', uuid)
    .action(
      action(
        async ({ administration, inForce }, { account }: AccountOption) => {
          const issued = await administration.rotateKeys(account);
          await inForceOrShown(inForce(issued.position), 'API key', issued.apiKey, issued.keyId);
          return answer(issued);
        },
        { asks: ({ account }) => `Every present key of account ${account} stops working.` },
      ),
    );

  keys
    .command('list')
    .description('list the keys of an account, without their secrets')
    .requiredOption('--account <account>', 'account id', uuid)
    .action(
      action(async ({ administration, pool }, { account }: AccountOption) => {
        const { keys: records } = await administration.account(account);
        const lastUses = await lastKeyUses(
          pool,
          records.map(({ keyId }) => keyId),
        );
        const rows = records.map(({ keyId, environment, lookupId, revoked }) => ({
          keyId,
          prefix: `pc_${environment}_${lookupId}`,
          status: revoked ? 'revoked' : 'active',
          lastUsedAt: lastUses.get(keyId) ?? null,
        }));
        return {
          json: rows,
          text: table(
            ['KEY', 'BEGINS', 'STATUS', 'LAST USED'],
            rows.map(({ keyId, prefix, status, lastUsedAt }) => [keyId, prefix, status, lastUsedAt ?? 'never']),
          ),
        };
      }),
    );

  keys
    .command('rebuild')
    .description('make lost rows of idempotency keys again from the intents of the last hours; every row that is right stays as it is')
    .option('--hours <hours>', 'how far back', wholeNumber, REBUILD_HOURS)
    .action(
      action(async (context, { hours }: { readonly hours: number }) => {
        const [{ rebuildKeys }, { answerEncoder }] = await Promise.all([import('#payments'), import('../answers.js')]);
        const { store, clock, pool, ownLog } = await context.services();
        ownLog.refuse();
        const found = await rebuildKeys({ store, clock, answers: answerEncoder }, pool, hours);
        return {
          json: found,
          text: fields([
            ['made again', String(found.restored)],
            ['corrected', String(found.corrected)],
            ['unchanged', String(found.unchanged)],
          ]),
        };
      }),
    );
};

const answer = ({ keyId, apiKey }: NewKey): Answer => ({
  json: { keyId, apiKey },
  text: `${fields([['key', keyId], ['API key', apiKey]])}\n\nThe API key is not kept and cannot be shown again.`, // prettier-ignore
});

/** `payfold keys`: API keys, each shown once when it is made. Also restores idempotency keys that the database lost. */
import type { Command } from 'commander';
import { findNamedKey, lastKeyUses, type NewKey } from '#accounts';
import { ServiceError } from '#kernel';
import { type Answer, anyText, fields, inForceOrShown, table, type Terminal, uuid, wholeNumber } from './terminal.js';

/** Default of `--hours`. An idempotency key is kept this long (C20). */
const REBUILD_HOURS = 24;

interface AccountOption {
  readonly account: string;
}

export const addKeys = (program: Command, { action }: Terminal): void => {
  const keys = program.command('keys').description('API keys of an account; idempotency keys that the database lost');

  keys
    .command('issue')
    .description('issue a further key; the present keys stay valid')
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
    .description(
      'end EVERY present key of the account on the next request and issue a new one; access tokens already issued stay valid until they expire. To change a key without a gap: issue, give the new key to the partner, then revoke the old key',
    )
    .requiredOption('--account <account>', 'account id', uuid)
    .action(
      action(
        async ({ administration, inForce }, { account }: AccountOption) => {
          const issued = await administration.rotateKeys(account);
          await inForceOrShown(inForce(issued.position), 'API key', issued.apiKey, issued.keyId);
          return answer(issued);
        },
        { asks: ({ account }) => `Every present key of account ${account} stops working on the next request.` },
      ),
    );

  keys
    .command('revoke')
    .description('end one key; the next request with it is refused. The other keys of the account and access tokens already issued stay valid')
    .argument('<key>', 'key id, or the beginning of the key as `keys list` shows it', anyText)
    .action(
      action(
        async ({ administration, inForce, caughtUp, pool }, name: string) => {
          await caughtUp();
          const found = await findNamedKey(pool, name);
          if (!found) throw new ServiceError('VALIDATION_ERROR', 'There is no such key.', {}, { status: 404 });
          const { keyId, accountId } = found;
          const { state, position } = await administration.revokeKey(accountId, keyId);
          await inForce(position);
          const left = state.keys.filter(({ revoked }) => !revoked).length;
          return {
            json: { keyId, accountId, status: 'revoked' },
            text: `Key ${keyId} of account ${accountId} is revoked. Keys that the account still has: ${left}.`,
          };
        },
        // The secret part of a key is not shown again.
        { asks: (name: string) => `Key ${name.split('_').slice(0, 3).join('_')} stops working on the next request.` },
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
        const { store, clock, pool, ownLog, personal } = await context.services({ mends: true });
        ownLog.refuse();
        const found = await rebuildKeys({ store, clock, personal, answers: answerEncoder }, pool, hours);
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

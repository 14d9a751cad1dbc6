/** `payfold keys`: API keys. A key is shown once, when it is made. */
import type { Command } from 'commander';
import { lastKeyUses, type NewKey } from '#accounts';
import { type Answer, fields, inForceOrShown, table, type Terminal, uuid } from './terminal.js';

interface AccountOption {
  readonly account: string;
}

export const addKeys = (program: Command, { action }: Terminal): void => {
  const keys = program.command('keys').description('API keys of an account');

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
};

const answer = ({ keyId, apiKey }: NewKey): Answer => ({
  json: { keyId, apiKey },
  text: `${fields([['key', keyId], ['API key', apiKey]])}\n\nThe API key is not kept and cannot be shown again.`, // prettier-ignore
});

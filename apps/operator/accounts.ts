/** `payfold accounts`: API accounts. */
import type { Command } from 'commander';
import type { Account, AccountFacts } from '#accounts';
import { type Answer, fields, table, type Terminal, uuid } from './terminal.js';

export const addAccounts = (program: Command, { action }: Terminal): void => {
  const accounts = program.command('accounts').description('API accounts: who may ask');

  accounts
    .command('create')
    .description('create an account')
    .requiredOption('--name <name>', 'what to call it')
    .action(
      action(async ({ administration, inForce }, { name }: { name: string }) => {
        const { state, position } = await administration.createAccount(name);
        await inForce(position);
        return answer(state);
      }),
    );

  accounts
    .command('list')
    .description('list all accounts')
    .action(
      action(async ({ directory, caughtUp }) => {
        await caughtUp();
        const rows = (await directory.accounts()).map(toRow);
        return {
          json: rows,
          text: table(
            ['ACCOUNT', 'NAME', 'STATUS'],
            rows.map(({ accountId, name, status }) => [accountId, name, status]),
          ),
        };
      }),
    );

  accounts
    .command('deactivate')
    .description('block all keys and access tokens of an account from the next request on')
    .argument('<account>', 'account id', uuid)
    .action(
      action(
        async ({ administration, inForce }, accountId: string) => {
          const { state, position } = await administration.deactivateAccount(accountId);
          await inForce(position);
          return answer(state);
        },
        { asks: (accountId) => `Account ${accountId} will be refused from the next request on.` },
      ),
    );

  accounts
    .command('reactivate')
    .description('admit a deactivated account again')
    .argument('<account>', 'account id', uuid)
    .action(
      action(async ({ administration, inForce }, accountId: string) => {
        const { state, position } = await administration.reactivateAccount(accountId);
        await inForce(position);
        return answer(state);
      }),
    );
};

const toRow = ({ accountId, name, status }: Account | AccountFacts) => ({ accountId, name, status });

const answer = (account: Account): Answer => {
  const row = toRow(account);
  return { json: row, text: fields([['account', row.accountId], ['name', row.name], ['status', row.status]]) }; // prettier-ignore
};

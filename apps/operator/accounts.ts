/** `payfold accounts`: API accounts. */
import type { Command } from 'commander';
import type { Account, AccountFacts } from '#accounts';
import { type Answer, fields, orNone, table, type Terminal, uuid, wholeNumber, withoutNone } from './terminal.js';

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

  accounts
    .command('retention')
    .description('after how many years personal data of the account’s payments is erased, counted from the newest event of each payment')
    .argument('<account>', 'account id', uuid)
    .requiredOption('--years <years>', 'whole years, 1 to 99; none: personal data is kept', orNone(wholeNumber))
    .action(
      action(
        async ({ administration, inForce }, accountId: string, { years }: RetentionOptions) => {
          const { state, position } = await administration.setRetention(accountId, withoutNone(years));
          await inForce(position);
          const json = { ...toRow(state), retentionYears: state.retentionYears };
          return { json, text: fields([...shown(json), ['retention', state.retentionYears === null ? 'none' : `${state.retentionYears} years`]]) };
        },
        {
          counts: async ({ administration, services }, accountId, { years }) => {
            if (years === 'none') return null;
            await administration.account(accountId);
            const [{ MAX_COUNTED }, { CountOverdue }] = await Promise.all([import('#privacy'), import('#privacy/module')]);
            const { queries } = await services();
            const tonight = await queries.execute(new CountOverdue(accountId, years));
            const many = tonight >= MAX_COUNTED ? `${MAX_COUNTED} payments or more` : tonight === 1 ? '1 payment' : `${tonight} payments`;
            return `Personal data of ${many} will be erased for ever tonight.`;
          },
        },
      ),
    );
};

interface RetentionOptions {
  readonly years: number | 'none';
}

const toRow = ({ accountId, name, status }: Account | AccountFacts) => ({ accountId, name, status });

const answer = (account: Account): Answer => {
  const row = toRow(account);
  return { json: row, text: fields(shown(row)) };
};

const shown = (row: ReturnType<typeof toRow>): [string, string][] => [
  ['account', row.accountId],
  ['name', row.name],
  ['status', row.status],
];

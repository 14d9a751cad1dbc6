/** `payfold merchant-accounts`: the accounts at processors through which portals charge. */
import { type Command, InvalidArgumentError, Option } from 'commander';
import {
  type BatchCutOff,
  type DisabledScope,
  isMerchantAccountId,
  type MerchantAccount,
  type MerchantAccountSettings,
  type MerchantAccountStatus,
  oneAtATime,
  openCredentials,
  type Portal,
  type Vendor,
  VENDORS,
} from '#accounts';
import { ServiceError } from '#kernel';
import type { Feed } from '#settlement';
import type { Context } from './context.js';
import { addMerchantCheck } from './merchant-check.js';
import { readSecret } from './secret-file.js';
import { type Answer, anyText, byOption, fields, orNone, table, type Terminal, UsageError, withoutNone } from './terminal.js';

interface SettingOptions {
  readonly name?: string;
  readonly cutOff?: string;
  readonly timeZone?: string;
  readonly endpoint?: string;
}

interface AddOptions extends SettingOptions {
  readonly gateway: Vendor;
  readonly environment: 'sandbox' | 'production';
  readonly credentialsFile: string;
}

interface DisableOptions {
  readonly everything?: boolean;
  readonly reason: string;
  readonly by: string;
}

export const merchantAccountId = (text: string): string => {
  if (!isMerchantAccountId(text))
    throw new InvalidArgumentError('It must be 2 to 40 lower-case letters, digits and hyphens, and begin with a letter or digit.');
  return text;
};

export const addMerchantAccounts = (program: Command, terminal: Terminal): void => {
  const { action } = terminal;
  const accounts = program.command('merchant-accounts').description('accounts at processors, through which portals charge');
  const verb = (name: string, description: string) =>
    accounts.command(name).description(description).argument('<account>', 'id of the merchant account', merchantAccountId);

  verb('add', 'enter an account; the processor is asked whether the credentials are right')
    .addOption(new Option('--gateway <gateway>', 'the processor').choices([...VENDORS]).makeOptionMandatory())
    .addOption(new Option('--environment <environment>', 'of the account').choices(['sandbox', 'production']).makeOptionMandatory())
    .requiredOption('--credentials-file <file>', CREDENTIALS)
    .option('--name <name>', "what to call it; otherwise the processor's name of it", anyText)
    .option('--cut-off <HH:MM>', 'when the day’s batch closes, with --time-zone', anyText)
    .option('--time-zone <zone>', 'IANA name of the time zone of --cut-off', anyText)
    .option('--endpoint <url>', 'another address of the processor (sandbox)', anyText)
    .action(
      action(async (context, id: string, options: AddOptions) => {
        const { administration, clock, caughtUp, directory, inForce, pool } = context;
        const { gateway, environment, cutOff, timeZone, endpoint = null } = options;
        if ((cutOff === undefined) !== (timeZone === undefined)) throw new UsageError('--cut-off and --time-zone belong together');
        const settings = { cutOff: cutOff === undefined ? null : { time: cutOff, timeZone: timeZone! }, endpoint };
        const account = { merchantAccount: id, gateway, environment, name: options.name ?? id, settings };
        const { askVendor, readCredentials } = await import('#gateways');
        const credentials = readCredentials(gateway, environment, await readSecret(options.credentialsFile));
        // Everything else is checked before the credentials are sent to an address.
        await administration.refuseNewMerchantAccount(account);
        const described = await askVendor({ ...account, repeats: null }, credentials, { clock });
        const name = options.name ?? (described.name.trim() || id);
        const { state, position } = await oneAtATime(pool, async () => {
          await caughtUp();
          const known = await directory.merchantAccounts();
          return administration.addMerchantAccount({ ...account, name }, described.externalId, credentials, known);
        });
        await inForce(position);
        return shown(state, [], []);
      }),
    );

  accounts
    .command('list')
    .description('list all merchant accounts')
    .action(
      action(async ({ directory, caughtUp }) => {
        await caughtUp();
        const rows = (await directory.merchantAccounts()).map(toRow);
        return {
          json: rows,
          text: table(
            ['ACCOUNT', 'GATEWAY', 'ENVIRONMENT', 'NAME', 'EXTERNAL ID', 'STATUS'],
            rows.map((row) => [row.merchantAccount, row.gateway, row.environment, row.name, row.externalId, STATUS[row.status]]),
          ),
        };
      }),
    );

  verb('show', 'show an account, and the portals that charge through it; never its credentials').action(
    action(async (context, id: string) => {
      await context.caughtUp();
      return answer(context, await context.administration.merchantAccount(id));
    }),
  );

  verb('set', 'change settings; those that are not named stay as they are')
    .option('--name <name>', 'what to call it', anyText)
    .option('--cut-off <HH:MM>', 'when the day’s batch closes, or none', orNone(anyText))
    .option('--time-zone <zone>', 'IANA name of the time zone of the cut-off', anyText)
    .option('--endpoint <url>', 'another address of the processor (sandbox), or none', orNone(anyText))
    .action(
      action(async (context, id: string, options: SettingOptions) => {
        const { administration, inForce } = context;
        const before = await administration.merchantAccount(id);
        const change = changeOf(before.settings, options);
        administration.refuseMerchantSettings(before, change);
        // The next calls go to the new address, so the account must be there.
        if (change.endpoint !== undefined && change.endpoint !== before.settings.endpoint)
          await requireVendor(context, { ...before, settings: { ...before.settings, endpoint: change.endpoint } });
        const { state, position } = await administration.changeMerchantSettings(id, change);
        await inForce(position);
        return answer(context, state);
      }),
    );

  verb('rotate', 'replace the credentials by others of the same account; running processes use them within seconds')
    .requiredOption('--credentials-file <file>', CREDENTIALS)
    .action(
      action(async (context, id: string, { credentialsFile }: { credentialsFile: string }) => {
        const { administration, clock, inForce } = context;
        const before = await administration.merchantAccount(id);
        const { askVendor, readCredentials } = await import('#gateways');
        const credentials = readCredentials(before.gateway, before.environment, await readSecret(credentialsFile));
        const { externalId } = await askVendor(before, credentials, { clock });
        const { state, position } = await administration.rotateCredentials(id, externalId, credentials);
        await inForce(position);
        return answer(context, state);
      }),
    );

  verb('disable', 'refuse new charges (503 GATEWAY_NOT_CONFIGURED) from the next request on; refunds and settlement go on')
    .option('--everything', 'call the processor no more: no refund, void, look-up or settlement either')
    .requiredOption('--reason <reason>', 'why')
    .addOption(byOption())
    .action(
      action(
        async (context, id: string, { everything = false, reason, by }: DisableOptions) => {
          const scope: DisabledScope = everything ? 'everything' : 'charges';
          const { state, position } = await context.administration.as(operator(by)).disableMerchantAccount(id, scope, reason);
          await context.inForce(position);
          return answer(context, state);
        },
        {
          asks: (id, { everything = false }) =>
            everything ? `Payments through ${id} can no longer be refunded, voided, resolved or settled until it is enabled again.` : null,
        },
      ),
    );

  verb('enable', 'admit new charges again; the processor is asked whether the credentials are right')
    .addOption(byOption())
    .action(
      action(async (context, id: string, { by }: { by: string }) => {
        const { administration, inForce } = context;
        await requireVendor(context, await administration.merchantAccount(id));
        const { state, position } = await administration.as(operator(by)).enableMerchantAccount(id);
        await inForce(position);
        return answer(context, state);
      }),
    );
  addMerchantCheck(verb, terminal);
};

const CREDENTIALS = 'JSON file, or - for standard input: {"apiLoginId", "transactionKey"} of authorize-net, {"secretKey"} of stripe';

const operator = (name: string) => ({ type: 'operator', id: name.trim() }) as const;

/**
 * Throws VALIDATION_ERROR if the processor refuses the account: wrong credentials, test mode, or a setting that a person must change first. Then
 * charges would fail, or could not be resolved.
 */
export const requireVendor = async ({ clock, keys }: Pick<Context, 'clock' | 'keys'>, account: MerchantAccount): Promise<void> => {
  const { askVendor } = await import('#gateways');
  const { externalId } = await askVendor(account, openCredentials(keys, account), { clock });
  if (externalId !== account.externalId)
    throw new ServiceError('VALIDATION_ERROR', `The credentials belong to another account: ${externalId}, not ${account.externalId}.`);
};

const changeOf = (
  { cutOff: before }: MerchantAccountSettings,
  { name, cutOff, timeZone, endpoint }: SettingOptions,
): Partial<MerchantAccountSettings & { readonly name: string }> => {
  if (name === undefined && cutOff === undefined && timeZone === undefined && endpoint === undefined)
    throw new UsageError('name at least one setting');
  return {
    ...(name !== undefined && { name }),
    ...((cutOff !== undefined || timeZone !== undefined) && { cutOff: cutOffOf(before, cutOff, timeZone) }),
    ...(endpoint !== undefined && { endpoint: withoutNone(endpoint) }),
  };
};

const cutOffOf = (before: BatchCutOff | null, cutOff: string | undefined, zone: string | undefined): BatchCutOff | null => {
  if (cutOff === 'none') {
    if (zone !== undefined) throw new UsageError('without a cut-off there is no --time-zone');
    return null;
  }
  const [time, timeZone] = [cutOff ?? before?.time, zone ?? before?.timeZone];
  if (time === undefined || timeZone === undefined) throw new UsageError('--cut-off and --time-zone belong together');
  return { time, timeZone };
};

const STATUS: Readonly<Record<MerchantAccountStatus, string>> = {
  active: 'active',
  charges_disabled: 'no new charges',
  disabled: 'disabled',
};

const toRow = ({ merchantAccount, gateway, environment, name, externalId, status }: MerchantAccount) => ({
  merchantAccount,
  gateway,
  environment,
  name,
  externalId,
  status,
});

const answer = async ({ directory, pool }: Context, account: MerchantAccount): Promise<Answer> => {
  const { feedsOf } = await import('#settlement');
  return shown(account, await directory.portals(), await feedsOf(pool, account.merchantAccount));
};

const shown = (account: MerchantAccount, all: readonly Portal[], feeds: readonly Feed[]): Answer => {
  const { merchantAccount, settings, lastCheck } = account;
  const portals = all
    .filter(({ gateway }) => gateway?.merchantAccount === merchantAccount || gateway?.feeMerchantAccount === merchantAccount)
    .map(({ portalId }) => portalId);
  const row = toRow(account);
  const { cutOff, endpoint } = settings;
  return {
    json: { ...row, settings, portals, lastCheck, feeds },
    text: fields([
      ['account', row.merchantAccount],
      ['gateway', row.gateway],
      ['environment', row.environment],
      ['name', row.name],
      ['external id', row.externalId],
      ['status', STATUS[row.status]],
      ['cut-off', cutOff ? `${cutOff.time} ${cutOff.timeZone}` : 'not known'],
      ...(endpoint === null ? [] : [['endpoint', endpoint] as const]),
      ...portals.map((portal) => ['portal', portal] as const),
      ...feeds.map(({ feed, lastOkAt, error }) => [feed, `last read ${lastOkAt ?? 'never'}${error === null ? '' : `; ${error}`}`] as const),
      ['last check', lastCheck ? lastCheck.guarantees.map(({ guarantee, result }) => `${guarantee} ${result}`).join(', ') : 'none'],
    ]),
  };
};

/** `payfold portals`: payment configurations of agencies, and the accounts that may use them. */
import { type Command, InvalidArgumentError, Option } from 'commander';
import { decimal } from '#kernel';
import {
  type ChargeMode,
  CHECKOUT_LOCALES,
  type CheckoutLocale,
  type Done,
  type FeeConfig,
  type GatewayChoice,
  LIMIT_SCOPES,
  type LimitScope,
  MAX_CODING_KEYS,
  NO_FEE,
  type Portal,
  type PortalRules,
  RULE_BRANDS,
  type RuleBrand,
  type VelocityLimits,
  VENDORS,
} from '#accounts';
import type { Context } from './context.js';
import { merchantAccountId, requireVendor } from './merchant-accounts.js';
import { type Answer, anyText, each, fields, orNone, table, type Terminal, UsageError, uuid, wholeNumber, withoutNone } from './terminal.js';

interface GatewayOptions {
  readonly gateway: 'simulator' | 'none' | (typeof VENDORS)[number];
  readonly principal?: string;
  readonly fee?: string;
}

interface FeeOptions {
  readonly feeFlatCents?: number;
  readonly feePercentBps?: number;
  readonly feeMinCents?: number;
  readonly feeMaxCents?: number | 'none';
  readonly chargeMode?: ChargeMode;
}

interface CreateOptions extends FeeOptions, GatewayOptions {
  readonly account: readonly string[];
  readonly name: string;
}

interface LimitOptions {
  readonly scope: LimitScope;
  readonly attempts?: number;
  readonly declines?: number;
  readonly windowSeconds: number;
  readonly blockSeconds?: number;
}

interface RuleOptions {
  readonly minCents?: number | 'none';
  readonly maxCents?: number | 'none';
  readonly brands?: readonly RuleBrand[] | 'none';
}

interface CheckoutOptions {
  readonly enable?: boolean;
  readonly disable?: boolean;
  readonly allow?: readonly string[];
  readonly requireSignedIntake?: boolean;
  readonly agencyName?: string;
  /** A colour, or the word none. */
  readonly colour?: string;
  readonly locale?: CheckoutLocale | 'none';
  readonly stageSecret?: boolean;
  readonly activateSecret?: boolean;
  readonly testAddress?: readonly string[];
}

export const addPortals = (program: Command, { action }: Terminal): void => {
  const portals = program.command('portals').description("agencies' payment configurations");

  withFeeOptions(
    portals
      .command('create')
      .description('create a portal; it belongs to the first account, further ones get access')
      .requiredOption('--account <account>', 'account id; may be repeated', each(uuid))
      .requiredOption('--name <name>', 'what to call it')
      .addOption(gatewayOption().default('simulator'))
      .addOption(principalOption())
      .addOption(feeAccountOption()),
  ).action(
    action(async (context, options: CreateOptions) => {
      const { administration, inForce } = context;
      const { account: accountIds, name } = options;
      const gateway = await gatewayChoice(context, options);
      const { state, position, signingSecret } = await administration.createPortal({
        accountIds,
        name,
        gateway,
        fee: { ...NO_FEE, ...toFee(options) },
      });
      await inForce(position);
      const { portalId } = state;
      return {
        json: { portalId, signingSecret },
        text: `${fields([['portal', portalId], ['signing secret', signingSecret]])}\n\nThe signing secret cannot be shown again.`, // prettier-ignore
      };
    }),
  );

  portals
    .command('list')
    .description('list all portals')
    .action(
      action(async ({ directory, caughtUp }) => {
        await caughtUp();
        const rows = await directory.portals();
        return {
          json: rows.map(toRow),
          text: table(['PORTAL', 'NAME', 'OWNER', 'GATEWAY', 'FEE'], rows.map((portal) => [portal.portalId, portal.name, portal.ownerAccountId, gatewayName(portal), feeText(portal.fee)])), // prettier-ignore
        };
      }),
    );

  portals
    .command('show')
    .description('show the whole configuration of a portal')
    .argument('<portal>', 'portal id', uuid)
    .action(action(async ({ administration }, portalId: string) => answer(await administration.portal(portalId))));

  withFeeOptions(
    portals
      .command('set-fee')
      .description('change the service fee from the next charge on; parts that are not named stay as they are')
      .argument('<portal>', 'portal id', uuid),
  ).action(
    action(async ({ administration, inForce }, portalId: string, options: FeeOptions) => {
      const change = toFee(options);
      if (Object.keys(change).length === 0) throw new UsageError('name at least one part of the fee');
      const { state, position } = await administration.changeFee(portalId, change);
      await inForce(position);
      return answer(state);
    }),
  );

  portals
    .command('set-gateway')
    .description('set the gateway of a portal, or take it away (503 GATEWAY_NOT_CONFIGURED)')
    .argument('<portal>', 'portal id', uuid)
    .addOption(gatewayOption().makeOptionMandatory())
    .addOption(principalOption())
    .addOption(feeAccountOption())
    .option('--disable-checkout', 'turn hosted checkout off too: it takes card numbers, which not every gateway takes')
    .action(
      action(async (context, portalId: string, options: GatewayOptions & { disableCheckout?: boolean }) => {
        const { administration, inForce } = context;
        await administration.portal(portalId);
        const gateway = await gatewayChoice(context, options);
        const { state, position } = await administration.setGateway(portalId, gateway, options.disableCheckout);
        await inForce(position);
        return answer(state);
      }),
    );

  portals
    .command('grant')
    .description('let an account use a portal')
    .argument('<portal>', 'portal id', uuid)
    .requiredOption('--account <account>', 'account id', uuid)
    .action(
      action(async ({ administration, inForce }, portalId: string, { account }: { account: string }) => {
        const { state, position } = await administration.grantAccess(portalId, account);
        await inForce(position);
        return answer(state);
      }),
    );

  portals
    .command('revoke')
    .description('refuse new payments of an account on a portal; existing ones stay readable and refundable')
    .argument('<portal>', 'portal id', uuid)
    .requiredOption('--account <account>', 'account id', uuid)
    .action(
      action(
        async ({ administration, inForce }, portalId: string, { account }: { account: string }) => {
          const { state, position } = await administration.revokeAccess(portalId, account);
          await inForce(position);
          return answer(state);
        },
        { asks: (portalId, { account }) => `Account ${account} can no longer charge on portal ${portalId}.` },
      ),
    );

  portals
    .command('set-limits')
    .description('limit attempts or declines of one card or case within a window; with neither, the scope is not limited any more')
    .argument('<portal>', 'portal id', uuid)
    .addOption(new Option('--scope <scope>', 'what is counted').choices([...LIMIT_SCOPES]).makeOptionMandatory())
    .option('--attempts <number>', 'attempts that pass within the window', wholeNumber)
    .option('--declines <number>', 'declines that pass within the window', wholeNumber)
    .requiredOption('--window-seconds <seconds>', 'length of the window', wholeNumber)
    .option('--block-seconds <seconds>', 'scope card with --declines: how long the card is blocked then (409 DECLINE_BLOCKED)', wholeNumber)
    .action(
      action(async ({ administration, inForce }, portalId: string, options: LimitOptions) => {
        const { scope, windowSeconds, attempts = null, declines = null, blockSeconds = null } = options;
        const { state, position } = await administration.setLimits(portalId, scope, { attempts, declines, windowSeconds, blockSeconds });
        await inForce(position);
        return answer(state);
      }),
    );

  portals
    .command('set-rules')
    .description('say which payments are allowed (else 422 PAYMENT_NOT_ALLOWED); rules that are not named stay as they are')
    .argument('<portal>', 'portal id', uuid)
    .option('--min-cents <cents>', 'smallest amountCents, or none', orNone(wholeNumber))
    .option('--max-cents <cents>', 'largest amountCents, or none', orNone(wholeNumber))
    .option('--brands <brands>', 'card brands allowed, separated by commas, or none for all', orNone(brandList))
    .action(
      action(async ({ administration, inForce }, portalId: string, { minCents, maxCents, brands }: RuleOptions) => {
        const change: Partial<PortalRules> = named({ minCents: withoutNone(minCents), maxCents: withoutNone(maxCents), brands: withoutNone(brands) });
        if (Object.keys(change).length === 0) throw new UsageError('name at least one rule');
        const { state, position } = await administration.setRules(portalId, change);
        await inForce(position);
        return answer(state);
      }),
    );

  portals
    .command('set-coding')
    .description('copy these keys of line metadata to the coding of each line, for the general ledger, from the next charge on')
    .argument('<portal>', 'portal id', uuid)
    .requiredOption('--keys <keys>', `keys separated by commas, at most ${MAX_CODING_KEYS}, or none`, orNone(keyList))
    .action(
      action(async ({ administration, inForce }, portalId: string, { keys }: { keys: readonly string[] | 'none' }) => {
        const { state, position } = await administration.setCoding(portalId, withoutNone(keys) ?? []);
        await inForce(position);
        return answer(state);
      }),
    );

  portals
    .command('checkout')
    .description('settings of hosted checkout; those that are not named stay as they are')
    .argument('<portal>', 'portal id', uuid)
    .addOption(new Option('--enable', 'turn it on').conflicts('disable'))
    .option('--disable', 'turn it off')
    .option('--allow <url>', 'https://host[:port][/path-prefix] that payers may return to; may be repeated, replaces the list', each(anyText))
    .option('--require-signed-intake', 'accept signed intake only')
    .option('--no-require-signed-intake', 'accept unsigned intake again')
    .option('--agency-name <name>', 'name that payers see')
    .option('--colour <#rrggbb>', "colour of the pages' head and button, or none", orNone(anyText))
    .addOption(
      new Option('--locale <locale>', 'language of payers whose partner names none; none: the browser decides').choices([
        ...CHECKOUT_LOCALES,
        'none',
      ]),
    )
    .option('--stage-secret', 'make a new signing secret, shown once: links signed with it are taken, returns still carry the old one')
    .addOption(new Option('--activate-secret', 'sign with the staged secret from now on; the old one counts no more').conflicts('stageSecret'))
    .option('--test-address <url...>', 'change nothing, and say whether payers could be sent to these addresses', each(anyText))
    .action(
      action(async ({ administration, inForce }, portalId: string, options: CheckoutOptions) => {
        const { enable, disable, allow, requireSignedIntake, agencyName, stageSecret, activateSecret, testAddress } = options;
        const change = {
          ...(enable || disable ? { enabled: enable === true } : {}),
          ...named({ allow, requireSignedIntake, agencyName, colour: withoutNone(options.colour), locale: withoutNone(options.locale) }),
        };
        const changes = Object.keys(change).length > 0 || stageSecret || activateSecret;
        if (testAddress) {
          if (changes) throw new UsageError('--test-address changes nothing; ask it by itself');
          return addressAnswer(await administration.portal(portalId), testAddress);
        }
        if (!changes) throw new UsageError('name at least one setting');
        let done: Done<Portal> | null = null;
        if (Object.keys(change).length > 0) done = await administration.configureCheckout(portalId, change);
        if (activateSecret) done = await administration.activateSigningSecret(portalId);
        const staged = stageSecret ? await administration.stageSigningSecret(portalId) : null;
        const { state, position } = (staged ?? done)!;
        await inForce(position);
        return staged ? withSecret(answer(state), staged.signingSecret) : answer(state);
      }),
    );
};

const withSecret = ({ json, text }: Answer, signingSecret: string): Answer => ({
  json: { ...(json as object), signingSecret },
  text: `${text}\n${fields([['staged secret', signingSecret]])}\n\nThe staged secret cannot be shown again.`,
});

/** Shows for each address whether an intake would accept it. Exit code 1 if one is refused. */
const addressAnswer = async ({ portalId, checkout }: Portal, addresses: readonly string[]): Promise<Answer> => {
  // Only this command needs the checkout's pages, so load them only here.
  const { vetAddress } = await import('#checkout');
  const rows = addresses.map((address) => {
    const vetted = vetAddress(address, checkout.allow);
    return vetted.accepted
      ? { address, accepted: true, entry: vetted.entry, reason: null }
      : { address, accepted: false, entry: null, reason: vetted.why };
  });
  return {
    json: { portalId, addresses: rows },
    text: table(['ADDRESS', 'ACCEPTED', 'WHY'], rows.map(({ address, accepted, entry, reason }) => [address, accepted ? 'yes' : 'no', accepted ? `fits ${entry}` : reason!])), // prettier-ignore
    exitCode: rows.every(({ accepted }) => accepted) ? 0 : 1,
  };
};

const gatewayOption = () => new Option('--gateway <gateway>', 'where charges go').choices([...VENDORS, 'simulator', 'none']);
const principalOption = () => new Option('--principal <account>', 'merchant account of the principal, at a processor').argParser(merchantAccountId);
const feeAccountOption = () =>
  new Option('--fee <account>', 'merchant account of the service fee; default: --principal').argParser(merchantAccountId);

/** The gateway that the options name. The processor is asked about each merchant account. */
const gatewayChoice = async (context: Context, { gateway, principal, fee = principal }: GatewayOptions): Promise<GatewayChoice> => {
  if (gateway === 'simulator' || gateway === 'none') {
    if (gateway === 'simulator' && context.config.environment === 'production')
      throw new UsageError('production has no simulator: name another --gateway, or none');
    if (principal !== undefined || fee !== undefined) throw new UsageError(`--principal and --fee belong to ${VENDORS.join(' and ')}`);
    return gateway;
  }
  if (principal === undefined) throw new UsageError(`--gateway ${gateway} needs --principal`);
  const choice = { gateway, principal, fee: fee! };
  await context.administration.refuseGateway(choice);
  for (const id of new Set([principal, choice.fee])) await requireVendor(context, await context.administration.merchantAccount(id));
  return choice;
};

const withFeeOptions = (command: Command): Command =>
  command
    .option('--fee-flat-cents <cents>', 'flat part', wholeNumber)
    .option('--fee-percent-bps <bps>', 'percentage in hundredths of a percent: 250 is 2.5 %', wholeNumber)
    .option('--fee-min-cents <cents>', 'least fee', wholeNumber)
    .option('--fee-max-cents <cents>', 'highest fee, or none', orNone(wholeNumber))
    .addOption(new Option('--charge-mode <mode>', 'whether the fee is a charge of its own').choices(['separate', 'combined']));

const toFee = ({ feeFlatCents, feePercentBps, feeMinCents, feeMaxCents, chargeMode }: FeeOptions): Partial<FeeConfig> =>
  named({ flatCents: feeFlatCents, percentBps: feePercentBps, minCents: feeMinCents, maxCents: withoutNone(feeMaxCents), chargeMode });

/** Only the settings that were given. An `undefined` would overwrite the present value. */
const named = <T extends object>(options: T): { [K in keyof T]?: Exclude<T[K], undefined> } =>
  Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined)) as { [K in keyof T]?: Exclude<T[K], undefined> };

const brandList = (text: string): RuleBrand[] =>
  text.split(',').map((word) => {
    const brand = RULE_BRANDS.find((known) => known === word.trim().toLowerCase());
    if (!brand) throw new InvalidArgumentError(`Brands are ${RULE_BRANDS.join(', ')}.`);
    return brand;
  });

const keyList = (text: string): string[] => text.split(',').map((key) => key.trim());

/** The settings of a portal without its signing secret. */
const toRow = (portal: Portal) => {
  const { portalId, name, ownerAccountId, access, fee, feeVersion, limits, rules, coding, checkout } = portal;
  const accounts = Object.entries(access).map(([accountId, state]) => ({ accountId, access: state }));
  const secretStaged = portal.stagedSecret !== null;
  const gateway = gatewayName(portal);
  // At the simulator, each portal has accounts of its own.
  const merchantAccounts =
    portal.gateway && gateway !== 'simulator' ? { principal: portal.gateway.merchantAccount, fee: portal.gateway.feeMerchantAccount } : null;
  const charges = { gateway, ...(merchantAccounts && { merchantAccounts }) };
  return { portalId, name, ownerAccountId, accounts, ...charges, fee, feeVersion, limits, rules, coding, checkout, secretStaged };
};

const gatewayName = ({ gateway }: Portal): string => gateway?.gateway ?? 'none';

const answer = (portal: Portal): Answer => {
  const row = toRow(portal);
  const { limits, rules, coding, checkout } = row;
  return {
    json: row,
    text: fields([
      ['portal', row.portalId],
      ['name', row.name],
      ...row.accounts.map(({ accountId, access }): [string, string] => [
        accountId === row.ownerAccountId ? 'owner' : 'account',
        access === 'granted' ? accountId : `${accountId} (revoked: may only read)`,
      ]),
      ['gateway', row.gateway],
      ...(row.merchantAccounts
        ? ([
            ['merchant account', row.merchantAccounts.principal],
            ['fee account', row.merchantAccounts.fee],
          ] as const)
        : []),
      ['fee', `${feeText(row.fee)} (version ${row.feeVersion})`],
      ...LIMIT_SCOPES.map((scope): [string, string] => [`limits per ${scope}`, limitText(limits[scope])]),
      ['rules', ruleText(rules)],
      ['coding keys', coding.join(', ') || 'none'],
      ['hosted checkout', checkout.enabled ? `on${checkout.requireSignedIntake ? ', signed intake only' : ''}` : 'off'],
      ...(checkout.agencyName === null ? [] : [['agency', checkout.agencyName] as const]),
      ...(checkout.colour === null ? [] : [['colour', checkout.colour] as const]),
      ...(checkout.locale === null ? [] : [['language', checkout.locale] as const]),
      ...(row.secretStaged ? [['signing secret', 'a new one is staged'] as const] : []),
      ...checkout.allow.map((address) => ['allowed address', address] as const),
    ]),
  };
};

const dollars = (cents: number) => `$${decimal(cents)}`;

const feeText = ({ flatCents, percentBps, minCents, maxCents, chargeMode }: FeeConfig): string => {
  const bounds = `${minCents > 0 ? `, at least ${dollars(minCents)}` : ''}${maxCents === null ? '' : `, at most ${dollars(maxCents)}`}`;
  return `${decimal(percentBps)} % + ${dollars(flatCents)}${bounds}, ${chargeMode}`;
};

const limitText = (limits: VelocityLimits | null): string => {
  if (!limits) return 'off';
  const { attempts, declines, windowSeconds, blockSeconds } = limits;
  const counts = [attempts === null ? null : `${attempts} attempts`, declines === null ? null : `${declines} declines`].filter(
    (part) => part !== null,
  );
  return `${counts.join(', ')} in ${windowSeconds} s${blockSeconds === null ? '' : `, then blocked for ${blockSeconds} s`}`;
};

const ruleText = ({ minCents, maxCents, brands }: PortalRules): string => {
  const parts = [
    minCents === null ? null : `at least ${dollars(minCents)}`,
    maxCents === null ? null : `at most ${dollars(maxCents)}`,
    brands?.join(', ') ?? null,
  ];
  return parts.filter((part) => part !== null).join('; ') || 'none';
};

/** `payfold merchant-accounts check`: asks the processor itself whether it keeps what Payfold relies on. */
import { type Command, InvalidArgumentError } from 'commander';
import { credentialsRefOf, type Guarantee, type MerchantAccount, openCredentials, type Vendor } from '#accounts';
import type { CheckedGuarantee, CheckTerms } from '#gateways';
import { ServiceError } from '#kernel';
import { readSecret } from './secret-file.js';
import { type Answer, table, type Terminal, UsageError, uuid, wholeNumber } from './terminal.js';

interface CheckOptions {
  readonly quick?: boolean;
  readonly amountCents?: number;
  readonly cardFile?: string;
  readonly token?: string;
  readonly resume?: string;
}

type Card = Pick<CheckTerms, 'instrument' | 'last4'>;

/** Cards of the processors' sandboxes, which their documents name. */
const SANDBOX_CARD = { number: '4111111111111111', expiry: '12/40', cvv: '900' } as const;
const SANDBOX_TOKEN = 'pm_card_visa';
const DECLINED_TOKEN = 'pm_card_chargeDeclined';
const UNKNOWN_TOKEN = 'pm_0NoSuchPaymentMethod';
/** The postal code that Authorize.Net's sandbox declines. */
const DECLINED_ZIP = '46282';
const TOKEN_LAST4 = '4242';

const token = (text: string): string => {
  if (!/^pm_\w{1,250}$/.test(text)) throw new InvalidArgumentError('It must be the id of a payment method, pm_….');
  return text;
};

export const addMerchantCheck = (verb: (name: string, description: string) => Command, { action }: Terminal): void => {
  verb('check', 'ask the processor whether it keeps what Payfold relies on; in the sandbox, with charges. Exit 1 if a guarantee is broken')
    .option('--quick', 'only read, as production allows')
    .option('--amount-cents <cents>', 'amount of each charge; default 101', wholeNumber)
    .option('--card-file <file>', 'JSON file, or - for standard input: {"number", "expiry": "MM/YY", "cvv"}; default: the test card of the sandbox')
    .option('--token <token>', 'payment method of stripe; default pm_card_visa', token)
    .option('--resume <run>', 'go on with a run whose batch has closed', uuid)
    .action(
      action(async (context, id: string, { quick = false, amountCents, cardFile, token: method, resume }: CheckOptions) => {
        const { administration, clock, ids, inForce, keys } = context;
        if (quick && (amountCents ?? cardFile ?? method ?? resume) !== undefined) throw new UsageError('--quick makes no charge, and stands alone');
        if (cardFile !== undefined && method !== undefined) throw new UsageError('name a --card-file or a --token');
        const account = await administration.merchantAccount(id);
        const { gateway, merchantAccount, environment, openCheck } = account;
        if (environment === 'production' && !quick)
          throw new UsageError('the check makes charges; an account of production is checked with --quick only');
        if (resume !== undefined && openCheck?.runId !== resume)
          throw new ServiceError('VALIDATION_ERROR', `The check that waits for its batch is ${openCheck?.runId ?? 'none'}, not ${resume}.`);
        const { checkGuarantees, createVendorGateway, LEAST_CHECK_CENTS } = await import('#gateways');
        if (amountCents !== undefined && amountCents < LEAST_CHECK_CENTS)
          throw new UsageError(`--amount-cents must be at least ${LEAST_CHECK_CENTS}`);
        const runId = resume ?? ids.uuid();
        const credentials = openCredentials(keys, account);
        const terms = await termsOf(gateway, runId, amountCents ?? LEAST_CHECK_CENTS, cardFile, method);
        const ports = {
          open: () => createVendorGateway(account, credentials, { clock }),
          account: { gateway, merchantAccount, credentialsRef: credentialsRefOf(merchantAccount), environment },
          cutOffZone: account.settings.cutOff?.timeZone ?? null,
          clock,
        };
        const checked = await checkGuarantees(ports, terms, { quick, before: resume === undefined ? null : openCheck!.guarantees }, (one) =>
          process.stderr.write(`${one.guarantee} ${one.result}\n`),
        );
        const { position } = await administration.recordMerchantCheck(id, runId, checked.map(withoutCalls));
        await inForce(position);
        return answerOf(account, runId, checked);
      }),
    );
};

const withoutCalls = ({ guarantee, result, detail }: CheckedGuarantee): Guarantee => ({ guarantee, result, detail });

/** The terms of a run. `file`, `method`: its card or its token; absent: those of the sandbox. */
export const termsOf = async (gateway: Vendor, runId: string, amountCents: number, file?: string, method?: string): Promise<CheckTerms> => {
  const { Secret } = await import('#gateways');
  return {
    runId,
    amountCents,
    ...(await cardOf(gateway, file, method)),
    declined: await declinedBy(gateway),
    ...(gateway === 'stripe' && { unknown: { type: 'card_token', token: new Secret(UNKNOWN_TOKEN) } as const }),
  };
};

export const answerOf = (
  { merchantAccount }: Pick<MerchantAccount, 'merchantAccount'>,
  runId: string,
  checked: readonly CheckedGuarantee[],
): Answer => {
  const broken = checked.filter(({ result }) => result === 'broken');
  const calls = broken.flatMap((one) => [`${one.guarantee}:`, ...one.calls.flatMap(({ call, answer }) => [`  ${call}`, `    ${answer}`])]);
  const isOpen = checked.some(({ result }) => result === 'later');
  return {
    json: {
      merchantAccount,
      runId,
      guarantees: checked.map(withoutCalls),
      calls: Object.fromEntries(broken.map((one) => [one.guarantee, one.calls])),
    },
    text: [
      table(
        ['GUARANTEE', 'RESULT', 'DETAIL'],
        checked.map(({ guarantee, result, detail }) => [guarantee, result, detail]),
      ),
      ...(calls.length > 0 ? ['', ...calls] : []),
      ...(isOpen ? ['', `after the batch has closed: payfold merchant-accounts check ${merchantAccount} --resume ${runId}`] : []),
    ].join('\n'),
    exitCode: broken.length > 0 ? 1 : 0,
  };
};

const cardOf = async (gateway: Vendor, file: string | undefined, method: string | undefined): Promise<Card> => {
  const { Secret } = await import('#gateways');
  if (gateway === 'stripe') {
    if (file !== undefined) throw new UsageError('stripe takes a --token, and no card');
    return { instrument: { type: 'card_token', token: new Secret(method ?? SANDBOX_TOKEN) }, last4: TOKEN_LAST4 };
  }
  if (method !== undefined) throw new UsageError(`${gateway} takes a --card-file, and no token`);
  const { number, expiry, cvv } = file === undefined ? SANDBOX_CARD : readCard(await readSecret(file, 'card'));
  const [month, year] = expiry.split('/').map(Number) as [number, number];
  return {
    instrument: { type: 'card', number: new Secret(number), expiry: { month, year: 2_000 + year }, cvv: new Secret(cvv) },
    last4: number.slice(-4),
  };
};

/** Never repeats what is in the file. */
const readCard = (text: string): { readonly number: string; readonly expiry: string; readonly cvv: string } => {
  const refuse = (why: string): never => {
    throw new ServiceError('VALIDATION_ERROR', `The card file ${why}.`);
  };
  let card: Readonly<Record<string, unknown>> = {};
  try {
    card = Object(JSON.parse(text)) as typeof card;
  } catch {
    return refuse('is not JSON');
  }
  const field = (name: string, pattern: RegExp): string => {
    const value = card[name];
    return typeof value === 'string' && pattern.test(value) ? value : refuse(`has no usable ${name}`);
  };
  return { number: field('number', /^\d{12,19}$/), expiry: field('expiry', /^(?:0[1-9]|1[0-2])\/\d{2}$/), cvv: field('cvv', /^\d{3,4}$/) };
};

const declinedBy = async (gateway: Vendor): Promise<CheckTerms['declined']> => {
  const { Secret } = await import('#gateways');
  if (gateway === 'stripe') return { instrument: { type: 'card_token', token: new Secret(DECLINED_TOKEN) } };
  const { instrument } = await cardOf(gateway, undefined, undefined);
  return { instrument, payer: { address: { zip: DECLINED_ZIP } } };
};

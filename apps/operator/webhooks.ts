/**
 * `payfold webhooks`: endpoints of partners, the state of deliveries, and forwarding to a development server. Endpoints get refunds by staff and
 * disputes.
 */
import { type Command, InvalidArgumentError, Option } from 'commander';
import { parseUrl, ServiceError } from '#kernel';
import type { AttemptRow, DeliveryRow, DeliveryState, Endpoint, Endpoints, EndpointSecret, Forwarded, StaffDeps } from '#webhooks';
import type { Context } from './context.js';
import { type Answer, fields, loginName, rowLimit, table, type Terminal, UsageError, uuid, wantsJson, personName } from './terminal.js';

interface ByOption {
  readonly by?: string;
}

interface ListOptions {
  readonly state?: DeliveryState;
  readonly account?: string;
  readonly endpoint?: string;
  readonly payment?: string;
  readonly limit: number;
}

const DEFAULT_ROWS = 50;
const MAX_ROWS = 1_000;
const STATES: readonly DeliveryState[] = ['pending', 'in_flight', 'delivered', 'held', 'canceled'];

/** Loads the lib of webhooks for a command. Makes its tables if they are missing after an upgrade. */
const open = async (context: Context, by?: string): Promise<typeof import('#webhooks') & { deps: StaffDeps; endpoints: Endpoints }> => {
  const webhooks = await import('#webhooks');
  const { pool, store, clock, ids, keys, config } = context;
  await context.prepare(webhooks.webhookMigrations);
  const { operator } = await import('#payments');
  const { actor } = operator(by ?? loginName(), ids.uuid());
  const deps = { tables: webhooks.postgresStaffTables(pool), store, clock, ids, actor };
  return { ...webhooks, deps, endpoints: new webhooks.Endpoints({ ...deps, keys, sender: senderOf(webhooks, config, clock) }) };
};

const senderOf = ({ createSender, createResolve }: typeof import('#webhooks'), { webhooks: settings }: Context['config'], clock: Context['clock']) =>
  createSender({ settings, resolve: createResolve(settings.dnsServers, clock), clock });

export const addWebhooks = (program: Command, terminal: Terminal): void => {
  const webhooks = program.command('webhooks').description('notifications of refunds by staff and of disputes');
  addEndpoints(webhooks.command('endpoints').description('where an account is told'), terminal);
  addDeliveries(webhooks.command('deliveries').description('what became of each notification'), terminal);
  addListen(webhooks, terminal);
};

const by = (command: Command) => command.option('--by <name>', 'who does it; otherwise who is logged in', personName);

const addEndpoints = (endpoints: Command, { action }: Terminal): void => {
  by(endpoints.command('add'))
    .description('register a URL; it is told what happens from now on')
    .requiredOption('--account <account>', 'account id', uuid)
    .requiredOption('--url <url>', 'https URL of a public host')
    .option('--description <text>', 'what it is for')
    .action(
      action(async (context, { account, url, description, by }: { account: string; url: string; description?: string } & ByOption) => {
        const { endpoints } = await open(context, by);
        await context.administration.account(account);
        return secretAnswer(await endpoints.add(account, url, description ?? null));
      }),
    );

  endpoints
    .command('list')
    .description('endpoints with their state; never their secrets')
    .option('--account <account>', 'of this account only', uuid)
    .action(
      action(async (context, { account }: { account?: string }) => {
        const { endpoints } = await open(context);
        const rows = await endpoints.list(account ?? null);
        return {
          json: rows,
          text: table(
            ['ENDPOINT', 'ACCOUNT', 'STATUS', 'FAILURES', 'SECRET', 'URL'],
            rows.map((row) => [row.endpointId, row.accountId, row.status, String(row.consecutiveFailures), secretText(row), row.url]),
          ),
        };
      }),
    );

  const change = (verb: 'pause' | 'resume' | 'disable', description: string, asks?: (endpointId: string, options: ByOption) => string) =>
    by(endpoints.command(verb))
      .description(description)
      .argument('<endpoint>', 'endpoint id', uuid)
      .action(
        action(
          async (context, endpointId: string, options: ByOption) =>
            endpointAnswer(await (await open(context, options.by)).endpoints[verb](endpointId)),
          asks ? { asks } : {},
        ),
      );
  change('pause', 'send nothing to an endpoint; what happens is kept for it');
  change('resume', 'send what was kept, and what happens from now on');
  change(
    'disable',
    'end an endpoint for good; what waits for it is cancelled',
    (id) => `Endpoint ${id} is told nothing any more, and what waits for it is cancelled.`,
  );

  by(endpoints.command('stage-secret'))
    .description('make a new secret, to be accepted by the receiver before it is activated; signing does not change')
    .argument('<endpoint>', 'endpoint id', uuid)
    .action(
      action(async (context, endpointId: string, options: ByOption) => {
        const { endpoints } = await open(context, options.by);
        const made = await endpoints.stageSecret(endpointId);
        return secretAnswer({ ...made, url: (await endpoints.find(endpointId)).url });
      }),
    );

  by(endpoints.command('activate-secret'))
    .description('sign with the staged secret from the next attempt on; the one before it is retired')
    .argument('<endpoint>', 'endpoint id', uuid)
    .action(
      action(async (context, endpointId: string, options: ByOption) =>
        endpointAnswer(await (await open(context, options.by)).endpoints.activateSecret(endpointId)),
      ),
    );

  endpoints
    .command('check')
    .description('whether an endpoint can be reached: URL rules, name, TCP and TLS, and no POST')
    .argument('[endpoint]', 'endpoint id', uuid)
    .option('--url <url>', 'a URL that is not registered')
    .action(
      action(async (context, endpointId: string | undefined, { url }: { url?: string }) => {
        if ((endpointId === undefined) === (url === undefined)) throw new UsageError('name an endpoint or a --url');
        const opened = await open(context);
        const target = url ?? (await opened.endpoints.find(endpointId!)).url;
        const { ok, steps } = await senderOf(opened, context.config, context.clock).check(target);
        return {
          json: { url: target, ok, steps },
          text: table(['STEP', '', 'MS', 'DETAIL'], steps.map((step) => [step.step, step.ok ? 'ok' : 'FAILED', String(step.ms), step.detail])), // prettier-ignore
          exitCode: ok ? 0 : 1,
        };
      }),
    );
};

const addDeliveries = (deliveries: Command, { action }: Terminal): void => {
  deliveries
    .command('list')
    .description('deliveries, the newest first')
    .addOption(new Option('--state <state>', 'in this state only').choices(STATES))
    .option('--account <account>', 'of this account only', uuid)
    .option('--endpoint <endpoint>', 'to this endpoint only', uuid)
    .option('--payment <payment>', 'about this payment only', uuid)
    .option('--limit <rows>', `at most this many, up to ${MAX_ROWS}`, rowLimit(MAX_ROWS), DEFAULT_ROWS)
    .action(
      action(async (context, { state, account, endpoint, payment, limit }: ListOptions) => {
        const { listDeliveries } = await open(context);
        const rows = await listDeliveries(context.pool, {
          ...(state && { state }),
          ...(account && { accountId: account }),
          ...(endpoint && { endpointId: endpoint }),
          ...(payment && { paymentId: payment }),
          limit,
        });
        return {
          json: rows,
          text: table(
            ['DELIVERY', 'CREATED', 'EVENT', 'TYPE', 'STATE', 'ATTEMPT', 'LAST', 'URL'],
            rows.map((row) => [
              String(row.deliveryId),
              row.createdAt,
              row.eventId,
              row.type,
              stateText(row),
              attemptText(row),
              lastText(row),
              row.url,
            ]),
          ),
        };
      }),
    );

  deliveries
    .command('show')
    .description('a delivery with its attempts; answers are escaped')
    .argument('<delivery>', 'number of the delivery', deliveryNumber)
    .action(
      action(async (context, id: string) => {
        const { findDelivery, noDelivery } = await open(context);
        const found = await findDelivery(context.pool, id);
        if (!found) throw noDelivery(id);
        const { attemptLog, ...row } = found;
        const text = fields([
          ['delivery', id],
          ['event', `${row.eventId} ${row.type}`],
          ['payment', row.paymentId],
          ['endpoint', `${row.endpointId} ${row.url}`],
          ['state', stateText(row)],
        ]);
        const attempts = table(
          ['ROUND', 'ATTEMPT', 'STARTED', 'MS', 'OUTCOME', 'ADDRESS', 'ANSWER'],
          attemptLog.map((one) => [String(one.round), String(one.attempt), one.startedAt, String(one.durationMs), outcomeText(one), one.remoteIp ?? '', one.responseHead ?? '']), // prettier-ignore
        );
        return { json: found, text: `${text}\n\n${attempts}` };
      }),
    );

  by(deliveries.command('redeliver'))
    .description('send again what is held or delivered: same id and body, new signature, another five attempts')
    .argument('[deliveries...]', 'numbers of deliveries, or ids of events (evt_…)', (text: string, before: string[] = []) => [
      ...before,
      deliveryName(text),
    ])
    .option('--all-held', 'everything that is held')
    .action(
      action(async (context, names: readonly string[] = [], { allHeld = false, by }: { allHeld?: boolean } & ByOption) => {
        if (allHeld === names.length > 0) throw new UsageError('name deliveries, or --all-held');
        context.refuse();
        const { deps, redeliver, redeliverAllHeld } = await open(context, by);
        const rows = allHeld ? await redeliverAllHeld(deps) : await redeliver(deps, names);
        return {
          json: rows,
          text: table(['DELIVERY', 'EVENT', 'ENDPOINT', 'ROUND'], rows.map((row) => [String(row.deliveryId), row.eventId, row.endpointId, String(row.round)])), // prettier-ignore
        };
      }),
    );
};

const addListen = (webhooks: Command, { action }: Terminal): void => {
  webhooks
    .command('listen')
    .description(
      'forward the notifications of an account to a server on this machine, signed, while it is being developed; sandbox only, ends with Ctrl-C',
    )
    .requiredOption('--account <account>', 'account id', uuid)
    .requiredOption('--forward-to <url>', 'http URL on this machine, such as http://127.0.0.1:4000/hook', localUrl)
    .action(
      action(async (context, { account, forwardTo }: { account: string; forwardTo: URL }) => {
        const { config, pool, keys, clock, administration, runtime, services, untilInterrupted } = context;
        if (config.environment === 'production') throw new ServiceError('INVALID_STATE', 'Listening is for the sandbox; register an endpoint.');
        // Without a service, this command holds the lock of DATA_DIR, and a start would wait for it for as long as it listens.
        if (runtime === null && config.databaseUrl === null)
          throw new ServiceError('INVALID_STATE', 'No service uses this DATA_DIR. Start it first, then listen.');
        const { listenTo, listenSecretOf } = await open(context);
        await administration.account(account);
        const signal = untilInterrupted();
        // If no worker runs, this outbox writes the notifications. If a worker runs, this outbox is on standby.
        const { reactors, store, personal } = await services();
        reactors.webhookOutbox.start();
        // With `--json`, stdout gets only one JSON value at the end. The lines before it are for people, so they go to stderr.
        const output = wantsJson(process.argv) ? process.stderr : process.stdout;
        const counts = { forwarded: 0, failed: 0 };
        try {
          await listenTo(
            {
              pool,
              payloads: { store, personal },
              keys,
              clock,
              accountId: account,
              forwardTo,
              onReady: () =>
                output.write(`${fields([['forwarding to', forwardTo.href], ['signing secret', listenSecretOf(keys, account)]])}\nlistening; Ctrl-C ends it\n`), // prettier-ignore
              onForwarded: (one) => {
                counts[one.status !== null && one.status >= 200 && one.status < 300 ? 'forwarded' : 'failed'] += 1;
                output.write(`${lineOf(one)}\n`);
              },
            },
            signal,
          );
        } finally {
          await reactors.webhookOutbox.stop();
        }
        return { json: { accountId: account, ...counts }, text: `${counts.forwarded} forwarded, ${counts.failed} failed` };
      }),
    );
};

const lineOf = ({ at, eventId, type, paymentId, status, error, ms }: Forwarded) =>
  `${at.slice(11, 19)}  ${type}  ${eventId}  payment ${paymentId}  ${status ?? error}  ${ms} ms`;

const secretAnswer = ({ endpointId, url, secret }: EndpointSecret & { readonly url: string }): Answer => ({
  json: { endpointId, url, secret },
  text: `${fields([['endpoint', endpointId], ['URL', url], ['secret', secret]])}\n\nThe secret cannot be shown again.`, // prettier-ignore
});

const secretText = ({ secretHint, stagedSecretHint }: Endpoint) =>
  `…${secretHint}${stagedSecretHint === null ? '' : ` (staged …${stagedSecretHint})`}`;

const endpointAnswer = (endpoint: Endpoint): Answer => ({
  json: endpoint,
  text: fields([
    ['endpoint', endpoint.endpointId],
    ['account', endpoint.accountId],
    ['URL', endpoint.url],
    ['status', endpoint.status],
    ['secret', secretText(endpoint)],
  ]),
});

const stateText = ({ state, dueAt }: DeliveryRow) => (dueAt === null ? state : `${state} until ${dueAt}`);
const attemptText = ({ round, attempts }: DeliveryRow) => (round === 1 ? String(attempts) : `${attempts} of round ${round}`);
const lastText = ({ lastStatus, lastError }: DeliveryRow) => (lastStatus === null ? (lastError ?? '') : String(lastStatus));
const outcomeText = ({ outcome, statusCode, errorCode }: AttemptRow) => [outcome, statusCode, errorCode].filter((part) => part !== null).join(' ');

// Values of arguments and options.

const deliveryNumber = (text: string): string => {
  if (!/^\d{1,15}$/.test(text)) throw new InvalidArgumentError('It must be the number of a delivery.');
  return text;
};

const deliveryName = (text: string): string => {
  if (!/^(\d{1,15}|evt_[\w-]{1,60})$/.test(text)) throw new InvalidArgumentError('It must be the number of a delivery or the id of an event.');
  return text;
};

/** Accepts only addresses of this machine: the body is sent unencrypted. */
const localUrl = (text: string): URL => {
  const url = parseUrl(text);
  if (url?.protocol !== 'http:' || !/^(localhost|\[::1\]|127\.\d+\.\d+\.\d+)$/.test(url.hostname))
    throw new InvalidArgumentError('It must be an http URL on this machine, such as http://127.0.0.1:4000/hook.');
  return url;
};

/** `payfold sandbox`: commands for a sandbox only. */
import type { Command } from 'commander';
import { ServiceError } from '#kernel';
import { advanceSandboxTime, compareReleases, isLoopback, livingProcesses, RELEASE } from '#platform';
import type { Context } from './context.js';
import type { Services } from '../services.js';
import { fields, moment, type Terminal } from './terminal.js';

/** To record the batches that closed in between takes minutes if they are large. */
const RECORD_MS = 15 * 60_000;

const refuse = (why: string) => new ServiceError('INVALID_STATE', `${why}; nothing was moved.`);

export const addSandbox = (program: Command, { action }: Terminal): void => {
  const sandbox = program.command('sandbox').description('commands for a sandbox only');

  sandbox
    .command('advance')
    .description(
      'move the time of the sandbox forward, for good and for all its processes, to rehearse a month: batches close and are funded, retries and deadlines come due. Idempotency keys, tokens, limits and signatures keep the real time',
    )
    .requiredOption('--to <time>', 'the new time, at most 366 days ahead; a day means 00:00 UTC', moment)
    .action(
      action(async (context, { to }: { to: string }) => {
        const { config, sandboxTime, pool, clock } = context;
        if (config.environment !== 'sandbox' || !sandboxTime) throw refuse('The time of production never moves');
        const all = await context.services({ withGateway: true });
        all.ownLog.refuse();
        await refuseOtherProcesses(context);
        await refuseOtherHosts(context, all);
        const { bringForward } = await import('#webhooks');
        let deliveriesMoved = 0;
        const moved = await advanceSandboxTime(pool, clock, Date.parse(to), async (client, spanMs) => {
          deliveriesMoved = await bringForward(client, spanMs);
        });
        await sandboxTime.reaches(moved.aheadMs);
        // The first call carries the new time to the processor, which then closes batches. Until these are recorded, their charges seem missing.
        const { RecordSettlements } = await import('#settlement/module');
        await all.commands.execute(new RecordSettlements(AbortSignal.timeout(RECORD_MS)));
        const { from } = moved;
        return {
          json: { from, to, deliveriesMoved },
          text: fields([
            ['from', from],
            ['to', to],
            ['deliveries moved', String(deliveriesMoved)],
          ]),
        };
      }),
    );
};

/** A process of another release may not follow the time. */
const refuseOtherProcesses = async ({ pool }: Context): Promise<void> => {
  const others = (await livingProcesses(pool)).filter(({ release }) => compareReleases(release, RELEASE) !== 0);
  if (others.length > 0)
    throw refuse(`Processes of other releases live: ${others.map(({ role, release, pid }) => `${role} ${release} (process ${pid})`).join(', ')}`);
};

/** A processor on another host keeps its own time. */
const refuseOtherHosts = async ({ directory, caughtUp }: Context, { payments, settlement }: Services): Promise<void> => {
  await caughtUp();
  const { gatewayAccountsOf } = await import('#payments');
  const portals = (await directory.portals()).flatMap(({ gateway }) => (gateway ? gatewayAccountsOf(gateway) : []));
  for (const account of [...portals, ...(await settlement.register.accounts())]) {
    const endpoint = payments.ports.gateways.find(account)?.endpoint;
    if (endpoint !== undefined && !isLoopback(new URL(endpoint).hostname.replace(/^\[|\]$/g, '')))
      throw refuse(`The merchant account ${account.merchantAccount} is called at ${endpoint}, which is not on loopback`);
  }
};

/** The role `worker`: runs the projections, the background loops and the webhook dispatcher. */
import { Administration, createSandboxDefaults, directoryModel } from '#accounts';
import { openKeys } from '#platform';
import { Health } from '../health.js';
import { closed, type FirstAccount, runRole } from '../lifecycle.js';
import { createMetrics } from '../metrics.js';
import { openServices, requirePlaces, type Services } from '../services.js';
import { startWorker } from './worker.js';

/** How long to wait until requests can use the first account. */
const FIRST_ACCOUNT_MS = 10_000;

/** Makes the first account if there is none. Resolves when requests can use it. */
const firstAccount = async ({ store, clock, ids, keys, personal, config, readModels }: Services): Promise<FirstAccount | null> => {
  const administration = new Administration({
    store,
    clock,
    ids,
    keys,
    personal,
    environment: config.environment,
    cardInTextCheck: config.cardInTextCheck,
    actor: { type: 'system', id: 'first-start' },
  });
  const made = await createSandboxDefaults(administration);
  if (made?.position) await readModels.of(directoryModel).runUntil(made.position, { timeoutMs: FIRST_ACCOUNT_MS });
  return made && { apiKey: made.apiKey, portalId: made.portalId, signingSecret: made.signingSecret };
};

runRole('worker', async (config, log, { supervisor, stop }) => {
  // A supervisor has one worker at a time, so leases are in the supervisor's name. After a killed worker, the next one continues with its leases
  // immediately.
  const services = await openServices(config, requirePlaces(config), openKeys(config), log, {
    role: 'worker',
    stop,
    ...(supervisor !== null && { leaseOwner: supervisor }),
  });
  const worker = startWorker(services);
  return {
    metrics: createMetrics(services),
    health: new Health(services),
    firstAccount: () => firstAccount(services),
    stop: () => closed(worker.stop().then(() => services.close())),
  };
});

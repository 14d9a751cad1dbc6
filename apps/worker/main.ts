/** The role `worker`: projections and loops over the configured stores. */
import { createMetrics, runRole } from '../lifecycle.js';
import { openKeys, openServices, requirePlaces } from '../services.js';
import { startWorker } from './worker.js';

runRole('worker', async (config, log) => {
  const services = await openServices(config, requirePlaces(config), openKeys(config), log, { role: 'worker' });
  const worker = startWorker(services);
  const metricsServer = await createMetrics(services).listen(config.metricsPort);
  process.stdout.write('ready worker\n');
  return {
    stop: async () => {
      await worker.stop();
      metricsServer.close();
      await services.close();
    },
  };
});

/** The role `api`: partner endpoints over the configured stores. */
import { createMetrics, drained, LINGER_MS, runRole } from '../lifecycle.js';
import { openKeys, openServices, requirePlaces } from '../services.js';
import { createAudit } from '../audit/audit.js';
import { createApi } from './api.js';

runRole('api', async (config, log) => {
  const services = await openServices(config, requirePlaces(config), openKeys(config), log, { role: 'api' });
  const metrics = createMetrics(services);
  const api = await createApi({ ...services, publicUrl: config.publicUrl, onAnswer: metrics.answered });
  const url = await api.listen(config.port, config.host);
  const audit = await createAudit(services);
  await audit.listen(config.auditPort, config.auditHost);
  const metricsServer = await metrics.listen(config.metricsPort);
  process.stdout.write(`ready ${url}\n`);
  return {
    drain: () => api.health.drain(),
    stop: async () => {
      await drained(Promise.all([api.close(LINGER_MS), audit.close(LINGER_MS)]));
      metricsServer.close();
      await services.close();
    },
  };
});

/** The role `api`: HTTP endpoints over the configured stores. */
import { openKeys } from '#platform';
import { closed, drained, CLOSE_GRACE_MS, runRole } from '../lifecycle.js';
import { createMetrics } from '../metrics.js';
import { openServices, requirePlaces } from '../services.js';
import { createAudit } from '../audit/audit.js';
import { Health } from '../health.js';
import { createApi } from './api.js';

runRole('api', async (config, log, { stop, supervisor }) => {
  const services = await openServices(config, requirePlaces(config), openKeys(config), log, { role: 'api', stop });
  const metrics = createMetrics(services);
  const health = new Health(services);
  // `npm start` opens it when the key of the first account is printed.
  if (supervisor !== null) health.hold();
  const api = await createApi({ ...services, health, publicUrl: config.publicUrl, onAnswer: metrics.answered });
  metrics.limitedBy(api.limits);
  const url = await api.listen(config.port, config.host);
  const audit = await createAudit({ ...services, onAnswer: metrics.answered, onLimit: metrics.auditLimited });
  const auditUrl = await audit.listen(config.auditPort, config.auditHost);
  return {
    addresses: { url, auditUrl },
    metrics,
    health,
    stop: async () => {
      // Close both at the same time. While one drains, the other must take nothing new.
      await drained(Promise.all([api.close(CLOSE_GRACE_MS), audit.close(CLOSE_GRACE_MS)]));
      await closed(services.close());
    },
  };
});

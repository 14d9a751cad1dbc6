/** The gateways of this process, for Nest (`#gateways/module`). */
import { Global, Module } from '@nestjs/common';
import { type GatewayAccount, GatewayCalls, type Gateways } from '#payments';
import { GATEWAYS } from '#payments/module';
import { ProcessContext } from '#platform/module';
import { createSimulatorGateway, type SimulatorGateway } from './simulator/simulator.js';
import { transportOf } from './transport/options.js';

@Global()
@Module({
  providers: [
    GatewayCalls,
    {
      provide: GATEWAYS,
      inject: [ProcessContext, GatewayCalls],
      // The simulator is the only gateway of the sandbox. Production has no simulator, so no account has a gateway there.
      useFactory: (context: ProcessContext, calls: GatewayCalls): Gateways => {
        const { config, places, clock, sandboxTime } = context;
        const { simulatorUrl: endpoint } = places;
        if (!endpoint) return context.guarded<Gateways>({ find: () => null });
        const aheadMs = () => sandboxTime?.clock.aheadMs ?? 0;
        const transport = transportOf({ endpoint, clock });
        const simulated = new Map<string, SimulatorGateway>();
        const simulatorOf = (account: GatewayAccount): SimulatorGateway => {
          const known = simulated.get(account.merchantAccount);
          if (known) return known;
          const made = calls.observed(createSimulatorGateway({ endpoint, account, clock, aheadMs, transport }), clock);
          simulated.set(account.merchantAccount, made);
          return made;
        };
        return context.guarded<Gateways>({
          find: (account) => (account.gateway === 'simulator' && account.environment === config.environment ? simulatorOf(account) : null),
        });
      },
    },
  ],
  exports: [GATEWAYS, GatewayCalls],
})
export class GatewaysModule {}

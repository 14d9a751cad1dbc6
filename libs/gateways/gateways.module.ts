/** The gateways of this process, for Nest (`#gateways/module`). */
import { Global, Module } from '@nestjs/common';
import { GatewayCalls, type Gateways } from '#payments';
import { GATEWAYS } from '#payments/module';
import { ProcessContext } from '#platform/module';
import { createSimulatorGateway } from './simulator/simulator.js';

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
        const aheadMs = () => sandboxTime?.clock.aheadMs ?? 0;
        const simulator = places.simulatorUrl ? calls.observed(createSimulatorGateway({ url: places.simulatorUrl, aheadMs }), clock) : null;
        return context.guarded<Gateways>({
          find: ({ gateway, environment }) => (gateway === 'simulator' && environment === config.environment ? simulator : null),
        });
      },
    },
  ],
  exports: [GATEWAYS, GatewayCalls],
})
export class GatewaysModule {}

/** The gateways of this process, for Nest (`#gateways/module`). */
import { Global, Module } from '@nestjs/common';
import type { Gateways } from '#payments';
import { GATEWAYS } from '#payments/module';
import { ProcessContext } from '#platform/module';
import { createSimulatorGateway } from './simulator/simulator.js';

@Global()
@Module({
  providers: [
    {
      provide: GATEWAYS,
      inject: [ProcessContext],
      // The simulator is the only gateway of the sandbox. Production has no simulator, so no account has a gateway there.
      useFactory: (context: ProcessContext): Gateways => {
        const { config, places } = context;
        const simulator = places.simulatorUrl ? createSimulatorGateway({ url: places.simulatorUrl }) : null;
        return context.guarded<Gateways>({
          find: ({ gateway, environment }) => (gateway === 'simulator' && environment === config.environment ? simulator : null),
        });
      },
    },
  ],
  exports: [GATEWAYS],
})
export class GatewaysModule {}

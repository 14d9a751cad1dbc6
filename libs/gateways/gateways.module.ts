/** The gateways of this process, for Nest (`#gateways/module`). */
import { Global, Module } from '@nestjs/common';
import { type ChargeStops, type Directory, disableCharges } from '#accounts';
import { CHARGE_STOPS, DIRECTORY } from '#accounts/module';
import type { EventStore } from '#eventstore';
import { EVENT_STORE, POOL } from '#eventstore/module';
import { type GatewayAccount, GatewayCalls, type Gateways, postgresTransactionClaims } from '#payments';
import type { Pool } from '#platform';
import { GATEWAYS } from '#payments/module';
import { ProcessContext } from '#platform/module';
import { MerchantGateways } from './merchant-gateways.js';
import { createSimulatorGateway, type SimulatorGateway } from './simulator/simulator.js';
import { transportOf } from './transport/options.js';

@Global()
@Module({
  providers: [
    GatewayCalls,
    {
      provide: GATEWAYS,
      inject: [ProcessContext, GatewayCalls, DIRECTORY, CHARGE_STOPS, EVENT_STORE, POOL],
      useFactory: (context: ProcessContext, calls: GatewayCalls, directory: Directory, stops: ChargeStops, store: EventStore, pool: Pool) =>
        openGateways(context, calls, directory, stops, store, pool),
    },
  ],
  exports: [GATEWAYS, GatewayCalls],
})
export class GatewaysModule {}

/** Makes the adapters of the merchant accounts, and in the sandbox those of the simulator. Production has no simulator. */
const openGateways = async (
  context: ProcessContext,
  calls: GatewayCalls,
  directory: Directory,
  stops: ChargeStops,
  store: EventStore,
  pool: Pool,
): Promise<Gateways> => {
  const { config, clock, keys, log, options, ids } = context;
  const merchants = new MerchantGateways({
    directory,
    keys,
    environment: config.environment,
    clock,
    logger: log,
    stops,
    observed: (name, gateway) => calls.observed(name, gateway, clock),
    countRefused: (account, more) => calls.countRefused(account, more),
    countHeld: (account, more) => calls.countHeld(account, more),
    countAlarm: (account, more) => calls.countAlarm(account, more),
    claims: postgresTransactionClaims(pool),
    disableCharges: (merchantAccount, reason) => disableCharges({ store, clock, ids }, merchantAccount, reason, ids.uuid()),
    ...(options.gatewayEndpoints && { endpoints: options.gatewayEndpoints }),
  });
  const accounts = await merchants.reload();
  if (accounts === 0 && config.environment === 'production' && options.role !== undefined)
    log.warn('there is no merchant account, so every create answers 503; add one with payfold merchant-accounts add');
  const following = merchants.follow();
  context.atEnd(() => {
    const closed = merchants.close();
    return Promise.all([following, closed]);
  });
  const simulated = simulatorsOf(context, calls);
  return context.guarded<Gateways>({
    find: (account) => (account.gateway === 'simulator' ? simulated(account) : merchants.find(account)),
    load: async ({ gateway, merchantAccount }) => {
      if (gateway !== 'simulator') await merchants.load(merchantAccount);
    },
  });
};

/** Finds the adapter of a simulated merchant account. The simulator opens an account at its first charge. */
const simulatorsOf = (
  { config, places, clock, sandboxTime }: ProcessContext,
  calls: GatewayCalls,
): ((account: GatewayAccount) => SimulatorGateway | null) => {
  const { simulatorUrl: endpoint } = places;
  if (!endpoint) return () => null;
  const aheadMs = () => sandboxTime?.clock.aheadMs ?? 0;
  const transport = transportOf({ endpoint, clock });
  const simulated = new Map<string, SimulatorGateway>();
  return (account) => {
    if (account.environment !== config.environment) return null;
    const known = simulated.get(account.merchantAccount);
    if (known) return known;
    const made = calls.observed(account.gateway, createSimulatorGateway({ endpoint, account, clock, aheadMs, transport }), clock);
    simulated.set(account.merchantAccount, made);
    return made;
  };
};

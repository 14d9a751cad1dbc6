export { createSimulatorGateway, type SimulatorGateway, type SimulatorGatewayOptions } from './simulator/simulator.js';
export { createTransport, type Transport } from './transport/exchange.js';
export { type GatewayOptions } from './transport/options.js';

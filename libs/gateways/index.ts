export { createSimulatorGateway, type SimulatorGateway } from './simulator.js';

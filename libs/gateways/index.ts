export { createSimulatorGateway, type SimulatorGateway } from './simulator/simulator.js';

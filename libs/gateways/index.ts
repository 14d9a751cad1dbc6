export { AUTHORIZE_NET_ENDPOINTS, type AuthorizeNetOptions, createAuthorizeNetGateway } from './authorize-net/authorize-net.js';
export { type CheckedGuarantee, checkGuarantees, type CheckTerms, LEAST_CHECK_CENTS } from './check.js';
export { createSimulatorGateway, type SimulatorGateway, type SimulatorGatewayOptions } from './simulator/simulator.js';
export { createStripeGateway, STRIPE_ENDPOINT, type StripeGatewayOptions } from './stripe/stripe.js';
export { createTransport, type Transport } from './transport/exchange.js';
export { type GatewayOptions } from './transport/options.js';
// A card or token of a charge. A program outside this house imports only this door.
export { Secret } from '#payments';
export { askVendor, createVendorGateway, ENDPOINTS, readCredentials } from './vendors.js';

/** The payer's IP address, for the fraud filters of a processor. It is passed on with the charge, and never stored or logged. */
import { BlockList, isIPv4 } from 'node:net';

/** Addresses that no payer has on the internet (RFC 6890). Behind a proxy that PROXY_HOPS does not count, all payers would seem to have one of them. */
const NOT_PUBLIC = new BlockList();
for (const [net, prefix] of [
  ['0.0.0.0', 8],
  ['10.0.0.0', 8],
  ['100.64.0.0', 10],
  ['127.0.0.0', 8],
  ['169.254.0.0', 16],
  ['172.16.0.0', 12],
  ['192.168.0.0', 16],
  ['224.0.0.0', 3],
] as const)
  NOT_PUBLIC.addSubnet(net, prefix);

/** `address`: of the client, as the rate limits count it. undefined: it is no public IPv4 address. Processors take no other addresses. */
export const payerIpOf = (address: string): string | undefined => (isIPv4(address) && !NOT_PUBLIC.check(address) ? address : undefined);

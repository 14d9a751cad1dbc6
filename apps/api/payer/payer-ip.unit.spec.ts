import { expect, test } from '@jest/globals';
import { payerIpOf } from './payer-ip.js';

test.each(['198.51.100.7', '8.8.8.8', '172.32.0.1', '100.128.0.1'])('%s is passed on', (address) => expect(payerIpOf(address)).toBe(address));

test.each([
  '10.1.2.3',
  '127.0.0.1',
  '172.31.0.1',
  '192.168.0.1',
  '169.254.1.1',
  '100.64.0.1',
  '0.0.0.0',
  '224.0.0.1',
  '255.255.255.255',
  '2001:db8:1:2::/64',
  'unknown',
  '198.51.100.7, 198.51.100.8',
  '',
])('"%s" is not passed on', (address) => expect(payerIpOf(address)).toBeUndefined());

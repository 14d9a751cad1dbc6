/** Rules for endpoint URLs and the addresses of their hosts (decision 0015). */
import { describe, expect, test } from '@jest/globals';
import { readConfig } from '#platform';
import { checkUrl, isPublic, Refused, vetAddresses, type TargetRules } from './target.js';

const rules = (env: Record<string, string> = {}): TargetRules => readConfig(env).webhooks;
const refusal = (work: () => unknown): string => {
  try {
    work();
  } catch (error) {
    if (error instanceof Refused) return error.code;
    throw error;
  }
  return 'passed';
};

describe('URLs', () => {
  test.each([
    ['https://hooks.example.com/payfold', 'hooks.example.com', 443, 'hooks.example.com', '/payfold'],
    ['https://hooks.example.com:8443/a/b?c=d', 'hooks.example.com', 8443, 'hooks.example.com:8443', '/a/b?c=d'],
    ['https://HOOKS.Example.com./', 'hooks.example.com', 443, 'hooks.example.com', '/'],
    ['https://münchen.example/', 'xn--mnchen-3ya.example', 443, 'xn--mnchen-3ya.example', '/'],
  ])('%s', (url, hostname, port, host, path) => expect(checkUrl(url, rules())).toMatchObject({ hostname, port, host, path }));

  test.each([
    ['http://hooks.example.com/', 'url_scheme'],
    ['ftp://hooks.example.com/', 'url_scheme'],
    ['file:///etc/passwd', 'url_scheme'],
    ['hooks.example.com', 'url_syntax'],
    ['https://', 'url_syntax'],
    ['https://user@hooks.example.com/', 'url_credentials'],
    ['https://user:pass@hooks.example.com/', 'url_credentials'],
    ['https://hooks.example.com/#top', 'url_fragment'],
    ['https://hooks.example.com/#', 'url_fragment'],
    [`https://hooks.example.com/${'a'.repeat(2_048)}`, 'url_too_long'],
    ['https://hooks.example.com\\@127.0.0.1/', 'url_characters'],
    ['https://hooks.example.com/\tx', 'url_characters'],
    ['https://hooks.exam\nple.com/', 'url_characters'],
    [' https://hooks.example.com/', 'url_characters'],
    ['https://hooks.example.com/\u0000', 'url_characters'],
    ['https://intranet/', 'url_local_name'],
    ['https://localhost/', 'url_local_name'],
    ['https://localhost./', 'url_local_name'],
    ['https://a.localhost/', 'url_local_name'],
    ['https://printer.local/', 'url_local_name'],
    ['https://metadata.google.internal/', 'url_local_name'],
    ['https://router.home.arpa/', 'url_local_name'],
    ['https://abc.onion/', 'url_local_name'],
    ['https://hooks..example.com/', 'url_local_name'],
    ['https://hooks.example.com../', 'url_local_name'],
    ['https://hooks.example.com:80/', 'url_port'],
    ['https://hooks.example.com:22/', 'url_port'],
    ['https://hooks.example.com:5432/', 'url_port'],
  ])('%j is refused: %s', (url, code) => expect(refusal(() => checkUrl(url, rules()))).toBe(code));

  test.each([
    'https://127.0.0.1/',
    'https://2130706433/',
    'https://0x7f.1/',
    'https://0x7f000001/',
    'https://017700000001/',
    'https://①②⑦.0.0.1/',
    'https://127.0.0.1./',
    'https://127.1/',
    'https://[::1]/',
    'https://[::ffff:127.0.0.1]/',
    'https://[0:0:0:0:0:ffff:7f00:1]/',
    'https://[64:ff9b::a9fe:a9fe]/',
    'https://93.184.216.34/',
  ])('an IP address in any spelling is refused: %s', (url) => expect(refusal(() => checkUrl(url, rules()))).toBe('url_ip_address'));

  test('an operator may allow further ports', () => {
    const more = rules({ WEBHOOK_PORTS: '443,9443' });
    expect(checkUrl('https://hooks.example.com:9443/', more).port).toBe(9443);
    expect(refusal(() => checkUrl('https://hooks.example.com:8443/', more))).toBe('url_port');
  });
});

describe('addresses', () => {
  test.each([
    '93.184.216.34',
    '1.1.1.1',
    '100.63.255.255',
    '100.128.0.1',
    '172.15.0.1',
    '172.32.0.1',
    '169.253.1.1',
    '192.0.1.1',
    '223.255.255.255',
    '2606:4700::1111',
    '2a00:1450::1',
    '2001:4860:4860::8888',
    '3ffe::1',
  ])(
    // prettier-ignore
    '%s is public',
    (address) => expect(isPublic(address)).toBe(true),
  );
  test.each([
    ...['0.0.0.0', '10.1.2.3', '100.64.0.1', '127.0.0.1', '127.255.255.254', '168.63.129.16', '169.254.169.254', '172.16.0.1', '172.31.255.255'],
    ...['192.0.0.1', '192.0.2.1', '192.31.196.1', '192.52.193.1', '192.88.99.1', '192.168.1.1', '192.175.48.1', '198.18.0.1', '198.51.100.1'],
    ...['203.0.113.1', '224.0.0.1', '240.0.0.1', '255.255.255.255'],
    ...['::', '::1', '::ffff:127.0.0.1', '::ffff:93.184.216.34', '::ffff:0:127.0.0.1', '::7f00:1', '64:ff9b::a9fe:a9fe', '64:ff9b:1::1', '100::1'],
    ...['100:0:0:1::1', '2001::1', '2001:1ff::1', '2001:db8::1', '2002:7f00:1::', '2620:4f:8000::1', '3fff::1', '4000::1', '5f00::1', 'fc00::1'],
    ...['fd00:ec2::254', 'fe80::1', 'fe80::1%eth0', '2606:4700::1111%eth0', 'fec0::1', 'ff02::1', 'localhost', ''],
  ])('%s is not', (address) => expect(isPublic(address)).toBe(false));

  const target = checkUrl('https://hooks.example.com/', rules());
  test('one that is not public refuses them all', () => {
    expect(vetAddresses(target, ['2606:4700::1111', '93.184.216.34'], rules())).toEqual(['93.184.216.34', '2606:4700::1111']);
    expect(refusal(() => vetAddresses(target, ['93.184.216.34', '127.0.0.1'], rules()))).toBe('address_not_public');
    expect(refusal(() => vetAddresses(target, ['93.184.216.34', 'fd00::1'], rules()))).toBe('address_not_public');
  });
  test('public networks of our own may be blocked', () => {
    const own = rules({ WEBHOOK_BLOCKED_NETWORKS: '93.184.216.0/24,2606:4700::/32' });
    expect(refusal(() => vetAddresses(target, ['93.184.216.34'], own))).toBe('address_not_public');
    expect(refusal(() => vetAddresses(target, ['2606:4700::1'], own))).toBe('address_not_public');
    expect(vetAddresses(target, ['93.184.217.34'], own)).toEqual(['93.184.217.34']);
  });
  test('a private target is one host, at one port, in one network', () => {
    const some = rules({ WEBHOOK_PRIVATE_TARGETS: 'receiver.test:9000=127.0.0.0/8,receiver.test:9000=fd00::/8' });
    const named = checkUrl('https://receiver.test:9000/', some);
    expect(vetAddresses(named, ['127.0.0.5', 'fd00::1', '1.1.1.1'], some)).toHaveLength(3);
    expect(refusal(() => vetAddresses(named, ['10.0.0.1'], some))).toBe('address_not_public');
    expect(refusal(() => checkUrl('https://receiver.test:9001/', some))).toBe('url_port');
    expect(refusal(() => checkUrl('https://other.test:9000/', some))).toBe('url_port');
    expect(refusal(() => checkUrl('https://127.0.0.1:9000/', some))).toBe('url_ip_address');
    expect(refusal(() => vetAddresses(checkUrl('https://receiver.test/', some), ['127.0.0.1'], some))).toBe('address_not_public');
    expect(refusal(() => vetAddresses(checkUrl('https://other.test/', some), ['127.0.0.1'], some))).toBe('address_not_public');
  });
});

describe('settings', () => {
  const faults = (env: Record<string, string>): string => {
    try {
      readConfig(env);
    } catch (error) {
      return (error as Error).message;
    }
    return 'accepted';
  };
  const production = {
    ENVIRONMENT: 'production',
    MASTER_KEY_FILE: '/k',
    DATA_DIR: '/d',
    DATABASE_URL: 'postgres://h/d',
    PUBLIC_URL: 'https://pay.example',
    PROXY_HOPS: '1',
  };
  const list = { WEBHOOK_PRIVATE_TARGETS: 'a.test:8443=127.0.0.1/32' };
  test('an unreadable setting is named', () => {
    expect(faults({ WEBHOOK_PRIVATE_TARGETS: 'a.test=127.0.0.1/32' })).toContain('WEBHOOK_PRIVATE_TARGETS: must be a list of host:port=network');
    expect(faults({ WEBHOOK_PRIVATE_TARGETS: 'a.test:8443=127.0.0.1' })).toContain('WEBHOOK_PRIVATE_TARGETS');
    expect(faults({ WEBHOOK_PRIVATE_TARGETS: 'a.test:8443=127.0.0.1/33' })).toContain('WEBHOOK_PRIVATE_TARGETS');
    expect(faults({ WEBHOOK_BLOCKED_NETWORKS: 'somewhere' })).toContain('WEBHOOK_BLOCKED_NETWORKS');
    expect(faults({ WEBHOOK_DNS_SERVERS: 'dns.example:53' })).toContain('WEBHOOK_DNS_SERVERS');
    expect(faults({ WEBHOOK_PORTS: '443,x' })).toContain('WEBHOOK_PORTS');
    expect(faults({ WEBHOOK_RETRY_SECONDS: 'soon' })).toContain('WEBHOOK_RETRY_SECONDS');
    expect(faults({ WEBHOOK_RETRY_SECONDS: '0' })).toContain('WEBHOOK_RETRY_SECONDS');
    for (const days of ['0', '36501', '1.5', '-1', 'ever'])
      expect(faults({ WEBHOOK_KEEP_DAYS: days })).toContain(`WEBHOOK_KEEP_DAYS=${days}: must be`);
    expect(faults({ WEBHOOK_DNS_SERVERS: '127.0.0.1:5399,[::1]:53,9.9.9.9', WEBHOOK_RETRY_SECONDS: '0.2', ...list })).toBe('accepted');
  });
  test('webhooks are kept for 400 days unless another number is set', () => {
    expect(readConfig({}).webhooks.keepDays).toBe(400);
    expect(readConfig({ WEBHOOK_KEEP_DAYS: '30' }).webhooks.keepDays).toBe(30);
  });
  test('production wants private targets acknowledged, word for word, and no shorter waits', () => {
    expect(faults({ ...production, ...list })).toContain('WEBHOOK_PRIVATE_TARGETS_ACK');
    expect(faults({ ...production, ...list, WEBHOOK_PRIVATE_TARGETS_ACK: 'yes' })).toContain('WEBHOOK_PRIVATE_TARGETS_ACK');
    expect(faults({ ...production, ...list, WEBHOOK_PRIVATE_TARGETS_ACK: list.WEBHOOK_PRIVATE_TARGETS })).toBe('accepted');
    expect(faults({ ...production, WEBHOOK_RETRY_SECONDS: '5' })).toContain('refused in production');
    expect(faults({ ...production, WEBHOOK_RETRY_SECONDS: '120' })).toBe('accepted');
  });
});

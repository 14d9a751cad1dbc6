import { describe, expect, test } from '@jest/globals';
import { hostsOf, storeAddress } from './hosts.js';

describe('the hosts of a URL, without user, password and options', () => {
  test.each([
    ['kurrentdb://10.0.0.1:2113?tls=false', '10.0.0.1:2113'],
    ['kurrentdb://node.example', 'node.example:2113'],
    ['kurrentdb+discover://user:secret@cluster.example:2114?tls=true', 'cluster.example:2114'],
    ['esdb://user:se%40cret@a:2113,b:2114,c?tls=true&connectionName=x@y', 'a:2113, b:2114, c:2113'],
    ['kurrentdb://user:se@cret@a:2113/?tls=true', 'a:2113'],
    ['kurrentdb://user:sec/ret@a:2113', 'a:2113'],
    ['postgres://user:secret@db.example:6432/payfold?application_name=a@b', 'db.example:6432'],
    ['postgresql://user:se%2Fcret@127.0.0.1/payfold', '127.0.0.1:5432'],
    ['postgres://user:secret@[::1]:5433/payfold', '[::1]:5433'],
    ['postgres://user:secret@localhost/payfold?host=/var/run/postgresql&port=5434', '/var/run/postgresql:5434'],
  ])('%s', (url, hosts) => {
    expect(hostsOf(url)).toBe(hosts);
    expect(hostsOf(url)).not.toMatch(/sec|ret/);
  });
});

test('the event store is named by its variable: Postgres where KURRENTDB_URL is not set', () => {
  const databaseUrl = 'postgres://user:secret@db:5433/payfold';
  expect(storeAddress(null, databaseUrl)).toBe('DATABASE_URL (db:5433)');
  expect(storeAddress('kurrentdb://user:secret@a:1,b:2', databaseUrl)).toBe('KURRENTDB_URL (a:1, b:2)');
});

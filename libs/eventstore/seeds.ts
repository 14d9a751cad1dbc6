/**
 * Addresses of a cluster that accept connections and never answer.
 *
 * The client asks the addresses of its URL one after the other, in a random order, for the members of the cluster. It waits 5 s for each. One address
 * that never answers would delay a start and a search for a new leader by as long. So the addresses are asked first, all at once, and the silent ones
 * are left out of the client's URL. An address that refuses connections costs nothing and stays.
 */
import { connect } from 'node:http2';
import { type Clock } from '#kernel';

/** The answer of a living node takes milliseconds. */
const ANSWER_MS = 1_000;
/** The client's own question: who belongs to the cluster. Any answer will do. */
const GOSSIP = '/event_store.client.gossip.Gossip/Read';
/** An empty message of gRPC: not compressed, no bytes. */
const EMPTY_MESSAGE = Buffer.alloc(5);

const URL_PARTS = /^([^:]+:\/\/(?:[^:]+:[^@]+@)?)([^/?#@]+)((?:[/?#].*)?)$/s;

/** The addresses between which the client chooses. Empty if the URL names one, or a DNS name that stands for several. */
const seedsOf = (url: string): readonly string[] => {
  const [, prefix = '', addresses = ''] = URL_PARTS.exec(url) ?? [];
  const seeds = addresses.split(',').filter((seed) => seed !== '');
  return prefix.includes('+discover') || seeds.length < 2 ? [] : seeds;
};

/** Asks every address of a list at once. Returns those that accept a connection, or a packet, and do not answer in time. */
export const silentSeeds = async (url: string, clock: Clock): Promise<readonly string[]> => {
  const scheme = /[?&]tls=false/i.test(url) ? 'http' : 'https';
  const seeds = seedsOf(url);
  const silent = await Promise.all(seeds.map((seed) => isSilent(`${scheme}://${seed.includes(':') ? seed : `${seed}:2113`}`, clock)));
  return seeds.filter((_, index) => silent[index]);
};

/** The URL without these addresses. If none would be left, all stay. */
export const withoutSeeds = (url: string, silent: readonly string[]): string => {
  const left = seedsOf(url).filter((seed) => !silent.includes(seed));
  if (silent.length === 0 || left.length === 0) return url;
  const [, prefix, , rest] = URL_PARTS.exec(url)!;
  // With one address the client would take that node for the leader and ask nobody.
  return `${prefix}${(left.length === 1 ? [...left, ...left] : left).join(',')}${rest}`;
};

const isSilent = async (address: string, clock: Clock): Promise<boolean> => {
  const done = new AbortController();
  let silent = true;
  const answered = () => {
    silent = false;
    done.abort('answered');
  };
  try {
    // A node whose certificate is not trusted here, such as one of a private authority, has answered too.
    const session = connect(address);
    session.on('error', answered);
    const request = session.request({ ':method': 'POST', ':path': GOSSIP, 'content-type': 'application/grpc', te: 'trailers' });
    request.on('error', answered).on('response', answered).end(EMPTY_MESSAGE);
    await clock.sleep(ANSWER_MS, done.signal);
    session.destroy();
    return silent;
  } catch {
    // Not an address; the client says so.
    return false;
  }
};

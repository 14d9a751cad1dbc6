/**
 * Finds the addresses of a cluster that accept connections and never answer.
 *
 * The client asks the addresses of its URL one after the other, in a random order, and waits 5 s for each. A silent address would delay each search
 * for the leader by 5 s. So all addresses are asked here first, at the same time, and silent ones are left out of the client's URL. An address that
 * refuses connections costs no time and stays.
 */
import { connect } from 'node:http2';
import { type Clock } from '#kernel';

/** How long an address may take to answer. A healthy node needs milliseconds. */
const ANSWER_MS = 1_000;
/** The client's call for the members of the cluster. Any answer, even an error, shows that the address is not silent. */
const GOSSIP = '/event_store.client.gossip.Gossip/Read';
/** An empty message of gRPC: not compressed, no bytes. */
const EMPTY_MESSAGE = Buffer.alloc(5);

const URL_PARTS = /^([^:]+:\/\/(?:[^:]+:[^@]+@)?)([^/?#@]+)((?:[/?#].*)?)$/s;

/** The addresses among which the client chooses. Empty if the URL names only one address or uses `+discover`. */
const seedsOf = (url: string): readonly string[] => {
  const [, prefix = '', addresses = ''] = URL_PARTS.exec(url) ?? [];
  const seeds = addresses.split(',').filter((seed) => seed !== '');
  return prefix.includes('+discover') || seeds.length < 2 ? [] : seeds;
};

/** Asks every address of the URL at the same time. Returns the addresses that neither answer nor fail in time. */
export const silentSeeds = async (url: string, clock: Clock): Promise<readonly string[]> => {
  const scheme = /[?&]tls=false/i.test(url) ? 'http' : 'https';
  const seeds = seedsOf(url);
  const silent = await Promise.all(seeds.map((seed) => isSilent(`${scheme}://${seed.includes(':') ? seed : `${seed}:2113`}`, clock)));
  return seeds.filter((_, index) => silent[index]);
};

/** The URL without the silent addresses. If no address would be left, the URL is unchanged. */
export const withoutSeeds = (url: string, silent: readonly string[]): string => {
  const left = seedsOf(url).filter((seed) => !silent.includes(seed));
  if (silent.length === 0 || left.length === 0) return url;
  const [, prefix, , rest] = URL_PARTS.exec(url)!;
  // With a single address, the client would not search for the leader. So the address is listed twice.
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
    // A TLS error, for example for an unknown certificate, counts as an answer too.
    const session = connect(address);
    session.on('error', answered);
    const request = session.request({ ':method': 'POST', ':path': GOSSIP, 'content-type': 'application/grpc', te: 'trailers' });
    request.on('error', answered).on('response', answered).end(EMPTY_MESSAGE);
    await clock.sleep(ANSWER_MS, done.signal);
    session.destroy();
    return silent;
  } catch {
    // The text is not an address. The client reports that later.
    return false;
  }
};

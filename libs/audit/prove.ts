/**
 * Proofs for a third party, who can check them with the standalone verifier (apps/operator/verify.mjs). An inclusion proof shows that events are in
 * the signed log. A consistency proof shows that a later head only added events to an earlier head.
 */
import type { Position, Recorded } from '#eventstore';
import { ServiceError } from '#kernel';
import { paymentStream } from '#payments';
import { type Head, headKeys, openHead } from './head.js';
import { consistencyProof, eventHash, HASH_BYTES, inclusionProof, leafOf, rememberingTiles, rootOf, TILE_HASHES } from './merkle.js';
import { logState, type ProvePorts, signLog, storedTiles } from './seal.js';

/** Events with their leaf numbers and proofs, for the tree of one signed head. */
export interface InclusionProofs {
  readonly kind: 'payfold inclusion proofs';
  /** The signed head, as text. */
  readonly head: string;
  /** Public keys that verify the heads of this log. The reader must compare them with keys from an earlier time. */
  readonly keys: readonly string[];
  readonly events: readonly { readonly leaf: number; readonly event: ReturnType<typeof leafOf>; readonly proof: readonly string[] }[];
}

export interface ConsistencyProof {
  readonly kind: 'payfold consistency proof';
  readonly first: string;
  readonly second: string;
  readonly keys: readonly string[];
  readonly proof: readonly string[];
}

export const base64 = (hashes: readonly Buffer[]): string[] => hashes.map((hash) => hash.toString('base64'));

/**
 * Proves all events of a payment with the newest head. Signs that head first if it is missing. Throws if an event is not sealed yet. Unknown payment
 * → PAYMENT_NOT_FOUND.
 */
export const provePayment = async (ports: ProvePorts, paymentId: string): Promise<InclusionProofs> => {
  const events: Recorded[] = [];
  for await (const event of ports.store.read(paymentStream(paymentId))) events.push(event);
  if (events.length === 0) throw new ServiceError('PAYMENT_NOT_FOUND', 'Payment not found.');
  const signed = await signLog(ports);
  if (!signed) throw new Error('nothing is sealed yet');
  return proveEvents(ports, events, signed);
};

/** Proves that events are in the tree of a signed head. Throws if an event differs from the sealed one, and names the event. */
export const proveEvents = async (
  ports: ProvePorts,
  events: readonly Recorded[],
  { head, note }: { head: Head; note: string },
): Promise<InclusionProofs> => {
  const tiles = rememberingTiles(storedTiles(ports.db));
  const proved = [];
  for (const event of events) {
    const leaf = await leafIndex(ports, event, head.size);
    const tile = await tiles(0, Math.floor(leaf / TILE_HASHES));
    const from = (leaf % TILE_HASHES) * HASH_BYTES;
    if (!eventHash(event).equals(tile.subarray(from, from + HASH_BYTES)))
      throw new Error(`the event at position ${event.position} is not what was sealed; payfold audit verify tells more`);
    proved.push({ leaf, event: leafOf(event), proof: base64(await inclusionProof(tiles, leaf, head.size)) });
  }
  return { kind: 'payfold inclusion proofs', head: note, keys: headKeys(head.origin, ports.keys).map(({ vkey }) => vkey), events: proved };
};

/**
 * Leaf number of an event. If the store's positions count events, the leaf number is the position minus 1. Otherwise, events are counted from the
 * first one of the leaf's tile.
 */
const leafIndex = async ({ db, store }: ProvePorts, { position }: Recorded, size: number): Promise<number> => {
  const notYet = () => new Error(`the event at position ${position} is not sealed yet`);
  if (/^\d+$/.test(position)) {
    const leaf = Number(BigInt(position)) - 1;
    if (leaf >= size) throw notYet();
    return leaf;
  }
  const { rows } = await db.query<{ number: string; first_position: string }>(
    'select number, first_position from log_tile where level = 0 and first_position <= $1 order by first_position desc limit 1',
    [position],
  );
  if (!rows[0]) throw notYet();
  let leaf = Number(rows[0].number) * TILE_HASHES;
  if (rows[0].first_position === position) return leaf;
  for await (const batch of store.readAll(rows[0].first_position as Position, { until: position })) leaf += batch.length;
  if (leaf >= size) throw notYet();
  return leaf;
};

/**
 * Proof that the larger of two signed heads only added events to the smaller one. Throws {@link ForgedHead} if no key of this log signed one of them.
 */
export const proveConsistency = async (
  ports: ProvePorts,
  first: string,
  second: string,
): Promise<ConsistencyProof & { readonly heads: readonly [Head, Head] }> => {
  const { origin, size } = await logState(ports.db);
  const keys = headKeys(origin, ports.keys);
  const [a, b] = [first, second].map((note) => ({ note, head: openHead(note, keys) })).sort((x, y) => x.head.size - y.head.size) as [
    { note: string; head: Head },
    { note: string; head: Head },
  ];
  if (b.head.size > size) throw new Error(`a head of ${b.head.size} events was signed; only ${size} are sealed now`);
  const tiles = rememberingTiles(storedTiles(ports.db));
  for (const { head } of [a, b])
    if (!(await rootOf(tiles, head.size)).equals(head.root))
      throw new Error(`the log of now does not hold the ${head.size} events that were signed at ${head.at}`);
  const proof = base64(await consistencyProof(tiles, a.head.size, b.head.size));
  return { kind: 'payfold consistency proof', first: a.note, second: b.note, keys: keys.map(({ vkey }) => vkey), proof, heads: [a.head, b.head] };
};

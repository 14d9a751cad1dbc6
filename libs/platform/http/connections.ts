/**
 * Limits of what one client may hold of this server: connections, unanswered requests, time and memory for bodies
 * (docs/contract.md#the-http-edge).
 *
 * Node parses all requests of one read, up to 64 KiB, before the first is answered. So its parser gets the bytes in pieces. It gets no further piece
 * while two requests of the connection are unanswered. A connection with many pieces takes turns with all others.
 *
 * Node accepts one connection in each turn of the event loop. So the requests of an address wait while it opens connections. Then turns stay short,
 * and the next client is accepted soon (docs/decisions/0041-what-one-client-may-hold.md). Nothing is read from a new connection until its turn.
 * Chunks that come together with their head are parsed at once. The rest of such a body waits for turns too.
 */
import type { IncomingMessage, ServerResponse } from 'node:http';
import { isIPv6, type Socket } from 'node:net';
import { systemClock } from '#kernel';

/** Requests of one connection that are parsed and not answered. The end of a body is seen only with the next head, so one would not do. */
const MAX_UNANSWERED = 2;
/** Requests of one connection that begin in one turn of the event loop. */
const MAX_BEGUN_IN_TURN = 2;
/** Milliseconds of one turn for which the parser gets pieces of one connection. Most of what a request does comes later, and is not counted here. */
const MAX_PARSED_MS_IN_TURN = 0.5;
/** Node makes an object of each chunk of a body, and a chunk may have one byte. So a piece is small. */
const MAX_PIECE_BYTES = 2 * 1024;
/** Milliseconds for which the connections of an address wait, while connections come. After that, one of each kind goes on in each turn. */
const MAX_OPENING_MS = 200;
/** Waiting connections of an address, of each kind, that go on in a turn that has brought no new one. */
const ADMITTED_IN_TURN = 8;
/** Every head of HTTP/1 ends so. The parser refuses all other forms. HTTP/0.9 has no headers, and is refused later. */
const HEAD_END = '\r\n\r\n';
/** Milliseconds in which a client can read the last answer. If a socket is closed with unread bytes, the client may lose the answer. */
const LINGER_MS = 2_000;
/** Bytes of all bodies whose requests are not answered, and of those from one address. */
const MAX_BODIES_BYTES = 64 * 1024 * 1024;
const MAX_BODIES_PER_ADDRESS_BYTES = 16 * 1024 * 1024;
/** Bytes of all bodies that come without credentials. So strangers leave memory for the bodies of partners. */
const MAX_BODIES_OF_STRANGERS_BYTES = 16 * 1024 * 1024;
const NOTHING = Buffer.alloc(0);

/** The connections and bodies of one address. */
class Peer {
  connections = 0;
  bodyBytes = 0;
  /** True from a new connection of this address until a turn has brought none to the server and no requests wait. */
  isOpening = false;
  /** Connections that wait for {@link admit}, the oldest first: with new requests, and with bytes of a body or bytes that are discarded. */
  private readonly waiting = { requests: new Set<Connection>(), rests: new Set<Connection>() };

  /** `onWaiting`: called when a connection begins to wait. */
  constructor(private readonly onWaiting: (peer: Peer) => void) {}

  get hasRequests(): boolean {
    return this.waiting.requests.size > 0;
  }

  get hasWaiting(): boolean {
    return this.waiting.requests.size + this.waiting.rests.size > 0;
  }

  wait(connection: Connection, what: 'requests' | 'rests'): void {
    this.waiting[what].add(connection);
    this.onWaiting(this);
  }

  /** So many connections of each kind go on in this turn. */
  admit(count: number): void {
    for (const queue of Object.values(this.waiting)) {
      let left = count;
      for (const connection of queue) {
        if (left-- === 0) break;
        queue.delete(connection);
        connection.admit();
      }
    }
  }
}

const connections = new WeakMap<Socket, Connection>();

/** The connection of a request. */
export const connectionOf = ({ socket }: Pick<IncomingMessage, 'socket'>): Connection => connections.get(socket)!;

/** The connections of one server. */
export class Connections {
  private readonly peers = new Map<string, Peer>();
  private bodyBytes = 0;
  private strangersBytes = 0;
  /** The addresses that open connections, or whose connections wait. */
  private readonly taking = new Set<Peer>();
  /** Since when each turn has brought a connection, in milliseconds. null: the last turn has brought none. */
  private acceptingSince: number | null = null;
  private acceptedInTurn = false;

  /** `perAddress`: the number of connections from one address. null: no limit, because all clients come through a proxy. */
  constructor(private readonly perAddress: number | null) {}

  /**
   * Call this after Node has attached its parser. The socket must be paused, and unread. A connection over the limit gets `refusal`, and is closed.
   */
  add(socket: Socket, refusal: string): void {
    const address = addressGroup(socket.remoteAddress ?? '');
    const peer = this.peers.get(address) ?? new Peer((one) => this.takesTurns(one));
    const connection = new Connection(socket, peer, (bytes, isStranger) => this.takeForBody(peer, bytes, isStranger));
    connections.set(socket, connection);
    this.opened(peer);
    if (this.perAddress !== null && peer.connections >= this.perAddress) return connection.turnAway(refusal);
    peer.connections += 1;
    this.peers.set(address, peer);
    socket.once('close', () => {
      peer.connections -= 1;
      if (peer.connections === 0) this.peers.delete(address);
    });
    connection.awaitTurn();
  }

  private opened(peer: Peer): void {
    this.acceptingSince ??= systemClock.monotonic();
    this.acceptedInTurn = true;
    peer.isOpening = true;
    this.takesTurns(peer);
  }

  private takesTurns(peer: Peer): void {
    if (this.taking.size === 0) setImmediate(() => this.endTurn());
    this.taking.add(peer);
  }

  private endTurn(): void {
    const isAccepting = this.acceptedInTurn;
    this.acceptedInTurn = false;
    if (!isAccepting) this.acceptingSince = null;
    if (this.acceptingSince === null || systemClock.monotonic() - this.acceptingSince >= MAX_OPENING_MS)
      for (const peer of this.taking) {
        peer.admit(isAccepting ? 1 : ADMITTED_IN_TURN);
        if (isAccepting) continue;
        if (!peer.hasRequests) peer.isOpening = false;
        if (!peer.hasWaiting) this.taking.delete(peer);
      }
    if (this.taking.size > 0) setImmediate(() => this.endTurn());
  }

  private takeForBody(peer: Peer, bytes: number, isStranger: boolean): boolean {
    if (bytes > 0 && this.bodyBytes + bytes > MAX_BODIES_BYTES) return false;
    if (bytes > 0 && isStranger && this.strangersBytes + bytes > MAX_BODIES_OF_STRANGERS_BYTES) return false;
    if (bytes > 0 && this.perAddress !== null && peer.bodyBytes + bytes > MAX_BODIES_PER_ADDRESS_BYTES) return false;
    this.bodyBytes += bytes;
    peer.bodyBytes += bytes;
    if (isStranger) this.strangersBytes += bytes;
    return true;
  }
}

/** The last bytes of a piece, in which a head may begin to end. */
const lastOf = (piece: Buffer): string => piece.toString('latin1', Math.max(0, piece.length - HEAD_END.length + 1));

export class Connection {
  /** Bytes that the parser has not got. */
  private rest: Buffer = NOTHING;
  private readonly unanswered = new Set<IncomingMessage>();
  /** True until the first bytes could be read. */
  private isUnread = true;
  /** True while this class has paused the socket. Node pauses it too, and resumes it by itself. */
  private holds = true;
  /** The requests that began in this turn, and the time of the parser. null: the parser has got nothing in this turn. */
  private inTurn: { begun: number; parsedMs: number } | null = null;
  /** The request that began last. */
  private last: IncomingMessage | null = null;
  /** Bytes of the announced body that the parser has not got. Those that have come go to it as one piece, since Node makes one object of them. */
  private bodyLeft = 0;
  /** The last bytes that the parser has got. A head may end in the next read. */
  private tail = '';
  /** True if the parser may get pieces in this turn, although other connections of the address wait. */
  private isAdmitted = false;
  /** True if no further request of this connection is read. */
  private closing = false;
  /** The answer to what the client sent after its last whole request. */
  private refusal: string | null = null;
  private readonly parse: (bytes: Buffer) => void;

  /** `takeForBody` counts memory for a body, or gives it back if the number is negative. It returns false if a limit is reached. */
  constructor(
    private readonly socket: Socket,
    private readonly peer: Peer,
    readonly takeForBody: (bytes: number, isStranger: boolean) => boolean,
  ) {
    // Node's listener gives the bytes to its parser. Ours takes its place.
    [this.parse] = socket.listeners('data') as [(bytes: Buffer) => void];
    socket.on('data', (bytes) => {
      // A client may send without end. Discarded bytes wait for turns too, since one turn would read 2 MiB of each connection.
      if (this.closing) return this.hold();
      this.rest = this.rest.length === 0 ? bytes : Buffer.concat([this.rest, bytes]);
      this.feed();
    });
    socket.off('data', this.parse);
    socket.on('resume', () => this.feed());
  }

  private feed(): void {
    // If Node has paused the socket again, `goOn` must still resume it later.
    if (this.socket.isPaused()) return;
    this.holds = false;
    while (this.rest.length > 0 && !this.socket.isPaused()) {
      if (this.closing || !this.socket.writable) {
        this.rest = NOTHING;
        return;
      }
      if (!this.mayGoOn()) return this.hold();
      this.parsePiece(this.rest.subarray(0, this.bodyLeft || this.endOfPiece()));
    }
  }

  private hold(): void {
    this.holds = true;
    this.socket.pause();
    if (this.closing) this.awaitTurn();
  }

  private parsePiece(piece: Buffer): void {
    if (this.inTurn === null)
      setImmediate(() => {
        this.inTurn = null;
        this.goOn();
      });
    const inTurn = (this.inTurn ??= { begun: 0, parsedMs: 0 });
    this.rest = this.rest.subarray(piece.length);
    this.bodyLeft = Math.max(0, this.bodyLeft - piece.length);
    this.tail = (this.tail + lastOf(piece)).slice(1 - HEAD_END.length);
    const before = systemClock.monotonic();
    this.parse(piece);
    inTurn.parsedMs += systemClock.monotonic() - before;
  }

  private endOfPiece(): number {
    const across = (this.tail + this.rest.toString('latin1', 0, HEAD_END.length - 1)).indexOf(HEAD_END);
    if (across >= 0) return across + HEAD_END.length - this.tail.length;
    const end = this.rest.subarray(0, MAX_PIECE_BYTES + HEAD_END.length - 1).indexOf(HEAD_END);
    return end < 0 ? MAX_PIECE_BYTES : end + HEAD_END.length;
  }

  /** Counts a request until its answer is sent. */
  began(request: IncomingMessage, response: ServerResponse): void {
    this.unanswered.add(request);
    this.last = request;
    if (this.inTurn !== null) this.inTurn.begun += 1;
    // The piece has ended with the head.
    this.bodyLeft = Number(request.headers['content-length'] ?? 0);
    response.once('finish', () => {
      this.unanswered.delete(request);
      if (this.refusal !== null) this.sendRefusal();
      this.goOn();
    });
  }

  /** Returns false if the parser may not get a piece now. Then the connection goes on by itself later. */
  private mayGoOn(): boolean {
    if (this.closing) return this.isAdmitted;
    if (this.unanswered.size >= MAX_UNANSWERED) return false;
    // The bytes of an announced body follow its head at once. An answer before them would close the connection.
    if (this.bodyLeft > 0) return true;
    const { begun = 0, parsedMs = 0 } = this.inTurn ?? {};
    if (begun >= MAX_BEGUN_IN_TURN || parsedMs >= MAX_PARSED_MS_IN_TURN) return false;
    if (this.isAdmitted || !(this.peer.isOpening || (begun === 0 && this.isInChunks))) return true;
    this.awaitTurn();
    return false;
  }

  private goOn(): void {
    if (this.holds && this.mayGoOn()) this.socket.resume();
  }

  /** True within a body in chunks. If each chunk has one byte, the parser needs 2 µs for each. */
  private get isInChunks(): boolean {
    return this.last?.headers['transfer-encoding'] !== undefined && !this.last.complete;
  }

  /** The connection goes on when its address has a turn for it. */
  awaitTurn(): void {
    this.peer.wait(this, this.closing || this.isInChunks ? 'rests' : 'requests');
  }

  /** The connection goes on for one turn of the event loop, although its address opens connections. */
  admit(): void {
    this.isAdmitted = true;
    this.goOn();
    // Before it calls back, the event loop reads a new socket.
    setImmediate(() => {
      this.isAdmitted = false;
      this.isUnread = false;
    });
  }

  /** True if bytes may have come that the parser has not got. Node may take the connection for an idle one. */
  get holdsBytes(): boolean {
    return this.isUnread || this.rest.length > 0 || this.socket.readableLength > 0;
  }

  /** Discards all further bytes of the client. The answer that is being sent is the last one, and must close the connection. */
  readNoMore(): void {
    this.closing = true;
    this.rest = NOTHING;
    // Node calls this after the last answer.
    this.socket.destroySoon = () => this.end();
    this.socket.resume();
  }

  /** Refuses what the client sent after its last whole request. Sends `answer` after the answers to whole requests, and closes the connection. */
  refuse(answer: string): void {
    this.refusal = answer;
    this.readNoMore();
    this.sendRefusal();
  }

  private sendRefusal(): void {
    // Before their answers, the client would take the refusal for one of them.
    if (!this.socket.writable || this.awaitsAnswer) return;
    this.end(this.refusal!);
  }

  /** True while an answer is due or being sent. */
  get isAnswering(): boolean {
    return this.closing || this.awaitsAnswer;
  }

  /** True while a request that was parsed to its end has no complete answer. */
  private get awaitsAnswer(): boolean {
    return [...this.unanswered].some(({ complete }) => complete);
  }

  /** Refuses the whole connection. It does not linger, because such connections could fill the server. */
  turnAway(answer: string): void {
    this.closing = true;
    this.socket.end(answer);
    this.socket.destroySoon();
  }

  private end(text = ''): void {
    this.socket.end(text);
    setTimeout(() => this.socket.destroy(), LINGER_MS).unref();
  }
}

/**
 * The name under which a client counts: its IPv4 address, or the first 64 bits of its IPv6 address, since a client may choose the others. An IPv4
 * address that is written as IPv6 counts as IPv4.
 */
export const addressGroup = (address: string): string => {
  const withoutZone = address.replace(/%.*$/, '');
  if (!isIPv6(withoutZone)) return address;
  // A URL writes every address in one form, without an IPv4 part.
  const [head = '', tail = ''] = new URL(`http://[${withoutZone}]`).hostname.slice(1, -1).split('::');
  const [first, last] = [head, tail].map((part) => part.split(':').filter((group) => group !== ''));
  const groups = [...first!, ...Array<string>(8 - first!.length - last!.length).fill('0'), ...last!];
  if (groups.slice(0, 5).every((group) => group === '0') && groups[5] === 'ffff')
    return groups
      .slice(6)
      .flatMap((group) => [parseInt(group, 16) >> 8, parseInt(group, 16) & 255])
      .join('.');
  return `${groups.slice(0, 4).join(':')}::/64`;
};

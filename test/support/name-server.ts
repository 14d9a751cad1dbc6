/** A DNS server on loopback (UDP, A and AAAA). A spec sets its answers. */
import { createSocket } from 'node:dgram';
import { isIP } from 'node:net';

/** The answer for a name: its addresses, `drop` (no answer), `fail` (SERVFAIL), or `none` (the name does not exist). */
export type NameAnswer =
  readonly string[] | 'drop' | 'fail' | 'none' | { readonly cname?: string; readonly addresses: readonly string[]; readonly ttl?: number };

export interface NameServer {
  /** `127.0.0.1:port`. */
  readonly address: string;
  readonly queries: readonly { readonly name: string; readonly type: 'A' | 'AAAA' }[];
  answer(name: string, answer: NameAnswer | ((type: 'A' | 'AAAA', number: number) => NameAnswer)): void;
  close(): void;
}

const HEADER_BYTES = 12;
const TYPES: Readonly<Record<number, 'A' | 'AAAA'>> = { 1: 'A', 28: 'AAAA' };
const POINTER_TO_QUESTION = Buffer.from([0xc0, 0x0c]);

const encodeName = (name: string): Buffer =>
  Buffer.concat([...name.split('.').map((label) => Buffer.from([label.length, ...Buffer.from(label)])), Buffer.from([0])]);

const encodeAddress = (address: string): Buffer => {
  if (isIP(address) === 4) return Buffer.from(address.split('.').map(Number));
  // The URL parser writes the eight groups in hex and leaves out at most one run of zeroes.
  const [left = '', right] = new URL(`http://[${address}]`).hostname.slice(1, -1).split('::');
  const groups = (text: string) => (text === '' ? [] : text.split(':'));
  const [head, tail] = [groups(left), groups(right ?? '')];
  const all = right === undefined ? head : [...head, ...Array<string>(8 - head.length - tail.length).fill('0'), ...tail];
  const bytes = Buffer.alloc(16);
  all.forEach((group, index) => bytes.writeUInt16BE(parseInt(group, 16), index * 2));
  return bytes;
};

const record = (name: Buffer, type: number, ttl: number, data: Buffer): Buffer => {
  const head = Buffer.alloc(10);
  head.writeUInt16BE(type, 0);
  head.writeUInt16BE(1, 2);
  head.writeUInt32BE(ttl, 4);
  head.writeUInt16BE(data.length, 8);
  return Buffer.concat([name, head, data]);
};

export const startNameServer = async (): Promise<NameServer> => {
  const answers = new Map<string, NameAnswer | ((type: 'A' | 'AAAA', number: number) => NameAnswer)>();
  const queries: { name: string; type: 'A' | 'AAAA' }[] = [];
  const socket = createSocket('udp4');
  socket.on('message', (message, from) => {
    let at = HEADER_BYTES;
    const labels: string[] = [];
    for (; message[at] !== 0; at += message[at]! + 1) labels.push(message.subarray(at + 1, at + 1 + message[at]!).toString());
    const name = labels.join('.').toLowerCase();
    const type = TYPES[message.readUInt16BE(at + 1)];
    if (type) queries.push({ name, type });
    const scripted = answers.get(name) ?? 'none';
    const number = queries.filter((query) => query.name === name && query.type === type).length;
    const answer = typeof scripted === 'function' ? scripted(type ?? 'A', number) : scripted;
    if (answer === 'drop') return;
    const wanted = (addresses: readonly string[]) => addresses.filter((address) => type !== undefined && isIP(address) === (type === 'A' ? 4 : 6));
    const typeNumber = type === 'AAAA' ? 28 : 1;
    const { cname, addresses, ttl = 0 } = typeof answer === 'string' ? { addresses: [] } : 'addresses' in answer ? answer : { addresses: answer };
    const owner = cname === undefined ? POINTER_TO_QUESTION : encodeName(cname);
    const records = [
      ...(cname === undefined ? [] : [record(POINTER_TO_QUESTION, 5, ttl, encodeName(cname))]),
      ...wanted(addresses).map((address) => record(owner, typeNumber, ttl, encodeAddress(address))),
    ];
    const header = Buffer.alloc(HEADER_BYTES);
    message.copy(header, 0, 0, 2);
    header.writeUInt16BE(0x8180 | (answer === 'fail' ? 2 : answer === 'none' ? 3 : 0), 2);
    header.writeUInt16BE(1, 4);
    header.writeUInt16BE(records.length, 6);
    socket.send(Buffer.concat([header, message.subarray(HEADER_BYTES, at + 5), ...records]), from.port, from.address);
  });
  await new Promise<void>((resolve) => socket.bind(0, '127.0.0.1', resolve));
  return {
    address: `127.0.0.1:${socket.address().port}`,
    queries,
    answer: (name, answer) => void answers.set(name, answer),
    close: () => void socket.close(),
  };
};

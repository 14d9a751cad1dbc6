/**
 * The floods that two penetration tests made: slow exports, unsigned intakes, declined cards, connections without end, and one account beside
 * another. Each runs until it is told to stop, from an address of its own.
 *
 * A flood has a thread of its own, so that its work does not delay the answers of the honest client. The thread gives way to the service, because a
 * real flood comes from other machines.
 */
import { Agent, request } from 'node:http';
import { setPriority } from 'node:os';
import { isMainThread, parentPort, Worker, workerData } from 'node:worker_threads';
import { CARD_FORM, intakeOf, INTAKE, Payer } from '../support/checkout.js';
import { FloodSocket } from '../support/flood.js';
import { CARD, PAYMENTS, paymentOf } from '../support/service.js';

export interface Target {
  readonly url: string;
  readonly auditUrl: string;
  /** `AuditKey …` of a finance key. */
  readonly auditor: string;
  /** The account that attacks the others. */
  readonly attacker: { readonly apiKey: string; readonly portalId: string };
  /** A portal of the honest account, with hosted checkout. */
  readonly portalId: string;
}

/** The number of answers by status, or by the word for a connection that ended. */
export type Answers = Map<string, number>;

interface Flood {
  readonly name: string;
  /** The group that `--only` names. */
  readonly group: 'audit' | 'checkout' | 'connections' | 'tenants';
  run(target: Target, answers: Answers, stop: AbortSignal): Promise<void>;
}

const STRANGERS = ['127.0.0.2', '127.0.0.3', '127.0.0.4'] as const;
const [STRANGER] = STRANGERS;
const KIB = 1024;
/** Milliseconds between two looks at connections that the service may have closed. */
const LOOK_EVERY_MS = 250;
/** A slow reader takes what is there for so many milliseconds of each {@link LOOK_EVERY_MS}. */
const READS_FOR_MS = 5;
/** Bytes of an intake: the size with which strangers filled the log. */
const INTAKE_BYTES = 239 * KIB;
const LARGE_CREATE_BYTES = 240 * KIB;
const LINES = 50;

const later = (ms: number) => new Promise((wake) => setTimeout(wake, ms));
const count = (answers: Answers, answer: string) => answers.set(answer, (answers.get(answer) ?? 0) + 1);

/** Calls `one` without end, so many at a time. */
const parallel = async (many: number, stop: AbortSignal, answers: Answers, one: (number: number) => Promise<string | number>): Promise<void> => {
  let number = 0;
  await Promise.all(
    Array.from({ length: many }, async () => {
      while (!stop.aborted) {
        const answer = await one(number++).then(String, (error: NodeJS.ErrnoException) => error.code ?? 'failed');
        if (!stop.aborted) count(answers, answer);
      }
    }),
  );
};

/** Keeps connections open that send `text`. A connection that the service closes is opened again. */
const sockets = async (
  many: number,
  stop: AbortSignal,
  answers: Answers,
  one: { readonly url: string; readonly from: readonly string[]; readonly text: string; readonly read: 'all' | 'slowly' | 'nothing' },
): Promise<void> => {
  const open = async (number: number) => {
    const socket = await FloodSocket.open(one.url, one.from[number % one.from.length]!, one.text);
    return one.read === 'all' ? socket.read() : socket;
  };
  const all: FloodSocket[] = [];
  for (let number = 0; number < many && !stop.aborted; number++) all.push(await open(number));
  while (!stop.aborted) {
    if (one.read === 'slowly') for (const socket of all) socket.read();
    await later(READS_FOR_MS);
    if (one.read === 'slowly') for (const { socket } of all) socket.pause();
    await later(LOOK_EVERY_MS - READS_FOR_MS);
    for (const [number, { closed, received }] of all.entries()) {
      if (!closed || stop.aborted) continue;
      count(answers, /^HTTP\/1.1 (\d{3})/.exec(received)?.[1] ?? 'closed');
      all[number] = await open(number);
    }
  }
  for (const { closed, received } of all) if (!closed) count(answers, /^HTTP\/1.1 (\d{3})/.exec(received)?.[1] ?? 'open');
  for (const socket of all) socket.close();
};

const get = (path: string, ...lines: string[]) => [`GET ${path} HTTP/1.1`, 'host: attack', ...lines, '', ''].join('\r\n');

/** Sends requests as a stranger, on as many connections as wait for an answer. Its result is the status. `stop` closes the connections. */
const sender = (url: string, stop: AbortSignal) => {
  const agent = new Agent({ keepAlive: true });
  stop.addEventListener('abort', () => agent.destroy());
  return (method: string, path: string, headers: Readonly<Record<string, string>>, body?: string): Promise<number> =>
    new Promise((resolve, reject) => {
      const sent = request(new URL(path, url), { method, agent, localAddress: STRANGER, headers }, (response) => {
        response.resume().on('end', () => resolve(response.statusCode!));
        response.on('error', reject);
      });
      sent.on('error', reject).end(body);
    });
};

const creates =
  (many: number, card: string, bytes = 0) =>
  async ({ url, attacker }: Target, answers: Answers, stop: AbortSignal): Promise<void> => {
    const send = sender(url, stop);
    const padding = bytes === 0 ? {} : { metadata: { note: 'x'.repeat(Math.min(bytes / LINES, 8_000) - 200) } };
    const lines = bytes === 0 ? [10_000] : Array.from({ length: LINES }, () => 100);
    const { lineItems, ...payment } = paymentOf(attacker.portalId, { lines, number: card });
    const body = JSON.stringify({ ...payment, lineItems: lineItems.map((line) => ({ ...line, ...padding })) });
    await parallel(many, stop, answers, () =>
      send('POST', PAYMENTS, { authorization: `ApiKey ${attacker.apiKey}`, 'content-type': 'application/json' }, body),
    );
  };

const lists =
  (many: number) =>
  async ({ url, attacker }: Target, answers: Answers, stop: AbortSignal): Promise<void> => {
    const send = sender(url, stop);
    await parallel(many, stop, answers, () => send('GET', `${PAYMENTS}?limit=100`, { authorization: `ApiKey ${attacker.apiKey}` }));
  };

const exports =
  (many: number, read: 'all' | 'slowly') =>
  ({ auditUrl, auditor }: Target, answers: Answers, stop: AbortSignal): Promise<void> =>
    sockets(many, stop, answers, {
      url: auditUrl,
      from: [STRANGER],
      text: get('/audit/v1/exports/payments', `authorization: ${auditor}`, 'connection: close'),
      read,
    });

const connections =
  (many: number, read: 'all' | 'nothing', text: (target: Target) => string, from: readonly string[] = [STRANGER]) =>
  (target: Target, answers: Answers, stop: AbortSignal): Promise<void> =>
    sockets(many, stop, answers, { url: target.url, from, text: text(target), read });

const unfinished = [`POST ${INTAKE} HTTP/1.1`, 'host: attack', 'content-type: application/json', `content-length: ${256 * KIB}`, '', ''].join('\r\n');

const ALL: readonly Flood[] = [
  { name: '20 slow exports', group: 'audit', run: exports(20, 'slowly') },
  { name: '30 quick exports', group: 'audit', run: exports(30, 'all') },
  {
    name: 'unsigned intakes of 239 KB, 20 at a time',
    group: 'checkout',
    run: async ({ url, portalId }, answers, stop) => {
      const send = sender(url, stop);
      const line = { amount_cents: 250, metadata: { note: 'x'.repeat(INTAKE_BYTES / LINES - 100) } };
      const lines = Array.from({ length: LINES }, (_, index) => ({ ...line, reference_id: `R-${index}` }));
      await parallel(20, stop, answers, (number) =>
        send(
          'POST',
          INTAKE,
          { 'content-type': 'application/json' },
          JSON.stringify({ ...intakeOf({ portalId }), amount_cents: 250 * LINES, line_items: lines, state: `s-${number}` }),
        ),
      );
    },
  },
  {
    name: 'declined cards, 20 at a time',
    group: 'checkout',
    run: ({ url, portalId }, answers, stop) =>
      parallel(20, stop, answers, async (number) => {
        const payer = new Payer(url);
        const { status, location } = await payer.intake(intakeOf({ portalId }, { state: `d-${number}` }));
        const id = /^\/checkout\/(cs_[\w-]{32})$/.exec(location)?.[1];
        return id === undefined ? status : (await payer.pay(id, { ...CARD_FORM, card_number: CARD.declined })).status;
      }),
  },
  {
    name: '1,680 requests on each of 40 connections, answers unread',
    group: 'connections',
    run: connections(40, 'nothing', () => get('/openapi.json').repeat(1_680)),
  },
  {
    name: '1,400 requests for a file on each of 10 connections, answers unread',
    group: 'connections',
    run: connections(10, 'nothing', () => get('/docs/swagger-ui-bundle.js').repeat(1_400)),
  },
  {
    name: '400 lists on each of 40 connections, answers unread',
    group: 'connections',
    run: connections(40, 'nothing', ({ attacker }) => get(`${PAYMENTS}?limit=100`, `authorization: ApiKey ${attacker.apiKey}`).repeat(400)),
  },
  { name: '4,096 connections', group: 'connections', run: connections(4_096, 'all', () => get('/healthz')) },
  {
    name: '1,500 unfinished bodies of 256 KiB',
    group: 'connections',
    run: connections(1_500, 'all', () => unfinished + ' '.repeat(256 * KIB - 1), STRANGERS),
  },
  { name: '400 slow creates at a time', group: 'tenants', run: creates(400, CARD.slow) },
  { name: '100 creates at a time', group: 'tenants', run: creates(100, CARD.approved) },
  { name: '100 lists at a time', group: 'tenants', run: lists(100) },
  { name: '50 creates of 240 KB at a time', group: 'tenants', run: creates(50, CARD.approved, LARGE_CREATE_BYTES) },
  { name: '100 lists of such payments at a time', group: 'tenants', run: lists(100) },
];

/** The floods in their order. */
export const FLOODS: readonly Pick<Flood, 'name' | 'group'>[] = ALL;

/** Begins a flood. `end` stops it, and returns the answers that it got. */
export const begin = (name: string, target: Target): { end(): Promise<Answers> } => {
  const thread = new Worker(new URL(import.meta.url), { workerData: { name, target } satisfies Begun });
  const answered = new Promise<Answers>((resolve, reject) => thread.once('message', resolve).once('error', reject));
  return {
    end: async () => {
      thread.postMessage('stop');
      const answers = await answered;
      await thread.terminate();
      return answers;
    },
  };
};

interface Begun {
  readonly name: string;
  readonly target: Target;
}

/** Nice value of the thread of a flood. */
const GIVES_WAY = 10;
/** A flood whose requests are never answered ends after this. */
const GIVE_UP_MS = 60_000;

if (!isMainThread) {
  const { name, target } = workerData as Begun;
  setPriority(0, GIVES_WAY);
  const answers: Answers = new Map();
  const stop = new AbortController();
  const flooding = ALL.find((one) => one.name === name)!.run(target, answers, stop.signal);
  parentPort!.once('message', () => {
    stop.abort();
    void Promise.race([flooding, later(GIVE_UP_MS)]).then(() => parentPort!.postMessage(answers));
  });
}

/**
 * The sandbox processor as a real process under load, killed in the middle of writes. It must keep everything that it acknowledged, have nothing
 * twice, and answer every reference as before. Needs the built code (`npm run build`).
 */
import { spawn } from 'node:child_process';
import { randomInt } from 'node:crypto';
import { appendFile, mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from '@jest/globals';
import { startSimulatorProcess, type SimulatorProcess } from '../../apps/simulator/child.js';
import { controlKeyOf, createSimulatorControl } from '../../apps/simulator/control.js';
import { CARDS } from '../../apps/simulator/fixtures.js';
import type { Truth } from '../../apps/simulator/processor.js';
import { findSimulator } from '../../apps/simulator/server.js';
import { systemClock } from '#kernel';
import { Secret, type ChargeTxn, type GatewayAccount, type Outcome, type PaymentInstrument, type Ref, type ReversalTxn } from '#payments';
import { createSimulatorGateway, type SimulatorGateway } from '#gateways';
import { drawRef } from '../contract/gateway.js';
import { eventually } from '../support/eventually.js';

const ENTRY = resolve('dist/apps/simulator/main.js');
const CLIENTS = 24;
const CVV = '946';

const account: GatewayAccount = { gateway: 'simulator', merchantAccount: 'e2e', credentialsRef: 'sandbox', environment: 'sandbox' };
const instrument: PaymentInstrument = {
  type: 'card',
  number: new Secret('4242424242424242'),
  expiry: { month: 12, year: 2030 },
  cvv: new Secret(CVV),
};
const soon = () => AbortSignal.timeout(10_000);

let dataDir: string;
let logged: string[];
const running = new Set<SimulatorProcess>();
beforeEach(async () => {
  dataDir = await mkdtemp(join(tmpdir(), 'payfold-e2e-simulator-'));
  logged = [];
});
afterEach(async () => {
  for (const simulator of running) await simulator.kill();
  running.clear();
  await rm(dataDir, { recursive: true, force: true });
});

const start = async (): Promise<SimulatorProcess> => {
  const simulator = await startSimulatorProcess({ dataDir, entry: ENTRY, onLog: (line) => logged.push(line) });
  running.add(simulator);
  return simulator;
};
const journal = () => join(dataDir, 'simulator', 'journal.ndjson');
/** The number of the last write on disk. Concurrent calls share a write. */
const writes = async () => Number((await readFile(journal(), 'utf8')).split('\n')[1]);
/** The file with the youngest writes. */
const log = async () => {
  const books = join(dataDir, 'simulator', 'books');
  return join(
    books,
    (await readdir(books))
      .filter((name) => name.endsWith('.log'))
      .sort()
      .at(-1)!,
  );
};

interface Call {
  readonly ref: Ref;
  readonly op: 'charge' | 'void';
  readonly amountCents: number;
  readonly chargeTransactionId?: string;
  readonly outcome: Outcome<ChargeTxn | ReversalTxn>;
}

const begun = () => ({ leg: 'combined', account, begunAt: new Date().toISOString() }) as const;
const gatewayAt = ({ url: endpoint }: { readonly url: string }) => createSimulatorGateway({ endpoint, account, clock: systemClock });

const again = (gateway: SimulatorGateway, { ref, op, amountCents, chargeTransactionId = '' }: Call): Promise<Outcome<ChargeTxn | ReversalTxn>> =>
  op === 'charge'
    ? gateway.charge({ ...begun(), ref, amountCents, instrument }, soon())
    : gateway.void({ ...begun(), ref, chargeTransactionId, amountCents, askedBy: 'void' }, soon());

/** Clients charge, and void a part of every third charge, until the simulator is gone. Returns every call with its answer. */
const load = async (gateway: SimulatorGateway): Promise<Call[]> => {
  const calls: Call[] = [];
  const client = async () => {
    for (;;) {
      const charge: Omit<Call, 'outcome'> = { ref: drawRef(), op: 'charge', amountCents: randomInt(100, 100_000) };
      const outcome = await again(gateway, { ...charge, outcome: { kind: 'unknown', cause: 'timeout' } });
      calls.push({ ...charge, outcome });
      if (outcome.kind !== 'approved') return;
      if (calls.length % 3 !== 0) continue;
      const part: Omit<Call, 'outcome'> = { ref: drawRef(), op: 'void', amountCents: 50, chargeTransactionId: outcome.txn.transactionId };
      const voided = await again(gateway, { ...part, outcome });
      calls.push({ ...part, outcome: voided });
      if (voided.kind !== 'approved') return;
    }
  };
  await Promise.all(Array.from({ length: CLIENTS }, client));
  return calls;
};

describe('killed under load', () => {
  test('every acknowledged operation is there after the restart, and none twice', async () => {
    const all: Call[] = [];
    for (let round = 0; round < 5; round++) {
      const simulator = await start();
      const gateway = gatewayAt(simulator);
      const loading = load(gateway);
      // Kill the simulator after a random number of writes.
      const enough = (await writes()) + randomInt(10, 60);
      await eventually(async () => (await writes()) > enough, { everyMs: 1 });
      await simulator.kill();
      expect(await simulator.exited).toMatchObject({ signal: 'SIGKILL' });
      all.push(...(await loading));
      gateway.close();
      if (round % 2 === 1) {
        // A kill leaves half a write only sometimes. So append one: a checksum, a length of 1000 bytes, and the first bytes of them.
        await appendFile(await log(), Buffer.from([1, 2, 3, 4, 0xe8, 3, 1, 9, 9, 9, 9]));
      }
    }

    const simulator = await start();
    const gateway = gatewayAt(simulator);
    const truth = await createSimulatorControl(simulator.url, controlKeyOf(dataDir)).truth();
    const byRef = new Map<Ref, Truth>();
    for (const entry of truth) {
      expect(byRef.has(entry.ref)).toBe(false);
      byRef.set(entry.ref, entry);
    }

    const acknowledged = all.filter(({ outcome }) => outcome.kind === 'approved');
    const lost = all.filter(({ outcome }) => outcome.kind !== 'approved');
    expect(acknowledged.length).toBeGreaterThan(200);
    for (const { ref, op, amountCents, outcome } of acknowledged) {
      const { transactionId } = (outcome as { txn: ReversalTxn }).txn;
      expect(byRef.get(ref)).toMatchObject({ op, amountCents, transactionId, result: 'approved' });
    }
    // Each acknowledged call is sent again and must get the same answer.
    for (let from = 0; from < acknowledged.length; from += 100)
      await Promise.all(acknowledged.slice(from, from + 100).map(async (call) => expect(await again(gateway, call)).toEqual(call.outcome)));
    // The kills cut off these calls. Finalising must say whether each was executed, as in the bank's books.
    for (const { ref, op, outcome } of lost) {
      expect(['unknown', 'not_processed']).toContain(outcome.kind);
      const finalized = await gateway.finalize({ ...begun(), ref, op, amountCents: 0, chargeTransactionId: null, last4: null }, soon());
      expect(finalized.kind).toBe(byRef.has(ref) ? 'executed' : 'never');
      if (outcome.kind === 'not_processed') expect(finalized.kind).toBe('never');
    }
    // The bank has executed no reference that was not sent.
    const asked = new Set(all.map(({ ref }) => ref));
    expect([...byRef.keys()].filter((ref) => !asked.has(ref))).toEqual([]);

    // The batches must settle the charged amounts minus the voided ones.
    const executed = truth.filter(({ op }) => op === 'charge');
    const expected = executed.reduce((sum, entry) => sum + entry.amountCents! - entry.voidedCents!, 0);
    expect(await gateway.closeBatch(soon())).toMatchObject({ count: executed.length, amountCents: expected });
    let settled = 0;
    for await (const { lines } of gateway.settlements(null, soon())) for await (const { grossCents } of lines) settled += grossCents;
    expect(settled).toBe(expected);
    gateway.close();

    const books = join(dataDir, 'simulator', 'books');
    const bytes = (await Promise.all((await readdir(books)).map((file) => readFile(join(books, file), 'latin1')))).join('');
    for (const number of Object.keys(CARDS)) expect(bytes + logged.join()).not.toContain(number);
    expect(logged.join()).not.toMatch(new RegExp(`(?<!"pid":)\\b${CVV}\\b`));
    await simulator.stop();
  }, 600_000);
});

describe('the process', () => {
  test('SIGTERM ends it with 0; the next one finds its data, and its address is found while it runs', async () => {
    const first = await start();
    expect(await findSimulator(join(dataDir, 'simulator'))).toBe(first.url);
    const gateway = gatewayAt(first);
    const ref = drawRef();
    const outcome = await gateway.charge({ ...begun(), ref, amountCents: 100, instrument }, soon());
    await first.stop();
    gateway.close();
    expect(await first.exited).toEqual({ code: 0, signal: null });
    expect(await findSimulator(join(dataDir, 'simulator'))).toBeNull();

    const second = await start();
    const after = gatewayAt(second);
    expect(await after.finalize({ ...begun(), ref, op: 'charge', amountCents: 100, chargeTransactionId: null, last4: null }, soon())).toEqual({
      kind: 'executed',
      result: outcome,
    });
    after.close();
  });

  test('a second one on the same directory is refused with one line, and the first goes on', async () => {
    const first = await start();
    await expect(start()).rejects.toThrow(/^the simulator did not start: another simulator holds [^|]*$/);
    expect(await findSimulator(join(dataDir, 'simulator'))).toBe(first.url);
  });

  test('after kill -9 nothing is left that would hold the next one up', async () => {
    const first = await start();
    await first.kill();
    expect(await findSimulator(join(dataDir, 'simulator'))).toBeNull();
    await start();
  });

  test('it ends with the process that started it, also when that one is killed', async () => {
    const script = `import { startSimulatorProcess } from ${JSON.stringify(resolve('dist/apps/simulator/child.js'))};
      console.log((await startSimulatorProcess({ dataDir: ${JSON.stringify(dataDir)} })).url);`;
    const parent = spawn(process.execPath, ['--input-type=module', '-e', script], { stdio: ['ignore', 'pipe', 'inherit'] });
    const gone = new Promise((exited) => parent.once('exit', exited));
    const url = await new Promise<string>((ready) => parent.stdout.once('data', (text) => ready(String(text).trim())));
    expect(await findSimulator(join(dataDir, 'simulator'))).toBe(url);
    parent.kill('SIGKILL');
    await gone;
    await eventually(() =>
      fetch(`${url}/healthz`).then(
        () => false,
        () => true,
      ),
    );
    await start();
  });

  test('a damaged file is refused with one line', async () => {
    await (await start()).stop();
    await writeFile(journal(), `${(await readFile(journal(), 'utf8')).replace('journal', 'jounral')}`);
    await expect(start()).rejects.toThrow(/^the simulator did not start: [^|]* is damaged at line 1[^|]*$/);
  });

  test('a wrong environment is refused with its faults', async () => {
    await expect(startSimulatorProcess({ dataDir, entry: ENTRY, logLevel: 'loud' })).rejects.toThrow('LOG_LEVEL=loud');
  });
});

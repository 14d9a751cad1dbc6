/**
 * A small coverage-guided fuzzer. It mutates inputs. An input that reaches a new block of code joins the corpus.
 *
 * `node:inspector` reads V8's coverage by block. One reading takes longer than most parsers need for one input, so a whole batch of inputs runs
 * between two readings. If a batch reached a new block, it is halved until the responsible inputs are found.
 */
import { Session } from 'node:inspector';

export interface FuzzTarget {
  readonly name: string;
  /** Coverage of these files guides the fuzzer. A file is named by the end of its path. */
  readonly files: readonly string[];
  /** First inputs. */
  readonly seeds: readonly string[];
  /** Pieces of text that mutations insert. */
  readonly dictionary: readonly string[];
  /** Runs the parser. Throws {@link Broken} if the parser broke a promise. Any other error is a violation, too. */
  run(input: Buffer): void;
}

/** The parser broke a promise. */
export class Broken extends Error {}

export interface ParserReport {
  readonly name: string;
  readonly executions: number;
  readonly blocks: number;
  readonly corpus: number;
  readonly failure: { readonly input: string; readonly message: string } | null;
}

const BATCH = 1_000;
const MAX_INPUT_BYTES = 4_096;
const MAX_CORPUS = 2_000;

/** The generator xorshift32. The same seed gives the same numbers everywhere. */
const randomOf = (seed: number) => {
  let state = seed | 0 || 1;
  return (below: number): number => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) % below;
  };
};

interface Range {
  readonly startOffset: number;
  readonly endOffset: number;
  readonly count: number;
}
interface Coverage {
  readonly result: readonly {
    readonly url: string;
    readonly functions: readonly { readonly functionName: string; readonly ranges: readonly Range[] }[];
  }[];
}

/**
 * The places of the code that were reached. V8 reports ranges with counts, but leaves out an inner range that ran as often as the range around it. So
 * a missing range may still have run. For each offset where a range began, this class stores whether the innermost range around it has run.
 */
class Blocks {
  private readonly session = new Session();
  /** For each function: its offsets, and whether each was reached. */
  private readonly places = new Map<string, Map<number, boolean>>();

  constructor(private readonly files: readonly string[]) {
    this.session.connect();
    this.post('Profiler.enable');
    this.post('Profiler.startPreciseCoverage', { callCount: true, detailed: true });
  }

  private post(method: string, parameters?: object): unknown {
    let answer: unknown;
    // A session of the same process answers before `post` returns.
    this.session.post(method, parameters as never, (error: Error | null, result: unknown) => {
      if (error) throw error;
      answer = result;
    });
    return answer;
  }

  forget(): void {
    this.post('Profiler.takePreciseCoverage');
  }

  /** The number of new places that ran since the last reading. `remember`: these places are no longer new afterwards. */
  news(remember: boolean): number {
    const { result } = this.post('Profiler.takePreciseCoverage') as Coverage;
    let found = 0;
    for (const { url, functions } of result) {
      if (!this.files.some((file) => url.endsWith(file))) continue;
      for (const { ranges } of functions) {
        const [whole] = ranges;
        if (!whole || whole.count === 0) continue;
        const name = `${url}:${whole.startOffset}-${whole.endOffset}`;
        let places = this.places.get(name);
        if (!places) this.places.set(name, (places = new Map()));
        for (const { startOffset } of ranges) if (!places.has(startOffset)) places.set(startOffset, false);
        for (const [offset, reached] of places) {
          if (reached) continue;
          // Outer ranges come before inner ones, so the last match is the innermost.
          const innermost = ranges.findLast(({ startOffset, endOffset }) => startOffset <= offset && offset < endOffset);
          if (!innermost || innermost.count === 0) continue;
          found += 1;
          if (remember) places.set(offset, true);
        }
      }
    }
    return found;
  }

  get size(): number {
    return [...this.places.values()].reduce((sum, places) => sum + [...places.values()].filter(Boolean).length, 0);
  }

  close(): void {
    this.post('Profiler.stopPreciseCoverage');
    this.session.disconnect();
  }
}

/** Fuzzes one target until `executions` or `milliseconds` are used up, or a promise is broken. */
export const fuzzParser = (
  target: FuzzTarget,
  { seed, executions, milliseconds }: { seed: number; executions: number; milliseconds: number },
): ParserReport => {
  const random = randomOf(seed);
  const corpus: Buffer[] = target.seeds.map((text) => Buffer.from(text, 'utf8'));
  if (corpus.length === 0) corpus.push(Buffer.alloc(0));
  const dictionary = target.dictionary.map((text) => Buffer.from(text, 'utf8'));
  const blocks = new Blocks(target.files);
  const end = performance.now() + milliseconds;
  let done = 0;
  let failure: ParserReport['failure'] = null;

  const run = (input: Buffer): void => {
    done += 1;
    try {
      target.run(input);
    } catch (error) {
      failure ??= { input: JSON.stringify(input.toString('latin1')), message: (error as Error).message };
    }
  };
  /** Finds the inputs of a batch that reached a new place. */
  const keep = (batch: readonly Buffer[]): void => {
    if (batch.length === 1) {
      blocks.forget();
      run(batch[0]!);
      if (blocks.news(true) > 0 && corpus.length < MAX_CORPUS) corpus.push(batch[0]!);
      return;
    }
    const half = Math.ceil(batch.length / 2);
    for (const part of [batch.slice(0, half), batch.slice(half)]) {
      blocks.forget();
      part.forEach(run);
      if (blocks.news(false) > 0) keep(part);
    }
  };

  blocks.forget();
  corpus.forEach(run);
  blocks.news(true);
  while (done < executions && performance.now() < end && !failure) {
    const batch = Array.from({ length: BATCH }, () => mutate(corpus[random(corpus.length)]!, corpus, dictionary, random));
    blocks.forget();
    for (const input of batch) run(input);
    if (blocks.news(false) > 0) keep(batch);
  }
  const report = { name: target.name, executions: done, blocks: blocks.size, corpus: corpus.length, failure };
  blocks.close();
  return report;
};

const INTERESTING = [0, 1, 9, 10, 13, 32, 34, 44, 45, 46, 47, 48, 57, 58, 92, 127, 128, 192, 237, 255];

const mutate = (from: Buffer, corpus: readonly Buffer[], dictionary: readonly Buffer[], random: (below: number) => number): Buffer => {
  let input: Buffer = Buffer.from(from);
  for (let times = 1 + random(4); times > 0; times--) {
    const at = random(input.length + 1);
    switch (random(8)) {
      case 0:
        if (input.length > 0) input[at % input.length]! ^= 1 << random(8);
        break;
      case 1:
        if (input.length > 0) input[at % input.length] = INTERESTING[random(INTERESTING.length)]!;
        break;
      case 2:
        input = Buffer.concat([input.subarray(0, at), input.subarray(Math.min(input.length, at + 1 + random(4)))]);
        break;
      case 3:
        input = Buffer.concat([input.subarray(0, at), Buffer.from([random(256)]), input.subarray(at)]);
        break;
      case 4: {
        const piece = dictionary.length > 0 ? dictionary[random(dictionary.length)]! : Buffer.from('0');
        input = Buffer.concat([input.subarray(0, at), piece, input.subarray(at)]);
        break;
      }
      case 5: {
        const length = random(Math.min(16, input.length) + 1);
        input = Buffer.concat([input.subarray(0, at), input.subarray(at, at + length), input.subarray(at)]);
        break;
      }
      case 6: {
        const other = corpus[random(corpus.length)]!;
        input = Buffer.concat([input.subarray(0, at), other.subarray(random(other.length + 1))]);
        break;
      }
      default: {
        const digit = input.findIndex((byte) => byte >= 48 && byte <= 57);
        if (digit >= 0) input[digit] = 48 + random(10);
      }
    }
    if (input.length > MAX_INPUT_BYTES) input = input.subarray(0, MAX_INPUT_BYTES);
  }
  return input;
};

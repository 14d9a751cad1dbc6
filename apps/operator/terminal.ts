/**
 * The output of a command: one JSON value or text on stdout, everything else on stderr, and an exit code. 0: done. 1: refused, or a difference was
 * found. 2: wrong usage.
 */
import { userInfo } from 'node:os';
import { createInterface } from 'node:readline/promises';
import { SingleBar } from 'cli-progress';
import { type Command, CommanderError, InvalidArgumentError, Option } from 'commander';
import { AuthenticationError, dollars, isDay, isUuid, ServiceError } from '#kernel';
import { cardInText, ConfigError, maskCardNumbers, withEscapes } from '#platform';
import { Unavailable } from '#eventstore';
import type { Context } from './context.js';
import { Interrupted } from './interrupt.js';

/** The resources of a command. */
export interface Opened {
  /** Throws the error of an open incident of the event store. */
  readonly refuse?: () => void;
  readonly close: () => Promise<void>;
}

/** The result of a command. */
export interface Answer {
  /** The one value of `--json`. */
  readonly json: unknown;
  /** The same value, as text for people. */
  readonly text: string;
  /** 1: refused, or a difference was found. Default 0. */
  readonly exitCode?: 0 | 1;
  /** The command wrote its output itself, in pieces, through {@link print}. */
  readonly printed?: boolean;
}

/** Wrong usage that commander does not detect. */
export class UsageError extends Error {}

/** The operator answered no. */
class Declined extends Error {}

interface GlobalOptions {
  readonly json?: boolean;
  readonly yes?: boolean;
}

export class Terminal<Of extends Opened = Context> {
  /** `openContext` gets the name of the command, such as `settlement close`. */
  constructor(private readonly openContext: (command: string) => Promise<Of>) {}

  /**
   * Makes an action for commander from `work`, which gets the context and then commander's arguments and options. `asks` returns a sentence that
   * names what will be lost. Without `--yes`, the operator must first agree to it. null: nothing is lost. `counts` does the same with the stores open.
   */
  readonly action =
    <Args extends unknown[]>(
      work: (context: Of, ...args: Args) => Promise<Answer>,
      { asks, counts }: { asks?: (...args: Args) => string | null; counts?: (context: Of, ...args: Args) => Promise<string | null> } = {},
    ) =>
    async (...given: unknown[]): Promise<void> => {
      const command = given.at(-1) as Command;
      const { json, yes } = command.optsWithGlobals<GlobalOptions>();
      const args = given.slice(0, -1) as Args;
      try {
        const question = asks?.(...args) ?? null;
        if (question !== null && !yes) await confirm(question);
        const context = await this.openContext(nameOf(command));
        try {
          const lost = counts && !yes ? await counts(context, ...args) : null;
          if (lost !== null) await confirm(lost);
          await say(await work(context, ...args), json ?? false);
        } catch (error) {
          // In an incident, a payment that is not found may be lost (C76).
          if (error instanceof ServiceError && error.code === 'PAYMENT_NOT_FOUND') context.refuse?.();
          throw error;
        } finally {
          await context.close();
        }
      } catch (error) {
        // The reader of our output has closed the pipe (`| head`).
        if ((error as NodeJS.ErrnoException).code === 'EPIPE') return;
        await refuse(error instanceof ServiceError ? withOptionNames(error, command) : error, json ?? false);
        if (error instanceof Interrupted) process.exitCode = error.exitCode;
      }
    };
}

/** The error with the names of options in its message. The libs name the fields of the partner's API, such as `amountCents`. */
const withOptionNames = (error: ServiceError, { options }: Command): ServiceError => {
  const named = options.reduce(
    (message, option) => {
      const name = option.attributeName();
      // A name of one word may also be a word of the sentence. So only the first word of the message is taken for it.
      return message.replace(new RegExp(/[A-Z]/.test(name) ? `(?<![-\\w])${name}\\b` : `^${name}(?= must\\b)`, 'g'), option.long!);
    },
    error.message.replaceAll('feeType include_fee', '--include-fee'),
  );
  return named === error.message ? error : new ServiceError(error.code, named, error.details, error.options);
};

/** Noun and verb of a command, without the name of the program. */
const nameOf = (command: Command): string => (command.parent?.parent ? `${nameOf(command.parent)} ${command.name()}` : command.name());

/** Writes a piece of a long output to stdout. Resolves when stdout can take more. */
export const print = (text: string): Promise<void> => write(process.stdout, process.stdout.isTTY ? withoutControls(text) : text);

const write = (stream: NodeJS.WriteStream, text: string): Promise<void> =>
  new Promise((done, fail) => stream.write(text, (error) => (error ? fail(error) : done())));

const writeJson = (value: unknown): Promise<void> => write(process.stdout, `${withoutControls(JSON.stringify(value))}\n`);

const say = async ({ json, text, exitCode = 0, printed = false }: Answer, asJson: boolean) => {
  if (!printed) await (asJson ? writeJson(json) : write(process.stdout, `${withoutControls(text)}\n`));
  process.exitCode = exitCode;
};

/** Reports an error: a line on stderr, and the exit code. With `--json` also the error envelope on stdout. */
export const refuse = async (error: unknown, asJson: boolean): Promise<void> => {
  const usage = error instanceof UsageError || error instanceof ConfigError;
  process.exitCode = usage ? 2 : 1;
  const { code, message, details } = described(error);
  if (asJson) await writeJson({ success: false, message, details: { code, ...details } });
  await write(process.stderr, `error: ${withoutControls(inDollars(message))}\n`);
};

const described = (error: unknown): { code: string; message: string; details?: Readonly<Record<string, unknown>> } => {
  if (error instanceof ServiceError) return { code: error.code, message: error.message, details: error.details };
  if (error instanceof UsageError || error instanceof ConfigError) return { code: 'VALIDATION_ERROR', message: error.message };
  if (error instanceof Declined) return { code: 'INVALID_STATE', message: error.message };
  if (error instanceof Unavailable) return { code: 'INTERNAL_ERROR', message: `the event store cannot be reached: ${error.message}` };
  if (error instanceof AuthenticationError) return { code: 'VALIDATION_ERROR', message: error.message };
  if (error instanceof AggregateError) return described(error.errors[0]);
  return { code: 'INTERNAL_ERROR', message: error instanceof Error ? error.message : 'unexpected error' };
};

/**
 * Waits until a new key is in force. If a process still uses the old state, throws an error that shows the key. The key is recorded, but can never be
 * shown again.
 */
export const inForceOrShown = async (inForce: Promise<void>, name: string, key: string, keyId: string): Promise<void> => {
  try {
    await inForce;
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    const message = `${error.message} The new ${name} is ${key}; it is not kept and cannot be shown again.`;
    throw new ServiceError(error.code, message, { ...error.details, keyId, key });
  }
};

/** True if the command line asks for JSON. For errors that come before commander has parsed it. */
export const wantsJson = (argv: readonly string[]): boolean => argv.includes('--json');

/** Handles errors of commander, which has already printed them on stderr. Help is no error. Everything else is wrong usage. */
export const refuseUsage = async (error: CommanderError, asJson: boolean): Promise<void> => {
  if (error.exitCode === 0) return;
  process.exitCode = 2;
  if (!asJson) return;
  const message = error.code === 'commander.help' ? 'a command is missing' : maskCardNumbers(error.message).replace(/^error: /, '');
  await writeJson({ success: false, message, details: { code: 'VALIDATION_ERROR' } });
};

const confirm = async (question: string) => {
  if (!process.stdin.isTTY) throw new UsageError(`${question} Nobody can be asked here: add --yes.`);
  const prompt = createInterface({ input: process.stdin, output: process.stderr });
  try {
    const answer = await prompt.question(`${question} Go on? [y/N] `);
    if (!/^y(es)?$/i.test(answer.trim())) throw new Declined('Nothing was changed.');
  } finally {
    prompt.close();
  }
};

// Parsers for arguments and options. Each refuses with one line, to which commander adds the option's name.

/** A UUID in lower case, because ids are parts of stream names. */
export const uuid = (text: string): string => {
  if (!isUuid(text)) throw new InvalidArgumentError('It must be a UUID.');
  return text.toLowerCase();
};

/** For an option that may be given several times. */
export const each =
  <T>(parse: (text: string) => T) =>
  (text: string, before: readonly T[] | undefined): T[] => [...(before ?? []), parse(text)];

export const anyText = (text: string): string => text;

/** The name of a person, as it is recorded. */
export const personName = (text: string): string => {
  if (text.trim() === '' || UNSEEN.test(text)) throw new InvalidArgumentError('It must be a name without control characters or invisible ones.');
  if (cardInText(text) !== null) throw new InvalidArgumentError('It must not hold a card number.');
  if (text.trim().startsWith(LOGIN)) throw new InvalidArgumentError(`It must not begin with ${LOGIN}, which marks a user of the operating system.`);
  return text;
};

/** A whole number from 0. The decider checks its bounds for all interfaces. */
export const wholeNumber = (text: string): number => {
  if (!/^\d{1,15}$/.test(text)) throw new InvalidArgumentError('It must be a whole number, 0 or more.');
  return Number(text);
};

/** The size of a list, from 1. */
export const rowLimit =
  (most: number) =>
  (text: string): number => {
    if (!/^[1-9]\d{0,8}$/.test(text) || Number(text) > most) throw new InvalidArgumentError(`It must be 1 to ${most}.`);
    return Number(text);
  };

/** The word `none` removes a bound. Commander takes a null for a missing value, so the word stays until {@link withoutNone}. */
export const orNone =
  <T>(parse: (text: string) => T) =>
  (text: string): T | 'none' =>
    text === 'none' ? text : parse(text);

export const withoutNone = <T>(value: T | 'none'): T | null => (value === 'none' ? null : value);

const MOMENT = /^(\d{4}-\d{2}-\d{2})(?:[Tt]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:[Zz]|[+-]\d{2}:\d{2}))?$/;

/** RFC 3339 with an offset, or `YYYY-MM-DD` for 00:00:00Z (as C44). Returns RFC 3339 in UTC with milliseconds (C2). */
export const moment = (text: string): string => {
  const day = MOMENT.exec(text)?.[1];
  const epochMs = day === undefined ? Number.NaN : Date.parse(text.toUpperCase());
  // `Date.parse` reads 30 February as a day of March. Refuse such a day.
  const real = day !== undefined && !Number.isNaN(Date.parse(day)) && new Date(Date.parse(day)).toISOString().startsWith(day);
  if (!real || Number.isNaN(epochMs)) throw new InvalidArgumentError('It must be a time like 2026-01-31T12:00:00Z, or a day like 2026-01-31.');
  return new Date(epochMs).toISOString();
};

/** A day, YYYY-MM-DD. */
export const day = (text: string): string => {
  if (!isDay(text)) throw new InvalidArgumentError('It must be a day like 2026-01-31.');
  return text;
};

export const UTC = 'UTC';

/** The time zone of days and times. A portal has none, so it is UTC unless the person names one. */
export const zoneOption = (what: string): Option =>
  new Option('--zone <name>', `${what}, such as America/Chicago`).default(UTC).argParser((name) => {
    try {
      // Abbreviations mean different zones in different places.
      if (name !== UTC && !name.includes('/')) throw new RangeError(name);
      return new Intl.DateTimeFormat('en-US', { timeZone: name }).resolvedOptions().timeZone;
    } catch {
      throw new InvalidArgumentError('It must be the name of a time zone, such as America/Chicago.');
    }
  });

/** A time as a clock in the zone shows it, such as `2026-11-29 10:16`. */
export const timeIn = (zone: string, at: string): string =>
  new Intl.DateTimeFormat('sv-SE', { timeZone: zone, dateStyle: 'short', timeStyle: 'short' }).format(Date.parse(at));

/** Shows personal data. The reading is noted under the name of the person who is logged in. */
export const withPersonal = (): Option => new Option('--with-personal', 'personal data too; the reading is noted');

const LOGIN = 'os:';

/**
 * The user of the operating system, such as `os:dana`, under which actions are recorded if nobody is named. In a container without a name for the user,
 * the user's number.
 */
export const loginName = (): string => {
  try {
    return `${LOGIN}${userInfo().username}`;
  } catch {
    return `${LOGIN}uid ${process.getuid?.() ?? 'unknown'}`;
  }
};

/**
 * `--by`, the person who decides. Absent, the command records {@link loginName}. In production several people share a login, so there a decision about
 * money, books or personal data must name a person.
 */
export const byOption = (what = 'name of the person who decides; recorded'): Option => {
  const option = new Option('--by <name>', what).argParser(personName);
  return process.env.ENVIRONMENT === 'production' ? option.makeOptionMandatory() : option.default(loginName());
};

// Text for people.

/** True if a person reads the output and can answer a question. False for a command in a script. */
export const isPersonThere = (): boolean => process.stdin.isTTY && process.stdout.isTTY;

/** Characters that have no place in a name of a person: two names that look the same must be the same. */
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/u;
/**
 * Control characters but tab and line feed, and format characters, such as marks that turn the direction of text. A terminal obeys them, and a partner
 * may have sent them.
 */
const CONTROLS = /(?![\t\n])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;
/** The text with each control character written as `\u001b`. JSON keeps its meaning. */
const withoutControls = (text: string): string => withEscapes(text, CONTROLS);

/** A text within a line. Line feeds and tabs are written as escapes too, so that no value looks like another line or cell. */
const inLine = (text: string): string => withEscapes(withoutControls(text), /[\t\n]/g);

/** A sentence with its amounts as people write them. */
export const inDollars = (text: string): string => text.replaceAll(/(-?\d+) cents\b/g, (_, cents: string) => dollars(Number(cents)));

/** Text columns under headings, padded to the widest cell. */
export const table = (headings: readonly string[], values: readonly (readonly string[])[]): string => {
  if (values.length === 0) return 'none';
  const rows = values.map((row) => row.map(inLine));
  const widths = headings.map((heading, column) => Math.max(heading.length, ...rows.map((row) => row[column]!.length)));
  return [headings, ...rows]
    .map((row) =>
      row
        .map((cell, column) => cell.padEnd(widths[column]!))
        .join('  ')
        .trimEnd(),
    )
    .join('\n');
};

/** One name and value per line. */
export const fields = (values: readonly (readonly [name: string, value: string])[]): string => {
  const width = Math.max(...values.map(([name]) => name.length));
  return values.map(([name, value]) => `${name.padEnd(width)}  ${inLine(value)}`).join('\n');
};

/** A progress bar on a terminal, and nothing elsewhere. `total` null: shows only the work done so far. */
export const progressBar = (name: string, total: number | null): { update(done: number): void; stop(): void } => {
  if (!process.stderr.isTTY) return { update: () => undefined, stop: () => undefined };
  const format = total === null ? `${name} {value}` : `${name} {bar} {percentage} % | {value}/{total} | {eta_formatted} left`;
  const bar = new SingleBar({ format, barCompleteChar: '█', barIncompleteChar: '░', hideCursor: true, fps: 10, stream: process.stderr });
  bar.start(total ?? 0, 0);
  return { update: (done) => bar.update(done), stop: () => bar.stop() };
};

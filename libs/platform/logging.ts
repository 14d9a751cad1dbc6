/**
 * Logging. Code logs only listed fields (ids, route, status, duration), never bodies or DTOs. If a line still holds a card number, the number is
 * masked and the line is counted. Tests fail on a masked line (docs/contract.md#card-data).
 */
import pino from 'pino';
import { maskCardNumbers } from './card-text.js';
import { saysOnlyAway } from './postgres/outage.js';

export type Logger = pino.Logger;

/** Number of log lines in which a card number was masked since the process started. */
export const maskedLines = { count: 0 };

/** Only these properties of an error are logged. Others may hold a whole request body. */
const errorFields = (error: unknown) => {
  if (!(error instanceof Error)) return { message: typeof error === 'string' ? error : 'not an Error' };
  const { name, message, stack } = error;
  const { code } = error as { code?: unknown };
  const cause = error.cause instanceof Error ? `${error.cause.name}: ${error.cause.message}` : undefined;
  return {
    name,
    message,
    code: typeof code === 'string' || typeof code === 'number' ? code : undefined,
    cause,
    stack: stack
      ?.split('\n')
      .slice(1, 12)
      .map((line) => line.trim()),
  };
};

/** JSON lines on stderr, so that commands can keep stdout for their answer. */
export const createLogger = (level: string, name: string, destination: { write(line: string): void } = process.stderr): Logger =>
  pino(
    {
      level,
      base: { name, pid: process.pid },
      timestamp: pino.stdTimeFunctions.isoTime,
      serializers: { err: errorFields },
      redact: ['authorization', 'headers.authorization', 'req.headers.authorization', '*.cvv', '*.cardNumber'],
      hooks: {
        logMethod(given, method) {
          if (!saysOnlyAway(given[0], (...line) => method.apply(this, line))) method.apply(this, given);
        },
        streamWrite: (line) => {
          const masked = maskCardNumbers(line);
          if (masked !== line) maskedLines.count += 1;
          return masked;
        },
      },
    },
    destination,
  );

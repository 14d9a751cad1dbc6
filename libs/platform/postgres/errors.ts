/** Types for errors of the database. Only this file reads codes and texts of Postgres and its driver. */

/** The connection or the server failed, or another transaction was in conflict. The same statement may succeed later. */
export class DatabaseUnavailable extends Error {
  /** SQLSTATE, or the error code of the operating system. undefined: the driver gives none. */
  readonly code: string | undefined;

  constructor(message: string, { code, ...options }: ErrorOptions & { readonly code?: string | undefined } = {}) {
    super(message, options);
    this.name = 'DatabaseUnavailable';
    this.code = code;
  }
}

/** A time limit ended the wait: for an answer, for a lock, or for a connection. */
export class StatementTimeout extends DatabaseUnavailable {
  constructor(...given: ConstructorParameters<typeof DatabaseUnavailable>) {
    super(...given);
    this.name = 'StatementTimeout';
  }
}

const QUERY_CANCELED = '57014';
const LOCK_NOT_AVAILABLE = '55P03';
export const READ_ONLY = '25006';
const INSUFFICIENT_PRIVILEGE = '42501';
const UNDEFINED_FUNCTION = '42883';
const IDLE_IN_TRANSACTION_TIMEOUT = '25P03';
const INTERNAL_ERROR = 'XX000';
/** Classes of SQLSTATE: connection, transaction rollback, resources, shutdown, system. */
const UNAVAILABLE_CLASS = /^(08|40|53|57P|58)/;
const SYSTEM_CODES = ['ECONNREFUSED', 'ECONNRESET', 'EPIPE', 'ENOENT', 'ETIMEDOUT', 'EHOSTUNREACH', 'ENOTFOUND', 'EAI_AGAIN'];

/** Errors of the driver that have no code, only a text. */
const BY_TEXT: Readonly<Record<string, typeof DatabaseUnavailable>> = {
  'Connection terminated': DatabaseUnavailable,
  'Connection terminated unexpectedly': DatabaseUnavailable,
  'Client has encountered a connection error and is not queryable': DatabaseUnavailable,
  'Client was closed and is not queryable': DatabaseUnavailable,
  'Cannot use a pool after calling end on the pool': DatabaseUnavailable,
  'The server does not support SSL connections': DatabaseUnavailable,
  'There was an error establishing an SSL connection': DatabaseUnavailable,
  'Connection terminated due to connection timeout': StatementTimeout,
  'timeout exceeded when trying to connect': StatementTimeout,
  'Query read timeout': StatementTimeout,
};

const typeOf = (code: string | undefined, message: string): typeof DatabaseUnavailable | undefined => {
  if (code === undefined) return BY_TEXT[message];
  if (code === QUERY_CANCELED || code === LOCK_NOT_AVAILABLE) return StatementTimeout;
  const unavailable =
    UNAVAILABLE_CLASS.test(code) || [READ_ONLY, IDLE_IN_TRANSACTION_TIMEOUT, INTERNAL_ERROR].includes(code) || SYSTEM_CODES.includes(code);
  return unavailable ? DatabaseUnavailable : undefined;
};

/** Converts an error of the driver into one of the types above. Returns any other error unchanged. */
export const typedError = (error: unknown): unknown => {
  if (error instanceof DatabaseUnavailable) return error;
  const { code, message = '', errors } = error as { code?: string; message?: string; errors?: readonly Error[] };
  const Type = typeOf(code, message);
  // If a host has several addresses, the error contains one error for each address, and its own message is empty.
  return Type ? new Type(message || (errors?.[0]?.message ?? ''), { code, cause: error }) : error;
};

/** True if there is no server, or it ended the connection. False for a time limit: a busy server reaches it too. */
export const isAway = ({ code, message }: DatabaseUnavailable): boolean =>
  code === undefined ? message.startsWith('Connection terminated') : /^(08|57P0[1-3])/.test(code) || SYSTEM_CODES.includes(code);

const codeOf = (error: unknown): string => {
  const { code } = (error ?? {}) as { code?: unknown };
  return typeof code === 'string' ? code : '';
};

/**
 * True if the server takes no writes: it is a standby, or a failover has stopped the writes of the former primary. The refused statement changed
 * nothing. Also true for the event store's error of the same meaning.
 */
export const isReadOnly = (error: unknown): boolean => codeOf(error) === READ_ONLY;

/** True if the user may not run the statement, or the server does not have a function that the statement calls. */
export const isRefused = (error: unknown): boolean => codeOf(error) === INSUFFICIENT_PRIVILEGE || codeOf(error) === UNDEFINED_FUNCTION;

/** True if the statement waited too long for a lock. */
export const isLockTimeout = (error: unknown): boolean => codeOf(error) === LOCK_NOT_AVAILABLE;

/** True if a value is not valid for its type. The statement changed nothing, and a repeat would fail in the same way. */
export const isDataException = (error: unknown): boolean => codeOf(error).startsWith('22');

/** True if the server refused the statement, so that it committed nothing. */
export const isRolledBack = (error: unknown): boolean => {
  const code = codeOf(error);
  // A code of five characters is an SQLSTATE. In the excluded classes the connection or the server failed, perhaps during the commit.
  return /^[0-9A-Z]{5}$/.test(code) && !/^(08|57P|58|XX)/.test(code);
};

import { change, type Loaded, type Origin } from '#eventstore';
import { ServiceError } from '#kernel';
import { EXCEPTION_STREAM } from './events.js';
import type { ExceptionCommand, SettlementCase } from './exception.js';
import type { SettlementPorts } from './record.js';

/** Decides about an exception, and appends. Throws INVALID_STATE if somebody else changes it again and again. */
export const changeCase = async (
  { store, payments: { clock, ids } }: SettlementPorts,
  exceptionId: string,
  command: ExceptionCommand,
  origin: Origin,
  eventId?: string,
): Promise<Loaded<SettlementCase | null>> => {
  const busy = () => new ServiceError('INVALID_STATE', 'The exception is being changed by somebody else; try again.');
  return change({ store, clock, ids }, EXCEPTION_STREAM, exceptionId, command, origin, busy, eventId === undefined ? {} : { eventId });
};

/** The retention of personal data: after how many years an account lets it be erased. */
import { type EventStore, readStreams } from '#eventstore';
import { fold } from '#kernel';
import { account } from './account.js';
import { ACCOUNT_STREAM, accountEvents } from './events.js';

/** The years of each account that has a retention, read from the streams. Throws the errors of the store. */
export const retentionsOf = async (store: EventStore, accountIds: readonly string[]): Promise<ReadonlyMap<string, number>> => {
  const streams = await readStreams(
    store,
    accountIds.map((id) => ACCOUNT_STREAM.prefix + id),
  );
  return new Map(
    accountIds.flatMap((id, index): [string, number][] => {
      const years = fold(account, streams[index]!.map(accountEvents.read))?.retentionYears ?? null;
      return years === null ? [] : [[id, years]];
    }),
  );
};

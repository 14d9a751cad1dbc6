/** Accounts, portals and keys, for Nest (`#accounts/module`). */
import { Global, Module } from '@nestjs/common';
import { EVENT_STORE, POOL } from '#eventstore/module';
import type { Pool } from '#platform';
import { ProcessContext } from '#platform/module';
import { AccessTokens, type AuthenticationDeps } from './access-token.js';
import { type ChargeStops, postgresChargeStops } from './charge-stops.js';
import { type Directory, postgresDirectory } from './directory.js';
import { postgresKeyUse } from './key-use.js';
import { openSigningSecret } from './administration.js';

export const DIRECTORY = Symbol('directory');
export const CHARGE_STOPS = Symbol('charge stops');
/** The dependencies of `authenticate`. */
export const AUTHENTICATION = Symbol('authentication');

@Global()
@Module({
  providers: [
    {
      provide: DIRECTORY,
      inject: [ProcessContext, POOL, EVENT_STORE],
      useFactory: async (context: ProcessContext, pool: Pool) => {
        const directory = postgresDirectory(pool);
        await requireRightKeys(context, directory);
        return directory;
      },
    },
    { provide: CHARGE_STOPS, inject: [POOL], useFactory: (pool: Pool): ChargeStops => postgresChargeStops(pool) },
    {
      provide: AUTHENTICATION,
      inject: [ProcessContext, POOL, DIRECTORY],
      useFactory: ({ keys, clock, config: { environment } }: ProcessContext, pool: Pool, directory: Directory): AuthenticationDeps => ({
        keyUse: postgresKeyUse(pool, clock),
        directory,
        keys,
        tokens: new AccessTokens(keys, environment, clock),
        environment,
      }),
    },
  ],
  exports: [DIRECTORY, AUTHENTICATION, CHARGE_STOPS],
})
export class AccountsModule {}

/**
 * Throws if the master key ring does not belong to this database. With another ring, every API key would be refused and no secret could be opened.
 */
const requireRightKeys = async ({ config: { masterKeyFile }, keys }: ProcessContext, directory: Directory): Promise<void> => {
  const portal = (await directory.portals()).at(-1);
  if (!portal) return;
  try {
    openSigningSecret(keys, portal);
  } catch {
    throw new Error(`${masterKeyFile} is not the master key of this database; set DATA_DIR or MASTER_KEY_FILE to the one that belongs to it`);
  }
};

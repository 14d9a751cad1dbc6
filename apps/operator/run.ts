/** `payfold run`: a role in this very process, for service managers and containers. npm would stand between, and passes no signal on. */
import { Argument, type Command } from 'commander';

/** The roles, with their entries. */
const ROLES = {
  everything: () => import('../standalone/main.js'),
  api: () => import('../api/main.js'),
  worker: () => import('../worker/main.js'),
  simulator: () => import('../simulator/main.js'),
};

export const addRun = (program: Command): void => {
  program
    .command('run')
    .description('run a role in this process until SIGTERM, for service managers and containers')
    .addArgument(new Argument('<role>').choices(Object.keys(ROLES)))
    .action(async (role: keyof typeof ROLES) => {
      process.setSourceMapsEnabled(true);
      await ROLES[role]();
    });
};

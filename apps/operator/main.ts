/** The `payfold` command line: nouns and verbs on the configured stores. Each noun has its own file. */
import { Command, CommanderError } from 'commander';
import { maskCardNumbers, RELEASE } from '#platform';
import { addAccounts } from './accounts.js';
import { addAlerts } from './alerts.js';
import { addAudit } from './audit.js';
import { addCases } from './cases.js';
import { addDisputes } from './disputes.js';
import { addKeyfile } from './keyfile.js';
import { addKeys } from './keys.js';
import { addLedger } from './ledger.js';
import { addLog } from './log.js';
import { addMerchantAccounts } from './merchant-accounts.js';
import { addPayments } from './payments.js';
import { addPortals } from './portals.js';
import { addProjections } from './projections.js';
import { addRun } from './run.js';
import { addSandbox } from './sandbox.js';
import { addSettlement } from './settlement.js';
import { addUpgrade } from './upgrade.js';
import { addWebhooks } from './webhooks.js';
import { refuse, refuseUsage, Terminal, wantsJson } from './terminal.js';

const program = new Command('payfold')
  .description('Operates a Payfold ledger.')
  .version(RELEASE)
  .option('--json', 'print exactly one JSON value')
  .option('--yes', 'do not ask before destructive changes')
  .configureHelp({ showGlobalOptions: true })
  // Print each error of commander on one line, with its suggestion.
  .configureOutput({ outputError: (text, write) => write(maskCardNumbers(text).replace(/\n(?=\()/g, ' ')) })
  .exitOverride();

// Load the stores' code only when a command needs it. Help and wrong usage are then answered at once.
const terminal = new Terminal(async (command) => (await import('./context.js')).openContext(command));
addAccounts(program, terminal);
addKeys(program, terminal);
addPortals(program, terminal);
addMerchantAccounts(program, terminal);
addCases(program, terminal);
addPayments(program, terminal);
addDisputes(program, terminal);
addSettlement(program, terminal);
addLedger(program, terminal);
addWebhooks(program, terminal);
addAudit(program, terminal);
addAlerts(program, terminal);
addProjections(program, terminal);
addSandbox(program, terminal);
// An upgrade works on a database that other commands cannot use yet.
const stores = new Terminal(async (command) => (await import('./upgrade-context.js')).openUpgrade(command));
addUpgrade(program, stores);
addLog(program, stores, terminal);
addKeyfile(program);
addRun(program);

// Each write reports its own error. Without this listener, a closed pipe would end the process during its work.
process.stdout.on('error', () => undefined);

try {
  await program.parseAsync();
} catch (error) {
  // Set the exit code instead of exiting at once. Otherwise text could be lost before it reaches a pipe.
  if (error instanceof CommanderError) await refuseUsage(error, wantsJson(process.argv));
  else await refuse(error, wantsJson(process.argv));
}

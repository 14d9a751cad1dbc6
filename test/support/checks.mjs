/** Runs the linter and the types side by side (`npm test`): each uses one core. Exit 1 if one of them fails. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';

const codes = await Promise.all(
  ['lint', 'types'].map(async (script) => {
    const [code] = await once(spawn('npm', ['run', script], { stdio: 'inherit' }), 'exit');
    return code;
  }),
);
if (codes.some((code) => code !== 0)) process.exitCode = 1;

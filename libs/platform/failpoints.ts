/**
 * Named crash points for tests. With `FAILPOINT=append.PaymentInitiated:after` the process kills itself with SIGKILL right after that port call; with
 * `:before`, right before it. Names: `append.<event type>`, `charge.<leg>`, `void.<leg>`, `refund.<leg>`, `finalize.<op>`, `claim`, `finish`,
 * `renewAttempt`, `write` (the content of an intake).
 */
import { kill, pid } from 'node:process';

type Call = (...args: unknown[]) => unknown;

/** Wraps the one named call of an object. Without a fail point, returns the object itself. */
export const withFailpoint = <T extends object>(failpoint: string | null, target: T): T => {
  if (failpoint === null) return target;
  const [point, when] = failpoint.split(':');
  return new Proxy(target, {
    get: (object, property) => {
      const member = Reflect.get(object, property) as unknown;
      if (typeof member !== 'function' || typeof property !== 'string') return member;
      return (...args: unknown[]) => {
        const hit = namesOf(property, args).includes(point!);
        if (hit && when === 'before') kill(pid, 'SIGKILL');
        const result = (member as Call).apply(object, args);
        // `find` returns a gateway, whose calls can be fail points too.
        if (property === 'find' && result !== null && typeof result === 'object' && !(result instanceof Promise))
          return withFailpoint(failpoint, result);
        if (!hit || !(result instanceof Promise)) return result;
        return result.then((value: unknown) => {
          kill(pid, 'SIGKILL');
          return value;
        });
      };
    },
  });
};

const namesOf = (method: string, args: readonly unknown[]): string[] => {
  if (method === 'append') return (args[2] as { type: string }[]).map(({ type }) => `append.${type}`);
  const [call] = args as [{ leg?: string; op?: string } | undefined];
  if (method === 'finalize') return [`finalize.${call?.op}`];
  return call?.leg ? [`${method}.${call.leg}`] : [method];
};

/** Polls until `check` returns a truthy value. After the time limit, throws the last error. */
export const eventually = async <T>(check: () => T | Promise<T>, options: { timeoutMs?: number; everyMs?: number } = {}): Promise<NonNullable<T>> => {
  const { timeoutMs = 60_000, everyMs = 20 } = options;
  const end = performance.now() + timeoutMs;
  let last: unknown;
  for (;;) {
    try {
      const value = await check();
      if (value) return value;
      last = new Error(`still ${JSON.stringify(value)}`);
    } catch (error) {
      last = error;
    }
    if (performance.now() > end) throw last;
    await new Promise((wake) => setTimeout(wake, everyMs));
  }
};

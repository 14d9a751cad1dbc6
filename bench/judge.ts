/** Prints a figure. If it is worse than its limit, the line says so, and the benchmark ends with exit code 1. */
export const judge = (line: string, isGood: boolean): void => {
  console.log(`${line}${isGood ? '' : ': MISSED'}`);
  if (!isGood) process.exitCode = 1;
};

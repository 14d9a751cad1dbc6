/** This release of Payfold: the version of package.json. */
export const RELEASE = '0.2.0';

/** Negative if release `a` is older than `b`, 0 if both are equal, positive if `a` is newer. A release is three numbers, such as `0.2.0`. */
export const compareReleases = (a: string, b: string): number => {
  const [left, right] = [a, b].map((release) => release.split('.').map(Number));
  for (const index of [0, 1, 2]) {
    const difference = (left![index] ?? 0) - (right![index] ?? 0);
    if (difference !== 0) return difference;
  }
  return 0;
};

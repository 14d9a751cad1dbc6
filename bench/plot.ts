/** Draws costs by size as an SVG. Both axes are logarithmic: a cost that does not grow is a flat line. */
import { mkdirSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';

export interface Costs {
  readonly size: number;
  /** Milliseconds by name. Each size has the same names. */
  readonly costs: Readonly<Record<string, number>>;
}

const WIDTH = 760;
const HEIGHT = 420;
const MARGIN = { left: 64, right: 190, top: 36, bottom: 44 } as const;
const LABEL_HEIGHT = 14;
const COLOURS = ['#1f6feb', '#1a7f37', '#9a6700', '#cf222e', '#8250df'];

const plot = (title: string, measured: readonly Costs[]): string => {
  const names = Object.keys(measured[0]!.costs);
  const all = measured.flatMap(({ costs }) => Object.values(costs));
  const decades = { low: Math.floor(Math.log10(Math.min(...all))), high: Math.ceil(Math.log10(Math.max(...all))) };
  const [from, to] = [Math.log10(measured[0]!.size), Math.log10(measured.at(-1)!.size)];
  const x = (size: number) => MARGIN.left + ((Math.log10(size) - from) / Math.max(0.001, to - from)) * (WIDTH - MARGIN.left - MARGIN.right);
  const y = (ms: number) =>
    HEIGHT - MARGIN.bottom - ((Math.log10(ms) - decades.low) / (decades.high - decades.low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const grid = Array.from({ length: decades.high - decades.low + 1 }, (_, index) => 10 ** (decades.low + index)).map(
    (ms) =>
      `<path d="M${MARGIN.left} ${y(ms).toFixed(1)}H${WIDTH - MARGIN.right}" stroke="#d0d7de"/><text x="${MARGIN.left - 8}" y="${(y(ms) + 4).toFixed(1)}" text-anchor="end">${ms} ms</text>`,
  );
  const ticks = measured.map(
    ({ size }) => `<text x="${x(size).toFixed(1)}" y="${HEIGHT - MARGIN.bottom + 20}" text-anchor="middle">${size.toLocaleString('en')}</text>`,
  );
  const last = measured.at(-1)!;
  // Each name stands at the end of its line. If two names would overlap, the lower one is moved down.
  const heights = new Map<string, number>();
  let above = -LABEL_HEIGHT;
  for (const name of names.toSorted((a, b) => last.costs[b]! - last.costs[a]!)) {
    above = Math.max(y(last.costs[name]!) + 4, above + LABEL_HEIGHT);
    heights.set(name, above);
  }
  const lines = names.map((name, index) => {
    const points = measured.map(({ size, costs }) => [x(size), y(costs[name]!)] as const);
    const colour = COLOURS[index % COLOURS.length]!;
    return (
      `<polyline fill="none" stroke="${colour}" stroke-width="2" points="${points.map((point) => point.map((one) => one.toFixed(1)).join(',')).join(' ')}"/>` +
      points.map(([cx, cy]) => `<circle cx="${cx.toFixed(1)}" cy="${cy.toFixed(1)}" r="3" fill="${colour}"/>`).join('') +
      `<text x="${(x(last.size) + 10).toFixed(1)}" y="${heights.get(name)!.toFixed(1)}" fill="${colour}">${name}</text>`
    );
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="#1f2328">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="${MARGIN.left}" y="20" font-size="14">${title}</text>
${[...grid, ...ticks, ...lines].join('\n')}
</svg>
`;
};

/** Writes the plot. `measured`: at least one size, in ascending order. */
export const writePlot = (file: string, title: string, measured: readonly Costs[]): void => {
  mkdirSync(dirname(file), { recursive: true });
  writeFileSync(file, plot(title, measured));
  console.log(`plot: ${file}`);
};

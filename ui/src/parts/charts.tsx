/** Charts of the last 15 minutes, as SVG. */

import { HISTORY_S } from "../live";

const WIDTH = 600;
const HEIGHT = 120;

export interface Series {
  name: string;
  /** A class of the stylesheet. */
  colour: string;
  values: readonly (number | null)[];
}

interface ChartProps {
  title: string;
  unit: string;
  times: readonly number[];
  series: readonly Series[];
  format: (value: number) => string;
}

/** Grows with the history: a minute at first, 15 at the end. */
const SPANS_S = [60, 300, HISTORY_S];

function spanOf(times: readonly number[]): number {
  const known = (times[times.length - 1] ?? 0) - (times[0] ?? 0);
  return SPANS_S.find((span) => known <= span) ?? HISTORY_S;
}

const spanText = (seconds: number): string => `${seconds / 60} min`;

export function LineChart({ title, unit, times, series, format }: ChartProps) {
  const spanS = spanOf(times);
  const now = times[times.length - 1] ?? 0;
  const known = series.flatMap((one) => one.values).filter((value) => value !== null);
  const top = niceTop(Math.max(...known, 0));
  const summary = series.map((one) => `${one.name} ${shown(last(one.values), format)}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>
        <strong>{title}</strong>
        {series.map((one) => (
          <span key={one.name} class="legend">
            <i class={`swatch ${one.colour}`} aria-hidden="true" />
            {one.name} <b>{shown(last(one.values), format)}</b>
          </span>
        ))}
      </figcaption>
      <div class="plot">
        <span class="top">
          {format(top)} {unit}
        </span>
        <svg
          viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
          preserveAspectRatio="none"
          role="img"
          aria-label={`${title}, the last ${spanText(spanS)}: ${summary}`}
        >
          {[0.25, 0.5, 0.75].map((part) => (
            <line key={part} class="rule" x1={0} x2={WIDTH} y1={part * HEIGHT} y2={part * HEIGHT} />
          ))}
          {series.map((one) => (
            <path
              key={one.name}
              class={`line ${one.colour}`}
              d={pathOf(times, one.values, now, top, spanS)}
            />
          ))}
        </svg>
        <span class="left">–{spanText(spanS)}</span>
        <span class="right">now</span>
      </div>
    </figure>
  );
}

function pathOf(
  times: readonly number[],
  values: readonly (number | null)[],
  now: number,
  top: number,
  spanS: number,
): string {
  let path = "";
  let isDown = false;
  let before = 0;
  for (let i = 0; i < times.length; i++) {
    const value = values[i];
    const time = times[i] as number;
    if (value === null || value === undefined || time - before > 30) isDown = false;
    before = time;
    if (value === null || value === undefined) continue;
    const x = WIDTH - ((now - time) / spanS) * WIDTH;
    const y = HEIGHT - (value / top) * (HEIGHT - 4) - 1;
    path += `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    // A single value is shown as a dot.
    if (!isDown) path += "h0.01";
    isDown = true;
  }
  return path;
}

export function niceTop(value: number): number {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 5, 10]) if (value <= step * power) return step * power;
  return 10 * power;
}

const last = (values: readonly (number | null)[]): number | null => {
  for (let i = values.length - 1; i >= 0 && i >= values.length - 15; i--) {
    const value = values[i];
    if (value !== null && value !== undefined) return value;
  }
  return null;
};

const shown = (value: number | null, format: (value: number) => string): string =>
  value === null ? "–" : format(value);

interface Bar {
  name: string;
  value: number;
  colour: string;
}

/** Parts of a whole as one bar, with what each is. */
export function StackedBar({ label, bars, format }: {
  label: string;
  bars: readonly Bar[];
  format: (value: number) => string;
}) {
  const total = bars.reduce((sum, bar) => sum + bar.value, 0);
  const text = bars.map((bar) => `${bar.name} ${format(bar.value)}`).join(", ");
  return (
    <div class="stack">
      <div class="track" role="img" aria-label={`${label}: ${text}`}>
        {bars.map((bar) =>
          bar.value > 0 ? (
            <span
              key={bar.name}
              class={`part ${bar.colour}`}
              style={{ width: `${(100 * bar.value) / total}%` }}
            />
          ) : null,
        )}
      </div>
      <ul class="legends">
        {bars.map((bar) => (
          <li key={bar.name}>
            <i class={`swatch ${bar.colour}`} aria-hidden="true" />
            {bar.name} <b>{format(bar.value)}</b>
          </li>
        ))}
      </ul>
    </div>
  );
}

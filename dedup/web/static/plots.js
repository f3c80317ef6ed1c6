// The plots: uPlot with this page's colors, redrawn when the color scheme changes.

import uPlot from "./uPlot.esm.js";
import { count, rate, seconds } from "./words.js";

const HEIGHT = 190;
const SPAN_S = 300;

const PLOTS = {
  rates: {
    columns: [
      ["unique", "unique", "--unique", []],
      ["duplicate", "duplicate", "--duplicate", [8, 3]],
      ["late", "late", "--late", [3, 3]],
      ["dead letter", "dead_letter", "--dead", [10, 3, 2, 3]],
    ],
    say: (value) => (value === null ? "–" : `${rate(value)}/s`),
    least: 10,
  },
  lag: { columns: [["records", "lag_records", "--unique", []]], say: count, least: 10 },
  latency: {
    columns: [["median", "median_s", "--unique", []], ["p99", "p99_s", "--duplicate", [8, 3]]],
    say: seconds,
    least: 1,
    // A logarithmic scale from milliseconds to hours, because late records can be very old.
    from: 0.01,
    lines: [0.01, 0.1, 1, 10, 60, 600, 3600, 36_000, 360_000, 3_600_000],
  },
};

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function options(plot, width) {
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
  const lines = plot.lines && { splits: (_, __, least, most) => plot.lines.filter((line) => line >= least && line <= most), filter: (_, all) => all };
  return {
    width,
    height: HEIGHT,
    tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "Etc/UTC"),
    cursor: { drag: { x: false, y: false } },
    scales: {
      x: { range: (_, __, last) => [last - SPAN_S, last] },
      y: {
        distr: plot.from ? 3 : 1,
        // The axis reaches at least this value, so that noise near zero does not look large.
        range: (_, __, most) => [plot.from ?? 0, Math.max((most ?? 0) * 1.08, plot.least)],
      },
    },
    axes: [
      { ...axis, values: [[1, "{HH}:{mm}", null, null, null, null, null, null, 1]], incrs: [60, 120, 300], space: 45 },
      { ...axis, ...lines, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : plot.say(tick))) },
    ],
    series: [
      { value: "{HH}:{mm}:{ss}" },
      ...plot.columns.map(([label, , stroke, dash]) => ({
        label, stroke: color(stroke), dash, width: 2, spanGaps: true, points: { show: false }, value: (_, value) => plot.say(value),
      })),
    ],
  };
}

export class Plots {
  #drawn = new Map();
  #samples = null;

  constructor() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#redraw());
    new ResizeObserver(() => this.#resize()).observe(document.querySelector(".plots"));
  }

  show(samples) {
    this.#samples = samples;
    for (const [id, plot] of Object.entries(PLOTS)) {
      const data = [samples.time_ms.map((ms) => ms / 1000), ...plot.columns.map(([, column]) => samples[column])];
      const place = document.getElementById(id);
      if (!this.#drawn.has(id)) this.#drawn.set(id, new uPlot(options(plot, place.clientWidth), data, place));
      else this.#drawn.get(id).setData(data);
      const drawn = this.#drawn.get(id);
      // The legend shows the moment under the pointer, or otherwise the last one. uPlot clears it after drawing.
      setTimeout(() => {
        if (drawn.cursor.idx === null || drawn.cursor.idx === undefined) drawn.setLegend({ idx: data[0].length - 1 }, false);
      });
      const now = plot.columns.map(([label, column]) => `${label} ${plot.say(samples[column].at(-1) ?? null)}`).join(", ");
      place.setAttribute("aria-label", `Plot of the last five minutes. Now: ${now}.`);
    }
  }

  #redraw() {
    for (const drawn of this.#drawn.values()) drawn.destroy();
    this.#drawn.clear();
    if (this.#samples !== null) this.show(this.#samples);
  }

  #resize() {
    for (const [id, drawn] of this.#drawn) {
      drawn.setSize({ width: document.getElementById(id).clientWidth, height: HEIGHT });
    }
  }
}

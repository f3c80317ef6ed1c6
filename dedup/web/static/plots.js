// The plots: uPlot with this page's colors, redrawn when the color scheme changes.

import uPlot from "./uPlot.esm.js";
import { count, isNarrow, rate, seconds, size } from "./words.js";

const height = () => (isNarrow() ? 110 : 150);
export const SLOT_S = 10;

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
  state: { columns: [["size", "state_bytes", "--unique", []]], say: size, least: 1024, steps: Array.from({ length: 61 }, (_, power) => 2 ** power) },
  latency: {
    columns: [["half within", "median_s", "--unique", []], ["99% within", "p99_s", "--duplicate", [8, 3]]],
    say: seconds,
    least: 1,
    // A logarithmic scale from milliseconds to hours, because late records can be very old.
    from: 0.01,
    lines: [0.01, 0.1, 1, 10, 60, 600, 3600, 36_000, 360_000, 3_600_000],
  },
};

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The axis is as wide as its longest label.
function widest(drawn, labels) {
  drawn.ctx.font = drawn.axes[1].font[0];
  const widths = (labels ?? []).map((label) => drawn.ctx.measureText(label).width / devicePixelRatio);
  return Math.ceil(Math.max(isNarrow() ? 0 : 30, ...widths)) + (isNarrow() ? 10 : 18);
}

// A value between two gaps is not part of a line, so it is drawn as a point.
function alone(drawn, series) {
  const values = drawn.data[series];
  return values.flatMap((value, at) => (value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null ? [at] : []));
}

function shade(drawn, partial) {
  const { ctx, bbox } = drawn;
  ctx.save();
  ctx.fillStyle = color("--shade");
  const place = (seconds) => Math.max(bbox.left, drawn.valToPos(seconds, "x", true));
  let begin = null;
  // The last slot, which is not complete, is never shaded. Adjacent slots form one rectangle without seams.
  partial.forEach((missing, at) => {
    const time = drawn.data[0][at];
    if (missing) begin ??= time - SLOT_S;
    else if (begin !== null) {
      const start = place(begin);
      ctx.fillRect(start, bbox.top, Math.max(0, place(time - SLOT_S) - start), bbox.height);
      begin = null;
    }
  });
  ctx.restore();
}

function options(plot, width, shown) {
  const ticks = { stroke: color("--line"), width: 1, ...(isNarrow() && { size: 4 }) };
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--grid"), width: 1 }, ticks, ...(isNarrow() && { gap: 3 }) };
  const lines = plot.lines && { splits: (_, __, least, most) => plot.lines.filter((line) => line >= least && line <= most), filter: (_, all) => all };
  return {
    width,
    height: height(),
    tzDate: (time) => uPlot.tzDate(new Date(time * 1000), "Etc/UTC"),
    cursor: { drag: { x: false, y: false } },
    hooks: { drawClear: [(drawn) => shade(drawn, shown.partial)] },
    scales: {
      x: { range: (_, __, last) => [last - shown.rangeS, last] },
      y: {
        distr: plot.from ? 3 : 1,
        // The axis reaches at least this value, so that noise near zero does not look large.
        range: (_, __, most) => [plot.from ?? 0, Math.max((most ?? 0) * 1.08, plot.least)],
      },
    },
    axes: [
      { ...axis, values: [[1, "{HH}:{mm}", null, null, null, null, null, null, 1]], incrs: [60, 120, 300, 600, 900], space: 45, size: isNarrow() ? 26 : 32 },
      { ...axis, ...lines, ...(plot.steps && { incrs: plot.steps }), size: widest, space: 26, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : plot.say(tick))) },
    ],
    series: [
      { value: "{HH}:{mm}:{ss}" },
      ...plot.columns.map(([label, , stroke, dash]) => ({
        label, stroke: color(stroke), dash, width: 2, points: { show: true, size: 5, fill: color(stroke), filter: alone }, value: (_, value) => plot.say(value),
      })),
    ],
  };
}

export class Plots {
  #drawn = new Map();
  #shown = { samples: null, rangeS: 0, range: "", partial: [] };

  constructor() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#redraw());
    new ResizeObserver(() => this.#resize()).observe(document.querySelector(".plots"));
  }

  show(samples, rangeS, range) {
    const from = -rangeS / SLOT_S;
    Object.assign(this.#shown, { samples, rangeS, range, partial: samples.partial.slice(from) });
    for (const [id, plot] of Object.entries(PLOTS)) {
      const data = [samples.time_ms.map((ms) => ms / 1000), ...plot.columns.map(([, column]) => samples[column])].map((column) => column.slice(from));
      const place = document.getElementById(id);
      if (!this.#drawn.has(id)) this.#drawn.set(id, new uPlot(options(plot, place.clientWidth, this.#shown), data, place));
      else this.#drawn.get(id).setData(data);
      const drawn = this.#drawn.get(id);
      // A slot that has just begun may have no values yet.
      const end = data[0].length - 1;
      const last = data.slice(1).some((column) => column[end] !== null) ? end : end - 1;
      // The legend shows the moment under the pointer, or otherwise the last one. uPlot clears it after drawing.
      setTimeout(() => {
        if (drawn.cursor.idx === null || drawn.cursor.idx === undefined) drawn.setLegend({ idx: last }, false);
      });
      const now = plot.columns.map(([label], at) => `${label} ${plot.say(data[at + 1][last])}`).join(", ");
      place.setAttribute("aria-label", `Plot of the last ${range}. Now: ${now}.`);
      place.dataset.points = data[1].filter((value) => value !== null).length;
      place.dataset.seconds = rangeS;
    }
  }

  #redraw() {
    for (const drawn of this.#drawn.values()) drawn.destroy();
    this.#drawn.clear();
    const { samples, rangeS, range } = this.#shown;
    if (samples !== null) this.show(samples, rangeS, range);
  }

  #resize() {
    for (const [id, drawn] of this.#drawn) {
      drawn.setSize({ width: document.getElementById(id).clientWidth, height: height() });
    }
  }
}

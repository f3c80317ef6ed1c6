// Fetches the last hour of all workers, and shows the chosen range as small lines, plots, and a timeline of owners.

import { Plots, SLOT_S } from "./plots.js";
import { clock, count, element, isNarrow, seconds, write } from "./words.js";

const EVERY_MS = 5000;
const FIRST_MS = 900;
const RANGES = { 300: "5 min", 900: "15 min", 3600: "1 h" };
const TICKS_MS = { 300: 60_000, 900: 300_000, 3600: 600_000 };
const HUES = 6;
const NAMED = 8;
// On a narrow screen, a partition name with more characters than this is shown above its line.
const LONG = 14;
const MOVES = 4;
const SVG = "http://www.w3.org/2000/svg";
const by = (id) => document.getElementById(id);

export class Hour {
  #ask;
  #changed;
  #plots = null;
  #fleet = null;
  #askedMs = 0;
  rangeS = 900;

  // `changed` is called when the figures of the range have changed.
  constructor(ask, changed) {
    this.#ask = ask;
    this.#changed = changed;
    for (const [range, label] of Object.entries(RANGES)) {
      const box = element("input", { type: "radio", name: "range", id: `range-${range}`, value: range });
      box.checked = Number(range) === this.rangeS;
      box.addEventListener("change", () => { this.rangeS = Number(range); this.look(true); });
      by("range").append(element("label", { for: box.id }, box, element("span", {}, label)));
    }
    by("plotted").addEventListener("change", () => this.look(true));
  }

  get label() {
    return `last ${RANGES[this.rangeS]}`;
  }

  // The figures of the range, or null before the first answer.
  get figures() {
    return this.#fleet && this.#fleet.ranges[this.rangeS];
  }

  // The values of a column in the range, from the oldest to the newest.
  column(name) {
    return this.#fleet === null ? [] : this.#fleet.plots[name].slice(-this.rangeS / SLOT_S);
  }

  async look(now = false) {
    // A worker that has just started knows no partitions yet, so the page asks again soon.
    const wait = this.#fleet?.partitions ? EVERY_MS : FIRST_MS;
    if (!now && Date.now() - this.#askedMs < wait) return;
    this.#askedMs = Date.now();
    const worker = by("plotted").value;
    const [fleet, one] = await Promise.all([
      this.#ask(isNarrow() ? "/api/hour?short" : "/api/hour"),
      worker ? this.#ask(`/api/hour?worker=${encodeURIComponent(worker)}`) : null,
    ]);
    if (!fleet.ok || worker !== by("plotted").value) return;
    this.#fleet = fleet.data;
    this.#showChoice(fleet.data.workers);
    this.#plots ??= new Plots();
    this.#plots.show((one?.ok ? one : fleet).data.plots, this.rangeS, RANGES[this.rangeS]);
    write(by("plots-title"), `${isNarrow() ? "Plots" : "Rates, latency, lag, state"}, ${this.label}`);
    showLost(fleet.data.lost);
    this.#showOwners();
    this.#changed();
  }

  #showChoice(workers) {
    const select = by("plotted");
    const names = ["", ...workers];
    by("plotted-box").hidden = workers.length < 2;
    if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name || "all workers")));
    select.value = names.includes(chosen) ? chosen : "";
  }

  #showOwners() {
    const { rows, moves, partitions, plots } = this.#fleet;
    const end = plots.time_ms.at(-1);
    const start = end - this.rangeS * 1000;
    const spans = rows.flatMap((row) => row.spans).filter((span) => span.to_ms > start);
    const names = [...new Set(spans.map((span) => span.worker))].sort();
    const hues = new Map(names.map((name, at) => [name, at % HUES]));
    by("owners").classList.toggle("long", rows.some((row) => nameOf(row).length > LONG));
    by("owners").replaceChildren(...rows.map((row) => lane(row, start, end, hues)), axis(start, end));
    by("owners-key").replaceChildren(
      ...names.map((name) => element("span", { class: `key hue-${hues.get(name)}` }, name)),
      ...["restoring", "assigned"].filter((state) => spans.some((span) => span.state === state))
        .map((state) => element("span", { class: `key ${state}` }, STATES[state])),
    );
    const seen = moves.filter((move) => move.at_ms >= start);
    const shown = isNarrow() ? MOVES : seen.length;
    by("moves").replaceChildren(...seen.slice(0, shown).map(moved));
    const [summary, earlier] = by("earlier").children;
    write(summary, `${count(seen.length - shown)} earlier`);
    earlier.replaceChildren(...seen.slice(shown).map(moved));
    by("earlier").hidden = seen.length <= shown;
    write(by("owners-title"), `Hand-overs, ${this.label}`);
    const shared = !isNarrow() && rows.some((row) => row.partitions > 1) ? "; partitions that always had the same owners share a line" : "";
    const none = seen.length ? "" : " No partition has changed its owner.";
    const whose = partitions === 0 ? "No partition is known to have an owner yet." : `Who had each of the ${count(partitions)} partitions${shared}.${none}`;
    write(by("owners-hint"), whose);
  }
}

const STATES = { restoring: "restoring", assigned: "assigned; its worker does not say more" };

const nameOf = (row) => `${row.label}${row.partitions > 1 ? ` (${count(row.partitions)})` : ""}`;

function lane(row, start, end, hues) {
  const track = element("div", { class: "track" });
  for (const span of row.spans) {
    if (span.to_ms <= start) continue;
    const from = Math.max(span.from_ms, start);
    const width = (100 * (span.to_ms - from)) / (end - start);
    const text = `${span.worker}: ${span.state}, ${clock(span.from_ms)} to ${clock(span.to_ms)}`;
    const bar = element("div", { class: `bar hue-${hues.get(span.worker)} ${span.state}`, title: text });
    if (width > (isNarrow() ? 30 : 12) && span.state !== "restoring") bar.append(span.worker);
    bar.style.left = `${(100 * (from - start)) / (end - start)}%`;
    bar.style.width = `${width}%`;
    track.append(bar);
  }
  return element("div", { class: "lane" }, element("span", { class: "lane-name", title: row.label }, nameOf(row)), track);
}

function axis(start, end) {
  const track = element("div", { class: "ticks" });
  // On a narrow screen, a label takes a greater share of the timeline.
  const edge = isNarrow() ? 9 : 3;
  const step = TICKS_MS[(end - start) / 1000];
  for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
    const left = (100 * (at - start)) / (end - start);
    if (left < edge || left > 100 - edge) continue; // the label would stick out
    const tick = element("span", {}, clock(at).slice(0, 5));
    tick.style.left = `${left}%`;
    track.append(tick);
  }
  return element("div", { class: "lane" }, element("span", { class: "lane-name" }), track);
}

function moved(move) {
  const which = move.partitions > NAMED ? "" : ` (${move.label})`;
  const what = `${move.partitions === 1 ? "1 partition" : `${count(move.partitions)} partitions`}${which}`;
  const took = move.took_ms === null ? "not known to run yet" : move.took_ms < 1000 ? "ran at once" : `ran after ${seconds(move.took_ms / 1000)}`;
  return element("li", { title: move.label }, element("time", {}, clock(move.at_ms)), ` ${move.from} → ${move.to}: ${what}, ${took}`);
}

// Shows for which part of the hour the data of some workers is lost.
function showLost(lost) {
  const texts = lost.map(({ worker, until_ms, answers }) => (answers
    ? `Worker ${worker} was restarted: its figures before ${clock(until_ms)} are lost.`
    : `Worker ${worker} is gone or does not answer: its figures until ${clock(until_ms)} are lost.`));
  if (texts.length) texts.push("Where the plots are shaded, they lack these figures.");
  write(by("lost"), texts.join(" "));
  by("lost").hidden = !texts.length;
}

// Draws a small line without axes in a tile. A missing value is a gap.
export function drawLine(svg, values) {
  const known = values.filter((value) => value !== null);
  const most = Math.max(...known, 0) || 1;
  const x = (at) => (100 * at) / Math.max(1, values.length - 1);
  const y = (value) => 22 - (20 * value) / most;
  const parts = [];
  values.forEach((value, at) => {
    if (value === null) return;
    if (at === 0 || values[at - 1] === null) parts.push([]);
    parts.at(-1).push([x(at), y(value)]);
  });
  const line = parts.map((part) => `M${part.map(([left, top]) => `${left.toFixed(1)} ${top.toFixed(1)}`).join("L")}${part.length === 1 ? "h.6" : ""}`).join("");
  const area = parts.map((part) => `M${part[0][0].toFixed(1)} 24L${part.map(([left, top]) => `${left.toFixed(1)} ${top.toFixed(1)}`).join("L")}L${part.at(-1)[0].toFixed(1)} 24Z`).join("");
  svg.querySelector(".area").setAttribute("d", area);
  svg.querySelector(".line").setAttribute("d", line);
}

export function newLine() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  for (const name of ["area", "line"]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    svg.append(path);
  }
  return svg;
}

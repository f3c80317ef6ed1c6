// The tables. Rows are updated in place by key, so that a focused button keeps the focus.

import { clock, count, element, instant, seconds, size, write } from "./words.js";

export const KINDS = { duplicate: "duplicates", conflict: "conflicts", late: "late records", dead_letter: "dead letters" };
const NAMES = { duplicate: "duplicate", conflict: "conflict", late: "late", dead_letter: "dead letter" };

function keyed(body, rows, keyOf, make, update) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const wanted = rows.map((row) => {
    const key = keyOf(row);
    const there = known.get(key) ?? make(row);
    there.dataset.key = key;
    update(there, row);
    return there;
  });
  const kept = new Set(wanted);
  for (const row of known.values()) if (!kept.has(row)) row.remove();
  wanted.forEach((row, at) => {
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
}

function owner(row) {
  // Group members report these URLs, so only http(s) becomes a link, and "javascript:" does not.
  const linked = row.state === "elsewhere" && /^https?:\/\//.test(row.url ?? "");
  return linked ? element("a", { href: row.url, rel: "noreferrer" }, row.worker) : element("span", {}, row.worker);
}

function newTask(row) {
  return element(
    "tr", {},
    element("th", { scope: "row" }, `${row.topic}/${row.partition}`),
    element("td", {}, row.state === "standby" ? "standby" : row.task || "–"),
    element("td", {}, owner(row)),
    element("td", {}, element("span", { class: "state" }), element("span", { class: "below" })),
    element("td", { class: "number" }), element("td", { class: "number" }), element("td", { class: "number" }, element("span"), element("span", { class: "below" })),
  );
}

const STATES = { elsewhere: "on another worker", standby: "warm copy", running: "running", restoring: "restoring", created: "starting", closed: "closed" };

function updateTask(line, row) {
  const [, , , state, lag, ids, bytes] = line.children;
  state.firstChild.className = `state ${row.state}`;
  write(state.firstChild, STATES[row.state] ?? row.state);
  progress(state.lastChild, row);
  const behind = row.lag_seconds ? ` (${seconds(row.lag_seconds)})` : "";
  write(lag, `${count(row.lag_records)}${behind}`);
  write(ids, count(row.state_ids));
  write(bytes.firstChild, size(row.state_bytes));
  filled(bytes.lastChild, row);
}

function progress(node, row) {
  if (!row.restore_total) return node.replaceChildren();
  const done = row.restore_total - row.restore_remaining;
  if (!node.firstChild) {
    node.replaceChildren(element("progress", { "aria-label": `Restore of ${row.topic}/${row.partition}` }), element("span"));
  }
  node.firstChild.max = row.restore_total;
  node.firstChild.value = done;
  write(node.lastChild, ` ${Math.floor((100 * done) / row.restore_total)}%, ${count(row.restore_remaining)} records left`);
}

function filled(node, row) {
  if (!row.state_max_bytes) return node.replaceChildren();
  if (!node.firstChild) {
    const most = row.state_max_bytes;
    const meter = element("meter", { min: 0, max: most, high: 0.8 * most, "aria-label": `State of ${row.topic}/${row.partition} against its limit` });
    node.replaceChildren(meter, element("span"));
  }
  node.firstChild.value = row.state_bytes;
  write(node.lastChild, ` ${Math.round((100 * row.state_bytes) / row.state_max_bytes)}% of ${size(row.state_max_bytes)}`);
}

export function showTasks(rows) {
  const key = (row) => [row.task, row.topic, row.partition, row.worker, row.state === "standby"].join(" ");
  keyed(document.querySelector("#tasks tbody"), rows, key, newTask, updateTask);
}

export class Latest {
  #body = document.querySelector("#latest tbody");
  #none = document.getElementById("latest-none");
  #boxes = new Map();
  #rows = [];
  #lookUp;
  #showRecord;

  constructor(lookUp, showRecord) {
    this.#lookUp = lookUp;
    this.#showRecord = showRecord;
    for (const [kind, label] of Object.entries(KINDS)) {
      const box = element("input", { type: "checkbox", id: `kind-${kind}`, checked: "" });
      box.addEventListener("change", () => this.show(this.#rows));
      this.#boxes.set(kind, box);
      document.getElementById("kinds").append(element("label", { for: box.id }, box, label));
    }
  }

  show(rows) {
    this.#rows = rows;
    const wanted = rows.filter((row) => this.#boxes.get(row.kind)?.checked);
    keyed(this.#body, wanted, (row) => `${row.kind} ${row.source}`, (row) => this.#made(row), () => {});
    this.#none.hidden = wanted.length > 0;
  }

  #made(row) {
    const id = element("td", {}, row.id === null ? "–" : element("button", { type: "button", class: "plain", title: "Look this ID up" }, row.id));
    id.querySelector("button")?.addEventListener("click", () => this.#lookUp(row.id));
    const ask = element("button", { type: "button", class: "plain", "aria-label": `Show the payload of ${row.source}` }, "show");
    ask.addEventListener("click", () => this.#showRecord(row.source));
    return element(
      "tr", {},
      element("td", {}, clock(row.judged_ms)), element("td", {}, NAMES[row.kind] ?? row.kind),
      element("td", {}, row.source), element("td", {}, row.event_time_ms === null ? "–" : instant(row.event_time_ms)),
      id, element("td", {}, row.why), element("td", {}, ask),
    );
  }
}

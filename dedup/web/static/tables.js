// The tables. Rows are updated in place by key, so that a focused button keeps the focus.

import { clock, count, element, instant, isNarrow, pageOf, rate, seconds, share, size, write } from "./words.js";

export const KINDS = { dead_letter: "dead letters", conflict: "conflicts", late: "late records", duplicate: "duplicates" };
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

// Returns a cell of a table; on a phone, rows become cards, and the cell shows its label.
function cell(label, attributes, ...children) {
  return element("td", { "data-label": label, ...attributes }, ...children);
}

function newWorker(row) {
  return element(
    "tr", { id: `worker:${row.worker}` },
    element("th", { scope: "row" }, pageOf(row.url, row.worker)),
    cell("State", {}, element("span", { class: "state" }), element("span", { class: "below" })),
    ...["Tasks", "Records/s", "Duplicates", "Lag", "Latency, p99", "State size"].map((label) => cell(label, { class: "number" })),
  );
}

function updateWorker(line, row, differing) {
  const [, state, ...numbers] = line.children;
  const lost = row.why !== undefined;
  state.firstChild.className = `state ${lost ? "closed" : row.ready ? "running" : "restoring"}`;
  write(state.firstChild, lost ? `no answer: ${row.why}` : row.ready ? (row.url ? "ready" : "ready (this page)") : "not ready");
  line.classList.toggle("unknown", lost);
  const copies = Object.entries(row.user_code ?? {}).filter(([name]) => differing.has(name));
  write(state.lastChild, copies.map(([name, digest]) => `copy of ${name}: ${digest}`).join(", "));
  const totals = lost ? null : row.totals;
  const shown = lost ? numbers.map(() => "–") : [
    count(row.tasks), rate(row.records_per_s),
    share([totals.unique, totals.duplicate, totals.late, totals.dead_letter, totals.exempt], totals.duplicate),
    count(row.lag_records), seconds(row.p99_s), size(row.state_bytes),
  ];
  numbers.forEach((node, at) => write(node, shown[at]));
}

export function showWorkers(rows) {
  const copies = new Map();
  const differing = new Set();
  for (const [name, digest] of rows.flatMap((row) => Object.entries(row.user_code ?? {}))) {
    if ((copies.get(name) ?? digest) !== digest) differing.add(name);
    copies.set(name, digest);
  }
  const update = (line, row) => updateWorker(line, row, differing);
  keyed(document.querySelector("#workers tbody"), rows, (row) => `${row.worker} ${row.url}`, newWorker, update);
}

function newTask(row) {
  if (row.held !== undefined) {
    return element("tr", { class: "owner" }, element("th", { scope: "rowgroup", colspan: 6 }, pageOf(row.url, row.worker), element("small")));
  }
  const name = `${row.topic}/${row.partition}`;
  const task = row.state === "standby" ? "standby" : row.task;
  return element(
    "tr", { id: `task:${name}` },
    element("th", { scope: "row" }, name),
    cell("Task", { class: task ? null : "nothing" }, task || "–"),
    cell("State", {}, element("span", { class: "state" }), element("span", { class: "below" })),
    cell("Lag", { class: "number" }), cell("IDs", { class: "number" }),
    cell("State size", { class: "number" }, element("span"), element("span", { class: "below" })),
  );
}

const STATES = { elsewhere: "on another worker", standby: "warm copy", running: "running", restoring: "restoring", created: "starting", closed: "closed" };

function updateTask(line, row) {
  if (row.held !== undefined) return write(line.firstChild.lastChild, ` ${count(row.held)} ${row.held === 1 ? "task" : "tasks"}`);
  const [, , state, lag, ids, bytes] = line.children;
  line.classList.toggle("unknown", row.lag_records === null && row.state_bytes === null);
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

// If there is more than one worker, a row with the worker's name precedes the tasks of each worker.
export function showTasks(rows) {
  const key = (row) => [row.task, row.topic, row.partition, row.worker, row.state === "standby"].join(" ");
  const workers = new Map();
  for (const row of rows) {
    if (!workers.has(row.worker)) workers.set(row.worker, []);
    workers.get(row.worker).push(row);
  }
  const shown = [...workers.values()].flatMap((own) => {
    const { worker, url } = own[0];
    const held = own.filter((row) => row.state !== "standby").length;
    return workers.size > 1 ? [{ worker, url, held }, ...own] : own;
  });
  keyed(document.querySelector("#tasks tbody"), shown, key, newTask, updateTask);
  document.getElementById("tasks-none").hidden = rows.length > 0;
}

export class Latest {
  #body = document.querySelector("#latest tbody");
  #none = document.getElementById("latest-none");
  #boxes = new Map();
  #rows = [];
  #page = 0;
  #lookUp;
  #showRecord;

  constructor(lookUp, showRecord) {
    this.#lookUp = lookUp;
    this.#showRecord = showRecord;
    for (const [kind, label] of Object.entries(KINDS)) {
      const box = element("input", { type: "checkbox", id: `kind-${kind}`, checked: "" });
      box.addEventListener("change", () => this.#turn(-this.#page));
      this.#boxes.set(kind, box);
      document.getElementById("kinds").append(element("label", { for: box.id }, box, label));
    }
    document.getElementById("latest-previous").addEventListener("click", () => this.#turn(-1));
    document.getElementById("latest-next").addEventListener("click", () => this.#turn(1));
  }

  // Shows only the records of one kind.
  only(kind) {
    for (const [each, box] of this.#boxes) box.checked = each === kind;
    this.#turn(-this.#page);
  }

  show(rows) {
    this.#rows = rows;
    const wanted = rows.filter((row) => this.#boxes.get(row.kind)?.checked);
    const most = isNarrow() ? 3 : 10;
    this.#page = Math.max(0, Math.min(this.#page, Math.ceil(wanted.length / most) - 1));
    const first = this.#page * most;
    const shown = wanted.slice(first, first + most);
    keyed(this.#body, shown, (row) => `${row.kind} ${row.source}`, (row) => this.#made(row), () => {});
    this.#none.hidden = wanted.length > 0;
    write(this.#none, rows.length ? "None of these kinds." : "None yet.");
    document.getElementById("latest-pages").hidden = wanted.length <= most;
    document.getElementById("latest-previous").disabled = first === 0;
    document.getElementById("latest-next").disabled = first + most >= wanted.length;
    write(document.getElementById("latest-range"), `${first + 1} to ${first + shown.length} of ${wanted.length}`);
  }

  #turn(pages) {
    this.#page += pages;
    this.show(this.#rows);
  }

  #made(row) {
    const id = cell("ID", { class: row.id === null ? "nothing" : null }, row.id === null ? "–" : element("button", { type: "button", class: "plain", title: "Look this ID up" }, row.id));
    id.querySelector("button")?.addEventListener("click", () => this.#lookUp(row.id));
    const ask = element("button", { type: "button", class: "plain", "aria-label": `Show the payload of ${row.source}` }, "show");
    ask.addEventListener("click", () => this.#showRecord(row.source));
    return element(
      "tr", {},
      cell("Judged", {}, clock(row.judged_ms)), cell("Verdict", {}, NAMES[row.kind] ?? row.kind),
      cell("Record", {}, row.source), cell("Event time", {}, row.event_time_ms === null ? "–" : instant(row.event_time_ms)),
      id, cell("Why", {}, row.why), cell("Payload", {}, ask),
    );
  }
}

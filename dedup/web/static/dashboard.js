// Fetches a snapshot every second and shows it. Reports a worker that does not respond.

import { drawLine, Hour, newLine } from "./hour.js";
import { Lookup, showRecord } from "./lookup.js";
import { Latest, showTasks, showWorkers } from "./tables.js";
import { brief, clock, count, element, isLink, isNarrow, rate, seconds, share, size, write } from "./words.js";

const EVERY_MS = 1000;
const FORMAT = 4;
const TOKEN = "dedup-token";
const by = (id) => document.getElementById(id);

let paused = false;
let lastMs = null;
let fleet = [];
let asked = location.hash;

// Returns whether the request succeeded, and the JSON of the response; never throws.
async function ask(path) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  try {
    const answer = await fetch(path, { headers, cache: "no-store", redirect: "error" });
    if (answer.status === 401) return { ok: false, locked: true, data: { error: "The token is not accepted." } };
    const data = await answer.json().catch(() => ({ error: `The worker answers with status ${answer.status}.` }));
    return { ok: answer.ok, data };
  } catch {
    return { ok: false, data: { error: "The worker does not answer." } };
  }
}

const lookup = new Lookup(ask);
const latest = new Latest((id) => { lookup.of(id); by("lookup-id").focus(); }, (source) => showRecord(ask, source));

const hour = new Hour(ask, () => showFleet(fleet));

function showAttention(board) {
  const errors = board.attention.some((notice) => notice.level === "error");
  const number = issues(board.attention);
  by("attention").className = errors ? "error" : number ? "warning" : "good";
  write(by("verdict"), number ? `${count(number)} ${number === 1 ? "issue" : "issues"}` : "No issues");
  const shown = isNarrow() ? 4 : 8;
  const [first, rest] = [board.attention.slice(0, shown), board.attention.slice(shown)];
  showNotices(by("notices"), rest.length ? [...first, { level: rest[0].level, text: `${count(issues(rest))} more`, about: "rest" }] : first);
  showNotices(by("rest"), rest);
  if (!rest.length) by("rest").hidden = true;
}

const issues = (notices) => notices.reduce((sum, notice) => sum + notice.issues, 0);

// Each notice is a link to its cause. Items are updated in place, so that a focused link keeps the focus although some
// texts change every second.
function showNotices(list, notices) {
  while (list.children.length > notices.length) list.lastChild.remove();
  notices.forEach((notice, at) => {
    if (at === list.children.length) list.append(element("li", {}, element("b"), element("a")));
    const [level, link] = list.children[at].children;
    write(level, `${notice.level}: `);
    write(link, notice.worker ? `${notice.worker}: ${notice.text}` : notice.text);
    const elsewhere = notice.worker && isLink(notice.url);
    const about = notice.worker && !elsewhere ? `worker:${notice.worker}` : notice.about;
    link.href = `${elsewhere ? `${notice.url}/` : ""}#${encodeURIComponent(about)}`;
    if (elsewhere) delete link.dataset.about;
    else link.dataset.about = about;
  });
}

// Shows the part of the page that an issue is about: opens what is closed, scrolls to it, and marks it.
function lead(about) {
  const [part, name] = about.split(/:(.*)/s);
  if (!["kind", "task", "worker", "not-ready", "tasks", "rest"].includes(part)) return;
  if (part === "kind") latest.only(name);
  if (part === "rest") by("rest").hidden = !by("rest").hidden;
  const place = by({ kind: "latest-title", tasks: "tasks-title" }[part] ?? about);
  if (place === null || place.hidden) return;
  for (const old of document.querySelectorAll(".led")) old.classList.remove("led");
  if (part !== "rest") place.classList.add("led");
  place.tabIndex = -1;
  place.focus({ preventScroll: true });
  place.scrollIntoView({ block: part === "rest" ? "nearest" : place.matches("h2") ? "start" : "center" });
}

// Combines a figure of all workers that know it. Returns null if no worker knows it.
function over(workers, figure, combine = (values) => values.reduce((sum, value) => sum + value)) {
  const known = workers.map(figure).filter((value) => value !== null);
  return known.length ? combine(known) : null;
}

const JUDGED = ["unique", "duplicate", "late", "dead_letter", "exempt"];

// Returns for each tile the name, the time that the figure covers, the figure, and the column of its line.
function tiles(workers) {
  const total = (name) => over(workers, (worker) => worker.totals[name]);
  const now = (name, combine) => over(workers, (worker) => worker[name], combine);
  const range = hour.figures;
  return [
    ["Records/s", "now", rate(now("records_per_s")), "records"],
    ["Duplicates", hour.label, range === null ? "–" : share(JUDGED.map((name) => range[name]), range.duplicate), "duplicate_share"],
    ["Latency, p99", hour.label, seconds(range === null ? null : range.p99_s), "p99_s"],
    ["Lag", "now", brief(now("lag_records")), "lag_records"],
    ["State", "now", size(now("state_bytes")), "state_bytes"],
    ["Conflicts", "since start", brief(total("conflict")), "conflict"],
    ["Late", "since start", brief(total("late")), "late"],
    ["Dead letters", "since start", brief(total("dead_letter")), "dead_letter", total("dead_letter") > 0],
  ];
}

// Adds up the totals of the workers that have responded; the page says how many there are.
function showFleet(workers) {
  fleet = workers;
  const known = fleet.filter((worker) => worker.why === undefined);
  const all = known.length === fleet.length ? `all ${fleet.length}` : `${known.length} of ${fleet.length}`;
  write(by("fleet-title"), fleet.length > 1 ? `Fleet: ${all} workers` : "This worker");
  by("workers-box").hidden = fleet.length < 2;
  showWorkers(fleet);
  showTiles(tiles(known));
}

function showTiles(wanted) {
  const list = by("tiles");
  if (!list.children.length) {
    list.append(...wanted.map(([name]) => element(
      "div", {}, element("dt", {}, element("span", {}, name), element("small")), element("dd", {}, element("span"), newLine()),
    )));
  }
  wanted.forEach(([, time, value, column, bad], at) => {
    const [title, figure] = list.children[at].children;
    write(title.lastChild, time);
    write(figure.firstChild, value);
    figure.className = bad ? "bad" : "";
    drawLine(figure.lastChild, hour.column(column));
  });
}

function show(board) {
  if (board.format !== FORMAT) {
    connection("This page and the worker are of different releases. Reload the page.", true);
    return;
  }
  document.title = `${board.topology} · ${board.worker}`;
  write(by("topology"), board.topology);
  write(by("worker"), board.worker);
  by("content").hidden = false;
  showAttention(board);
  showFleet(board.fleet);
  hour.look();
  write(by("not-ready"), board.not_ready === null ? "" : `This worker is not ready: ${board.not_ready}.`);
  by("not-ready").hidden = board.not_ready === null;
  showTasks(board.tasks);
  latest.show(board.latest);
  lastMs = board.now_ms;
  connection(`${clock(board.now_ms)} UTC`, false);
  if (asked) leadTo(asked);
  asked = "";
}

// Another worker's page links to a part of this page, which exists only once there is data.
function leadTo(hash) {
  try {
    lead(decodeURIComponent(hash.slice(1)));
  } catch (error) {
    if (!(error instanceof URIError)) throw error;
  }
}

function connection(text, lost) {
  write(by("connection"), text);
  by("connection").className = lost ? "lost" : "";
  // The page shows old data in this case, so screen readers also announce it.
  if (lost) {
    by("attention").className = "error";
    write(by("verdict"), text);
  }
}

async function look() {
  if (paused || document.hidden) return;
  const { ok, locked, data } = await ask("/api/dashboard");
  if (paused) return;
  by("token-form").hidden = !locked;
  if (ok) {
    try {
      show(data);
    } catch (error) {
      connection(`This page cannot show the worker's answer (${error.message}). Reload the page.`, true);
    }
  } else if (locked) {
    const given = sessionStorage.getItem(TOKEN) !== null;
    sessionStorage.removeItem(TOKEN);
    if (given) write(by("token-wrong"), "This is not the worker's token.");
    connection(lastMs === null ? "" : `The token is no longer accepted; no figures since ${clock(lastMs)} UTC`, lastMs !== null);
  } else {
    connection(`No answer from this worker${lastMs === null ? "" : ` since ${clock(lastMs)} UTC`}; retrying`, true);
  }
}

async function live() {
  if (by("token-form").hidden) await look();
  setTimeout(live, EVERY_MS);
}

by("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = by("token").value;
  by("token").value = "";
  // The browser cannot send all other characters, and a token never contains them.
  const fit = /^[ -~]*$/.test(given);
  write(by("token-wrong"), fit ? "" : "This is not the worker's token. It contains a character that is not ASCII and may be invisible.");
  if (!fit) return;
  sessionStorage.setItem(TOKEN, given);
  look();
});
by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", String(paused));
  if (paused) connection("paused", false);
  else look();
});
by("attention").addEventListener("click", (event) => {
  const link = event.target.closest("a[data-about]");
  if (link === null) return;
  event.preventDefault();
  if (link.dataset.about !== "rest") history.replaceState(null, "", link.href);
  lead(link.dataset.about);
});
window.addEventListener("hashchange", () => leadTo(location.hash));
document.addEventListener("visibilitychange", look);
live();

// Fetches a snapshot every second and shows it. Reports a worker that does not respond.

import { Lookup, showRecord } from "./lookup.js";
import { Plots } from "./plots.js";
import { Latest, showTasks } from "./tables.js";
import { clock, count, element, rate, seconds, size, write } from "./words.js";

const EVERY_MS = 1000;
const FORMAT = 1;
const TOKEN = "dedup-token";
const by = (id) => document.getElementById(id);

let paused = false;
let lastMs = null;
let plots = null;

// Returns whether the request succeeded, and the JSON of the response; never throws.
async function ask(path) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  try {
    const answer = await fetch(path, { headers, cache: "no-store", redirect: "error" });
    if (answer.status === 401) return { ok: false, locked: true, data: { error: "The token is not accepted." } };
    return { ok: answer.ok, data: await answer.json() };
  } catch {
    return { ok: false, data: { error: "The worker does not answer." } };
  }
}

const lookup = new Lookup(ask);
const latest = new Latest((id) => { lookup.of(id); by("lookup-id").focus(); }, (source) => showRecord(ask, source));

function showAttention(board) {
  const errors = board.attention.filter((notice) => notice.level === "error").length;
  const number = board.attention.length;
  by("attention").className = errors ? "error" : number ? "warning" : "good";
  write(by("verdict"), number ? `${number} ${number === 1 ? "issue" : "issues"}` : "No issues");
  const lines = board.attention.map((notice) => `${notice.level}: ${notice.text}`);
  const shown = [...by("notices").children].map((item) => item.textContent);
  if (lines.join("\n") === shown.join("\n")) return;
  by("notices").replaceChildren(...board.attention.map((notice) =>
    element("li", {}, element("b", {}, `${notice.level}: `), notice.text)));
}

function tiles(board) {
  const samples = board.plots;
  const now = (name) => samples[name].at(-1) ?? null;
  const judged = now("unique") === null ? null : now("unique") + now("duplicate") + now("late") + now("dead_letter") + now("exempt");
  const totals = board.totals;
  const all = totals.unique + totals.duplicate + totals.late + totals.dead_letter + totals.exempt;
  const sizes = board.tasks.map((task) => task.state_bytes).filter((bytes) => bytes !== null);
  return [
    ["Records/s", rate(judged)],
    ["Lag", count(now("lag_records"))],
    ["Latency, p99", seconds(samples.p99_s.findLast((value) => value !== null) ?? null)],
    ["Duplicates", all ? `${(100 * totals.duplicate / all).toFixed(1)}%` : "–"],
    ["Conflicts", count(totals.conflict)],
    ["Late", count(totals.late)],
    ["Dead letters", count(totals.dead_letter), totals.dead_letter > 0],
    ["State", size(sizes.length ? sizes.reduce((sum, bytes) => sum + bytes) : null)],
  ];
}

function showTiles(board) {
  const list = by("tiles");
  const wanted = tiles(board);
  if (!list.children.length) {
    list.append(...wanted.map(([name]) => element("div", {}, element("dt", {}, name), element("dd"))));
  }
  wanted.forEach(([, value, bad], at) => {
    const node = list.children[at].lastChild;
    write(node, value);
    node.className = bad ? "bad" : "";
  });
}

function showNow(samples) {
  const last = (name) => samples[name].at(-1) ?? null;
  write(by("rates-now"), last("unique") === null ? "" : `${rate(last("unique"))} unique/s, ${rate(last("duplicate"))} duplicates/s`);
  write(by("lag-now"), `${count(last("lag_records"))} records`);
  write(by("latency-now"), last("median_s") === null ? "nothing committed" : `median ${seconds(last("median_s"))}`);
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
  showTiles(board);
  showNow(board.plots);
  plots ??= new Plots();
  plots.show(board.plots);
  showTasks(board.tasks);
  latest.show(board.latest);
  lastMs = board.now_ms;
  connection(`${clock(board.now_ms)} UTC`, false);
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
  if (ok) show(data);
  else if (locked) {
    const given = sessionStorage.getItem(TOKEN) !== null;
    sessionStorage.removeItem(TOKEN);
    if (given) write(by("token-wrong"), "This is not the worker's token.");
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
  write(by("token-wrong"), "");
  sessionStorage.setItem(TOKEN, by("token").value);
  by("token").value = "";
  look();
});
by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", String(paused));
  if (paused) connection("paused", false);
  else look();
});
document.addEventListener("visibilitychange", look);
live();

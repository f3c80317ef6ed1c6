// Looks up an ID, and shows a record's payload on request.

import { count, element, instant } from "./words.js";

const place = (...parts) => parts.map(encodeURIComponent).join("/");

export class Lookup {
  #ask;
  #input = document.getElementById("lookup-id");
  #answer = document.getElementById("lookup-answer");
  #asked = 0;

  constructor(ask) {
    this.#ask = ask;
    document.getElementById("lookup-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.of(this.#input.value);
    });
  }

  async of(id) {
    this.#input.value = id;
    this.#asked += 1;
    const number = this.#asked;
    const bytes = new TextEncoder().encode(id).length;
    if (bytes > this.#input.maxLength) {
      this.#answer.replaceChildren(wrong(`This ID has ${count(bytes)} bytes, and one of at most ${count(this.#input.maxLength)} can be looked up.`));
      return;
    }
    this.#answer.replaceChildren(element("p", {}, "Looking up …"));
    const { ok, data } = await this.#ask(`/api/ids?id=${encodeURIComponent(id)}`);
    if (number !== this.#asked) return; // another lookup has started in the meantime
    this.#answer.replaceChildren(...(ok ? answerOf(data) : [wrong(data.error ?? "No answer.")]));
    this.#answer.scrollIntoView({ block: "nearest" });
  }
}

const wrong = (text) => element("p", { class: "wrong" }, text);

function answerOf(found) {
  const parts = found.sightings.map((seen) => facts([
    ["Seen", `${instant(seen.first_ms)}${seen.last_ms === seen.first_ms ? "" : `, last at ${instant(seen.last_ms)}`}`],
    ["In", seen.source],
    ["Guarded until", `${instant(seen.guarded_until_ms)} of event time${seen.live ? "" : ": expired, but not dropped yet"}`],
    ["Forwarded to", seen.went ?? "nowhere: the topology only observes"],
    ["Known to", `worker ${seen.worker}, partition ${seen.partition}`],
  ]));
  const head = found.sightings.length
    ? `${found.id}: ${found.sightings.length === 1 ? "one sighting" : `${found.sightings.length} sightings`}`
    : `${found.id}: ${found.unreached.length ? "not known to the workers that answered" : "not known: never seen, or its sighting has expired"}`;
  const silent = found.unreached.map((row) => wrong(
    `${which(row.partitions)} not asked: ${row.worker === null ? "" : `worker ${row.worker}: `}${row.why}.`,
  ));
  const asked = `${found.asked.length} of ${found.partitions} partitions were asked` +
    `${found.belongs_to === null ? "" : `; this ID belongs to partition ${found.belongs_to}`}.`;
  return [element("p", {}, element("strong", {}, head)), ...parts, ...silent, element("p", { class: "below" }, asked)];
}

function which(partitions) {
  if (!partitions.length) return "All partitions";
  return `${partitions.length === 1 ? "Partition" : "Partitions"} ${partitions.join(", ")}`;
}

function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

export async function showRecord(ask, source) {
  const [topic, partition, offset] = source.split("/");
  const { ok, data } = await ask(`/api/records/${place(topic, partition, offset)}`);
  const dialog = document.getElementById("record");
  document.getElementById("record-title").textContent = source;
  const value = document.getElementById("record-value");
  const list = document.getElementById("record-facts");
  list.className = "facts";
  if (ok) {
    const pairs = [["Timestamp", instant(data.timestamp_ms)], ["Key", data.key ?? "null"], ["Size", `${count(data.value_bytes)} bytes`]];
    list.replaceChildren(...facts(pairs).childNodes);
    value.textContent = data.value ?? "null";
  } else {
    list.replaceChildren();
    value.textContent = data.error ?? "No answer.";
  }
  dialog.showModal();
}

// Formats numbers, sizes, and times. Everything on this page is inserted as text, never as markup.

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SMALL = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (value) => (value === null ? "–" : NUMBER.format(value));
// Formats a number for a small space: a hundred million or more is shown with three digits and a unit.
export const brief = (value) => (value === null || value < 1e8 ? count(value) : COMPACT.format(value));
export const rate = (value) => (value === null ? "–" : value >= 100 ? NUMBER.format(value) : SMALL.format(value));

export function size(bytes) {
  if (bytes === null) return "–";
  let step = 0;
  while (bytes >= 1024 && step < SIZES.length - 1) {
    bytes /= 1024;
    step += 1;
  }
  return `${SMALL.format(bytes)} ${SIZES[step]}`;
}

export function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${NUMBER.format(value * 1000)} ms`;
  if (value < 120) return `${SMALL.format(value)} s`;
  return value < 7200 ? `${NUMBER.format(value / 60)} min` : `${SMALL.format(value / 3600)} h`;
}

export function share(parts, part) {
  const all = parts.reduce((sum, value) => sum + value, 0);
  return all ? `${((100 * part) / all).toFixed(1)}%` : "–";
}

// Event times may be any number. A number that is not a date is shown as a number.
export function instant(ms) {
  const date = new Date(ms);
  return Number.isNaN(date.getTime()) ? `${ms} ms` : date.toISOString().replace(".000Z", "Z");
}

export const clock = (ms) => instant(ms).slice(11, 19);

// Returns an element with attributes and children; a string child becomes text.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Group members report the URLs of their pages, so only http(s) becomes a link, and "javascript:" does not.
export const isLink = (url) => /^https?:\/\//.test(url ?? "");

// Returns a link to another worker's page, or text if the worker serves no page.
export function pageOf(url, text) {
  return isLink(url) ? element("a", { href: url, rel: "noreferrer" }, text) : element("span", {}, text);
}

// Writes only text that changed, because screen readers announce every write.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// On a narrow screen, lists are shorter, and rows of tables are cards (narrow.css).
const NARROW = matchMedia("(max-width: 66rem)");
export const isNarrow = () => NARROW.matches;

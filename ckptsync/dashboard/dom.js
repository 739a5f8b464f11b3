"use strict";

// What the parts share: making elements, and saying sizes and times as `ckptsync status` does.
// Text from the store goes through textContent and setAttribute alone, so none of it can be markup.

const $ = (id) => document.getElementById(id);

function h(name, props, ...children) {
  return fill(document.createElement(name), props, children);
}

function svg(name, props, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), props, children);
}

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "style") Object.assign(element.style, value);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/* Replaces what `element` holds if `data` differs from what it was drawn from; focus stays where it was. */
function draw(element, data, make) {
  const drawn = JSON.stringify(data);
  if (element.drawn === drawn) return false;
  element.drawn = drawn;
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  element.replaceChildren(...[make()].flat(9).filter(Boolean));
  if (focused) element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  return true;
}

function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(count) >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${count.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

function percent(share) {
  if (share === 0) return "0 %";
  if (share < 0.0001) return "< 0.01 %";
  return `${(100 * share).toPrecision(share < 0.1 ? 2 : 3)} %`;
}

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const clock = (at) => new Date(at * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });

/* An age that goes on by itself, whether or not anything else changes. */
function age(since, suffix = "") {
  return h("span", { class: "num", "data-since": since, "data-suffix": suffix, title: clock(since) }, "");
}

function tick(now) {
  for (const element of document.querySelectorAll("[data-since]")) {
    element.textContent = seconds(Math.max(0, now - Number(element.dataset.since))) + element.dataset.suffix;
  }
}

function key(element, ...entries) {
  draw(element, entries, () => entries.map(([mark, text]) => h("span", {}, mark(), text)));
}

const swatch = (colour, kind = "") => () => h("i", { class: kind, style: colour ? { background: colour } : {} });

/* Share 0 to 1, over four decades, as a colour of the theme's ramp. */
function heat(share) {
  if (share <= 0) return "var(--heat-0)";
  const place = 3 * Math.min(1, Math.max(0, (Math.log10(share) + 4) / 4));
  const step = Math.min(2, Math.floor(place));
  return `color-mix(in oklab, var(--heat-${step + 2}) ${Math.round(100 * (place - step))}%, var(--heat-${step + 1}))`;
}

function paint(element, change) {
  if (!change) { element.style.background = "transparent"; return element; }
  const share = change.elements ? change.changed / change.elements : 0;
  if (change.how === "digests" && share > 0) element.classList.add("hatch");
  else element.style.background = heat(share);
  return element;
}

function says(change) {
  if (!change) return "how much it changed is not known";
  const share = percent(change.elements ? change.changed / change.elements : 0);
  return `${change.how === "digests" ? "at most " : ""}${share} changed since ${change.base}`;
}

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page from a file, or over plain HTTP from another host, has no clipboard.
    const area = h("textarea", { "aria-hidden": "true" });
    area.value = text;
    button.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

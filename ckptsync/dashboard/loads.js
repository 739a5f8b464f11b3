// How loads went: every attempt that receipts tell of, by when it ended and how long its parts took.

const HIGH = 230;
const MOST = 1200; // attempts: a large fleet's older ones are left out
const MARGIN = { left: 52, right: 12, top: 10, bottom: 24 };

function loads(page) {
  const attempts = page.status.readers.flatMap((reader) => reader.history.map((past) => ({ ...past, reader: reader.reader })));
  if (attempts.length > MOST) attempts.sort((a, b) => a.at - b.at).splice(0, attempts.length - MOST);
  key($("loads-key"), [swatch("var(--full)"), "staged and verified"], [swatch("var(--warn)"), "engine paused"],
    [swatch("var(--delta)"), "published until live"], [swatch("var(--bad)"), "refused or failed"]);
  const wide = Math.max(300, $("loads").clientWidth);
  draw($("loads"), [attempts, wide], () => attempts.length ? plot(attempts, wide)
    : h("p", { class: "empty" }, "No reader has loaded anything yet."));
}

function plot(attempts, wide) {
  const points = attempts.flatMap(pointsOf);
  const times = attempts.map((past) => past.at);
  const x = scale(Math.min(...times), Math.max(...times), MARGIN.left + 6, wide - MARGIN.right - 6, (value) => value);
  const [low, high] = decades(points.map((point) => point.value));
  const y = scale(low, high, HIGH - MARGIN.bottom, MARGIN.top, Math.log10);
  const lines = [];
  for (let at = low; at <= high * 1.001; at *= 10) {
    lines.push(svg("line", { class: "grid", x1: MARGIN.left, x2: wide - MARGIN.right, y1: y(at), y2: y(at) }),
      svg("text", { x: MARGIN.left - 8, y: y(at) + 4, "text-anchor": "end" }, at < 1 ? seconds(at) : `${Math.round(at)} s`));
  }
  const ends = [[Math.min(...times), "start", MARGIN.left], [Math.max(...times), "end", wide - MARGIN.right]];
  const label = `${plural(attempts.length, "attempt")}: ${summary(attempts)}`;
  return [
    svg("svg", { width: wide, height: HIGH, viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": label },
      lines,
      points.map((point) => mark(point, x(point.at), y(Math.max(low, point.value)))),
      ends.map(([at, anchor, place]) => svg("text", { x: place, y: HIGH - 6, "text-anchor": anchor }, moment(at, times)))),
    h("p", { class: "muted" }, summary(attempts)),
  ];
}

/* With the day only where there are several. */
function moment(at, times) {
  const days = Math.max(...times) - Math.min(...times) > 86400 ? { month: "short", day: "numeric" } : {};
  return new Date(at * 1000).toLocaleString(undefined, { ...days, hour: "2-digit", minute: "2-digit" });
}

function pointsOf(past) {
  const about = `${past.version} by ${past.reader}`;
  const found = [];
  if (past.stage_seconds > 0) found.push({ at: past.at, value: past.stage_seconds, kind: "stage", about: `${about}: staged in` });
  if (past.load_seconds > 0) found.push({ at: past.at, value: past.pause_seconds, kind: "pause", about: `${about}: paused for` });
  const fresh = past.state === "serving" && past.created > 0 && past.at > past.created;
  if (fresh) found.push({ at: past.at, value: past.at - past.created, kind: "live", about: `${about}: live after` });
  if (past.state !== "serving") found.push({ at: past.at, value: past.pause_seconds, kind: "bad", about: `${about}: ${past.state}, paused for` });
  return found;
}

function mark(point, x, y) {
  const title = svg("title", {}, `${point.about} ${seconds(point.value)}`);
  if (point.kind === "bad") return svg("path", { class: "c-bad", d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8` }, title);
  return svg("circle", { class: `c-${point.kind}`, cx: x, cy: y, r: point.kind === "live" ? 4 : 3.5 }, title);
}

function summary(attempts) {
  const good = attempts.filter((past) => past.state === "serving");
  const bad = attempts.length - good.length;
  const pauses = good.filter((past) => past.load_seconds > 0).map((past) => past.pause_seconds);
  const stages = good.filter((past) => past.stage_seconds > 0).map((past) => past.stage_seconds);
  const middle = (name, values) => values.length ? `${name} ${seconds(median(values))} (worst ${seconds(Math.max(...values))})` : "";
  const parts = [middle("median pause", pauses), middle("median stage", stages), bad ? `${bad} did not end well` : "all ended well"];
  return parts.filter(Boolean).join(" · ");
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function decades(values) {
  const positive = values.filter((value) => value > 0);
  const low = 10 ** Math.floor(Math.log10(Math.max(1e-3, Math.min(...positive, 1))));
  return [low, Math.max(low * 10, 10 ** Math.ceil(Math.log10(Math.max(...positive, 1e-3))))];
}

function scale(from, to, start, end, measure) {
  const span = measure(to) - measure(from) || 1;
  return (value) => start + (end - start) * ((measure(value) - measure(from)) / span);
}

/* The last pauses of one reader, as small bars; a cross where an attempt did not end well. */
function spark(history) {
  const past = history.slice(-16);
  const tallest = Math.max(1e-6, ...past.map((each) => each.pause_seconds));
  const label = past.length ? `last ${plural(past.length, "pause")}, at most ${seconds(tallest)}` : "no load yet";
  return svg("svg", { class: "spark", viewBox: "0 0 96 22", role: "img", "aria-label": label },
    past.map((each, index) => {
      const title = svg("title", {}, `${each.version} ${each.state}, paused ${seconds(each.pause_seconds)}`);
      const tall = Math.max(1.5, 20 * each.pause_seconds / tallest);
      if (each.state !== "serving") return svg("path", { class: "c-bad", d: `M${index * 6} 16l4 4m0-4l-4 4` }, title);
      return svg("rect", { class: "c-pause", x: index * 6, y: 21 - tall, width: 4, height: tall, rx: 1 }, title);
    }));
}

// Who serves what: the worst first, and the rest folded away in a large fleet.

const FEW = 40;
let all = false;

function fleet(page, open) {
  const readers = [...page.status.readers].sort((a, b) => badness(b) - badness(a) || b.lag - a.lag || a.reader.localeCompare(b.reader));
  const alive = readers.filter((reader) => reader.alive);
  const current = alive.filter((reader) => reader.serves && reader.lag === 0).length;
  $("fleet-note").textContent = alive.length ? `${current} of ${alive.length} serve the newest` : "";
  const shown = all ? readers : readers.slice(0, FEW);
  // How long it is behind, and silent, goes on by itself: it is no news.
  const news = shown.map(({ behind, silent, ...rest }) => rest);
  draw($("fleet"), [news, readers.length], () => readers.length ? [
    h("table", { class: "fleet" },
      h("thead", {}, h("tr", {}, ["Reader", "Serves", "Behind", "Since", "Follows", "Stage", "Pause", "Last pauses", "Last attempt"]
        .map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, shown.map((reader) => row(reader, page.status, open)))),
    shown.length < readers.length
      ? h("button", { type: "button", class: "text", onclick: () => { all = true; fleet(page, open); } }, `Show all ${readers.length}`) : null,
  ] : h("p", { class: "empty" }, "No reader has written a receipt yet."));
}

function badness(reader) {
  if (!reader.alive) return 1;
  if (reader.state === "dirty" || !reader.serves) return 4;
  return reader.error ? 3 : reader.lag ? 2 : 0;
}

function row(reader, status, open) {
  const dot = ["", "off", "warn", "warn", "bad"][badness(reader)];
  const state = { serving: "good", refused: "warn", failed: "bad", dirty: "bad" }[reader.state] || "";
  const late = reader.lag ? h("span", { class: "num" }, plural(reader.lag, "version"), ", ", age(status.at - reader.behind))
    : h("span", { class: "muted" }, "0");
  const cells = [
    [h("span", { class: `dot ${dot}`, "aria-hidden": "true" }), h("span", { class: "mono" }, reader.reader),
      h("small", {}, reader.engine, reader.alive ? "" : [" · silent for ", age(status.at - reader.silent)])],
    reader.serves ? link(reader.serves, open) : h("span", { class: "muted" }, "nothing"),
    late,
    reader.since ? age(reader.since) : "",
    h("span", { class: "mono" }, reader.follow),
    h("span", { class: "num" }, seconds(reader.stage_seconds)),
    h("span", { class: "num" }, seconds(reader.pause_seconds)),
    spark(reader.history),
    [h("span", { class: `chip ${state}` }, reader.state || "none"), " ", h("span", { class: "mono" }, reader.version),
      reader.error ? h("small", {}, reader.error) : null],
  ];
  const names = ["", "Serves", "Behind", "Since", "Follows", "Stage", "Pause", "Last pauses", "Last attempt"];
  return h("tr", {}, cells.map((cell, index) => h("td", { "data-label": names[index], class: index === 4 ? "follows" : reader.error && index === 8 ? "error" : "" }, cell)));
}

function link(label, open) {
  return h("button", { type: "button", class: "chip", "data-key": `link ${label}`, onclick: () => open(label) }, label);
}

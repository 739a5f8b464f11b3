// Versions: a lane for each attempt, a column for each number, so that branches lie below what they left behind.

const COLUMNS = 240;

function timeline(page, open) {
  const { status, changes } = page;
  key($("key"), [swatch("var(--full)"), "full"], [swatch("var(--delta)"), "delta"], [swatch("var(--adapter)"), "adapter"],
    [() => h("span", { class: "chip good" }, "●"), " served"], [() => h("span", { class: "chip warn" }, "▲"), " pinned"],
    [swatch("", "ramp"), "changed, 0.01 to 100 %"]);
  const element = $("timeline");
  const atEnd = !element.drawn || element.scrollLeft + element.clientWidth > element.scrollWidth - 40;
  const drawn = draw(element, [status.versions, status.epochs, status.newest, changes], () => lanes(status, changes, open));
  if (drawn && atEnd) element.scrollLeft = element.scrollWidth;
}

function lanes(status, changes, open) {
  if (!status.epochs.length) return h("p", { class: "empty" }, "Nothing was ever published here.");
  const numbers = [...new Set(status.versions.map((version) => number(version.version)))].sort((a, b) => a - b);
  const shown = numbers.slice(-COLUMNS);
  const column = new Map(shown.map((each, index) => [each, index + 2]));
  const tallest = Math.max(1, ...status.versions.map((version) => version.stored));
  const cells = [];
  status.epochs.forEach((epoch, row) => {
    cells.push(laneName(epoch, row + 1), branch(epoch, row + 1, status.epochs, column));
    for (const version of status.versions) {
      const at = column.get(number(version.version));
      if (at === undefined || attempt(version.version) !== epoch.epoch) continue;
      cells.push(bar(version, changes[version.version], tallest, status, at, row + 1, open));
    }
  });
  const every = shown.length > 60 ? 10 : shown.length > 24 ? 5 : 1;
  const ticks = shown.map((each, index) => index % every === 0 || index === shown.length - 1
    ? h("span", { class: "tick", style: { gridColumn: index + 2, gridRow: status.epochs.length + 1 } }, `v${each}`) : null);
  const style = { gridTemplateColumns: `max-content repeat(${shown.length}, minmax(18px, 34px)) 1fr` };
  const corner = h("span", { class: "corner", style: { gridColumn: 1, gridRow: status.epochs.length + 1 } });
  const hidden = numbers.length - shown.length;
  return [
    hidden ? h("p", { class: "muted" }, `The newest ${shown.length} numbers; ${hidden} before are not drawn.`) : null,
    h("div", { class: "lanes", style }, cells, corner, ticks),
  ];
}

function laneName(epoch, row) {
  const where = epoch.host ? epoch.host.split(":")[0] : "its claim cannot be read";
  const began = epoch.created ? `began ${clock(epoch.created)}` : "";
  return h("div", { class: "lane-name", style: { gridColumn: 1, gridRow: row }, title: `run ${epoch.run_id} on ${where} ${began}` },
    h("b", {}, `e${epoch.epoch}`),
    h("span", {}, epoch.resumed_from ? `from ${epoch.resumed_from}` : "from the start"),
    h("span", {}, where));
}

/* From the version that an attempt resumed from down to its own lane, if that version is drawn. */
function branch(epoch, row, epochs, column) {
  const from = epoch.resumed_from;
  const above = epochs.findIndex((each) => from && each.epoch === attempt(from)) + 1;
  const at = from && column.get(number(from));
  if (!at || !above || above >= row) return null;
  return h("span", { class: "branch", "aria-hidden": "true", style: { gridColumn: at, gridRow: `${above} / ${row + 1}` } });
}

function bar(version, change, tallest, status, column, row, open) {
  const kind = version.problem ? "torn" : version.data_of ? "shares" : version.kind;
  const tall = version.problem ? "" : `${Math.max(4, Math.round(70 * Math.sqrt(version.stored / tallest)))}px`;
  const classes = ["v", kind, version.live || version.problem ? "" : "dead", version.version === status.newest ? "newest" : ""];
  return h("button", {
    type: "button", class: classes.join(" "), "data-key": version.version, style: { gridColumn: column, gridRow: row },
    title: describe(version, change, status), "aria-label": describe(version, change, status),
    onclick: () => open(version.version),
  },
  h("span", { class: "bar", style: tall ? { height: tall } : {} }),
  version.problem ? null : paint(h("span", { class: "heat" }), change),
  h("span", { class: "marks", "aria-hidden": "true" },
    version.serving.length ? h("span", { class: "served" }, "●") : null,
    version.pinned !== null ? h("span", { class: "pin" }, "▲") : null));
}

function describe(version, change, status) {
  if (version.problem) return `${version.version}: incomplete. ${version.problem}`;
  const parts = [
    `${version.version}${version.version === status.newest ? ", the newest" : ""}`,
    version.data_of ? `the weights of ${version.data_of}` : version.parent && version.kind === "delta"
      ? `delta on ${version.parent}` : version.kind,
    version.step === null ? "" : `step ${version.step}`,
    `${bytes(version.stored)} on storage, ${bytes(version.nbytes)} in an engine`,
    says(change),
    `published ${clock(version.created)}`,
    version.live ? "" : "left behind by a later attempt",
    version.serving.length ? `served by ${plural(version.serving.length, "reader")}` : "",
    version.pinned === null ? "" : `pinned: ${version.pinned}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

const number = (label) => Number(/v(\d+)$/.exec(label)?.[1] ?? -1);
const attempt = (label) => Number(/^e(\d+)/.exec(label)?.[1] ?? -1);

// Which layers changed: a row for each layer, a column for each of the newest live versions.

const HEAT_COLUMNS = 60;

function heatMap(page, open) {
  const { status, changes } = page;
  const columns = status.versions.filter((version) => version.live && changes[version.version]).slice(-HEAT_COLUMNS)
    .map((version) => [version.version, changes[version.version]]);
  key($("heat-key"), [swatch("var(--heat-0)"), "unchanged"], [swatch("", "ramp"), "0.01 to 100 %"],
    [swatch("", "hatch"), "changed; how much takes a comparison"]);
  const element = $("heat");
  const atEnd = !element.drawn || element.scrollLeft + element.clientWidth > element.scrollWidth - 40;
  const drawn = draw(element, columns, () => columns.length ? layers(columns, open)
    : h("p", { class: "empty" }, "There is no version yet whose one before is known."));
  if (drawn && atEnd) element.scrollLeft = element.scrollWidth;
}

function layers(columns, open) {
  const names = [...new Set(columns.flatMap(([, change]) => change.layers.map(([name]) => name)))];
  const rows = new Map(names.map((name, index) => [name, index + 1]));
  const cells = names.map((name) =>
    h("span", { class: "heat-name", title: name, style: { gridColumn: 1, gridRow: rows.get(name) } }, short(name)));
  cells.push(h("span", { class: "corner", style: { gridColumn: 1, gridRow: names.length + 1, alignSelf: "stretch" } }));
  columns.forEach(([label, change], index) => {
    for (const [name, elements, changed] of change.layers) {
      const layer = { base: change.base, how: change.how, elements, changed };
      const style = { gridColumn: index + 2, gridRow: rows.get(name) };
      cells.push(paint(h("span", { class: "cell", style, title: `${name} in ${label}: ${says(layer)}` }), layer));
    }
    cells.push(h("button", {
      type: "button", class: "heat-v", "data-key": `heat ${label}`, title: `${label}: ${says(change)}`,
      "aria-label": `${label}: ${says(change)}`, style: { gridColumn: index + 2, gridRow: names.length + 1 },
      onclick: () => open(label),
    }, label));
  });
  const style = { gridTemplateColumns: `max-content repeat(${columns.length}, minmax(12px, 30px)) 1fr` };
  return h("div", { class: "layers", style }, cells);
}

const short = (name) => name.replace(/^(model|transformer|module)\./, "") || "(all)";

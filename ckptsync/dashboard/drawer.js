// One version: what is known of it, its files, and commands that are ready to be copied.

/* `ask(path)` gives JSON from the server, or from what a page in a file holds. */
async function drawer(label, page, ask, served) {
  const version = page.status.versions.find((each) => each.version === label);
  if (!version) return;
  const dialog = $("drawer");
  const close = h("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: () => dialog.close() }, "✕");
  const body = h("div", {}, h("p", { class: "muted" }, version.problem || "Reading its manifest …"));
  dialog.replaceChildren(h("div", { class: "sheet" }, h("header", {}, h("h2", { id: "drawer-title" }, label), chips(version, page.status), close), body));
  if (!dialog.open) dialog.showModal();
  if (version.problem) return;
  try {
    const detail = await ask(`version?version=${encodeURIComponent(label)}`);
    body.replaceChildren(...[sheet(version, page, detail, ask, served)].flat(9).filter(Boolean));
    tick(Date.now() / 1000);
  } catch (error) {
    body.replaceChildren(h("p", { class: "problem" }, String(error.message || error)), ...commands(version, page.status.root));
  }
}

function chips(version, status) {
  const latest = version.version === status.newest;
  return h("span", {}, version.problem ? h("span", { class: "chip bad" }, "incomplete")
    : latest ? h("span", { class: "chip good" }, "latest") : version.live ? null : h("span", { class: "chip warn" }, "left behind"), " ",
  version.kind ? h("span", { class: "chip" }, version.kind) : null);
}

function sheet(version, page, detail, ask, served) {
  const change = page.changes[version.version];
  const facts = [
    ["Published", [clock(version.created), " · ", age(version.created, " ago")]],
    ["Step", version.step],
    ["Size", `${bytes(version.nbytes)} in an engine, ${bytes(version.stored)} in its folder`],
    ["Weights of", version.data_of],
    ["Changed", says(change)],
    ["Made from", detail.deltas.map((delta) => `${delta.base} with ${bytes(delta.bytes)}`).join(", ")],
    ["Served by", version.serving.join(", ")],
    ["Pinned", version.pinned],
    ["Trainer state", detail.trainer_state ? bytes(detail.trainer_state) : ""],
    ["Canary", detail.canary ? "yes" : ""],
    ["Run", detail.run_id],
    ["Producer", Object.entries(detail.producer).map(([name, value]) => `${name} ${text(value)}`).join(", ")],
    ["Tracks", detail.tracks.map(track).join("; ")],
    ["Content", h("span", { class: "mono" }, detail.content_digest)],
    ["Folder", h("span", { class: "mono" }, detail.folder)],
  ];
  return [
    ...commands(version, page.status.root),
    h("h3", {}, "Facts"),
    h("dl", { class: "facts" }, facts.filter(([, value]) => value !== "" && value !== null && value !== undefined)
      .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    detail.metadata === "{}" ? null : [h("h3", {}, "Metadata"), h("pre", {}, pretty(detail.metadata))],
    layersOf(version, change, page, ask, served),
    h("h3", {}, "Files"),
    files(detail),
    served ? h("p", {}, h("a", { href: `manifest?version=${encodeURIComponent(version.version)}`, target: "_blank", rel: "noopener" }, "The manifest as it is stored")) : null,
  ];
}

function commands(version, root) {
  const where = quoted(root), label = version.version;
  const engine = "--engine vllm --url http://127.0.0.1:8000";
  return [h("h3", {}, "Commands"), ...[
    ["Load it once", `ckptsync load ${where} ${label} ${engine}`],
    ["Bring an engine to it and stay there", `ckptsync watch ${where} --follow ${label} ${engine}`],
    ["Make its weights the newest again", `ckptsync rollback ${where} ${label} --why "…"`],
    ["Read every byte of it", `ckptsync verify ${where} ${label}`],
  ].map(([what, command]) => {
    const button = h("button", { type: "button", class: "text", "aria-label": `Copy: ${what}` }, "Copy");
    button.addEventListener("click", () => copy(command, button));
    return h("div", { class: "command" }, h("code", {}, command, h("p", {}, what)), button);
  })];
}

/* For a POSIX shell, if anything in it needs that. */
const quoted = (root) => /^[\w@%+=:,./-]+$/.test(root) ? root : `'${root.replaceAll("'", `'\\''`)}'`;

function layersOf(version, change, page, ask, served) {
  const rows = change ? [...change.layers].sort((a, b) => b[2] / (b[1] || 1) - a[2] / (a[1] || 1)).slice(0, 12) : [];
  const found = h("div", { class: "rows" }, rows.map(([name, elements, changed]) => {
    const share = elements ? changed / elements : 0;
    return [h("span", { class: "mono" }, short(name)),
      h("span", { class: "track" }, h("i", { class: change.how === "digests" && changed ? "hatch" : "", style: { width: `${100 * Math.sqrt(share)}%` } })),
      h("span", { class: "num" }, (change.how === "digests" ? "≤ " : "") + percent(share))];
  }));
  const part = h("div", {}, h("h3", {}, change ? `Layers that changed most since ${change.base}` : "Layers"), found);
  if (served) part.append(comparison(version, change, page, ask, part));
  else if (!change) part.append(h("p", { class: "muted" }, "How much they changed is not known."));
  return part;
}

/* Asks the server to compare with any other version; the answer takes `part`'s place. */
function comparison(version, change, page, ask, part) {
  const others = page.status.versions.filter((each) => !each.problem && each.version !== version.version).reverse();
  if (!others.length) return "";
  const choice = h("select", { "aria-label": "Compare with" }, others.map((each) =>
    h("option", { value: each.version, selected: each.version === change?.base }, each.version)));
  const button = h("button", { type: "button", class: "text" }, "Compare exactly");
  const said = h("p", { role: "status", class: "muted" }, "Reads the weights of both.");
  button.addEventListener("click", async () => {
    button.disabled = true;
    said.textContent = "Comparing …";
    try {
      const pair = `version=${encodeURIComponent(version.version)}&base=${encodeURIComponent(choice.value)}`;
      part.replaceWith(layersOf(version, await ask(`compare?${pair}`), page, ask, true));
    } catch (error) {
      said.textContent = String(error.message || error);
      button.disabled = false;
    }
  });
  return h("div", { class: "compare" }, h("span", {}, "against"), choice, button, said);
}

function files(detail) {
  const more = detail.more_files ? h("p", { class: "muted" }, `and ${detail.more_files} more`) : null;
  if (!detail.files.length) return h("p", { class: "muted" }, "None of its own.");
  return [h("table", { class: "files" }, h("tbody", {}, detail.files.map((file) =>
    h("tr", {}, h("td", { class: "mono" }, file.path), h("td", { class: "num" }, bytes(file.size)), h("td", { class: "mono muted" }, file.digest.slice(0, 16)))))), more];
}

function track(each) {
  const dtypes = Object.entries(each.dtypes).map(([dtype, count]) => `${count} ${dtype}`).join(", ");
  return `${each.name}: ${plural(each.tensors, "tensor")} (${dtypes}), ${bytes(each.bytes)}`;
}

const text = (value) => typeof value === "string" ? value : JSON.stringify(value);

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

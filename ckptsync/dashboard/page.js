// The page: asks for a look, draws what changed, and asks again.

const given = JSON.parse($("data").textContent);
const served = given.page === undefined;
let page = given.page;
let ahead = 0; // how far this machine's clock is ahead of the server's, in seconds

async function ask(path) {
  if (!served) {
    const label = new URLSearchParams(path.split("?")[1]).get("version");
    if (given.details[label]) return given.details[label];
    throw new Error(`This file was made without the details of ${label}: serve the dashboard to see them.`);
  }
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.message || answer.statusText);
  return found;
}

async function look() {
  try {
    page = await ask("data");
    ahead = Date.now() / 1000 - page.status.at;
    pulse("live", "live");
    show();
  } catch (error) {
    pulse("away", `no answer: ${error.message}`);
  }
}

async function follow() {
  if (!document.hidden) await look();
  setTimeout(follow, given.every * 1000);
}

function pulse(kind, says) {
  if ($("pulse").textContent !== says) $("pulse").textContent = says;
  $("pulse").className = `pulse ${kind}`;
}

function show() {
  const { status } = page;
  document.title = `${status.newest || "no version"} · ckptsync`;
  $("root").textContent = status.root;
  $("stamp").textContent = `looked at ${clock(status.at)}`;
  draw($("problems"), status.problems, () => status.problems.map((problem) => h("p", { class: "problem" }, problem)));
  tiles(status);
  timeline(page, open);
  fleet(page, open);
  loads(page);
  heatMap(page, open);
  holds(status);
  tick(now());
}

function tiles(status) {
  const newest = status.versions.find((version) => version.version === status.newest);
  const alive = status.readers.filter((reader) => reader.alive);
  const current = alive.filter((reader) => reader.serves && reader.lag === 0).length;
  const late = alive.filter((reader) => reader.lag).sort((a, b) => b.behind - a.behind)[0];
  const broken = alive.filter((reader) => badness(reader) >= 3).length;
  const pauses = alive.flatMap((reader) => reader.history.slice(-1)).filter((past) => past.load_seconds > 0).map((past) => past.pause_seconds);
  const worst = late && { ...late, behind: 0 };
  draw($("tiles"), [newest, alive.length, current, worst, broken, pauses, status.disk, status.versions.length], () => [
    tile("Newest version", status.newest || "none", newest ? [newest.step === null ? "" : `step ${newest.step} · `, age(newest.created, " old")] : ""),
    tile("On the newest", alive.length ? `${current} / ${alive.length}` : "–", alive.length ? "live readers" : "no live reader", alive.length ? current === alive.length ? "good" : "warn" : ""),
    tile("Furthest behind", late ? plural(late.lag, "version") : "0", late ? [age(status.at - late.behind), ` · ${late.reader}`] : "all is up to date", late ? "warn" : ""),
    tile("Not well", broken, broken ? "readers with a failed load, or none" : "every load went well", broken ? "bad" : "good"),
    tile("Last pauses", pauses.length ? seconds(median(pauses)) : "–", pauses.length ? `median; worst ${seconds(Math.max(...pauses))}` : "nothing loaded yet"),
    tile("On storage", bytes(status.disk), plural(status.versions.length, "version")),
  ]);
}

function tile(name, value, note, mood = "") {
  return h("dl", { class: `tile ${mood}` }, h("dt", {}, name), h("dd", { class: "big" }, String(value)), h("dd", { class: "small" }, note));
}

function holds(status) {
  const size = (folders) => bytes(Object.values(folders).reduce((sum, each) => sum + each, 0));
  const debris = Object.keys(status.debris).length, waiting = Object.keys(status.waiting).length;
  const lines = [
    ...status.leases.map((lease) => `e${lease.epoch}-v${lease.number} is being read by ${lease.reader}`),
    ...status.versions.filter((version) => version.pinned !== null).map((version) => `${version.version} is pinned: ${version.pinned || "(its pin cannot be read)"}`),
    ...status.versions.filter((version) => version.problem).map((version) => `${version.version}: ${version.problem}`),
    debris ? `${plural(debris, "unfinished attempt")}, ${size(status.debris)}: running, or died` : "",
    waiting ? `${plural(waiting, "collected version")}, ${size(status.waiting)}, wait for their grace time` : "",
  ].filter(Boolean);
  draw($("holds"), lines, () => lines.length ? h("ul", {}, lines.map((line) => h("li", {}, line)))
    : h("p", { class: "empty" }, "No leases, no pins, nothing left over."));
}

function now() {
  return served ? Date.now() / 1000 - ahead : page.status.at;
}

function open(label) {
  history.replaceState(null, "", `#${label}`);
  drawer(label, page, ask, served);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("ckptsync-theme", name); } catch { /* a page from a file may not have one */ }
}

function chosen() {
  try { return localStorage.getItem("ckptsync-theme"); } catch { return null; }
}

theme(chosen() || (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark"));
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("drawer").addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
$("drawer").addEventListener("click", (event) => { if (event.target === $("drawer")) $("drawer").close(); });
addEventListener("resize", () => page && loads(page));
document.addEventListener("visibilitychange", () => { if (served && !document.hidden) look(); });
setInterval(() => page && tick(now()), 1000);

(async () => {
  if (served) await look();
  else { pulse("", `as of ${clock(page.status.at)}`); show(); }
  const label = decodeURIComponent(location.hash.slice(1));
  if (page && page.status.versions.some((version) => version.version === label)) open(label);
  if (served) setTimeout(follow, given.every * 1000);
})();

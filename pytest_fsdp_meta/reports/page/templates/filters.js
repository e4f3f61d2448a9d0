// Filters act on the matrix and on the sections of loaders. Closed sections of large pages are packed until they are opened.
const sections = all(".loader").sort((a, b) => a.dataset.loader - b.dataset.loader);
const BOX_WIDTH = 56; // px, as in layouts.py
const unpacking = new Map();
function unpack(section) {
  const packed = one("script.packed", section);
  if (!packed) return Promise.resolve();
  if (!unpacking.has(section)) unpacking.set(section, inflate(packed.textContent).then((html) => insert(section, html)));
  return unpacking.get(section);
}
async function inflate(text) {
  if (!window.DecompressionStream) return '<p class="warn">This browser cannot unpack this section; see report.json.</p>';
  const compressed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
}
function insert(section, html) {
  const packed = one("script.packed", section), holder = document.createElement("template");
  if (!packed) return;
  holder.innerHTML = html;
  packed.replaceWith(holder.content);
  filterSection(section, state());
}
function numbers(text) {
  const found = [];
  for (const run of text.split(", ")) {
    if (run === "") continue;
    const [first, last] = run.split("-").map(Number);
    for (let number = first; number <= (last ?? first); number += 1) found.push(number);
  }
  return found;
}
function matchTensors(text) {
  if (!text) return null;
  const low = text.toLowerCase();
  // As in the patterns of Subject, a star matches dots; without a star, part of a name is enough.
  const pattern = /[*?]/.test(low) && new RegExp(`^${low.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".")}$`, "s");
  return new Set(data.names.flatMap((name, index) => (pattern ? pattern.test(name.toLowerCase()) : name.toLowerCase().includes(low)) ? [index] : []));
}
const fitsStatus = (now, check, kind) => (!now.check || check === now.check) && (!now.tab || data.tabs[now.tab].includes(kind));
const has = (names, text) => numbers(text).some((number) => names.has(number));
function isHere(index, now, names) {
  const loader = data.loaders[index], given = now.check || now.tab;
  return (!now.loader || now.loader === String(index + 1)) && (!names || has(names, loader.names)) &&
    (now.rank === "" || Number(now.rank) < loader.size) &&
    (!given || data.checks.some((check, column) => { const kind = kindAt(loader, column); return kind && fitsStatus(now, check, kind); }));
}
// Hide what the filters exclude within a section; return how many findings and layouts it has, and how many are left.
function filterSection(section, now, names = matchTensors(now.tensor)) {
  const fits = (node) =>
    (now.rank === "" || node.dataset.ranks === undefined || node.dataset.ranks.split(" ").includes(now.rank)) &&
    (!names || node.dataset.names === undefined || has(names, node.dataset.names));
  const narrowed = names || now.rank !== "";
  const tally = { findings: [0, 0], layouts: [0, 0] };
  all("[data-ranks], [data-names]", section).forEach((node) => node.toggleAttribute("hidden", !fits(node)));
  all("[data-check]", section).forEach((node) => {
    let shown = fitsStatus(now, node.dataset.check, node.dataset.kind);
    if (node.matches(".result")) {
      const lines = all(".lines > li", node), left = lines.filter((line) => !line.hidden);
      if (narrowed) {
        shown &&= left.length > 0;
        all(".full", node).forEach((details) => { details.open = true; });
      }
      tally.findings[0] += shown ? left.length : 0;
      tally.findings[1] += lines.length;
      all(".cause", node).forEach((cause) => { cause.hidden = !one(".lines > li:not([hidden])", cause); });
    }
    node.hidden = !shown;
  });
  all(".bundle", section).forEach((node) => { node.hidden = narrowed || !one("li:not([hidden])", node); });
  if (now.tab && now.tab !== "failed") all(".checks", section).forEach((details) => { details.open = true; });
  const drawings = all(".drawing", section);
  tally.layouts = [drawings.filter((node) => !node.hidden).length, drawings.length];
  return tally;
}
const NOUNS = { loaders: ["loader", "loaders"], findings: ["group of findings", "groups of findings"], layouts: ["layout", "layouts"] };
function filter() {
  if (!form) return;
  const now = state(), names = matchTensors(now.tensor);
  const here = data.loaders.map((_, index) => isHere(index, now, names));
  const tally = { loaders: [0, sections.length], findings: [0, 0], layouts: [0, 0] };
  sections.forEach((section, index) => {
    const own = filterSection(section, now, names);
    section.hidden = !here[index];
    tally.loaders[0] += here[index];
    for (const key of ["findings", "layouts"]) {
      tally[key][0] += here[index] ? own[key][0] : 0;
      tally[key][1] += own[key][1];
    }
  });
  // A failing cell whose findings the filters exclude is dimmed as well.
  const narrowed = names || now.rank !== "";
  showList(now);
  all("[data-tab]").forEach((node) => { node.hidden = Boolean(now.tab) && node.dataset.tab !== now.tab; });
  all("#unchecked").forEach((node) => { node.hidden = !one("[data-tab]:not([hidden])", node); });
  const excluded = new Set(narrowed ? all(".result[data-check][hidden]").map((node) => node.id) : []);
  showRows(now, here, (check, kind) => fitsStatus(now, check, kind));
  if (narrowed) rows.forEach((row) => all(".cell", row).forEach((cell) => excluded.has(cell.hash.slice(1)) && cell.classList.add("dim")));
  markRank(now.rank);
  const share = ([some, total], noun) => (some === total ? "" : `${some} of `) + `${total} ${total === 1 ? NOUNS[noun][0] : NOUNS[noun][1]}`;
  const kinds = Object.keys(tally).filter((key) => key !== "layouts" || !root.matches(".packed"));
  one("#shown").textContent = `Shown: ${kinds.map((key) => share(tally[key], key)).join(", ")}`;
}
function markRank(rank) {
  all(".mesh .ring").forEach((node) => node.remove());
  if (rank === "") return;
  all(".mesh").forEach((mesh) => {
    const label = all("text", mesh).find((node) => node.textContent === rank);
    if (!label) return;
    const node = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const at = { class: "ring", x: label.getAttribute("x") - 2, y: Number(label.getAttribute("y")), width: BOX_WIDTH + 4, height: Number(mesh.dataset.box) + 4, rx: 2 };
    for (const [name, value] of Object.entries(at)) node.setAttribute(name, value);
    mesh.append(node);
  });
}

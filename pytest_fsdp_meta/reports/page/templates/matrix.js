// The matrix: rows without failures are built when they are first shown. Like a list, it is one Tab stop with arrow keys.
const rows = all("table.matrix tr[data-row]");
const FEW_COLUMNS = 6; // these may be as wide as the name of their family
const fold = one("#matrix .fold");
const families = matrix ? [...matrix.tHead.rows[0].cells].slice(1).map((head) => [head, head.colSpan]) : [];
const heads = matrix ? [...matrix.tHead.rows[1].cells].slice(1) : [];
const kindAt = (loader, column) => data.kinds[parseInt(loader.kinds[column], 36)];
const isCrashed = (row) => row.cells.length === 2 && row.cells[1].matches(".whole");
// The columns in which a loader that did not crash has a failure.
const failing = data.checks.map((_, column) => rows.some((row) => !row.matches(".clean") && !isCrashed(row) && data.bad.includes(kindAt(data.loaders[row.dataset.row], column))));
function buildRow(row) {
  if (row.cells.length > 1) return;
  const index = Number(row.dataset.row), cells = document.createDocumentFragment();
  data.checks.forEach((check, column) => {
    const cell = document.createElement("td"), kind = kindAt(data.loaders[index], column);
    if (kind) {
      const place = data.kinds.indexOf(kind), link = document.createElement("a");
      link.className = `cell s-${kind.replaceAll(" ", "-")}`;
      link.href = `#loader-${index + 1}${/^[A-Za-z][\w-]*$/.test(check) ? `-${check}` : ""}`;
      const [mark, note] = data.loaders[index].marked[check] ?? ["", ""];
      if (mark) link.classList.add(mark);
      link.title = `${check}: ${data.labels[place]}${note}`;
      link.setAttribute("aria-label", link.title);
      link.textContent = data.glyphs[place];
      Object.assign(link.dataset, { c: check, s: kind });
      link.tabIndex = -1;
      cell.append(link);
    }
    cells.append(cell);
  });
  row.append(cells);
}
function showRows(now, here, isShown) {
  if (!matrix) return;
  let folded = 0;
  const only = now.only && (!now.tab || now.tab === "failed"); // what else a tab has is in rows and columns without failures
  const isChosen = (index) => now.loader === String(index + 1);
  rows.forEach((row) => {
    const index = Number(row.dataset.row), away = only && row.matches(".clean") && !isChosen(index);
    row.hidden = away || !here[index];
    folded += away && here[index];
    if (!row.hidden) buildRow(row);
    all(".cell", row).forEach((cell) => cell.classList.toggle("dim", !isShown(cell.dataset.c, cell.dataset.s)));
  });
  if (form.elements.only) form.elements.only.parentElement.hidden = only !== now.only;
  showColumns(data.checks.map((check, column) => !only || failing[column] || check === now.check));
  heads.forEach((head) => head.classList.toggle("on", head.dataset.column === now.check));
  if (!fold) return;
  fold.hidden = !folded;
  const hidden = heads.filter((head) => head.hidden).length;
  one("button", fold).textContent = `${folded} ${folded === 1 ? "loader" : "loaders"} without failures`;
  fold.cells[1].textContent = hidden ? `and ${hidden} ${hidden === 1 ? "check" : "checks"} without failures` : "";
}
function showList(now) {
  all(".list ul li").forEach((line) => {
    const marks = all("[data-s]", line), other = marks.filter((mark) => !fitsStatus(now, now.check, mark.dataset.s));
    marks.forEach((mark) => mark.classList.toggle("dim", other.includes(mark)));
    line.hidden = Boolean(now.tab) && marks.length === other.length;
  });
  all(".members").forEach((members) => { members.hidden = !one("li:not([hidden])", members); });
}
function showColumns(visible) {
  const shown = Math.max(1, visible.filter(Boolean).length);
  matrix.classList.toggle("few", shown <= FEW_COLUMNS);
  matrix.tHead.hidden = !visible.some(Boolean);
  let column = 0;
  const first = visible.map(() => false);
  families.forEach(([head, size]) => {
    const own = visible.slice(column, column + size), count = own.filter(Boolean).length;
    head.hidden = !count;
    head.colSpan = count || 1;
    if (count) first[column + own.indexOf(true)] = true;
    column += size;
  });
  [matrix.tHead.rows[1], ...rows, ...(fold ? [fold] : [])].forEach((row) => {
    const cells = [...row.cells].slice(1);
    if (cells.length === 1 && cells[0].matches(".whole")) { cells[0].colSpan = shown; return; }
    cells.forEach((cell, index) => { cell.hidden = !visible[index]; cell.classList.toggle("first", first[index]); });
  });
}
if (matrix) {
  const box = matrix.parentElement;
  const sizes = new ResizeObserver(() => { one("#outside").hidden = box.scrollWidth <= box.clientWidth; });
  [box, matrix].forEach((node) => sizes.observe(node));
}
if (grid && one("a, button", grid)) {
  const links = (row) => all("a, button", row).filter((link) => !link.closest("[hidden]"));
  const stop = (cell) => { all("a, button", grid).forEach((link) => { link.tabIndex = -1; }); cell.tabIndex = 0; };
  matrix?.setAttribute("role", "grid");
  stop(one(":is(.s-failed, .s-error, .s-crashed)", grid)?.closest("a") ?? one("a", grid));
  grid.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -1e6], End: [0, 1e6] };
    const move = moves[event.key], lines = all("tr, li", grid).filter((row) => !row.hidden).map(links).filter((row) => row.length);
    const row = lines.findIndex((those) => those.includes(event.target));
    if (!move || row < 0) return;
    event.preventDefault();
    const within = (index, length) => Math.min(Math.max(index, 0), length - 1);
    const those = lines[within(row + move[0], lines.length)];
    const next = those[within(lines[row].indexOf(event.target) + move[1], those.length)];
    stop(next);
    next.focus();
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  grid.addEventListener("focusin", (event) => event.target.matches("a, button") && stop(event.target));
}

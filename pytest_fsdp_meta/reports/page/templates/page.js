"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const one = (selector, within = document) => within.querySelector(selector);
  const data = JSON.parse(one("#data").textContent);
  const form = one("#filters");

  // ---- theme: the system's, until the button is used
  const button = one("#theme"), root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  function applyTheme() {
    button.textContent = isDark() ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to the light theme" : "Switch to the dark theme");
    drawn.forEach((chart) => chart.redraw(false, true));
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("fsdp-theme", root.dataset.theme); } catch { /* the choice then lasts for this visit only */ }
    applyTheme();
  });
  dark.addEventListener("change", applyTheme);

  // ---- charts; on a page with many, each is drawn when it first comes into view
  const drawn = new Map();
  // Canvas does not resolve light-dark(): a probe element gives the current value of a variable.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  function colour(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }
  const HUES = [212, 28, 150, 275, 340, 185, 60, 240];
  const rankColour = (rank) => `hsl(${HUES[rank % HUES.length]} ${isDark() ? "65% 68%" : "60% 42%"})`;
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
  function bytes(value) {
    if (value == null) return "–";
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
    return `${+value.toPrecision(4)} ${UNITS[unit]}`;
  }
  const axis = (label, more) => ({
    label, labelSize: 18, labelFont: "12px system-ui, sans-serif", font: "11px system-ui, sans-serif",
    stroke: () => colour("quiet"), grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1 }, ...more,
  });
  const LINES = {
    losses({ losses }) {
      const xs = losses.mean.map((_, step) => step + 1);
      const number = (_, value) => (value == null ? "–" : value.toPrecision(6));
      const series = [{ label: "step" }], points = [xs];
      if (losses.ranks.length > 1) losses.ranks.forEach((curve, slice) => {
        series.push({ label: `slice ${slice}`, stroke: () => colour("whole"), width: 1, alpha: Math.min(1, 8 / losses.ranks.length), points: { show: false }, value: number });
        points.push(curve);
      });
      if (losses.reference.length) {
        series.push({ label: "reference", stroke: () => colour("good"), width: 3, dash: [7, 5], points: { size: 8 }, value: number });
        points.push(xs.map((_, step) => losses.reference[step] ?? null));
      }
      series.push({ label: "mean of ranks", stroke: () => colour("bad-fill"), width: 2, points: { size: 6 }, value: number });
      points.push(losses.mean);
      return {
        points, series,
        axes: [axis("step", { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], size: 34 }), axis("loss", { size: 58 })],
        x: { time: false, range: (_, low, high) => [low - 0.15, high + 0.15] },
      };
    },
    memory({ memory }) {
      const xs = [...new Set([0, ...memory.flat().map(([seconds]) => seconds)])].sort((a, b) => a - b);
      const series = [{ label: "seconds", value: (_, value) => (value == null ? "–" : `${value} s`) }], points = [xs];
      memory.forEach((line, rank) => {
        const at = new Map(line);
        let held = 0;
        points.push(xs.map((x) => (held = at.get(x) ?? held)));
        series.push({
          label: `rank ${rank}`, stroke: () => rankColour(rank), width: 1.5, points: { show: false },
          dash: rank < HUES.length ? undefined : [4, 3], paths: uPlot.paths.stepped({ align: 1 }), value: (_, value) => bytes(value),
        });
      });
      return {
        points, series,
        axes: [axis("seconds since loading began", { size: 34 }), axis("live bytes on the host", { size: 76, incrs: Array.from({ length: 50 }, (_, power) => 2 ** power), values: (_, ticks) => ticks.map(bytes) })],
        x: { time: false },
        y: { range: (_, low, high) => [0, high * 1.05 || 1] },
      };
    },
  };
  function draw(place) {
    if (drawn.has(place) || !place.clientWidth) return;
    const loader = data.loaders[place.closest("[data-loader]").dataset.loader];
    if (!loader[place.dataset.chart]) return place.remove();
    const { points, series, axes, x, y } = LINES[place.dataset.chart](loader);
    const few = series.length <= 10;
    const chart = new uPlot({
      width: place.clientWidth, height: 220, series, axes, scales: { x, y: y ?? {} },
      legend: { show: few }, cursor: { drag: { x: false, y: false } },
    }, points, place);
    drawn.set(place, chart);
    sizes.observe(place);
    // The legend follows the pointer only; assistive technology has the table below the chart.
    all(".u-legend", place).forEach((legend) => legend.setAttribute("role", "presentation"));
    showRank(place, chart);
  }
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const chart = drawn.get(target);
    if (chart && target.clientWidth && chart.width !== target.clientWidth) chart.setSize({ width: target.clientWidth, height: 220 });
  }));
  const seen = new IntersectionObserver((entries) => entries.forEach(({ isIntersecting, target }) => isIntersecting && draw(target)), { rootMargin: "300px" });
  function showRank(place, chart) {
    if (place.dataset.chart !== "memory") return;
    const rank = state().rank;
    chart.series.forEach((_, index) => index && chart.setSeries(index, { show: rank === "" || index === Number(rank) + 1 }));
  }

  // ---- filters; the fragment of the address has their state, so that a link restores it
  const sections = all(".loader");
  const BOX_WIDTH = 56; // px, as in layouts.py
  const EMPTY = { tensor: "", check: "", rank: "", loader: "", status: [] };
  function state() {
    if (!form) return EMPTY;
    const given = new FormData(form);
    return { ...EMPTY, ...Object.fromEntries(["tensor", "check", "rank", "loader"].map((key) => [key, (given.get(key) ?? "").trim()])), status: given.getAll("status") };
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
  function matchTensors(text, names) {
    if (!text) return null;
    const low = text.toLowerCase();
    // As in the patterns of Subject, a star matches dots; without a star, part of a name is enough.
    const pattern = /[*?]/.test(low) && new RegExp(`^${low.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".")}$`, "s");
    return new Set(names.flatMap((name, index) => (pattern ? pattern.test(name.toLowerCase()) : name.toLowerCase().includes(low)) ? [index] : []));
  }
  function filter() {
    const now = state();
    const tally = { findings: [0, 0], tensors: [0, 0], loaders: [0, sections.length] };
    const byStatus = (kind) => !now.status.length || now.status.includes(kind);
    sections.forEach((section, index) => {
      const loader = data.loaders[index], names = matchTensors(now.tensor, loader.names);
      const fits = (node) =>
        (now.rank === "" || node.dataset.ranks === undefined || node.dataset.ranks.split(" ").includes(now.rank)) &&
        (!names || node.dataset.names === undefined || numbers(node.dataset.names).some((number) => names.has(number)));
      all("[data-ranks], [data-names]", section).forEach((node) => { node.hidden = !fits(node); });
      let alive = false, findings = 0;
      all("[data-check]", section).forEach((node) => {
        let shown = (!now.check || node.dataset.check === now.check) && byStatus(node.dataset.kind);
        if (node.matches(".result")) {
          const lines = all(".lines > li", node), left = lines.filter((line) => !line.hidden);
          if (names || now.rank !== "") shown &&= left.length > 0;
          findings += shown ? left.length : 0;
          tally.findings[1] += lines.length;
          all(".cause", node).forEach((cause) => { cause.hidden = !one(".lines > li:not([hidden])", cause); });
        }
        node.hidden = !shown;
        alive ||= shown;
      });
      all(".bundle", section).forEach((node) => { node.hidden = !!names || now.rank !== "" || !one("li:not([hidden])", node); });
      const drawings = all(".drawing", section), left = drawings.filter((node) => !node.hidden);
      const here = (!now.loader || now.loader === String(index + 1)) && alive &&
        (!names || names.size > 0) && (now.rank === "" || Number(now.rank) < loader.size);
      section.hidden = !here;
      tally.tensors[1] += drawings.length;
      if (here) { tally.findings[0] += findings; tally.tensors[0] += left.length; tally.loaders[0] += 1; }
    });
    all("#matrix tbody tr").forEach((row) => {
      row.hidden = now.loader !== "" && now.loader !== String(Number(row.dataset.row) + 1);
      all(".cell", row).forEach((cell) => cell.classList.toggle("dim", !((!now.check || cell.dataset.c === now.check) && byStatus(cell.dataset.s))));
    });
    all("#matrix [data-column]").forEach((head) => head.classList.toggle("on", head.dataset.column === now.check));
    drawn.forEach((chart, place) => showRank(place, chart));
    markRank(now.rank);
    const share = ([some, total], what) => (some === total ? `${total} ${what}` : `${some} of ${total} ${what}`);
    one("#shown").textContent = `Shown: ${share(tally.loaders, tally.loaders[1] === 1 ? "loader" : "loaders")}, ${share(tally.findings, tally.findings[1] === 1 ? "finding" : "findings")}, ${share(tally.tensors, tally.tensors[1] === 1 ? "layout" : "layouts")}`;
  }
  function fragment(at) {
    const now = state(), parts = new URLSearchParams();
    for (const key of ["tensor", "check", "rank", "loader"]) if (now[key]) parts.set(key, now[key]);
    if (now.status.length) parts.set("status", now.status.join(","));
    if (!parts.size) return at ? `#${at}` : "";
    if (at) parts.set("at", at);
    return `#${parts}`;
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
  const storeState = (at) => history.replaceState(null, "", fragment(at) || location.pathname + location.search);
  function restoreFilters(parts) {
    form.reset();
    for (const key of ["tensor", "check", "rank", "loader"]) {
      const field = form.elements[key];
      if (!field) continue;
      field.value = parts.get(key) ?? "";
      if (field.selectedIndex === -1) field.selectedIndex = 0; // the value belongs to another report
    }
    const chosen = (parts.get("status") ?? "").split(",");
    all("[name=status]", form).forEach((box) => { box.checked = chosen.includes(box.value); });
  }
  function goTo(id) {
    const target = id && document.getElementById(id);
    if (!target) return;
    if (target.closest("[hidden]")) { form.reset(); filter(); }
    for (let parent = target.parentElement; parent; parent = parent.parentElement) if (parent.matches("details")) parent.open = true;
    all(".at").forEach((node) => node.classList.remove("at"));
    target.classList.add("at");
    target.scrollIntoView({ block: "start" });
    target.focus({ preventScroll: true });
  }
  function restoreState() {
    const text = location.hash.slice(1);
    if (!text.includes("=")) return goTo(text);
    const parts = new URLSearchParams(text);
    restoreFilters(parts);
    filter();
    goTo(parts.get("at"));
  }
  if (form) {
    // The target of a link must not be hidden by the filters, which stick to the top of wide screens.
    const clear = () => {
      const stays = getComputedStyle(form).position === "sticky";
      root.style.scrollPaddingTop = `${(stays ? form.offsetHeight : 0) + 14}px`;
    };
    clear();
    new ResizeObserver(clear).observe(form);
    form.addEventListener("submit", (event) => event.preventDefault());
    let waiting;
    form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => { filter(); storeState(); }, 120); });
    form.addEventListener("reset", () => setTimeout(() => { filter(); storeState(); }));
    document.addEventListener("click", (event) => {
      const link = event.target.closest('a[href^="#"]');
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey || link.matches(".skip")) return;
      const id = decodeURIComponent(link.hash.slice(1));
      event.preventDefault();
      goTo(id);
      history.pushState(null, "", fragment(id));
      if (link.matches("[data-copy]")) copyLink(link);
    });
    addEventListener("popstate", restoreState);
    addEventListener("hashchange", restoreState);
  }
  async function copyLink(link) {
    try { await navigator.clipboard.writeText(location.href); link.textContent = "link copied"; }
    catch { link.textContent = "link is in the address bar"; }
    one("#shown").textContent = `The ${link.textContent}`;
  }

  // ---- the matrix is one Tab stop; arrow keys move between its cells
  const matrix = one("#matrix");
  if (matrix) {
    const rows = () => all("tbody tr", matrix).filter((row) => !row.hidden).map((row) => all("a", row));
    const stop = (cell) => { all("a", matrix).forEach((link) => { link.tabIndex = -1; }); cell.tabIndex = 0; };
    matrix.setAttribute("role", "grid");
    stop(one("td .s-failed, td .s-error", matrix) ?? one("a", matrix));
    matrix.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -1e6], End: [0, 1e6] };
      const move = moves[event.key], grid = rows();
      const row = grid.findIndex((links) => links.includes(event.target));
      if (!move || row < 0) return;
      event.preventDefault();
      const within = (index, length) => Math.min(Math.max(index, 0), length - 1);
      const links = grid[within(row + move[0], grid.length)];
      const next = links[within(grid[row].indexOf(event.target) + move[1], links.length)];
      stop(next);
      next.focus();
      next.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
    matrix.addEventListener("focusin", (event) => event.target.matches("a") && stop(event.target));
  }

  // ---- tables below charts are open without JavaScript, which closes them
  all(".numbers").forEach((details) => { details.open = false; });
  applyTheme();
  const plots = all(".plot");
  plots.forEach((place) => (plots.length <= 12 ? draw(place) : seen.observe(place)));
  if (form) { filter(); restoreState(); }
})();

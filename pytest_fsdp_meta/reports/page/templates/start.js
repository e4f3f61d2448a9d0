// Start: wire everything up, restore the state of the address, and prepare for printing.
if (form) {
  // The target of a link must not be hidden by the filters, which stick to the top of wide screens.
  const clear = () => {
    const height = getComputedStyle(form).position === "sticky" ? form.offsetHeight : 0;
    root.style.scrollPaddingTop = `${height + 14}px`;
    root.style.setProperty("--stuck", `${height}px`);
  };
  clear();
  new ResizeObserver(clear).observe(form);
  form.addEventListener("submit", (event) => event.preventDefault());
  let waiting;
  // Tabs are in the form's elements, but not inside of it.
  document.addEventListener("input", ({ target }) => {
    if (target.form !== form) return;
    clearTimeout(waiting);
    waiting = setTimeout(() => { filter(); storeState(); }, 120);
  });
  form.addEventListener("reset", () => setTimeout(() => { filter(); storeState(); }));
  one("#unfold")?.addEventListener("click", () => { form.elements.only.checked = false; filter(); storeState(); });
}
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
document.addEventListener("click", (event) => event.target.matches(".copy") && copyCommand(event.target));
document.addEventListener("toggle", ({ target }) => target.open && target.matches(".whole") && unpack(target.parentElement), true);
button.addEventListener("click", switchTheme);
dark.addEventListener("change", applyTheme);
applyTheme();
filter();
restoreState();

// Paper shows what the screen shows, and all of the loaders that failed. It cannot wait for a section to be inflated,
// so theirs are inflated ahead.
const inflated = new Map();
const PAPER = 640; // px, the width between the margins of A4
let before = null;
const idle = () => new Promise((done) => (window.requestIdleCallback ?? setTimeout)(done));
async function inflateFailing() {
  for (const section of sections.filter((section) => section.matches("[data-failing]"))) {
    await idle();
    const packed = one("script.packed", section);
    if (packed) inflated.set(section, await inflate(packed.textContent));
  }
  root.dataset.ready = "";
}
inflateFailing();
addEventListener("beforeprint", () => {
  if (before) return;
  before = { theme: root.dataset.theme, opened: [] };
  root.dataset.theme = "light";
  inflated.forEach((html, section) => insert(section, html));
  inflated.clear();
  const failing = ".loader[data-failing]:not([hidden])";
  const wanted = all(`${failing} > .whole, ${failing} .panel:not(.checks, .time), ${failing} .full, #broke > details, #changes > details`);
  before.opened = wanted.filter((details) => !details.open);
  before.opened.forEach((details) => { details.open = true; });
  root.classList.add("paper");
  all(".scroller > table").forEach(fitPaper);
});
function fitPaper(table) {
  table.style.width = "min-content";
  table.style.zoom = Math.min(1, PAPER / table.offsetWidth) || 1;
  table.style.width = "";
}
addEventListener("afterprint", () => {
  if (!before) return;
  if (before.theme) root.dataset.theme = before.theme; else delete root.dataset.theme;
  before.opened.forEach((details) => { details.open = false; });
  all(".scroller > table").forEach((table) => { table.style.zoom = ""; });
  root.classList.remove("paper");
  before = null;
});

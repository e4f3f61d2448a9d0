// Links lead to targets that may be folded, filtered out or packed; buttons copy commands.
function reveal(target) {
  if (form && target.closest("[hidden]")) { form.reset(); filter(); }
  if (form?.elements.only && target.closest("[hidden]")) { form.elements.only.checked = false; filter(); }
  for (let parent = target.parentElement; parent; parent = parent.parentElement) if (parent.matches("details")) parent.open = true;
  all(":scope > .full", target).forEach((details) => { details.open = true; });
  if (target.matches(".loader")) one(".whole", target).open = true;
  all(".at").forEach((node) => node.classList.remove("at"));
  target.classList.add("at");
  target.scrollIntoView({ block: target.closest("#matrix") ? "center" : "start", inline: "nearest" });
  target.focus({ preventScroll: true });
}
function goTo(id) {
  const target = id && document.getElementById(id);
  if (target) return reveal(target);
  const section = id && document.getElementById(/^loader-\d+/.exec(id)?.[0]);
  if (section) unpack(section).then(() => reveal(document.getElementById(id) ?? section));
}
function restoreState() {
  const text = location.hash.slice(1);
  if (!text.includes("=")) return goTo(text);
  const parts = new URLSearchParams(text);
  restoreFilters(parts);
  filter();
  goTo(parts.get("at"));
}
// Show on what was pressed, and announce to screen readers, what became of a copy.
function showCopied(pressed, text, announcement) {
  const before = pressed.dataset.text ??= pressed.textContent;
  pressed.textContent = text;
  one("#said").textContent = announcement;
  setTimeout(() => { pressed.textContent = before; one("#said").textContent = ""; }, 2000);
}
async function copyLink(link) {
  try { await navigator.clipboard.writeText(location.href); showCopied(link, "link copied", "The link is copied."); }
  catch { showCopied(link, "link is in the address bar", "The link is in the address bar."); }
}
async function copyCommand(pressed) {
  const command = pressed.previousElementSibling;
  try { await navigator.clipboard.writeText(command.textContent); showCopied(pressed, "copied", "The command is copied."); }
  catch { getSelection().selectAllChildren(command); showCopied(pressed, "selected", "The command is selected."); }
}

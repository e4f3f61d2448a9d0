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
async function copyLink(link) {
  try { await navigator.clipboard.writeText(location.href); link.textContent = "link copied"; }
  catch { link.textContent = "link is in the address bar"; }
  if (form) one("#shown").textContent = `The ${link.textContent}`;
}
async function copyCommand(pressed) {
  const command = pressed.previousElementSibling;
  try { await navigator.clipboard.writeText(command.textContent); pressed.textContent = "copied"; }
  catch { getSelection().selectAllChildren(command); pressed.textContent = "selected"; }
  setTimeout(() => { pressed.textContent = "copy"; }, 2000);
}

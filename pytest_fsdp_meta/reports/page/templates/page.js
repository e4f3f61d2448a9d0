// Helpers, the data of the page, and its theme: the system's, until the button is used.
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const one = (selector, within = document) => within.querySelector(selector);
const data = JSON.parse(one("#data").textContent);
// The grid is a table of loaders and checks, the matrix, or for few loaders a list of checks. Filters may be missing.
const form = one("#filters"), grid = one("#matrix"), matrix = one("table.matrix");
const button = one("#theme"), root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
function applyTheme() {
  button.textContent = isDark() ? "☀ Light" : "☾ Dark";
  button.setAttribute("aria-label", isDark() ? "Switch to the light theme" : "Switch to the dark theme");
}
function switchTheme() {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("fsdp-theme", root.dataset.theme); } catch { /* the choice then lasts for this visit only */ }
  applyTheme();
}

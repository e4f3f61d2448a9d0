// The state of the filters, which the fragment of the address has as well, so that a link restores it.
const FIELDS = ["tab", "tensor", "check", "rank", "loader"];
const EMPTY = { tab: "", tensor: "", check: "", rank: "", loader: "", only: false };
function state() {
  if (!form) return EMPTY;
  const given = new FormData(form);
  return {
    ...Object.fromEntries(FIELDS.map((key) => [key, (given.get(key) ?? "").trim()])),
    only: Boolean(form.elements.only?.checked),
  };
}
function fragment(at) {
  const now = state(), parts = new URLSearchParams();
  for (const key of FIELDS) if (now[key]) parts.set(key, now[key]);
  if (form?.elements.only && now.only !== form.elements.only.defaultChecked) parts.set("rows", now.only ? "failures" : "all");
  if (!parts.size) return at ? `#${at}` : "";
  if (at) parts.set("at", at);
  return `#${parts}`;
}
const storeState = () => history.replaceState(null, "", fragment() || location.pathname + location.search);
function restoreFilters(parts) {
  if (!form) return;
  form.reset();
  for (const key of FIELDS) {
    const field = form.elements[key];
    if (!field) continue;
    field.value = parts.get(key) ?? "";
    if (field.selectedIndex === -1) field.selectedIndex = 0; // the value belongs to another report
  }
  if (parts.has("rows") && form.elements.only) form.elements.only.checked = parts.get("rows") === "failures";
}

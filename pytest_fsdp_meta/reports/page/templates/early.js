// Before anything is drawn, so that a page that was switched to dark does not flash.
document.documentElement.classList.add("js");
try {
  const theme = localStorage.getItem("fsdp-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* a browser may keep nothing for files */ }

// Set the stored theme before the first paint, so that the page does not flash.
document.documentElement.classList.add("js");
try {
  const theme = localStorage.getItem("fsdp-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* browsers may refuse storage for file: pages */ }

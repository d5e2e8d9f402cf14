"use strict";
(() => {
  // Runs before the first paint, so that the page is not drawn twice.
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const language = localStorage.getItem("report-language");
    const theme = localStorage.getItem("report-theme");
    if (language === "en" || language === "zh") root.dataset.language = language;
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch { /* a page opened from a file may have no storage */ }
})();

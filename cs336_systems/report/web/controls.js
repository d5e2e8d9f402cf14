"use strict";
(() => {
  // The selects of the language and the theme. After each choice the document gets the event "chosen".
  const root = document.documentElement;
  const [language, theme] = ["language", "theme"].map((id) => document.getElementById(id));
  function choose(key, value) {
    // Without storage the choice holds until the page is closed.
    try { localStorage.setItem(key, value); } catch { /* no storage */ }
    document.dispatchEvent(new Event("chosen"));
  }

  // CSS shows and hides elements; titles, labels and options are replaced here.
  function setLanguage(chosen) {
    root.dataset.language = language.value = chosen;
    root.lang = chosen === "zh" ? "zh-CN" : "en";
    document.title = document.querySelector("title").dataset[chosen] ?? document.title;
    const name = chosen === "zh" ? "ariaZh" : "ariaEn";
    for (const one of document.querySelectorAll("[data-aria-zh]")) {
      one.dataset.ariaEn ??= one.getAttribute("aria-label"); // charts are named in English at first
      one.setAttribute("aria-label", one.dataset[name]);
    }
    for (const one of document.querySelectorAll("option[data-zh]")) one.textContent = one.dataset[chosen];
  }
  language.addEventListener("change", () => {
    setLanguage(language.value);
    choose("report-language", language.value);
  });
  setLanguage(root.dataset.language);

  // Follows the system until the user chooses a theme.
  theme.value = root.dataset.theme ?? "system";
  theme.addEventListener("change", () => {
    if (theme.value === "system") delete root.dataset.theme;
    else root.dataset.theme = theme.value;
    choose("report-theme", theme.value);
  });
})();

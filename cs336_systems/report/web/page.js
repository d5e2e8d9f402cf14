"use strict";
(() => {
  const root = document.documentElement;
  const element = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  // Without storage the choice holds until the page is closed.
  const keep = (key, value) => { try { localStorage.setItem(key, value); } catch { /* no storage */ } };
  const words = {
    en: { copied: "copied", failed: "could not copy" },
    zh: { copied: "已复制", failed: "无法复制" },
  };

  // Language: CSS shows and hides elements; titles, labels and options are replaced here.
  const language = element("language");
  function setLanguage(chosen) {
    root.dataset.language = language.value = chosen;
    root.lang = chosen === "zh" ? "zh-CN" : "en";
    const title = document.querySelector("title");
    document.title = title.dataset[chosen] ?? document.title;
    const name = chosen === "zh" ? "ariaZh" : "ariaEn";
    for (const one of all("[data-aria-zh]")) one.setAttribute("aria-label", one.dataset[name]);
    for (const one of all("option[data-zh]")) one.textContent = one.dataset[chosen];
    hideTooltip();
  }
  language.addEventListener("change", () => { setLanguage(language.value); keep("report-language", language.value); });

  // Theme: follows the system until the user chooses one.
  const theme = element("theme");
  theme.value = root.dataset.theme ?? "system";
  theme.addEventListener("change", () => {
    if (theme.value === "system") delete root.dataset.theme;
    else root.dataset.theme = theme.value;
    keep("report-theme", theme.value);
  });

  // Contents: open beside a wide page, closed above a narrow one.
  const nav = element("contents");
  const contents = nav.querySelector("details");
  const here = nav.querySelector(".here");
  const wide = matchMedia("(min-width: 900px)");
  const openIfWide = () => { contents.open = wide.matches; };
  wide.addEventListener("change", openIfWide);
  openIfWide();
  contents.addEventListener("click", (event) => {
    if (event.target.closest("a") && !wide.matches) contents.open = false;
  });
  const sectionLinks = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
    const current = [...sectionLinks.keys()].find((id) => seen.has(id));
    for (const [id, link] of sectionLinks) {
      if (id === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    const link = sectionLinks.get(current);
    here.replaceChildren(...(link ? link.cloneNode(true).childNodes : []));
    if (!link || !wide.matches) return;
    const [around, own] = [nav.getBoundingClientRect(), link.getBoundingClientRect()];
    nav.scrollTop += Math.min(own.top - around.top - 20, 0) + Math.max(own.bottom - around.bottom + 20, 0);
  }, { rootMargin: "-64px 0px -55% 0px" });
  for (const id of sectionLinks.keys()) if (element(id)) watcher.observe(element(id));

  // Tables: a heading sorts ascending, then descending, then restores the original order.
  const digits = /^[~≈<>≤≥]?\s*([+\-−]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+\-]?\d+)?)/;
  const form = new RegExp(digits.source + /(?:\s*[%x×]|\s*[a-zµ/²]{1,8})?(?:\s*±.*)?$/.source, "i");
  const nothing = new Set(["", "-", "–", "—", "n/a"]);
  const shownText = (cell) => (cell?.querySelector(`.${root.dataset.language}`) ?? cell)?.textContent.trim() ?? "";
  function sortKey(text) {
    if (nothing.has(text)) return [2, 0, text];
    const found = form.exec(text);
    return found ? [0, Number(found[1].replaceAll(",", "").replace("−", "-")), text] : [1, 0, text];
  }
  function sort(heading) {
    const table = heading.closest("table");
    const body = table.tBodies[0];
    const rows = [...body.rows];
    rows.forEach((row, index) => { row.dataset.order ??= index; });
    const next = { none: "ascending", ascending: "descending", descending: "none" }[heading.ariaSort ?? "none"];
    for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
    const order = (row) => Number(row.dataset.order);
    if (next === "none") rows.sort((a, b) => order(a) - order(b));
    else {
      heading.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const keys = new Map(rows.map((row) => [row, sortKey(shownText(row.cells[heading.cellIndex]))]));
      const compare = new Intl.Collator(undefined, { numeric: true }).compare;
      rows.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        // Numbers come first, then words; empty cells stay last in both directions.
        return x[0] - y[0] || sign * (x[1] - y[1] || (x[0] === 1 ? compare(x[2], y[2]) : 0)) || order(a) - order(b);
      });
    }
    body.append(...rows);
    markGroups(table);
    refold([table.closest(".scroll")]);
  }
  // A group starts where the first column changes, if that column repeats its values.
  function markGroups(table) {
    const rows = [...table.tBodies[0].rows];
    let before;
    let groups = 0;
    for (const row of rows) {
      const name = row.cells[0]?.textContent;
      row.classList.toggle("first", name !== before);
      groups += name !== before;
      before = name;
    }
    table.classList.toggle("grouped", groups > 1 && rows.length >= 2 * groups);
  }

  // A tall table is clipped below its first rows.
  const firstRows = Number(element("main").dataset.rows);
  const isShort = (box) => box.closest(".table")?.classList.contains("short");
  function refold(boxes) {
    const heights = boxes.filter(isShort).map((box) => {
      const last = box.querySelector("tbody").rows[firstRows - 1];
      const border = box.offsetHeight - box.clientHeight; // includes the scroll bar
      return [box, last.offsetTop + last.offsetHeight + border];
    });
    for (const [box, height] of heights) if (height > 50) box.style.setProperty("--fold", `${height}px`);
  }
  function unfold(button, open) {
    const before = button.getBoundingClientRect().top;
    const table = button.closest(".table");
    button.setAttribute("aria-expanded", String(open));
    table.classList.toggle("short", !open);
    refold([table.querySelector(".scroll")]);
    // Keeps the button where it is on the screen.
    if (!open) scrollBy({ top: button.getBoundingClientRect().top - before, behavior: "instant" });
  }

  // A table or chart wider than its frame has a shadow where it continues; one that fits is not a tab stop.
  function edges(boxes) {
    const found = boxes.map((box) => [
      box, box.scrollLeft, box.scrollWidth - box.clientWidth, box.querySelector("thead th")?.offsetWidth ?? 0,
    ]);
    for (const [box, left, hidden, first] of found) {
      const frame = box.parentElement;
      frame.classList.toggle("fits", hidden <= 1);
      frame.classList.toggle("cut-left", left > 1);
      frame.classList.toggle("cut-right", left < hidden - 1);
      frame.style.setProperty("--first", `${first}px`);
      if (hidden <= 1) box.removeAttribute("tabindex");
      else if (box.matches(".scroll")) box.tabIndex = 0; // in a chart the marks are the tab stops
    }
  }
  const boxes = all(".scroll, .plot");
  const resized = new ResizeObserver((entries) => {
    const found = [...new Set(entries.map((entry) => entry.target.closest(".scroll, .plot")))];
    edges(found);
    refold(found);
  });
  for (const box of boxes) {
    resized.observe(box);
    resized.observe(box.firstElementChild);
    box.addEventListener("scroll", () => {
      edges([box]);
      // Only find-in-page scrolls a folded table: it has found a hidden row.
      const down = box.scrollTop;
      if (down > 0 && isShort(box)) {
        unfold(box.closest(".table").querySelector(".rows"), true);
        scrollBy({ top: down, behavior: "instant" });
      }
    }, { passive: true });
  }
  all("table").forEach(markGroups);

  // A link to a folded table opens it, also when the address already ends in that anchor.
  function reveal(hash) {
    const target = element(hash.slice(1));
    const closed = [];
    for (let at = target; at; at = at.parentElement) {
      if (at.matches("details:not([open])") && !nav.contains(at)) closed.push(at);
    }
    closed.forEach((one) => { one.open = true; });
    if (closed.length) target.scrollIntoView({ behavior: "instant" });
  }
  addEventListener("hashchange", () => reveal(location.hash));

  // Copy buttons
  const copies = JSON.parse(element("copies").textContent);
  async function copy(button) {
    const [table, format] = button.dataset.copy.split(" ").map(Number);
    const message = button.parentElement.querySelector("output");
    const text = copies[table][format];
    let done = true;
    try { await navigator.clipboard.writeText(text); } catch { done = copyBySelecting(text, button); }
    message.textContent = words[root.dataset.language][done ? "copied" : "failed"];
    clearTimeout(message.timer);
    message.timer = setTimeout(() => { message.textContent = ""; }, 4000);
  }
  function copyBySelecting(text, button) {
    const area = document.createElement("textarea");
    area.value = text;
    area.readOnly = true;
    area.className = "skip";
    document.body.append(area);
    area.select();
    let done = false;
    try { done = document.execCommand("copy"); } catch { /* reported below the table */ }
    area.remove();
    button.focus();
    return done;
  }

  // Charts: hiding a series moves down the parts stacked on it.
  function toggle(entry) {
    const shown = entry.ariaPressed === "false";
    entry.setAttribute("aria-pressed", String(shown));
    const chart = entry.closest("svg");
    chart.querySelector(`.series[data-index="${entry.dataset.toggle}"]`).classList.toggle("off", !shown);
    if (!chart.classList.contains("stacked")) return;
    const across = chart.dataset.horizontal !== undefined;
    const missing = new Map();
    for (const bar of all(".series rect", chart)) {
      const key = `${bar.dataset.place} ${bar.dataset.way}`;
      const by = missing.get(key) ?? 0;
      if (bar.parentElement.classList.contains("off")) {
        missing.set(key, by + Number(bar.getAttribute(across ? "width" : "height")));
      } else {
        const move = by * Number(bar.dataset.way) * (across ? -1 : 1);
        bar.style.transform = move ? (across ? `translateX(${move}px)` : `translateY(${move}px)`) : "";
      }
    }
  }

  const tooltip = element("tooltip");
  function hideTooltip() { tooltip.hidden = true; }
  function showTooltip(mark) {
    const chinese = root.dataset.language === "zh";
    const chart = mark.closest("svg").dataset;
    const { series, seriesZh, label, value, std, n, note, noteZh } = mark.dataset;
    const lines = [`${chinese ? chart.xZh : chart.xEn}: ${label}`];
    if (note === undefined) lines.push(`${chinese ? chart.yZh : chart.yEn}: ${value}${std ? ` ± ${std}` : ""}`);
    else lines.push(chinese ? noteZh : note);
    if (n !== undefined) lines.push(`n = ${n}`);
    const name = document.createElement("b");
    name.textContent = (chinese && seriesZh) || series;
    tooltip.replaceChildren(name, ...lines.map((line) => {
      const row = document.createElement("div");
      row.textContent = line;
      return row;
    }));
    tooltip.hidden = false;
    const at = mark.getBoundingClientRect();
    const { width, height } = tooltip.getBoundingClientRect();
    const left = Math.min(Math.max(at.left + at.width / 2 - width / 2, 6), innerWidth - width - 6);
    const above = at.top - height - 8;
    tooltip.style.left = `${left}px`;
    tooltip.style.top = `${Math.min(above > 6 ? above : at.bottom + 8, innerHeight - height - 6)}px`;
  }

  // Each series is one tab stop; arrow keys move along it.
  for (const series of all(".series")) {
    all("[data-value]", series).slice(1).forEach((mark) => mark.setAttribute("tabindex", "-1"));
  }
  function moveAlong(mark, by) {
    const marks = all("[data-value]", mark.parentElement);
    const next = marks[(marks.indexOf(mark) + by + marks.length) % marks.length];
    mark.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  document.addEventListener("click", (event) => {
    const entry = event.target.closest(".entry");
    const button = event.target.closest("button");
    if (entry) toggle(entry);
    else if (button?.dataset.copy) copy(button);
    else if (button?.closest("thead")) sort(button.closest("th"));
    else if (button?.matches(".rows")) unfold(button, button.ariaExpanded === "false");
    else if (event.target.closest('a[href^="#"]')) reveal(event.target.closest("a").hash);
  });
  document.addEventListener("keydown", (event) => {
    const target = event.target.closest?.(".entry, [data-value]");
    if (event.key === "Escape") hideTooltip();
    if (!target) return;
    if (target.matches(".entry") && (event.key === "Enter" || event.key === " ")) toggle(target);
    else if (target.matches("[data-value]") && event.key === "ArrowRight") moveAlong(target, 1);
    else if (target.matches("[data-value]") && event.key === "ArrowLeft") moveAlong(target, -1);
    else return;
    event.preventDefault();
  });
  for (const [on, off] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
    document.addEventListener(on, (event) => {
      const mark = event.target.closest?.("[data-value]");
      if (mark) showTooltip(mark);
    });
    document.addEventListener(off, (event) => { if (event.target.closest?.("[data-value]")) hideTooltip(); });
  }
  document.addEventListener("scroll", () => {
    const mark = document.activeElement?.closest?.("[data-value]");
    if (mark && !tooltip.hidden) showTooltip(mark);
    else hideTooltip();
  }, true);

  // Printing opens everything that is folded.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details:not([open])");
    folded.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));

  setLanguage(root.dataset.language);
  reveal(location.hash);
})();

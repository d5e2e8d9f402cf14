"""What every page of a report holds besides its content: the style sheet and the scripts. Nothing is loaded."""

LIGHT = (
    "#0072b2 #b87a00 #008a65 #b8578c #2f8fc9 #d55e00 #767676 #8f8200 #004f7c #7f5800 #005b43 #7a3f62".split()  # noqa: SIM905
)
"""Of series 0 to 11 on white: picture.PALETTE, what is too faint there darkened to a contrast of 3 to 1."""
DARK = (
    "#3f9fdc #e69f00 #1bb58a #d98ab7 #7cc8f2 #f0803a #a3a3a3 #f0e442 #8aa9ff #c9a36a #8fd6b8 #e3b4d0".split()  # noqa: SIM905
)
"""The same hues on black."""


def _colors(colors: list[str]) -> str:
    return " ".join(f"--c{index}: {color};" for index, color in enumerate(colors))


_LIGHT_VARIABLES = f"""color-scheme: light;
    --page: #ffffff; --panel: #f5f6f7; --text: #1b1d20; --muted: #565b63; --line: #d5d8dc; --link: #0057ae;
    --focus: #0060df; {_colors(LIGHT)}"""
_DARK_VARIABLES = f"""color-scheme: dark;
    --page: #16181b; --panel: #202327; --text: #e9eaec; --muted: #a9afb8; --line: #3a3f46; --link: #8ab8ff;
    --focus: #7fb4ff; {_colors(DARK)}"""

STYLE = (
    f"""
  :root {{ {_LIGHT_VARIABLES} }}
  @media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {_DARK_VARIABLES} }} }}
  @media screen {{ :root[data-theme="dark"] {{ {_DARK_VARIABLES} }} }}
  {" ".join(f".s{i} {{ --c: var(--c{i}); }}" for i in range(len(LIGHT)))}
"""
    + """
  :root[data-language="en"] .zh, :root[data-language="zh"] .en { display: none; }
  * { box-sizing: border-box; }
  html { scroll-padding-top: 12px; }
  body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.55 system-ui, "Noto Sans", sans-serif; }
  a { color: var(--link); }
  h1, h2, h3, p, li, dd { overflow-wrap: anywhere; }
  h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; }
  h2 { font-size: 1.3rem; line-height: 1.3; margin: 0 0 4px; }
  h3 { font-size: 1rem; line-height: 1.4; margin: 0; }
  button, select {
    font: inherit; font-size: 14px; color: var(--text); background: var(--panel); border: 1px solid var(--line);
    border-radius: 6px; min-height: 32px; padding: 2px 10px; cursor: pointer;
  }
  button:hover, select:hover { border-color: var(--muted); }
  :focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
  .skip { position: absolute; left: -9999px; }
  .skip:focus { left: 8px; top: 8px; z-index: 9; background: var(--page); padding: 6px 12px; }
  header { max-width: 1360px; margin: 0 auto; padding: 22px 24px 14px; }
  .top { display: flex; flex-wrap: wrap; gap: 10px 24px; justify-content: space-between; align-items: flex-start; }
  .controls { display: none; gap: 8px; flex-wrap: wrap; }
  .js .controls { display: flex; }
  .facts {
    display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 260px), 1fr)); gap: 6px 24px;
    margin: 14px 0 0; padding: 12px 14px; background: var(--panel); border-radius: 8px; font-size: 14px;
  }
  .facts div { display: flex; gap: 8px; min-width: 0; }
  .facts dt { color: var(--muted); flex: none; }
  .facts dd { margin: 0; min-width: 0; }
  .layout {
    display: grid; grid-template-columns: 250px minmax(0, 1fr); gap: 36px;
    max-width: 1360px; margin: 0 auto; padding: 0 24px 60px;
  }
  nav {
    position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; padding: 12px 0; font-size: 14px;
  }
  nav summary { font-weight: 600; padding: 4px 8px; cursor: pointer; }
  nav ol { list-style: none; margin: 0; padding: 0; }
  nav a {
    display: block; padding: 4px 8px; color: var(--text); text-decoration: none; overflow-wrap: anywhere;
    border-left: 3px solid transparent;
  }
  nav a:hover { background: var(--panel); }
  nav a[aria-current] { border-left-color: var(--link); background: var(--panel); font-weight: 600; }
  main { min-width: 0; outline: none; }
  section { padding: 24px 0 30px; border-bottom: 1px solid var(--line); }
  section:last-child { border-bottom: 0; }
  .question { color: var(--muted); margin: 0 0 12px; }
  .findings { margin: 12px 0; padding: 10px 16px 10px 32px; background: var(--panel); border-radius: 8px; }
  .findings li + li { margin-top: 4px; }
  figure { margin: 22px 0 26px; max-width: 800px; }
  figcaption { font-weight: 600; margin-bottom: 8px; overflow-wrap: anywhere; }
  .plot { overflow-x: auto; padding: 3px; margin: -3px; }
  .chart { display: block; min-width: 560px; height: auto; overflow: visible; font-variant-numeric: tabular-nums; }
  .chart text { fill: var(--text); }
  .chart text.muted { fill: var(--muted); }
  .chart path { fill: none; }
  .grid { stroke: var(--line); stroke-width: 1; }
  .axis { stroke: var(--muted); stroke-width: 1; }
  .line { stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
  .dashed { stroke-dasharray: 6 4; }
  .chart .fill { fill: var(--c); }
  .bar { stroke: var(--page); stroke-width: 1; }
  .hollow { fill: var(--page); stroke: var(--c); stroke-width: 2; stroke-dasharray: 5 3; }
  .chart .hatch { stroke: var(--page); stroke-width: 1.5; opacity: 0.55; }
  .chart .mark { fill: var(--c); stroke: transparent; stroke-width: 10; pointer-events: all; }
  .error { stroke: var(--c); stroke-width: 1.5; pointer-events: none; }
  .error.over { stroke: var(--text); }
  .cross { stroke: var(--c); stroke-width: 2.5; pointer-events: bounding-box; }
  .chart [data-value]:hover, .chart [data-value]:focus-visible { stroke: var(--text); stroke-width: 2; }
  .chart .hit { fill: transparent; rx: 4px; }
  .js .entry { cursor: pointer; }
  .js .entry:hover .hit { fill: var(--panel); }
  #tooltip {
    position: fixed; z-index: 5; pointer-events: none; width: max-content; max-width: min(320px, 90vw);
    padding: 7px 10px; font-size: 13px;
    line-height: 1.4; overflow-wrap: anywhere; background: var(--page); border: 1px solid var(--muted);
    border-radius: 6px; box-shadow: 0 3px 12px #0004;
  }
  #tooltip b { display: block; }
  .table { margin: 22px 0 26px; }
  .head { display: flex; flex-wrap: wrap; gap: 6px 16px; justify-content: space-between; align-items: end; }
  .head h3 { min-width: 0; flex: 1 1 260px; }
  .copy { display: none; gap: 6px; flex-wrap: wrap; align-items: center; margin-bottom: 6px; }
  .js .copy { display: flex; }
  .copy button { font-size: 13px; min-height: 28px; padding: 1px 8px; }
  .copy output { font-size: 13px; color: var(--muted); }
  .copy output:empty { margin-right: -6px; } /* not hidden: what is hidden is not read out when it comes */
  .scroll {
    overflow: auto; max-height: 80vh; border: 1px solid var(--line); border-radius: 6px;
    width: fit-content; max-width: 100%;
  }
  table { border-collapse: separate; border-spacing: 0; font-size: 14px; font-variant-numeric: tabular-nums; }
  th, td {
    padding: 5px 12px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line);
    background: var(--page);
  }
  tbody th { font-weight: inherit; }
  /* A width of its own: a scrolled table would else give the names the least it can. */
  tbody th div { width: max-content; max-width: min(380px, 42vw); white-space: normal; overflow-wrap: anywhere; }
  .r div { margin-left: auto; }
  tbody tr:last-child > * { border-bottom: 0; }
  tbody tr:hover > * { background: var(--panel); }
  thead th { position: sticky; top: 0; z-index: 1; background: var(--panel); padding: 0; vertical-align: bottom; }
  thead button {
    min-width: 100%; width: max-content; max-width: 11em; border: 0; border-radius: 0; background: none;
    text-align: inherit; font-weight: 600; padding: 5px 12px; white-space: normal; overflow-wrap: anywhere;
  }
  thead button:focus-visible { outline-offset: -2px; }
  thead button::after { content: "↕"; margin-left: 5px; color: var(--muted); font-weight: 400; }
  thead [aria-sort="ascending"] button::after { content: "↑"; color: var(--text); }
  thead [aria-sort="descending"] button::after { content: "↓"; color: var(--text); }
  tr > :first-child { position: sticky; left: 0; z-index: 1; border-right: 1px solid var(--line); }
  thead tr > :first-child { z-index: 2; }
  .r { text-align: right; }
  .table summary { padding: 4px 0 8px; cursor: pointer; }
  .notes { margin: 8px 0 0; padding-left: 20px; font-size: 14px; color: var(--muted); }
  .links { padding-left: 20px; }
  .missing code { overflow-wrap: anywhere; background: var(--panel); padding: 1px 5px; border-radius: 4px; }
  code { font-family: ui-monospace, monospace; font-size: 0.93em; }
  @media screen {
    .chart .off { display: none; }
    .entry[aria-pressed="false"] text { fill: var(--muted); text-decoration: line-through; }
    .entry[aria-pressed="false"] > :not(text):not(.hit) { opacity: 0.25; }
  }
  @media (min-width: 900px) { nav summary { list-style: none; pointer-events: none; } }
  @media (max-width: 899px) {
    header { padding: 16px 16px 10px; }
    .layout { display: block; padding: 0 16px 40px; }
    nav { position: static; max-height: none; padding: 0; border: 1px solid var(--line); border-radius: 8px; }
    nav summary { padding: 9px 12px; }
    nav ol { padding: 0 4px 8px; }
    nav a { padding: 7px 8px; }
    .scroll { max-height: none; }
    details .scroll { max-height: 80vh; }
  }
  @media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
  @media print {
    .controls, .js .controls, .copy, .js .copy, nav, .skip, #tooltip { display: none; }
    body { font-size: 10pt; }
    header, .layout { display: block; max-width: none; padding: 0; }
    .scroll, .plot { overflow: visible; max-height: none; border: 0; width: auto; }
    .chart { min-width: 0; }
    .chart rect { transform: none !important; }
    table { font-size: 8pt; }
    th, td { padding: 2px 5px; white-space: normal; }
    thead th, tr > :first-child { position: static; }
    thead button { padding: 2px 5px; font-size: inherit; }
    thead button::after { content: none !important; }
    figure, tr, .findings { break-inside: avoid; }
    h2, h3, figcaption { break-after: avoid; }
    details::details-content { content-visibility: visible; height: auto; }
    a { color: inherit; }
  }
"""
)

EARLY_SCRIPT = """
"use strict";
(() => {
  // Before anything is drawn, so that it is not drawn twice.
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const language = localStorage.getItem("report-language");
    const theme = localStorage.getItem("report-theme");
    if (language === "en" || language === "zh") root.dataset.language = language;
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch { /* a page opened from a file may have no storage */ }
})();
"""

SCRIPT = r"""
"use strict";
(() => {
  const root = document.documentElement;
  const element = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const keep = (key, value) => { try { localStorage.setItem(key, value); } catch { /* as above */ } };
  const words = {
    en: { copied: "copied", failed: "could not copy" },
    zh: { copied: "已复制", failed: "无法复制" },
  };

  // Language: what CSS cannot switch is text outside of elements.
  const language = element("language");
  function speak(chosen) {
    root.dataset.language = language.value = chosen;
    root.lang = chosen === "zh" ? "zh-CN" : "en";
    const title = document.querySelector("title");
    document.title = title.dataset[chosen] ?? document.title;
    const name = chosen === "zh" ? "ariaZh" : "ariaEn";
    for (const one of all("[data-aria-zh]")) one.setAttribute("aria-label", one.dataset[name]);
    for (const one of all("option[data-zh]")) one.textContent = one.dataset[chosen];
    hideTooltip();
  }
  language.addEventListener("change", () => { speak(language.value); keep("report-language", language.value); });

  // Theme: without a choice the system's.
  const theme = element("theme");
  theme.value = root.dataset.theme ?? "system";
  theme.addEventListener("change", () => {
    if (theme.value === "system") delete root.dataset.theme;
    else root.dataset.theme = theme.value;
    keep("report-theme", theme.value);
  });

  // Contents: open at the side, closed on top of a narrow page.
  const contents = document.querySelector("nav details");
  const wide = matchMedia("(min-width: 900px)");
  const unfold = () => { contents.open = wide.matches; };
  wide.addEventListener("change", unfold);
  unfold();
  contents.addEventListener("click", (event) => {
    if (event.target.closest("a") && !wide.matches) contents.open = false;
  });
  const places = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
    const current = [...places.keys()].find((id) => seen.has(id));
    for (const [id, link] of places) {
      if (id === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-20px 0px -55% 0px" });
  for (const id of places.keys()) if (element(id)) watcher.observe(element(id));

  // Tables: a heading sorts up, then down, then as it was.
  const digits = /^[~≈<>≤≥]?\s*([+\-−]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+\-]?\d+)?)/;
  const form = new RegExp(digits.source + /(?:\s*[%x×]|\s*[a-zµ/²]{1,8})?(?:\s*±.*)?$/.source, "i");
  const nothing = new Set(["", "-", "–", "—", "n/a"]);
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
      const keys = new Map(rows.map((row) => [row, sortKey(row.cells[heading.cellIndex]?.textContent.trim() ?? "")]));
      const compare = new Intl.Collator(undefined, { numeric: true }).compare;
      rows.sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        // Words after numbers and nothing last, whichever way.
        return x[0] - y[0] || sign * (x[1] - y[1] || (x[0] === 1 ? compare(x[2], y[2]) : 0)) || order(a) - order(b);
      });
    }
    body.append(...rows);
  }

  // Copying
  const copies = JSON.parse(element("copies").textContent);
  async function copy(button) {
    const [table, format] = button.dataset.copy.split(" ").map(Number);
    const said = button.parentElement.querySelector("output");
    const text = copies[table][format];
    let done = true;
    try { await navigator.clipboard.writeText(text); } catch { done = copyBySelecting(text, button); }
    said.textContent = words[root.dataset.language][done ? "copied" : "failed"];
    clearTimeout(said.timer);
    said.timer = setTimeout(() => { said.textContent = ""; }, 4000);
  }
  function copyBySelecting(text, button) {
    const area = document.createElement("textarea");
    area.value = text;
    area.readOnly = true;
    area.className = "skip";
    document.body.append(area);
    area.select();
    let done = false;
    try { done = document.execCommand("copy"); } catch { /* said below the table */ }
    area.remove();
    button.focus();
    return done;
  }

  // Charts: a series can be hidden; what is stacked on it then moves down.
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

  // One stop of the tab key for each series; arrows move along it.
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

  // On paper nothing is folded away.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details:not([open])");
    folded.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));

  speak(root.dataset.language);
})();
"""

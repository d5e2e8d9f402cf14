"use strict";
(() => {
  const root = document.documentElement;
  const element = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const words = {
    en: { copied: "copied", failed: "could not copy" },
    zh: { copied: "已复制", failed: "无法复制" },
  };

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
    if (!target) return;
    const closed = [];
    for (let at = target; at; at = at.parentElement) {
      if (at.matches("details:not([open])") && !nav.contains(at)) closed.push(at);
    }
    closed.forEach((one) => { one.open = true; });
    if (closed.length) target.scrollIntoView({ behavior: "instant" });
    settle(target);
  }
  // Sections have their true height only near the window: where scrolling ends, the target may have moved.
  let settling = 0;
  for (const name of ["wheel", "touchmove", "keydown"]) addEventListener(name, () => { settling += 1; }, { passive: true });
  function settle(target) {
    settling += 1;
    const own = settling;
    let [left, calm, before] = [120, 0, -1];
    const check = () => {
      if (own !== settling) return; // the reader has moved on
      const at = scrollY;
      if (at === before) target.scrollIntoView({ behavior: "instant" });
      calm = at === before && scrollY === at ? calm + 1 : 0;
      before = scrollY;
      left -= 1;
      if (calm < 4 && left) requestAnimationFrame(check);
    };
    requestAnimationFrame(check);
  }
  addEventListener("hashchange", () => reveal(location.hash));

  // Copy buttons
  const copies = JSON.parse(element("copies").textContent);
  async function copy(button) {
    const [table, format, first] = button.dataset.copy.split(" ").map(Number);
    const message = button.parentElement.querySelector("output");
    const rows = button.closest(".table").querySelector("tbody").rows;
    const text = inShownOrder(copyOf(table, format, first, rows), first, rows);
    let done = true;
    try { await navigator.clipboard.writeText(text); } catch { done = copyBySelecting(text, button); }
    message.textContent = words[root.dataset.language][done ? "copied" : "failed"];
    clearTimeout(message.timer);
    message.timer = setTimeout(() => { message.textContent = ""; }, 4000);
  }
  // A rendered table. Rows in Markdown that follow from the cells on the page, and rows in LaTeX that follow from those
  // in Markdown, are left out of the script with the copies: their lines are empty.
  function copyOf(table, format, first, rows) {
    const [markdown, latex] = copies[table].map((text) => text.split("\n"));
    const firstInMarkdown = markdown.findIndex((line) => line.startsWith("|")) + 2;
    [...rows].forEach((row, index) => { markdown[firstInMarkdown + Number(row.dataset.order ?? index)] ||= markdownRow(row); });
    if (!format) return markdown.join("\n");
    return latex.map((line, index) => line || latexRow(markdown[firstInMarkdown + index - first])).join("\n");
  }
  function markdownRow(row) {
    return `| ${[...row.cells].map((cell) => (cell.querySelector(".en") ?? cell).textContent).join(" | ")} |`;
  }
  function latexRow(markdown) {
    const escaped = markdown.slice(2, -2).replace(/[&%$#_{}]/g, "\\$&").replaceAll("±", "$$\\pm$$").replaceAll("×", "$$\\times$$");
    return `    ${escaped.split(" | ").join(" & ")} \\\\`;
  }
  // The rows of a rendered table, one line each from `first` on, in the order that the page shows.
  function inShownOrder(text, first, rows) {
    const lines = text.split("\n");
    const order = [...rows].map((row, index) => Number(row.dataset.order ?? index));
    return [...lines.slice(0, first), ...order.map((index) => lines[first + index]), ...lines.slice(first + order.length)].join("\n");
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

  // Charts: marks and legend entries take the focus, one tab stop for each; arrow keys move on from there.
  for (const chart of all("svg.chart")) {
    chart.setAttribute("role", "group");
    chart.querySelector("[data-value]")?.setAttribute("tabindex", "0");
    all(".entry", chart).forEach((entry, index) => {
      entry.setAttribute("role", "button");
      entry.setAttribute("aria-pressed", "true");
      entry.setAttribute("tabindex", index ? "-1" : "0");
    });
  }
  function stopAt(mark) {
    if (!mark) return;
    mark.setAttribute("tabindex", "0");
    if (mark.dataset.value !== undefined) nameMark(mark);
  }
  function moveFocus(from, to) {
    from.setAttribute("tabindex", "-1");
    stopAt(to);
    to.focus();
  }
  const isShown = (mark) => !mark.closest(".off");
  const sideways = (chart) => chart.dataset.horizontal !== undefined;
  const translation = /translate\(([-\d.e]+) ([-\d.e]+)\)/;
  // The centre of a mark, in units of the drawing.
  function centre(mark) {
    if (mark.tagName === "rect") {
      const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(mark.getAttribute(name)));
      return { x: x + width / 2, y: y + height / 2 };
    }
    const found = translation.exec(mark.getAttribute("transform") ?? "");
    if (found) return { x: Number(found[1]), y: Number(found[2]) };
    const box = mark.getBBox();
    return { x: box.x + box.width / 2, y: box.y + box.height / 2 };
  }
  function move(mark, key) {
    const chart = mark.closest("svg");
    const own = all("[data-value]", mark.parentElement);
    const along = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (along) return moveFocus(mark, own[(own.indexOf(mark) + along + own.length) % own.length]);
    // Up and down: the nearest mark of the next series.
    const groups = all(".series, .limit", chart).filter((group) => isShown(group) && group.querySelector("[data-value]"));
    const next = groups[(groups.indexOf(mark.parentElement) + (key === "ArrowDown" ? 1 : -1) + groups.length) % groups.length];
    const axis = sideways(chart) ? "y" : "x";
    const at = centre(mark)[axis];
    const others = all("[data-value]", next);
    moveFocus(mark, others.reduce((a, b) => (Math.abs(centre(b)[axis] - at) < Math.abs(centre(a)[axis] - at) ? b : a)));
  }

  // Hiding a series closes the gap in stacked bars, and the axis of values fits what is left. The wide and the narrow
  // drawing of a chart show the same series.
  function toggle(entry) {
    const shown = entry.ariaPressed === "false";
    hideTooltip();
    for (const chart of all("svg", entry.closest(".plot"))) {
      chart.querySelector(`[data-toggle="${entry.dataset.toggle}"]`).setAttribute("aria-pressed", String(shown));
      const series = chart.querySelector(`.series[data-index="${entry.dataset.toggle}"]`);
      series.classList.toggle("off", !shown);
      redraw(chart);
      const stop = chart.querySelector('[data-value][tabindex="0"]');
      if (isShown(stop)) continue;
      stop.removeAttribute("tabindex");
      stopAt(all("[data-value]", chart).find(isShown) ?? stop);
    }
  }
  // Attributes as they were drawn: every redraw starts from them.
  const drawn = new WeakMap();
  function original(element, name) {
    if (!drawn.has(element)) drawn.set(element, {});
    const kept = drawn.get(element);
    kept[name] ??= element.getAttribute(name) ?? "";
    return kept[name];
  }
  const pathSteps = /([MLHV])([-\d.e]+)(?: ([-\d.e]+))?/g;
  const THIN = 1.5; // minimum length of a bar
  // The places of a mark along the axis of values, as drawn; of a bar both ends.
  function endsOf(mark, across) {
    if (mark.tagName === "rect") {
      const at = Number(original(mark, across ? "x" : "y")) + (mark.dataset.size && !across ? THIN : 0);
      return [at, at + lengthOf(mark, across)];
    }
    const found = translation.exec(original(mark, "transform"));
    if (found) return [Number(found[across ? 1 : 2])];
    return [...original(mark, "d").matchAll(pathSteps)].flatMap(([, command, a, b]) => (
      command === (across ? "H" : "V") ? [Number(a)] : "ML".includes(command) ? [Number(across ? a : b)] : []
    ));
  }
  const lengthOf = (bar, across) => Number(bar.dataset.size ?? original(bar, across ? "width" : "height"));
  // Bars from zero on, stacked ones without their hidden parts: both ends of each, and the sums and ends of stacks.
  function restack(chart, across, zero) {
    const ends = new Map();
    const sums = new Map();
    for (const bar of all(".series rect[data-way]", chart).filter(isShown)) {
      const key = `${bar.dataset.place} ${bar.dataset.way}`;
      const { sum, at } = (bar.dataset.place && sums.get(key)) || { sum: 0, at: zero };
      const end = at + lengthOf(bar, across) * Number(bar.dataset.way) * (across ? 1 : -1);
      ends.set(bar, [Math.min(at, end), Math.max(at, end)]);
      sums.set(key, { sum: sum + asNumber(bar.dataset.value), at: end });
    }
    return [ends, sums];
  }
  function redraw(chart) {
    if (!chart.dataset.scale) return;
    const [low, high, from, to, log, keepsZero] = chart.dataset.scale.split(" ").map(Number);
    const across = sideways(chart);
    const [begin, size] = across ? ["x", "width"] : ["y", "height"];
    const forth = (value) => from + (to - from) * (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
    const back = (at) => {
      const share = (at - from) / (to - from);
      return log ? low * (high / low) ** share : low + share * (high - low);
    };
    const hidden = all(".series.off", chart).length > 0;
    const [stacked, sums] = restack(chart, across, !log && low <= 0 && high >= 0 ? forth(0) : from);
    const places = (mark) => stacked.get(mark) ?? endsOf(mark, across);
    let axis = { low, high, ticks: null };
    const values = hidden ? all(".series rect, .series path:not(.cross)", chart).filter(isShown).flatMap(places)
      .filter((end) => !log || Math.abs(end - from) > 0.1) // on a logarithmic axis bars begin at its end
      .map((end) => Math.min(back(end), chart.querySelector("clipPath") ? high : Infinity)) : [];
    if (values.length) {
      values.push(...all(".limit [data-value]", chart).map((limit) => asNumber(limit.dataset.value)));
      axis = fitted(Math.min(...values), Math.max(...values), log, keepsZero);
    }
    // Both scales are linear in the drawing (or in its logarithm): one straight line maps old places to new ones.
    const [first, last] = [forth(axis.low), forth(axis.high)];
    const stretched = (at) => from + (at - first) * (to - from) / (last - first);
    const [least, most] = [Math.min(from, to), Math.max(from, to)];
    const placed = (at) => (log ? Math.min(Math.max(stretched(at), least), most) : stretched(at));
    for (const bar of all(".series rect", chart)) {
      const [start, end] = places(bar).map(placed).sort((a, b) => a - b);
      const thin = end - start < THIN;
      bar.setAttribute(begin, (thin && !across ? start - THIN : start).toFixed(1));
      bar.setAttribute(size, Math.max(end - start, THIN).toFixed(1));
    }
    const moved = (text) => text.replace(translation, (_, x, y) => (
      across ? `translate(${placed(Number(x)).toFixed(1)} ${y})` : `translate(${x} ${placed(Number(y)).toFixed(1)})`
    ));
    for (const mark of all(".series [transform]:not(.cross)", chart)) mark.setAttribute("transform", moved(original(mark, "transform")));
    for (const path of all(".series path:not([transform]), .limit path", chart)) {
      path.setAttribute("d", movedPath(original(path, "d"), across, placed));
    }
    const base = chart.querySelector(".base");
    const zero = !log && axis.low <= 0 && axis.high >= 0 ? placed(forth(0)) : from;
    base.setAttribute("d", movedPath(original(base, "d"), across, () => zero));
    all(".names", chart).forEach((names) => names.classList.toggle("off", hidden));
    for (const value of all(".value", chart)) moveValue(value, chart, across, hidden, sums, placed, axis.high, to);
    drawTicks(chart, axis, across, (tick) => placed(forth(tick)));
  }
  // The axis of what is shown, by the rules of scales.py. Places are rounded: what is almost zero is zero.
  function fitted(least, most, log, keepsZero) {
    if (log) return niceAxis(least, most, true);
    const [low, high] = [least, most].map((end) => (Math.abs(end) < 0.005 * Math.max(Math.abs(least), Math.abs(most)) ? 0 : end));
    const withZero = keepsZero || (low >= 0 && low <= 0.6 * high);
    return niceAxis(withZero ? Math.min(low, 0) : low, withZero ? Math.max(high, 0) : high, false);
  }
  // The value at the end of a bar follows it; the sum of a stacked bar is that of its visible parts.
  function moveValue(value, chart, across, hidden, sums, placed, high, to) {
    const { at, sum } = value.dataset;
    const found = sums.get(sum);
    const whole = [...sums.values()].every((one) => Math.abs(one.sum - Math.round(one.sum)) < 1e-9);
    const shown = sum === undefined ? isShown(chart.querySelector(`.series[data-index="${value.dataset.for}"]`)) : found;
    value.classList.toggle("off", !shown);
    if (!shown) return;
    if (found) writeSum(value.querySelector("text"), hidden ? found.sum : null, high, whole);
    const atZero = across && sum?.endsWith("-1"); // beside the names of the bars there is no room
    const end = placed(found && hidden && !atZero ? found.at : Number(at));
    const by = (across ? Math.min(end, to) : end) - Number(at);
    value.setAttribute("transform", across ? `translate(${by.toFixed(1)} 0)` : `translate(0 ${by.toFixed(1)})`);
  }
  const asNumber = (text) => Number(text.replaceAll(",", ""));
  // The sum of a stacked bar, as the drawing writes it; an arrow where the bar is cut. Null: as drawn.
  function writeSum(text, sum, high, whole) {
    if (!drawn.has(text)) drawn.set(text, { text: text.textContent });
    if (sum === null) text.textContent = drawn.get(text).text;
    else if (sum > high * 1.000001) text.textContent = `→ ${sum >= 100 ? Math.round(sum).toLocaleString("en") : Number(sum.toPrecision(3))}`;
    else text.textContent = onBar(sum, whole);
  }
  // As `Chart.texts_of`.
  function onBar(value, whole) {
    const size = Math.abs(value);
    if (!whole && size > 0 && size < 0.1) return String(Number(value.toPrecision(3)));
    const count = whole || size >= 100 || !size ? 0 : size >= 10 ? 1 : 2;
    return value.toLocaleString("en", { minimumFractionDigits: count, maximumFractionDigits: count });
  }
  // Absolute commands along the axis of values move; relative ones run across it.
  function movedPath(path, across, place) {
    return path.replace(pathSteps, (whole, command, a, b) => {
      const [x, y] = [Number(a), Number(b)];
      if (command === "H") return across ? `H${place(x).toFixed(1)}` : whole;
      if (command === "V") return across ? whole : `V${place(x).toFixed(1)}`;
      return across ? `${command}${place(x).toFixed(1)} ${b}` : `${command}${a} ${place(y).toFixed(1)}`;
    });
  }
  function niceAxis(low, high, log) {
    if (log) {
      if (high / low < 1 + 1e-9) [low, high] = [low / 3, high * 3];
      if (high / low < 4) { // powers of ten would leave one or two ticks
        const axis = niceAxis(low, high, false);
        if (axis.low > 0) return axis;
      }
      const steps = Math.log10(high / low) > 2.5 ? [1] : [1, 2, 5];
      const [least, most] = [Math.floor(Math.log10(low)) - 1, Math.ceil(Math.log10(high)) + 1];
      const marks = [];
      for (let power = least; power <= most; power += 1) for (const step of steps) marks.push(Number(`${step}e${power}`));
      const [from, to] = [marks.findLast((mark) => mark <= low * 1.001), marks.find((mark) => mark >= high * 0.999)];
      return { low: from, high: to, ticks: marks.filter((mark) => mark >= from && mark <= to) };
    }
    const size = high - low || Math.abs(high) || 1;
    const power = 10 ** Math.floor(Math.log10(size / 5));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((found) => found >= size / 5 * 0.999);
    const [first, last] = [Math.floor(low / step + 0.01), Math.ceil(high / step - 0.01)]; // places are rounded
    const ticks = [];
    for (let k = first; k <= Math.max(last, first + 1); k += 1) ticks.push(Number((k * step).toPrecision(12)));
    return { low: ticks[0], high: ticks.at(-1), ticks };
  }
  // Ticks as the drawing writes them (scales.py), with enough digits that no two are equal.
  function tickTexts(values) {
    let texts = [];
    for (let count = 3; count < 12 && new Set(texts).size < values.length; count += 1) texts = values.map((value) => shortNumber(value, count));
    return texts;
  }
  function shortNumber(value, count) {
    const size = Math.abs(value);
    if (size && size < 1e-3) {
      const [mantissa, exponent] = value.toExponential(count - 1).split("e");
      return `${Number(mantissa)}e${exponent}`;
    }
    if (size >= 1e3 && size < 1e6 && Number(value.toPrecision(3)) !== value) return String(Number(value.toPrecision(6)));
    for (const [scale, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= scale) return `${Number((value / scale).toPrecision(count))}${letter}`;
    }
    return String(Number(value.toPrecision(count)));
  }
  const LETTER = 9; // width of a digit at most
  function drawTicks(chart, axis, across, place) {
    const grid = chart.querySelector(".grid");
    const group = chart.querySelector(".ticks");
    const before = original(grid, "d");
    if (!drawn.get(grid).texts) drawn.get(grid).texts = [...group.childNodes];
    group.removeAttribute("font-size");
    if (!axis.ticks) {
      grid.setAttribute("d", before);
      group.replaceChildren(...drawn.get(grid).texts);
      return;
    }
    const [, a, b, end] = /M([-\d.]+) ([-\d.]+)[HV]([-\d.]+)/.exec(before);
    const places = axis.ticks.map(place);
    grid.setAttribute("d", places.map((at) => (across ? `M${at.toFixed(1)} ${b}V${end}` : `M${a} ${at.toFixed(1)}H${end}`)).join(""));
    const model = drawn.get(grid).texts[0];
    const texts = tickTexts(axis.ticks);
    const widest = LETTER * Math.max(...texts.map((text) => text.length));
    const room = Number(model.getAttribute("x"));
    if (!across && widest > room) group.setAttribute("font-size", (14 * room / widest).toFixed(1));
    const gap = Math.min(...places.slice(1).map((at, index) => Math.abs(at - places[index])));
    const every = Math.ceil((across ? widest + 8 : 14) / gap);
    group.replaceChildren(...places.map((at, index) => {
      const text = model.cloneNode(false);
      text.textContent = index % every ? "" : texts[index];
      text.setAttribute(across ? "x" : "y", (at + (across ? 0 : 5)).toFixed(1));
      return text;
    }));
  }

  // Tooltips: all series at the nearest x; in dots and spans the nearest mark.
  const tooltip = element("tooltip");
  let hair = null;
  function hideTooltip() {
    tooltip.hidden = true;
    hair?.remove();
    hair = null;
  }
  const inLanguage = (data, name) => (root.dataset.language === "zh" && data[`${name}Zh`]) || data[name];
  function valueText(mark) {
    const { value, std, n } = mark.dataset;
    if (mark.dataset.note !== undefined) return inLanguage(mark.dataset, "note");
    return `${value}${std ? ` ± ${std}` : ""}${n !== undefined ? ` (n = ${n})` : ""}`;
  }
  const seriesName = (mark) => inLanguage(mark.parentElement.dataset, "series") ?? "";
  function line(text, tag = "div") {
    const row = document.createElement(tag);
    row.textContent = text;
    return row;
  }
  function showTooltip(marks, at) {
    const chart = marks[0].closest("svg");
    const names = chart.dataset;
    const zh = root.dataset.language === "zh";
    const label = inLanguage(marks[0].dataset, "label");
    const several = all(".series", chart).length > 1;
    const rows = marks.map((mark) => {
      const row = line("");
      row.className = `row ${mark.parentElement.getAttribute("class")}`;
      row.append(line("", "i"), line(several || mark.closest(".limit") ? seriesName(mark) : zh ? names.yZh : names.yEn, "span"), line(valueText(mark), "span"));
      return row;
    });
    const title = label === "–" ? "" : `${zh ? names.xZh : names.xEn}: ${label}`;
    const unit = several ? [line(zh ? names.yZh : names.yEn, "small")] : [];
    tooltip.replaceChildren(...(title ? [line(title, "b")] : []), ...rows, ...unit);
    tooltip.hidden = false;
    const { width, height } = tooltip.getBoundingClientRect();
    const left = Math.min(Math.max(at.x - width / 2, 6), innerWidth - width - 6);
    const above = at.top - height - 8;
    tooltip.style.left = `${left}px`;
    tooltip.style.top = `${Math.min(above > 6 ? above : at.bottom + 8, innerHeight - height - 6)}px`;
  }
  function nameMark(mark) {
    const label = inLanguage(mark.dataset, "label");
    const names = [seriesName(mark), label === "–" ? "" : label].filter(Boolean);
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", `${names.join(", ")}: ${valueText(mark)}`);
  }
  function describe(mark) {
    const box = mark.getBoundingClientRect();
    nameMark(mark);
    showTooltip([mark], { x: box.left + box.width / 2, top: box.top, bottom: box.bottom });
  }
  function point(event) {
    const chart = event.target.closest?.("svg.chart");
    if (!chart || event.target.closest(".entry")) return hideTooltip();
    const limit = event.target.closest(".limit [data-value]");
    const pointer = { x: event.clientX, top: event.clientY - 8, bottom: event.clientY + 12 };
    if (limit) return showTooltip([limit], pointer);
    const marks = all(".series [data-value]", chart).filter(isShown).map((mark) => ({ mark, ...centre(mark) }));
    const matrix = chart.getScreenCTM();
    const grid = chart.querySelector(".grid")?.getBBox();
    if (!marks.length || !matrix || !grid) return hideTooltip();
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
    const inside = x > grid.x - 24 && x < grid.x + grid.width + 24 && y > grid.y - 24 && y < grid.y + grid.height + 24;
    if (!inside) return hideTooltip();
    if (chart.matches(".dots, .spans")) {
      const over = event.target.closest(".series [data-value]");
      const near = over ? { mark: over, far: 0 } : marks.map((one) => ({ ...one, far: Math.hypot(one.x - x, one.y - y) })).reduce((a, b) => (b.far < a.far ? b : a));
      return near.far < 24 ? showTooltip([near.mark], pointer) : hideTooltip();
    }
    const axis = sideways(chart) ? "y" : "x";
    const at = axis === "y" ? y : x;
    const nearest = marks.reduce((a, b) => (Math.abs(b[axis] - at) < Math.abs(a[axis] - at) ? b : a));
    const found = new Map();
    for (const one of marks) {
      const group = one.mark.parentElement;
      const far = Math.abs(one[axis] - nearest[axis]);
      const same = chart.matches(".lines") ? far < 8 : one.mark.dataset.label === nearest.mark.dataset.label;
      if (same && !(found.get(group)?.far <= far)) found.set(group, { ...one, far });
    }
    hideTooltip();
    if (chart.matches(".lines")) {
      hair = document.createElementNS(chart.namespaceURI, "path");
      hair.setAttribute("class", "hair");
      hair.setAttribute("d", `M${nearest.x.toFixed(1)} ${grid.y}v${grid.height}`);
      chart.append(hair);
    }
    showTooltip([...found.values()].map((one) => one.mark), pointer);
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
    const target = event.target.closest?.(".entry, [data-value], thead button");
    if (event.key === "Escape") hideTooltip();
    if (!target) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (target.matches(".entry") && (event.key === "Enter" || event.key === " ")) toggle(target);
    else if (!step) return;
    else if (target.matches("[data-value]")) move(target, event.key);
    else {
      const row = target.matches(".entry") ? all(".entry", target.closest("svg")) : all("button", target.closest("tr"));
      moveFocus(target, row[(row.indexOf(target) + step + row.length) % row.length]);
    }
    event.preventDefault();
  });
  for (const head of all("thead")) all("button", head).slice(1).forEach((button) => button.setAttribute("tabindex", "-1"));
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("focusin", (event) => {
    const mark = event.target.closest?.("[data-value]");
    if (mark) describe(mark);
  });
  document.addEventListener("focusout", (event) => { if (event.target.closest?.("[data-value]")) hideTooltip(); });
  document.addEventListener("scroll", () => {
    const mark = document.activeElement?.closest?.("[data-value]");
    if (mark && !tooltip.hidden) describe(mark);
    else hideTooltip();
  }, true);

  // Printing opens what is folded, except further tables, which would be most of the paper, and shows every series.
  let folded = [];
  let hidden = [];
  addEventListener("beforeprint", () => {
    hideTooltip();
    folded = all("details:not([open]):not(.others)");
    folded.forEach((one) => { one.open = true; });
    hidden = all('svg:not(.narrow) .entry[aria-pressed="false"]');
    hidden.forEach(toggle);
  });
  addEventListener("afterprint", () => {
    folded.forEach((one) => { one.open = false; });
    hidden.forEach(toggle);
  });

  // Another language or theme: see controls.js
  document.addEventListener("chosen", () => {
    all('[data-value][tabindex="0"]').forEach(nameMark);
    hideTooltip();
  });
  all('[data-value][tabindex="0"]').forEach(nameMark);
  reveal(location.hash);
})();

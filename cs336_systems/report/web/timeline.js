"use strict";
(() => {
  const element = (id) => document.getElementById(id);
  const data = JSON.parse(element("data").textContent);
  const { edges, moments, blocks, words, phases, peak, unit } = data;
  const labels = data.labels.map(([name, color]) => ({ name, color, visible: true }));
  const series = data.changes.map(runningSums);
  const [first, last] = [Int32Array.from(blocks.first), Int32Array.from(blocks.last)];
  const sizes = Float64Array.from(blocks.size);
  const blocksOf = labels.map((_, label) => Int32Array.from(sizes.keys()).filter((i) => blocks.label[i] === label));
  const endingOf = blocksOf.map((own) => own.slice().sort((a, b) => last[a] - last[b]));
  const place = new Int32Array(sizes.length); // index of a block among the blocks of its label
  blocksOf.forEach((own) => own.forEach((block, index) => { place[block] = index; }));
  const whole = { start: edges[0], end: edges[edges.length - 1] };
  const shortest = Math.min(100, whole.end - whole.start); // nanoseconds: the narrowest view
  // The visible part of the chart's height, from `low` to `high`, both between 0 and 1.
  const wholeHeight = { low: 0, high: 1 };
  const view = { ...whole, ...wholeHeight };

  const smallestOutlined = 2; // pixels: the edges of a lower block would hide its colour
  const leastDrag = 5; // pixels: a shorter drag is a click
  const leastTallDrag = 40; // pixels: a drag at least this tall also zooms in memory
  const margin = { left: 58, right: 14, top: 42, bottom: 40 };
  const band = { top: 17, bottom: 37 };
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const chart = element("chart");
  const pointer = element("pointer");
  const tooltip = element("tooltip");
  const below = element("picture").getContext("2d");
  const above = pointer.getContext("2d");

  // Computed by `layOut` from the view, the size of the chart and the visible labels.
  let width = 0;
  let height = 0;
  let plot = { left: 0, right: 0, top: 0, bottom: 0 };
  let most = 1; // bytes at the top of the plot
  let runs = []; // consecutive columns that show the same moment: {moment, left, right}
  let dragged = null; // {from, to}, each [x, y], while the pointer selects a range

  function runningSums(changes) {
    const sums = new Float64Array(changes.length); // exact to 2^53 bytes
    let sum = 0;
    changes.forEach((change, index) => { sums[index] = sum += change; });
    return sums;
  }

  // Text: both languages, or one string that serves for both

  const phrases = {
    en: {
      axis: "ms of host time since the step began",
      peak: (bytes) => `peak ${bytes}`,
      range: (from, to) => `${from} to ${to}`,
      and: (one, other) => `${one}, ${other}`,
      total: (bytes) => `total ${bytes}`,
      label: (name, bytes) => `${name}: ${bytes}`,
      merged: "here: small blocks, drawn together",
      block: (bytes) => `block of ${bytes}`,
      from: (time) => `from ${time}`,
      alive: (phase, times) => `alive: ${phase} (${times})`,
    },
    zh: {
      axis: "自该步开始的主机时间（ms）",
      peak: (bytes) => `峰值 ${bytes}`,
      range: (from, to) => `${from} 到 ${to}`,
      and: (one, other) => `${one}，${other}`,
      total: (bytes) => `总计 ${bytes}`,
      label: (name, bytes) => `${name}：${bytes}`,
      merged: "此处：多个小块，合并画出",
      block: (bytes) => `块：${bytes}`,
      from: (time) => `自 ${time} 起`,
      alive: (phase, times) => `存活：${phase}（${times}）`,
    },
  };
  const language = () => document.documentElement.dataset.language;
  const said = (text) => (Array.isArray(text) ? text[language() === "zh" ? 1 : 0] : text);
  const phrase = (name, ...values) => {
    const found = phrases[language()][name];
    return values.length ? found(...values) : found;
  };

  const milliseconds = (time, digits = 2) => (time / 1e6).toFixed(digits);

  function size(bytes) {
    for (const [name, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (bytes >= scale) return `${(bytes / scale).toFixed(2)} ${name}`;
    }
    return `${Math.round(bytes)} B`;
  }

  function phaseAt(time) {
    const found = phases.findLast(([, start, end]) => start <= time && time < end);
    return found ? said(found[0]) : "";
  }

  // Layout

  const xOf = (time) => plot.left + (time - view.start) / (view.end - view.start) * (plot.right - plot.left);
  const timeOf = (x) => view.start + (x - plot.left) / (plot.right - plot.left) * (view.end - view.start);
  const yOf = (bytes) => plot.bottom - (bytes / most - view.low) / (view.high - view.low) * (plot.bottom - plot.top);
  const shareOf = (y) => view.low + (plot.bottom - y) / (plot.bottom - plot.top) * (view.high - view.low);
  const inPlot = ([x, y]) => [
    Math.max(plot.left, Math.min(x, plot.right)),
    Math.max(plot.top, Math.min(y, plot.bottom)),
  ];

  function layOut() {
    const box = chart.getBoundingClientRect();
    [width, height] = [box.width, box.height];
    plot = { left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
    const totals = visibleTotals();
    most = (totals.reduce((a, b) => Math.max(a, b), 0) || 1) * 1.1; // leaves room for the label of the peak
    runs = columnsOf(totals);
  }

  function visibleTotals() {
    const totals = new Float64Array(moments.length);
    labels.forEach((label, index) => {
      if (label.visible) series[index].forEach((bytes, moment) => { totals[moment] += bytes; });
    });
    return totals;
  }

  // A column that covers several moments shows the one with the most memory, so no short peak is lost.
  function columnsOf(totals) {
    const found = [];
    const step = 1 / devicePixelRatio;
    let moment = Math.max(0, firstAfter(edges, view.start) - 1);
    for (let left = plot.left; left < plot.right; left += step) {
      const right = Math.min(left + step, plot.right);
      const [start, end] = [timeOf(left), timeOf(right)];
      while (moment + 1 < moments.length && edges[moment + 1] <= start) moment++;
      let fullest = moment;
      for (let next = moment + 1; next < moments.length && edges[next] < end; next++) {
        if (totals[next] > totals[fullest]) fullest = next;
      }
      const previous = found[found.length - 1];
      if (previous && previous.moment === fullest) previous.right = right;
      else found.push({ moment: fullest, left, right });
    }
    return found;
  }

  function firstAfter(sorted, value) {
    let [low, high] = [0, sorted.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] > value) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  function bytesBelow(label, moment) {
    let sum = 0;
    for (let lower = 0; lower < label; lower++) if (labels[lower].visible) sum += series[lower][moment];
    return sum;
  }

  // A Fenwick tree: updates and prefix sums in logarithmic time. The height of a block depends on all blocks below it;
  // adding them up for every column would slow down each frame.
  class Row {
    constructor(length) {
      this.sums = new Float64Array(length + 1);
    }

    add(index, amount) {
      for (let at = index + 1; at < this.sums.length; at += at & -at) this.sums[at] += amount;
    }

    sumBefore(index) {
      let sum = 0;
      for (let at = index; at > 0; at -= at & -at) sum += this.sums[at];
      return sum;
    }
  }

  // In the area of a label, merged blocks lie at the bottom and individual blocks above them, oldest first; when one
  // ends, the blocks above it move down. Calls `visit(run, block, bottom, top, begins, ends)` for each chosen block
  // (ordered by start) and each run in which it is alive; bottom and top are in bytes.
  function visitBlocks(label, runs, chosen, visit) {
    if (!chosen.length) return;
    const [own, ending] = [blocksOf[label], endingOf[label]];
    const row = new Row(own.length);
    let alive = [];
    let [began, ended, met] = [0, 0, 0];
    runs.forEach((run, index) => {
      const { moment } = run;
      const before = index ? runs[index - 1].moment : moment;
      const after = index + 1 < runs.length ? runs[index + 1].moment : moment;
      for (; began < own.length && first[own[began]] <= moment; began++) row.add(began, sizes[own[began]]);
      for (; ended < own.length && last[ending[ended]] <= moment; ended++) {
        row.add(place[ending[ended]], -sizes[ending[ended]]);
      }
      while (met < chosen.length && first[chosen[met]] <= moment) alive.push(chosen[met++]);
      alive = alive.filter((block) => moment < last[block]);
      const lowest = bytesBelow(label, moment) + series[label][moment] - row.sumBefore(own.length);
      for (const block of alive) {
        const bottom = lowest + row.sumBefore(place[block]);
        visit(run, block, bottom, bottom + sizes[block], before < first[block], last[block] <= after);
      }
    });
  }

  // Drawing

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function prepare(context) {
    const { canvas } = context;
    const [across, down] = [Math.round(width * devicePixelRatio), Math.round(height * devicePixelRatio)];
    if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = font;
    context.textBaseline = "middle";
  }

  function draw() {
    if (!chart.offsetWidth) return; // hidden: nothing to draw
    layOut();
    prepare(below);
    drawGrid();
    below.save();
    below.beginPath();
    below.rect(plot.left, plot.top, plot.right - plot.left, plot.bottom - plot.top);
    below.clip();
    labels.forEach((label, index) => {
      if (label.visible) {
        drawArea(index);
        drawBlockEdges(index);
      }
    });
    drawOutline();
    below.restore();
    drawPhases();
    drawPeak();
    drawPointer(null);
    tooltip.hidden = true;
    const times = `${phrase("range", milliseconds(view.start), milliseconds(view.end))} ms`;
    const memory = phrase("range", size(view.low * most), size(view.high * most));
    element("range").textContent = showsFullHeight() ? times : phrase("and", times, memory);
  }

  // Ticks are multiples of 1, 2 or 5 times a power of ten.
  function ticks(start, end, count) {
    const raw = (end - start) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let index = Math.ceil(start / step); index * step <= end; index++) {
      found.push([index * step, (index * step).toFixed(Math.min(digits, 20))]);
    }
    return found;
  }

  function drawGrid() {
    below.fillStyle = color("--muted");
    below.strokeStyle = color("--line");
    below.lineWidth = 1;
    below.beginPath();
    below.textAlign = "right";
    const scale = most / unit.bytes;
    for (const [value, text] of ticks(view.low * scale, view.high * scale, (plot.bottom - plot.top) / 55)) {
      const y = yOf(value * unit.bytes);
      below.moveTo(plot.left, y);
      below.lineTo(plot.right, y);
      below.fillText(text, plot.left - 8, y);
    }
    below.stroke();
    below.fillText(unit.name, plot.left - 8, (band.top + band.bottom) / 2);
    below.textAlign = "center";
    for (const [value, text] of ticks(view.start / 1e6, view.end / 1e6, (plot.right - plot.left) / 70)) {
      const x = xOf(value * 1e6);
      below.fillRect(x, plot.bottom, 1, 5);
      below.fillText(text, Math.min(x, width - below.measureText(text).width / 2), plot.bottom + 14);
    }
    below.fillText(phrase("axis"), (plot.left + plot.right) / 2, height - 9);
  }

  function drawArea(label) {
    const bottoms = runs.map((run) => bytesBelow(label, run.moment));
    below.beginPath();
    runs.forEach((run, index) => {
      const y = yOf(bottoms[index] + series[label][run.moment]);
      below.lineTo(run.left, y);
      below.lineTo(run.right, y);
    });
    for (let index = runs.length - 1; index >= 0; index--) {
      const y = yOf(bottoms[index]);
      below.lineTo(runs[index].right, y);
      below.lineTo(runs[index].left, y);
    }
    below.closePath();
    below.fillStyle = labels[label].color;
    below.fill();
  }

  // An outline around the whole stack: yellow on white would fade into the page.
  function drawOutline() {
    below.beginPath();
    for (const { moment, left, right } of runs) {
      const y = yOf(bytesBelow(labels.length, moment));
      below.lineTo(left, y);
      below.lineTo(right, y);
    }
    below.strokeStyle = color("--mark");
    below.globalAlpha = 0.5;
    below.lineWidth = 0.75;
    below.stroke();
    below.globalAlpha = 1;
  }

  // Lines in the page's colour separate the blocks. A line continues until the bottom of its block moves.
  function drawBlockEdges(label) {
    const lineLeft = new Float64Array(sizes.length);
    const lineY = new Float64Array(sizes.length).fill(NaN); // y of the line being drawn under a block
    const pixel = most * (view.high - view.low) / (plot.bottom - plot.top);
    const finish = (block, right) => {
      if (Number.isNaN(lineY[block])) return;
      const thickness = Math.min(1, sizes[block] / pixel / 4); // a thin block keeps most of its colour
      below.fillRect(lineLeft[block], lineY[block] - thickness / 2, right - lineLeft[block], thickness);
      lineY[block] = NaN;
    };
    below.fillStyle = color("--page");
    below.globalAlpha = 0.6;
    const large = blocksOf[label].filter((block) => sizes[block] >= smallestOutlined * pixel);
    visitBlocks(label, runs, large, (run, block, bottom, top, begins, ends) => {
      const [y, upper] = [yOf(bottom), yOf(top)];
      if (y < plot.top || upper > plot.bottom) {
        finish(block, run.left);
        return;
      }
      if (lineY[block] !== y) {
        finish(block, run.left);
        [lineLeft[block], lineY[block]] = [run.left, y];
      }
      if (begins) below.fillRect(run.left, upper, 1, y - upper);
      if (ends) below.fillRect(run.right - 1, upper, 1, y - upper);
      if (ends || run === runs[runs.length - 1]) finish(block, run.right);
    });
    below.globalAlpha = 1;
  }

  // A name wider than its band is written above it, unless that space is taken.
  function drawPhases() {
    let free = 0; // x from which the space above the bands is free
    phases.forEach(([text, start, end], index) => {
      const [left, right] = [Math.max(plot.left, xOf(start)), Math.min(plot.right, xOf(end))];
      if (right <= left) return;
      below.fillStyle = color(index % 2 ? "--other-band" : "--band");
      below.fillRect(left, band.top, right - left, band.bottom - band.top);
      below.globalAlpha = 0.35;
      below.fillStyle = color("--text");
      if (start > view.start) below.fillRect(left, band.bottom, 1, plot.bottom - band.bottom);
      below.globalAlpha = 1;
      const name = said(text);
      const wide = below.measureText(name).width;
      const middle = Math.min((left + right) / 2, width - wide / 2);
      const above = wide > right - left - 6;
      if (above && middle - wide / 2 < free) return;
      below.textAlign = "center";
      below.fillText(name, middle, above ? band.top - 8 : (band.top + band.bottom) / 2 + 0.5);
      if (above) free = middle + wide / 2 + 6;
    });
  }

  function drawPeak() {
    const x = xOf(peak.time);
    if (x < plot.left || x > plot.right) return;
    below.strokeStyle = below.fillStyle = color("--mark");
    below.lineWidth = 1.5;
    below.setLineDash([5, 3]);
    below.beginPath();
    below.moveTo(x, plot.top);
    below.lineTo(x, plot.bottom);
    below.stroke();
    below.setLineDash([]);
    const text = phrase("peak", size(peak.bytes));
    const fits = x + 8 + below.measureText(text).width < plot.right;
    below.font = `600 ${font}`;
    below.textAlign = fits ? "left" : "right";
    below.strokeStyle = color("--page"); // a halo separates the text from the lines behind it
    below.lineWidth = 4;
    below.strokeText(text, fits ? x + 6 : x - 6, plot.top + 8);
    below.fillText(text, fits ? x + 6 : x - 6, plot.top + 8);
    below.font = font;
  }

  // The pointer has a canvas of its own, so that moving it redraws nothing else.

  function pick(x, y) {
    if (x < plot.left || x >= plot.right || y < 0 || y > plot.bottom) return null;
    const run = runs[Math.max(0, firstAfter(runs.map(({ left }) => left), x) - 1)];
    if (!run) return null;
    const { moment } = run;
    const pointed = timeOf(x);
    const held = edges[moment] <= pointed && pointed < edges[moment + 1];
    const found = { moment, time: held ? pointed : moments[moment], label: null, block: null };
    const bytes = shareOf(y) * most;
    labels.forEach((label, index) => {
      const bottom = bytesBelow(index, moment);
      if (label.visible && bottom <= bytes && bytes < bottom + series[index][moment]) found.label = index;
    });
    if (found.label === null) return found;
    visitBlocks(found.label, [run], blocksOf[found.label], (_, block, bottom, top) => {
      if (bottom <= bytes && bytes < top) found.block = block;
    });
    return found;
  }

  function drawPointer(found, x) {
    prepare(above);
    if (dragged && selection()) {
      const { left, right, top, bottom } = selection();
      above.fillStyle = color("--mark");
      above.globalAlpha = 0.18;
      above.fillRect(left, top, right - left, bottom - top);
      above.globalAlpha = 1;
    }
    if (!found) return;
    above.fillStyle = color("--mark");
    above.globalAlpha = 0.5;
    above.fillRect(x, plot.top, 1, plot.bottom - plot.top);
    above.globalAlpha = 1;
    if (found.block !== null) outline(found.label, found.block);
  }

  function outline(label, wanted) {
    const upper = [];
    const lower = [];
    visitBlocks(label, runs, [wanted], (run, _, bottom, top) => {
      upper.push([run.left, yOf(top)], [run.right, yOf(top)]);
      lower.push([run.left, yOf(bottom)], [run.right, yOf(bottom)]);
    });
    above.save();
    above.beginPath();
    above.rect(plot.left, plot.top, plot.right - plot.left, plot.bottom - plot.top);
    above.clip();
    above.beginPath();
    for (const [x, y] of [...upper, ...lower.reverse()]) above.lineTo(x, y);
    above.closePath();
    above.strokeStyle = color("--mark");
    above.lineWidth = 2;
    above.stroke();
    above.globalAlpha = 0.2;
    above.fill();
    above.restore();
  }

  function describe(found) {
    const total = series.reduce((sum, row) => sum + row[found.moment], 0);
    const phase = phaseAt(found.time);
    const time = `${milliseconds(found.time, 3)} ms`;
    const lines = [
      [phase ? phrase("and", time, phase) : time],
      [phrase("total", `${(total / unit.bytes).toFixed(3)} ${unit.name}`)],
    ];
    if (found.label === null) return lines;
    lines.push([phrase("label", said(labels[found.label].name), size(series[found.label][found.moment])), "name"]);
    if (found.block === null) {
      lines.push([phrase("merged"), "faint"]);
      return lines;
    }
    const word = (column) => said(words[blocks[column][found.block]]);
    const start = blocks.start[found.block];
    const end = blocks.end[found.block];
    const times = end === null
      ? phrase("from", `${milliseconds(start)} ms`)
      : `${phrase("range", milliseconds(start), milliseconds(end))} ms`;
    lines.push([phrase("block", size(blocks.size[found.block])), "name"]);
    lines.push([word("what")], [word("module")], [word("line")]);
    lines.push([phrase("alive", word("lifetime"), times), "faint"]);
    return lines.filter(([text]) => text);
  }

  function showTooltip(found, x, y) {
    tooltip.hidden = !found;
    if (!found) return;
    tooltip.replaceChildren(...describe(found).map(([text, kind = ""]) => {
      const line = document.createElement("div");
      line.textContent = text;
      line.className = kind;
      return line;
    }));
    const [across, down] = [tooltip.offsetWidth, tooltip.offsetHeight];
    const left = x + 14 + across <= width ? x + 14 : x - 14 - across;
    const fits = chart.getBoundingClientRect().top + y + 14 + down <= innerHeight;
    tooltip.style.left = `${Math.max(0, Math.min(left, width - across))}px`;
    tooltip.style.top = `${fits ? y + 14 : y - 14 - down}px`;
  }

  function position(event) {
    const box = pointer.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function point(event) {
    const [x, y] = position(event);
    if (dragged) dragged.to = inPlot([x, y]);
    const found = dragged && selection() ? null : pick(x, y);
    drawPointer(found, x);
    showTooltip(found, x, y);
  }

  // The selected part of the plot: its full height unless the drag was tall; null for a click.
  function selection() {
    const [left, right] = [dragged.from[0], dragged.to[0]].sort((a, b) => a - b);
    const [top, bottom] = [dragged.from[1], dragged.to[1]].sort((a, b) => a - b);
    if (right - left < leastDrag) return null;
    if (bottom - top < leastTallDrag) return { left, right, top: plot.top, bottom: plot.bottom };
    return { left, right, top, bottom };
  }

  // Zooming and panning

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true; // events arrive faster than frames
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  }

  function show(start, end) {
    const span = Math.max(shortest, Math.min(end - start, whole.end - whole.start));
    view.start = Math.max(whole.start, Math.min(start, whole.end - span));
    view.end = view.start + span;
    redraw();
  }

  function showHeight(low, high) {
    const span = Math.max(1e-4, Math.min(high - low, 1));
    view.low = Math.max(0, Math.min(low, 1 - span));
    view.high = view.low + span;
    redraw();
  }

  function zoom(factor, around = (view.start + view.end) / 2) {
    show(around - (around - view.start) * factor, around + (view.end - around) * factor);
  }

  function zoomHeight(factor, around = (view.low + view.high) / 2) {
    showHeight(around - (around - view.low) * factor, around + (view.high - around) * factor);
  }

  function pan(share) {
    const by = (view.end - view.start) * share;
    show(view.start + by, view.end + by);
  }

  function rise(share) {
    const by = (view.high - view.low) * share;
    showHeight(view.low + by, view.high + by);
  }

  function reset() {
    show(whole.start, whole.end);
    showHeight(wholeHeight.low, wholeHeight.high);
  }

  const showsFullHeight = () => view.high - view.low === 1;
  const showsAll = () => view.end - view.start === whole.end - whole.start && showsFullHeight();

  function onWheel(event) {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const direction = Math.sign(sideways ? event.deltaX : event.deltaY);
    if (showsAll() && (direction > 0 || sideways && !event.shiftKey)) return; // the whole step is visible: the page scrolls
    event.preventDefault();
    const [x, y] = inPlot(position(event));
    if (event.shiftKey) zoomHeight(1.25 ** direction, shareOf(y)); // some browsers report a wheel with shift as horizontal
    else if (sideways) pan(0.05 * direction);
    else zoom(1.25 ** direction, timeOf(x));
  }

  const keys = {
    ArrowLeft: () => pan(-0.1),
    ArrowRight: () => pan(0.1),
    ArrowUp: (shift) => (shift ? zoomHeight(1 / 1.5) : rise(0.1)),
    ArrowDown: (shift) => (shift ? zoomHeight(1.5) : rise(-0.1)),
    "+": () => zoom(1 / 1.5),
    "=": () => zoom(1 / 1.5), // the same key without shift
    "-": () => zoom(1.5),
    Escape: reset,
  };

  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    const vertical = event.key === "ArrowUp" || event.key === "ArrowDown";
    if (vertical && !event.shiftKey && showsFullHeight()) return; // the whole step is visible: the page scrolls
    event.preventDefault();
    dragged = null;
    keys[event.key](event.shiftKey);
  }

  function endDrag() {
    const chosen = dragged && selection();
    dragged = null;
    if (!chosen) return;
    const [low, high] = [shareOf(chosen.bottom), shareOf(chosen.top)];
    show(timeOf(chosen.left), timeOf(chosen.right));
    showHeight(low, high);
  }

  // The legend

  function addLegend() {
    labels.forEach((label) => {
      const button = document.createElement("button");
      const swatch = document.createElement("span");
      const name = document.createElement("span");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      swatch.className = "swatch";
      swatch.style.background = label.color;
      label.shown = name;
      button.append(swatch, name);
      button.addEventListener("click", () => {
        label.visible = !label.visible;
        button.setAttribute("aria-pressed", String(label.visible));
        redraw();
      });
      element("legend").append(button);
    });
  }

  function nameLegend() {
    for (const label of labels) label.shown.textContent = said(label.name);
  }

  function listen() {
    pointer.addEventListener("pointermove", point);
    pointer.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "touch") return; // lifting a finger keeps the tooltip
      drawPointer(null);
      tooltip.hidden = true;
    });
    pointer.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const from = inPlot(position(event));
      dragged = { from, to: from };
      pointer.setPointerCapture(event.pointerId);
      point(event);
    });
    pointer.addEventListener("pointerup", endDrag);
    pointer.addEventListener("pointercancel", () => {
      dragged = null;
      drawPointer(null);
    });
    pointer.addEventListener("dblclick", reset);
    pointer.addEventListener("wheel", onWheel, { passive: false });
    pointer.addEventListener("keydown", press);
    element("zoom-in").addEventListener("click", () => zoom(1 / 1.5));
    element("zoom-out").addEventListener("click", () => zoom(1.5));
    element("earlier").addEventListener("click", () => pan(-0.25));
    element("later").addEventListener("click", () => pan(0.25));
    element("reset").addEventListener("click", reset);
    document.addEventListener("chosen", () => { // another language or theme
      nameLegend();
      redraw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new ResizeObserver(redraw).observe(chart);
  }

  window.timelinePage = {
    labelAt(clientX, clientY) {
      const found = pick(...position({ clientX, clientY }));
      return found && found.label !== null ? said(labels[found.label].name) : null;
    },
    view: () => ({ start: view.start / 1e9, end: view.end / 1e9 }), // seconds
    peak: () => peak.bytes,
  };

  addLegend();
  nameLegend();
  listen();
  redraw();
})();

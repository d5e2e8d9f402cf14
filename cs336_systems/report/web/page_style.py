"""What every page of a report looks like: on screens wide and narrow, light and dark, and on paper."""

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
    --focus: #0060df; --group: #a9aeb6; --shadow: #1b1d2038; {_colors(LIGHT)}"""
_DARK_VARIABLES = f"""color-scheme: dark;
    --page: #16181b; --panel: #202327; --text: #e9eaec; --muted: #a9afb8; --line: #3a3f46; --link: #8ab8ff;
    --focus: #7fb4ff; --group: #6a717b; --shadow: #000000b0; {_colors(DARK)}"""

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
  html { scroll-padding-top: 16px; --bar: 0px; }
  body {
    margin: 0; background: var(--page); color: var(--text);
    font: 15px/1.6 system-ui, "Noto Sans", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif;
  }
  a { color: var(--link); text-underline-offset: 3px; text-decoration-thickness: 1px; }
  h1, h2, h3, p, li, dd { overflow-wrap: anywhere; }
  h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.01em; margin: 0; }
  h2 { font-size: 1.5rem; line-height: 1.3; letter-spacing: -0.005em; margin: 0; text-wrap: balance; }
  h3 { font-size: 1rem; line-height: 1.4; margin: 0; }
  button, select {
    font: inherit; font-size: 14px; color: var(--text); background: var(--page); border: 1px solid var(--line);
    border-radius: 6px; min-height: 32px; padding: 2px 10px; cursor: pointer;
  }
  button:hover, select:hover { border-color: var(--muted); }
  :focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
  .skip { position: absolute; left: -9999px; }
  .skip:focus { left: 8px; top: 8px; z-index: 9; background: var(--page); padding: 6px 12px; }

  /* The page: a window of 1400 pixels leaves the main column 1152, two charts beside each other. */
  header, .layout { max-width: 1680px; margin: 0 auto; padding: 0 clamp(16px, (100vw - 1400px) / 3 + 16px, 48px); }
  header { padding-top: 28px; padding-bottom: 18px; }
  .top { display: flex; flex-wrap: wrap; gap: 10px 24px; justify-content: space-between; align-items: flex-start; }
  .controls { display: none; gap: 8px; flex-wrap: wrap; }
  .js .controls { display: flex; }
  .facts { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 18px 0 0; font-size: 14px; }
  .facts div { min-width: 0; max-width: 26em; }
  .facts dt { color: var(--muted); font-size: 13px; line-height: 1.4; }
  .facts dd { margin: 0; font-variant-numeric: tabular-nums; }
  .layout { display: grid; grid-template-columns: 175px minmax(0, 1fr); gap: 24px; padding-bottom: 80px; }
  nav {
    position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; padding: 20px 0;
    font-size: 13px; line-height: 1.4; scrollbar-width: thin;
  }
  nav summary { font-weight: 600; padding: 4px 8px 8px; cursor: pointer; }
  nav ol { list-style: none; margin: 0; padding: 0; }
  nav a {
    display: block; padding: 4px 8px; color: var(--muted); text-decoration: none; overflow-wrap: anywhere;
    border-left: 2px solid var(--line);
  }
  nav a:hover { color: var(--text); background: var(--panel); }
  nav a[aria-current] { border-left-color: var(--link); color: var(--text); font-weight: 600; }
  .here { display: none; }
  main { min-width: 0; outline: none; container-type: inline-size; }
  section { padding: 44px 0 48px; border-top: 1px solid var(--line); }
  section:first-child { border-top: 0; padding-top: 16px; }
  .question { color: var(--muted); margin: 4px 0 0; font-size: 1.05rem; text-wrap: pretty; }

  /* In short */
  .brief { list-style: none; margin: 18px 0 0; padding: 0; }
  .brief li {
    display: grid; grid-template-columns: 250px minmax(0, 1fr); gap: 2px 24px; padding: 8px 0;
    border-top: 1px solid var(--line);
  }
  .brief a { font-weight: 600; text-decoration: none; }
  .brief a:hover { text-decoration: underline; }

  /* Findings and charts: cells of a grid. What is left over is never a single chart where findings can be beside it. */
  .board { display: grid; grid-template-columns: minmax(0, 1fr); gap: 36px 20px; margin: 22px 0 36px; }
  @container (min-width: 1152px) { /* two charts with letters of 11 pixels */
    .board:has(> :nth-child(2)) { grid-template-columns: repeat(2, minmax(0, 1fr)); align-items: start; }
    .findings.whole { grid-column: 1 / -1; }
    .findings:not(.whole) { position: sticky; top: 20px; } /* beside a tall chart */
  }
  .findings {
    margin: 0; padding: 16px 20px; list-style: none; background: var(--panel); border-radius: 10px;
    text-wrap: pretty; font-variant-numeric: tabular-nums;
  }
  .findings li + li { margin-top: 8px; padding-top: 8px; border-top: 1px solid var(--line); }
  .findings li:first-child { font-size: 1.1rem; line-height: 1.5; }
  figure { margin: 0; width: 100%; max-width: 820px; min-width: 0; }
  figcaption { font-weight: 600; margin-bottom: 10px; overflow-wrap: anywhere; }
  .plot { overflow-x: auto; padding: 3px; margin: -3px; scrollbar-width: thin; }
  .chart { display: block; min-width: 566px; height: auto; overflow: visible; font-variant-numeric: tabular-nums; }
  .chart.narrow { display: none; } /* a phone's */
  @media screen and (max-width: 639px) {
    .chart { display: none; }
    .chart.narrow { display: block; min-width: 0; }
  }
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

  /* Tables */
  .table { margin: 30px 0 0; }
  .table h3 { margin-bottom: 8px; }
  .foot { display: flex; flex-wrap: wrap; gap: 4px 20px; align-items: center; margin-top: 6px; }
  small { color: var(--muted); font-size: 13px; font-weight: 400; margin-left: 6px; }
  /* The letters, not the border that cannot be seen, stand below the table's edge. */
  .copy { display: none; gap: 2px; flex-wrap: wrap; align-items: center; margin-left: -9px; }
  .js .copy { display: flex; }
  .copy button { font-size: 13px; min-height: 28px; padding: 1px 8px; color: var(--muted); border-color: transparent; }
  .copy button:hover { color: var(--text); border-color: var(--line); }
  .copy output { font-size: 13px; color: var(--muted); margin-left: 6px; }
  .frame { position: relative; width: fit-content; max-width: 100%; }
  figure .frame { width: auto; }
  .scroll { overflow: auto; scrollbar-width: thin; border: 1px solid var(--line); border-radius: 8px; }
  /* What is no scroll area lets the headings of a long table stay at the top of the window. */
  .fits > .scroll { overflow: clip; }
  .fits thead th { top: var(--bar); }
  /* A shadow where a table or chart goes on; to the left behind the column that stays. */
  .frame::before, .frame::after {
    content: ""; position: absolute; z-index: 3; top: 1px; bottom: 1px; width: 22px; pointer-events: none; opacity: 0;
  }
  .frame::before {
    left: calc(var(--first, 0px) + 1px); background: linear-gradient(to right, var(--shadow), transparent);
  }
  .frame::after {
    right: 1px; background: linear-gradient(to left, var(--shadow), transparent); border-radius: 0 8px 8px 0;
  }
  figure .frame::before { left: -3px; } /* as its .plot */
  figure .frame::after { right: -3px; }
  .cut-left::before, .cut-right::after { opacity: 1; }
  table { border-collapse: separate; border-spacing: 0; font-size: 13.5px; font-variant-numeric: tabular-nums; }
  th, td {
    padding: 5px 13px 5px 9px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line);
    background: var(--page); line-height: 1.45;
  }
  .w { white-space: normal; min-width: 13em; overflow-wrap: anywhere; }
  tbody th { font-weight: inherit; }
  /* A width of its own: a scrolled table would else give the names the least it can. */
  tbody th div { width: max-content; max-width: min(380px, 42vw); white-space: normal; overflow-wrap: anywhere; }
  .r div { margin-left: auto; }
  tbody tr:last-child > * { border-bottom: 0; }
  /* Rows that begin alike are a group (the script says where one begins): its name stands out once. */
  .grouped tbody tr:not(.first) > :first-child { color: var(--muted); }
  .grouped tbody tr.first:not(:first-child) > * { box-shadow: inset 0 1px var(--group); }
  tbody tr:hover > * { background: var(--panel); }
  thead th { position: sticky; top: 0; z-index: 1; background: var(--panel); padding: 0; vertical-align: bottom; }
  thead button {
    position: relative; width: 100%; min-height: 34px; border: 0; border-radius: 0; background: none;
    font-size: 13px; line-height: 1.3; text-align: inherit; font-weight: 600; padding: 6px 13px 6px 9px;
    white-space: normal;
  }
  thead .zh { word-break: keep-all; } /* else a narrow column has one character to a line */
  thead button:focus-visible { outline-offset: -2px; }
  /* In the padding: beside the name it would widen every column. */
  thead button::after {
    content: "↕"; position: absolute; right: 2px; bottom: 7px; color: var(--muted); font-size: 11px; font-weight: 400;
  }
  thead [aria-sort="ascending"] button::after { content: "↑"; color: var(--text); font-weight: 700; }
  thead [aria-sort="descending"] button::after { content: "↓"; color: var(--text); font-weight: 700; }
  tr > :first-child { position: sticky; left: 0; z-index: 1; border-right: 1px solid var(--line); }
  thead tr > :first-child { z-index: 2; }
  .r { text-align: right; }
  .rows { display: none; }
  .js .rows { display: inline-block; }
  .rows[aria-expanded="true"] .all, .rows[aria-expanded="false"] .few { display: none; }
  .notes { margin: 6px 0 0; padding-left: 18px; font-size: 13.5px; color: var(--muted); max-width: 100ch; }
  .others { margin-top: 30px; }
  .others > summary {
    width: fit-content; padding: 5px 14px 5px 10px; font-weight: 600; cursor: pointer; border: 1px solid var(--line);
    border-radius: 8px; background: var(--panel);
  }
  .others > summary:hover { border-color: var(--muted); }
  .others ol { margin: 14px 0 0; padding-left: 24px; columns: 440px 2; column-gap: 32px; font-size: 14px; }
  .others li { break-inside: avoid; }
  .others li a:not(:hover) { text-decoration: none; }
  .see { margin-top: 30px; }
  .links { padding-left: 20px; margin: 6px 0 0; }
  .missing code { overflow-wrap: anywhere; background: var(--panel); padding: 1px 5px; border-radius: 4px; }
  code { font-family: ui-monospace, monospace; font-size: 0.93em; }

  @media screen {
    .dense :is(td, tbody th, thead button) { padding-left: 6px; padding-right: 10px; font-size: 12.5px; }
    /* All rows are laid out, so that the columns stay as wide as they are and a search finds what is below the cut. */
    .js .short .scroll { max-height: var(--fold, 30em); overflow: auto hidden; }
    .js .short .fits > .scroll { overflow: hidden; }
    .js .short .scroll { border-bottom-left-radius: 0; border-bottom-right-radius: 0; border-bottom-style: dashed; }
    .chart .off { display: none; }
    .entry[aria-pressed="false"] text { fill: var(--muted); text-decoration: line-through; }
    .entry[aria-pressed="false"] > :not(text):not(.hit) { opacity: 0.25; }
  }
  @media (min-width: 1560px) { .layout { grid-template-columns: 220px minmax(0, 1fr); gap: 40px; } }
  @media (min-width: 900px) { nav summary { list-style: none; pointer-events: none; } }
  @media (max-width: 899px) {
    html { scroll-padding-top: 56px; --bar: 42px; }
    h1 { font-size: 1.6rem; }
    h2 { font-size: 1.35rem; }
    header { padding-top: 18px; padding-bottom: 14px; }
    .layout { display: block; padding-bottom: 40px; }
    nav {
      top: 0; z-index: 4; max-height: none; margin: 0 -16px; padding: 0; overflow: visible; background: var(--page);
      border-block: 1px solid var(--line); font-size: 15px;
    }
    nav summary { padding: 9px 16px; height: 40px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
    nav ol { padding: 0 12px 10px; max-height: 70vh; overflow-y: auto; }
    nav a { padding: 7px 8px; }
    .here { display: inline; color: var(--muted); font-weight: 400; margin-left: 10px; }
    section { padding: 32px 0 36px; }
    .brief li { grid-template-columns: minmax(0, 1fr); padding: 9px 0; }
    .board { gap: 28px; margin: 18px 0 28px; }
    .findings { padding: 14px 16px; }
    h3 small { display: block; margin-left: 0; }
  }
  @media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
  @media print {
    .controls, .js .controls, .copy, .js .copy, nav, .skip, #tooltip, .rows, .js .rows { display: none; }
    body { font-size: 10pt; }
    header, .layout { display: block; max-width: none; padding: 0; }
    .board { display: block; }
    .findings, figure { margin: 12pt 0; }
    .frame { width: auto; }
    .frame::before, .frame::after { content: none; }
    .scroll, .fits > .scroll, .plot { overflow: visible; border: 0; }
    .chart { min-width: 0; }
    .chart rect { transform: none !important; }
    table { font-size: 8pt; }
    th, td { padding: 2px 5px; white-space: normal; }
    thead th, tr > :first-child { position: static; }
    thead button { padding: 2px 5px; font-size: inherit; min-height: 0; }
    .dense { font-size: 6pt; }
    .dense :is(td, tbody th, thead button) { padding: 1px 2px; }
    tbody th div { width: auto; }
    .w { min-width: 0; }
    thead button::after { content: none !important; }
    figure, tr, .findings { break-inside: avoid; }
    h2, h3, figcaption { break-after: avoid; }
    details::details-content { content-visibility: visible; height: auto; }
    .others > summary, .others ol { display: none; }
    a { color: inherit; }
  }
"""
)

"""Scripts that find what overlaps on a page, by the boxes of its elements in the browser's own fonts."""

WIDTHS = (1600, 1400, 1024, 768, 390)
"""Windows, from a large screen to a phone."""
_TOUCH = """
  const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const down = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  const found = [];
"""

OVERLAPS = f"""(() => {{ {_TOUCH}
  for (const svg of document.querySelectorAll("svg")) {{
    if (getComputedStyle(svg).display === "none") continue;
    const say = (text) => found.push(`${{svg.closest("figure").id}}: ${{text}}`);
    const view = svg.getBoundingClientRect();
    const turn = (e) => /rotate\\((-?\\d+)/.exec(e.getAttribute("transform"))?.[1] ?? "0";
    const texts = [...svg.querySelectorAll("text")]
      .filter((e) => e.textContent && e.checkVisibility() && turn(e) !== "-45")
      .map((e) => [e.textContent, e.getBoundingClientRect(), turn(e) === "-90"])
      .filter(([, box]) => box.width);
    const end = svg.querySelector(".grid")?.getBoundingClientRect().right;
    const bars = [...svg.querySelectorAll(".series:not(.off) rect")].map((e) => e.getBoundingClientRect())
      .map(({{ left, right, top, bottom }}) => ({{ left, right: Math.min(right, end), top, bottom }})); // some are cut
    texts.forEach(([text, a, turned], i) => {{
      if (a.left < view.left - 2 || a.right > view.right + 2 || a.top < view.top - 2 || a.bottom > view.bottom + 2) {{
        say(`${{text}} is outside`);
      }}
      // A line of text is higher than its letters.
      const [x, y] = turned ? [5, 1] : [1, 5];
      for (const [other, b] of texts.slice(i + 1)) {{
        if (across(a, b) > x && down(a, b) > y) say(`${{text}} on ${{other}}`);
      }}
      if (bars.some((b) => across(a, b) > x + 2 && down(a, b) > y + 2)) say(`${{text}} on a bar`);
    }});
  }}
  return found;
}})()"""
"""Texts of charts on each other, on bars, or outside of their drawing. Names at an angle of 45 degrees are left out."""

COLLISIONS = f"""(() => {{ {_TOUCH}
  const boxes = [...document.querySelectorAll(
    "header, nav, h2, h3, h4, figure, .table, .findings, .question, .numbers li, .trust, .others, #missing"
  )].filter((e) => e.checkVisibility()).map((e) => [e, e.getBoundingClientRect()]);
  boxes.forEach(([e, a], i) => boxes.slice(i + 1).forEach(([f, b]) => {{
    if (across(a, b) <= 1 || down(a, b) <= 1) return;
    if (!e.contains(f) && getComputedStyle(e).position !== "sticky") {{
      found.push(`${{e.tagName}} ${{e.id}} ${{e.className}} on ${{f.tagName}} ${{f.id}} ${{f.className}}`);
    }}
  }}));
  const wide = document.documentElement.scrollWidth - innerWidth;
  return wide > 0 ? [...found, `the page is ${{wide}} px too wide`] : found;
}})()"""
"""Figures, tables, findings and headings that overlap; the contents stay beside or above them."""

LAY_OUT = """document.querySelectorAll("main > section").forEach((e) => { e.style.contentVisibility = "visible"; })"""
"""Lays out what is off the screen, too."""

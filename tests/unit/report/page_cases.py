"""Documents for the tests of the page, from a realistic sample to hostile texts, and a reader of the HTML."""

import math
import random
import re
from html import unescape
from html.parser import HTMLParser

from cs336_systems.report.document import Chart, Document, Highlight, Limit, Link, Point, Section, Series
from cs336_systems.report.web.svg.labels import LINE, text_width
from cs336_systems.table import Column, Table
from cs336_systems.text import Text

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"' onload=alert(1) <!-- & \ud800"
LONG = "a very long name of a method that says everything there is to say about it, twice over " * 3
NAMES = ["x", "融合的层归一化与残差相加" * 6, LONG, "w" * 200, "void at::native::elementwise_kernel<128, 4>"]
OOM = Text("out of memory", "显存不足")
KINDS = {
    "lines": {"kind": "lines"},
    "lines-log": {"kind": "lines", "log_x": True, "log_y": True},
    "bars": {"kind": "bars"},
    "bars-log": {"kind": "bars", "log_y": True},
    "bars-horizontal": {"kind": "bars", "horizontal": True},
    "stacked": {"kind": "stacked"},
    "stacked-horizontal": {"kind": "stacked", "horizontal": True},
}
VOID = {"meta", "link", "rect", "path", "br", "img", "input"}
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


# Reading HTML and SVG


CELLS = ("td", "th")


class Page(HTMLParser):
    """Elements with their attributes and text. Parsing fails where elements do not nest; cells and rows of tables need
    no end tags. `classes`: those of an element and of all around it."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self._end_row()
        elif tag in CELLS and self.open[-1]["tag"] in CELLS:
            self.open.pop()
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, tag, attributes):
        given = dict(attributes)
        classes = {*(given.get("class") or "").split(), *(name for e in self.open for name in e["classes"])}
        place = {"within": [e["tag"] for e in self.open], "classes": classes}
        self.elements.append({"tag": tag, "text": "", **place, **given})

    def _end_row(self):
        """A row ends, and its last cell, where the next row begins or the table's body ends."""
        if self.open and self.open[-1]["tag"] in CELLS:
            self.open.pop()
        if self.open and self.open[-1]["tag"] == "tr":
            self.open.pop()

    def handle_endtag(self, tag):
        if tag == "tbody":
            self._end_row()
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag=None, **attributes):
        names = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            element
            for element in self.elements
            if tag in (None, element["tag"]) and all(element.get(name) == value for name, value in names.items())
        ]


def marks(drawing):
    """Every mark, with the name of its series, which its group has."""
    found, name = [], {}
    for element in Page(drawing).elements:
        if element["tag"] == "g" and "data-series" in element:
            name = {key: value for key, value in element.items() if key.startswith("data-series")}
        if "data-value" in element:
            found.append({**name, **element})
    return found


def coordinates(drawing):
    """Every number of an attribute that positions something."""
    found = re.findall(r' (?:x|y|width|height|d|transform|viewBox)="([^"]*)"', drawing)
    assert not re.search(r"nan|inf", " ".join(found))
    return [float(text) for value in found for text in re.findall(r"-?\d*\.?\d+(?:e-?\d+)?", value)]


def _with_own_anchors(group):
    """A group of texts whose anchor is that of the group."""
    assert "<g " not in group[2]
    return group[2].replace("<text", f"<text{group[1]}")


def boxes(drawing, language):
    """Text, left, right, top and bottom of every horizontal line of text, by the estimated width."""
    drawing = re.sub(r'<g [^>]*( text-anchor="\w+")>(.*?)</g>', _with_own_anchors, drawing)
    for element in re.finditer(r"<text ([^>]*)>(.*?)</text>", drawing):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', element[1]))
        shown = {"en", "zh"} & set(attributes.get("class", "").split()) or {language}
        if "transform" in attributes or language not in shown:
            continue
        lines = re.sub(r"<title>.*?</title>", "", element[2]).replace("</tspan>", "").split("<tspan")
        for i, line in enumerate(lines):
            text = unescape(line.split(">", 1)[-1] if i else line)
            width = text_width(text)
            shift = {"middle": width / 2, "end": width}.get(attributes.get("text-anchor", ""), 0)
            x, y = float(attributes["x"]) - shift, float(attributes["y"]) + i * LINE
            yield text, x, x + width, y - 11, y + 3


# Charts


def chart(kind="lines", series=None, **fields):
    points = [Point(x, y, std=0.5, n=10) for x, y in ((1, 2.0), (2, 5.0), (4, 3.0))]
    given = series if series is not None else [Series(Text("first", "第一"), points), Series(Text("second"), points)]
    return Chart("c", Text("Title", "标题"), kind, Text("size", "大小"), Text("time (ms)", "时间"), given, **fields)


def with_points(*points, kind="lines", **fields):
    return chart(kind, [Series(Text("only"), points)], **fields)


def long_names(kind, **fields):
    """Series and bars with the longest names, in a chart of any kind."""
    points = [Point(10.0**i if kind == "lines" else name, 1e6 * (i + 1)) for i, name in enumerate(NAMES)]
    series = [Series(Text(name, f"中文{name}"), points) for name in NAMES]
    return Chart("long", Text("t"), kind, Text("长" * 150), Text(LONG), series, **fields)


def scaling_chart(name="attention-time"):
    """Lines on logarithmic axes, with error bars, a fitted line, and lengths that ran out of memory."""

    def times(factor, limit=99):
        for i, length in enumerate(LENGTHS):
            y = factor * (0.05 + (length / 2048) ** 2)
            yield Point(length, y, std=y * 0.08, n=10) if i < limit else Point(length, math.nan, note=OOM)

    series = [
        Series(Text("PyTorch", "PyTorch 朴素实现"), list(times(4.0, 6))),
        Series(Text("compiled", "编译后"), list(times(2.2, 7))),
        Series(Text("FlashAttention-2 (Triton)", "FlashAttention-2(Triton)"), list(times(0.6))),
        Series(Text("quadratic fit", "二次拟合"), [Point(n, 0.6 * (0.05 + (n / 2048) ** 2)) for n in LENGTHS], True),
    ]
    title = Text("Attention, forward and backward, by sequence length", "注意力前向加反向的时间随序列长度的变化")
    axes = Text("sequence length", "序列长度"), Text("time (ms)", "时间(毫秒)")
    return Chart(name, title, "lines", *axes, series, log_x=True, log_y=True)


def step_chart(name="step-chart"):
    sizes = ("small", "medium", "large", "xl", "2.7B")
    series = [
        Series(Text(f"{precision}, eager", f"{precision},即时执行"),
               [*(Point(size, base * (2 + i) ** 1.6, std=base * 0.4, n=10) for i, size in enumerate(sizes[:-1])), last])
        for base, precision, last in ((12.0, "float32", Point("2.7B", math.nan, note=OOM)),
                                      (5.0, "bfloat16", Point("2.7B", 125.0, n=10)))
    ]  # fmt: skip
    bound = [Point(size, 2.0 * (i + 2)) for i, size in enumerate(sizes)]
    series.append(Series(Text("bound by memory traffic", "显存带宽下界"), bound, dashed=True))
    axes = Text("model", "模型"), Text("step time (ms)", "单步时间(毫秒)")
    return Chart(name, Text("Time of a step by model size", "各模型规模的单步时间"), "bars", *axes, series)


def memory_chart(name, horizontal=False):
    parts = (
        ("parameters", "参数"),
        ("gradients", "梯度"),
        ("optimizer state", "优化器状态"),
        ("temporary", "临时张量"),
    )
    names = ("one GPU", "DDP over 4 GPUs with buckets of 25 MB", "FSDP with activation checkpointing in every block")
    series = [
        Series(Text(*part), [Point(name, (1.2 + i) / (1 + k * 0.5)) for k, name in enumerate(names)])
        for i, part in enumerate(parts)
    ]
    axes = Text("method", "方法"), Text("memory (GiB)", "显存(GiB)")
    return Chart(name, Text("Peak memory by part", "显存峰值的组成"), "stacked", *axes, series, horizontal=horizontal)


def many_bars(name="ranks", count=28):
    points = [Point(f"rank {i} on host {i // 8}", 10 + i % 5, std=0.5) for i in range(count)]
    axes = Text("rank", "进程"), Text("wait (ms)", "等待(毫秒)")
    return Chart(name, Text("Wait by rank", "各进程的等待时间"), "bars", *axes, [Series(Text("all-reduce"), points)])


HAS = Limit(10.0, Text("GPU memory", "显存容量"))
STEP = Chart(
    "lanes", Text("Lanes", "泳道"), "spans", Text("wrapper", "封装"), Text("ms since"),
    [
        Series(Text("forward", "前向"), [Point("naive", 4.0, start=0.0), Point("flat", 4.0, start=0.0)]),
        Series(Text("backward"), [Point("naive", 10.0, start=4.0), Point("flat", 8.0, start=4.0)]),
        Series(Text("all-reduce"), [Point("naive", 12.0, start=10.0), Point("naive", 16.0, start=12.0)], lane=1),
    ],
)  # fmt: skip
"""Spans of a data-parallel step, with communication in a second lane."""


def stacked(*sizes, limits=(HAS,), **fields):
    """Horizontal bars of two equal parts, of these total sizes, with a limit."""
    points = [Point(f"bar {number}", size / 2) for number, size in enumerate(sizes)]
    halves = [Series(Text(part), points) for part in "xy"]
    axes = Text("strategy"), Text("GiB")
    return Chart("plan", Text("Plan"), "stacked", *axes, halves, horizontal=True, limits=limits, **fields)


# Documents


def step_table(rows=12):
    heads = [("context", ""), ("step time", "ms"), ("speed-up", ""), ("share", ""), ("peak memory", "GiB")]
    chinese = {"step time": "单步时间"}
    columns = [Column(Text("model", "模型"), numeric=False)]
    columns += [Column(Text(name, chinese.get(name, "")), unit) for name, unit in heads]
    draw = random.Random(2)
    sizes = ("small", "medium", "large", "xl", "2.7B")
    cells = [
        [
            f"{sizes[i % 5]}, float32",
            str(LENGTHS[i % 8]),
            f"{draw.uniform(5, 900):,.1f} ± {draw.uniform(0.1, 4):.1f}",
            f"{draw.uniform(0.9, 12):.2f}x",
            f"{draw.uniform(0, 100):.1f}%",
            OOM if i % 7 == 3 else f"{draw.uniform(1, 130):.2f}",
        ]
        for i in range(rows)
    ]
    notes = [Text("means of 10 steps", "10 步的平均值"), Text("x against eager")]
    return Table(Text("Attention forward and backward", "注意力的前向与反向"), columns, cells, notes)


def with_tables(*tables, name="s"):
    return Document(Text("t"), sections=[Section(name, Text("s"), Text(""), tables=tables)])


def with_charts(*charts):
    return Document(Text("t"), sections=[Section("s", Text("s"), Text(""), charts=charts)])


def sample() -> Document:
    faster = Text("bfloat16 is 2.4x as fast as float32 at xl.", "在 xl 规模下,bfloat16 的速度是 float32 的 2.4 倍。")
    sections = [
        Section(
            "step-time",
            Text("Time of a training step", "训练一步的时间"),
            Text("How long does a step take, and what makes it faster?", "一步需要多久?什么能让它更快?"),
            [faster, Text("Compiling saves 24% of the time at every size.", "编译在各规模上都节省 24% 的时间。")],
            [step_table()],
            [step_chart(), many_bars()],
            [Link(Text("trace", "时间线"), "traces/step.html"), Link(Text("guide"), "https://example.org/guide")],
        ),
        Section(
            "attention",
            Text("Attention", "注意力"),
            Text("At which length does the naive one run out of memory?", "朴素实现在多长的序列上耗尽显存?"),
            [Text("PyTorch runs out of memory at 8192.", "PyTorch 在 8192 处显存不足。")],
            [step_table(30)],
            [scaling_chart(), memory_chart("memory-across", horizontal=True), memory_chart("memory-up")],
        ),
        Section("memory", Text("Memory", "显存"), Text("Why?", "为什么?"), (), [step_table(50)]),
    ]
    facts = {Text("machine", "机器"): "NVIDIA H200, 139.8 GiB", Text("commit"): "0123abc"}
    missing = {"ddp-overlap": "cs336 run ddp-overlap --preset course"}
    remarks = [Text("2 lines could not be read.", "有 2 行无法读取。")]
    return Document(Text("Where time and memory go", "时间与显存花在哪里"), facts, sections, missing, remarks)


def first_screen() -> Document:
    """Large numbers, a chart and a line of trust above two groups of sections and one without a group."""

    def section(name, group, chinese, **parts):
        title = Text(f"About {name}", f"关于{chinese}")
        return Section(name, title, Text(""), group=Text(*group) if group else None, **parts)

    found = [Text("Found.", "发现。")]
    sections = [
        section("speed", ("Speed", "速度"), "速度", findings=found, tables=[step_table(3)]),
        section("memory", ("Memory", "显存"), "显存", findings=found, charts=[memory_chart("parts")]),
        section("others", (), "其他"),
    ]
    highlights = [
        Highlight(1, Text("1.3x"), Text("a step", "单步"), Text("93.1 ms, 124.6 ms"), section="speed"),
        Highlight(2, Text("0.5%"), Text("error", "误差"), Text("of 66 peaks", "66 个峰值"), section="unknown"),
    ]
    return Document(
        Text("First screen", "首屏"), sections=sections, highlights=highlights, hero=step_chart("hero"),
        trust=Text("Alternating.", "交替测量。"),
    )  # fmt: skip


def many_tables() -> Document:
    """Sections with one table, two short ones, a tall one before others, and one far wider than a window."""

    def numbered(title: str, rows: int, columns: int = 4) -> Table:
        heads = [Column(Text("group"), numeric=False), *(Column(Text(f"column {i}"), "ms") for i in range(1, columns))]
        cells = [[f"group {i // 5}", *(f"{title} {i}.{j}" for j in range(1, columns))] for i in range(rows)]
        return Table(Text(f"{title} · NVIDIA H200, batch {rows}"), heads, cells)

    def section(name: str, *tables: Table) -> Section:
        finding = Text(f"{name} is 2 times as fast.", f"{name} 快 2 倍。")
        return Section(name, Text(f"About {name}", f"关于 {name}"), Text("Why?", "为什么？"), [finding], tables)

    sections = [
        section("flash", numbered("tall", 40), *(numbered(title, 20) for title in ("forward", "backward", "peak"))),
        section("two", numbered("one", 5), numbered("other", 15)),
        section("three", numbered("first", 3), numbered("second", 3), numbered("last", 30)),
        section("wide", numbered("wide", 30, columns=40)),
    ]
    return Document(Text("Many tables", "许多表"), sections=sections)


def hostile_charts():
    text, limit = Text(EVIL, EVIL + "中"), Limit(2.0, Text(EVIL, EVIL + "中"))
    for kind in ("lines", "bars", "stacked", "spans"):
        points = [Point(EVIL, 9e9, start=1.0, name=EVIL), Point(EVIL + "b", 1.0, start=0.5, name=EVIL)]
        points.append(Point(EVIL + "c", math.nan, note=text))
        series = [Series(text, points), Series(text, points, drawn="marks", over=0), Series(text, points, drawn="line")]
        yield Chart(EVIL, text, kind, text, text, series, horizontal=True, places=[EVIL], limits=[limit])


def hostile_document() -> Document:
    """A document in which every text tries to break out of its element."""
    text = Text(EVIL, EVIL + "中")
    table = Table(text, [Column(text, EVIL, numeric=False), Column(text)], [[EVIL, text]], [text])
    links = [Link(text, EVIL), Link(text, "javascript:alert(1)"), Link(text, '#" onclick="alert(1)')]
    section = Section(EVIL, text, text, [text], [table], list(hostile_charts()), links)
    return Document(text, {text: EVIL}, [section], {EVIL: EVIL}, [text])

"""The reduction of memory timelines, their page as text, and their picture."""

import itertools
import json
import random
import re
from dataclasses import replace

import pytest

from cs336_systems.measure.readers.snapshot import EARLIER
from cs336_systems.report import picture
from cs336_systems.report.timeline_picture import timeline_picture
from cs336_systems.report.timeline_reduction import COLORS, LABEL_COLORS, MAX_LABELS, OTHER, label_colors, reduce
from cs336_systems.report.timeline_words import phase_text, title_text, word_text
from cs336_systems.report.web.timeline_page import write_page
from cs336_systems.text import Text
from cs336_systems.timeline import Block, Span, Timeline

MIB = 2**20


def training_step(layers=12, scale=MIB):
    """Activations grow in forward and shrink in backward, in which gradients and temporaries are allocated."""
    blocks = [Block("parameters", 150 * scale, 0.0, None, "embedding", "empty (32000, 1024) float32")]
    matrices = ("attn.qkv", "attn.out", "ffn.up", "ffn.down")
    loss, end = 0.040, 0.130
    for i in range(layers):
        for name in matrices:
            module = f"layers.{i}.{name}"
            blocks.append(Block("parameters", 14 * scale, 0.0, None, module, "empty (1024, 3072) float32"))
            blocks.append(Block("optimizer state", 28 * scale, 0.0, None, module, "zeros_like (1024, 3072) float32"))
        freed = end - 0.007 * i - 0.007
        for j, (what, size) in enumerate((("mm", 24), ("softmax", 96), ("mm", 24), ("silu", 64), ("mul", 64))):
            where = (f"layers.{i}", f"{what} (8, 512)", f"model.py:{100 + 7 * j} in forward")
            start, dies = 0.003 * i + 0.0005 * j, freed - 0.001 * j
            blocks.append(Block("activations", size * scale, start, dies, *where))
            blocks.append(Block("temporary", 40 * scale, start + 0.0001, start + 0.0004, *where))
            blocks.append(Block("temporary", 90 * scale, dies - 0.0008, dies, *where))
        for name in matrices:
            blocks.append(Block("gradients", 14 * scale, freed, 0.1505, f"layers.{i}.{name}", "mm (1024, 3072)"))
    blocks.append(Block("logits and loss", 500 * scale, loss - 0.002, loss + 0.004, "head", "mm (8, 512, 32000)"))
    blocks.append(Block("logits and loss", 500 * scale, loss, loss + 0.005, "", "log_softmax (8, 512, 32000)"))
    phases = [Span("forward", 0.0, 0.038), Span("loss", 0.038, 0.042), Span("backward", 0.042, end)]
    return Timeline("Train step, 12 layers", "NVIDIA H200", blocks, [*phases, Span("optimizer", end, 0.151)])


def random_timeline(count, seed=0, labels=("parameters", "activations", "temporary", "gradients")):
    draw = random.Random(seed)
    blocks = []
    for index in range(count):
        start = draw.random()
        end = None if draw.random() < 0.05 else start + 1e-6 + draw.random() ** 4
        size = int(2 ** draw.uniform(9, 24))
        what = f"mm ({index % 977}, 512) float32"
        blocks.append(Block(draw.choice(labels), size, start, end, f"layers.{index % 48}", what, f"m.py:{index % 331}"))
    return Timeline("random", "cpu", blocks, [Span("forward", 0.0, 0.4), Span("backward", 0.4, 2.0)])


def reduced(timeline, **limits):
    return reduce(timeline, timeline.peak()[0], **limits)


def reduced_blocks(*blocks, **limits):
    return reduced(Timeline("t", "cpu", list(blocks)), **limits)


def written(timeline, tmp_path, **options):
    path = tmp_path / "page.html"
    write_page(timeline, path, **options)
    return path.read_text(encoding="utf-8")


def page_data(html):
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', html, re.DOTALL)[1])


def in_language(html, language):
    """HTML with the texts of one language."""
    other = {"en": "zh", "zh": "en"}[language]
    html = re.sub(rf'<span class="{other}"[^>]*>.*?</span>', "", html)
    return re.sub(rf'<span class="{language}"[^>]*>(.*?)</span>', r"\1", html)


def cells(html, table, language="en"):
    """The text of a table's rows, without its head."""
    rows = re.findall(r"<tr>(.*?)</tr>", in_language(html, language).split("<table>")[table], re.DOTALL)
    return [re.findall(r"<td[^>]*>(?:<span[^>]*></span>)?(.*?)</td>", row) for row in rows[1:]]


# Reduction


@pytest.mark.parametrize("limits", [{}, {"moments": 40, "blocks": 10}], ids=["whole", "reduced"])
def test_every_moment_holds_what_was_alive(limits):
    timeline = random_timeline(200)
    found = reduced(timeline, **limits)
    for index, moment in enumerate(found.moments):
        parts = {label: row[index] for label, row in zip(found.labels, found.series, strict=True) if row[index]}
        assert parts == timeline.parts_at(moment)
    alive = timeline.alive_at(found.moments[30])
    spans = zip(found.blocks, found.block_moments, strict=True)
    assert [b for b in found.blocks if b in alive] == [b for b, (first, last) in spans if first <= 30 < last]


@pytest.mark.parametrize("seed", range(3))
def test_the_peak_is_exact_with_few_moments(seed):
    timeline = random_timeline(1000, seed)
    when, most = timeline.peak()
    found = reduced(timeline, moments=30)
    totals = [sum(column) for column in zip(*found.series, strict=True)]
    assert max(totals) == most
    assert found.moments[totals.index(most)] == when
    assert when in found.edges
    assert found.parts_at(when) == timeline.parts_at(when)
    assert len(totals) < 50


def test_a_short_spike_is_kept_with_few_moments():
    steps = [Block("activations", 1, i / 1000, None) for i in range(1000)]
    found = reduced_blocks(*steps, Block("temporary", 300, 0.25005, 0.25006), moments=20)
    row = found.series[found.labels.index("temporary")]
    assert max(row) == 300
    assert found.moments[row.index(300)] == 0.25005


def test_few_events_are_all_kept():
    found = reduced(training_step())
    assert found.moments == found.edges[:-1]
    assert found.merged == 0


def test_large_and_long_lived_blocks_are_kept():
    timeline = random_timeline(1000)
    found = reduced(timeline, blocks=100)
    assert max((b for b in timeline.blocks if b.end is None), key=lambda b: b.size) in found.blocks
    assert found.merged == len(timeline.blocks) - 100
    assert found.blocks == sorted(found.blocks, key=lambda b: b.start)


def test_blocks_without_an_end_live_to_the_end():
    found = reduced_blocks(Block("parameters", 7, 0.0, None), Block("inputs", 5, 0.1, 0.2))
    assert [row[-1] for row in found.series] == [7, 0]
    assert found.block_moments[0] == (0, len(found.moments))
    assert found.edges[-1] == 0.2


def test_a_single_moment_has_a_width():
    found = reduced_blocks(Block("parameters", 7, 0.0, None))
    assert found.series == [[7]]
    assert found.edges[0] < found.edges[1]


def test_blocks_that_were_never_alive_are_ignored():
    assert reduced_blocks(Block("a", 7, 0.0, 1.0), Block("b", 0, 0.0, 1.0), Block("c", 9, 0.5, 0.5)).labels == ["a"]


def test_labels_are_stacked_in_a_fixed_order():
    labels = ["temporary", "mine", "activations", "gradients", "optimizer state", "parameters", "also mine"]
    expected = ["parameters", "optimizer state", "gradients", "activations", "temporary", "also mine", "mine"]
    assert reduced_blocks(*(Block(label, 1, 0.1 * i, None) for i, label in enumerate(labels))).labels == expected


def test_a_label_has_the_same_colour_on_every_page():
    assert label_colors(["parameters", "activations"])[1] == label_colors(["activations", "mine"])[0]
    assert len(set(LABEL_COLORS.values())) == len(LABEL_COLORS)
    for count in range(MAX_LABELS + 1):
        labels = ["parameters", "temporary", *map(str, range(count))][:MAX_LABELS]
        assert len(set(label_colors(labels))) == len(labels)
    assert set(LABEL_COLORS.values()) <= set(COLORS)


def test_labels_beyond_the_number_of_colours_are_merged():
    blocks = [Block(f"label {i}", 100 + i, 0.0, 1.0) for i in range(40)]
    found = reduced_blocks(*blocks)
    assert len(found.labels) == MAX_LABELS
    assert {"label 39", OTHER} <= set(found.labels)
    assert sum(row[0] for row in found.series) == sum(b.size for b in blocks)


# The page


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    return written(training_step(), tmp_path_factory.mktemp("timeline"))


def test_the_table_of_the_peak_adds_up(html):
    when, most = training_step().peak()
    *rows, total = cells(html, 1)
    assert {label: int(size.replace(",", "")) for label, _, _, size in rows} == training_step().parts_at(when)
    assert int(total[3].replace(",", "")) == most
    assert sum(float(share.rstrip("%")) for _, _, share, _ in rows) == pytest.approx(100, abs=0.3)


def test_the_largest_blocks_are_listed_with_their_lifetimes(html):
    rows = cells(html, 2)
    assert len(rows) == 20
    assert rows[0] == ["500.00 MiB", "logits and loss", "head", "mm (8, 512, 32000)", "", "loss to backward"]
    assert rows[2][5] == "whole step"
    assert ["activations", "layers.0", "forward to backward"] in [[r[1], r[2], r[5]] for r in rows]


PHASES = [Span("forward", 0.0, 1.0), Span("loss", 1.0, 2.0)]


@pytest.mark.parametrize(
    ("start", "end", "phases", "expected", "chinese"),
    [
        (0.0, None, PHASES, "whole step", "整步"),
        (0.0, 1.0, PHASES, "until forward", "开始 → 前向"),
        (0.5, 2.0, PHASES, "forward to loss", "前向 → 损失"),
        (1.0, 1.5, PHASES, "loss", "损失"),
        (2.5, None, PHASES, "after loss to the end", "损失之后 → 结束"),
        (0.5, 0.75, [], "500.00 ms to 750.00 ms", "500.00 ms → 750.00 ms"),
    ],
)
def test_lifetimes_are_named_by_phases(tmp_path, start, end, phases, expected, chinese):
    html = written(Timeline("t", "cpu", [Block("a", 9, start, end)], phases), tmp_path)
    assert cells(html, 2)[0][5] == expected
    assert cells(html, 2, "zh")[0][5] == chinese


TITLE = "2.7B, train-step, bf16, batch 4, context 512, attention reference, checkpoint 2"


def test_a_title_names_the_settings_in_readers_words(tmp_path):
    timeline = Timeline(TITLE, "NVIDIA H200", training_step().blocks)
    heading = re.search("<h1>(.*?)</h1>", written(timeline, tmp_path))[1]
    settings = "2.7B, bf16, batch 4, context 512, naive attention, recomputed in groups of 2"
    assert in_language(heading, "en") == f"Memory in a training step: {settings}"
    assert in_language(heading, "zh").startswith("训练步的显存：2.7B，bf16，批大小 4，")
    assert timeline_picture(timeline, "t").caption == in_language(heading, "en")
    assert title_text(replace(timeline, device="CPU")).zh.startswith("训练步的内存：")
    own = title_text(replace(timeline, title=TITLE.replace("2.7B", "package.module:factory")))
    assert "own model" in own.en
    assert "factory" not in own.en


@pytest.mark.parametrize("title", ["snapshot.pickle", "2.7B, train-step, bf16", f"{TITLE}, and more", ":" * 200_000])
def test_other_titles_stay_as_they_are(title):
    assert title_text(Timeline(title, "cpu", [])) == Text(title)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_page_opens_in_its_language(tmp_path, language):
    timeline = replace(training_step(), title=TITLE)
    html = written(timeline, tmp_path, language=language)
    assert f'data-language="{language}"' in html
    assert f">{title_text(timeline).in_(language)}</title>" in html
    named = re.findall(r' aria-label="([^"]*)" data-aria-en="([^"]*)" data-aria-zh="([^"]*)"', html)
    assert len(named) == 10  # the selects, the chart, the legend, four buttons, two tables
    assert all(label == {"en": en, "zh": zh}[language] for label, en, zh in named)
    assert html.count('aria-label="') == len(named)


def test_every_label_and_phase_of_the_instruments_has_chinese():
    for name in (*LABEL_COLORS, OTHER, EARLIER, "inside an operator"):
        assert re.search("[\u4e00-\u9fff]", word_text(name).zh), name
    for span in training_step().phases:
        assert re.search("[\u4e00-\u9fff]", phase_text(span.name).zh), span.name
    assert word_text("mine") == Text("mine")


def test_no_text_can_break_out(tmp_path):
    evil = "</script><script>alert(1)</script><!-- {{data}} & "
    timeline = Timeline(evil, evil, [Block(evil, 9, 0.0, 1.0, evil, evil, evil)], [Span(evil, 0.0, 1.0)])
    html = written(timeline, tmp_path)
    assert "alert(1)</script>" not in html
    assert html.count("<script") == html.count("</script>") == 4
    data = page_data(html)
    assert data["labels"][0][0] == evil
    assert data["words"][data["blocks"]["what"][0]] == evil
    assert written(Timeline("\ud800", "cpu", [Block("\ud800", 9, 0.0, 1.0)]), tmp_path)  # has no encoding


def test_a_long_text_is_cut(tmp_path):
    data = page_data(written(Timeline("t", "cpu", [Block("a", 9, 0.0, 1.0, what="x" * 10_000)]), tmp_path))
    assert max(map(len, data["words"])) == 120


@pytest.mark.parametrize("blocks", [[], [Block("a", 9, 0.5, 0.5)]], ids=["no block", "no block alive"])
def test_an_empty_timeline_says_so(blocks, tmp_path):
    timeline = Timeline("nothing", "cpu", blocks, [Span("forward", 0.0, 1.0)])
    html = written(timeline, tmp_path)
    assert '<main class="empty">' in html
    assert "No memory was recorded" in html
    picture.save([timeline_picture(timeline, "empty")], tmp_path, ("svg",))
    assert "no memory was recorded" in (tmp_path / "empty.svg").read_text()


def test_the_page_is_self_contained_and_reproducible(html, tmp_path):
    assert not re.search(r"https?://|<link[^>]*stylesheet|<script[^>]* src|@import|url\(", html)
    assert re.search(r"default-src 'none'.* script-src 'sha256-[\w+/]{43}='", html)
    assert "{{" not in html
    assert written(training_step(), tmp_path) == html


def test_the_size_of_a_page_is_bounded(tmp_path):
    """Both limits are reached: a page of more blocks is no larger."""
    timeline = random_timeline(30_000)
    html = written(timeline, tmp_path)
    assert len(html) < 6e6
    data = page_data(html)
    totals = [sum(column) for column in zip(*map(itertools.accumulate, data["changes"]), strict=True)]
    assert max(totals) == data["peak"]["bytes"] == timeline.peak()[1]
    assert data["moments"][totals.index(max(totals))] == data["peak"]["time"]
    assert "18,000 others are part of their label" in html


def test_the_picture_names_phases_labels_and_the_peak(tmp_path):
    (path,) = picture.save([timeline_picture(training_step(), "timeline")], tmp_path, ("svg",))
    text = path.read_text()
    for name in ("forward", "loss", "backward", "optimizer", "activations", "parameters", "peak ", "GiB"):
        assert f">{name}" in text, name
    assert len(text) < 300_000

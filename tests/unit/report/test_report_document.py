"""The report as a whole: from records to a document, to every format, by the command; of any records whatever."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from cs336_systems import record
from cs336_systems.record import Environment, Loaded, Record
from cs336_systems.report.build import document, markdown, write
from cs336_systems.report.cells import group
from cs336_systems.report.charts import charts
from cs336_systems.report.published import published
from cs336_systems.report.words import TITLES
from cs336_systems.table import Column, Table
from cs336_systems.text import LANGUAGES
from tests.golden.report_goldens import FOLDER, H200, goldens, some_document, some_records
from tests.helpers import ROOT, execute

HOSTILE = "<script>alert(1)</script>\"'&$\\input{x}#eval(1)_*`|\n# h"


@pytest.fixture(scope="module")
def report():
    return some_document()


@pytest.mark.parametrize("name", ["report.en.md", "report.zh.md", "tables.csv", "tables.latex", "tables.typst"])
def test_golden(name):
    kept = (FOLDER / name).read_text(encoding="utf-8")
    assert goldens()[name] == kept, "if this is what you want: python -m tests.golden.report_goldens"


def test_every_experiment_of_the_records_has_a_section(report):
    asked = {r.experiment for r in some_records()}
    assert {section.name for section in report.sections} == asked
    assert report.missing.keys() == TITLES.keys() - asked - {"bench", "train"}
    for section in report.sections:
        assert section.title.en
        assert section.title.zh
        assert section.question.en
        assert section.tables


def test_charts_of_the_h200_fit_their_questions():
    every = [r for name in ("records.jsonl", "loss_curves.jsonl") for r in record.load(H200 / name).records]
    by_experiment: dict[str, list] = {}
    for cell in group(every):
        by_experiment.setdefault(cell.experiment, []).append(cell)
    found = {name: charts(name, cells) for name, cells in by_experiment.items()}
    with_charts = {name for name, drawn in found.items() if drawn}
    assert with_charts >= {
        *("end_to_end", "warmup", "precision", "compile", "fast_step", "peak_memory", "kernels", "memory"),
        *("checkpointing", "pytorch_attention", "flash", "attention_rivals", "flash_leaderboard", "ddp"),
        *("optimizer_sharding", "fsdp", "train"),
    }
    names = [chart.name for drawn in found.values() for chart in drawn]
    assert len(names) == len(set(names))
    (speed,) = found["precision"]
    assert [point.x for point in speed.series[0].points] == ["small", "medium", "large", "xl", "2.7B"]
    assert speed.series[0].points[-1].y == pytest.approx(5.8, abs=0.05)
    curves = {series.name.en: len(series.points) for series in found["train"][0].series}
    assert curves == dict.fromkeys(("fp32-eager", "bf16-eager", "bf16-fast", "fp32-fast"), 300)


def test_two_machines_never_share_a_chart():
    twice = [
        Record(r.experiment, r.config, r.metric, r.unit, r.samples, r.status, Environment(gpu=gpu))
        for gpu in ("NVIDIA A", "NVIDIA B")
        for r in some_records()
        if r.experiment == "end_to_end"
    ]
    drawn = charts("end_to_end", group(twice))
    assert len(drawn) == 2
    assert [name in chart.title.en for chart, name in zip(drawn, ("NVIDIA A", "NVIDIA B"), strict=True)] == [True] * 2


# -- the command ------------------------------------------------------------------------------------------------------


def cs336(*words, cwd, timeout=120):
    return execute(sys.executable, "-m", "cs336_systems", *words, cwd=cwd, timeout=timeout)


def test_all_formats_in_chinese(tmp_path):
    records = tmp_path / "run" / "records.jsonl"
    record.append(records, [r for r in some_records() if r.experiment in ("end_to_end", "fast_step")])
    timeline = tmp_path / "run" / "files" / "end_to_end-small" / "timeline.html"
    timeline.parent.mkdir(parents=True)
    timeline.write_text("<html></html>")
    done = cs336("report", "run", "-o", "out", "--formats", "md,csv,latex,typst", "--lang", "zh", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"index.html", "report.md", "images", "csv", "tables.tex", "tables.typ"}
    assert "各阶段" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "../run/files/end_to_end-small/timeline.html" in (tmp_path / "out" / "index.html").read_text(
        encoding="utf-8"
    )
    assert (tmp_path / "out" / "images" / "end-to-end-1.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["report"], "name a file of records"),
        (["report", "missing.jsonl"], "missing.jsonl"),
        (["report", "empty.jsonl"], "no records in"),
        (["report", "good.jsonl", "-o", "good.jsonl/below"], "good.jsonl/below"),
        (["report", "good.jsonl", "--formats", "pdf"], "'pdf'"),
        (["report", "good.jsonl", "--lang", "fr"], "fr"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(words, named, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    record.append(tmp_path / "good.jsonl", [r for r in some_records() if r.experiment == "warmup"])
    done = cs336(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert named in done.stderr
    assert not (tmp_path / "report").exists()


def test_records_from_anywhere(tmp_path):
    """Lines that are none, odd fields, NaN, unknown experiments, hostile names: shown or named, never run."""
    environment = Environment(gpu=HOSTILE, torch=HOSTILE)
    config = {"size": HOSTILE, "mode": HOSTILE, "model": {"d_model": 1}, "batch_size": 1}
    lines = [
        "no JSON",
        "[1, 2]",
        json.dumps({"schema_version": 1, "metric": "m", "experiment": "end_to_end"}),
        *(
            Record(name, config, metric, "s", (1.0, float("nan")), "ok", environment).to_json()
            for name in (*TITLES, HOSTILE, "unheard_of")
            for metric in ("step_time", HOSTILE, record.CELL_TIME)
        ),
        Record("flash", {}, "step_time", "s").to_json(),
        Record("flash", {}, "step_time", "s", environment=Environment(gpu=["a"])).to_json(),
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(lines) + "\n")
    done = cs336("report", str(path), "-o", "out", "--formats", "md,csv,latex,typst", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "3 lines left out" in page
    assert "<script>alert" not in page
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "<script>" not in text.replace("\\<", "")  # escaped is text
    assert "\\input{x}" not in (tmp_path / "out" / "tables.tex").read_text(encoding="utf-8")
    assert "#eval" not in (tmp_path / "out" / "tables.typ").read_text(encoding="utf-8").replace("\\#eval", "")


def test_a_hundred_thousand_records(tmp_path):
    """In under 10 s of the processor, and a gigabyte. Reading the JSON alone takes a tenth of that on a quiet machine,
    and is slowed down by other work as much as the rest; before and after, since such work comes and goes. Memory as
    Linux counts it since the program began: a child's ru_maxrss begins with what its parent has, and here that is a
    worker with torch and all tests in it."""
    environment = Environment(gpu="NVIDIA H200", torch="2.11")
    config = next(r.config for r in some_records() if r.experiment == "end_to_end")
    metrics = [f"{name}_time" for name in ("forward", "loss", "backward", "optimizer", "step", "cell")]
    like = Record("end_to_end", {**config, "seed": 123456}, "METRIC", "s", (0.1, 0.2, 0.3), "ok", environment).to_json()
    before, after = like.split("123456")
    endings = [after.replace("METRIC", metric) + "\n" for metric in metrics]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(f"{before}{seed}{end}" for seed in range(100_000 // len(metrics)) for end in endings))
    code = (
        "import json, re, sys, time\nfrom pathlib import Path\n"
        "def parsing():\n    begin = time.process_time()\n"
        f"    for line in open({str(path)!r}): json.loads(line)\n    return time.process_time() - begin\n"
        "before = parsing()\nbegin = time.process_time()\nfrom cs336_systems.cli import main\n"
        f"code = main(['report', {str(path)!r}, '-o', {str(tmp_path / 'out')!r}])\n"
        "seconds = time.process_time() - begin\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text()).group(1)\n"
        "print(code, seconds, peak, max(before, parsing()))"
    )
    done = execute(sys.executable, "-c", code, cwd=ROOT, timeout=200)
    returned, seconds, kilobytes, parsing = done.stdout.split()[-4:]
    assert returned == "0", done.stderr
    assert float(seconds) < max(10, 10 * float(parsing))
    assert int(kilobytes) < 1 << 20


HOSTILE_CELLS = [
    '#panic("ran")',
    '#read("/etc/passwd")',
    "] #panic() [",
    "$ x",
    "*a _b `c",
    "@nowhere <label>",
    "//",
    "/*",
    "= h",
    "\\",
    "\\input{/etc/passwd}",
    "\\end{tabular}",
    "%",
    "& # ~ ^ {",
    "}",
    "\\write18{id}",
    "中文 ± × µ",
    '"',
]


def hostile_table():
    columns = [Column(text, text) for text in HOSTILE_CELLS]
    return Table(HOSTILE_CELLS[0], columns, [HOSTILE_CELLS, HOSTILE_CELLS[::-1]], HOSTILE_CELLS)


def compile_latex(tables, folder):
    program = shutil.which("pdflatex")
    if program is None:
        pytest.skip("needs pdflatex with booktabs: apt-get install texlive-latex-recommended")
    packages = "\\usepackage[landscape,margin=1cm]{geometry}\\usepackage{booktabs}"
    whole = f"\\documentclass{{article}}{packages}\\begin{{document}}\n{tables}\\end{{document}}\n"
    (folder / "whole.tex").write_text(whole, encoding="utf-8")
    command = [program, "-interaction=nonstopmode", "-halt-on-error", "whole.tex"]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=200, check=False)


def test_latex_compiles(tmp_path):
    write(some_document(), tmp_path, formats=["latex"])
    done = compile_latex((tmp_path / "tables.tex").read_text(encoding="utf-8"), tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]


def test_hostile_latex_compiles_and_is_only_text(tmp_path):
    text = hostile_table().render("latex").replace("中文", "").replace("µ", "")  # glyphs that pdflatex does not have
    done = compile_latex(text, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    assert b"passwd)" not in done.stdout  # a file that was read is listed


@pytest.mark.parametrize("language", LANGUAGES)
def test_typst_compiles(language, tmp_path):
    typst = pytest.importorskip("typst")
    write(some_document(), tmp_path, language=language, formats=["typst"])
    assert typst.compile(tmp_path / "tables.typ").startswith(b"%PDF")


def test_hostile_typst_compiles_and_is_only_text(tmp_path):
    typst = pytest.importorskip("typst")
    (tmp_path / "hostile.typ").write_text(hostile_table().render("typst"), encoding="utf-8")
    assert typst.compile(tmp_path / "hostile.typ").startswith(b"%PDF")


def test_the_page_of_the_h200_is_not_stale(tmp_path):
    """Made from the records that are kept, with what others have published."""
    loaded = [record.load(H200 / name) for name in ("records.jsonl", "loss_curves.jsonl")]
    begin = time.monotonic()
    (page, *_) = write(document(loaded, "cs336_systems on an H200", references=published()), tmp_path)
    assert time.monotonic() - begin < 30
    kept = ROOT / "docs" / "h200" / "index.html"
    remedy = "cs336 report results/h200 results/h200/loss_curves.jsonl --published -o docs/h200"
    remedy += ' --title "cs336_systems on an H200"'
    assert page.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), remedy
    assert kept.stat().st_size < 5_000_000


def test_markdown_names_what_is_missing():
    text = markdown(document([Loaded([r for r in some_records() if r.experiment == "warmup"], [])]))
    assert "cs336 run flash --preset course" in text
    assert "cs336 run warmup" not in text

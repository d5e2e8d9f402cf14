"""The report as a whole: from records to a document, to every format, by the command; of any records whatever."""

import json
import shutil
import subprocess

import pytest

from cs336_systems import record
from cs336_systems.cli import main
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import Environment, Loaded, Record
from cs336_systems.report.build import GROUPS, document, markdown, write
from cs336_systems.table import Column, Table
from cs336_systems.text import LANGUAGES, Text
from tests.golden.report_goldens import FOLDER, goldens, records_of, some_document, some_records
from tests.helpers import assert_refused

pytestmark = pytest.mark.usefixtures("elsewhere")
HOSTILE = "<script>alert(1)</script>\"'&$\\input{x}#eval(1)_*`|\n# h"


@pytest.fixture(scope="module")
def report():
    return some_document()


KEPT = sorted(path.name for path in FOLDER.iterdir())


def test_every_golden_is_kept():
    assert sorted(goldens()) == KEPT


@pytest.mark.parametrize("name", KEPT)
def test_golden(name):
    kept = (FOLDER / name).read_text(encoding="utf-8")
    assert goldens()[name] == kept, "if this is what you want: python -m tests.golden.report_goldens"


def test_every_experiment_of_the_records_has_a_section(report):
    asked = {r.experiment for r in some_records()}
    by_group = sorted(catalogue(), key=lambda name: [*GROUPS, ""].index(catalogue()[name].group))
    assert [section.name for section in report.sections] == [name for name in by_group if name in asked]
    assert [section.group for section in report.sections] == [
        GROUPS.get(catalogue()[section.name].group) for section in report.sections
    ]
    assert report.missing.keys() == {name for name, one in catalogue().items() if one.command} - asked
    assert all(s.title.en and s.question.zh and s.tables for s in report.sections)


def test_markdown_names_missing_experiments_with_their_commands():
    text = markdown(document([Loaded(records_of("warmup"), [])], catalogue()))
    assert "cs336 run flash --preset course" in text
    assert "cs336 run warmup" not in text


# -- the command ------------------------------------------------------------------------------------------------------


def test_all_formats_in_chinese(tmp_path):
    record.append(tmp_path / "run" / "records.jsonl", records_of("end_to_end", "fast_step"))
    timeline = tmp_path / "run" / "files" / "end_to_end-small" / "timeline.html"
    timeline.parent.mkdir(parents=True)
    timeline.write_text("<html></html>")
    assert main(["report", "run", "-o", "out", "--formats", "md,csv,latex,typst", "--lang", "zh"]) == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        *("index.html", "report.md", "images", "csv", "tables.tex", "tables.typ")
    }
    assert "各阶段" in (out / "report.md").read_text(encoding="utf-8")
    assert "../run/files/end_to_end-small/timeline.html" in (out / "index.html").read_text(encoding="utf-8")
    assert (out / "images" / "end-to-end-1.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["empty.jsonl"], "no records in"),
        (["good.jsonl", "-o", "good.jsonl/below"], "good.jsonl/below"),
        (["good.jsonl", "--formats", "pdf"], "'pdf'"),
        (["good.jsonl", "--lang", "fr"], "fr"),
    ],
    ids=["empty file", "output below a file", "unknown format", "unknown language"],
)
def test_mistakes(words, named, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    record.append(tmp_path / "good.jsonl", records_of("warmup"))
    assert_refused(["report", *words], [named], capsys)


def test_the_command_ends_with_findings_and_the_page(tmp_path, capsys):
    record.append(tmp_path / "good.jsonl", records_of("warmup"))
    assert main(["report", "good.jsonl", "-o", "out", "--formats", "md"]) == 0
    *findings, _, page = [line for line in capsys.readouterr().out.splitlines() if not line.endswith(".png")]
    assert page == "out/index.html"
    assert 1 <= len(findings) <= 5
    assert findings[0].startswith("Warm-up: ")


def test_folders_of_pages_among_the_paths_are_left_out(tmp_path, capsys):
    """`cs336 report runs/*`, where `cs336 compare --output runs/comparison` has written a page."""
    for run in ("a", "b"):
        record.append(tmp_path / "runs" / run / "records.jsonl", records_of("warmup"))
    for page in ("runs/comparison", "runs/b"):  # a run may have its page beside its records
        (tmp_path / page).mkdir(exist_ok=True)
        (tmp_path / page / "index.html").write_text("<html></html>")
    assert main(["report", "runs/a", "runs/b", "runs/comparison", "-o", "out"]) == 0
    found = capsys.readouterr()
    assert found.err == "left out, pages without records: runs/comparison\n"
    assert "out/index.html" in found.out
    assert_refused(["report", "runs/comparison"], ["no records in runs/comparison, only pages"], capsys)
    (tmp_path / "runs" / "unfinished").mkdir()
    assert_refused(["report", "runs/a", "runs/unfinished"], ["no file 'runs/unfinished/records.jsonl'"], capsys)


def test_records_from_anywhere(tmp_path):
    """Unreadable lines, odd fields, NaN, unknown experiments, hostile names: shown or named, never run."""
    environment = Environment(gpu=HOSTILE, torch=HOSTILE)
    config = {"size": HOSTILE, "mode": HOSTILE, "model": {"d_model": 1}, "batch_size": 1}
    lines = [
        "no JSON",
        "[1, 2]",
        json.dumps({"schema_version": 1, "metric": "m", "experiment": "end_to_end"}),
        *(
            Record(name, config, metric, "s", (1.0, float("nan")), "ok", environment, variant).to_json()
            for name in (*catalogue(), HOSTILE, "unheard_of")
            for metric in ("step_time", HOSTILE, record.CELL_TIME)
            for variant in ("", HOSTILE)
        ),
        Record("flash", {}, "step_time", "s").to_json(),
        Record("flash", {}, "step_time", "s", environment=Environment(gpu=["a"])).to_json(),
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", "records.jsonl", "-o", "out", "--formats", "md,csv,latex,typst"]) == 0
    text = {name: (tmp_path / "out" / name).read_text(encoding="utf-8") for name in ("index.html", "report.md")}
    tables = {name: (tmp_path / "out" / name).read_text(encoding="utf-8") for name in ("tables.tex", "tables.typ")}
    assert "4 lines left out" in text["index.html"]
    assert "<script>alert" not in text["index.html"]
    assert "<script>" not in text["report.md"].replace("\\<", "")  # escaped is text
    assert "\\input{x}" not in tables["tables.tex"]
    assert "#eval" not in tables["tables.typ"].replace("\\#eval", "")


def test_thousands_of_cells_make_a_page_that_browsers_open(tmp_path):
    """The page shows the first rows of a table of thousands; the CSV has all of them."""
    config = records_of("end_to_end")[0].config
    cells = [
        Record("end_to_end", {**config, "seed": seed}, metric, "s", (0.1, 0.2), "ok", Environment(gpu="H200"))
        for seed in range(3000)
        for metric in ("step_time", record.CELL_TIME)
    ]
    write(document([Loaded(cells, [])], catalogue()), tmp_path / "out", formats=["csv"])
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count("<tr") < 5000
    assert max(path.read_text().count("\n") for path in (tmp_path / "out" / "csv").iterdir()) >= 3000


# -- LaTeX and Typst compile ------------------------------------------------------------------------------------------

HOSTILE_CELLS = [
    *('#panic("ran")', '#read("/etc/passwd")', "] #panic() [", "$ x", "*a _b `c", "@nowhere <label>", "//", "/*"),
    *("= h", "\\", "\\input{/etc/passwd}", "\\end{tabular}", "%", "& # ~ ^ {", "}", "\\write18{id}", "中文 ± × µ", '"'),
]


def hostile_table():
    columns = [Column(Text(text), text) for text in HOSTILE_CELLS]
    notes = [Text(text) for text in HOSTILE_CELLS]
    return Table(notes[0], columns, [HOSTILE_CELLS, HOSTILE_CELLS[::-1]], notes)


def compile_latex(tables, folder):
    program = shutil.which("pdflatex")
    if program is None:
        pytest.skip("needs pdflatex with booktabs: apt-get install texlive-latex-recommended")
    packages = "\\usepackage[landscape,margin=1cm]{geometry}\\usepackage{booktabs}"
    whole = f"\\documentclass{{article}}{packages}\\begin{{document}}\n{tables}\\end{{document}}\n"
    (folder / "whole.tex").write_text(whole, encoding="utf-8")
    command = [program, "-interaction=nonstopmode", "-halt-on-error", "whole.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def test_latex_compiles(tmp_path):
    compile_latex(goldens()["tables.latex"], tmp_path)


def test_hostile_latex_compiles_to_text(tmp_path):
    text = hostile_table().render("latex").replace("中文", "").replace("µ", "")  # glyphs that pdflatex does not have
    assert b"passwd)" not in compile_latex(text, tmp_path)  # a file that was read is listed


@pytest.mark.parametrize("case", [*LANGUAGES, "hostile"])
def test_typst_compiles(case, report, tmp_path):
    typst = pytest.importorskip("typst")
    tables = [hostile_table()] if case == "hostile" else [table for s in report.sections for table in s.tables]
    language = "zh" if case == "zh" else "en"
    text = "\n\n".join(table.render("typst", language) for table in tables)
    (tmp_path / "tables.typ").write_text(text, encoding="utf-8")
    assert typst.compile(tmp_path / "tables.typ").startswith(b"%PDF")

"""A report from files of records: `document` puts it together, `write` writes it in every format."""

import contextlib
import gc
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from cs336_systems.config import UserError
from cs336_systems.record import Loaded, Record, load
from cs336_systems.report.cells import CellView, by_experiment, group, loss_curves
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.charts import charts
from cs336_systems.report.document import Document, Link, Section
from cs336_systems.report.findings import findings
from cs336_systems.report.picture import save
from cs336_systems.report.published import PUBLISHED, published
from cs336_systems.report.sections import tables_of
from cs336_systems.report.web.page import page
from cs336_systems.report.words import QUESTIONS, TITLES, in_chinese
from cs336_systems.table import Column, Table
from cs336_systems.text import Language, Text

PAGE = "index.html"
TRAINING = Text("Training", "训练"), Text("How does the loss fall?", "损失如何下降？")
"""Title and question of what `cs336 train` recorded: it is no experiment of the catalogue."""
Part = TypeVar("Part")
ENDINGS = {"latex": "tex", "typst": "typ"}


def write_report(
    paths: Sequence[str],
    folder: Path,
    title: str = "",
    language: Language = "en",
    formats: Sequence[str] = (),
    with_published: bool = False,
) -> list[Path]:
    """Read, put together, write: the command. `paths`: files of records, or folders with a records.jsonl."""
    if not paths:
        raise UserError("name a file of records, or a folder with one, such as runs/quick")
    files = [_records_file(Path(path)) for path in paths]
    links = [link for file in files for link in _links(file.parent / "files", folder)]
    with _all_kept():
        references = published() if with_published else ()
        report = document([load(file, lenient=True) for file in files], title, links, references)
        if not report.sections:
            raise UserError(f"no records in {', '.join(map(str, files))}; make some with: cs336 run end_to_end")
        return write(report, folder, language=language, formats=formats)


@contextlib.contextmanager
def _all_kept() -> Iterator[None]:
    """A large file is millions of small objects, none of them garbage: looking for some took a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _records_file(path: Path) -> Path:
    return path / "records.jsonl" if path.is_dir() else path


def _links(files: Path, folder: Path) -> list[Link]:
    """Timelines and traces that instruments have left beside the records."""
    texts = {
        "timeline.html": Text("memory timeline", "显存时间线"),
        "trace.json.gz": Text("trace for Perfetto", "Perfetto trace"),
    }
    found = []
    for path in sorted(path for name in texts for path in files.glob(f"*/{name}")):
        text, cell = texts[path.name], path.parent.name
        href = Path(os.path.relpath(path, folder)).as_posix()
        found.append(Link(Text(f"{text.en}: {cell}", f"{text.zh}：{cell}"), href))
    return found


def document(
    loaded: Sequence[Loaded], title: str = "", links: Sequence[Link] = (), references: Sequence[Record] = ()
) -> Document:
    """Of files that were read, several machines and runs side by side, `references` beside them.

    `links` go to the section that their name begins with.
    """
    records = [record for one in loaded for record in one.records]
    measured, others = by_experiment(_cells(loaded)), by_experiment(group(references, PUBLISHED))
    order = [*(name for name in TITLES if name in measured), *sorted(measured.keys() - TITLES.keys())]
    sections = [_section(name, measured[name], links, others.get(name, ())) for name in order]
    known = [name for name in TITLES if name not in measured and name not in ("bench", "train")]
    heading = Text(title) if title else Text("Where time and memory go", "时间与显存花在哪里")
    return Document(
        title=heading,
        facts=_facts(records),
        sections=sections,
        missing={name: f"cs336 run {name} --preset course" for name in known},
        remarks=[Text(remark, in_chinese(remark)) for one in loaded for remark in one.remarks],
    )


def _cells(loaded: Sequence[Loaded]) -> list[CellView]:
    """Of all files. Those that hold the same work of one machine are different runs of it, and named."""
    held = [{(r.environment.machine, r.experiment, r.cell) for r in one.records} for one in loaded]
    times = Counter(itertools.chain(*held))
    names: Counter[str] = Counter()
    found: list[CellView] = []
    for one, keys in zip(loaded, held, strict=True):
        run = ""
        if any(times[key] > 1 for key in keys):
            names[one.name] += 1
            run = one.name if names[one.name] == 1 else f"{one.name} ({names[one.name]})"
        found += group(one.records, run)
    return found


def _section(name: str, cells: Sequence[CellView], links: Sequence[Link], references: Sequence[CellView]) -> Section:
    problems: list[Text] = []

    def safely(make: Callable[[], list[Part]]) -> list[Part]:
        """Records may come from anywhere: what cannot be shown is named, and all else is shown."""
        try:
            return make()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"[:200]
            problems.append(Text(f"Part of this cannot be shown ({what}).", f"部分内容无法显示（{what}）。"))
            return []

    def made() -> list[Table]:
        return _curves(cells) if name == "train" else tables_of(name, cells, references)

    return Section(
        name=name,
        title=TITLES.get(name, TRAINING[0] if name == "train" else Text(name)),
        question=QUESTIONS.get(name, TRAINING[1] if name == "train" else Text("")),
        tables=[_all_text(t) for t in safely(made)],
        charts=safely(lambda: charts(name, cells)),
        findings=[*safely(lambda: findings(name, cells)), *problems],
        links=[link for link in links if Path(link.href).parent.name.startswith(name)],
    )


def _all_text(table: Table) -> Table:
    """Of odd records a name or cell may be anything."""
    columns = [Column(str(column.name), str(column.unit), column.numeric) for column in table.columns]
    rows = [[str(cell) for cell in row] for row in table.rows]
    return Table(str(table.title), columns, rows, [str(note) for note in table.notes])


def _curves(cells: Sequence[CellView]) -> list[Table]:
    """Of a training run the ends of its curve: all of it is in the chart."""
    columns = [
        Column("run", numeric=False),
        Column("steps"),
        Column("first loss"),
        Column("last loss"),
        Column("least"),
    ]
    rows = []
    for name, curve in loss_curves(cells).items():
        values = list(curve.values())
        rows.append([name, str(len(values)), *(f"{value:.4f}" for value in (values[0], values[-1], min(values)))])
    return [Table("train: losses", columns, rows)] if rows else []


def _facts(records: Iterable[Record]) -> dict[str, str]:
    """What the header says: all values that occur, in the order in which they do."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        environment = record.environment
        versions = {
            "machine": environment.machine,
            "torch": environment.torch,
            "triton": environment.triton,
            "driver": environment.driver,
            "Python": environment.python,
            "commit": environment.git_commit[:7] if environment.git_commit else None,
            "date": environment.utc[:10] if environment.utc else None,
        }
        for name, value in versions.items():
            if value:
                found.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(values) for name, values in found.items()}


# -- writing ----------------------------------------------------------------------------------------------------------


def write(report: Document, folder: Path, *, language: Language = "en", formats: Sequence[str] = ()) -> list[Path]:
    """The page, and what else is asked for: md (with pictures), csv, latex, typst. The files, the page first."""
    for name in formats:
        if name not in _WRITERS:
            raise UserError(f"unknown format {name!r}; choose from: html, {', '.join(_WRITERS)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PAGE).write_text(page(report, language, in_chinese), encoding="utf-8")
        return [folder / PAGE, *(path for name in formats for path in _WRITERS[name](report, folder, language))]
    except OSError as error:
        raise UserError(f"cannot write to {str(folder)!r}: {error.strerror}; choose another --output") from None


def _markdown(report: Document, folder: Path, language: Language) -> list[Path]:
    pictures = save([picture(c, language) for s in report.sections for c in s.charts], folder / "images", ("png",))
    (folder / "report.md").write_text(markdown(report, language), encoding="utf-8")
    return [folder / "report.md", *pictures]


def markdown(report: Document, language: Language = "en") -> str:
    lines = [f"# {_plain(report.title.in_(language))}", ""]
    lines += [f"- {_plain(name)}: {_plain(value)}" for name, value in report.facts.items()]
    for section in report.sections:
        lines += [
            "",
            f"## {_plain(section.title.in_(language))}",
            "",
            f"*{_plain(section.question.in_(language))}*",
            "",
        ]
        lines += [f"- {_plain(finding.in_(language))}" for finding in section.findings]
        for chart in section.charts:
            lines += ["", f"![{_plain(chart.title.in_(language))}](images/{chart.name}.png)"]
        for table in section.tables:
            lines += ["", _translated(table, language).render("md")]
    if report.missing:
        lines += ["", "## Not measured" if language == "en" else "## 未测量", ""]
        lines += [f"- {name}: `{command}`" for name, command in report.missing.items()]
    lines += ["", *(f"> {_plain(remark.in_(language))}" for remark in report.remarks)]
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: str) -> str:
    """A name must not become a heading, a link or HTML."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _translated(table: Table, language: Language) -> Table:
    if language == "en":
        return table
    columns = [Column(in_chinese(column.name), column.unit, column.numeric) for column in table.columns]
    return Table(in_chinese(table.title), columns, table.rows, [in_chinese(note) for note in table.notes])


def tables_in(report: Document, format: str, language: Language = "en") -> list[str]:
    """All tables, in order."""
    return [_translated(table, language).render(format) for s in report.sections for table in s.tables]


def _csv(report: Document, folder: Path, language: Language) -> list[Path]:
    """A file for each table, under names of their own."""
    written = []
    (folder / "csv").mkdir(exist_ok=True)
    for section in report.sections:
        for number, table in enumerate(section.tables, start=1):
            name = re.sub(r"[^\w-]+", "-", section.name) or "section"
            path = folder / "csv" / f"{name}-{number}.csv"
            path.write_text(_translated(table, language).render("csv"), encoding="utf-8")
            written.append(path)
    return written


def _one_file(format: str) -> Callable[[Document, Path, Language], list[Path]]:
    def write_all(report: Document, folder: Path, language: Language) -> list[Path]:
        path = folder / f"tables.{ENDINGS[format]}"
        path.write_text("\n\n".join(tables_in(report, format, language)) + "\n", encoding="utf-8")
        return [path]

    return write_all


_WRITERS: dict[str, Callable[[Document, Path, Language], list[Path]]] = {
    "md": _markdown,
    "csv": _csv,
    "latex": _one_file("latex"),
    "typst": _one_file("typst"),
}

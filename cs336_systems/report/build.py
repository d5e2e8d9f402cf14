"""A report from files of records: `document` puts it together, `write` writes it in every format."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from cs336_systems.config import UserError, nearest
from cs336_systems.files import all_kept, write_failure, write_file
from cs336_systems.record import RECORDS, Loaded, Record, load, records_file
from cs336_systems.report.cells import CellView, by_experiment, group
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.document import Document, Link, Section
from cs336_systems.report.first_screen import hero_of, highlights_of, numbers_of, trust_of
from cs336_systems.report.picture import save
from cs336_systems.report.presentation import Catalogue, Presentation, presentation_of
from cs336_systems.report.published import PUBLISHED, published
from cs336_systems.report.sections import charts_of, findings_of, in_order, tables_of
from cs336_systems.report.web.page import page
from cs336_systems.text import Language, Text, printable, say

PAGE = "index.html"
Part = TypeVar("Part")
ENDINGS = {"latex": "tex", "typst": "typ"}
SUMMARY_LINES = 5
GROUPS = {
    "speed": Text("Speed", "速度"),
    "attention": Text("Attention", "注意力"),
    "memory": Text("Memory", "显存"),
    "ranks": Text("Ranks", "多进程"),
    "training": Text("Training", "训练"),
    "trust": Text("Trust", "可信度"),
}
"""Headings of the report, in order."""


class Written(NamedTuple):
    """The files of a report, the page first, and its main findings in a few lines."""

    files: list[Path]
    summary: list[Text]
    left_out: list[str]
    """Folders among the paths that hold a page and no records."""


def write_report(
    paths: Sequence[str],
    folder: Path,
    catalogue: Catalogue,
    *,
    title: str = "",
    language: Language = "en",
    formats: Sequence[str] = (),
    with_published: bool = False,
) -> Written:
    """Write the report of files of records, or of folders with a records.jsonl.

    Folders of pages are left out: `runs/*` also names the pages of `cs336 report` and `cs336 compare` there.
    """
    if not paths:
        raise UserError("name a file of records, or a folder with one, such as runs/quick")
    _require_formats(formats)
    left_out = [path for path in paths if _has_only_a_page(Path(path))]
    files = [records_file(path) for path in paths if path not in left_out]
    if not files:
        raise UserError(f"no records in {', '.join(left_out)}, only pages; name a file of records, or its folder")
    links = [link for file in files for link in _links(file.parent / "files", folder)]
    with all_kept():
        references = published() if with_published else ()
        loaded = [load(file) for file in files]
        report = document(loaded, catalogue, title=title, links=links, references=references)
        if not report.sections:
            raise UserError(f"no records in {', '.join(map(str, files))}; measure some with: cs336 bench")
        return Written(write(report, folder, language=language, formats=formats), summary(report), left_out)


def _has_only_a_page(folder: Path) -> bool:
    """True for a folder with a page and without records, in it or in the folders inside."""
    return (folder / PAGE).is_file() and not any((*folder.glob("*.jsonl"), *folder.glob(f"*/{RECORDS}")))


def summary(report: Document) -> list[Text]:
    """Return the first finding of each section, in the order of sections."""
    found = [(section.title, section.findings[0]) for section in report.sections if section.findings]
    return [say("{}: {}", "{}：{}", *each) for each in found[:SUMMARY_LINES]]


def _links(files: Path, folder: Path) -> list[Link]:
    """Return the timelines and traces that instruments have written beside the records."""
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
    loaded: Sequence[Loaded],
    catalogue: Catalogue,
    *,
    title: str = "",
    links: Sequence[Link] = (),
    references: Sequence[Record] = (),
) -> Document:
    """Return the report of loaded files: several machines and runs side by side, with published `references`.

    A link belongs to the section whose name its folder begins with.
    """
    records = [record for one in loaded for record in one.records]
    measured, others = by_experiment(_cells(loaded)), by_experiment(group(references, PUBLISHED))
    experiments = {name: presentation_of(name, catalogue) for name in in_order(measured, catalogue)}
    order = [*GROUPS, ""]
    names = sorted(experiments, key=lambda name: order.index(experiments[name].group))
    sections = [_section(experiments[name], measured[name], links, others.get(name, ())) for name in names]
    highlights = highlights_of(experiments, {name: measured[name] for name in names})
    whole = sections[0].title if len(sections) == 1 else Text("Where time and memory go", "时间与显存花在哪里")
    return Document(
        title=Text(title) if title else whole,
        facts=_facts(records),
        sections=sections,
        missing={one.name: one.command for one in catalogue.values() if one.name not in measured and one.command},
        remarks=[remark for one in loaded for remark in one.remarks],
        highlights=numbers_of(highlights),
        hero=hero_of(highlights, sections),
        trust=trust_of(experiments.values(), measured),
    )


def _cells(loaded: Sequence[Loaded]) -> list[CellView]:
    """Return the cells of all files. Files with the same work on one machine are different runs, which get names."""
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


def _section(
    experiment: Presentation, cells: Sequence[CellView], links: Sequence[Link], references: Sequence[CellView]
) -> Section:
    problems: list[Text] = []

    def safely(make: Callable[[], list[Part]]) -> list[Part]:
        """Make a part of the report; if it fails, its error is named, and everything else is still shown. Records may
        come from anywhere."""
        try:
            return make()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"[:200]
            problems.append(Text(f"Part of this cannot be shown ({what}).", f"部分内容无法显示（{what}）。"))
            return []

    return Section(
        name=experiment.name,
        title=experiment.title,
        question=experiment.question,
        group=GROUPS.get(experiment.group),
        tables=safely(lambda: tables_of(experiment, cells, references)),
        charts=safely(lambda: charts_of(experiment, cells)),
        findings=[*safely(lambda: findings_of(experiment, cells)), *problems],
        links=[link for link in links if Path(link.href).parent.name.startswith(experiment.name)],
    )


def _facts(records: Iterable[Record]) -> dict[Text, str]:
    """Return machine, versions, commit and date for the header: all values that occur, the oldest first."""
    found: dict[Text, dict[str, None]] = {}
    environments = {id(record.environment): record.environment for record in records}.values()
    for environment in sorted(environments, key=lambda each: each.utc or ""):
        versions = {
            Text("machine"): environment.machine,
            Text("torch"): environment.torch,
            Text("triton"): environment.triton,
            Text("driver"): environment.driver,
            Text("Python"): environment.python,
            Text("commit"): environment.git_commit[:7] if environment.git_commit else None,
            Text("date"): environment.utc[:10] if environment.utc else None,
        }
        for name, value in versions.items():
            if value:
                found.setdefault(name, {})[str(value)] = None
    return {name: ", ".join(values) for name, values in found.items()}


# -- writing ----------------------------------------------------------------------------------------------------------


def write(report: Document, folder: Path, *, language: Language = "en", formats: Sequence[str] = ()) -> list[Path]:
    """Write the page and the other formats asked for: md (with pictures), csv, latex, typst. Return the files, the page
    first."""
    _require_formats(formats)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / PAGE, page(report, language))
        writers = [_WRITERS[name] for name in formats if name != "html"]
        return [folder / PAGE, *(path for writer in writers for path in writer(report, folder, language))]
    except OSError as error:
        raise write_failure(error, folder) from None


def _require_formats(names: Sequence[str]) -> None:
    known = ("html", *_WRITERS)
    for name in names:
        if name not in known:
            raise UserError(f"unknown format {name!r}{nearest(name, known)}; choose from: {', '.join(known)}")


def _markdown(report: Document, folder: Path, language: Language) -> list[Path]:
    pictures = save([picture(c, language) for s in report.sections for c in s.charts], folder / "images", ("png",))
    write_file(folder / "report.md", markdown(report, language))
    return [folder / "report.md", *pictures]


def markdown(report: Document, language: Language = "en") -> str:
    lines = [f"# {_plain(report.title.in_(language))}", ""]
    lines += [f"- {_plain(name.in_(language))}: {_plain(value)}" for name, value in report.facts.items()]
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
            lines += ["", table.render("md", language)]
    if report.missing:
        lines += ["", "## Not measured" if language == "en" else "## 未测量", ""]
        lines += [f"- {name}: `{command}`" for name, command in report.missing.items()]
    lines += ["", *(f"> {_plain(remark.in_(language))}" for remark in report.remarks)]
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: str) -> str:
    """Escape a name, which must not become a heading, a link or HTML."""
    return re.sub(r"([\\`*_\[\]<>#|]|:(?=//)|(?<=\bwww)\.)", r"\\\1", printable(" ".join(text.split())))


def tables_in(report: Document, format: str, language: Language = "en") -> list[str]:
    """Return all tables, in order."""
    return [table.render(format, language) for s in report.sections for table in s.tables]


def _csv(report: Document, folder: Path, language: Language) -> list[Path]:
    """Write a CSV file for each table, under unique names."""
    written = []
    (folder / "csv").mkdir(exist_ok=True)
    for section in report.sections:
        for number, table in enumerate(section.tables, start=1):
            name = re.sub(r"[^\w-]+", "-", section.name) or "section"
            path = folder / "csv" / f"{name}-{number}.csv"
            write_file(path, table.render("csv", language))
            written.append(path)
    return written


def _one_file(format: str) -> Callable[[Document, Path, Language], list[Path]]:
    def write_all(report: Document, folder: Path, language: Language) -> list[Path]:
        path = folder / f"tables.{ENDINGS[format]}"
        write_file(path, "\n\n".join(tables_in(report, format, language)) + "\n")
        return [path]

    return write_all


_WRITERS: dict[str, Callable[[Document, Path, Language], list[Path]]] = {
    "md": _markdown,
    "csv": _csv,
    "latex": _one_file("latex"),
    "typst": _one_file("typst"),
}

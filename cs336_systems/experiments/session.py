"""From a command to its tables: choose the device, run the cells, show the results. Serves `bench` and `run`."""

import datetime
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from cs336_systems import record
from cs336_systems.commands import Interrupted, interrupt_raises
from cs336_systems.config import TRITON_ATTENTIONS, RunConfig, UserError, flag, flag_like
from cs336_systems.experiments.catalogue import Request, catalogue
from cs336_systems.experiments.runner import DEFAULT_TIMEOUT, Outcome, Runner, gather
from cs336_systems.flags import one_line
from cs336_systems.text import counted
from cs336_systems.timeline import TIMELINE_FILE, Timeline

OUTPUT = "folder for records.jsonl, or a .jsonl file"
"""What `--output` of the commands that measure names."""


@dataclass(frozen=True)
class SessionArguments:
    """The flags of every command that measures."""

    device: str | None = flag(None, "cpu, cuda or cuda:N (default: cuda where there is one)")
    warmup_steps: int = flag_like(RunConfig, "warmup_steps")
    num_steps: int | None = flag(
        None, f"steps measured (default: {RunConfig.num_steps}; some experiments have more, which this replaces)"
    )
    peak_tflops: float | None = flag(None, "the GPU's dense peak for MFU, where it is not known or you know better")
    timeout: float = flag(DEFAULT_TIMEOUT, "seconds after which a cell is given up")
    output: str | None = flag(None, f"{OUTPUT}; cells it already holds are not run again (default: under runs/)")
    force: bool = flag(False, "run cells again that the file already holds")


class Session(NamedTuple):
    """The result of a session."""

    device: str
    """The device that this machine measures on when none is named."""
    code: int
    """Exit code: 1 if no cell that was asked for has results."""


Requests = Callable[[str, int | None], list[Request]]
"""(device, bytes of the GPU or None) -> the cells asked for."""


def run_session(arguments: SessionArguments, path: Path, requests_on: Requests, *, skip_slow: bool = False) -> Session:
    """Measure the cells that `requests_on` names, into `path`, and print their tables."""
    try:
        with interrupt_raises():
            return _run_session(arguments, path, requests_on, skip_slow)
    except KeyboardInterrupt:
        raise Interrupted(path) from None


def _run_session(arguments: SessionArguments, path: Path, requests_on: Requests, skip_slow: bool) -> Session:
    from cs336_systems.report.sections import tables

    with Runner(
        path,
        force=arguments.force,
        timeout=arguments.timeout,
        peak_tflops=arguments.peak_tflops,
        skip_slow=skip_slow,
    ) as runner:
        if arguments.device is None and runner.device == "cpu":
            print("no CUDA GPU found: running on the CPU", file=sys.stderr)
        requests = requests_on(arguments.device or runner.device, runner.environment.gpu_memory)
        cells = gather(requests)
        outcome = runner.run(cells)
        advice = runner.what_fits(cells[0]) if len(cells) == 1 else None
    asked = _asked(path, {(experiment, record.cell_key(config)) for experiment, config in requests})
    for table in tables(asked, catalogue()):
        print(table.render("terminal"), end="\n\n")
    figures = _drawn(asked, path.parent)
    _report_outcome(outcome)
    if advice:
        print(advice, file=sys.stderr)
    folders = {path.parent / "files" / cell.slug for cell in cells if cell.instrument.keeps_files}
    for line in written_files(path, figures, sorted(folders)):
        print(line)
    return Session(runner.device, 0 if any(item.ok for item in asked) else 1)


def _drawn(asked: list[record.Record], folder: Path) -> list[Path]:
    """Draw what can be drawn and return the charts: the measurements are on disk, and a full one, or a damaged file,
    must not hide them."""
    from cs336_systems.report.picture import save
    from cs336_systems.report.sections import pictures

    charts: list[Path] = []
    for draw in (
        lambda: charts.extend(save(pictures(asked, catalogue()), folder / "figures")),
        lambda: draw_timelines(folder / "files"),
    ):
        try:
            draw()
        except OSError as error:
            print(f"not drawn: cannot write to {str(folder)!r}: {error.strerror}", file=sys.stderr)
    return charts


def draw_timelines(folder: Path) -> list[Path]:
    """Draw a page and a picture for every timeline file, beside it, unless they are up to date."""
    from cs336_systems.report.picture import save
    from cs336_systems.report.timeline_picture import timeline_picture
    from cs336_systems.report.web.timeline_page import write_page

    drawn = []
    for file in sorted(folder.rglob(TIMELINE_FILE)):
        page = file.with_name("timeline.html")
        if not page.exists() or page.stat().st_mtime < file.stat().st_mtime:
            try:
                timeline = Timeline.load(file)
            except UserError as error:  # damaged, or of a newer version: the others can be drawn
                print(f"not drawn: {one_line(str(error))}", file=sys.stderr)
                continue
            write_page(timeline, page)
            drawn += [page, *save([timeline_picture(timeline, "timeline")], file.parent)]
    return drawn


def require_runnable(run: RunConfig) -> None:
    """Raise UserError for what a measuring process would refuse, as far as that is known without one: a module that is
    not there, the Triton kernels on a CPU."""
    require_module(run.model_factory)
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if run.device == "cpu" and run.attention in TRITON_ATTENTIONS and not is_interpreted:
        problem = "the Triton kernels need a CUDA GPU, not 'cpu'; use --attention auto"
        raise UserError(f"attention {run.attention}: {problem}", "attention")


def require_module(factory: str | None) -> None:
    """Raise UserError if there is no such module as that of `--model`."""
    if factory is None:
        return
    name = factory.partition(":")[0].partition(".")[0]
    places = [*sys.path, str(Path.cwd()), str(Path(__file__).resolve().parents[2])]
    if not (name in sys.builtin_module_names or PathFinder.find_spec(name, places)):
        reason = f"ModuleNotFoundError: No module named {name!r}"
        raise UserError(f"model_factory {factory}: cannot import {name!r}: {reason}", "model_factory")


def new_run_file(command: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{command}-{stamp}" / record.RECORDS


def _asked(path: Path, wanted: set[tuple[str, str]]) -> list[record.Record]:
    """Return the records of the (experiment, cell) pairs that were asked for."""
    if not path.exists():
        return []
    loaded = record.load(path)
    for remark in loaded.remarks:
        print(one_line(remark.en), file=sys.stderr)
    return [item for item in loaded.records if (item.experiment, item.cell) in wanted]


def _report_outcome(outcome: Outcome) -> None:
    measured = outcome.done - outcome.failed
    parts = [f"{counted(measured, 'cell')} measured"]
    if outcome.reused:
        parts.append(f"{outcome.reused} taken from the file")
    if outcome.failed:
        parts.append(f"{outcome.failed} failed, did not fit or were skipped")
    print(f"{', '.join(parts)}, in {outcome.seconds:.0f} s on {outcome.environment.machine}")


HOW_TO_OPEN = {
    "trace.json.gz": "drop it into https://ui.perfetto.dev",
    "timeline.html": "open it in a browser",
    "snapshot.pickle": "drop it into https://docs.pytorch.org/memory_viz",
    "nsys.nsys-rep": "open it in Nsight Systems (nsys-ui)",
}
"""Files that instruments write for users, and the programs that open them."""


def written_files(path: Path, figures: Sequence[Path], folders: Sequence[Path]) -> list[str]:
    """Return lines that name the files of a session and how to open them; files of one kind share a line.

    `folders`: those of its cells, with the files that instruments wrote.
    """
    shown = {path: f"as a page: cs336 report {shlex.quote(str(path))}"}
    charts = [figure for figure in figures if figure.suffix == ".png"]
    if charts:
        shown[_pattern(charts)] = f"{len(charts)} chart{'s' * (len(charts) != 1)}, also as .svg"
    for name, how in HOW_TO_OPEN.items():
        found = [folder / name for folder in folders if (folder / name).is_file()]
        if found:
            shown[_pattern(found)] = how if len(found) == 1 else f"{len(found)} files; {how}"
    names = {str(file.relative_to(path.parent)): how for file, how in shown.items()}
    width = max(map(len, names))
    return [f"files in {path.parent}:", *(f"  {name:{width}}  {how}" for name, how in names.items())]


def _pattern(files: Sequence[Path]) -> Path:
    """Return the path of one file, or a pattern for several."""
    first = files[0]
    if len(files) == 1:
        return first
    names, folders = {file.name for file in files}, {file.parent for file in files}
    last = first.name if len(names) == 1 else f"*{first.suffix}"
    return first.parent / last if len(folders) == 1 else first.parent.parent / "*" / last

"""`cs336 profile`, which records, and `cs336 inspect`, which reads what somebody else has recorded."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from cs336_systems.config import RunConfig, UserError, flag, flag_like
from cs336_systems.experiments.session import Requests, SessionArguments, new_run_file, run_session
from cs336_systems.measure.readers.nsys import find_nsys, read_nsys
from cs336_systems.measure.readers.snapshot import read_snapshot
from cs336_systems.measure.readers.trace import WHOLE, Trace, read_chrome, trace_metrics
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.record import GIB, MIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.kernels import kernels
from cs336_systems.report.web.timeline_page import write_page
from cs336_systems.table import Column, Table
from cs336_systems.timeline import Timeline

KINDS = ("kernels", "memory", "saved_tensors")
LARGEST_SHOWN = 10


@dataclass(frozen=True)
class ProfileArguments(SessionArguments, ShapeArguments):
    model: str | None = flag_like(RunConfig, "model_factory")
    compile: bool = flag_like(RunConfig, "compile")
    fast: str = flag_like(RunConfig, "fast")
    nsys: bool = flag(False, "kernels by Nsight Systems instead of torch.profiler, where it is installed")
    only: tuple[str, ...] = flag((), "of kernels, memory, saved_tensors, only these")


def run_profile(arguments: ProfileArguments) -> None:
    """Measure what is asked for, and show it."""
    wanted = arguments.only or KINDS
    for name in wanted:
        if name not in KINDS:
            raise UserError(f"--only {name!r}: choose from {', '.join(KINDS)}")
    impossible = {}
    if arguments.mode == "inference":
        impossible["saved_tensors"] = "mode 'inference' keeps nothing for backward; use another --mode"
    if arguments.compile:
        impossible["memory"] = "memory is followed operator by operator, and a compiled model has none: no --compile"
    if refused := [impossible[name] for name in arguments.only if name in impossible]:
        raise UserError(f"--only {','.join(arguments.only)}: {refused[0]}")
    by_nsys = arguments.nsys and find_nsys() is not None
    if arguments.nsys and not by_nsys:
        print("nsys is not installed, or not on PATH: torch.profiler serves", file=sys.stderr)

    def requests_on(device: str) -> Requests:
        run = arguments.run_config(
            default_size="small" if device.startswith("cuda") else "tiny",
            device=device,
            model_factory=arguments.model,
            compile=arguments.compile,
            fast=arguments.fast,
            warmup_steps=arguments.warmup_steps,
            num_steps=arguments.num_steps,
        )
        own = {"kernels": {"profiler": "nsys"}} if by_nsys else {}
        config = _without_graph(run).to_dict()
        return [(name, {**config, **own.get(name, {})}) for name in wanted if name not in impossible]

    requests_on(arguments.device or "cuda")  # mistakes are told before a process is started
    run_session(arguments, Path(arguments.output) if arguments.output else new_run_file("profile"), requests_on)


def _without_graph(run: RunConfig) -> RunConfig:
    """Inside a CUDA graph nothing can be traced to the phase, the module or the line that it comes from."""
    if "graph" not in run.fast_parts:
        return run
    return replace(run, fast=",".join(run.fast_parts - {"graph"}) or "off")


# -- what somebody else has recorded ----------------------------------------------------------------------------------


def inspected(path: Path) -> list[Table]:
    """The tables of a file; of a snapshot also a page, beside it."""
    name = path.name.lower()
    if name.endswith((".sqlite", ".db")):
        return _kernel_tables(path, read_nsys(path))
    if name.endswith((".json", ".json.gz")):
        return _kernel_tables(path, read_chrome(path))
    if name.endswith((".pickle", ".pkl")):
        return _memory_tables(path, read_snapshot(path))
    raise UserError(f"{str(path)!r}: traces end in .json, .json.gz or .sqlite, memory snapshots in .pickle")


def _kernel_tables(path: Path, trace: Trace) -> list[Table]:
    if all(kernel.phase is None for kernel in trace.kernels):
        trace = replace(trace, kernels=[replace(kernel, phase=WHOLE) for kernel in trace.kernels])
    return kernels([CellView.of("trace", {"size": path.name}, trace_metrics(trace))])


def _memory_tables(path: Path, timeline: Timeline) -> list[Table]:
    page = path.with_suffix(".html")
    try:
        write_page(timeline, page)
        written = f"to look into: {page}"
    except OSError as error:
        written = f"no page: cannot write {str(page)!r}: {error.strerror}"
    moment, peak = timeline.peak()
    parts = [[label, f"{size / GIB:.3f}", f"{size / peak:.1%}"] for label, size in timeline.parts_at(moment).items()]
    largest = sorted(timeline.blocks, key=lambda block: -block.size)[:LARGEST_SHOWN]
    blocks = [[f"{block.size / MIB:,.1f}", block.line or block.label] for block in largest]
    title = f"snapshot: {path.name}, peak {peak / GIB:.3f} GiB"
    return [
        Table(
            title, [Column("made by", numeric=False), Column("at the peak", "GiB"), Column("share")], parts, [written]
        ),
        Table("snapshot: the largest blocks", [Column("size", "MiB"), Column("line", numeric=False)], blocks),
    ]

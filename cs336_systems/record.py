"""Measurements: `Record`, `Metric`, `Environment`, files of records, statistics of samples. Standard library only.

A file of records is JSON lines, append-only, one line per (experiment, configuration, variant, metric). Where two lines
agree in these four, the later one counts. Base units are stored (s, B, B/s, FLOP/s, 1), raw samples only: means, ratios
and speed-ups are derived when a file is read. A failed cell is a record with no samples and its reason in `status`.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from cs336_systems.config import UserError, nearest
from cs336_systems.files import (
    LARGEST_VALUE,
    LimitError,
    append_lines,
    foreign,
    is_number,
    json_problem,
    read_input,
    require_at_most,
    require_shallow,
)
from cs336_systems.text import Text, say

SCHEMA_VERSION = 2
"""Version of the format. Version 1 had the variant in front of the metric's name; it is split off on reading."""
RECORDS = "records.jsonl"
"""Name of the file of records in a folder."""
CELL_TIME = "cell_time"
"""The metric that ends every cell: seconds from start to end, set-up included. A cell with it is complete."""
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Environment:
    """The machine and software of a record, without which numbers cannot be compared. None: not known on that
    machine."""

    gpu: str | None = None
    gpu_count: int = 0
    compute_capability: str | None = None
    gpu_memory: int | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    triton: str | None = None
    nccl: str | None = None
    python: str | None = None
    host: str | None = None
    """A hash of the host name: tells machines apart without naming them."""
    git_commit: str | None = None
    git_dirty: bool | None = None
    tf32: bool | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    other_gpu_processes: int | None = None
    cpu: str | None = None
    cpu_cores: int | None = None
    memory: int | None = None
    utc: str | None = None

    @property
    def machine(self) -> str:
        """The machine's GPU, or its CPU if it has none."""
        return self.gpu or self.cpu or "unknown machine"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Environment":
        """Create from JSON, which has lists in place of tuples."""
        fields: dict[str, Any] = {**values, "throttle_reasons": tuple(values.get("throttle_reasons", ()))}
        found = cls(**fields)
        for name, kind in _environment_kinds().items():
            if not isinstance(getattr(found, name), kind):
                raise ValueError(f"its {name} is {getattr(found, name)!r:.40}")
        return found


@cache
def _environment_kinds() -> dict[str, Any]:
    hints = get_type_hints(Environment)
    return {name: tuple if name == "throttle_reasons" else kind for name, kind in hints.items()}


class Metric(NamedTuple):
    """One measured quantity with its base unit and raw samples, as returned by an instrument."""

    name: str
    unit: str
    samples: Sequence[float | str]
    variant: str = ""
    """The implementation, arrangement or strategy that was measured, if one cell measures several."""


@dataclass(frozen=True)
class Record:
    experiment: str
    config: Mapping[str, Any]
    metric: str
    unit: str
    samples: tuple[float | str, ...] = ()
    status: str = "ok"
    environment: Environment = field(default_factory=Environment)
    variant: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @cached_property
    def numbers(self) -> list[float]:
        return [float(sample) for sample in self.samples if not isinstance(sample, str)]

    @cached_property
    def cell(self) -> str:
        """Key of the work that was done: a hash of the configuration without its `size`, which is only a name."""
        return cell_key(self.config)

    def to_json(self) -> str:
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        # Samples may be inf or nan (a loss that diverged) or text. JSON has neither, so these travel as strings.
        values["samples"] = [_encode(sample) for sample in self.samples]
        values["environment"] = {**vars(self.environment)}
        return json.dumps(values, allow_nan=False, separators=(",", ":"), default=dataclasses.asdict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], before: "Record | None" = None) -> "Record":
        """Create from JSON. `before`: the record of the line above, whose configuration and environment are shared if
        equal."""
        version = values.get("schema_version")
        if not isinstance(version, int):
            raise ValueError("it has no schema_version")
        if version > SCHEMA_VERSION:
            raise UserError(
                f"record of schema version {version}, this cs336_systems reads up to {SCHEMA_VERSION}: upgrade it"
            )
        for name, kind in _KINDS.items():
            if not isinstance(values.get(name), kind):
                raise ValueError(f"its {name} is {values.get(name)!r:.40}")
        config, given = values["config"], values["environment"]
        if before is not None and before.__dict__.get("given_environment") == given:
            given, environment = before.__dict__["given_environment"], before.environment
        else:
            environment = Environment.from_dict(given)
        if config.get("model_factory") in _MOVED:
            config = {**config, "model_factory": _MOVED[config["model_factory"]]}
        if before is not None and before.config == config:
            config = before.config
        else:
            require_shallow(config, DEEPEST, "its config")
        variant, metric = values.get("variant", ""), values["metric"]
        if version < 2:
            variant, metric = _split_variant(config, metric)
        if not isinstance(variant, str):
            raise ValueError(f"its variant is {variant!r:.40}")
        record = cls(
            experiment=values["experiment"],
            config=config,
            metric=metric,
            unit=values["unit"],
            samples=_decoded(values["samples"]),
            status=values["status"],
            environment=environment,
            variant=variant,
        )
        record.__dict__["given_environment"] = given  # as it was read, for the record of the line below
        if before is not None and before.config is config:
            record.__dict__["cell"] = before.cell  # what the cached property would work out again
        return record


DEEPEST = 10
"""Maximum levels of a configuration in a file; ours have two."""


_MOVED = {"cs336_systems.benchmark.llama:build": "cs336_systems.experiments.steps.llama:build"}
"""Former names of this package's model factories in older records -> their present names."""


def _split_variant(config: Mapping[str, Any], metric: str) -> tuple[str, str]:
    """Split a metric's name of schema version 1 into variant and metric: `flash_triton_step_time`, `naive:
    step_time`."""
    found = [
        (name, metric[len(name) + len(separator) :])
        for field_name, separator in (("implementations", "_"), ("arrangements", ": "), ("strategies", ": "))
        for name in _names(config.get(field_name))
        if metric.startswith(name + separator)
    ]
    if found:
        return max(found, key=lambda pair: len(pair[0]))  # `sdpa` begins `sdpa_flash`, too
    if metric.startswith("dtype of "):
        return metric.removeprefix("dtype of "), "dtype"
    head, separator, tail = metric.partition(": ")
    is_collective = separator and head.split(" ")[0] in _names(config.get("collectives"))
    return (head, tail) if is_collective else ("", metric)


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | tuple) else []


_KINDS = {
    **dict.fromkeys(("experiment", "metric", "unit", "status"), str),
    **dict.fromkeys(("config", "environment"), dict),
    "samples": list,
}
"""Required entries of a line and their types, which are checked because files may come from anywhere."""


def _encode(sample: float | str) -> float | str:
    if isinstance(sample, str):
        return "=" + sample
    return sample if math.isfinite(sample) else repr(sample)


def _decoded(samples: list[Any]) -> tuple[float | str, ...]:
    if all(type(sample) is float for sample in samples):
        return tuple(samples)
    return tuple(map(_decode, samples))


def _decode(sample: Any) -> float | str:
    if isinstance(sample, str):
        return sample[1:] if sample.startswith("=") else float(sample)
    if not is_number(sample, -1e300, 1e300) and not isinstance(sample, float):
        raise ValueError(f"a sample is {sample!r:.40}")
    return sample


def cell_key(config: Mapping[str, Any]) -> str:
    """Return a short, stable hash of the work that a configuration describes; `size` is only a name and does not
    count."""
    work = {name: value for name, value in config.items() if name != "size"}
    canonical = json.dumps(work, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


HEADLINES = ("step_time", "forward_backward_time", "leaderboard_time")
"""Main metrics of a cell for summaries and comparisons; the first one that a cell has counts."""


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """The records of a file, the latest for each (experiment, cell, variant, metric), and remarks on the file."""

    records: list[Record]
    remarks: list[Text]
    name: str = ""
    """Name of the run: its folder's name, or the file's."""


def append(path: str | Path, records: Iterable[Record]) -> None:
    """Append records in one write and force them to disk, so that a crash leaves whole cells or one torn last line."""
    text = "".join(record.to_json() + "\n" for record in records)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    append_lines(path, text.encode())


NAMED = 4
"""Files of records that an error names."""


def load(path: str | Path) -> Loaded:
    """Read a file of records, or the records.jsonl of a folder.

    Lines that cannot be read are left out and remarked on, as long as some can be.
    """
    path = records_file(path)
    if not path.exists():
        folder = path.parent  # named by the user, or where the file was expected
        if path.name == RECORDS and (inside := [*folder.glob("*.jsonl"), *folder.glob(f"*/{RECORDS}")]):
            more = f" (and {len(inside) - NAMED} more)" if len(inside) > NAMED else ""
            raise UserError(f"no file {str(path)!r}; name one of: {', '.join(sorted(map(str, inside))[:NAMED])}{more}")
        ways = f"cs336 bench --output {shlex.quote(str(path))}"
        if path.name == RECORDS:
            ways += f", or cs336 train --data TEXT --output {shlex.quote(str(folder))}"
        raise UserError(f"no file {str(path)!r}; make one with: {ways}")
    with foreign(path, "a file of records"):
        records, remarks = _read_lines(path)
        name = path.absolute().parent.name if path.stem == "records" else path.stem
        return Loaded(latest(records), remarks, name)


def _read_lines(path: Path) -> tuple[list[Record], list[Text]]:
    records: list[Record] = []
    unreadable = []
    torn, where = b"", ""
    for number, line in enumerate(io.BytesIO(read_input(path)), start=1):
        where, before = f"{path}, line {number}", records[-1] if records else None
        if not line.endswith(b"\n"):
            torn = line
            break
        if not line.strip():
            continue
        try:
            records.append(_parse(line, where, before))
        except UserError as error:
            unreadable.append(str(error))
            if rest := _after_tear(line):
                with contextlib.suppress(UserError):
                    records.append(_parse(rest, where, before))
    if unreadable and not records:
        raise UserError(unreadable[0])
    if torn and not records and not _RECORD_START.startswith(torn[: len(_RECORD_START)]):
        _parse(torn, where)  # not the start of a record of ours: some other file
    remarks = [say(*_TORN, path.name)] if torn else []
    if unreadable:
        remarks.append(say(*_UNREADABLE, path.name, str(len(unreadable)), unreadable[0]))
    return records, remarks


def _after_tear(line: bytes) -> bytes:
    """Return the record at the end of a line whose beginning was left by a killed writer."""
    start = line.rfind(_RECORD_START)
    return line[start:] if start > 0 else b""


def records_file(path: str | Path) -> Path:
    """Return the file of records that `path` names: a folder stands for the records.jsonl in it."""
    path = Path(path)
    return path / RECORDS if path.is_dir() else path


def output_file(path: str | Path) -> Path:
    """Return the file of records that `--output` of a command that measures names: a new name is a folder with a
    records.jsonl unless it ends in .jsonl; a file that is there is that file."""
    path = Path(path)
    is_folder = path.is_dir() or not (path.exists() or path.suffix == ".jsonl")
    return path / RECORDS if is_folder else path


def chosen(records: list[Record], experiments: Sequence[str]) -> list[Record]:
    """Return the records of the named experiments, or all if none is named; raise UserError for a name without any."""
    have = dict.fromkeys(record.experiment for record in records)
    for name in experiments:
        if name not in have:
            raise UserError(f"no records of the experiment {name!r}{nearest(name, have)}; there are: {', '.join(have)}")
    return [record for record in records if not experiments or record.experiment in experiments]


_TORN = (
    "{}: the last line is torn (a run was interrupted while writing); left out",
    "{}：最后一行不完整（写入时被中断）；已略去",
)
_UNREADABLE = ("{}: {} lines left out, such as: {}", "{}：略去 {} 行，例如：{}")
_RECORD_START = b'{"experiment":"'


def _parse(line: bytes, where: str, before: Record | None = None) -> Record:
    try:
        require_at_most(len(line), LARGEST_VALUE, "bytes")
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        return Record.from_dict(values, before)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except LimitError as error:
        raise UserError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{where}: not a record of cs336_systems ({json_problem(error)}); is this the right file?"
        ) from None


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record for each (experiment, cell, variant, metric), in order of first appearance.

    Of a cell that was measured again after a failure, or that failed later, only the lines of the last run are kept.
    """
    runs: dict[tuple[str, str], dict[tuple[str, str], Record]] = {}
    complete: set[tuple[str, str]] = set()
    for record in records:
        key = (record.experiment, record.cell)
        if key in complete:  # the cell ended before this line: a new run of it begins here
            complete.discard(key)
            runs[key] = {}
        if not record.ok:  # what an interrupted run before it left does not belong to this one
            runs[key] = {}
        runs.setdefault(key, {})[record.variant, record.metric] = record
        if record.metric == CELL_TIME:
            complete.add(key)
    return [record for run in runs.values() for record in run.values()]


# -- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    n: int
    mean: float
    std: float
    min: float
    max: float
    median: float
    p5: float
    p95: float

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation over mean."""
        return self.std / self.mean if self.mean else 0.0


def summarize(samples: Sequence[float]) -> Statistics:
    """Return statistics of at least one sample; the standard deviation is the sample's (ddof=1), 0 for a single one."""
    if not samples:
        raise ValueError("no samples")
    if not all(map(math.isfinite, samples)):  # a run that diverged: nothing about it can be averaged
        return Statistics(len(samples), *[math.nan] * 7)
    ordered = sorted(samples)
    mean = statistics.fmean(ordered)
    # As statistics.stdev, without its fractions: a report has tens of thousands of these.
    squares = math.fsum((sample - mean) ** 2 for sample in ordered)
    return Statistics(
        n=len(ordered),
        mean=mean,
        std=math.sqrt(squares / (len(ordered) - 1)) if len(ordered) > 1 else 0.0,
        min=ordered[0],
        max=ordered[-1],
        median=statistics.median(ordered),
        p5=percentile(ordered, 5),
        p95=percentile(ordered, 95),
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the two nearest of the sorted samples (numpy's default)."""
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def steady_from(samples: Sequence[float], tolerance: float = 0.05) -> int | None:
    """Return the index of the first step from which the run is steady, or None if it never is.

    Steady: this step and all after it but one in ten lie within `tolerance` of the median of the last half, and they
    are at least a third of the run. Single outliers are allowed because a shared machine always has some; a first step
    that is far off never is.
    """
    if not samples:
        return None
    level = statistics.median(samples[len(samples) // 2 :])
    off = [abs(sample - level) > tolerance * level for sample in samples]
    for start in range(len(samples) - math.ceil(len(samples) / 3) + 1):
        rest = off[start:]
        if not rest[0] and sum(rest) <= len(rest) / 10:
            return start
    return None


BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
}
"""For each collective, a function of the number of ranks: bytes on the busiest link per byte of the whole array, as in
nccl-tests."""

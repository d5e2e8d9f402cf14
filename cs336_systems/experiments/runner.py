"""Runs cells one after another in a worker process and appends what they gave to a file of records.

- A failure (out of memory, a crash, a time-out) becomes a row, and the worker is replaced.
- Records are on disk before the next cell begins. A run that was stopped, even by SIGKILL, goes on where it was: cells
  in the file that ended well or ran out of memory are not run again, those that crashed or timed out are.
- A cell that several experiments ask for is measured once and recorded under each.
- A cell that cannot fit by the memory model is not tried; its row says what it would need.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from cs336_systems import record
from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments.catalogue import Request, catalogue
from cs336_systems.experiments.progress import Progress
from cs336_systems.experiments.spec import Config, Instrument
from cs336_systems.files import locked
from cs336_systems.predict.fit import FIT_MARGIN
from cs336_systems.record import CELL_TIME, GIB, HEADLINES, Environment, Metric, Record

DEFAULT_TIMEOUT = 1800.0
LARGEST_LIMIT = 1e7
SLOWDOWN = "cs336_systems.measure.environment:measure_slowdown"
TOO_SLOW = 20.0
"""A quick run skips precisions in which a matmul on this CPU takes this many times as long as in fp32, or longer."""


@dataclass
class Cell:
    """Work to be measured once, and the experiments that asked for it, each with the configuration under its own
    names."""

    instrument: Instrument
    config: Config
    wanted_by: dict[str, Config] = field(default_factory=dict)
    apart: str = ""
    """What tells the cell from others with the same label; `gather` sets it."""

    @property
    def key(self) -> tuple[str, str]:
        return (self.instrument.name, record.cell_key(self.config))

    @property
    def needs_fresh_process(self) -> bool:
        return bool(self.instrument.environment) or self.instrument.needs_fresh_process(self.config)

    @property
    def slug(self) -> str:
        """Folder name for the files that the cell writes besides records."""
        return re.sub(r"[^\w.]+", "-", self.name)

    @property
    def name(self) -> str:
        label = self.instrument.label(self.config, list(self.wanted_by))
        name = f"{self.instrument.name} {label}" if self.instrument.label_has_name else label
        return f"{name}, {self.apart}" if self.apart else name


def gather(requests: Iterable[Request]) -> list[Cell]:
    """Return (experiment, configuration) pairs as cells, in which equal work occurs only once."""
    cells: dict[tuple[str, str], Cell] = {}
    for experiment, config in requests:
        instrument = catalogue()[experiment].instrument
        assert instrument is not None, f"{experiment} has no instrument"
        cell = Cell(instrument, config)
        cells.setdefault(cell.key, cell).wanted_by[experiment] = config
    by_name: dict[str, list[Cell]] = {}
    for cell in cells.values():
        by_name.setdefault(cell.name, []).append(cell)
    for alike in by_name.values():
        if len(alike) > 1:
            _tell_apart(alike)
    return list(cells.values())


def _tell_apart(cells: Sequence[Cell]) -> None:
    """Add values to the names of cells with equal labels until they differ: single values first, then fields that tell
    most cells apart, then the shortest."""
    configs = [_flat(cell.config) for cell in cells]
    texts = {name: [_field_text(name, config.get(name)) for config in configs] for config in configs for name in config}

    def order(name: str) -> tuple[bool, int, int]:
        has_lists = any(isinstance(config.get(name), list | tuple) for config in configs)
        return has_lists, -len(set(texts[name])), max(map(len, texts[name]))

    for name in sorted((name for name, found in texts.items() if len(set(found)) > 1), key=order):
        if len({cell.apart for cell in cells}) == len(cells):
            break
        for cell, text in zip(cells, texts[name], strict=True):
            cell.apart = f"{cell.apart}, {text}" if cell.apart else text


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the fields of its parts, such as the model, beside its own."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat


def _field_text(name: str, value: Any) -> str:
    """Return a value with the name of its field; text has no name."""
    words = name.replace("_", " ")
    if value is None or isinstance(value, bool):
        return words if value else f"no {words}"
    if isinstance(value, list | tuple):
        return f"{words} {' '.join(map(str, value))}"
    return value if isinstance(value, str) and value else f"{words} {value}"


@dataclass(frozen=True)
class Need:
    """Predicted bytes of a cell, and the bytes of its device."""

    predicted: int
    capacity: int
    at_least: bool = False

    @property
    def fits(self) -> bool:
        return self.predicted <= FIT_MARGIN * self.capacity

    def __str__(self) -> str:
        bound = "at least " if self.at_least else ""
        return f"needs {bound}{self.predicted / GIB:,.1f} GiB of {self.capacity / GIB:,.1f} GiB"


@dataclass
class Outcome:
    done: int = 0
    reused: int = 0
    failed: int = 0
    seconds: float = 0.0
    environment: Environment = field(default_factory=Environment)


class Runner:
    """`with Runner(path) as runner: runner.run(cells)`; entering starts a worker, which tells what machine this is."""

    def __init__(
        self,
        path: str | Path,
        *,
        force: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        peak_tflops: float | None = None,
        skip_slow: bool = False,
        quiet: bool = False,
    ):
        for name, value in (("timeout", timeout), ("peak_tflops", peak_tflops)):
            if value is not None and not 0 < value <= LARGEST_LIMIT:
                raise UserError(f"--{name} must be above 0 and at most {LARGEST_LIMIT:g}, got {value!r}")
        self.path = Path(path)
        self.force = force
        self.timeout = timeout
        self.options = {"peak_tflops": peak_tflops} if peak_tflops else {}
        self.skip_slow = skip_slow
        self.quiet = quiet
        self.worker: Worker | None = None
        _require_writable(self.path)
        self.known = record.load(self.path) if self.path.exists() else record.Loaded([], [])

    def __enter__(self) -> "Runner":
        self.worker = Worker()
        self.device: str = self.worker.machine["device"]
        self.environment = Environment.from_dict(self.worker.machine["environment"])
        try:
            self._refuse_other_machine()
        except UserError:
            self._stop_worker()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_worker()

    def run(self, cells: list[Cell]) -> Outcome:
        outcome = Outcome(environment=self.environment)
        start = time.monotonic()
        with _exclusive(self.path):
            self.known = record.load(self.path)  # again: another run may have ended since
            finished = {} if self.force else self._finished()
            todo = []
            for cell in cells:
                if cell.key in finished:
                    self._share(cell, finished[cell.key])
                    outcome.reused += 1
                else:
                    todo.append(cell)
            with Progress(len(todo), quiet=self.quiet) as progress:
                for cell in todo:
                    progress.begin(cell.name)
                    records = self._measure(cell)
                    record.append(self.path, records)
                    outcome.done += 1
                    outcome.failed += not records[-1].ok
                    progress.end(cell.name, _headline(records))
        outcome.seconds = time.monotonic() - start
        return outcome

    def _finished(self) -> dict[tuple[str, str], list[Record]]:
        """Return the records of complete cells in the file; a cell that crashed or timed out does not count, so it is
        tried again."""
        cells: dict[tuple[str, str, str], list[Record]] = {}
        for item in self.known.records:
            experiment = catalogue().get(item.experiment)
            if experiment is not None and experiment.instrument is not None:
                cells.setdefault((experiment.instrument.name, item.cell, item.experiment), []).append(item)
        return {
            (instrument, key): records
            for (instrument, key, _), records in cells.items()
            if any(map(_is_result, records))
        }

    def _share(self, cell: Cell, records: list[Record]) -> None:
        """Record a finished cell under the experiments that ask for it now and do not have it yet."""
        have = {(r.experiment, r.cell) for r in self.known.records if _is_result(r)}
        for experiment, config in cell.wanted_by.items():
            if (experiment, record.cell_key(config)) not in have:
                copies = [dataclasses.replace(r, experiment=experiment, config=config) for r in records]
                record.append(self.path, sorted(copies, key=lambda r: r.metric == CELL_TIME))

    def _measure(self, cell: Cell) -> list[Record]:
        need = self._need(cell)
        if need is not None and not need.fits:
            return self._records(cell, [], f"oom: {need} (predicted, not tried)", 0.0, self.environment)
        if reason := self._too_slow(cell):
            return self._records(cell, [], f"skipped: {reason}", 0.0, self.environment)
        answer = self._ask(cell)
        match answer["event"]:
            case "measured":
                environment = Environment.from_dict(answer["environment"])
                metrics = [Metric(*metric) for metric in answer["metrics"]]
                return self._records(cell, metrics, "ok", answer["seconds"], environment)
            case "user_error":
                raise UserError(answer["message"])
        status = answer["status"]
        if status == "oom":
            status = f"oom: {need or 'out of memory'}"
        return self._records(cell, [], status, answer.get("seconds", 0.0), self.environment)

    def what_fits(self, cell: Cell) -> str | None:
        """Return the change with which a cell that does not fit would, by prediction; None if it fits."""
        need = self._need(cell)
        if need is None or need.fits:
            return None
        batches = [cell.config["batch_size"] >> times for times in range(cell.config["batch_size"].bit_length())]
        for blocks, batch in product(dict.fromkeys((cell.config["checkpoint_blocks"], 1)), batches):
            changed = {**cell.config, "checkpoint_blocks": blocks, "batch_size": batch}
            with contextlib.suppress(UserError):  # recomputation that this step does not support
                smaller = self._need(dataclasses.replace(cell, config=RunConfig.of(changed).to_dict()))
                if smaller is not None and smaller.fits:
                    flags = {name: changed[name] for name in changed if changed[name] != cell.config[name]}
                    words = " ".join(f"--{name} {value}" for name, value in flags.items())
                    return f"it is predicted to fit with {words}"
        return (
            "no smaller batch fits, with recomputation or without; use a smaller --size or a shorter --context_length"
        )

    def _too_slow(self, cell: Cell) -> str | None:
        """Return why a quick run skips a cell: this CPU emulates its precision."""
        precision, on_cpu = cell.config.get("precision"), cell.config.get("device") == "cpu"
        if not (self.skip_slow and on_cpu and "num_steps" in cell.config and precision in ("bf16", "fp16")):
            return None
        times = self._slowdowns.get(precision, 1.0)
        return f"a {precision} matmul takes {times:.0f}x as long as in fp32 on this CPU" if times > TOO_SLOW else None

    @cached_property
    def _slowdowns(self) -> dict[str, float]:
        """Time of a matmul in low precision over that in fp32, by precision."""
        self.worker = self.worker or Worker()
        answer = self.worker.ask({"measure": SLOWDOWN, "config": {}, "options": {}}, self.timeout)
        return {name: samples[0] for name, _, samples, *_ in answer.get("metrics", ())}

    def _ask(self, cell: Cell) -> dict[str, Any]:
        environment = cell.instrument.environment
        if self.worker is None or environment or (cell.needs_fresh_process and self.worker.used):
            self._stop_worker()
            self.worker = Worker(environment)
        options: dict[str, Any] = self.options if cell.instrument.takes_peak_tflops else {}
        if cell.instrument.keeps_files:
            options = {"folder": str(self.path.parent / "files" / cell.slug)}
        request = {"measure": cell.instrument.measure, "config": cell.config, "options": options}
        answer = self.worker.ask(request, self.timeout)
        if cell.needs_fresh_process or answer["event"] == "failure":
            self._stop_worker()
        return answer

    def _stop_worker(self) -> None:
        if self.worker is not None:
            self.worker.stop()
            self.worker = None

    def _need(self, cell: Cell) -> Need | None:
        """Return the memory that a cell needs and the memory of its device; None if either is not known."""
        on_cuda = cell.config.get("device", "cpu").startswith("cuda")
        capacity = self.environment.gpu_memory if on_cuda else self.environment.memory
        memory = cell.instrument.memory(cell.config) if capacity is not None else None
        return Need(memory.predicted, capacity, memory.at_least) if memory and capacity is not None else None

    def _records(
        self, cell: Cell, metrics: list[Metric], status: str, seconds: float, environment: Environment
    ) -> list[Record]:
        """Return all records of a cell for every experiment that wants it; the last one marks it as complete."""
        end = Metric(CELL_TIME, "s", [seconds] if status == "ok" else [])
        return [
            Record(experiment, config, m.name, m.unit, tuple(m.samples), status, environment, m.variant)
            for experiment, config in cell.wanted_by.items()
            for m in [*metrics, end]
        ]

    def _refuse_other_machine(self) -> None:
        """Refuse to mix two machines in one file: on resume, cells of one would be taken for those of the other."""
        here = self.environment
        for there in (item.environment for item in self.known.records):
            if (there.gpu, there.cpu) != (here.gpu, here.cpu):
                raise UserError(
                    f"{str(self.path)!r} holds records of {there.machine!r} and this machine is {here.machine!r}; "
                    f"choose another --output"
                )


class Worker:
    """A child process in a session of its own, so that Ctrl-C reaches only the runner, which then ends it."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.used = False
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            # -P: a file in the working directory must not stand in for a standard module or for this package
            [sys.executable, "-P", "-m", "cs336_systems.experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
            env={**os.environ, **(environment or {}), "PYTHONPATH": path},
        )
        self.lines: Queue[bytes | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.machine = self._answer(timeout=300)
        if self.machine["event"] != "ready":
            self.stop()
            raise UserError(f"the measuring process did not start: {self.machine['status']}; try: cs336 doctor")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.used = True
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        return self._answer(timeout)

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=timeout)
        except Empty:
            return {"event": "failure", "status": f"error: timeout after {timeout:g} s", "seconds": timeout}
        return self._died() if line is None else json.loads(line)

    def _died(self) -> dict[str, Any]:
        code = self.process.wait()
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = self.log_tail()
        return {"event": "failure", "status": f"error: crashed ({reason})" + (f": {last}" if last else "")}

    def log_tail(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its compile workers too
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        self.log.close()


def _is_result(item: Record) -> bool:
    """Return True for the last record of a cell that need not be run again: it succeeded, or it does not fit."""
    return item.metric == CELL_TIME and (item.ok or item.status.startswith("oom"))


def _headline(records: list[Record]) -> str:
    if not records[-1].ok:
        return records[-1].status
    for item in records:
        if item.metric in HEADLINES:
            mean = record.summarize(item.numbers).mean * 1e3
            return f"{mean:.{1 if mean >= 1 else 3}f} ms"
    return "done"


def _require_writable(path: Path) -> None:
    """Raise an error before anything is run or written if the file is not writable."""
    if path.is_dir():
        raise UserError(f"--output {str(path)!r} is a folder; name a file, such as {path / 'records.jsonl'}")
    if path.exists():
        if not path.is_file():
            raise UserError(f"--output {str(path)!r} is not a regular file; name one, such as records.jsonl")
        if not os.access(path, os.W_OK):
            raise UserError(f"--output {str(path)!r} is not writable")
        return
    ancestor = path.absolute().parent
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise UserError(f"--output {str(path)!r}: cannot write to {str(ancestor)!r}; choose another place")


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Lock the file for one run at a time. A run that records nothing leaves no file behind."""
    new_folder = not path.parent.exists()
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path, follow_links=True))
        except BlockingIOError:
            raise UserError(f"another run is writing to {str(path)!r}; wait for it or choose --output") from None
        except OSError as error:
            raise UserError(f"--output {str(path)!r}: {error.strerror}; choose another place") from None
        try:
            yield
        finally:
            if path.stat().st_size == 0:
                path.unlink()
                if new_folder:
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()

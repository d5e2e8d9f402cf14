"""Records grouped into cells, and the quantities that are derived from them: rates, ratios, errors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cs336_systems.record import CELL_TIME, Environment, Record, Statistics, summarize

PHASES = ("forward", "loss", "backward", "sync", "optimizer", "step")


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's own and its model's, side by side."""
    model = config.get("model")
    return {"fast": "off", **config, **model} if isinstance(model, Mapping) else dict(config)


@dataclass(frozen=True)
class CellView:
    """One configuration of one experiment, and everything that was recorded of it."""

    experiment: str
    config: Mapping[str, Any]
    metrics: Mapping[str, Record]
    run: str = ""
    """Where several runs of one machine are shown: which."""

    @classmethod
    def of(cls, experiment: str, config: Mapping[str, Any], rows: Iterable[Sequence[Any]]) -> "CellView":
        """Of an instrument's answer that was never recorded: [metric, unit, samples] rows."""
        whole = [*rows, (CELL_TIME, "s", [0.0])]
        return cls(
            experiment, config, {m: Record(experiment, config, m, unit, tuple(found)) for m, unit, found in whole}
        )

    @property
    def environment(self) -> Environment:
        return next(iter(self.metrics.values())).environment

    @cached_property
    def machine(self) -> str:
        """The device that did the work, and the run where there are several."""
        environment = self.environment
        on_cpu = self.config.get("device") == "cpu"
        device = (environment.cpu or environment.machine) if on_cpu else environment.machine
        return f"{device} · {self.run}" if self.run else device

    @property
    def status(self) -> str:
        return self.metrics[CELL_TIME].status if CELL_TIME in self.metrics else "error: interrupted"

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def verdict(self) -> str:
        """The status in a word or two, for a table; the whole of it belongs in a note."""
        return "OOM" if self.status.startswith("oom") else self.status.split(":")[0]

    def statistics(self, metric: str) -> Statistics | None:
        if metric not in self._statistics:
            samples = self.metrics[metric].numbers if metric in self.metrics else []
            self._statistics[metric] = summarize(samples) if samples else None
        return self._statistics[metric]

    @cached_property
    def _statistics(self) -> dict[str, Statistics | None]:
        """Those asked for so far: tables, charts and findings ask for the same."""
        return {}

    def value(self, metric: str) -> float | None:
        found = self.statistics(metric)
        return found.mean if found else None

    def median(self, metric: str) -> float | None:
        found = self.statistics(metric)
        return found.median if found else None

    def rows(self, metric: str, width: int) -> list[list[Any]]:
        """A table that was recorded row by row, `width` samples each."""
        samples = self.metrics[metric].samples if metric in self.metrics else ()
        return [list(samples[i : i + width]) for i in range(0, len(samples), width)]

    def get(self, name: str) -> Any:
        """A field of the configuration, looked up in the run or in its model."""
        return self.fields.get(name)

    @cached_property
    def fields(self) -> dict[str, Any]:
        return fields_of(self.config)

    @property
    def name(self) -> str:
        parts = [self.get("size"), self.get("context_length"), self.get("mode"), self.get("precision")]
        return " ".join(str(part) for part in parts if part is not None)

    @cached_property
    def tokens_per_second(self) -> float | None:
        step = self.value("step_time")
        return self.get("batch_size") * self.get("context_length") / step if step else None

    @cached_property
    def flops_per_second(self) -> float | None:
        step, flops = self.value("step_time"), self.value("flops")
        return flops / step if step and flops else None

    @cached_property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the device's dense peak. None where the peak is not known."""
        rate, peak = self.flops_per_second, self.value("peak_flops")
        return rate / peak if rate and peak else None

    @cached_property
    def memory_error(self) -> float | None:
        """Predicted peak over measured, less one."""
        predicted, measured = self.value("predicted_memory"), self.value("peak_memory")
        return predicted / measured - 1 if predicted and measured else None


def by_machine(cells: Iterable[CellView]) -> dict[str, list[CellView]]:
    """What two machines measured never stands in one column, chart or sentence."""
    return _apart(cells, lambda cell: cell.machine)


def by_experiment(cells: Iterable[CellView]) -> dict[str, list[CellView]]:
    return _apart(cells, lambda cell: cell.experiment)


def _apart(cells: Iterable[CellView], key: Callable[[CellView], str]) -> dict[str, list[CellView]]:
    """In the order in which they come."""
    found: dict[str, list[CellView]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def loss_curves(cells: Iterable[CellView]) -> dict[str, dict[int, float]]:
    """Run -> step -> loss, in the order of steps. A run's cells are the stretches between two lines of its log."""
    runs: dict[str, dict[int, float]] = {}
    for cell in cells:
        if "loss" in cell.metrics:
            name = str(cell.get("output") or "run").rstrip("/").rsplit("/", 1)[-1]
            losses = enumerate(cell.metrics["loss"].numbers, start=cell.get("first_step") or 1)
            runs.setdefault(name, {}).update(losses)
    return {name: dict(sorted(curve.items())) for name, curve in runs.items()}


def group(records: Iterable[Record], run: str = "") -> list[CellView]:
    """Cells in the order in which they were recorded."""
    metrics: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in records:
        key = (record.environment.machine, record.experiment, record.cell)
        metrics.setdefault(key, {})[record.metric] = record
    return [
        CellView(experiment, next(iter(found.values())).config, found, run)
        for (_, experiment, _), found in metrics.items()
    ]

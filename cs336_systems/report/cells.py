"""Groups records into cells, and the quantities derived from them: rates, ratios, errors."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from cs336_systems.config import ADDED_LATER, FAMILY_FIELDS
from cs336_systems.predict.time.on_gpu import Predicted, predicted_of
from cs336_systems.record import CELL_TIME, Environment, Metric, Record, Statistics, summarize

PHASES = ("forward", "loss", "backward", "sync", "optimizer", "step")


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration and of its model in one dictionary."""
    model = config.get("model")
    return {**ADDED_LATER, **FAMILY_FIELDS, **config, **model} if isinstance(model, Mapping) else dict(config)


@dataclass(frozen=True)
class CellView:
    """One configuration of one experiment, and everything that was recorded of it."""

    experiment: str
    config: Mapping[str, Any]
    metrics: Mapping[str, Record]
    """The metrics of the cell itself; those of the variants it measured are in `variants`."""
    run: str = ""
    """The run's name, where several runs of one machine are shown."""
    variants: Mapping[str, Mapping[str, Record]] = field(default_factory=dict)
    """Variant (an implementation, an arrangement, a strategy) -> its metrics."""

    @classmethod
    def of(cls, experiment: str, config: Mapping[str, Any], metrics: Iterable[Metric]) -> "CellView":
        """Return a cell made from an instrument's answer that was never recorded."""
        whole = [*metrics, Metric(CELL_TIME, "s", [0.0])]
        records = [Record(experiment, config, m.name, m.unit, tuple(m.samples), variant=m.variant) for m in whole]
        return group(records)[0]

    @property
    def records(self) -> list[Record]:
        return [*self.metrics.values(), *(record for own in self.variants.values() for record in own.values())]

    def variant(self, name: str) -> "CellView":
        """Return the same cell with the metrics of one variant."""
        if name not in self._views:
            end = {CELL_TIME: self.metrics[CELL_TIME]} if CELL_TIME in self.metrics else {}
            self._views[name] = CellView(self.experiment, self.config, {**self.variants.get(name, {}), **end}, self.run)
        return self._views[name]

    @cached_property
    def _views(self) -> dict[str, "CellView"]:
        return {}

    @property
    def environment(self) -> Environment:
        return self.records[0].environment

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
    def is_oom(self) -> bool:
        return self.status.startswith("oom")

    @property
    def verdict(self) -> str:
        """The status in a word or two, for a table; the full status belongs in a note."""
        return "OOM" if self.is_oom else self.status.split(":")[0]

    def statistics(self, metric: str) -> Statistics | None:
        if metric not in self._statistics:
            samples = self.metrics[metric].numbers if metric in self.metrics else []
            self._statistics[metric] = summarize(samples) if samples else None
        return self._statistics[metric]

    @cached_property
    def _statistics(self) -> dict[str, Statistics | None]:
        """Cache of statistics, which tables, charts and findings share."""
        return {}

    def value(self, metric: str) -> float | None:
        """Return the mean of a metric's samples."""
        found = self.statistics(metric)
        return found.mean if found else None

    def median(self, metric: str) -> float | None:
        found = self.statistics(metric)
        return found.median if found else None

    def samples(self, metric: str) -> tuple[Any, ...]:
        """Return the raw samples of a metric; none where it was not recorded."""
        return self.metrics[metric].samples if metric in self.metrics else ()

    def get(self, name: str) -> Any:
        """Return a field of the configuration or of its model."""
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
    def causal_flops_per_second(self) -> float | None:
        """The rate without the scores that a causal mask hides."""
        flops, seconds = self.value("causal_flops"), self.value("step_time")
        return flops / seconds if flops and seconds else None

    @cached_property
    def causal_mfu(self) -> float | None:
        """Model FLOPs utilisation without those scores."""
        rate, peak = self.causal_flops_per_second, self.value("peak_flops")
        return rate / peak if rate and peak else None

    @cached_property
    def memory_error(self) -> float | None:
        """Predicted peak over measured peak, less one."""
        predicted, measured = self.value("predicted_memory"), self.value("peak_memory")
        return predicted / measured - 1 if predicted and measured else None

    @cached_property
    def prediction(self) -> Predicted | None:
        """The time predicted from the step's configuration; None unless the GPU is known and the step is a fast one or
        was recorded with a prediction, so that older tables of eager steps stay as they are."""
        is_shown = "predicted_time" in self.metrics or (self.get("fast") or "off") != "off"
        return predicted_of(self.config, self.environment.gpu) if is_shown and "step_time" in self.metrics else None

    @property
    def predicted_time(self) -> float | None:
        """Seconds that the step was expected to take when it was measured; older records get today's prediction."""
        recorded = self.value("predicted_time")
        return recorded or (self.prediction.time.seconds if self.prediction else None)

    @property
    def time_error(self) -> float | None:
        """Predicted time over measured time, less one."""
        predicted, measured = self.predicted_time, self.value("step_time")
        return predicted / measured - 1 if predicted and measured else None


Key = TypeVar("Key", bound=Hashable)


def grouped(cells: Iterable[CellView], key: Callable[[CellView], Key]) -> dict[Key, list[CellView]]:
    """Return cells grouped by key, in order of appearance."""
    found: dict[Key, list[CellView]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def by_machine(cells: Iterable[CellView]) -> dict[str, list[CellView]]:
    """Group cells by machine, whose results never share a column, chart or sentence with those of another machine."""
    return grouped(cells, lambda cell: cell.machine)


def by_experiment(cells: Iterable[CellView]) -> dict[str, list[CellView]]:
    return grouped(cells, lambda cell: cell.experiment)


def group(records: Iterable[Record], run: str = "") -> list[CellView]:
    """Return the records grouped into cells, in the order in which they were recorded."""
    cells: dict[tuple[str, str, str], dict[str, dict[str, Record]]] = {}
    for record in records:
        key = (record.environment.machine, record.experiment, record.cell)
        cells.setdefault(key, {}).setdefault(record.variant, {})[record.metric] = record
    found = []
    for (_, experiment, _), by_variant in cells.items():
        config = next(iter(next(iter(by_variant.values())).values())).config
        own = by_variant.pop("", {})
        found.append(CellView(experiment, config, own, run, by_variant))
    return found

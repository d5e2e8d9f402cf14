"""`Experiment` and `Instrument`: all that the runner, the command line and the report need to know of an experiment.

A module of a topic folder defines experiments at its top level, and that is all it takes to add one:

    STARTUP = Experiment(
        name="startup",
        title=Text("Start-up", "启动"),
        question=Text("How long does the first step take?", "第一步要多久？"),
        grid=lambda preset, base: [run_config(base, "tiny", warmup_steps=0)],
        instrument=STEP,
        tables=startup_tables,
    )

Such modules never import torch at their top level: the runner and the report import them. Modules named `measure_*`
hold the instruments; only the worker process imports those.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig, UserError, model_config
from cs336_systems.predict.memory_model import breakdown, estimate
from cs336_systems.report.presentation import Presentation

HANDOUT_2026 = "2026"
PRESETS = ("quick", "course", HANDOUT_2026, "full")
"""quick: small cells, also on a CPU; course: the 2025 handout; 2026: that handout; full: course and more."""
Config = dict[str, Any]
Grid = Callable[[str, RunConfig], Iterable[Config]]
"""(preset, base) -> configurations; `base` carries the device and whatever the user set for all cells."""


class Memory(NamedTuple):
    """Bytes that a cell needs, predicted without running it."""

    predicted: int
    at_least: bool = False
    """The prediction is a lower bound."""


def label_by_values(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    """The words of a configuration, for progress lines."""
    return " ".join(str(value) for value in config.values() if isinstance(value, str) and value)


@dataclass(frozen=True)
class Instrument:
    """A function that measures one cell. Experiments that share an instrument share equal cells."""

    name: str
    measure: str
    """`module:function`; the worker imports it and calls `function(config, **options) -> list[Metric]`."""
    label: Callable[[Mapping[str, Any], Sequence[str]], str] = label_by_values
    """(configuration, names of the experiments that ask for it) -> the cell's name in progress lines."""
    label_has_name: bool = True
    """The instrument's name comes before the label."""
    memory: Callable[[Mapping[str, Any]], Memory | None] = lambda config: None
    """The predicted need of a cell; a cell that cannot fit is not run. None where nothing is known."""
    needs_fresh_process: Callable[[Mapping[str, Any]], bool] = lambda config: False
    """Whether the cold start is part of what is measured: little warm-up, a compilation, a user's model."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that a cell needs before torch starts; each of its cells gets a process of its own."""
    takes_peak_tflops: bool = False
    keeps_files: bool = False
    """`measure` takes a `folder` for files too large for a record: traces, snapshots."""


@dataclass(frozen=True, kw_only=True)
class Experiment(Presentation):
    """One experiment: what it asks, its grid of cells, the instrument that measures a cell, and how it is shown."""

    instrument: Instrument | None = None
    """None: another command records it."""
    grid: Grid = lambda preset, base: ()
    fitting: Callable[[Sequence[Config], int | None], Sequence[Config]] = lambda configs, gpu_memory: configs
    """(cells of the grid, bytes of the GPU or None) -> cells to run, where it depends on the GPU which these are."""
    runnable: bool = True
    """`cs336 run` offers it."""
    problems_2026: tuple[str, ...] = ()
    """Problems of the 2026 handout that it answers. The preset `2026` has the experiments that answer one."""
    profile: Callable[[RunConfig], str | None] | None = None
    """For a part of `cs336 profile`: why a configuration cannot be profiled, or None. Otherwise None."""

    @property
    def command(self) -> str:
        return f"cs336 run {self.name} --preset course" if self.runnable and self.instrument else ""


# -- for grids --------------------------------------------------------------------------------------------------------


def run_config(base: RunConfig, size: str, context: int | None = None, **fields: Any) -> Config:
    """The configuration of a step of the named size."""
    overrides = {"context_length": context} if context else {}
    return dataclasses.replace(base, model=model_config(size, **overrides), size=size, **fields).to_dict()


class MissingError(UserError):
    """An experiment was asked for on a machine without what it needs: a GPU, or a package."""


def require_gpu(experiment: str, base: RunConfig, reason: str) -> None:
    if base.device_type != "cuda":
        raise MissingError(f"{experiment} needs a CUDA GPU: {reason}")


def require_package(experiment: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingError(f"{experiment} needs the package {package}; pip install {package}")


# -- for instruments that run a training step -------------------------------------------------------------------------


def label_step(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    """Size, context, mode and precision, and whatever differs from the defaults."""
    run = RunConfig.of(config)
    extras = [f"warm-up {run.warmup_steps}"] if run.warmup_steps != RunConfig.warmup_steps else []
    extras += [run.attention] if run.attention != "reference" else []
    extras += ["compiled"] if run.compile else []
    extras += [f"fast {run.fast}"] if run.fast != "off" else []
    extras += [f"{run.optimizer_state} state"] if run.optimizer_state != "fp32" else []
    extras += ["update in backward"] if run.update_in_backward else []
    extras += [run.model_factory] if run.model_factory else []
    extras += [f"checkpoint {run.checkpoint_blocks}"] if run.checkpoint_blocks else []
    extras += [f"budget {run.memory_budget}"] if run.memory_budget else []
    return " ".join([run.size, str(run.model.context_length), run.mode, run.precision, *extras])


def step_memory(config: Mapping[str, Any]) -> Memory | None:
    """The closed form's prediction; it knows neither a user's model nor the fast step, and of a compiled model only
    what the compiler cannot choose: parameters, gradients and optimizer state."""
    nested = config.get("inner") or config.get("recursive")
    if nested or config.get("fast", "off") != "off" or config["model_factory"] is not None:
        return None
    run = RunConfig.of(config)
    if run.memory_budget:
        return None
    if run.compile:
        whole = breakdown(run)
        return Memory(whole.parameters + whole.gradients + whole.optimizer_state, at_least=True)
    return Memory(estimate(run).peak)


def step_is_cold(config: Mapping[str, Any]) -> bool:
    few = config["warmup_steps"] < RunConfig.warmup_steps
    return few or config["compile"] or config["model_factory"] is not None

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
"""(preset, base) -> configurations; `base` has the device and the user's settings for all cells."""


class Memory(NamedTuple):
    """Bytes that a cell needs, predicted without running it."""

    predicted: int
    at_least: bool = False
    """The prediction is a lower bound."""


def label_by_values(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    """Return the values of a configuration as text, for progress lines."""
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
    """True if the instrument's name precedes the label."""
    memory: Callable[[Mapping[str, Any]], Memory | None] = lambda config: None
    """Returns the predicted memory of a cell, or None if unknown; a cell that cannot fit is not run."""
    needs_fresh_process: Callable[[Mapping[str, Any]], bool] = lambda config: False
    """Returns True if a cell needs a new process because the cold start is part of the measurement (little warm-up, a
    compilation) or the model is the user's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that must be set before torch starts; each cell then gets its own process."""
    takes_peak_tflops: bool = False
    keeps_files: bool = False
    """True if `measure` takes a `folder` for files too large for a record, such as traces and snapshots."""


@dataclass(frozen=True, kw_only=True)
class Experiment(Presentation):
    """One experiment: what it asks, its grid of cells, the instrument that measures a cell, and how it is shown."""

    instrument: Instrument | None = None
    """Instrument that measures the cells; None if another command records them."""
    grid: Grid = lambda preset, base: ()
    fitting: Callable[[Sequence[Config], int | None], Sequence[Config]] = lambda configs, gpu_memory: configs
    """(cells of the grid, bytes of the GPU or None) -> cells to run, for grids that depend on the GPU's memory."""
    default_steps: Mapping[str, int] = field(default_factory=dict)
    """Preset -> `base.num_steps` of its grid where the user gives no number; RunConfig's for other presets."""
    runnable: bool = True
    """True if `cs336 run` offers it."""
    problems_2026: tuple[str, ...] = ()
    """Problems of the 2026 handout that it answers; the preset `2026` has the experiments that answer at least one."""
    profile: Callable[[RunConfig], str | None] | None = None
    """Set for experiments that are part of `cs336 profile`: returns why a configuration cannot be profiled, or None."""

    @property
    def command(self) -> str:
        return f"cs336 run {self.name} --preset course" if self.runnable and self.instrument else ""


# -- for grids --------------------------------------------------------------------------------------------------------


def run_config(base: RunConfig, size: str, context: int | None = None, **fields: Any) -> Config:
    """Return the configuration of a step of the named size."""
    overrides = {"context_length": context} if context else {}
    return dataclasses.replace(base, model=model_config(size, **overrides), size=size, **fields).to_dict()


class MissingError(UserError):
    """An experiment needs a GPU or a package that this machine does not have."""


def require_gpu(experiment: str, base: RunConfig, reason: str) -> None:
    if base.device_type != "cuda":
        raise MissingError(f"{experiment} needs a CUDA GPU: {reason}")


def require_package(experiment: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingError(f"{experiment} needs the package {package}; pip install {package}")


# -- for instruments that run a training step -------------------------------------------------------------------------


def label_step(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    """Return size, context, mode and precision, and whatever differs from the defaults."""
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
    """Return the closed form's prediction. It covers neither a user's model nor the fast step, and of a compiled model
    only what the compiler cannot change: parameters, gradients and optimizer state."""
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

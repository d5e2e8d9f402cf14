"""Finds the experiments in the topic folders beside this module. There is no other list of experiments."""

import importlib
import pkgutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache

from cs336_systems import experiments as package
from cs336_systems.config import RunConfig, UserError, nearest
from cs336_systems.experiments.spec import HANDOUT_2026, PRESETS, Config, Experiment, MissingError

TOPICS = ("steps", "kernels", "memory", "attention", "ranks", "training")
"""Order of the topics in reports and lists; a folder that is not named here comes last."""
ALL = "all"
Request = tuple[str, Config]
"""An experiment's name and the configuration of one of its cells."""


@cache
def catalogue() -> dict[str, Experiment]:
    """Return the experiments by name, in the order of reports and lists."""
    found: dict[str, Experiment] = {}
    for topic in sorted(_submodules(package.__name__, packages=True), key=_position):
        own: dict[str, Experiment] = {}
        for module in _submodules(f"{package.__name__}.{topic}"):
            if module.startswith("measure_"):
                continue
            values = vars(importlib.import_module(f"{package.__name__}.{topic}.{module}")).values()
            own |= {value.name: value for value in values if isinstance(value, Experiment)}
        found |= {experiment.name: experiment for experiment in sorted(own.values(), key=lambda e: (e.order, e.name))}
    return found


def runnable() -> list[str]:
    """Return the names of the experiments that `cs336 run` offers."""
    return [name for name, experiment in catalogue().items() if experiment.command]


def of_preset(preset: str) -> list[str]:
    """Return the names of the experiments that have cells in a preset."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}; choose one of: {', '.join(PRESETS)}")
    return [name for name in runnable() if preset != HANDOUT_2026 or catalogue()[name].problems_2026]


def cells(
    names: Iterable[str],
    preset: str,
    base: RunConfig,
    gpu_memory: int | None = None,
    *,
    num_steps: int | None = None,
) -> list[Request]:
    """Return (experiment, configuration) for every cell of the named experiments; `gpu_memory`: bytes of the GPU, if
    known; `num_steps`: steps of a cell, if the user gave them.

    `all` stands for every experiment of the preset that the device can run.
    """
    offered, asked = of_preset(preset), list(names)
    if ALL in asked:
        asked = list(dict.fromkeys([*(name for name in asked if name != ALL), *_on_device(offered, preset, base)]))
    requests: list[Request] = []
    for name in asked:
        if name not in runnable():
            meant = nearest(name, runnable())
            known = ", ".join(runnable())
            raise UserError(
                f"unknown experiment {name!r}{meant}; choose from: {known} (docs/COURSE.md: by problem of the handouts)"
            )
        if name not in offered:
            raise UserError(f"{name} answers no problem of the {preset} handout; use --preset course")
        experiment = catalogue()[name]
        steps = experiment.default_steps.get(preset, base.num_steps) if num_steps is None else num_steps
        configs = experiment.grid(preset, replace(base, num_steps=steps))
        requests += [(name, config) for config in experiment.fitting(list(configs), gpu_memory)]
    return requests


def _on_device(names: Iterable[str], preset: str, base: RunConfig) -> list[str]:
    """Return the experiments that this machine can run: those whose GPU or package is missing are left out."""
    found = []
    for name in names:
        with suppress(MissingError):
            list(catalogue()[name].grid(preset, base))
            found.append(name)
    return found


def _submodules(name: str, *, packages: bool = False) -> list[str]:
    path = importlib.import_module(name).__path__
    return [module.name for module in pkgutil.iter_modules(path) if module.ispkg == packages]


def _position(topic: str) -> tuple[int, str]:
    return (TOPICS.index(topic) if topic in TOPICS else len(TOPICS), topic)

"""Finds the experiments in the topic folders beside this module. There is no other list of experiments."""

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

from cs336_systems import experiments as package
from cs336_systems.config import RunConfig, UserError, nearest
from cs336_systems.experiments.spec import PRESETS, Config, Experiment

TOPICS = ("steps", "kernels", "memory", "attention", "ranks", "training")
"""Order of the topics in reports and lists; a folder that is not named here comes last."""
Request = tuple[str, Config]
"""An experiment's name and the configuration of one of its cells."""


@cache
def catalogue() -> dict[str, Experiment]:
    """Experiments by name, in the order of reports and lists."""
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
    """Names of the experiments that `cs336 run` offers."""
    return [name for name, experiment in catalogue().items() if experiment.command]


def cells(names: Iterable[str], preset: str, base: RunConfig) -> list[Request]:
    """(experiment, configuration) for every cell of the named experiments."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}; choose one of: {', '.join(PRESETS)}")
    requests: list[Request] = []
    for name in names:
        if name not in runnable():
            meant = nearest(name, runnable())
            known = ", ".join(runnable())
            raise UserError(
                f"unknown experiment {name!r}{meant}; choose from: {known} (docs/COURSE.md: by problem of the handouts)"
            )
        requests += [(name, config) for config in catalogue()[name].grid(preset, base)]
    return requests


def _submodules(name: str, *, packages: bool = False) -> list[str]:
    path = importlib.import_module(name).__path__
    return [module.name for module in pkgutil.iter_modules(path) if module.ispkg == packages]


def _position(topic: str) -> tuple[int, str]:
    return (TOPICS.index(topic) if topic in TOPICS else len(TOPICS), topic)

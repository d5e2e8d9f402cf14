"""Runs the Hopper kernels in the emulator, on the CPU: a process for attention_worker.py."""

from tests.unit.kernels.hopper_emulator import install

install()  # before the kernels are imported

# ruff: noqa: E402
import importlib
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from cs336_systems.kernels.flash import hopper_launch, operators, varlen
from tests.unit.kernels.attention_worker import run, serve
from tests.unit.kernels.hopper_emulator.language import Kernel

# The package has a function of this name.
dispatch: Any = importlib.import_module("cs336_systems.kernels.flash.dispatch")


@contextmanager
def changed(name: str, old: str, new: str) -> Iterator[None]:
    """Run with another source of a module of kernels: a fault that the emulator should find."""
    module = importlib.import_module(f"cs336_systems.kernels.flash.{name}")
    source = inspect.getsource(module)
    if source.count(old) != 1:
        raise ValueError(f"{name} has {source.count(old)} times: {old}")
    _execute(source.replace(old, new), module)
    try:
        yield
    finally:
        _execute(source, module)


def _execute(source: str, module: ModuleType) -> None:
    exec(compile(source, str(module.__file__), "exec"), vars(module))


def answer(
    impl: str = "flash_hopper", seed: int = 0, small_programs: bool = True, multiprocessors: int = 132,
    fault: list[str] | None = None, **request: Any,
) -> list[str]:  # fmt: skip
    """`seed`: of the inputs, and of the order in which things happen; `small_programs`: those for short sequences are
    allowed; `fault`: arguments of `changed`."""
    for cache in (dispatch._resolved, operators._kernels, varlen._resolved, varlen._kernels):
        cache.clear()
    Kernel.seed = seed
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(hopper_launch, "_multiprocessors", return_value=multiprocessors))
        if not small_programs:
            stack.enter_context(mock.patch.object(hopper_launch, "sees_few_keys", return_value=False))
        if fault is not None:
            stack.enter_context(changed(*fault))
        return run(impl, seed=seed, **request)


if __name__ == "__main__":
    dispatch.triton_problem = dispatch.gluon_problem = lambda device: None
    serve(answer)

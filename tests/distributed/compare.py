"""Assertions of the tests that run in ranks."""

from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks, by rank."""
    values = [None] * world()
    dist.all_gather_object(values, value)
    return values


def assert_close(what: str, found: Tensor | None, expected: Tensor | None, tolerance: float = 0.0) -> None:
    """Assert equal shape, dtype and values; without a tolerance, equal bits (NaN equals NaN)."""
    if found is None or expected is None:
        assert found is expected, f"{what} is {found}, not {expected}"
        return
    kinds = [(t.dtype, tuple(t.shape)) for t in (found, expected)]
    assert kinds[0] == kinds[1], f"{what} is {kinds[0]}, not {kinds[1]}"
    good = torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)
    assert good, f"{what} is off by {(found.double() - expected.double()).abs().max():.3g}: {found}, not {expected}"


def assert_same_on_all_ranks(what: str, tensors: Iterable[Tensor | None]) -> None:
    """Assert equal bits on all ranks."""
    own = [None if t is None else t.detach().clone() for t in tensors]
    for i, (here, first) in enumerate(zip(own, everywhere(own)[0], strict=True)):
        assert_close(f"{what} {i}, compared with rank 0's,", here, first)


@contextmanager
def recorded(**functions: Any):
    """Record calls of torch.distributed as pairs of a name and what the given function returns for the arguments:

    with recorded(all_reduce=lambda tensor, *_, **__: tensor.numel()) as log: ...
    """
    log: list[tuple[str, Any]] = []

    def wrap(name, describe, function):
        def call(*args, **kwargs):
            log.append((name, describe(*args, **kwargs)))
            return function(*args, **kwargs)

        return call

    wrapped = {name: wrap(name, describe, getattr(dist, name)) for name, describe in functions.items()}
    with patch.multiple(dist, **wrapped):
        yield log

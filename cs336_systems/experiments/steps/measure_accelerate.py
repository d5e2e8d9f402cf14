"""Instrument of `accelerate`: training steps of transformers' Llama by several implementations, interleaved.

All implementations but the one with the packed optimizer share the weights and AdamW's state, so that they run in one
process, in any order, without the memory of several models.
"""

import copy
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.measure_attention import STEPS_PER_ROUND, failure_of, interleave
from cs336_systems.experiments.steps.llama import language_model
from cs336_systems.experiments.steps.measure_step import disable_compile_caches
from cs336_systems.hugging_face import accelerate
from cs336_systems.measure.timing import STEP, release_memory, time_steps
from cs336_systems.record import Metric
from cs336_systems.step.train_step import AUTOCAST_DTYPES, require_device

RATE = 1e-5
"""Learning rate: low, because all steps are on one batch."""


class Contestant(NamedTuple):
    """One implementation of the model, with the optimizer of its weights."""

    model: nn.Module
    """The trained model."""
    forward: Callable[..., Any]
    """The forward pass: the model itself or its compiled form."""
    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager] = nullcontext
    """Context manager entered around steps."""
    keeps_gradients: bool = True
    """False where backward updates the weights and drops their gradients."""


class Contest:
    """The implementations by name, trained on the same batch."""

    def __init__(self, run: RunConfig):
        torch.manual_seed(run.seed)
        dtype = AUTOCAST_DTYPES.get(run.precision, torch.float32)
        self.device = torch.device(run.device)
        with self.device:
            self.model = language_model(vars(run.model)).to(dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        generator = torch.Generator().manual_seed(run.seed)
        shape = (run.batch_size, run.model.context_length)
        self.tokens = torch.randint(run.model.vocab_size, shape, generator=generator).to(self.device)
        self.contestants: dict[str, Contestant] = {}
        self.packed_bytes = 0
        """Memory of the packed optimizer and its copy of the model."""

    def enter(self, name: str) -> list[Metric]:
        """Build an implementation; return its loss and the norm of its gradients on the first weights."""
        own = self.contestants[name] = BUILDERS[name](self)
        with own.context():
            found = {"loss": self._loss(own)}
            if own.keeps_gradients:
                found["loss"].backward()
                gradients = [p.grad.float() for p in own.model.parameters() if p.grad is not None]
                found["gradient_norm"] = nn.utils.get_total_norm(gradients)
                own.optimizer.zero_grad()
        return [Metric(metric, "1", [value.item()], variant=name) for metric, value in found.items()]

    def _loss(self, own: Contestant) -> Tensor:
        return own.forward(self.tokens, labels=self.tokens, use_cache=False).loss

    def step(self, name: str) -> None:
        own = self.contestants[name]
        self._loss(own).backward()
        own.optimizer.step()
        own.optimizer.zero_grad()

    def times(self, name: str) -> tuple[list[float], int | None]:
        """Return the seconds of a few steps, and their peak memory without that of idle implementations."""
        with self.contestants[name].context():
            found = time_steps(
                lambda watch: self.step(name), device=self.device, warmup_steps=1, num_steps=STEPS_PER_ROUND
            )
        if found.peak_memory is None:
            return found.wall[STEP], None
        shared_bytes = torch.cuda.memory_allocated(self.device) - self.packed_bytes
        return found.wall[STEP], found.peak_memory - (shared_bytes if name == "packed" else self.packed_bytes)


# -- implementations --------------------------------------------------------------------------------------------------


def _twin(model: nn.Module) -> Any:
    """Return a copy of the modules that shares all tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _plain(contest: Contest) -> Contestant:
    return Contestant(contest.model, contest.model, contest.optimizer)


def _compiled(contest: Contest) -> Contestant:
    disable_compile_caches()
    return Contestant(contest.model, torch.compile(contest.model), contest.optimizer)


def _liger(contest: Contest) -> Contestant:
    """Return Llama with Liger's kernels. Liger replaces functions of transformers' module, here only during its own
    steps."""
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    apply = importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama
    model, before = _twin(contest.model), dict(vars(module))
    apply(model=model)
    replaced = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    for name in replaced:
        setattr(module, name, before[name])
    return Contestant(model, model, contest.optimizer, lambda: _replacing(module, replaced))


@contextmanager
def _replacing(module: Any, values: dict[str, Any]) -> Iterator[None]:
    with mock.patch.multiple(module, **values):
        yield


def _ours(contest: Contest) -> Contestant:
    model = _twin(contest.model)
    accelerate(model)
    return Contestant(model, model, contest.optimizer)


def _packed(contest: Contest) -> Contestant:
    """Return our implementation with the packed optimizer. Its state is bf16 for bf16 weights, as with torch's AdamW;
    each layer is updated in backward."""
    on_cuda = contest.device.type == "cuda"
    before = torch.cuda.memory_allocated(contest.device) if on_cuda else 0
    model = copy.deepcopy(contest.model)
    state = next(model.parameters()).dtype
    optimizer = accelerate(model).packed_adamw(lr=RATE, state_dtype=state, update_in_backward=True)
    if on_cuda:
        contest.packed_bytes = torch.cuda.memory_allocated(contest.device) - before
    return Contestant(model, model, optimizer, keeps_gradients=False)


BUILDERS: dict[str, Callable[[Contest], Contestant]] = {
    "plain": _plain,
    "compiled": _compiled,
    "liger": _liger,
    "ours": _ours,
    "packed": _packed,
}


# -- the measurement --------------------------------------------------------------------------------------------------


def measure_accelerate(config: dict[str, Any]) -> list[Metric]:
    """Compare loss and gradients on the first weights, then time steps, interleaved; with peak memory on a GPU."""
    run = RunConfig.of(config)
    require_device(run.device)
    contest = Contest(run)
    metrics: list[Metric] = []
    able: list[str] = []
    for name in config["implementations"]:
        try:
            metrics += contest.enter(name)
        except Exception as error:  # a failure is a result, and does not end the others
            metrics.append(failure_of(name, error))
        else:
            able.append(name)
    for name in able:
        contest.times(name)  # AdamW allocates its state
    times: defaultdict[str, list[float]] = defaultdict(list)
    peaks: defaultdict[str, list[int]] = defaultdict(list)
    for name in interleave(able, config["rounds"]):
        release_memory()
        seconds, peak = contest.times(name)
        times[name] += seconds
        peaks[name] += [peak] if peak is not None else []
    for name in able:
        metrics.append(Metric("step_time", "s", times[name], variant=name))
        metrics += [Metric("peak_memory", "B", [max(peaks[name])], variant=name)] if peaks[name] else []
    return metrics

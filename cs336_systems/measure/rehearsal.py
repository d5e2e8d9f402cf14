"""Rehearsal: the training step of one rank of a large device mesh, on one GPU or on none.

The process group is torch's "fake" one: its collectives return at once and send nothing. Shards, kernels and
allocations are those of the real rank; values are not. Without a GPU the step runs on fake tensors, and the storages
that its operators allocate are followed (`memory_trace.StorageTracker`).
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.config import RunConfig, UserError
from cs336_systems.measure.memory_trace import StorageTracker, as_on_cuda, label_optimizer_state, labelled
from cs336_systems.measure.timing import STEP, time_steps
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.collectives import local_part
from cs336_systems.parallel.context_parallel import ContextParallel
from cs336_systems.parallel.torch_engine import BUFFERS_STAY, device_mesh, split
from cs336_systems.predict.allocator import CachingAllocator
from cs336_systems.predict.engine_memory import BUCKETS
from cs336_systems.predict.memory_model import workspace
from cs336_systems.predict.rank_shards import Mesh, of_replica
from cs336_systems.step.train_step import AUTOCAST_DTYPES, TrainStep, build_model

FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"
"""A testing module of torch, which a release may move."""
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Rehearsal:
    """Bytes and seconds of one rank."""

    parameters: int
    gradients: int
    """Bytes when the optimizer begins. With `tp` alone torch keeps the embedding's gradient whole on every rank."""
    optimizer: int
    """Bytes of AdamW's two moments, without its step counts of 4 bytes per tensor."""
    peak: int
    parts: dict[str, int]
    """Parts of the peak if it was traced; empty if it was measured."""
    seconds: float | None
    """Median time of a step without communication; None if it was traced."""


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Make this process `rank` of `world_size` ranks that do not exist; collectives return at once."""
    try:
        store = importlib.import_module(FAKE_GROUP).FakeStore()
    except (ImportError, AttributeError):
        raise UserError(
            f"torch {torch.__version__} has no {FAKE_GROUP}.FakeStore, which a rehearsal needs; "
            f"cs336 plan predicts the same layout without it"
        ) from None
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_groups()


def forget_groups() -> None:
    """Clear torch's caches of DTensor operators, which keep the mesh of earlier groups and the threads of its groups
    alive."""
    tensor = "torch.distributed.tensor"
    for module, path in (
        (f"{tensor}._redistribute", "clear_redistribute_planner_cache"),
        (f"{tensor}._redistribute", "_gen_transform_infos.cache_clear"),
        (f"{tensor}._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
        (f"{tensor}._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
        (f"{tensor}.debug", "_clear_sharding_prop_cache"),
    ):
        with suppress(ImportError, AttributeError):
            attrgetter(path)(importlib.import_module(module))()


# -- the model of a rank ----------------------------------------------------------------------------------------------


def sharded_model(config: RunConfig, mesh: Mesh, device_type: str) -> TransformerLM:
    """Return the model of this rank on the meta device."""
    with torch.device("meta"):
        model = build_model(config)
    assert isinstance(model, TransformerLM)
    if mesh.cp > 1:
        context = ContextParallel(device_mesh(mesh, device_type)["cp"])
        context.install(model)
        model.own_part = context.own  # type: ignore[assignment]
    if not mesh.is_replicated:
        of_weights = mesh.of_weights
        split(model, device_mesh(of_weights, device_type), of_weights, AUTOCAST_DTYPES.get(config.precision))
    return model


def _allocate(model: TransformerLM, device: str) -> None:
    """Allocate the shards of the model and fill them with arbitrary finite values."""
    model.to_empty(device=device)
    model.tie()  # memory was allocated module by module, for shared weights twice
    for parameter in model.parameters():
        nn.init.normal_(local_part(parameter).detach(), std=0.02)
    model.rotate.reset_parameters()


def _replicated(model: TransformerLM) -> nn.Module:
    """Return the model in DistributedDataParallel. The fake group's all-reduce has no result, so a hook returns the
    bucket."""

    def reduced(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = DistributedDataParallel(model, init_sync=False, **BUFFERS_STAY)
    wrapped.register_comm_hook(None, reduced)
    return wrapped


# -- a rehearsal ------------------------------------------------------------------------------------------------------


def rehearse(config: RunConfig, mesh: Mesh, rank: int, *, on_gpu: bool, micro_batches: int = 1) -> Rehearsal:
    """Run a few training steps of `rank`, whose replica processes `cp` x `tp` times the batch of `config`, or one of
    the micro batches of that.

    `config` is that of a GPU; without one (`on_gpu` False) its operators run on fake tensors.
    """
    run = of_replica(config if on_gpu else replace(config, device="cpu"), mesh, micro_batches)
    with fake_group(rank, mesh.gpus):
        model = sharded_model(run, mesh, torch.device(run.device).type)
        if on_gpu:
            return measured(model, run, is_replicated=mesh.is_replicated)
        return _traced(model, run, config, is_replicated=mesh.is_replicated)


def measured(model: TransformerLM, run: RunConfig, *, is_replicated: bool = False) -> Rehearsal:
    """Run on a GPU: the allocator's peak, and the time of the steps after a few for warm-up."""
    _allocate(model, run.device)
    step, sizes = _step(_replicated(model) if is_replicated else model, run), _Sizes(model)
    batch = step.random_batch()
    with loss_parallel():
        for _ in range(WARMUP_STEPS):
            step(*batch, watch=sizes.watch)
        torch.cuda.reset_peak_memory_stats()
        times = time_steps(
            lambda watch: step(*batch, watch=watch), device=step.device, warmup_steps=1, num_steps=run.num_steps
        )
    peak = torch.cuda.max_memory_allocated()
    return Rehearsal(sizes.parameters, sizes.gradients, _moments(step), peak, {}, median(times.wall[STEP]))


def _traced(model: TransformerLM, run: RunConfig, on_cuda: RunConfig, *, is_replicated: bool) -> Rehearsal:
    """Run on fake tensors with the operators and the allocator of CUDA. The first step makes the optimizer's state.

    DistributedDataParallel reads values, which fake tensors do not have: one tensor represents its buckets.
    """
    tracker = _ShardTracker(CachingAllocator())
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.init, "normal_", lambda tensor, **_: tensor))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _allocate(model, "cpu")
        stack.enter_context(as_on_cuda())
        stack.enter_context(loss_parallel())
        step, sizes = _step(model, run), _Sizes(model)
        tokens, targets = (torch.zeros(run.batch_size, run.model.context_length, dtype=torch.long) for _ in range(2))
        scratch = torch.empty(workspace(on_cuda), dtype=torch.uint8)
        buckets = [torch.empty(sizes.parameters, dtype=torch.uint8)] if is_replicated else []
        for tensor, label in ((tokens, "inputs"), (targets, "inputs"), (scratch, "workspace")):
            tracker.track(tensor, label)
        for tensor in buckets:
            tracker.track(tensor, BUCKETS)
        stack.enter_context(labelled(step, tracker))
        stack.enter_context(tracker.following())
        step(tokens, targets, watch=sizes.watch)
        label_optimizer_state(step, tracker)
        gc.collect()
        tracker.reset_peak()
        step(tokens, targets, watch=tracker.watch)
        moments = _moments(step)
    return Rehearsal(sizes.parameters, sizes.gradients, moments, tracker.peak, tracker.parts, None)


def _step(model: nn.Module, run: RunConfig) -> TrainStep:
    return TrainStep(model, run, torch.optim.AdamW(model.parameters(), fused=True))


def _moments(step: TrainStep) -> int:
    assert step.optimizer is not None
    states = step.optimizer.state.values()
    return sum(local_part(state[name]).nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))


class _Sizes:
    """Bytes of this rank's parameters, and of its gradients when the optimizer begins."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.parameters = sum(local_part(parameter).nbytes for parameter in model.parameters())
        self.gradients = 0

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        if phase == "optimizer":
            grads = (parameter.grad for parameter in self._model.parameters())
            self.gradients = sum(local_part(grad).nbytes for grad in grads if grad is not None)
        yield


class _ShardTracker(StorageTracker):
    """Tracks the storages behind DTensors, and those that FSDP frees and allocates again by resizing them."""

    _deriving = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it calls the operators of its local tensors, which come here one by one
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:  # on real tensors it returns its argument
            return args[0]
        if self._deriving:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def track(self, tensor: Tensor, label: str, *, relabel: bool = False, operator: Any = None) -> None:
        own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() would come here again
        super().track(own, label, relabel=relabel, operator=operator)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track all operators and every resize of a storage, which no dispatcher sees. Operators by which DTensor
        derives the shape of a whole result allocate nothing on real tensors and are not tracked."""
        resize, derive = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.resized(storage, size)
            return result

        def derive_quietly(*args: Any, **kwargs: Any) -> Any:
            self._deriving = True
            try:
                return derive(*args, **kwargs)
            finally:
                self._deriving = False

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            mock.patch.object(ShardingPropagator, derive.__name__, derive_quietly),
            self,
        ):
            yield

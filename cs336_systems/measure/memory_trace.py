"""Memory of a step, tensor by tensor, from the operators that it dispatches: on any device, or without one.

`StorageTracker` follows every storage from the operator that allocates it to its last reference. It has two uses:
- `predict_by_tracing` runs one step under FakeTensorMode (shapes only, no memory) and so predicts the peak of any model
  on a GPU that is not present;
- `measure_peak` runs a real step, which measures the peak on a CPU, where no allocator counts bytes.

The trace runs on fake CPU tensors, because a torch built without CUDA cannot create fake CUDA tensors. `as_on_cuda`
substitutes the operators that differ on CUDA: fused RMSNorm, fused attention, autocast's fp32 list.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336_systems.config import RunConfig
from cs336_systems.kernels.fused import fp8, pointwise
from cs336_systems.kernels.fused import nodes as fused
from cs336_systems.measure import fake_results
from cs336_systems.model import TransformerLM
from cs336_systems.predict.activation_plan import Plan
from cs336_systems.predict.allocator import CachingAllocator
from cs336_systems.predict.memory_model import ROUNDING, MemoryEstimate, workspace
from cs336_systems.step.train_step import TrainStep
from cs336_systems.step.updates import adapt

LABEL_OF_PHASE = {
    "forward": "activations",
    "loss": "logits and loss",
    "backward": "temporary",
    "sync": "temporary",
    "optimizer": "temporary",
}


@dataclass
class _Storage:
    label: str
    size: int
    address: int | None
    """Address of its block in the simulated allocator, if there is one."""


class StorageLog(Protocol):
    """A listener that is notified of every storage."""

    def allocated(self, key: int, label: str, tensor: Tensor, operator: Any) -> None: ...

    def relabelled(self, key: int, label: str) -> None: ...

    def freed(self, key: int) -> None: ...


class StorageTracker(TorchDispatchMode):
    """Counts allocated bytes by label and records their peak. With an `allocator` (on CUDA) the total is that of its
    blocks, and the rounding beyond the tensors has a label of its own."""

    def __init__(self, allocator: CachingAllocator | None = None, log: StorageLog | None = None):
        super().__init__()
        self.allocator = allocator
        self.log = log
        self.phase = ""
        self.live: Counter[str] = Counter()
        self.shared_shapes: set[torch.Size] = set()
        """Shapes of weights that several modules use. Autograd adds up their gradients in place, but not for tensors
        without memory: there this tracker does it."""
        self._storages: dict[int, _Storage] = {}
        self.reset_peak()

    def reset_peak(self) -> None:
        self.peak, self.peak_phase, self.peak_parts = 0, "", dict[str, int]()
        self._update_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls on tensors without memory
        if func is torch.ops.aten.add.Tensor and self.phase == "backward" and args[0].shape in self.shared_shapes:
            return args[0].add_(args[1])
        result = fake_results.call(func, args, kwargs or {})
        label = LABEL_OF_PHASE.get(self.phase, "temporary")
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            label = "weight casts"
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf, label, operator=func)
        if self.allocator is not None and func is torch.ops.aten._softmax_backward_data.default:
            self.allocator.release(self._allocate(result.nbytes))  # CUDA's kernel allocates grad * output first
        return result

    def track(self, tensor: Tensor, label: str, *, relabel: bool = False, operator: Any = None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            size = storage.nbytes()
            self._storages[key] = _Storage(label, size, None)
            self.live[label] += size
            self._storages[key].address = self._allocate(size) if self.allocator is not None else None
            self._update_peak()
            if self.log is not None:
                self.log.allocated(key, label, tensor, operator)
            weakref.finalize(storage, self._forget, key)
        elif relabel:
            known = self._storages[key]
            self.live[known.label] -= known.size
            self.live[label] += known.size
            known.label = label
            if self.log is not None:
                self.log.relabelled(key, label)

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count a tracked storage with its new size: 0 frees its block."""
        if (known := self._storages.get(storage._cdata)) is None:
            return
        self.live[known.label] += size - known.size
        known.size = size
        if self.allocator is not None:
            if known.address is not None:
                self.allocator.release(known.address)
            known.address = self._allocate(size) if size else None
        self._update_peak()

    def _allocate(self, size: int) -> int:
        assert self.allocator is not None
        address = self.allocator.allocate(size)
        self._update_peak()
        return address

    def _forget(self, key: int) -> None:
        storage = self._storages.pop(key)
        self.live[storage.label] -= storage.size
        if self.log is not None:
            self.log.freed(key)
        if self.allocator is not None and storage.address is not None:
            self.allocator.release(storage.address)

    def _update_peak(self) -> None:
        total = self.live.total() if self.allocator is None else self.allocator.allocated
        if total > self.peak or not self.peak:
            self.peak, self.peak_phase, self.peak_parts = total, self.phase, dict(self.live)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by label at the peak; they add up to it."""
        parts = {label: size for label, size in self.peak_parts.items() if size}
        if beyond := self.peak - sum(parts.values()):
            parts[ROUNDING] = beyond
        return parts

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.phase = ""


@contextmanager
def labelled(step: TrainStep, tracker: StorageTracker) -> Iterator[None]:
    """Label the tensors that the step already holds, and relabel gradients and logits while it runs."""
    for parameter in step.model.parameters():
        tracker.track(parameter, "parameters")
        if hasattr(parameter, "grad_memory"):
            tracker.track(parameter.grad_memory, "gradients")
    for buffer in step.model.buffers():
        tracker.track(buffer, "buffers")
    label_optimizer_state(step, tracker)

    def relabel(parameter: Tensor) -> None:
        if parameter.grad is not None:  # an optimizer that updates in backward has dropped it
            tracker.track(parameter.grad, "gradients", relabel=True)

    handles = [
        parameter.register_post_accumulate_grad_hook(relabel)
        for parameter in step.model.parameters()
        if parameter.requires_grad
    ]
    handles.append(
        step.model.register_forward_hook(
            lambda _module, _inputs, output: tracker.track(output, "logits and loss", relabel=True)
        )
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def label_optimizer_state(step: TrainStep, tracker: StorageTracker) -> None:
    if step.optimizer is None:
        return
    states = [list(state.values()) for state in step.optimizer.state.values()]
    for tensor in tree_leaves([states, adapt(step.optimizer).unlisted_state]):
        if isinstance(tensor, Tensor):
            tracker.track(tensor, "optimizer state", relabel=True)


def measure_peak(step: TrainStep, batch: tuple[Tensor, Tensor]) -> int:
    """Return the peak bytes of tensors during one real step. The tracker slows the step down: do not time it."""
    tracker = StorageTracker()
    for tensor in batch:
        tracker.track(tensor, "inputs")
    with labelled(step, tracker):
        gc.collect()
        tracker.reset_peak()
        with tracker:
            step(*batch, watch=tracker.watch)
    return tracker.peak


def predict_by_tracing(
    config: RunConfig, prepare: Callable[[TrainStep], None] | None = None, plan: Plan | None = None
) -> MemoryEstimate:
    """Return the peak of one steady-state step of `config`, from shapes alone. All layers are traced, which takes
    seconds and is valid for any model. `prepare` may modify the step first. `plan` is the plan of a memory budget."""
    on_cuda = config.device_type == "cuda"
    tracker = StorageTracker(CachingAllocator() if on_cuda else None)
    with ExitStack() as stack:
        step, batch = stack.enter_context(fake_step(config))
        if plan is not None:
            assert isinstance(step.model, TransformerLM)
            step.model.plan = plan
        if prepare is not None:
            prepare(step)
        stack.enter_context(labelled(step, tracker))
        uses = Counter(parameter for _, parameter in step.model.named_parameters(remove_duplicate=False))
        tracker.shared_shapes = {parameter.shape for parameter, count in uses.items() if count > 1}
        copies = [tensor.clone() for tensor in batch if "graph" in config.fast_parts]  # those that the graph reads
        for tensor in (*batch, *copies):
            tracker.track(tensor, "inputs")
        if on_cuda:
            scratch = torch.empty(workspace(config), dtype=torch.uint8)
            tracker.track(scratch, "workspace")
        stack.enter_context(tracker)
        if step.optimizer is not None:  # the first step creates the optimizer's state
            step(*batch, watch=tracker.watch)
            label_optimizer_state(step, tracker)
        gc.collect()  # graphs survive in reference cycles until collected
        tracker.reset_peak()
        step(*batch, watch=tracker.watch)
    return MemoryEstimate(tracker.parts, tracker.peak, tracker.peak_phase)


@contextmanager
def fake_step(config: RunConfig) -> Iterator[tuple[TrainStep, tuple[Tensor, Tensor]]]:
    """Return a step of `config` on tensors without memory, and a batch for it; the step runs the operators of its
    device."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor))
        stack.enter_context(FakeTensorMode())
        parts = sorted(config.fast_parts - {"graph"})  # a graph allocates what the eager step does
        with fake_results.CachedResults():
            step = TrainStep.build(replace(config, device="cpu", compile=False, fast=",".join(parts) or "off"))
        step.scaler = torch.amp.GradScaler("cpu", enabled=False)  # it would read a value of a fake tensor
        shape = (config.batch_size, config.model.context_length)
        batch = (torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long))
        if config.device_type == "cuda":
            stack.enter_context(as_on_cuda())
        yield step, batch


# -- operators of CUDA ------------------------------------------------------------------------------------------------


class _FusedRMSNorm(torch.autograd.Function):
    """Saves and allocates the same tensors as CUDA's fused kernel. Under FakeTensorMode values do not matter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


_SDPA = F.scaled_dot_product_attention


def _sdpa_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if attn_mask is not None or enable_gqa or q.shape[-1] % 8:
        return _SDPA(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if q.dtype in (torch.float16, torch.bfloat16):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, None, needs_grad, dropout_p, is_causal, scale=scale)[0]


_FP32_ON_CUDA = (
    *((F, name) for name in ("softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "layer_norm")),
    *(
        (owner, name)
        for owner in (torch, Tensor)
        for name in ("softmax", "log_softmax", "exp", "log", "pow", "rsqrt", "sum", "cumsum", "prod", "norm")
    ),
)
"""Functions that autocast runs in fp32 on CUDA but not on a CPU."""


def _cast_under_autocast(function: Callable, dtype: torch.dtype | None) -> Callable:
    """Wrap `function` to cast floating-point arguments under autocast to `dtype` (None: autocast's own)."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype or torch.get_autocast_dtype("cpu")) if tensor.is_floating_point() else tensor

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return function(*args, **kwargs)

    return wrapped


def _rms_norm_on_cuda(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    weight = input.new_ones(tuple(normalized_shape)) if weight is None else weight
    return _FusedRMSNorm.apply(input, weight)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Substitute the operators that differ on CUDA. They are patched in place, because torch disables modes such as
    TorchFunctionMode inside backward, where checkpointed blocks are recomputed."""
    from cs336_systems.kernels.fused import fp8_triton, pointwise_triton

    with ExitStack() as stack:

        def patch(owner: Any, name: str, function: Callable) -> None:
            stack.enter_context(mock.patch.object(owner, name, function))

        for owner, name in _FP32_ON_CUDA:
            patch(owner, name, _cast_under_autocast(getattr(owner, name), torch.float32))
        patch(F, "rms_norm", _rms_norm_on_cuda)  # not on autocast's list: low-precision input stays as it is
        patch(F, "scaled_dot_product_attention", _cast_under_autocast(_sdpa_on_cuda, None))
        patch(pointwise, "_triton", lambda tensor: pointwise_triton)  # launches nothing for fake tensors
        patch(fp8, "_triton", lambda tensor: fp8_triton)
        patch(fused, "_wide_matmul", lambda a, b, out, *, adds: None)
        yield

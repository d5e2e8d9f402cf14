"""Fully sharded data parallel: every rank holds a part of each large weight, and all of it only during its use.

    model = FSDP(model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())  # over shards
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    clip_grad_norm_(model, 1.0)
    optimizer.step()

[Note: FSDP tensors] Each weight of a Linear or Embedding module exists as four kinds of tensors:

- full: the weight that the module computes with, in `compute_dtype`. A parameter whose storage is allocated while the
  weight is gathered and empty otherwise; autograd keeps a reference to it from forward to backward.
- shard: this rank's rows, in the dtype of the model. The parameter that the optimizer and `state_dict` see.
- gathered: the padded buffer of the all-gather, of which full is a view. Every rank sends the same number of rows.
- gradient shard: this rank's rows of the mean gradient, in the dtype of the shard; the shard's `.grad`.

[Note: FSDP schedule] A weight is gathered before its module's forward and freed after it, gathered again before the
module's backward, and freed when its gradient is ready, which is then reduce-scattered. While one weight is in use the
next ones are prefetched, in the order of the last forward, or in its reverse. Small parameters (norms, biases) are
replicated; their gradients are averaged by `finish_gradient_synchronization`.
"""

from collections import deque
from collections.abc import Container, Iterable
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel import collectives
from cs336_systems.parallel.collectives import Wrapper, broadcast, by_kind
from cs336_systems.parallel.ddp import Bucket

AHEAD = 2
"""Maximum number of prefetched weights: enough to hide the all-gathers, and little memory."""
SCATTERS = 2
"""Maximum number of reduce-scatters in flight: each holds a full gradient."""


class FSDP(Wrapper):
    """Shard the weights of the Linear and Embedding modules of `module`, in place.

    - `compute_dtype`: dtype in which weights are gathered and used, and to which inputs of the sharded modules are
      cast; shards and their gradients keep the dtype of the model.
    - `device`: where a module on the "meta" device is allocated. The modules' own `reset_parameters()` fill it weight
      by weight, so that no rank ever holds the whole model.
    - All ranks must run the same modules in the same order.
    - `state_dict` returns this rank's shards; `gather_full_params` returns full weights.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        device: torch.device | str = "cpu",
    ):
        super().__init__(module)
        users = _users(module)
        for prefix, part in module.named_modules():
            _materialize(prefix, part, torch.device(device), keep=users)
        names = {weight: name for name, weight in module.named_parameters()}
        self._units = [
            Unit(
                _full_weight(names[weight], weight, parts[0], torch.device(device)),
                weight.requires_grad,
                parts,
                compute_dtype,
            )
            for weight, parts in users.items()
        ]
        sharded = {unit.shard for unit in self._units}
        self._replicated = [p for p in module.parameters() if p not in sharded]
        with torch.no_grad():
            broadcast([*self._replicated, *module.buffers()])
        self._buckets: list[Bucket] = []
        self._order: list[Unit] = []
        """The units in the order of the last forward."""
        self._used: list[Unit] = []
        """The units that this forward has used so far."""
        self._to_come: list[Unit] | None = None
        """The used units whose weights backward still needs, in order; None before backward."""
        self._biases: dict[nn.Module, nn.Parameter | None] = {}
        """The biases of modules that run with a cast copy."""
        self._scatters: deque[Unit] = deque()
        self._due = False
        for unit in self._units:
            self._register(unit)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._used:
            self._order = self._used
        self._used, self._to_come = [], None
        for unit in self._units:
            unit.full.requires_grad_(unit.shard.requires_grad)
        self._due = self._due or torch.is_grad_enabled()
        try:
            return self.module(*args, **kwargs)
        finally:
            if not _in_backward():
                for unit in self._units:  # prefetched, but not used in this forward
                    unit.free()

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the mean over ranks, or its shard. All ranks call it together."""
        for unit in self._units:
            unit.free()
        if not self._due:
            return
        while self._scatters:
            self._scatters.popleft().receive_gradient()
        trained = [p for p in self._replicated if p.requires_grad]
        if {id(p) for p in trained} != {id(p) for bucket in self._buckets for p in bucket.parameters}:
            self._buckets = [Bucket(kind) for kind in by_kind(trained)]
        for bucket in self._buckets:
            bucket.send()
            bucket.receive()
        self._due = False

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients by their norm over all ranks; return that norm. For all ranks together."""
        return clip_grad_norm_(self, max_norm)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _register(self, unit: "Unit") -> None:
        for module in unit.modules:
            module.register_forward_pre_hook(
                lambda m, args, kwargs: self._before_forward(unit, m, args, kwargs), with_kwargs=True
            )
            # Recomputation of a checkpoint ends with an exception: the hook must restore the shard all the same.
            module.register_forward_hook(
                lambda m, args, kwargs, out: self._after_forward(unit, m, (*args, *kwargs.values()), out),
                with_kwargs=True,
                always_call=True,
            )
        with torch.enable_grad():  # a hook can only be registered while the tensor requires a gradient
            unit.full.requires_grad_(True)
            unit.full.register_post_accumulate_grad_hook(lambda full: self._gradient_is_ready(unit))
            unit.full.requires_grad_(unit.shard.requires_grad)

    def _before_forward(self, unit: "Unit", module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        unit.gather()
        if not _in_backward():
            self._gather_next(unit)
        unit.wait()
        module._parameters["weight"] = unit.full
        if unit.full.dtype != unit.shard.dtype:
            args = tuple(_cast(x, unit.full.dtype) for x in args)
            kwargs = {name: _cast(x, unit.full.dtype) for name, x in kwargs.items()}
            if module._parameters.get("bias") is not None:
                self._biases[module] = module._parameters["bias"]
                module._parameters["bias"] = _cast(module._parameters["bias"], unit.full.dtype)
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.requires_grad and not unit.full.requires_grad:
                x.register_hook(lambda grad: unit.free())  # a frozen weight has no gradient whose hook would free it
        return args, kwargs

    def _after_forward(self, unit: "Unit", module: nn.Module, inputs: tuple, out: Any) -> None:
        module._parameters["weight"] = unit.shard
        if module in self._biases:
            module._parameters["bias"] = self._biases.pop(module)
        if not _in_backward():  # recomputed: its own backward comes next
            unit.free()
        if not (isinstance(out, Tensor) and out.requires_grad and _needs_weight(module)):
            return
        last = -1

        def before(grads: Any) -> None:
            nonlocal last
            # Once per backward: when the module's last node runs, the gradient may be ready and the weight freed.
            if last != torch._C._current_graph_task_id():
                last = torch._C._current_graph_task_id()
                self._before_backward(unit)

        for node in _nodes_between(inputs, out):
            node.register_prehook(before)

    def _before_backward(self, unit: "Unit") -> None:
        unit.gather()
        if self._to_come is None:
            self._to_come = [used for used in reversed(self._used) if any(map(_needs_weight, used.modules))]
        if unit in self._to_come:
            del self._to_come[: self._to_come.index(unit) + 1]
            self._gather_ahead(self._to_come, 0)
        unit.wait()

    def _gather_next(self, unit: "Unit") -> None:
        """Prefetch the units that followed `unit` in the last forward, unless this forward runs in another order."""
        expected = self._order[len(self._used) : len(self._used) + 1]
        self._used.append(unit)
        if expected and expected[0] is not unit:
            self._order = []
            for other in self._units:
                if other is not unit:
                    other.free()
        self._gather_ahead(self._order, len(self._used))

    def _gather_ahead(self, order: list["Unit"], begin: int) -> None:
        for unit in order[begin : begin + AHEAD]:
            unit.gather()

    @torch.no_grad()
    def _gradient_is_ready(self, unit: "Unit") -> None:
        self._due = True
        unit.free()
        if unit in self._scatters:  # used by two backwards: the first reduce-scatter must end before the second
            self._scatters.remove(unit)
            unit.receive_gradient()
        unit.scatter_gradient()
        self._scatters.append(unit)
        while len(self._scatters) > SCATTERS:
            self._scatters.popleft().receive_gradient()


class WeightState(Enum):
    """State of a unit's full weight."""

    SHARDED = auto()
    """The full weight is not in memory: its storage is empty."""
    GATHERING = auto()
    """The full weight is allocated and being all-gathered."""
    GATHERED = auto()
    """The full weight is allocated and filled."""


class _ReduceScatter(NamedTuple):
    work: dist.Work
    gradient_shard: Tensor
    full_gradient: Tensor
    """The input of the collective, which must stay alive until the collective has ended."""


class Unit:
    """One weight, the modules that use it, and this rank's shard."""

    def __init__(
        self, weight: Tensor, requires_grad: bool, modules: list[nn.Module], compute_dtype: torch.dtype | None
    ):
        self.modules = modules
        ranks, rank = dist.get_world_size(), dist.get_rank()
        rows = weight.shape[0]
        self._rows_each = -(-rows // ranks)
        """Rows of every shard in collectives. The last shards may have fewer rows, or none, and are padded."""
        begin, end = (min(i * self._rows_each, rows) for i in (rank, rank + 1))
        self.shard = nn.Parameter(weight[begin:end].clone(), requires_grad)
        # Read by clip_grad_norm_, which may be given parameters alone, and by checkpoints.
        self.shard.is_shard = True  # type: ignore[attr-defined]
        self.shard.full_shape = weight.shape  # type: ignore[attr-defined]
        self._gathered = torch.empty(
            ranks * self._rows_each, *weight.shape[1:], dtype=compute_dtype or weight.dtype, device=weight.device
        )
        # `.data` has its own version counter: autograd must not see the filling of a weight as a change.
        self.full = nn.Parameter(self._gathered.data[:rows], requires_grad)
        self._nbytes = self._gathered.untyped_storage().nbytes()
        self._gathering: dist.Work | None = None
        self._sent: Tensor | None = None
        """The input of the all-gather, which must stay alive until it has ended."""
        self._scattering: _ReduceScatter | None = None
        self._state = WeightState.GATHERED
        self.free()
        for module in modules:
            module._parameters["weight"] = self.shard

    def gather(self) -> None:
        """Start the all-gather of the full weight."""
        if self._state is not WeightState.SHARDED:
            return
        self._state = WeightState.GATHERING
        self._gathered.untyped_storage().resize_(self._nbytes)
        self._sent = self._padded_rows(self.shard.detach().to(self._gathered.dtype))
        self._gathering = collectives.all_gather(self._gathered, self._sent, async_op=True)

    def wait(self) -> None:
        """Wait for the all-gather, if one is under way."""
        if self._state is WeightState.GATHERING:
            assert self._gathering is not None
            self._gathering.wait()
            self._gathering, self._sent = None, None
            self._state = WeightState.GATHERED

    def free(self) -> None:
        """Release the storage of the full weight."""
        if self._state is not WeightState.SHARDED:
            self.wait()
            self._gathered.untyped_storage().resize_(0)
            self._state = WeightState.SHARDED

    def scatter_gradient(self) -> None:
        """Start the reduce-scatter of the full weight's gradient."""
        grad, self.full.grad = self.full.grad, None
        assert grad is not None
        padded = grad.new_empty(self._gathered.shape)
        padded[grad.shape[0] :].zero_()
        torch.mul(grad, 1 / dist.get_world_size(), out=padded[: grad.shape[0]])
        shard = padded.new_empty(self._rows_each, *padded.shape[1:])
        self._scattering = _ReduceScatter(collectives.reduce_scatter(shard, padded, async_op=True), shard, padded)

    def receive_gradient(self) -> None:
        """Wait for the reduce-scatter and accumulate the gradient shard."""
        assert self._scattering is not None
        self._scattering.work.wait()
        grad = self._scattering.gradient_shard[: self.shard.shape[0]].to(self.shard.dtype)
        self._scattering = None
        self.shard.grad = grad if self.shard.grad is None else self.shard.grad.add_(grad)

    def gather_shards(self) -> Tensor:
        """Return the full weight in the dtype of the shards, in memory of its own."""
        rows = self.full.shape[0]
        gathered = self.shard.new_empty(self._gathered.shape)
        collectives.all_gather(gathered, self._padded_rows(self.shard.detach()))
        return gathered[:rows]

    def _padded_rows(self, rows: Tensor) -> Tensor:
        missing = self._rows_each - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()


# -- which weights are sharded, and the meta device -------------------------------------------------------------------


def _users(module: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Map each weight to the Linear and Embedding modules that use it: torch's, and other classes of these names.

    A weight that is also used by another kind of module is not sharded, because it would not be gathered there.
    """
    found: dict[nn.Parameter, list[nn.Module]] = {}
    elsewhere = set()
    for part in module.modules():
        named = isinstance(part, nn.Linear | nn.Embedding) or type(part).__name__ in ("Linear", "Embedding")
        for name, p in part._parameters.items():
            if named and name == "weight" and p is not None and p.dim() == 2:
                found.setdefault(p, []).append(part)
            elif p is not None:
                elsewhere.add(p)
    return {weight: parts for weight, parts in found.items() if weight not in elsewhere}


def _needs_weight(module: nn.Module) -> bool:
    """Return True if the module's backward reads the weight; that of an embedding does not."""
    return not isinstance(module, nn.Embedding) and type(module).__name__ != "Embedding"


def _full_weight(name: str, weight: nn.Parameter, user: nn.Module, device: torch.device) -> Tensor:
    """Return rank 0's weight; one on the "meta" device is created first."""
    if weight.is_meta:
        user._parameters["weight"] = made = nn.Parameter(torch.empty_like(weight, device=device))
        _reset(name, user)
        weight = made
    full = weight.detach().clone()
    dist.broadcast(full, 0)
    return full


def _materialize(prefix: str, part: nn.Module, device: torch.device, keep: Container[Tensor]) -> None:
    """Allocate and fill parameters and buffers that are on the "meta" device, except those in `keep`."""
    tensors = {**part._parameters, **part._buffers}
    absent = {name: t for name, t in tensors.items() if t is not None and t.is_meta and t not in keep}
    for name, t in absent.items():
        made = torch.empty_like(t, device=device)
        if name in part._buffers:
            part._buffers[name] = made
        else:
            part._parameters[name] = nn.Parameter(made, t.requires_grad)
    if absent:
        _reset(", ".join(f"{prefix}.{name}".lstrip(".") for name in absent), part)


def _reset(name: str, part: nn.Module) -> None:
    reset = getattr(part, "reset_parameters", None)
    if reset is None:
        kind = type(part).__name__
        raise ValueError(f"{name!r} is on the meta device, and {kind} has no reset_parameters() to initialize it")
    reset()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _nodes_between(inputs: Iterable[Any], out: Tensor) -> list[Any]:
    """Return the nodes of autograd's graph that a module has added; one of them reads its weight.

    A hook on the output itself would be lost when the output is changed in place.
    """
    ends = [x.grad_fn for x in inputs if isinstance(x, Tensor)]
    found: list[Any] = []
    waiting: list[Any] = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in ends and node not in found and type(node).__name__ != "AccumulateGrad":
            found.append(node)
            waiting += [before for before, _ in node.next_functions]
    return found


# -- operations on all shards -----------------------------------------------------------------------------------------


@torch.no_grad()
def gather_full_params(wrapped: FSDP) -> dict[str, Tensor]:
    """Return the full parameters by name, in the dtype of the model. All ranks call it together."""
    units = {unit.shard: unit for unit in wrapped._units}
    full: dict[nn.Parameter, Tensor] = {}
    by_name = {}
    for name, p in wrapped.module.named_parameters(remove_duplicate=False):
        if p not in full:
            full[p] = units[p].gather_shards() if p in units else p.detach().clone()
        by_name[name] = full[p]
    return by_name


@torch.no_grad()
def clip_grad_norm_(wrapped: FSDP | Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their norm over the whole model is at most `max_norm`; return the norm before.

    Shards of all ranks are summed, replicated parameters count once. All ranks call it together.
    """
    parameters = wrapped.parameters() if isinstance(wrapped, FSDP) else wrapped
    grads = [(p.grad, hasattr(p, "is_shard")) for p in parameters if p.grad is not None]
    squares = torch.zeros(2, dtype=torch.float64, device=grads[0][0].device if grads else None)
    for grad, is_shard in grads:
        squares[int(is_shard)] += grad.double().square().sum()
    dist.all_reduce(squares[1:])
    norm = squares.sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad, _ in grads:
        grad.mul_(scale)
    return norm.float()

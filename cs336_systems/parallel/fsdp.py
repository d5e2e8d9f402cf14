"""Fully sharded data parallel: every rank holds a part of each large weight, and the whole only while it is used.

    model = FSDP(model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())  # over shards
    loss(model(x)).backward()
    model.finish_gradient_synchronization()
    clip_grad_norm_(model, 1.0)
    optimizer.step()

Words. The *full* weight is what the module computes with. The *shard* is the rank's part of it, some of its rows: the
parameter that the optimizer sees, in the dtype the model was built in. A weight is *gathered* while the full one is in
memory. The *gradient shard* is the rank's rows of the mean gradient.

How it works. The weights of Linear and Embedding modules are sharded; what is small (norms, biases) is replicated and
its gradients averaged at the end. A module's weight is gathered before its forward and freed after; gathered again
before its backward, and freed when its gradient is there, which is then reduced and scattered. While one weight is in
use the next ones are on their way: forward's order is remembered, and backward's is its reverse.

The full weight is one parameter whose memory comes and goes. Autograd keeps a reference to it between forward and
backward, and finds it filled again when it looks.
"""

from collections import deque
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel import collectives
from cs336_systems.parallel.collectives import broadcast, by_kind, require_same
from cs336_systems.parallel.ddp import Bucket

AHEAD = 2
"""Weights that are gathered before they are needed, at most: enough to hide the sending, and little memory."""
SCATTERS = 2
"""Gradients that are being scattered at a time, at most: each holds a whole gradient."""


class FSDP(nn.Module):
    """`module`, changed in place: the weights of its Linear and Embedding modules become shards.

    - `compute_dtype`: weights are sent, and used, in this dtype, and inputs of the sharded modules cast to it; shards
      and their gradients keep the dtype the model was built in.
    - A module on the "meta" device is given memory on `device` weight by weight, so that no rank ever holds all of it:
      filled by the modules' own `reset_parameters()`.
    - All ranks must use the same modules in the same order.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError("FSDP needs a process group; call dist.init_process_group first")
        require_same(module)
        self.module = module
        users = _users(module)
        for prefix, part in module.named_modules():
            _materialize(prefix, part, torch.device(device), keep=users)
        names = {weight: name for name, weight in module.named_parameters()}
        self._units = [
            Unit(
                _whole(names[weight], weight, parts[0], torch.device(device)),
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
        """In which forward used the units the last time."""
        self._used: list[Unit] = []
        """Those that forward has used so far, in this pass."""
        self._to_come: list[Unit] | None = None
        """Of these, those whose weight backward will want, the next one first; None until it begins."""
        self._biases: dict[nn.Module, nn.Parameter | None] = {}
        """Those that a cast one stands in for, while their module runs."""
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
                for unit in self._units:  # gathered for a pass that went another way than the last
                    unit.free()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, of this rank's shards; `gather_full_params` has the whole."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the mean over ranks, or this rank's shard of it. For all ranks together."""
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
            # Recomputation of a checkpoint is ended by an exception: the weight must be put back all the same.
            module.register_forward_hook(
                lambda m, args, kwargs, out: self._after_forward(unit, m, (*args, *kwargs.values()), out),
                with_kwargs=True,
                always_call=True,
            )
        with torch.enable_grad():  # a hook can only be had by what requires a gradient, if only for now
            unit.full.requires_grad_(True)
            unit.full.register_post_accumulate_grad_hook(lambda full: self._gradient_came(unit))
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
                x.register_hook(lambda grad: unit.free())  # a frozen weight has no gradient that would say it is done
        return args, kwargs

    def _after_forward(self, unit: "Unit", module: nn.Module, inputs: tuple, out: Any) -> None:
        module._parameters["weight"] = unit.shard
        if module in self._biases:
            module._parameters["bias"] = self._biases.pop(module)
        if not _in_backward():  # else its own backward comes next
            unit.free()
        if not (isinstance(out, Tensor) and out.requires_grad and _needs_weight(module)):
            return
        last = -1

        def before(grads: Any) -> None:
            nonlocal last
            # Once in a backward: when the module's last node runs, its gradient may be there and the weight freed.
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
        """What followed the last time. Where another unit than `unit` was to come, that tells nothing any more."""
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
    def _gradient_came(self, unit: "Unit") -> None:
        self._due = True
        unit.free()
        if unit in self._scatters:  # used by two backwards: its buffers are free when the first has been received
            self._scatters.remove(unit)
            unit.receive_gradient()
        unit.scatter_gradient()
        self._scatters.append(unit)
        while len(self._scatters) > SCATTERS:
            self._scatters.popleft().receive_gradient()


class Unit:
    """One weight, the modules that use it, and this rank's shard."""

    def __init__(
        self, weight: Tensor, requires_grad: bool, modules: list[nn.Module], compute_dtype: torch.dtype | None
    ):
        self.modules = modules
        ranks, rank = dist.get_world_size(), dist.get_rank()
        rows = weight.shape[0]
        self._rows_each = -(-rows // ranks)
        """Of every rank but the last ones, whose shards are shorter, or empty; they are sent at this length."""
        begin, end = (min(i * self._rows_each, rows) for i in (rank, rank + 1))
        self.shard = nn.Parameter(weight[begin:end].clone(), requires_grad)
        # For clip_grad_norm_, which may be given parameters alone, and for who saves them.
        self.shard.is_shard = True  # type: ignore[attr-defined]
        self.shard.full_shape = weight.shape  # type: ignore[attr-defined]
        self._padded = torch.empty(
            ranks * self._rows_each, *weight.shape[1:], dtype=compute_dtype or weight.dtype, device=weight.device
        )
        # `.data` counts its changes apart: autograd must not take the filling of a weight for a change of it.
        self.full = nn.Parameter(self._padded.data[:rows], requires_grad)
        self._nbytes = self._padded.untyped_storage().nbytes()
        self._gathering: dist.Work | None = None
        self._sent: Tensor | None = None
        self._scattering: tuple[dist.Work, Tensor, Tensor] | None = None
        self._is_gathered = True
        self.free()
        for module in modules:
            module._parameters["weight"] = self.shard

    def gather(self) -> None:
        """Begin to fill the full weight."""
        if self._is_gathered:
            return
        self._is_gathered = True
        self._padded.untyped_storage().resize_(self._nbytes)
        self._sent = self._padded_rows(self.shard.detach().to(self._padded.dtype))
        self._gathering = collectives.all_gather(self._padded, self._sent, async_op=True)

    def wait(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self._sent = None, None

    def free(self) -> None:
        if self._is_gathered:
            self.wait()
            self._padded.untyped_storage().resize_(0)
            self._is_gathered = False

    def scatter_gradient(self) -> None:
        """Begin to average the gradient of the full weight, of which this rank gets its rows."""
        grad, self.full.grad = self.full.grad, None
        assert grad is not None
        whole = grad.new_empty(self._padded.shape)
        whole[grad.shape[0] :].zero_()
        torch.mul(grad, 1 / dist.get_world_size(), out=whole[: grad.shape[0]])
        part = whole.new_empty(self._rows_each, *whole.shape[1:])
        self._scattering = collectives.reduce_scatter(part, whole, async_op=True), part, whole

    def receive_gradient(self) -> None:
        assert self._scattering is not None
        work, part, _ = self._scattering
        work.wait()
        self._scattering = None
        grad = part[: self.shard.shape[0]].to(self.shard.dtype)
        self.shard.grad = grad if self.shard.grad is None else self.shard.grad.add_(grad)

    def gathered_shards(self) -> Tensor:
        """The full weight in the shards' own dtype, in memory of its own."""
        rows = self.full.shape[0]
        whole = self.shard.new_empty(self._padded.shape)
        collectives.all_gather(whole, self._padded_rows(self.shard.detach()))
        return whole[:rows]

    def _padded_rows(self, rows: Tensor) -> Tensor:
        missing = self._rows_each - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()


# -- what is sharded, and how it gets its memory ----------------------------------------------------------------------


def _users(module: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Weight -> the Linear and Embedding modules that use it: torch's, and others of these names, like the course's.

    One that a module of another kind uses too is not sharded: nobody would gather it there.
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
    """Whether its backward does: that of an embedding only adds up rows."""
    return not isinstance(module, nn.Embedding) and type(module).__name__ != "Embedding"


def _whole(name: str, weight: nn.Parameter, user: nn.Module, device: torch.device) -> Tensor:
    """Rank 0's weight; one on the "meta" device is made first."""
    if weight.is_meta:
        user._parameters["weight"] = made = nn.Parameter(torch.empty_like(weight, device=device))
        _reset(name, user)
        weight = made
    whole = weight.detach().clone()
    dist.broadcast(whole, 0)
    return whole


def _materialize(prefix: str, part: nn.Module, device: torch.device, keep: Container[Tensor]) -> None:
    """Give memory and values to parameters and buffers on the "meta" device; not to those that will be sharded."""
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
        raise ValueError(f"{name!r} is on the meta device, and {kind} has no reset_parameters() to give it values")
    reset()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _nodes_between(inputs: Iterable[Any], out: Tensor) -> list[Any]:
    """Of autograd's graph, those that a module has added: one of them will want its weight.

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


# -- over all shards --------------------------------------------------------------------------------------------------


@torch.no_grad()
def gather_full_params(wrapped: FSDP) -> dict[str, Tensor]:
    """Name -> full parameter, in the dtype the model was built in. For all ranks together."""
    units = {unit.shard: unit for unit in wrapped._units}
    whole: dict[nn.Parameter, Tensor] = {}
    found = {}
    for name, p in wrapped.module.named_parameters(remove_duplicate=False):
        if p not in whole:
            whole[p] = units[p].gathered_shards() if p in units else p.detach().clone()
        found[name] = whole[p]
    return found


@torch.no_grad()
def clip_grad_norm_(wrapped: FSDP | Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their norm over the whole model is at most `max_norm`; the norm they had.

    Of shards every rank adds its part; what is replicated counts once. For all ranks together.
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

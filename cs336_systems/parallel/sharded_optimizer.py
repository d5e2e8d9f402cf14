"""An optimizer whose state is sharded over ranks (ZeRO, stage 1).

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

Every rank holds all parameters and all gradients, but the optimizer state of the parameters it owns only: AdamW's two
moments take 8 bytes for each fp32 parameter, and 8 / N on N ranks. Each rank updates the parameters that it owns and
broadcasts them.

[Note: chunks] Parameters are assigned to ranks by size, the largest first, to the rank that owns least. Those of a rank
are split into a few chunks. The parameters of a chunk become views of one flat tensor, so that a broadcast takes no
copy. Each chunk has its own inner optimizer, so that one is broadcast while the next is updated. All ranks broadcast
the same chunks in the same order.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cs336_systems.parallel.collectives import communication_device, gather, require_group, views

CHUNKS = 4
"""Number of chunks per owner: enough to overlap updates with broadcasts, few enough that each is large."""


class _Entry(NamedTuple):
    parameter: Tensor
    group: dict[str, Any]
    """The parameter group that holds the parameter."""


class ShardedOptimizer(Optimizer):
    """Run `optimizer_cls` over `params`, with the state of each parameter on one rank.

    Gradients must be the same on all ranks, as after `finish_gradient_synchronization()`. All ranks call `step`,
    `add_param_group` and `state_dict` together. `param_groups` are those of the plain optimizer; `state` holds the
    parameters that this rank owns.
    """

    def __init__(self, params: Iterable[Any], optimizer_cls: type[Optimizer], **kwargs: Any):
        require_group(type(self).__name__)
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
            raise TypeError(f"optimizer_cls must be a torch.optim.Optimizer class, got {optimizer_cls!r}")
        self._optimizer_cls, self._kwargs = optimizer_cls, kwargs
        self._chunks: list[Chunk] = []
        self._owner: dict[Tensor, int] = {}
        self._bytes = [0] * dist.get_world_size()
        # On every rank, also one that will own nothing: checks the arguments and finds the defaults.
        defaults = optimizer_cls([torch.zeros(1, requires_grad=True)], **kwargs).defaults
        super().__init__(params, defaults)
        self._assign(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. All ranks call it together; parameters that have an owner keep it."""
        super().add_param_group(param_group)
        if self._owner:  # otherwise called by __init__, which assigns all groups at once
            self._assign(self.param_groups[-1:])

    def _assign(self, groups: Sequence[dict[str, Any]]) -> None:
        """Assign the parameters of new groups to owners, and split them into chunks."""
        entries = [_Entry(p, group) for group in groups for p in group["params"]]
        _require_own_memory([*self._owner, *(entry.parameter for entry in entries)])
        for p, _ in sorted(entries, key=lambda entry: -_state_size(entry.parameter)):  # stable: the same on all ranks
            emptiest = self._bytes.index(min(self._bytes))
            self._owner[p] = emptiest
            self._bytes[emptiest] += _state_size(p)
        for owner in range(dist.get_world_size()):
            kinds: dict[tuple, list[_Entry]] = {}
            for entry in entries:
                p = entry.parameter
                if self._owner[p] == owner:
                    kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append(entry)
            self._chunks += [self._chunk(owner, part) for kind in kinds.values() for part in _split(kind)]
        if not any(chunk.optimizer for chunk in self._chunks):
            # A rank that owns nothing needs an inner optimizer, too: some optimizers count steps in their groups.
            self._chunks.append(self._chunk(dist.get_rank(), []))
        # The first chunk of each owner, then the second of each: ranks update while they receive.
        by_owner = [[chunk for chunk in self._chunks if chunk.owner == owner] for owner in range(len(self._bytes))]
        self._chunks = [chunk for row in zip_longest(*by_owner) for chunk in row if chunk is not None]

    def _chunk(self, owner: int, entries: Sequence[_Entry]) -> "Chunk":
        if owner != dist.get_rank():
            return Chunk(owner, [p for p, _ in entries])
        # With all groups, also those without a parameter of this chunk: some optimizers count steps in their groups.
        groups: dict[int, list[Tensor]] = {id(group): [] for group in self.param_groups}
        for p, group in entries:
            groups[id(group)].append(p)
        optimizer = self._optimizer_cls(
            [{**_options(group), "params": groups[id(group)]} for group in self.param_groups], **self._kwargs
        )
        self.state.update(optimizer.state)
        optimizer.state = self.state
        return Chunk(owner, [p for p, _ in entries], optimizer)

    # -- a step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that this rank owns, broadcast them, and receive the others."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = [_options(group) for group in self.param_groups]
        for chunk in self._chunks:
            chunk.update(before)
            chunk.send()
        for chunk in self._chunks:
            chunk.wait()
        for chunk in self._chunks:
            if chunk.optimizer is not None:  # options that a step has written: the same in all chunks
                for group, inner in zip(self.param_groups, chunk.optimizer.param_groups, strict=False):
                    group.update(_options(inner))
        return loss

    @property
    def owned(self) -> list[Tensor]:
        """The parameters that this rank updates, and whose state it holds."""
        return [p for p, owner in self._owner.items() if owner == dist.get_rank()]

    # -- the full state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the plain optimizer on every rank, in CPU memory. All ranks call it together."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        own = {index[p]: state for p, state in self.state.items()}
        described = {i: {name: _described(value) for name, value in state.items()} for i, state in own.items()}
        full: dict[int, dict[str, Any]] = {}
        for owner, states in enumerate(gather(described)):
            for i, state in states.items():
                full[i] = {name: _from_owner(owner, value, own.get(i, {}).get(name)) for name, value in state.items()}
        groups = [{**group, "params": [index[p] for p in group["params"]]} for group in self.param_groups]
        found = {"state": dict(sorted(full.items())), "param_groups": copy.deepcopy(groups)}
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a state dict of this optimizer, with any number of ranks, or of the plain one."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, dict(state_dict)) or state_dict
        given, own = state_dict["param_groups"], self.param_groups
        if [len(group["params"]) for group in given] != [len(group["params"]) for group in own]:
            raise ValueError(
                f"the state has groups of {[len(group['params']) for group in given]} parameters, "
                f"the optimizer of {[len(group['params']) for group in own]}; build it with the same groups"
            )
        numbers = [i for group in given for i in group["params"]]
        name_of = dict(zip((p for group in own for p in group["params"]), numbers, strict=True))
        for theirs, ours in zip(given, own, strict=True):
            ours.update(copy.deepcopy(_options(theirs)))
        self.state.clear()
        for chunk in self._chunks:
            if chunk.optimizer is not None:
                chunk.load({p: state_dict["state"].get(name_of[p]) for p in chunk.parameters})
                self.state.update(chunk.optimizer.state)
                chunk.optimizer.state = self.state
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


class Chunk:
    """Parameters of one owner and dtype that are sent by one broadcast; the owner also has their inner optimizer."""

    def __init__(self, owner: int, parameters: list[Tensor], optimizer: Optimizer | None = None):
        self.owner = owner
        self.parameters = parameters
        self.optimizer = optimizer
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._work: dist.Work | None = None

    def update(self, options: Sequence[dict[str, Any]]) -> None:
        """Run the inner optimizer with the options of all groups, except those that were added after this chunk."""
        if self.optimizer is not None:
            for inner, given in zip(self.optimizer.param_groups, options, strict=False):
                inner.update(given)
            self.optimizer.step()

    def send(self) -> None:
        if not any(p.requires_grad or p.grad is not None for p in self.parameters):
            return  # no parameter was updated
        self._flatten()
        assert self._flat is not None
        self._work = dist.broadcast(self._flat, self.owner, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _flatten(self) -> None:
        """Make the parameters views of one tensor, unless they are: the model may have been moved."""
        first = self.parameters[0]
        if self._flat is None or self._flat.dtype != first.dtype or self._flat.device != first.device:
            elements = sum(p.numel() for p in self.parameters)
            self._flat = torch.empty(elements, dtype=first.dtype, device=first.device)
            self._views = views(self._flat, self.parameters)
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.data_ptr() != view.data_ptr():
                view.copy_(p)
                p.data = view

    def load(self, states: dict[Tensor, dict[str, Any] | None]) -> None:
        """Load states by the inner optimizer's own `load_state_dict`, which moves and casts them."""
        assert self.optimizer is not None
        index = {p: i for i, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        groups = [
            {**_options(group), "params": [index[p] for p in group["params"]]} for group in self.optimizer.param_groups
        ]
        # A copy: the optimizer would update the given tensors in place.
        own = {index[p]: copy.deepcopy(state) for p, state in states.items() if state is not None}
        self.optimizer.load_state_dict({"state": own, "param_groups": groups})


# -- helpers ----------------------------------------------------------------------------------------------------------


def _require_own_memory(parameters: Iterable[Tensor]) -> None:
    """Raise a ValueError if two parameters share memory: each is moved into a flat tensor of its own."""
    pointers = [p.data_ptr() for p in parameters if p.numel()]
    if len(set(pointers)) != len(pointers):
        raise ValueError("two parameters share memory; tie modules by one Parameter: head.weight = embedding.weight")


def _state_size(p: Tensor) -> int:
    """Return the bytes by which parameters are balanced over ranks: a frozen parameter has no state."""
    return p.nbytes if p.requires_grad else 0


def _split(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    """Split entries, in order, into about CHUNKS parts of equal size."""
    share = sum(p.nbytes for p, _ in entries) / CHUNKS
    parts: list[list[_Entry]] = [[]]
    filled = 0.0
    for entry in entries:
        nbytes = entry.parameter.nbytes
        if parts[-1] and filled + nbytes / 2 > share * len(parts):
            parts.append([])
        parts[-1].append(entry)
        filled += nbytes
    return parts


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _described(value: Any) -> Any:
    """Replace a tensor by one on the meta device, which is small to send."""
    return value.to("meta") if isinstance(value, Tensor) else value


def _from_owner(owner: int, described: Any, value: Any) -> Any:
    """Return a value of the state from its owner, in CPU memory."""
    if not isinstance(described, Tensor):
        return described
    received = value.detach().clone() if dist.get_rank() == owner else torch.empty_like(described, device="cpu")
    received = received.to(communication_device())
    dist.broadcast(received, owner)
    return received.cpu()

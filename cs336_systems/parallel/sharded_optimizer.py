"""An optimizer whose state is shared out over ranks (ZeRO, stage 1).

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

Every rank holds all parameters and all gradients, but the optimizer's state of its own parameters only: AdamW's two
moments are 8 bytes for each fp32 parameter, and become 8 / N. A rank updates its own parameters and sends them to all.

How it works. Parameters are given to ranks by size, the largest first to the rank that has least. Those of a rank are
cut into a few messages. The parameters of a message are moved into one flat tensor, of which they become views, so that
sending them takes no copy; and each message has an optimizer of its own, so that one is on its way while the next is
updated. All ranks send and receive the same messages in the same order.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cs336_systems.parallel.collectives import message_device, views

MESSAGES = 4
"""Into which the parameters of a rank are cut: enough to overlap, few enough that each is large."""


class ShardedOptimizer(Optimizer):
    """`optimizer_cls` over all of `params`, with the state of each parameter on one rank.

    Gradients must be the same on all ranks, as after `finish_gradient_synchronization()`. `step`, `add_param_group` and
    `state_dict` are for all ranks together. `param_groups` are those of the plain optimizer; `state` holds this rank's
    own parameters.
    """

    def __init__(self, params: Iterable[Any], optimizer_cls: type[Optimizer], **kwargs: Any):
        if not dist.is_initialized():
            raise RuntimeError("ShardedOptimizer needs a process group; call dist.init_process_group first")
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
            raise TypeError(f"optimizer_cls must be a torch.optim.Optimizer class, got {optimizer_cls!r}")
        self._optimizer_cls, self._kwargs = optimizer_cls, kwargs
        self._messages: list[Message] = []
        self._owner: dict[Tensor, int] = {}
        self._bytes = [0] * dist.get_world_size()
        # On every rank, also one that will own nothing: it finds the defaults, and what is wrong with the arguments.
        defaults = optimizer_cls([torch.zeros(1, requires_grad=True)], **kwargs).defaults
        super().__init__(params, defaults)
        self._share_out(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For all ranks together. Parameters that have an owner keep it."""
        super().add_param_group(param_group)
        if self._owner:  # else still in __init__, which shares out all groups at once
            self._share_out(self.param_groups[-1:])

    def _share_out(self, groups: Sequence[dict[str, Any]]) -> None:
        fresh = [(p, group) for group in groups for p in group["params"]]
        _require_own_memory([*self._owner, *(p for p, _ in fresh)])
        for p, _ in sorted(fresh, key=lambda entry: -_weight(entry[0])):  # stable: the same on all ranks
            emptiest = self._bytes.index(min(self._bytes))
            self._owner[p] = emptiest
            self._bytes[emptiest] += _weight(p)
        for owner in range(dist.get_world_size()):
            kinds: dict[tuple, list[tuple[Tensor, dict]]] = {}
            for p, group in fresh:
                if self._owner[p] == owner:
                    kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append((p, group))
            self._messages += [self._message(owner, piece) for kind in kinds.values() for piece in _cut(kind)]
        if not any(message.optimizer for message in self._messages):
            # A rank that owns nothing counts in the groups all the same.
            self._messages.append(self._message(dist.get_rank(), []))
        # One of each owner, then the next of each: while a rank updates, it also receives.
        turns = {owner: iter([m for m in self._messages if m.owner == owner]) for owner in range(len(self._bytes))}
        ordered: list[Message] = []
        while len(ordered) < len(self._messages):
            ordered += [message for turn in turns.values() if (message := next(turn, None)) is not None]
        self._messages = ordered

    def _message(self, owner: int, entries: Sequence[tuple[Tensor, dict[str, Any]]]) -> "Message":
        if owner != dist.get_rank():
            return Message(owner, [p for p, _ in entries])
        # All groups, with the parameters that are this message's, if any: some optimizers count steps in their groups.
        groups: dict[int, list[Tensor]] = {id(group): [] for group in self.param_groups}
        for p, group in entries:
            groups[id(group)].append(p)
        optimizer = self._optimizer_cls(
            [{**_options(group), "params": groups[id(group)]} for group in self.param_groups], **self._kwargs
        )
        self.state.update(optimizer.state)
        optimizer.state = self.state
        return Message(owner, [p for p, _ in entries], optimizer)

    # -- a step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, send them, and receive the others'."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = [_options(group) for group in self.param_groups]
        for message in self._messages:
            message.update(before)
            message.send()
        for message in self._messages:
            message.wait()
        for message in self._messages:
            if message.optimizer is not None:  # what a step has written into its groups: the same in all messages
                for group, inner in zip(self.param_groups, message.optimizer.param_groups, strict=False):
                    group.update(_options(inner))
        return loss

    @property
    def owned(self) -> list[Tensor]:
        """Parameters that this rank updates, and whose state it has."""
        return [p for p, owner in self._owner.items() if owner == dist.get_rank()]

    # -- the whole state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank, as the plain optimizer has it; in main memory. For all ranks together."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        mine = {index[p]: {name: _described(value) for name, value in state.items()} for p, state in self.state.items()}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        own = {index[p]: state for p, state in self.state.items()}
        whole: dict[int, dict[str, Any]] = {}
        for owner, described in enumerate(every):
            for i, state in described.items():
                whole[i] = {name: _sent(owner, value, own.get(i, {}).get(name)) for name, value in state.items()}
        groups = [{**group, "params": [index[p] for p in group["params"]]} for group in self.param_groups]
        found = {"state": dict(sorted(whole.items())), "param_groups": copy.deepcopy(groups)}
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state: of this optimizer at any number of ranks, or of the plain one."""
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
        for message in self._messages:
            if message.optimizer is not None:
                message.load({p: state_dict["state"].get(name_of[p]) for p in message.parameters})
                self.state.update(message.optimizer.state)
                message.optimizer.state = self.state
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


class Message:
    """Parameters of one owner and dtype that are sent together; on their owner with the optimizer that updates them."""

    def __init__(self, owner: int, parameters: list[Tensor], optimizer: Optimizer | None = None):
        self.owner = owner
        self.parameters = parameters
        self.optimizer = optimizer
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._work: dist.Work | None = None

    def update(self, options: Sequence[dict[str, Any]]) -> None:
        """With the options of all groups; those of groups that came later than this message are not its business."""
        if self.optimizer is not None:
            for inner, given in zip(self.optimizer.param_groups, options, strict=False):
                inner.update(given)
            self.optimizer.step()

    def send(self) -> None:
        if not any(p.requires_grad or p.grad is not None for p in self.parameters):
            return  # nothing of it was updated
        self._gather()
        assert self._flat is not None
        self._work = dist.broadcast(self._flat, self.owner, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _gather(self) -> None:
        """Make the parameters views of one tensor, unless they are: the model may have been moved since."""
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
        """Through the optimizer's own `load_state_dict`, which moves and casts as it does for anybody."""
        assert self.optimizer is not None
        place = {p: i for i, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        groups = [
            {**_options(group), "params": [place[p] for p in group["params"]]} for group in self.optimizer.param_groups
        ]
        # Copied: the optimizer would go on in the tensors it is given.
        own = {place[p]: copy.deepcopy(state) for p, state in states.items() if state is not None}
        self.optimizer.load_state_dict({"state": own, "param_groups": groups})


# -- small parts ------------------------------------------------------------------------------------------------------


def _require_own_memory(parameters: Iterable[Tensor]) -> None:
    """They are moved, each for itself: two that are one in memory would be so no more."""
    pointers = [p.data_ptr() for p in parameters if p.numel()]
    if len(set(pointers)) != len(pointers):
        raise ValueError("two parameters share memory; tie modules by one Parameter: head.weight = embedding.weight")


def _weight(p: Tensor) -> int:
    """Bytes that count when parameters are shared out: a frozen one has no state."""
    return p.nbytes if p.requires_grad else 0


def _cut(entries: Sequence[tuple[Tensor, dict]]) -> list[list[tuple[Tensor, dict]]]:
    """Into about MESSAGES pieces of equal size, in order."""
    share = sum(p.nbytes for p, _ in entries) / MESSAGES
    pieces: list[list[tuple[Tensor, dict]]] = [[]]
    filled = 0.0
    for p, group in entries:
        if pieces[-1] and filled + p.nbytes / 2 > share * len(pieces):
            pieces.append([])
        pieces[-1].append((p, group))
        filled += p.nbytes
    return pieces


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _described(value: Any) -> Any:
    """A tensor by its meta twin, which is small to send; anything else as it is."""
    return value.to("meta") if isinstance(value, Tensor) else value


def _sent(owner: int, described: Any, value: Any) -> Any:
    """A state's value from its owner, in main memory."""
    if not isinstance(described, Tensor):
        return described
    received = value.detach().clone() if dist.get_rank() == owner else torch.empty_like(described, device="cpu")
    received = received.to(message_device())
    dist.broadcast(received, owner)
    return received.cpu()

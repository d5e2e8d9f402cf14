"""Whole blocks of any model, each kept, recomputed or offloaded between forward and backward.

For models without the fused blocks of this package, whose tensors are planned one by one (kernels/fused/block.py). The
blocks are the longest nn.ModuleList of one class. A block that is recomputed runs under torch.utils.checkpoint. One
that is offloaded copies what autograd saves in it to pinned host memory: a storage once, however many nodes save views
of it, and never a parameter or buffer. The copies come back during the backward pass of the block after it.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cs336_systems.config import UserError
from cs336_systems.kernels.flash.operators import is_plain
from cs336_systems.kernels.fused.host_memory import HostMemory, Key
from cs336_systems.model import TransformerLM
from cs336_systems.predict.activation_plan import OFFLOAD, RECOMPUTE

SMALLEST = 1 << 20
"""Smaller storages in bytes are not worth a copy."""

ChoiceByBlock = tuple[str, ...]
""""keep", "recompute" or "offload" for each block, the first one first."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the longest nn.ModuleList of one class; UserError if none has two."""
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    alike = [blocks for blocks in lists if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    if not alike:
        raise UserError(
            f"memory_budget plans blocks, and {type(model).__name__} has no nn.ModuleList of at least two modules of "
            f"one class; leave memory_budget out",
            "memory_budget",
        )
    return max(alike, key=len)


class BlockMemory:
    """Runs the blocks of a model as a plan says. Wrappers of parallel/ may wrap the model afterwards."""

    def __init__(self, model: nn.Module, plan: ChoiceByBlock):
        self.host = HostMemory()
        self._is_random = not isinstance(model, TransformerLM)
        """True if the model may use random numbers, such as dropout: recomputation then restores the generators'
        state."""
        self._fixed: set[int] = set()
        """Storages of parameters and buffers."""
        self._sent: list[list[weakref.ref[_Offloaded]]] = []
        """Offloaded storages of each call of a block in this forward pass."""
        model.register_forward_pre_hook(self._begin)
        for block, choice in zip(find_blocks(model), plan, strict=True):
            block.forward = partial(self._run, block.forward, choice)

    @property
    def offloaded_bytes(self) -> list[int]:
        """Bytes that each call of a block has offloaded in the last forward pass."""
        alive = ([held() for held in sent] for sent in self._sent)
        return [sum(held.nbytes for held in sent if held is not None) for sent in alive]

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.host.begin()
            self._sent = []
            self._fixed = {_storage_id(t) for t in (*model.parameters(), *model.buffers())}

    def _run(self, forward: Callable[..., Any], choice: str, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        number = len(self._sent)
        sent: list[weakref.ref[_Offloaded]] = []
        self._sent.append(sent)
        if choice == RECOMPUTE:
            out = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=self._is_random, **kwargs)
        elif choice == OFFLOAD:
            with saved_tensors_hooks(partial(self._pack, number, {}), _unpack):
                out = forward(*args, **kwargs)
        else:
            out = forward(*args, **kwargs)
        self.host.release(number - 1)
        if number and self._sent[number - 1]:
            _before_backward(out, partial(_fetch, self._sent[number - 1]))
        return out

    def _pack(self, number: int, storages: "dict[int, _Offloaded]", tensor: Tensor) -> "Tensor | _View":
        if not self._is_worth_a_copy(tensor):
            return tensor
        known = storages.get(_storage_id(tensor))
        if known is None:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((elements,), (1,), 0)
            known = _Offloaded(self.host, (number, str(len(storages))), whole.nbytes)
            self.host.send(known.key, whole)  # it holds the storage, whose id is not used again in this block
            storages[_storage_id(tensor)] = known
            self._sent[number].append(weakref.ref(known))
        return _View(known, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _is_worth_a_copy(self, tensor: Tensor) -> bool:
        """Return True for an activation of sufficient size. A parameter may also be one that FSDP has gathered for this
        use."""
        if not (is_plain(tensor) or isinstance(tensor, FakeTensor)) or tensor.layout != torch.strided:
            return False
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, nn.Parameter) or _storage_id(tensor) in self._fixed or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.untyped_storage().nbytes() >= SMALLEST


class _Offloaded:
    """A storage whose contents are in host memory. It is freed with the last autograd node that saves a view of it."""

    def __init__(self, host: HostMemory, key: Key, nbytes: int):
        self.key, self.nbytes = key, nbytes
        self._host, self._pass = host, host.passes
        self._whole: Tensor | None = None

    def fetch(self) -> None:
        """Start the copy back."""
        if self._whole is None:
            self._host.require_last_pass(self._pass)
            self._host.fetch([self.key])

    def whole(self) -> Tensor:
        if self._whole is None:
            self.fetch()
            self._whole = self._host.take(self.key)
        return self._whole


class _View(NamedTuple):
    """A tensor that autograd saves: a view of an offloaded storage."""

    of: _Offloaded
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(saved: "Tensor | _View") -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.of.whole().view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)


def _fetch(sent: "Sequence[weakref.ref[_Offloaded]]", grads: Any) -> None:
    for reference in sent:
        if (held := reference()) is not None:
            held.fetch()


def _before_backward(out: Any, call: Callable[[Any], None]) -> None:
    """Call a function when backward reaches the block that returned `out`."""
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(call)


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

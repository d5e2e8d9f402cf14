"""Context parallelism: the ranks of a group get the same sequences, and each computes a part of their tokens.

N ranks cut a sequence into 2N chunks. Rank i computes the chunks i and 2N - 1 - i, so that causal attention costs every
rank the same. Only attention needs other tokens: keys and values are gathered in their order, and each of the two
chunks of queries attends to all keys up to its own end, by one call of the implementation that the run selected.

Only this rank's part is kept for backward: it gathers keys and values again, and adds up their gradients on the ranks
that own them. That is what `cs336 plan` counts for `cp`.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from cs336_systems.parallel.collectives import all_gather, reduce_scatter


class Passes(Protocol):
    """Causal attention of queries at the end of the keys' sequence: `PrefixAttention` of the kernels."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and logsumexp."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v."""


class ContextParallel:
    """Splits sequences over the ranks of a mesh of one axis."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.group = mesh, mesh.get_group()
        self.ranks, rank = mesh.size(), mesh.get_local_rank()
        self.chunks = (rank, 2 * self.ranks - 1 - rank)
        """Indices of this rank's chunks among the 2 x ranks chunks."""

    def install(self, model: nn.Module) -> None:
        """Let a TransformerLM compute this rank's part of the sequence."""
        cast(Any, model).rotate.context = self
        for block in cast(Any, model).layers:
            block.attn.context = self

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of sequences: (B, T) -> (B, T / N). T must be a multiple of 2N."""
        chunks = whole.unflatten(1, (2 * self.ranks, -1))
        return torch.cat([chunks[:, number] for number in self.chunks], dim=1)

    def joined(self, own: Tensor) -> Tensor:
        """Return the ranks' parts joined to whole sequences: (B, T / N, ...) -> (B, T, ...).

        Its gradient is summed over the ranks, as if each had a loss of its own.
        """
        by_rank = DTensor.from_local(own, self.mesh, [Shard(1)]).full_tensor(grad_placements=[Partial()])
        return _in_order(by_rank.unflatten(1, (self.ranks, 2, -1)), 1).flatten(1, 2)

    def positions(self, length: int) -> list[slice]:
        """Return the positions of this rank's tokens in the sequence, for a part of that many tokens."""
        size = length // 2
        return [slice(number * size, (number + 1) * size) for number in self.chunks]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, passes: Passes) -> Tensor:
        """Return causal attention of this rank's queries over the whole sequence; (B, H, T / N, K) each."""
        return _ContextAttention.apply(q, k, v, self, passes)

    # -- keys and values, and their gradients -------------------------------------------------------------------------

    def gathered(self, k: Tensor, v: Tensor) -> Tensor:
        """Return keys and values of the whole sequence, (2, B, H, T, K), with rows outermost as in the model."""
        own = torch.stack((k.transpose(1, 2), v.transpose(1, 2)))  # (2, B, T / N, H, K)
        every = own.new_empty(self.ranks, *own.shape)
        all_gather(every.view(-1), own.view(-1), group=self.group)
        halves = every.movedim(0, 2).unflatten(3, (2, -1))  # (2, B, N, 2, T / 2N, H, K)
        return _in_order(halves, 2).flatten(2, 3).transpose(2, 3)

    def scattered(self, gradients: Tensor) -> Tensor:
        """Return this rank's part of the sum over ranks of gradients like `gathered`: (2, B, H, T / N, K)."""
        chunks = gradients.transpose(2, 3).unflatten(2, (2 * self.ranks, -1))
        every = _by_rank(chunks, 2).flatten(3, 4).movedim(2, 0).contiguous()  # (N, 2, B, T / N, H, K)
        own = torch.empty_like(every[0])
        reduce_scatter(own.view(-1), every.view(-1), group=self.group)
        return own.transpose(2, 3)


def _in_order(halves: Tensor, dim: int) -> Tensor:
    """Return the chunks of all ranks in the order of the sequence; dimension `dim` holds the ranks, the next one their
    two chunks."""
    first, second = halves.unbind(dim + 1)
    return torch.cat((first, second.flip(dim)), dim)


def _by_rank(chunks: Tensor, dim: int) -> Tensor:
    """Undo `_in_order`."""
    first, second = chunks.chunk(2, dim)
    return torch.stack((first, second.flip(dim)), dim + 1)


# -- attention --------------------------------------------------------------------------------------------------------


class _ContextAttention(torch.autograd.Function):
    """Attention of the two chunks of this rank. Saves what flash attention saves, of this rank's tokens alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, split: ContextParallel, passes: Passes) -> Tensor:
        keys, values = split.gathered(k, v)
        outs, lses = [], []
        for queries, end in zip(q.chunk(2, dim=2), _ends(split, q), strict=True):
            out, lse = passes.forward(queries, keys[:, :, :end], values[:, :, :end])
            outs.append(out.transpose(1, 2))
            lses.append(lse)
        out = torch.cat(outs, dim=1).transpose(1, 2)  # rows outermost: the model flattens heads without a copy
        ctx.save_for_backward(q, k, v, out, *lses)
        ctx.split, ctx.passes = split, passes
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, *lses = ctx.saved_tensors
        keys_values = ctx.split.gathered(k, v)
        gradients = torch.zeros_like(keys_values)
        queries_gradients = []
        halves = zip(*(t.chunk(2, dim=2) for t in (grad, q, out)), lses, _ends(ctx.split, q), strict=True)
        for grad_half, queries, out_half, lse, end in halves:
            keys, values = keys_values[:, :, :, :end]
            dq, dk, dv = ctx.passes.backward(grad_half, queries, keys, values, out_half, lse)
            gradients[0, :, :, :end] += dk
            gradients[1, :, :, :end] += dv
            queries_gradients.append(dq.transpose(1, 2))
        dk, dv = ctx.split.scattered(gradients)
        return torch.cat(queries_gradients, dim=1).transpose(1, 2), dk, dv, None, None


def _ends(split: ContextParallel, q: Tensor) -> Sequence[int]:
    """Return how many keys each of the two chunks of queries may see."""
    return [span.stop for span in split.positions(q.shape[2])]

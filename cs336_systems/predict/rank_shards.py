"""Elements of the model that one rank of a device mesh holds, counted tensor by tensor. No torch, no GPU.

A mesh has five axes: `pp` x `dp_replicate` x `dp_shard` x `cp` x `tp`, the last one innermost. `pp` splits the blocks,
`tp` the matrices (Megatron's column- and row-parallel layers, the vocabulary of embedding and head), `dp_shard` and
`cp` together the rows of what is left; `cp` also splits the sequence.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from cs336_systems.config import ModelConfig, RunConfig, UserError, arg

SPLIT_BY_TP = {"num_heads": "num_heads", "num_kv_heads": "kv_heads", "context_length": "context_length"} | {
    name: name for name in ("vocab_size", "d_ff")
}
"""Sizes of the model that `tp` must divide, by the flag that sets them."""
TIED_STAGES = "--pp needs a head of its own: tied embeddings are on the first and the last stage; use --pp 1"
STAGES_PER_RANK = {"1f1b": 1, "interleaved": 2}
"""Number of pipeline stages that a rank of the axis `pp` holds, by schedule."""


class Mesh(NamedTuple):
    """Sizes of the axes of a device mesh, or the coordinates of a rank in it."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def gpus(self) -> int:
        return math.prod(self)

    @property
    def is_replicated(self) -> bool:
        """True if every GPU holds the whole model: torch's engine then runs DistributedDataParallel."""
        return self.dp_replicate == self.gpus > 1

    @property
    def of_weights(self) -> "Mesh":
        """The mesh for sharding weights: the same ranks without the axis `cp`, which is merged into `dp_shard`."""
        return self._replace(dp_shard=self.dp_shard * self.cp, cp=1)

    def require(self, gpus: int, rank: int, model: ModelConfig) -> None:
        """Raise UserError unless the axes multiply to `gpus`, `rank` is one of them and `tp` divides the model."""
        for name, size in self._asdict().items():
            if size < 1:
                raise UserError(f"--{name} must be at least 1, got {size}")
        if self.gpus != gpus:
            shown = " x ".join(f"--{name} {size}" for name, size in self._asdict().items() if name != "pp")
            raise UserError(f"{shown} = {self.gpus:,} GPUs, but --gpus is {gpus:,}; change one so that they agree")
        if not 0 <= rank < gpus:
            raise UserError(f"--rank {rank} is outside of the {gpus:,} ranks; take one from 0 to {gpus - 1:,}")
        if self.pp > 1 and model.tied_embeddings:
            raise UserError(TIED_STAGES)
        for name, attribute in SPLIT_BY_TP.items():
            if (size := getattr(model, attribute)) % self.tp:
                raise UserError(f"--tp {self.tp} does not divide --{name} {size}; change one of them")
        if self.cp > 1 and model.context_length % (parts := 2 * self.cp * self.tp):
            raise UserError(
                f"--context_length {model.context_length} is not a multiple of 2 x --cp {self.cp} x --tp {self.tp} = "
                f"{parts}; change one of them"
            )

    def place(self, rank: int) -> "Mesh":
        """Return the coordinates of a rank, as torch numbers them: the last axis changes fastest."""
        place = []
        for size in reversed(self):
            rank, index = divmod(rank, size)
            place.append(index)
        return Mesh(*reversed(place))


def require_split(model: ModelConfig, mesh: Mesh, stages: int) -> None:
    """Raise UserError for a model that the ranks of torch's engine cannot split, into `stages` of a pipeline."""
    if (layers := model.num_layers) < stages:
        raise UserError(f"--num_layers {layers} is too few for a pipeline of {stages} stages; use a smaller --pp")
    if model.tied_embeddings and mesh.pp > 1:
        raise UserError(TIED_STAGES)
    if undivided := _undivided(model, mesh.tp):
        name, value = undivided
        raise UserError(f"--{name} {value} cannot be divided among --tp {mesh.tp} ranks; use a multiple")
    chunks = 2 * mesh.cp * mesh.tp
    if mesh.cp > 1 and (length := model.context_length) % chunks:
        raise UserError(
            f"--context_length {length} must be a multiple of 2 x --cp {mesh.cp} x --tp {mesh.tp} = {chunks}: a rank "
            f"computes two equal parts of each sequence"
        )


def divides_model(model: ModelConfig, tp: int) -> bool:
    """Return True if tensor parallelism of `tp` ranks divides heads, widths and sequence of the model."""
    return _undivided(model, tp) is None


def _undivided(model: ModelConfig, tp: int) -> tuple[str, int] | None:
    """Return the flag and the size of the first part of the model that `tp` ranks cannot share equally."""
    sizes = ((name, getattr(model, attribute)) for name, attribute in SPLIT_BY_TP.items() if name != "vocab_size")
    return next(((name, size) for name, size in sizes if size % tp), None)


def require_schedule(pp: int, schedule: str, count: int) -> None:
    """Raise UserError if torch's schedule of a pipeline cannot run `count` micro batches in a step."""
    if pp == 1:
        return
    way_out = "change --micro_batch_size or --batch_size"
    if schedule == "1f1b" and count < pp:
        raise UserError(f"--pp {pp} needs {pp} micro batches or more in a step, got {count}; {way_out}")
    if schedule == "interleaved" and count % max(1, count // pp):
        raise UserError(
            f"--pp_schedule interleaved cannot run {count} micro batches in a step; use a multiple of --pp {pp}: "
            f"{way_out}"
        )


def rows_of(rows: int, parts: int, index: int) -> int:
    """Return the rows of one part: as in torch.chunk, all parts but the last have ceil(rows / parts) rows."""
    size = -(-rows // parts)
    return max(0, min(size, rows - index * size))


class Weight(NamedTuple):
    """A weight of the model; `split` is the dimension that tensor parallelism splits, or None."""

    rows: int
    columns: int
    split: int | None

    def shard(self, mesh: Mesh, place: Mesh) -> int:
        """Return the elements of a rank at `place`: `tp` splits the weight, then `dp_shard` the rows of its part."""
        rows = rows_of(self.rows, mesh.tp, place.tp) if self.split == 0 else self.rows
        columns = rows_of(self.columns, mesh.tp, place.tp) if self.split == 1 else self.columns
        return rows_of(rows, mesh.dp_shard, place.dp_shard) * columns


def weights(model: ModelConfig) -> Iterator[Weight]:
    """Yield all weights of `TransformerLM`."""
    yield from [table(model)] * (1 if model.tied_embeddings else 2)
    yield Weight(model.d_model, 1, None)
    for _ in range(model.num_layers):
        yield from block_weights(model)


def table(model: ModelConfig) -> Weight:
    """Return the embedding, or the head."""
    return Weight(model.vocab_size, model.d_model, 0)


def block_weights(model: ModelConfig) -> Iterator[Weight]:
    width, inner, q, kv = model.d_model, model.d_ff, model.q_width, model.kv_width
    yield from [Weight(width, 1, None)] * 2
    for rows in (q, kv, kv):
        yield Weight(rows, width, 0)
        if model.qkv_bias:
            yield Weight(rows, 1, 0)
    if model.qk_norm:
        yield from [Weight(model.head_dim, 1, None)] * 2
    yield Weight(width, q, 1)
    yield from [Weight(inner, width, 0)] * 2
    yield Weight(width, inner, 1)


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage: equal numbers, with the remainder given one by one to the middle
    stages, then to the first, because the last also has the head, and the first the embedding."""
    each, left = divmod(layers, stages)
    order = [*range(1, stages - 1), 0, stages - 1]
    return [each + (stage in order[:left]) for stage in range(stages)]


def stage_blocks(layers: int, stages: int) -> list[range]:
    """Return the layer indices of each stage."""
    bounds = accumulate(stage_layers(layers, stages), initial=0)
    return [range(*pair) for pair in pairwise(bounds)]


def elements(model: ModelConfig, mesh: Mesh, rank: int) -> int:
    """Return the elements of all weights that `rank` holds."""
    mesh = mesh.of_weights
    place = mesh.place(rank)
    return sum(weight.shard(mesh, place) for weight in weights(model))


def of_replica(config: RunConfig, mesh: Mesh, micro_batches: int = 1) -> RunConfig:
    """Return the run of a group of ranks that get the same batch, which is `cp` x `tp` times that of one GPU, divided
    into micro batches."""
    sequences, rest = divmod(config.batch_size * mesh.cp * mesh.tp, micro_batches)
    if rest:
        raise UserError(
            f"{arg('micro_batches')} {micro_batches} does not divide the {config.batch_size * mesh.cp * mesh.tp} "
            f"sequences of {arg('cp')} x {arg('tp')} GPUs"
        )
    return replace(config, batch_size=sequences)

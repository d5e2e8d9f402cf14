"""The kernels of one rank of a device mesh, operator by operator, under torch's engine. No torch.

A test runs the rank's step under a dispatch mode (measure/rehearsal.py) and compares every matmul and every pass with
this list. Collectives are not in it; the copies before and after them are.

- `fully_shard` gathers weights in the width of matmuls, so that autocast casts none, and the residual stream has that
  width. A block's weights are copied out of the buffer of the gather, and its gradients into that of the reduction.
- `tp`: matmuls have a part of the columns or rows, norms a part of the sequence. A collective along the sequence copies
  what it sends or what it receives. The logits are split by the vocabulary, and the loss has separate operators.
- `cp`: a rank has a part of the tokens. In attention it gathers keys and values, puts them in order, and computes two
  calls: together, 1 / cp of the visible pairs.
"""

import dataclasses
from collections.abc import Iterator

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.predict.rank_shards import Mesh, Weight, block_weights, elements, rows_of, weights
from cs336_systems.predict.time.eager_kernels import (
    CAST,
    COPY,
    MASKED,
    NARROW,
    POINTWISE,
    STRIDED,
    EagerKernels,
    attention_pass,
)
from cs336_systems.predict.time.step_kernels import Kernel, Pass, Small

GATHERED, ORDERED, REDUCTION = "gathered", "ordered", "reduction"
"""Passes: copies of gathered weights into tensors, keys and values of all ranks put in the order of the sequence, and
sums or maxima of rows."""


class EngineKernels(EagerKernels):
    """Lists the kernels of the first rank of `mesh` under torch's engine, for one micro batch.

    `config.batch_size` is the number of sequences that a replica, its `cp` x `tp` ranks, processes together. All layers
    are listed, whatever `mesh.pp` is.
    """

    def __init__(self, config: RunConfig, mesh: Mesh):
        super().__init__(config)
        self.mesh = mesh.of_weights
        self.ranks, self.parts = mesh.tp, mesh.cp
        model, ranks = self.model, self.ranks
        self.rows = config.tokens // self.parts
        self.stream = self.rows // ranks * model.d_model
        self.q, self.kv, self.inner = (size // ranks for size in (self.q, self.kv, self.inner))
        self.vocabulary = rows_of(self.vocabulary, ranks, 0)
        self.heads //= ranks
        self.local = dataclasses.replace(config, model=self._local_model())
        """The run with the heads of this rank."""
        self.sharded = self.mesh.dp_shard * self.mesh.dp_replicate > 1 and not self.mesh.is_replicated
        if self.sharded:
            self.stream_width = self.s
        inside = list(block_weights(model))
        self.inside, self.outside = inside, list(weights(model))[: -len(inside) * model.num_layers]

    def _local_model(self) -> ModelConfig:
        model, ranks = self.model, self.ranks
        return dataclasses.replace(
            model, num_heads=model.num_heads // ranks, num_kv_heads=model.kv_heads // ranks, d_head=model.head_dim
        )

    @property
    def casts_weights(self) -> bool:
        return self.is_low and not self.sharded

    @property
    def held_weights(self) -> int:
        return elements(self.model, self.mesh, 0) // self.mesh.pp

    def update(self) -> Iterator[Kernel]:
        if not self.sharded:
            yield from self._own_rows()
        yield from super().update()

    def _own_rows(self) -> Iterator[Kernel]:
        """Yield the copy of this rank's rows of the embedding's gradient."""
        if self.ranks > 1:
            yield Pass(COPY, 2 * self.stream_width * self.vocabulary * self.model.d_model)

    # -- weights ------------------------------------------------------------------------------------------------------

    def forward(self) -> Iterator[Kernel]:
        yield from self._gather(self.outside)
        yield from super().forward()

    def backward(self) -> Iterator[Kernel]:
        yield from super().backward()
        yield from self._reduce(self.outside)

    def gather_weights(self) -> Iterator[Kernel]:
        yield from self._gather(self.inside)

    def reduce_gradients(self) -> Iterator[Kernel]:
        yield from self._reduce(self.inside)

    def sharding(self) -> Iterator[Kernel]:
        """Yield what casts and copies weights and gradients in a whole step."""
        for members, times in ((self.outside, 1), (self.inside, self.model.num_layers)):
            for kernel in (*self._gather(members), *self._reduce(members)):
                yield kernel._replace(times=kernel.times * times)
        for kernel in self._gather(self.inside):  # again for backward
            yield kernel._replace(times=kernel.times * self.model.num_layers)

    def _shards(self, members: list[Weight]) -> list[int]:
        """Return the elements of this rank's shard of each weight."""
        return [weight.shard(self.mesh, self.mesh.place(0)) for weight in members]

    def _gather(self, members: list[Weight]) -> Iterator[Kernel]:
        """Yield the cast of the shards, their copy into the buffer of the gather, and the copy out of it. Shards that
        are whole weights are cast and copied one by one."""
        if not self.sharded:
            return
        shards = self._shards(members)
        for size in [sum(shards)] if self.mesh.dp_shard > 1 else shards:
            if self.is_low:
                yield Pass(NARROW, 6 * size)
            yield Pass(COPY, 2 * self.s * size)
        if self.mesh.dp_shard > 1:
            yield Pass(GATHERED, 2 * self.s * self.mesh.dp_shard * sum(shards))

    def _reduce(self, members: list[Weight]) -> Iterator[Kernel]:
        """Yield the copy of gradients into the fp32 buffer of the reduction; one that has no ranks to scatter to copies
        once more."""
        if self.sharded:
            whole = self.mesh.dp_shard * sum(self._shards(members))
            yield Pass(GATHERED, (self.s + 4) * whole)
            if self.mesh.dp_shard == 1:
                yield Pass(COPY, 8 * whole)

    # -- the sequence of tensor parallelism ---------------------------------------------------------------------------

    def _sequence_copy(self, width: int | None = None) -> Iterator[Kernel]:
        """Yield the copy of a whole sequence of the residual stream."""
        if self.ranks > 1:
            yield Pass(COPY, 2 * (width or self.s) * self.rows * self.model.d_model)

    def enter_branch(self) -> Iterator[Kernel]:
        yield from self._sequence_copy()

    def leave_branch(self) -> Iterator[Kernel]:
        yield from self._sequence_copy()

    def enter_branch_backward(self) -> Iterator[Kernel]:
        yield from self._sequence_copy()

    def leave_branch_backward(self) -> Iterator[Kernel]:
        yield from self._sequence_copy()

    def embedding(self) -> Iterator[Kernel]:
        yield from super().embedding()
        if self.ranks > 1:  # tokens of other ranks' rows are masked
            yield Small("mask of tokens", 6)
            looked_up = self.rows * self.model.d_model
            yield Pass(MASKED, 2 * self.stream_width * looked_up, 1, looked_up, 1)
            yield from self._sequence_copy(self.stream_width)

    def embedding_backward(self) -> Iterator[Kernel]:
        yield from self._sequence_copy(self.stream_width)
        yield from super().embedding_backward()
        if self.sharded:
            yield from self._own_rows()

    def loss(self) -> Iterator[Kernel]:
        if self.ranks == 1:
            yield from super().loss()
            return
        logits = self.rows * self.vocabulary
        if self.is_low:
            yield Pass(CAST, 6 * logits)
        yield Pass(REDUCTION, 4 * logits, 2)
        yield Pass(STRIDED, 8 * logits, 2)
        yield Pass(POINTWISE, 8 * logits)
        yield Small("sums of losses", 24)

    def loss_backward(self) -> Iterator[Kernel]:
        if self.ranks == 1:
            yield from super().loss_backward()
            return
        logits = self.rows * self.vocabulary
        yield Pass("fill", 4 * logits)
        yield Small("gradients of losses", 14)
        yield Pass(POINTWISE, 8 * logits)
        yield Pass(POINTWISE, 12 * logits)
        yield Pass(STRIDED, 8 * logits)
        if self.is_low:
            yield Pass(NARROW, 6 * logits)

    # -- attention ----------------------------------------------------------------------------------------------------

    def attention(self) -> Iterator[Kernel]:
        yield from self._keys_and_values()
        yield attention_pass("forward", self.local)._replace(parts=self.parts)
        if self.parts > 1:
            yield self._pass(ORDERED, 2, self.rows * self.q)

    def attention_backward(self) -> Iterator[Kernel]:
        yield from self._keys_and_values()
        yield attention_pass("backward", self.local)._replace(parts=self.parts)
        if self.parts == 1:
            return
        gathered = 2 * self.parts * self.rows * self.kv
        yield Pass("fill", self.s * gathered)
        for chunks in (1, 2 * self.parts):  # of keys and of values, up to the end of each chunk of queries
            yield self._pass(POINTWISE, 3, chunks * gathered // (4 * self.parts), times=2)
        yield self._pass(ORDERED, 2, gathered // 2)
        yield self._pass(ORDERED, 2, gathered, times=2)
        yield self._pass(ORDERED, 2, self.rows * self.q)

    def _keys_and_values(self) -> Iterator[Kernel]:
        """Yield the copies around the gather of keys and values."""
        if self.parts > 1:
            own = 2 * self.rows * self.kv
            yield self._pass(ORDERED, 2, own)
            yield self._pass(ORDERED, 2, self.parts * own // 2)
            yield self._pass(ORDERED, 2, self.parts * own)

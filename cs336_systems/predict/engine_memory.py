"""Peak memory of one rank under torch's own parallelism, computed in milliseconds: no torch, no GPU.

`engine_estimate(config, mesh)` simulates the step that `cs336 rehearse` runs and `train --engine torch` trains with,
as `fast_memory` does for one GPU. Tests compare it with traces of the real operators (measure/rehearsal.py).

- `fully_shard` gathers the weights of a block, in the matmul's width, into one buffer and copies them out of it. In
  backward it gathers those of the block before at the same time. Gradients stay whole until the block's backward ends;
  then they are copied into an fp32 buffer, which lives until the next block has its own, and reduced to a shard.
- The residual stream has the width of the gathered weights. Without `fully_shard` autocast copies the weights, and the
  stream is fp32.
- `tp`: matmuls that split columns save their input gathered over the sequence. Each collective along the sequence
  copies what it sends or what it receives.
- `dp_replicate` alone is DistributedDataParallel, whose buckets hold a copy of all gradients.
"""

from collections import Counter
from functools import lru_cache

from cs336_systems.config import RunConfig
from cs336_systems.predict.fast_memory import LOGITS, FastStep
from cs336_systems.predict.fast_nodes import GRADIENTS, TEMPORARY
from cs336_systems.predict.memory_model import ROUNDING, MemoryEstimate, workspace
from cs336_systems.predict.rank_shards import Mesh, Weight, block_weights, elements, weights
from cs336_systems.predict.simulated_memory import Block, Node, Snapshot, Tape

BUCKETS = "gradient buckets"
FP32 = 4


def engine_estimate(config: RunConfig, mesh: Mesh) -> MemoryEstimate:
    """Return the peak of a training step on the first rank of `mesh`, whose shards are the largest.

    A replica processes `tp` times the batch of `config`. `pp` and `cp` must be 1.
    """
    memory = EngineStep(config, mesh).run()
    parts = {label: size for label, size in memory.peak_parts.items() if size}
    if beyond := memory.peak - sum(parts.values()):
        parts[ROUNDING] = beyond
    return MemoryEstimate(parts, memory.peak, memory.where)


@lru_cache(maxsize=256)
def engine_peak(config: RunConfig, mesh: Mesh, micro_batches: int) -> int:
    """Return the peak of a step of several micro batches of `config`: with more than one, that of the second, which
    finds the gradients of the first. Without shards it is at most this."""
    step = EngineStep(config, mesh, adds=micro_batches > 1)
    unsharded = 0 if step.sharded or micro_batches == 1 else elements(config.model, mesh, 0)
    return step.run().peak + FP32 * unsharded


class _Group:
    """Weights that `fully_shard` gathers together: those of a block, or the embedding, the last norm and the head."""

    def __init__(self, members: list[Weight], mesh: Mesh):
        self.shards = [weight.shard(mesh, mesh.place(0)) for weight in members]
        """Elements of this rank's part of each weight; `fully_shard` pads the rows to a multiple of the number of
        ranks."""
        self.wholes = [mesh.dp_shard * size for size in self.shards]


class _Gathered:
    """A group's weights and gradients while they are gathered."""

    def __init__(self, group: _Group):
        self.group = group
        self.weights: list[Block] = []
        self.gradients: list[Block] = []


class EngineStep(FastStep):
    """Simulates one step of a rank."""

    BLOCKS = (3, 2)
    BLOCKS_OF_GROUP = (2, 2)
    GROUPS = (2, 2)
    """Repetitions to simulate, as in `FastStep`. Two at the end, because only the second block of backward has a buffer
    of gradients beside it."""

    def __init__(self, config: RunConfig, mesh: Mesh, *, adds: bool = False):
        """`adds`: shards of gradients exist, to which those of this micro batch are added."""
        super().__init__(config)
        self.mesh, self.ranks, self.adds = mesh, mesh.tp, adds
        self.sharded = mesh.dp_shard * mesh.dp_replicate > 1 and not mesh.is_replicated
        if self.sharded:
            self.rw = self.s
        found = list(weights(config.model))
        inside = list(block_weights(config.model))
        self.outside, self.inside = _Group(found[: -len(inside) * config.model.num_layers], mesh), _Group(inside, mesh)
        self.root = _Gathered(self.outside)
        self.last_of_group = self.root
        """The last block of a recomputed group, whose weights are gathered before its recomputation."""
        self.blocks_to_come = 0
        """Number of blocks whose backward has not begun."""
        self.stops_early = False
        """True in the last block of a recomputed group, where the output of the last matmul is not needed."""
        self.skips_output = False
        """True if the next matmul is the one whose output is not needed."""
        self.prefetched: Block | None = None
        self.copied_out: Block | None = None
        """The buffer of forward's last gather, kept until the next one is copied out."""
        self.current = self.root
        """The group whose backward is running."""
        self.reduced: Block | None = None
        """The buffer of the last reduce-scatter, kept until the next one."""

    # -- memory that a step finds -------------------------------------------------------------------------------------

    def _held(self) -> list[Block]:
        t, memory = self.t, self.memory
        held = [memory.new("buffers", t.buffers(), 1), memory.new("inputs", self.ranks * t.inputs(), 1)]
        held.append(memory.new("workspace", workspace(self.config), 1))
        shards = [*self.outside.shards, *self.inside.shards * self.config.model.num_layers]
        sizes = [memory.rounded(size, 4) for size in shards]
        counts = len(sizes) * memory.rounded(1, 4)
        live = Counter({"parameters": sum(sizes), "optimizer state": 2 * sum(sizes) + counts})
        memory.add(Snapshot(live, live.total() + 3 * t.rounding(sizes)), 1)
        if self.mesh.is_replicated:
            held.append(memory.new(BUCKETS, sum(shards), 4))
        if self.adds and self.sharded:
            held.append(memory.new(GRADIENTS, sum(shards), 4))
        return held

    # -- weights and gradients of fully_shard -------------------------------------------------------------------------

    def cast(self, size: int) -> Block | None:
        return None if self.sharded else super().cast(size)

    def _leave_autocast(self) -> None:
        if not self.sharded:
            super()._leave_autocast()

    @property
    def keeps_products(self) -> bool:
        return not self.low and not self.sharded

    def keep_gradient(self, found: Block, size: int) -> None:
        if self.sharded:
            self.current.gradients.append(found)
        else:
            super().keep_gradient(found, size)

    def joined(self, *sizes: int) -> Block | None:
        if not self.sharded:
            return super().joined(*sizes)
        return self.new(sum(sizes)) if len(sizes) > 1 else None

    def weight_gradients(self, *sizes: int) -> None:
        if self.sharded:
            self.current.gradients.append(self.new(sum(sizes), label=TEMPORARY))
        else:
            super().weight_gradients(*sizes)

    def gain_gradient(self, width: int) -> None:
        if self.sharded:
            self.current.gradients.append(self.new(width, label=TEMPORARY))
        else:
            super().gain_gradient(width)

    def _gather(self, group: _Group) -> Block | None:
        """Gather shards into one buffer; shards in low precision are cast first. A shard that is the whole weight needs
        no gather."""
        if self.mesh.dp_shard == 1:
            return None
        cast = self.new(sum(group.shards), label=TEMPORARY) if self.low else None
        buffer = self.new(sum(group.wholes), label=TEMPORARY)
        del cast
        return buffer

    def _unshard(self, gathered: _Gathered) -> Block | None:
        """Copy weights out of a buffer, and return it."""
        if gathered.weights:
            return None
        buffer, self.prefetched = self.prefetched or self._gather(gathered.group), None
        cast: Block | None = None
        for size in gathered.group.wholes:
            if self.low and self.mesh.dp_shard == 1:
                cast = self.new(size, label=TEMPORARY)  # the one before is freed now
            gathered.weights.append(self.new(size, label=TEMPORARY))
        del cast
        return buffer

    def _pre_forward(self, gathered: _Gathered) -> None:
        if self.sharded:
            self.copied_out = self._unshard(gathered)

    def _pre_backward(self, gathered: _Gathered) -> None:
        """Gather the weights, unless they are gathered, and those of the previous block."""
        if not self.sharded:
            return
        self.current = gathered
        self._unshard(gathered)
        self.copied_out = None
        if gathered is not self.root:
            self.blocks_to_come -= 1
        if self.blocks_to_come and self.prefetched is None:
            self.prefetched = self._gather(self.inside)

    def _post_backward(self, gathered: _Gathered) -> None:
        if not self.sharded:
            return
        gathered.weights.clear()
        self.reduced = None
        self.reduced = self.new(sum(gathered.group.wholes), 4, TEMPORARY)
        last = max(gathered.gradients, key=lambda gradient: gradient.size)
        gathered.gradients.clear()
        shard = self.new(sum(gathered.group.shards), 4, TEMPORARY if self.adds else GRADIENTS)
        if not self.adds:
            self.gradients.append(shard)
        del last, shard

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _block(self, tape: Tape | None, *, is_last: bool = False) -> None:
        """Run a block. The last block of a recomputed group stops when all tensors that backward reads exist."""
        recomputed = self.memory.phase == "backward"
        self.stops_early = recomputed and is_last
        gathered = self.last_of_group if self.stops_early else _Gathered(self.inside)
        self._pre_forward(gathered)
        if tape is not None:
            tape.append(Node(lambda: self._post_backward(gathered), ()))
        assert self.x is not None
        if self.fused:
            self.x, self.delta = self.fused_block(self.x, self.delta, tape)
        else:
            self.x = self.plain_block(self.x, tape)
        self.skips_output = False
        if tape is not None and not self.stops_early:
            tape.append(Node(lambda: self._pre_backward(gathered), ()))
        if not recomputed:
            gathered.weights.clear()
            self.blocks_to_come += 1

    def _group_backward(self, size: int, x: Block, delta: Block | None) -> None:
        self.last_of_group = _Gathered(self.inside)
        self._pre_backward(self.last_of_group)
        super()._group_backward(size, x, delta)

    def _skip_backward(self, saved: Snapshot, times: int, blocks: int) -> None:
        shards, memory = self.inside.shards, self.memory
        memory.add(saved, -times)
        if self.adds and self.sharded:
            return
        sizes = [memory.rounded(size, 4) for size in ([sum(shards)] if self.sharded else shards)]
        rounding = self.t.rounding(sizes * blocks) / blocks
        memory.add(Snapshot(Counter({GRADIENTS: sum(sizes)}), sum(sizes) + rounding), blocks)

    # -- collectives along the sequence -------------------------------------------------------------------------------

    def _whole(self, width: int | None = None) -> Block:
        """Allocate a tensor of the residual stream's shape for the whole sequence."""
        return self.new(self.ranks * self.rows * self.d, width)

    def _gather_sequence(self, x: Block, tape: Tape | None) -> Block:
        if self.ranks == 1:
            return x
        received, out = self._whole(), self._whole()
        del received
        if tape is not None:
            tape.append(Node(self._gather_sequence_backward, ()))
        return out

    def _gather_sequence_backward(self) -> None:
        grad, copy = self.take_grad(), self._whole()
        self.grad = self.stream()
        del copy, grad

    def output(self, x: Block, d_in: int, tape: Tape | None) -> Block:
        """Run the matmul that ends a branch: ranks sum their results, and each keeps a part of the sequence."""
        out: Block | None = None
        if self.skips_output:
            self.matmul_nodes(x, d_in, self.d, tape, by_columns=False)
        else:
            out = self.matmul(x, d_in, self.d, tape, by_columns=False)
        if self.ranks > 1 and tape is not None:
            tape.append(Node(self._scatter_backward, ()))
        return self._scattered(out)

    def _scattered(self, out: Block | None) -> Block:
        if out is None:
            return self.new(0)
        if self.ranks == 1:
            return out
        copy, part = self._whole(), self.stream()
        del copy
        return part

    def _scatter_backward(self) -> None:
        grad, received = self.take_grad(), self._whole()
        self.grad = self._whole()
        del received, grad

    def plain_attention(self, x: Block, tape: Tape | None) -> Block:
        return super().plain_attention(self._gather_sequence(x, tape), tape)

    def feed_forward(self, x: Block, tape: Tape | None) -> Block:
        self.skips_output = self.stops_early
        return super().feed_forward(self._gather_sequence(x, tape), tape)

    def _joined_stream(self, tape: Tape | None) -> Block:
        if not self.skips_output:
            return super()._joined_stream(tape)
        assert tape is not None
        tape.append(Node(self._branch_backward, ()))
        return self.new(0)

    # -- embedding, head and loss -------------------------------------------------------------------------------------

    def _forward(self, tape: Tape | None) -> Block | None:
        self._pre_forward(self.root)
        if self.ranks > 1:
            found, copy, part = self._whole(self.rw), self._whole(self.rw), self.stream(self.rw)
            del found, copy, part
        return super()._forward(tape)

    def _head(self, hidden: Block, tape: Tape | None) -> Block:
        logits = super()._head(self._gather_sequence(hidden, tape), tape)
        self.copied_out = None
        assert tape is not None
        tape.append(Node(lambda: self._pre_backward(self.root), ()))
        return logits

    def _loss(self, logits: Block, tape: Tape) -> None:
        """Run cross entropy; for logits that are split over ranks, in separate operators."""
        if self.ranks == 1:
            super()._loss(logits, tape)
            return
        size = logits.size // self.s
        wide = self.new(size, 4) if self.low else logits
        shifted, exponentials = self.new(size, 4), self.new(size, 4)
        del exponentials
        log_softmax = self.new(size, 4)
        del shifted, wide

        def backward(log_softmax: Block) -> None:
            picked, softmax = self.new(size, 4, LOGITS), self.new(size, 4, LOGITS)
            difference = self.new(size, 4, LOGITS)
            del softmax
            self.grad = self.new(size, 4, LOGITS)
            del picked, difference

        def cast_backward() -> None:
            if self.low:
                self.grad = self.new(size, label=LOGITS)

        tape += [Node(cast_backward, ()), Node(backward, (log_softmax,))]

    def _fused_loss(self, hidden: Block, tape: Tape) -> None:
        super()._fused_loss(hidden, tape)
        self.copied_out = None
        tape.append(Node(lambda: self._pre_backward(self.root), ()))

    def _fused_loss_backward(self, grad_x: Block, grad_weight: Block) -> None:
        if not self.sharded:
            super()._fused_loss_backward(grad_x, grad_weight)
            return
        scaled = self.new(self.table, grad_weight.size // self.table, TEMPORARY)
        if scaled.size != self.s * self.table:
            scaled = self.new(self.table, label=TEMPORARY)
        self.root.gradients.append(scaled)
        self.grad = self.stream()

    def _embedding_backward(self) -> None:
        table = self.config.model.vocab_size * self.d
        if self.ranks > 1:
            received = self._whole(self.rw)
            self.grad = self._whole(self.rw)
            del received
            self.grad_x = None
        found = self.new(table, self.rw, TEMPORARY if self.sharded else GRADIENTS)
        self.grad_x = self.grad = None
        if self.sharded:
            self.root.gradients.append(found if self.ranks == 1 else self.new(table // self.ranks))
            del found
            self._post_backward(self.root)
            self.reduced = None
            return
        if not self.config.model.tied_embeddings:
            self.gradients.append(found)
        if self.ranks > 1:
            self.new(table // self.ranks, 4)  # the optimizer reads a copy of this rank's rows

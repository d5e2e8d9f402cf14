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
- `cp`: keys and values of the whole sequence are gathered for one layer at a time, in forward and in backward.
  Reordering them from rank order to sequence order briefly takes 2.5 times their size.
- `dp_replicate` alone is DistributedDataParallel, whose buckets hold a copy of all gradients.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from cs336_systems.config import RunConfig
from cs336_systems.predict.fast_memory import LOGITS, FastStep
from cs336_systems.predict.fast_nodes import GRADIENTS, TEMPORARY
from cs336_systems.predict.memory_model import ROUNDING, MemoryEstimate, workspace
from cs336_systems.predict.rank_shards import Mesh, Weight, block_weights, elements, weights
from cs336_systems.predict.simulated_memory import Block, Node, Snapshot, Tape

BUCKETS = "gradient buckets"
FP32 = 4


def is_predicted(config: RunConfig, mesh: Mesh, sequences: int | None = None) -> bool:
    """Return True if `engine_estimate` can simulate this layout."""
    group = mesh.cp * mesh.tp
    if mesh.cp > 1:  # torch's kernels need a mask for queries at the end of the keys
        return mesh.pp == 1 and config.attention == "auto"
    return mesh.pp == 1 and ((sequences or group) % group == 0 or config.attention != "reference")


def engine_estimate(config: RunConfig, mesh: Mesh, sequences: int | None = None) -> MemoryEstimate:
    """Return the peak of a training step on the first rank of `mesh`, whose shards are the largest.

    `sequences`: those that a group of `cp` x `tp` ranks processes together; by default `cp` x `tp` times the batch of
    `config`. `pp` must be 1.
    """
    memory = EngineStep(config, mesh, sequences).run()
    parts = {label: size for label, size in memory.peak_parts.items() if size}
    if beyond := memory.peak - sum(parts.values()):
        parts[ROUNDING] = beyond
    return MemoryEstimate(parts, memory.peak, memory.where)


@lru_cache(maxsize=256)
def engine_peak(config: RunConfig, mesh: Mesh, micro_batches: int, sequences: int | None = None) -> int:
    """Return the peak of a step of several micro batches, of `sequences` each as in `engine_estimate`: with more than
    one, that of the second, which finds the gradients of the first. Without shards it is at most this."""
    step = EngineStep(config, mesh, sequences, adds=micro_batches > 1)
    unsharded = 0 if step.sharded or micro_batches == 1 else elements(config.model, mesh, 0)
    return step.run().peak + FP32 * unsharded


def _of_rank(config: RunConfig, sequences: int, group: int) -> RunConfig:
    """Return a configuration with the tokens of one of the `group` ranks that share `sequences`."""
    if sequences % group == 0:
        return replace(config, batch_size=sequences // group)
    tokens = -(-sequences * config.model.context_length // group)
    return replace(config, batch_size=1, model=replace(config.model, context_length=tokens))


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

    def __init__(self, config: RunConfig, mesh: Mesh, sequences: int | None = None, *, adds: bool = False):
        """`adds`: shards of gradients exist, to which those of this micro batch are added."""
        group = mesh.cp * mesh.tp
        super().__init__(_of_rank(config, config.batch_size * group if sequences is None else sequences, group))
        self.cp, self.context = mesh.cp, config.model.context_length
        self.mesh = mesh = mesh.of_weights
        self.ranks, self.adds = mesh.tp, adds
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
        self.rotary_rows: list[Block] = []
        self.reduced: Block | None = None
        """The buffer of the last reduce-scatter, kept until the next one."""

    # -- memory that a step finds -------------------------------------------------------------------------------------

    def _held(self) -> list[Block]:
        t, memory = self.t, self.memory
        tables = 2 * self.context * self.config.model.head_dim
        held = [memory.new("buffers", tables, FP32), memory.new("inputs", self.ranks * self.cp * t.inputs(), 1)]
        if self.cp > 1:
            held.append(memory.new("inputs", self.ranks * t.inputs(), 1))  # this rank's part
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

    # -- context parallel ---------------------------------------------------------------------------------------------

    def attention(self, q: Block, k: Block, v: Block, tape: Tape | None) -> Block:
        """Run attention; a rank's two chunks of queries attend one after the other to keys of the whole sequence."""
        if self.cp == 1:
            return super().attention(q, k, v, tape)
        keys_values = self._gathered_keys()
        halves = [(self.new(self.rows * self.q // 2), self._half_logsumexp()) for _ in range(2)]
        out = self.queries()
        logsumexps = [lse for _, lse in halves]
        del halves, keys_values
        if tape is not None:
            tape.append(Node(self._context_backward, (q, k, v, out, *logsumexps)))
        return out

    def _rotary_rows(self) -> list[Block]:
        """Allocate the rows of the rotary tables for this rank's part of the sequence, which all blocks save."""
        return [self.new(self.context // self.cp * self.config.model.head_dim, 4) for _ in range(2)]

    def _half_logsumexp(self) -> Block:
        return self.memory.new(self.label, self.t.logsumexp() // 2, 1)

    def _of_keys(self, share: float = 1.0) -> Block:
        """Allocate keys and values, or their gradients, of a share of the whole sequence."""
        return self.new(round(share * 2 * self.cp * self.rows * self.kv))

    def _gathered_keys(self) -> Block:
        own, by_rank, flipped, found = self._of_keys(1 / self.cp), self._of_keys(), self._of_keys(0.5), self._of_keys()
        del own, by_rank, flipped
        return found

    def _context_backward(self, *saved: Block) -> None:
        grad, keys_values = self.take_grad(), self._gathered_keys()
        gradients = self._of_keys()
        found: list[Block] = []
        last: tuple[Block, ...] = ()
        for end in (0.5 / self.cp, 1.0):  # the shares of the keys that the first rank's two chunks see
            found.append(self.new(self.rows * self.q // 2))
            last = (self._of_keys(end / 2), self._of_keys(end / 2))
        flipped, stacked = self._of_keys(0.5), self._of_keys()
        del flipped
        by_rank = self._of_keys()
        del stacked
        own = self._of_keys(1 / self.cp)
        del by_rank
        self.head_grads += [self.queries(), own, own]
        del grad, keys_values, gradients, last

    # -- embedding, head and loss -------------------------------------------------------------------------------------

    def _forward(self, tape: Tape | None) -> Block | None:
        self._pre_forward(self.root)
        if self.cp > 1:
            self.rotary_rows = self._rotary_rows()
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
        self.rotary_rows.clear()
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
            if self.config.model.tied_embeddings and self.ranks > 1:
                self.new(table // self.ranks)  # the sum with the head's gradient, which DTensors do not add in place
            del found
            self._post_backward(self.root)
            self.reduced = None
            return
        if not self.config.model.tied_embeddings:
            self.gradients.append(found)
        if self.ranks > 1:
            self.new(table // self.ranks, 4)  # the optimizer reads a copy of this rank's rows

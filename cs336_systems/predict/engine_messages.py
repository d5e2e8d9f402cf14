"""Collectives of one training step under torch's engine, counted from the configuration: no torch, no GPU.

`engine_messages(config, mesh, micro_batches)` lists the collectives of a rank, axis by axis. Tests compare the bytes
with those that real ranks send. The scalars of the loss and of the gradients' norm, and DistributedDataParallel's
messages about its buckets are not counted.

- `fully_shard` pads the rows of each weight to a multiple of the ranks. It gathers all weights in forward and those of
  blocks again in backward, in the width of matmuls, and scatters fp32 gradients, for each micro batch; replicas add
  theirs once in a step. In a pipeline weights stay gathered from the first micro batch to the last, and gradients are
  scattered after it.
- `tp` gathers the sequence before a branch of a block and before the head, and scatters it after a branch and after the
  embedding; backward does the reverse. The loss takes three numbers for each token.
- `cp` gathers keys and values in forward and in backward, and scatters their gradients.
- `pp` sends the residual stream to the next stage and its gradient back, for each micro batch.
"""

from collections.abc import Iterator
from dataclasses import replace

from cs336_systems.config import RunConfig
from cs336_systems.predict.parallel_model import Collective
from cs336_systems.predict.rank_shards import STAGES_PER_RANK, Mesh, Weight, block_weights, stage_blocks, table

FP32 = 4
BRANCHES = 2
"""Residual branches of a block: attention and the feed-forward layer."""
LOSS_REDUCTIONS = 3
"""All-reduces per token in the loss of split logits: the maximum, the sum of exponentials and the target's logit."""


def engine_messages(
    config: RunConfig, mesh: Mesh, *, rank: int = 0, micro_batches: int = 1, schedule: str = "1f1b"
) -> list[Collective]:
    """Return the collectives of `rank` in a step, with the messages of one purpose added up.

    A micro batch has `config.batch_size` sequences; ranks that differ only in `pp`, `cp` and `tp` share it.
    """
    found: dict[tuple, Collective] = {}
    for one in _Messages(config, mesh, rank, micro_batches, schedule).all():
        if one.ranks > 1 and one.nbytes:
            key = (one.name, one.purpose, one.during, one.axis)
            found[key] = replace(one, nbytes=one.nbytes + (found[key].nbytes if key in found else 0))
    return list(found.values())


class _Messages:
    def __init__(self, config: RunConfig, mesh: Mesh, rank: int, micro_batches: int, schedule: str):
        self.mesh, self.micro = mesh, micro_batches
        self.shards = mesh.dp_shard * mesh.cp
        self.place = mesh.place(rank)
        stages = mesh.pp * (STAGES_PER_RANK[schedule] if mesh.pp > 1 else 1)
        own = range(self.place.pp, stages, mesh.pp)
        blocks = [block for number in own for block in stage_blocks(config.model.num_layers, stages)[number]]
        self.blocks, together = len(blocks), config.checkpoint_blocks
        self.recomputed = len({block // together for block in blocks}) if together else 0
        """Number of groups of blocks that are recomputed."""
        self.is_first, self.is_last = 0 in own, stages - 1 in own
        self.hops_out, self.hops_back = (sum(number != end for number in own) for end in (stages - 1, 0))
        norm, own_head = (
            Weight(config.model.d_model, 1, None),
            [table(config.model)] * (not config.model.tied_embeddings),
        )
        self.outside = [table(config.model)] * self.is_first + [norm, *own_head] * self.is_last
        self.block = list(block_weights(config.model))
        self.low = 2 if config.has_low_precision else FP32
        self.is_sharded = self.shards > 1 or (mesh.dp_replicate > 1 and mesh.pp * mesh.tp > 1)
        self.stream_width = self.low if self.is_sharded else FP32
        self.width, self.kv_width = config.model.d_model, config.model.kv_width
        self.gains = BRANCHES * self.width + 2 * config.model.qk_norm * config.model.head_dim
        """Elements of the gains of a block's norms, which all ranks of a tensor-parallel group hold."""
        self.tokens = config.tokens // mesh.cp
        """Tokens of a micro batch that the ranks of a tensor-parallel group compute together."""

    def all(self) -> Iterator[Collective]:
        yield from self._of_weights()
        yield from self._of_layers()
        yield from self._of_context()
        yield from self._of_stages()

    # -- data axes ----------------------------------------------------------------------------------------------------

    def _shard(self, weight: Weight) -> int:
        """Return the elements of a shard, padded to those of the first rank."""
        return weight.shard(self.mesh.of_weights, self.place._replace(dp_shard=0))

    def _of_weights(self) -> Iterator[Collective]:
        inside = self.blocks * sum(map(self._shard, self.block))
        shard = inside + sum(map(self._shard, self.outside))
        replicas = self.mesh.dp_replicate
        if not self.is_sharded:
            yield Collective("all_reduce", "gradients", FP32 * shard, replicas, "backward", False, "replicate")
            return
        whole = self.shards * shard
        times = 1 if self.mesh.pp > 1 else self.micro
        yield self._over_shards("all_gather", "weights", times * self.low * whole, "forward")
        if self.mesh.pp == 1:
            again = times * self.low * self.shards * inside
            yield self._over_shards("all_gather", "weights again", again, "backward")
        yield self._over_shards("reduce_scatter", "gradients", times * FP32 * whole, "backward")
        yield Collective("all_reduce", "gradients of a shard", FP32 * shard, replicas, "backward", False, "replicate")

    def _over_shards(self, name: str, purpose: str, nbytes: float, during: str) -> Collective:
        return Collective(name, purpose, nbytes, self.shards, during, False, "shard")

    # -- tensor parallel ----------------------------------------------------------------------------------------------

    def _of_layers(self) -> Iterator[Collective]:
        if self.mesh.tp == 1:
            return
        whole = self.micro * self.tokens * self.width
        branches, ends = BRANCHES * self.blocks * self.low * whole, self.low * whole
        for during, gather, scatter in (
            ("forward", "all_gather", "reduce_scatter"),
            ("backward", "reduce_scatter", "all_gather"),
        ):
            yield self._along(gather, "input of branches", branches, during)
            yield self._along(scatter, "output of branches", branches, during)
            yield self._along(scatter, "embedding", self.is_first * self.stream_width * whole, during)
            yield self._along(gather, "input of the head", self.is_last * ends, during)
        if self.recomputed:  # until all is there that backward reads, which is not the output of a group's last branch
            yield self._along("all_gather", "input of branches, again", branches, "backward")
            outputs = branches - self.recomputed * ends
            yield self._along("reduce_scatter", "output of branches, again", outputs, "backward")
        loss = self.is_last * LOSS_REDUCTIONS * FP32 * self.micro * self.tokens
        yield self._along("all_reduce", "loss", loss, "forward")
        norms = self.blocks * self.gains + self.is_last * self.width
        yield self._along("all_reduce", "gradients of norms", FP32 * norms, "backward")

    def _along(self, name: str, purpose: str, nbytes: float, during: str) -> Collective:
        return Collective(name, purpose, nbytes, self.mesh.tp, during, True, "tensor")

    # -- context and pipeline parallel --------------------------------------------------------------------------------

    def _of_context(self) -> Iterator[Collective]:
        cp = self.mesh.cp
        keys_values = 2 * self.low * self.tokens * cp * self.kv_width // self.mesh.tp
        nbytes = self.micro * self.blocks * keys_values
        yield Collective("all_gather", "keys and values", nbytes, cp, "forward", True, "context")
        again = nbytes * (2 if self.recomputed else 1)
        yield Collective("all_gather", "keys and values again", again, cp, "backward", True, "context")
        yield Collective("reduce_scatter", "their gradients", nbytes, cp, "backward", True, "context")

    def _of_stages(self) -> Iterator[Collective]:
        stream = self.micro * self.stream_width * self.tokens * self.width // self.mesh.tp
        pp = self.mesh.pp
        out, back = self.hops_out * stream, self.hops_back * stream
        yield Collective("send", "activations to the next stage", out, pp, "forward", True, "pipeline")
        yield Collective("send", "gradients to the stage before", back, pp, "backward", True, "pipeline")

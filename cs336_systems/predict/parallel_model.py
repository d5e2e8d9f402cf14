"""Predicted memory, communication and time of a training step on many GPUs. No torch, no GPU.

docs/PLAN.md derives the formulas. For strategies that this package implements (dp, zero1, zero3), tests compare them
with the bytes that its wrappers allocate and send.

N GPUs = D replicas x T tensor-parallel GPUs. A replica processes T times as many sequences as a single GPU, so that the
work per GPU is the same in all strategies.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from cs336_systems.config import RunConfig, UserError
from cs336_systems.predict.flops import executed_flops, forward_flops
from cs336_systems.predict.memory_model import SimulatedStep, breakdown, simulated_parts
from cs336_systems.record import BUS_FACTOR

FP32 = 4
ADAM_MOMENTS = 2
GATHERED_AHEAD = 2
SCATTERED_AT_ONCE = 2
"""Equal to the constants of parallel/fsdp.py; a test compares them."""


@dataclass(frozen=True)
class Cluster:
    gpus: int
    memory: float
    """Bytes that a step may use on each GPU."""
    flops: float
    """FLOP/s of each GPU."""
    node: int
    """GPUs connected by the fast link."""
    link: float
    """Bytes per second, one way, from a GPU to others of its node."""
    network: float
    """Bytes per second, one way, from a GPU to other nodes."""


@dataclass(frozen=True)
class Strategy:
    """ZeRO stage (replicas shard: 1 optimizer state, 2 also gradients, 3 also weights) and tensor-parallel degree."""

    stage: int = 0
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Return the strategy of a name, such as `zero3+tp8`, or of a title, such as `ZeRO-3 + TP 8`."""
        stage, tensor = 0, 1
        for part in re.sub(r"[\s-]", "", text.lower()).split("+"):
            if part in ("dp", "ddp", "none"):
                stage = 0
            elif part == "fsdp":
                stage = 3
            elif match := re.fullmatch(r"zero([1-3])", part):
                stage = int(match[1])
            elif match := re.fullmatch(r"tp([1-9]\d*)", part):
                tensor = int(match[1])
            else:
                raise UserError(
                    f"unknown strategy {text!r}; use dp, zero1, zero2, zero3, tp8, or a mix such as zero3+tp8"
                )
        return cls(stage, tensor)

    def within(self, gpus: int) -> "Strategy":
        """Return this strategy with groups that divide `gpus`: halved until they do."""
        tensor = self.tensor
        while gpus % tensor:
            tensor = max(1, tensor // 2)
        return Strategy(self.stage, tensor)

    @property
    def name(self) -> str:
        data = f"zero{self.stage}" if self.stage else "dp"
        return f"{data}+tp{self.tensor}" if self.tensor > 1 else data

    @property
    def title(self) -> str:
        """The name as papers write it."""
        data = f"ZeRO-{self.stage}" if self.stage else "DP"
        return f"{data} + TP {self.tensor}" if self.tensor > 1 else data


@dataclass(frozen=True)
class Workload:
    """A model and its training step. Bytes and FLOPs are those of one GPU's own sequences."""

    blocks: int
    matrices: int
    """Parameters of all matmuls and of the embedding, which are sharded and split by tensor parallelism."""
    looked_up: int
    """Parameters of the embedding, included in `matrices`; backward does not read them."""
    replicated: int
    """Parameters of norms."""
    largest: int
    """Parameters of the largest matrix."""
    width: int
    """Bytes per element in matmuls and collectives."""
    has_copies: bool
    """Weights have a copy of that width, kept beside the fp32 weights unless they are gathered."""
    tokens: int
    stream: int
    """Bytes of the residual stream in collectives: tokens x d_model x width."""
    forward: float
    backward: float
    """FLOPs, including recomputation."""
    activations: float
    """Peak bytes of activations."""
    reductions: int
    """All-reduces of the residual stream over a replica's GPUs, in forward and again in backward."""
    recomputed: int
    """All-reduces that recomputation repeats."""

    @property
    def parameters(self) -> int:
        return self.matrices + self.replicated


def transformer(config: RunConfig) -> Workload:
    """Return the workload of this package's Transformer."""
    step, model, group = SimulatedStep(config), config.model, config.checkpoint_blocks
    t, layers = step.t, model.num_layers
    blocks_saved = min(group, layers) if group else layers
    inputs = -(-layers // group) * t.residual(4) if group else 0
    ends = 2 * t.residual(4) + t.residual(t.s)  # the first block's input, the last norm's input and output
    activations = blocks_saved * step.block_saved + inputs + ends + t.logits(t.s) + t.logits(FP32)
    if simulated_parts(config):
        full = breakdown(config)
        kept = blocks_saved * full.activations_per_block if group else 0  # one group is recomputed at a time
        activations = full.activations + kept + full.logits_and_loss
    forward = float(forward_flops(config))
    return Workload(
        blocks=layers,
        matrices=model.linear_parameters + model.vocab_size * model.d_model,
        looked_up=model.vocab_size * model.d_model,
        replicated=model.parameters - model.linear_parameters - model.vocab_size * model.d_model,
        largest=max(model.d_model * model.d_ff, model.d_model * model.vocab_size),
        width=t.s,
        has_copies=t.low_precision,
        tokens=config.tokens,
        stream=config.tokens * model.d_model * t.s,
        forward=forward,
        backward=executed_flops(config) - forward,
        activations=activations,
        # Attention and feed-forward each need an all-gather and a reduce-scatter, the traffic of one all-reduce; the
        # embedding, or the head in backward, needs one more.
        reductions=2 * layers + 1,
        recomputed=2 * layers if group else 0,
    )


def feed_forward(config: RunConfig) -> Workload:
    """Return the workload of the handout's exercise: two matrices per block, all inputs of matmuls saved."""
    model = config.model
    width = 2 if config.precision in ("bf16", "fp16") else FP32
    matrices = model.num_layers * 2 * model.d_model * model.d_ff
    return Workload(
        blocks=model.num_layers,
        matrices=matrices,
        looked_up=0,
        replicated=0,
        largest=model.d_model * model.d_ff,
        width=width,
        has_copies=False,
        tokens=config.tokens,
        stream=config.tokens * model.d_model * width,
        forward=2.0 * config.tokens * matrices,
        backward=4.0 * config.tokens * matrices,
        activations=model.num_layers * config.tokens * (model.d_model + model.d_ff) * width,
        reductions=model.num_layers,
        recomputed=0,
    )


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind and purpose in a step."""

    name: str
    """all_reduce, all_gather or reduce_scatter."""
    purpose: str
    nbytes: float
    """Bytes of the full arrays."""
    ranks: int
    during: str
    """The pass that can overlap it: forward or backward."""
    grows: bool
    """Its bytes are proportional to the number of tokens."""

    @property
    def sent(self) -> float:
        """Bytes that one GPU sends."""
        return self.nbytes * BUS_FACTOR[self.name](self.ranks)


@dataclass(frozen=True)
class Plan:
    """`workload` on `cluster` by `strategy`."""

    workload: Workload
    cluster: Cluster
    strategy: Strategy

    def __post_init__(self) -> None:
        if self.cluster.gpus % self.strategy.tensor:
            raise UserError(
                f"{self.cluster.gpus} GPUs cannot be split into groups of {self.strategy.tensor} "
                f"for {self.strategy.name}; take a multiple of {self.strategy.tensor}"
            )

    @property
    def replicas(self) -> int:
        return self.cluster.gpus // self.strategy.tensor

    # -- memory per GPU -----------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> dict[str, float]:
        fixed, shared = self._memory
        return {part: fixed[part] + shared[part] / self.replicas for part in fixed}

    @property
    def _memory(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return, for each part, the bytes that every GPU holds and the bytes that replicas shard."""
        work, stage, tensor = self.workload, self.strategy.stage, self.strategy.tensor
        here = work.matrices / tensor + work.replicated
        norms = work.replicated if stage == 3 else 0  # FSDP shards matrices only

        def held(from_stage: int, width: int) -> tuple[float, float]:
            if stage < from_stage:
                return width * here, 0.0
            return width * norms, width * (here - norms)

        parts = {
            "parameter": held(3, FP32),
            "gradient": held(2, FP32),
            "optimizer": held(1, FP32 * ADAM_MOMENTS),
            # A replica has T times as many, sharded over T GPUs: by heads, inner width or sequence.
            "activation": (work.activations, 0.0),
            "working": (self._working, 0.0),
        }
        return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}

    @property
    def _working(self) -> float:
        """Bytes of low-precision weight copies, or of the weights and gradients that FSDP holds gathered at a time; and
        of a replica's full residual stream."""
        work, tensor = self.workload, self.strategy.tensor
        stream = work.stream * tensor if tensor > 1 else 0
        if self.strategy.stage == 3:
            gathered = 1 + GATHERED_AHEAD + 1 + SCATTERED_AT_ONCE
            return gathered * work.width * work.largest / tensor + stream
        return (work.width * work.matrices / tensor if work.has_copies else 0.0) + stream

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.cluster.memory

    @property
    def smallest_cluster(self) -> int | None:
        """The fewest GPUs on which this strategy fits with as many sequences per GPU; None where none is enough."""
        fixed, shared = (sum(parts.values()) for parts in self._memory)
        room = self.cluster.memory - fixed
        if room < 0 or (room == 0 and shared):
            return None
        return self.strategy.tensor * max(1, math.ceil(shared / room) if shared else 1)

    # -- communication ------------------------------------------------------------------------------------------------

    @cached_property
    def collectives(self) -> list[Collective]:
        return [found for found in self._all_collectives() if found.ranks > 1 and found.nbytes]

    def _all_collectives(self) -> Iterable[Collective]:
        work, stage, tensor, replicas = self.workload, self.strategy.stage, self.strategy.tensor, self.replicas
        matrices, width = work.matrices / tensor, work.width
        whole = (matrices + work.replicated) * width
        match stage:
            case 0:
                yield Collective("all_reduce", "gradients", whole, replicas, "backward", False)
            case 1:
                yield Collective("all_reduce", "gradients", whole, replicas, "backward", False)
                yield Collective("all_gather", "updated weights", whole, replicas, "forward", False)
            case 2:
                yield Collective("reduce_scatter", "gradients", whole, replicas, "backward", False)
                yield Collective("all_gather", "updated weights", whole, replicas, "forward", False)
            case 3:
                again = (work.matrices - work.looked_up) / tensor * width
                yield Collective("all_gather", "weights", matrices * width, replicas, "forward", False)
                yield Collective("all_gather", "weights again", again, replicas, "backward", False)
                yield Collective("reduce_scatter", "gradients", matrices * width, replicas, "backward", False)
                yield Collective(
                    "all_reduce", "gradients of norms", work.replicated * FP32, replicas, "backward", False
                )
        stream = work.stream * tensor
        yield Collective("all_reduce", "activations", work.reductions * stream, tensor, "forward", True)
        backward = (work.reductions + work.recomputed) * stream
        yield Collective("all_reduce", "activation gradients", backward, tensor, "backward", True)

    def seconds(self, collective: Collective) -> float:
        return collective.sent / self.bandwidth(collective)

    def bandwidth(self, collective: Collective) -> float:
        """Return a GPU's bandwidth in a collective among a replica's neighbouring GPUs, or among replicas."""
        cluster = self.cluster
        if collective.grows:
            return cluster.link if self.strategy.tensor <= cluster.node else cluster.network
        if cluster.gpus <= cluster.node:
            return cluster.link
        # GPUs of a node in the same group share the transfer over all of their adapters.
        beside = max(1, cluster.node // self.strategy.tensor)
        return cluster.network if beside == 1 else min(cluster.link, beside * cluster.network)

    # -- time ---------------------------------------------------------------------------------------------------------

    def compute(self, during: str) -> float:
        flops = self.workload.forward if during == "forward" else self.workload.backward
        return flops / self.cluster.flops

    def communication(self, during: str) -> float:
        return sum(self.seconds(found) for found in self.collectives if found.during == during)

    @property
    def hidden(self) -> float:
        """Seconds of a step whose collectives overlap compute as far as possible."""
        return sum(max(self.compute(during), self.communication(during)) for during in ("forward", "backward"))

    @property
    def exposed(self) -> float:
        """Seconds of a step without overlap of compute and collectives."""
        return sum(self.compute(during) + self.communication(during) for during in ("forward", "backward"))

    @property
    def least_tokens(self) -> float | None:
        """The fewest tokens per GPU at which compute takes longer than communication in forward and in backward; None
        if it never does, because tensor-parallel communication grows with the tokens, too."""
        least = 0.0
        for during in ("forward", "backward"):
            grows = sum(self.seconds(found) for found in self.collectives if found.during == during and found.grows)
            stays = self.communication(during) - grows
            gain = (self.compute(during) - grows) / self.workload.tokens
            if gain <= 0:
                return None
            least = max(least, stays / gain)
        return least

"""A training step spread over many GPUs, on paper: bytes on each, bytes sent, and what the step then waits for.

docs/PLAN.md derives the formulas. Where this package has the strategy (dp, zero1, zero3), tests hold them against the
bytes that its wrappers allocate and send. No torch, no GPU.

Letters: N GPUs = D replicas x T GPUs that share each layer (tensor parallel). A replica works on T times as many
sequences as a GPU would alone, so that the work of a GPU is the same in all strategies.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from cs336_systems.config import RunConfig, UserError
from cs336_systems.predict.flops import executed_flops, forward_flops
from cs336_systems.predict.memory_model import StepOnPaper
from cs336_systems.record import BUS_FACTOR

FP32 = 4
ADAM_MOMENTS = 2
GATHERED_AHEAD = 2
SCATTERED_AT_ONCE = 2
"""As parallel/fsdp.py has them; a test holds them equal."""


@dataclass(frozen=True)
class Cluster:
    gpus: int
    memory: float
    """Bytes of a GPU that a step may use."""
    flops: float
    """Per second, of a GPU."""
    node: int
    """GPUs that the fast link joins."""
    link: float
    """Bytes per second, one way, of a GPU to others of its node."""
    network: float
    """The same to other nodes."""


@dataclass(frozen=True)
class Strategy:
    """What replicas share out (ZeRO's stage: 1 optimizer state, 2 also gradients, 3 also weights), and how many GPUs
    share a layer."""

    stage: int = 0
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        stage, tensor = 0, 1
        for part in text.lower().split("+"):
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

    @property
    def name(self) -> str:
        data = f"zero{self.stage}" if self.stage else "dp"
        return f"{data}+tp{self.tensor}" if self.tensor > 1 else data


@dataclass(frozen=True)
class Workload:
    """A model and its step, as far as they matter here. Bytes and FLOPs are those of one GPU's own sequences."""

    blocks: int
    matrices: int
    """Parameters of all matrix products and of the embedding: what is sharded, and split by tensor parallel."""
    looked_up: int
    """Of these, the embedding's: backward does not read them."""
    replicated: int
    """Parameters of norms."""
    largest: int
    """Parameters of the largest matrix."""
    width: int
    """Bytes of an element in matrix products and messages."""
    has_copies: bool
    """Whether weights are copied to that width, and kept beside themselves, where they are not gathered."""
    tokens: int
    stream: int
    """Bytes of the residual stream as it is sent: tokens x d_model x width."""
    forward: float
    backward: float
    """FLOPs; with what is recomputed."""
    activations: float
    """Bytes at their peak."""
    reductions: int
    """Of the residual stream over a replica's GPUs, in each of forward and backward."""
    recomputed: int
    """Those that recomputation does again."""

    @property
    def parameters(self) -> int:
        return self.matrices + self.replicated


def transformer(config: RunConfig) -> Workload:
    """This package's Transformer, whole."""
    step, model, group = StepOnPaper(config), config.model, config.checkpoint_blocks
    t, layers = step.t, model.num_layers
    alive = min(group, layers) if group else layers
    """Blocks whose activations are there at the same time."""
    inputs = -(-layers // group) * t.residual(4) if group else 0
    ends = 2 * t.residual(4) + t.residual(t.s)  # the first block's input, the last norm's input and output
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
        activations=alive * step.block_saved + inputs + ends + t.logits(t.s) + t.logits(FP32),
        # Into the heads and out, into the inner width and out: a gather and a scatter each, as much as an all-reduce;
        # and one for the embedding, or for the head in backward.
        reductions=2 * layers + 1,
        recomputed=2 * layers if group else 0,
    )


def feed_forward(config: RunConfig) -> Workload:
    """The handout's exercise: each block two matrices, up and down, and nothing else; all is kept but the result."""
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
class Message:
    """One collective, or all of one kind and purpose, in a step."""

    collective: str
    purpose: str
    nbytes: float
    """Of the whole arrays."""
    ranks: int
    during: str
    """forward or backward: the pass that can hide it."""
    grows: bool
    """With the number of tokens."""

    @property
    def sent(self) -> float:
        """Bytes that one GPU sends."""
        return self.nbytes * BUS_FACTOR[self.collective](self.ranks)


@dataclass(frozen=True)
class Plan:
    """`workload` on `cluster` by `strategy`."""

    workload: Workload
    cluster: Cluster
    strategy: Strategy

    def __post_init__(self) -> None:
        if self.cluster.gpus % self.strategy.tensor:
            raise UserError(
                f"{self.cluster.gpus} GPUs cannot be shared out in groups of {self.strategy.tensor} "
                f"for {self.strategy.name}; take a multiple of {self.strategy.tensor}"
            )

    @property
    def replicas(self) -> int:
        return self.cluster.gpus // self.strategy.tensor

    # -- bytes on a GPU -----------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> dict[str, float]:
        fixed, shared = self._memory
        return {part: fixed[part] + shared[part] / self.replicas for part in fixed}

    @property
    def _memory(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of each part: bytes that every GPU holds, and bytes that replicas share out."""
        work, stage, tensor = self.workload, self.strategy.stage, self.strategy.tensor
        here = work.matrices / tensor + work.replicated
        norms = work.replicated if stage == 3 else 0  # FSDP shares out matrices alone

        def held(from_stage: int, width: int) -> tuple[float, float]:
            if stage < from_stage:
                return width * here, 0.0
            return width * norms, width * (here - norms)

        parts = {
            "parameter": held(3, FP32),
            "gradient": held(2, FP32),
            "optimizer": held(1, FP32 * ADAM_MOMENTS),
            # A replica has T times as many, shared out among T: heads and inner widths, and between them the sequence.
            "activation": (work.activations, 0.0),
            "working": (self._working, 0.0),
        }
        return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}

    @property
    def _working(self) -> float:
        """Low-precision copies of all weights, or the few weights and gradients that are whole at a time; and a
        replica's residual stream, whole where a layer reads it."""
        work, tensor = self.workload, self.strategy.tensor
        stream = work.stream * tensor if tensor > 1 else 0
        if self.strategy.stage == 3:
            whole = 1 + GATHERED_AHEAD + 1 + SCATTERED_AT_ONCE
            return whole * work.width * work.largest / tensor + stream
        return (work.width * work.matrices / tensor if work.has_copies else 0.0) + stream

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.cluster.memory

    @property
    def smallest_cluster(self) -> int | None:
        """GPUs on which this strategy fits, with as many sequences on each; None where no number is enough."""
        fixed, shared = (sum(parts.values()) for parts in self._memory)
        room = self.cluster.memory - fixed
        if room < 0 or (room == 0 and shared):
            return None
        return self.strategy.tensor * max(1, math.ceil(shared / room) if shared else 1)

    # -- bytes sent ---------------------------------------------------------------------------------------------------

    @cached_property
    def messages(self) -> list[Message]:
        return [message for message in self._all_messages() if message.ranks > 1 and message.nbytes]

    def _all_messages(self) -> Iterable[Message]:
        work, stage, tensor, replicas = self.workload, self.strategy.stage, self.strategy.tensor, self.replicas
        matrices, width = work.matrices / tensor, work.width
        whole = (matrices + work.replicated) * width
        match stage:
            case 0:
                yield Message("all_reduce", "gradients", whole, replicas, "backward", False)
            case 1:
                yield Message("all_reduce", "gradients", whole, replicas, "backward", False)
                yield Message("all_gather", "updated weights", whole, replicas, "forward", False)
            case 2:
                yield Message("reduce_scatter", "gradients", whole, replicas, "backward", False)
                yield Message("all_gather", "updated weights", whole, replicas, "forward", False)
            case 3:
                again = (work.matrices - work.looked_up) / tensor * width
                yield Message("all_gather", "weights", matrices * width, replicas, "forward", False)
                yield Message("all_gather", "weights again", again, replicas, "backward", False)
                yield Message("reduce_scatter", "gradients", matrices * width, replicas, "backward", False)
                yield Message("all_reduce", "gradients of norms", work.replicated * FP32, replicas, "backward", False)
        stream = work.stream * tensor
        yield Message("all_reduce", "activations", work.reductions * stream, tensor, "forward", True)
        backward = (work.reductions + work.recomputed) * stream
        yield Message("all_reduce", "activation gradients", backward, tensor, "backward", True)

    def seconds(self, message: Message) -> float:
        return message.sent / self.bandwidth(message)

    def bandwidth(self, message: Message) -> float:
        """Of a GPU, for a message among the GPUs of a replica, which lie side by side, or among replicas."""
        cluster = self.cluster
        if message.grows:
            return cluster.link if self.strategy.tensor <= cluster.node else cluster.network
        if cluster.gpus <= cluster.node:
            return cluster.link
        # GPUs of a node that are in the same group send over all their adapters, each a part of what they have.
        beside = max(1, cluster.node // self.strategy.tensor)
        return cluster.network if beside == 1 else min(cluster.link, beside * cluster.network)

    # -- time ---------------------------------------------------------------------------------------------------------

    def compute(self, during: str) -> float:
        flops = self.workload.forward if during == "forward" else self.workload.backward
        return flops / self.cluster.flops

    def communication(self, during: str) -> float:
        return sum(self.seconds(message) for message in self.messages if message.during == during)

    @property
    def hidden(self) -> float:
        """Seconds of a step whose messages run beside its products, as far as they can."""
        return sum(max(self.compute(during), self.communication(during)) for during in ("forward", "backward"))

    @property
    def exposed(self) -> float:
        """Seconds of a step that waits for every message."""
        return sum(self.compute(during) + self.communication(during) for during in ("forward", "backward"))

    @property
    def least_tokens(self) -> float | None:
        """Tokens on a GPU from which on products take longer than messages, in forward and in backward; None if they
        never do: the messages of tensor parallel grow with the tokens, too."""
        least = 0.0
        for during in ("forward", "backward"):
            grows = sum(self.seconds(m) for m in self.messages if m.during == during and m.grows)
            stays = self.communication(during) - grows
            gain = (self.compute(during) - grows) / self.workload.tokens
            if gain <= 0:
                return None
            least = max(least, stays / gain)
        return least

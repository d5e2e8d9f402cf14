"""Predicted memory, communication and time of a training step on many GPUs. No torch, no GPU.

docs/PLAN.md derives the formulas. For strategies that this package implements (dp, zero1, zero3), tests compare them
with the bytes that its wrappers allocate and send.

N GPUs = D replicas x S pipeline stages x K context-parallel GPUs x T tensor-parallel GPUs, the last neighbours of each
other. A replica processes S K T times as many sequences as a single GPU, so that the work per GPU is the same in all
strategies. With stages or context parallelism it processes them one by one, as micro batches.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from cs336_systems.config import RunConfig, UserError
from cs336_systems.predict.flops import executed_flops, forward_flops
from cs336_systems.predict.memory_model import SimulatedStep, breakdown, simulated_parts
from cs336_systems.predict.rank_shards import stage_layers
from cs336_systems.predict.strategy import Strategy
from cs336_systems.record import BUS_FACTOR
from cs336_systems.text import counted

FP32 = 4
ADAM_MOMENTS = 2
FUSED_PARTS = frozenset(("kernels", "loss"))
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
    """True if weights have a copy of that width, kept beside the fp32 weights unless they are gathered."""
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
    sequences: int = 1
    head: int = 0
    """Parameters of the head, included in `matrices`; the last pipeline stage holds them."""
    last_norm: int = 0
    """Parameters of the last norm, included in `replicated`."""
    head_share: float = 0.0
    """Share of the FLOPs in the head."""
    block: float = 0.0
    """Bytes of activations that backward of one block needs."""
    group: int = 0
    """Blocks that are recomputed together; 0: none."""
    group_input: float = 0.0
    """Bytes that such a group keeps until it is recomputed."""
    keys_values: float = 0.0
    """Bytes of the keys and values of one block."""
    constant: float = 0.0
    """Bytes outside of blocks that do not depend on the number of tokens, included in `activations`: the chunk of
    logits of a loss that never forms them all."""
    is_trained: bool = False
    """True if `cs336 train` trains it, on torch's engine where no wrapper of this package splits a layout."""
    is_fused: bool = False
    """True if it runs with the fused kernels and loss."""

    @property
    def parameters(self) -> int:
        return self.matrices + self.replicated

    def kept(self, blocks: int) -> float:
        """Return the bytes that `blocks` keep from forward to backward."""
        return -(-blocks // self.group) * self.group_input if self.group else blocks * self.block

    def recomputing(self, blocks: int) -> float:
        """Return the bytes of the group that backward is recomputing; there is one at a time."""
        return min(self.group, blocks) * self.block

    @property
    def ends(self) -> float:
        """Bytes of activations outside of blocks that grow with the tokens: the last norm, logits and loss."""
        return self.activations - self.constant - self.kept(self.blocks) - self.recomputing(self.blocks)


def runs_fused(strategy: Strategy) -> bool:
    """Return True if the ranks of `cs336 train` run a layout with the fused kernels and loss of the fast step.

    Those need whole weights: no layers, sequences or stages are split. torch's `fully_shard` gathers weights for them;
    this package's FSDP has none of the fast step.
    """
    return strategy.group == 1


def transformer(config: RunConfig) -> Workload:
    """Return the workload of this package's Transformer."""
    step, model, group = SimulatedStep(config), config.model, config.checkpoint_blocks
    t, layers = step.t, model.num_layers
    blocks_saved = min(group, layers) if group else layers
    inputs = -(-layers // group) * t.residual(4) if group else 0
    ends = 2 * t.residual(4) + t.residual(t.s)  # the first block's input, the last norm's input and output
    block, group_input, constant = float(step.block_saved), float(t.residual(4)), 0.0
    activations = blocks_saved * block + inputs + ends + t.logits(t.s) + t.logits(FP32)
    if simulated_parts(config):
        full = breakdown(config)
        kept = blocks_saved * full.activations_per_block if group else 0  # one group is recomputed at a time
        activations = full.activations + kept + full.logits_and_loss
        block = float(full.activations_per_block)
        double = breakdown(replace(config, batch_size=2 * config.batch_size))
        constant = max(0.0, 2.0 * full.logits_and_loss - double.logits_and_loss)
    forward = float(forward_flops(config))
    return Workload(
        blocks=layers,
        matrices=model.parameters - model.vector_parameters,
        looked_up=0 if model.tied_embeddings else model.vocab_size * model.d_model,  # a tied head reads them
        replicated=model.vector_parameters,
        largest=model.d_model * max(model.d_ff, model.vocab_size, model.q_width),
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
        sequences=config.batch_size,
        head=model.vocab_size * model.d_model,
        last_norm=model.d_model,
        head_share=2 * config.tokens * model.vocab_size * model.d_model / forward,
        block=block,
        group=group,
        group_input=group_input if group else 0.0,
        keys_values=2 * config.tokens * model.kv_width * t.s,
        constant=constant,
        is_trained=True,
        is_fused=simulated_parts(config) >= FUSED_PARTS,
    )


def feed_forward(config: RunConfig) -> Workload:
    """Return the workload of the handout's exercise: two matrices per block, all inputs of matmuls saved."""
    model = config.model
    width = 2 if config.has_low_precision else FP32
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
        sequences=config.batch_size,
        block=config.tokens * (model.d_model + model.d_ff) * width,
    )


@dataclass(frozen=True)
class Collective:
    """All collectives, or point-to-point messages, of one kind and purpose in a step."""

    name: str
    """all_reduce, all_gather, reduce_scatter or send."""
    purpose: str
    nbytes: float
    """Bytes of the full arrays; for `send` the bytes that one GPU sends."""
    ranks: int
    during: str
    """The pass with which it can overlap: forward or backward."""
    grows: bool
    """True if its bytes are proportional to the number of tokens."""
    axis: str = "data"
    """The group of GPUs: data, shard, replicate, tensor, context or pipeline."""

    @property
    def sent(self) -> float:
        """Bytes that one GPU sends."""
        return self.nbytes if self.name == "send" else self.nbytes * BUS_FACTOR[self.name](self.ranks)


# -- pipeline stages --------------------------------------------------------------------------------------------------


def in_flight(stages: int, stage: int, micro_batches: int, chunks: int = 1) -> int:
    """Return the most micro batches (of one chunk of layers each) whose activations a stage holds at a time.

    1F1B: a stage begins as many forward passes as there are stages after it, and one more, before its first backward.
    Interleaved: micro batches run in groups of S, chunk by chunk, so V - 1 chunks of a group come first, and each later
    stage delays the first backward by two passes.
    """
    if chunks == 1:
        return min(micro_batches, stages - stage)
    return min(micro_batches * chunks, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)


@dataclass(frozen=True)
class Stage:
    """The layers on one GPU: all of them without a pipeline."""

    matrices: float
    looked_up: int
    replicated: float
    kept: float
    """Bytes of activations for all tokens of a GPU, if they were one micro batch, without those that are constant."""
    constant: float
    """Bytes of activations that do not depend on the number of tokens."""
    share: float
    """Share of the model's FLOPs."""


@dataclass(frozen=True)
class Plan:
    """`workload` on `cluster` by `strategy`, in `micro` micro batches (0: see `micro_batches`)."""

    workload: Workload
    cluster: Cluster
    strategy: Strategy
    micro: int = 0

    def __post_init__(self) -> None:
        strategy, gpus, blocks = self.strategy, self.cluster.gpus, self.workload.blocks
        if gpus % strategy.group:
            raise UserError(
                f"{counted(gpus, 'GPU')} cannot be split into groups of {strategy.group} "
                f"for {strategy.name}; take a multiple of {strategy.group}"
            )
        if self.replicas % strategy.replicate:
            raise UserError(
                f"{self.replicas} replicas cannot be split into {strategy.replicate} groups for {strategy.name}"
            )
        if strategy.pipeline * strategy.chunks > blocks:
            raise UserError(
                f"{blocks} layers are too few for {strategy.name}, which has {strategy.pipeline * strategy.chunks} "
                f"chunks of layers; take fewer"
            )
        if strategy.chunks > 1 and self.micro_batches % strategy.pipeline:
            raise UserError(
                f"{self.micro_batches} micro batches are not a multiple of the {strategy.pipeline} stages, which the "
                f"interleaved schedule of {strategy.name} needs; change --micro_batches"
            )

    @property
    def replicas(self) -> int:
        """Number of GPUs that hold the same part of the model, including those of a context-parallel group."""
        return self.cluster.gpus // (self.strategy.tensor * self.strategy.pipeline)

    @property
    def shards(self) -> int:
        return self.replicas // self.strategy.replicate

    @property
    def is_on_engine(self) -> bool:
        """True if `cs336 train` runs the layout on torch's engine, which reduces gradients in fp32. It also runs ZeRO-3
        with the fused kernels, which this package's FSDP does not have."""
        strategy, work = self.strategy, self.workload
        is_sharded_fast = strategy.stage == 3 and work.is_fused
        return work.is_trained and (strategy.group > 1 or strategy.replicate > 1 or is_sharded_fast)

    @property
    def micro_batches(self) -> int:
        """Micro batches of a step, at most one for each sequence of a replica. The default is one for each where a
        sequence or the layers are split, because that is what keeps activations small and stages busy; else 1."""
        sequences = self.workload.sequences * self.strategy.group
        default = sequences if self.strategy.context * self.strategy.pipeline > 1 else 1
        return min(self.micro or default, sequences)

    @property
    def tokens_at_once(self) -> float:
        """Tokens of a micro batch on each GPU, relative to `workload.tokens`. A replica has S K T times these tokens; a
        micro batch has 1 / M of them, on K T GPUs."""
        return self.strategy.pipeline / self.micro_batches

    @cached_property
    def stages(self) -> list[Stage]:
        """The pipeline stages: the embedding is on the first, the last norm, the head and the loss are on the last."""
        work, count, chunks = self.workload, self.strategy.pipeline, self.strategy.chunks
        layers = stage_layers(work.blocks, count * chunks)
        in_blocks = work.matrices - work.looked_up - work.head
        found = []
        for number in range(count):
            own, is_first, is_last = layers[number::count], number == 0, number == count - 1
            part = sum(own) / work.blocks
            held = in_flight(count, number, self.micro_batches, chunks)
            kept = held * work.kept(max(own)) + work.recomputing(max(own)) + is_last * work.ends
            found.append(
                Stage(
                    matrices=in_blocks * part + is_first * work.looked_up + is_last * work.head,
                    looked_up=is_first * work.looked_up,
                    replicated=(work.replicated - work.last_norm) * part + is_last * work.last_norm,
                    kept=kept,
                    constant=is_last * work.constant,
                    share=(1 - work.head_share) * part + is_last * work.head_share,
                )
            )
        return found

    # -- memory per GPU -----------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of each part on a GPU of the stage that needs the most."""
        found = []
        for stage in self.stages:
            fixed, shared = self._memory(stage)
            found.append({part: fixed[part] + shared[part] / self.shards for part in fixed})
        return max(found, key=lambda parts: sum(parts.values()))

    def _memory(self, here: Stage) -> tuple[dict[str, float], dict[str, float]]:
        """Return, for each part, the bytes that every GPU of a stage holds and the bytes that replicas shard."""
        stage, tensor = self.strategy.stage, self.strategy.tensor
        weights = here.matrices / tensor + here.replicated
        norms = here.replicated if stage == 3 else 0  # FSDP shards matrices only

        def held(from_stage: int, width: int) -> tuple[float, float]:
            if stage < from_stage:
                return width * weights, 0.0
            return width * norms, width * (weights - norms)

        keeps_whole = self.is_on_engine and self.strategy.pipeline > 1  # from the first micro batch to the last
        parts = {
            "parameter": held(3, FP32),
            "gradient": (FP32 * weights, 0.0) if keeps_whole else held(2, FP32),
            "optimizer": held(1, FP32 * ADAM_MOMENTS),
            # A replica has T times as many, sharded over T GPUs: by heads, inner width or sequence.
            "activation": (here.kept * self.tokens_at_once + here.constant, 0.0),
            "working": (self._working(here), 0.0),
        }
        return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}

    def _working(self, here: Stage) -> float:
        """Bytes of low-precision weight copies, or of the weights and gradients that FSDP holds gathered at a time (in
        a pipeline all weights of the stage); of a replica's full residual stream; and of the keys and values of other
        GPUs."""
        work, tensor = self.workload, self.strategy.tensor
        stream = work.stream * tensor * self.tokens_at_once if tensor > 1 else 0
        stream += self._foreign_keys
        if self.strategy.stage == 3:
            gathered = (1 + GATHERED_AHEAD) * work.largest
            if self.is_on_engine and self.strategy.pipeline > 1:
                gathered = here.matrices
            return work.width * (gathered + (1 + SCATTERED_AT_ONCE) * work.largest) / tensor + stream
        return (work.width * here.matrices / tensor if work.has_copies else 0.0) + stream

    @property
    def _foreign_keys(self) -> float:
        """Bytes of keys, values and their gradients in backward of one block: those of all K GPUs if they are gathered;
        with a ring, those that arrive while others are in use."""
        context = self.strategy.context
        if context == 1:
            return 0.0
        return 2 * self.workload.keys_values * self.tokens_at_once * (1 if self.strategy.ring else context)

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.cluster.memory

    @property
    def smallest_cluster(self) -> int | None:
        """The fewest GPUs on which this strategy fits with as many sequences per GPU; None if it never fits."""
        strategy, shards = self.strategy, 1
        for stage in self.stages:
            fixed, shared = (sum(parts.values()) for parts in self._memory(stage))
            room = self.cluster.memory - fixed
            if room < 0 or (room == 0 and shared):
                return None
            shards = max(shards, math.ceil(shared / room) if shared else 1)
        groups = math.lcm(strategy.context, strategy.replicate)
        replicas = -(-shards * strategy.replicate // groups) * groups
        return strategy.tensor * strategy.pipeline * replicas

    # -- communication ------------------------------------------------------------------------------------------------

    @cached_property
    def collectives(self) -> list[Collective]:
        every = [*self._of_weights(), *self._of_layers(), *self._of_context(), *self._of_stages()]
        return [found for found in every if found.ranks > 1 and found.nbytes]

    def _of_weights(self) -> Iterable[Collective]:
        """Yield collectives among replicas, on the stage with the most parameters. Stages 2 and 3 keep no full
        gradients, so they scatter those of each micro batch; stage 3 gathers the weights for each, too. A pipeline of
        torch's engine does both once in a step."""
        tensor, replicas, micro = self.strategy.tensor, self.replicas, self.micro_batches
        here, work = max(self.stages, key=lambda stage: stage.matrices), self.workload
        matrices, replicated = here.matrices / tensor, here.replicated
        whole, width = matrices + replicated, work.width
        once = self.is_on_engine and self.strategy.pipeline > 1
        scatters = 1 if once or self.strategy.stage < 2 else micro
        gradient = scatters * (FP32 if self.is_on_engine else width)
        match self.strategy.stage:
            case 0:
                yield Collective("all_reduce", "gradients", gradient * whole, replicas, "backward", False)
            case 1:
                yield Collective("all_reduce", "gradients", gradient * whole, replicas, "backward", False)
                yield Collective("all_gather", "updated weights", width * whole, replicas, "forward", False)
            case 2:
                yield Collective("reduce_scatter", "gradients", gradient * whole, replicas, "backward", False)
                yield Collective("all_gather", "updated weights", width * whole, replicas, "forward", False)
            case 3:
                shards, groups = self.shards, self.strategy.replicate
                gathered = scatters * width
                again = 0 if once else gathered * (matrices - here.looked_up / tensor)
                scattered = gradient * matrices
                part = scattered / scatters / shards if self.is_on_engine else scattered / shards
                yield Collective("all_gather", "weights", gathered * matrices, shards, "forward", False, "shard")
                yield Collective("all_gather", "weights again", again, shards, "backward", False, "shard")
                yield Collective("reduce_scatter", "gradients", scattered, shards, "backward", False, "shard")
                yield Collective("all_reduce", "gradients of a shard", part, groups, "backward", False, "replicate")
                norms = FP32 * replicated
                yield Collective("all_reduce", "gradients of norms", norms, replicas, "backward", False)

    def _of_layers(self) -> Iterable[Collective]:
        """Yield collectives of tensor parallelism. A stage has 1 / S of the layers and S times the tokens."""
        work, tensor = self.workload, self.strategy.tensor
        stream = work.stream * tensor
        forward, backward = work.reductions * stream, (work.reductions + work.recomputed) * stream
        yield Collective("all_reduce", "activations", forward, tensor, "forward", True, "tensor")
        yield Collective("all_reduce", "activation gradients", backward, tensor, "backward", True, "tensor")

    def _of_context(self) -> Iterable[Collective]:
        """Yield messages of context parallelism. A block needs keys and values of all K GPUs, in forward and again in
        backward, and their gradients return to the owners: K - 1 steps round a ring, and one more for the gradients."""
        context, whole = self.strategy.context, self.workload.blocks * self.workload.keys_values
        if context == 1:
            return
        if self.strategy.ring:
            rest = (context - 1) * whole
            yield Collective("send", "keys and values", rest, context, "forward", True, "context")
            yield Collective("send", "keys, values, gradients", 2 * rest + whole, context, "backward", True, "context")
            return
        whole *= context
        yield Collective("all_gather", "keys and values", whole, context, "forward", True, "context")
        yield Collective("all_gather", "keys and values again", whole, context, "backward", True, "context")
        yield Collective("reduce_scatter", "their gradients", whole, context, "backward", True, "context")

    def _of_stages(self) -> Iterable[Collective]:
        """Yield messages between stages: each micro batch's residual stream leaves each chunk of layers once, and its
        gradient returns. M micro batches of S / M of the tokens are S times the stream."""
        stages = self.strategy.pipeline
        nbytes = self.workload.stream * stages * self.strategy.chunks
        yield Collective("send", "activations to the next stage", nbytes, stages, "forward", True, "pipeline")
        yield Collective("send", "gradients to the stage before", nbytes, stages, "backward", True, "pipeline")

    def seconds(self, collective: Collective) -> float:
        return collective.sent / self.bandwidth(collective)

    def bandwidth(self, collective: Collective) -> float:
        """Return a GPU's bandwidth in a collective. GPUs of a group are `apart` ranks from each other, and the group
        spans `span` ranks; tensor-parallel GPUs are neighbours, then come context, shards, replicas and stages."""
        cluster, strategy = self.cluster, self.strategy
        tensor, stage = strategy.tensor, cluster.gpus // strategy.pipeline
        apart, span = {
            "tensor": (1, tensor),
            "context": (tensor, tensor * strategy.context),
            "shard": (tensor, tensor * self.shards),
            "replicate": (tensor * self.shards, stage),
            "data": (tensor, stage),
            "pipeline": (stage, cluster.gpus),
        }[collective.axis]
        if span <= cluster.node:
            return cluster.link
        if collective.axis == "tensor" or collective.name == "send":
            return cluster.network
        # GPUs of a node in the same group share the transfer over all of their adapters.
        beside = max(1, cluster.node // apart)
        return cluster.network if beside == 1 else min(cluster.link, beside * cluster.network)

    # -- time ---------------------------------------------------------------------------------------------------------

    def compute(self, during: str) -> float:
        flops = self.workload.forward if during == "forward" else self.workload.backward
        return flops / self.cluster.flops

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits for the first or the last micro batch.

        A step has M micro batches one after the other on each stage, and S - 1 before the last stage begins; chunks
        make each of these waits V times shorter: (S - 1) / (V M + S - 1).
        """
        waits = self.strategy.pipeline - 1
        return waits / (self.strategy.chunks * self.micro_batches + waits)

    @property
    def idle(self) -> float:
        """Seconds in which a stage of average work waits: for the slowest stage, and in the bubble."""
        slowest = self.strategy.pipeline * max(stage.share for stage in self.stages)
        compute = self.compute("forward") + self.compute("backward")
        return compute * (slowest / (1 - self.bubble) - 1)

    def communication(self, during: str) -> float:
        return sum(self.seconds(found) for found in self.collectives if found.during == during)

    def waiting(self, during: str) -> float:
        """Return the seconds of the collectives of a pass whose results are the input of the next kernel."""
        own = (found for found in self.collectives if found.during == during)
        return sum(self.seconds(found) for found in own if found.axis in self.waited_for)

    @property
    def waited_for(self) -> tuple[str, ...]:
        """Axes whose collectives bring the input of the next kernel: those along the sequence, of tensor parallelism,
        and gathers of keys and values. A ring passes these on during attention."""
        return ("tensor",) if self.strategy.ring else ("tensor", "context")

    @property
    def hidden(self) -> float:
        """Seconds of a step whose collectives overlap compute as far as possible."""
        passes = ("forward", "backward")
        return self.idle + sum(max(self.compute(during), self.communication(during)) for during in passes)

    @property
    def exposed(self) -> float:
        """Seconds of a step without overlap of compute and collectives."""
        passes = ("forward", "backward")
        return self.idle + sum(self.compute(during) + self.communication(during) for during in passes)

    @property
    def least_tokens(self) -> float | None:
        """The fewest tokens per GPU at which compute takes longer than communication in forward and in backward; None
        if there is no such number, because tensor-parallel communication grows with the tokens, too."""
        least = 0.0
        for during in ("forward", "backward"):
            grows = sum(self.seconds(found) for found in self.collectives if found.during == during and found.grows)
            stays = self.communication(during) - grows
            gain = (self.compute(during) - grows) / self.workload.tokens
            if gain <= 0:
                return None
            least = max(least, stays / gain)
        return least

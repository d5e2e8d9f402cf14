"""`cs336 rehearse`: one rank of a device mesh on one GPU, or traced on none, beside what `cs336 plan` predicts for it.

Compute and memory are the rank's own (measure/rehearsal.py); the time on the wire is predicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cs336_systems.config import ModelConfig, RunConfig, UserError, arg, flag, flag_like
from cs336_systems.experiments.ranks.layout_times import WAITING
from cs336_systems.experiments.ranks.plan_cells import PlanArguments, plan_config, plans
from cs336_systems.predict.engine_memory import engine_peak, is_predicted
from cs336_systems.predict.engine_messages import engine_messages
from cs336_systems.predict.gpus import find_card, shown_name
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.predict.parallel_model import Collective, Plan
from cs336_systems.predict.rank_shards import Mesh, of_replica, weights
from cs336_systems.predict.strategy import Strategy
from cs336_systems.predict.time.gpu_profile import GpuProfile, profile_of
from cs336_systems.predict.time.rank_time import plain_rank_seconds
from cs336_systems.record import GIB, MIB
from cs336_systems.report.names import part_name
from cs336_systems.report.rows import ms, number, percent, signed
from cs336_systems.report.terms import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    MEASURED,
    OPTIMIZER_STATE,
    PARAMETERS,
    PEAK,
    TIME,
    TRACED,
)
from cs336_systems.table import FORMATS, Column, Table, word
from cs336_systems.text import Text, listed, say

if TYPE_CHECKING:
    from cs336_systems.measure.rehearsal import Rehearsal

PART = Text("part", "部分")
AXES = {"shard": "dp_shard x cp", "replicate": "dp_replicate", "tensor": "tp", "context": "cp"}
MOST_GPUS, MOST_SHARDS = 65_536, 3_000_000
"""Largest mesh, and most shards of all weights together, for which a rehearsal starts within about a minute."""
SAME_SHARE = 0.01
"""Bytes that differ from predicted ones by a larger share are remarked on."""
PASSES = {"forward": FORWARD, "backward": BACKWARD}
PURPOSES = {
    "weights": Text("weights", "权重"),
    "weights again": Text("weights, again", "权重，再次"),
    "gradients": GRADIENTS,
    "gradients of a shard": Text("gradients of a shard", "分片的梯度"),
    "input of branches": Text("input of branches", "各分支的输入"),
    "output of branches": Text("output of branches", "各分支的输出"),
    "input of branches, again": Text("input of branches, recomputed", "各分支的输入，重计算"),
    "output of branches, again": Text("output of branches, recomputed", "各分支的输出，重计算"),
    "embedding": Text("output of the embedding", "词嵌入的输出"),
    "input of the head": Text("input of the head", "输出层的输入"),
    "loss": Text("loss", "损失"),
    "gradients of norms": Text("gradients of norms", "归一化层的梯度"),
    "keys and values": Text("keys and values", "键与值"),
    "keys and values again": Text("keys and values, again", "键与值，再次"),
    "their gradients": Text("gradients of keys and values", "键与值的梯度"),
}
"""Headings for the purposes of messages in predict/engine_messages.py."""


@dataclass(frozen=True)
class RehearseArguments(ShapeArguments):
    gpus: int = flag(8, "GPUs of the mesh: dp_replicate x dp_shard x cp x tp")
    dp_replicate: int = flag(1, "groups of GPUs with the same shards")
    dp_shard: int = flag(1, "GPUs that shard weights, gradients and optimizer state (fully_shard)")
    cp: int = flag(1, "GPUs that split each sequence (context parallel)")
    tp: int = flag(1, "GPUs that split each layer (tensor and sequence parallel)")
    rank: int = flag(0, "the rank to run")
    batch_size: int = flag(1, "sequences for each GPU; a group of cp x tp GPUs processes that many times as many")
    micro_batches: int = flag(1, "micro batches into which a group divides its sequences; one of them is rehearsed")
    precision: str = flag("bf16", "fp32, or bf16 for matmuls and weights that are gathered", ("fp32", "bf16"))
    attention: str = flag("auto", "attention implementation", ("auto", "reference", "sdpa"))
    num_steps: int = flag_like(RunConfig, "num_steps")
    trace: bool = flag(False, "trace on tensors without memory, also where there is a GPU")
    gpu: str = flag_like(PlanArguments, "gpu")
    tflops: float | None = flag_like(PlanArguments, "tflops")
    node: int = flag_like(PlanArguments, "node")
    link: float | None = flag_like(PlanArguments, "link")
    network: float | None = flag_like(PlanArguments, "network")
    format: str = flag("terminal", "table format", FORMATS)

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp)


class Rehearsed(NamedTuple):
    """A rank that was run or traced, and the plan for its mesh."""

    found: "Rehearsal"
    plan: Plan
    peak: int | None
    """The predicted peak of the rank in its first micro batch; None with `cp` and any attention but `auto`."""
    later: float = 0.0
    """Bytes by which later micro batches have a larger peak: they find the gradients of the first."""


def rehearsed(arguments: RehearseArguments) -> Rehearsed:
    config = _config(arguments)
    arguments.mesh.require(arguments.gpus, arguments.rank, config.model)
    sequences = _sequences(arguments).batch_size
    _require_size(arguments.mesh, config.model)
    plan = mesh_plan(arguments)
    import torch

    from cs336_systems.measure.rehearsal import rehearse

    on_gpu = torch.cuda.is_available() and not arguments.trace
    mesh, number = arguments.mesh, arguments.micro_batches
    found = rehearse(config, mesh, arguments.rank, on_gpu=on_gpu, micro_batches=number)
    if not is_predicted(config, mesh, sequences):
        return Rehearsed(found, plan, None, found.gradients if number > 1 else 0.0)
    peak, later = (engine_peak(config, mesh, count, sequences) for count in (1, number))
    return Rehearsed(found, plan, peak, later - peak)


def _require_size(mesh: Mesh, model: ModelConfig) -> None:
    """Raise UserError for a mesh that torch would take many minutes to set up: its groups have a list of all ranks, and
    `fully_shard` makes every shard of every weight once, to learn its size."""
    if mesh.gpus > MOST_GPUS:
        raise UserError(f"--gpus {mesh.gpus:,} is too large for a rehearsal: at most {MOST_GPUS:,}; use cs336 plan")
    shards, most = mesh.of_weights.dp_shard, max(1, MOST_SHARDS // len(list(weights(model))))
    if shards > most:
        raise UserError(
            f"--dp_shard x --cp {shards:,} is too large for a rehearsal of this model: at most {most:,}; use cs336 plan"
        )


def _config(arguments: RehearseArguments) -> RunConfig:
    """Return the run of one rank: a training step of plain modules, which torch can shard."""
    config = arguments.predicted_config(num_steps=arguments.num_steps)
    if config.fast != "off" or config.memory_budget or config.mode != "train-step":
        raise UserError("a rehearsal runs the plain training step; leave out --fast, --memory_budget and --mode")
    return config


def _sequences(arguments: RehearseArguments) -> RunConfig:
    """Return the run of the rank's group for one micro batch."""
    if arguments.micro_batches < 1:
        raise UserError(f"{arg('micro_batches')} must be at least 1, got {arguments.micro_batches}")
    return of_replica(_config(arguments), arguments.mesh, arguments.micro_batches)


def mesh_plan(arguments: RehearseArguments) -> Plan:
    """Return the plan for the mesh: stage 3 where weights are sharded, else data parallel."""
    mesh, config = arguments.mesh, _config(arguments)
    sharded = mesh.of_weights.dp_shard > 1
    strategy = Strategy(3 if sharded else 0, mesh.tp, context=mesh.cp, replicate=mesh.dp_replicate if sharded else 1)
    given = {name: getattr(arguments, name) for name in ("gpus", "gpu", "tflops", "node", "link", "network")}
    given |= {name: getattr(arguments, name) for name in ("batch_size", "precision", "attention", "checkpoint_blocks")}
    given["micro_batches"] = arguments.micro_batches
    planned = plan_config(PlanArguments(**given, size="small", strategy=(strategy.name,)))
    (plan,) = plans({**planned, **config.to_dict()})
    return plan


# -- tables -----------------------------------------------------------------------------------------------------------


def rehearsal_tables(arguments: RehearseArguments) -> list[Table]:
    run = rehearsed(arguments)
    parts = [_parts_table(run.found.parts)] if run.found.parts else []
    messages = [_messages_table(arguments)] if arguments.gpus > 1 else []
    return [_memory_table(arguments, run), *parts, *messages, _time_table(arguments, run)]


def _messages_table(arguments: RehearseArguments) -> Table:
    """Return what the rank sends in a step of one micro batch, as torch's engine does it."""
    rows: list[list[str | Text]] = [
        [AXES[one.axis], PASSES[one.during], one.name, PURPOSES[one.purpose], _mib(one.nbytes), _mib(one.sent)]
        for one in _messages(arguments)
    ]
    title = Text("rehearse: what the rank sends in a step", "rehearse：该 rank 在一步中发送的数据")
    columns = [
        word(Text("axis", "维度")),
        word(Text("during", "阶段")),
        word(Text("collective", "集合通信")),
        word(Text("of", "内容")),
        Column(Text("whole array", "完整数组"), "MiB"),
        Column(Text("sent", "发送"), "MiB"),
    ]
    note = Text(
        "counted for torch's engine, where real ranks send the same bytes; scalars are left out",
        "按 torch 引擎计数，与真实 rank 发送的字节一致；标量未计入",
    )
    return Table(title, columns, rows, [note])


def _messages(arguments: RehearseArguments) -> list[Collective]:
    """Return the collectives of the rank in a step of one micro batch."""
    mesh = arguments.mesh
    return engine_messages(_sequences(arguments), mesh, rank=arguments.rank)


def _parts_table(parts: dict[str, int]) -> Table:
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    rows: list[list[str | Text]] = [[part_name(label), _mib(size)] for label, size in largest_first]
    title = Text("rehearse: parts of the traced peak", "rehearse：追踪所得峰值的组成")
    return Table(title, [word(PART), Column(TRACED, "MiB")], rows)


def _memory_table(arguments: RehearseArguments, run: Rehearsed) -> Table:
    found, plan, mesh = run.found, run.plan, arguments.mesh
    kind = TRACED if found.seconds is None else MEASURED
    memory = plan.memory
    parts = [
        (PARAMETERS, found.parameters, memory["parameter"]),
        (GRADIENTS, found.gradients, memory["gradient"]),
        (OPTIMIZER_STATE, found.optimizer, memory["optimizer"]),
        (PEAK, found.peak, run.peak),
    ]
    rows: list[list[str | Text]] = [
        [name, _mib(size), "-" if predicted is None else _mib(predicted)] for name, size, predicted in parts
    ]
    notes = [verdict(found.peak + run.later, plan.cluster.memory, shown_name(arguments.gpu)), *_differences(parts)]
    if run.later:
        said = "later micro batches have a peak that is {} MiB larger: they find the gradients of the first"
        notes.append(say(said, "之后的微批次已有第一个微批次的梯度，峰值再高 {} MiB", _mib(run.later)))
    title = say(
        "rehearse: rank {} of {} GPUs (replicate {}, shard {}, cp {}, tp {}), memory",
        "rehearse：{1} 张 GPU（replicate {2}、shard {3}、cp {4}、tp {5}）中 rank {0} 的显存",
        *(str(arguments.rank), f"{arguments.gpus:,}", *map(str, mesh[1:])),
    )
    columns = [word(PART), Column(kind, "MiB"), Column(Text("plan", "plan 预测"), "MiB")]
    return Table(title, columns, rows, [*notes, *_why_they_differ(arguments, run)])


def verdict(peak: float, usable: float, gpu: str) -> Text:
    """Say whether a rank fits on the GPU of this name."""
    sizes = (number(size / GIB, 1) for size in (peak, usable, abs(usable - peak)))
    if peak <= usable:
        return say(
            "fits on {}: needs {} of {} GiB usable ({} GiB to spare)",
            "{} 放得下：需要 {} GiB，可用 {} GiB（余 {} GiB）",
            *(gpu, *sizes),
        )
    return say(
        "does not fit on {}: needs {} GiB and {} GiB are usable ({} GiB are lacking)",
        "{} 放不下：需要 {} GiB，可用 {} GiB（缺 {} GiB）",
        *(gpu, *sizes),
    )


def _differences(parts: Iterable[tuple[Text, float, float | None]]) -> list[Text]:
    """Name the parts whose bytes differ from the predicted ones by more than `SAME_SHARE`."""
    shares = {name: size / predicted - 1 for name, size, predicted in parts if predicted}
    different = [
        say("{} {}", "{} {}", name, signed(share, 1)) for name, share in shares.items() if abs(share) > SAME_SHARE
    ]
    if not different:
        return []
    return [
        say(
            "differs from the plan by more than {}: {}",
            "与 plan 预测相差超过 {}：{}",
            percent(SAME_SHARE, 0),
            listed(different),
        )
    ]


def _why_they_differ(arguments: RehearseArguments, run: Rehearsed) -> list[Text]:
    mesh = arguments.mesh
    notes = [
        Text(
            "peak: all tensors of a step and cuBLAS workspaces; predicted as torch's engine allocates and frees them",
            "峰值：一步的所有张量与 cuBLAS 工作区；预测值按 torch 引擎分配与释放张量的顺序推算",
        )
        if run.peak is not None
        else Text(
            "peak: all tensors of a step and cuBLAS workspaces; not predicted for --cp without --attention auto",
            "峰值：一步的所有张量与 cuBLAS 工作区；--cp 搭配 --attention auto 以外的注意力时不预测",
        )
    ]
    if mesh.of_weights.dp_shard > 1:
        notes.append(
            Text(
                "torch shards norms, too, and rounds rows up on the first ranks; plan counts the mean and whole norms",
                "torch 也切分归一化层，且前面的 rank 按行向上取整；plan 取平均值，归一化层不切分",
            )
        )
    elif mesh.tp > 1 and run.found.gradients > run.found.parameters:
        whole = run.found.gradients - run.found.parameters
        notes.append(
            say(
                "without sharding, torch keeps the gradient of the embedding whole on each rank: {} MiB more",
                "不做切分时，torch 在每个 rank 上保留完整的词嵌入梯度：多 {} MiB",
                _mib(whole),
            )
        )
    return notes


def _time_table(arguments: RehearseArguments, run: Rehearsed) -> Table:
    """Return measured compute beside the predicted one, predicted communication, and the two ends of a step."""
    plan, measured, predicted = run.plan, run.found.seconds, predicted_compute(arguments)
    messages = _messages(arguments)
    wire, waiting = (
        sum(plan.seconds(one) for one in found)
        for found in (messages, [one for one in messages if one.axis in plan.waited_for])
    )
    how = say("predicted for {}", "按 {} 预测", shown_name(arguments.gpu))
    at_peak = (plan.compute("forward") + plan.compute("backward")) / arguments.micro_batches
    kinds = {Text("measured", "实测"): measured, how: predicted, Text("at the GPU's peak rate", "按 GPU 峰值"): at_peak}
    known = {kind: seconds for kind, seconds in kinds.items() if seconds is not None}
    kind, compute = next(iter(known.items()))
    rows: list[list[str | Text]] = [
        [say("compute ({})", "计算（{}）", name), ms(seconds)] for name, seconds in known.items()
    ]
    rows += [
        [Text("communication (predicted)", "通信（预测）"), ms(wire)],
        [Text("step with overlap", "单步，通信与计算重叠"), ms(waiting + max(compute, wire - waiting))],
        [Text("step without overlap", "单步，通信与计算不重叠"), ms(compute + wire)],
    ]
    notes = [
        say(
            "a real step lies between the last two: compute {}, communication predicted for the planned cluster",
            "实际单步介于最后两行之间：计算为{}，通信为所规划集群上的预测",
            kind,
        )
    ]
    if waiting:
        notes.append(WAITING)
    if predicted is None and _profile(arguments) is not None:
        notes.append(
            Text(
                "compute is not predicted: the launches of the host bound this step",
                "不预测计算时间：该步受主机启动内核的时间限制",
            )
        )
    if arguments.micro_batches > 1:
        count = f"{arguments.micro_batches:,}"
        notes.append(say("a step with one of its {} micro batches", "只含 {} 个微批次之一的一步", count))
    title = Text("rehearse: time of a step", "rehearse：单步时间")
    return Table(title, [word(PART), Column(TIME, "ms")], rows, notes)


def predicted_compute(arguments: RehearseArguments) -> float | None:
    """Return the seconds of the rank's kernels on `--gpu`; None if they are not known, or if launches bound them."""
    run, profile = _sequences(arguments), _profile(arguments)
    found = plain_rank_seconds(run, arguments.mesh, profile) if profile else None
    return None if found is None else found.gradients + found.update


def _profile(arguments: RehearseArguments) -> GpuProfile | None:
    card = find_card(arguments.gpu)
    return profile_of(card, arguments.precision) if card else None


def _mib(size: float) -> str:
    return number(size / MIB, 3 if size < 100 * MIB else 1)

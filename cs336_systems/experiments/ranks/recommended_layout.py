"""The recommendation that `cs336 plan` ends with: the layout to take, or the smallest change with which one fits."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.commands import flags_named
from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments.ranks.layout_commands import command_of, is_trained, is_training, nearest_trained
from cs336_systems.experiments.ranks.layout_times import RankTime, plan_time, rank_time
from cs336_systems.experiments.ranks.plan_cells import (
    MOST_GPUS,
    STRATEGIES,
    Passes,
    fewest_gpus,
    fitting_layouts,
    impossible_layouts,
    layout_name,
    needed_memory,
    plan_fits,
    plans,
    possible_layouts,
    total,
    usual_layouts,
)
from cs336_systems.predict.fit import LARGER_GROUPS, gpu_bytes, usable_bytes
from cs336_systems.predict.gpus import CARDS
from cs336_systems.predict.model_flags import LIMITS
from cs336_systems.predict.strategy import Strategy
from cs336_systems.predict.training_cost import NO_COST, Cost
from cs336_systems.record import GIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.rows import ms, number, percent
from cs336_systems.text import Text, listed, say

SAME = 1.01
"""Times whose ratio is below this count as equal, because the prediction is not more accurate."""
UNUSED_SHARE = 1 / 3
"""Share of the memory of each of several GPUs that may stay unused without a remark."""
WORTHWHILE = 0.95
"""Share of a token's time below which flags that use more memory are named."""


def recommendation(cell: CellView, cost: Cost = NO_COST) -> Text:
    """Return the recommended layout and why, or the smallest change with which one fits: a sentence or two."""
    return _recommended(cell, *best_layout(cell), cost) if fitting_layouts(cell) else _nothing_fits(cell)


def step_size(cell: CellView) -> Text:
    """Return the tokens of a step, and the flags that change them."""
    batch, context, gpus = (cell.get(name) for name in ("batch_size", "context_length", "gpus"))
    return say(
        "A step has {} tokens: {} x --batch_size {} x --context_length {}; other values change times and cost.",
        "每步 {} 个 token：{} x --batch_size {} x --context_length {}；改变它们会改变时间与费用。",
        f"{gpus * batch * context:,}",
        Text(f"{gpus:,} GPU{'s' * (gpus != 1)}", f"{gpus:,} 张 GPU"),
        *(str(batch), str(context)),
    )


def command(cell: CellView) -> Text | None:
    """Return the command that trains with the recommended layout, or with the nearest that `cs336 train` has; None
    without one."""
    if not fitting_layouts(cell) or not is_training(cell.config):
        return None
    best, _ = best_layout(cell)
    strategy = Strategy.parse(best)
    nearest = nearest_trained(strategy)
    try:
        words = Text(command_of(cell.config, nearest))
    except UserError as error:
        why = Text(flags_named(error))
        return say("cs336 train cannot run {}: {}", "cs336 train 无法运行 {}：{}", layout_name(best), why)
    if nearest == strategy:
        return say("Train with it: {}", "训练命令：{}", words)
    fits = _smallest_fitting({**cell.config, "strategies": [nearest.name]}) is not None
    return say(
        "cs336 train does not have {}; the nearest that it has is {}, which {}: {}",
        "cs336 train 没有 {}；最接近的是 {}（{}）：{}",
        layout_name(best),
        layout_name(nearest.name),
        Text("fits as well", "也放得下") if fits else Text("does not fit", "放不下"),
        words,
    )


def best_layout(cell: CellView) -> tuple[str, Text]:
    """Return the layout that fits with the shortest step, and why; ties are broken by least communication, then least
    memory. Layouts that `cs336 train` does not have count only where there are no others.

    Steps are compared as predicted. Where only some are, the kernels of the others count as much as the slowest
    predicted ones, because fused kernels of whole layers are the fastest; and a predicted step wins a tie.
    """
    every = fitting_layouts(cell)
    fitting = [name for name in every if is_trained(cell.config, name)] if is_training(cell.config) else every
    fitting = fitting or every
    limit = Text("") if fitting == every else Text(" and that cs336 train supports", "且 cs336 train 支持")
    fits, fit = say("fits{}", "放得下{}", limit), say("fit{}", "放得下{}", limit)
    predicted = {name: time for name in fitting if (time := rank_time(cell, name)) is not None}
    times = {name: predicted.get(name) or _least_time(cell, name, predicted.values()) for name in fitting}

    def shortest(names: Sequence[str], seconds: Callable[[RankTime], float]) -> list[str]:
        least = min(seconds(times[name]) for name in names)
        return [name for name in names if seconds(times[name]) <= SAME * least]

    fastest = shortest(fitting, lambda time: time.overlapped)
    fastest = [name for name in fastest if name in predicted] or fastest
    quietest = shortest(fastest, lambda time: time.sequential)
    if cell.get("gpus") == 1:
        return fitting[0], Text("on one GPU there is nothing to shard", "单张 GPU 无需切分")
    if len(fitting) == 1:
        return fitting[0], say("it is the only layout that {}", "只有它{}", fits)
    if len(fastest) == 1:
        why = say(
            "it has the shortest step of the {} layouts that {}", "在{1}的 {0} 种布局中单步最短", str(len(fitting)), fit
        )
        return fastest[0], why
    if len(quietest) == 1:
        why = say(
            "of the layouts that {}, it is among the fastest and communicates least",
            "在{}的布局中单步最短且通信最少",
            fit,
        )
        return quietest[0], why
    return min(quietest, key=lambda name: total(cell, name)), say(
        "no layout that {} has a shorter step or communicates less, and it leaves the most room",
        "在{}的布局中没有单步更短或通信更少的，且余量最大",
        fits,
    )


def _least_time(cell: CellView, name: str, predicted: Iterable[RankTime]) -> RankTime:
    """Return the time of a layout whose kernels are not predicted: at best that of its matmuls at the peak rate, or of
    the slowest kernels that are predicted."""
    passes = Passes.of(cell.variant(name))
    return RankTime.of(max((time.kernels for time in predicted), default=sum(passes.compute)), passes)


def _recommended(cell: CellView, best: str, why: Text, cost: Cost) -> Text:
    used, usable = total(cell, best), usable_bytes(cell.get("gpu_memory"))
    sizes = [number(size / GIB, 1) for size in (used, usable, usable - used)]
    said = say(
        "Recommended: {}, because {}. It needs {} of {} GiB usable on {} ({} GiB to spare), and a step takes {}.",
        "推荐 {0}：{1}。{4}需要 {2} GiB，可用 {3} GiB（余 {5} GiB）；单步 {6}。",
        layout_name(best),
        why,
        *(*sizes[:2], _each_gpu(cell), sizes[2]),
        _step(cell, best),
    )
    said = say("{}{}{}", "{}{}{}", said, _days_and_cost(cell, best, cost), _other_axes(cell, best))
    looks = cell.get("gpus") == 1 or usable - used > UNUSED_SHARE * usable
    unused = _unused_memory(cell, best) if looks else None
    return say("{}\n{}", "{}\n{}", said, unused) if unused else said


def _each_gpu(cell: CellView) -> Text:
    return Text("the GPU", "这张 GPU ") if cell.get("gpus") == 1 else Text("each GPU", "每张 GPU ")


def _days_and_cost(cell: CellView, best: str, cost: Cost) -> Text:
    """Return the days and the cost of a run with the recommended layout, if they are asked for."""
    if cost.tokens is None:
        return Text("", "")
    time = rank_time(cell, best)
    if time is None:
        return Text(" Its days and cost are not predicted.", "其天数与费用不作预测。")
    gpus = cell.get("gpus")
    days, *price = cost.cells(gpus * RunConfig.of(cell.config).tokens / time.overlapped, gpus)
    said = say(" {} tokens take {} days", "{} 个 token 需要 {} 天", f"{cost.tokens:,.0f}", days)
    if price:
        said = say("{} and cost {}", "{}，费用 {}", said, price[0])
    return say("{}.", "{}。", said)


def _unused_memory(cell: CellView, best: str) -> Text | None:
    """Name the flags with which the layout takes least time for a token, by using more memory; None if there are none
    that save time."""
    if not is_training(cell.config):
        return None
    is_predicted = rank_time(cell, best) is not None
    now = _token_seconds(cell.config, best, is_predicted=is_predicted)
    changes = list(_larger(cell.config, best, is_predicted=is_predicted))
    if now is None or not changes:
        return None
    least = min(seconds for _, seconds in changes)
    flags, seconds = next(found for found in changes if found[1] <= SAME * least)
    if seconds > WORTHWHILE * now:
        return None
    usable = usable_bytes(cell.get("gpu_memory"))
    words = Text(" ".join(f"--{name} {value}" for name, value in flags.items()))
    times = flags.get("batch_size", cell.get("batch_size")) // cell.get("batch_size")
    if times > 1:
        words = say("{} ({} times the tokens of a step)", "{}（每步 token 数为 {} 倍）", words, str(times))
    return say(
        "{} GiB of {} are unused: with {} a token takes {} of the time.",
        "{1}有 {0} GiB 未使用：用 {2} 时每个 token 的时间为现在的 {3}。",
        *(number((usable - total(cell, best)) / GIB, 1), _each_gpu(cell), words, number(seconds / now)),
    )


def _larger(config: Mapping[str, Any], layout: str, *, is_predicted: bool) -> Iterator[tuple[dict[str, int], float]]:
    """Yield flags that use more memory, with the seconds of a token, the least change first: without recomputation and
    with it, larger and larger batches, until they do not fit or save no time."""
    for group in dict.fromkeys((0, config["checkpoint_blocks"])):
        last, batch = math.inf, config["batch_size"]
        while last == math.inf or batch <= LIMITS["batch_size"]:
            flags = {"checkpoint_blocks": group, "batch_size": batch}
            seconds = _token_seconds({**config, **flags}, layout, is_predicted=is_predicted)
            if seconds is None:
                break
            yield {name: value for name, value in flags.items() if value != config[name]}, seconds
            if last <= SAME * seconds:
                break
            last, batch = seconds, 2 * batch


def _token_seconds(config: Mapping[str, Any], layout: str, *, is_predicted: bool) -> float | None:
    """Return the seconds that a GPU takes for a token, as predicted or with matmuls at the peak rate; None if the
    layout does not fit, or if its step is not predicted but must be."""
    (plan,) = plans({**config, "strategies": [layout]})
    time = plan_time(config, plan) if is_predicted else Passes.of_plan(plan)
    return time.overlapped / plan.workload.tokens if time and plan_fits(config, plan) else None


def _other_axes(cell: CellView, best: str) -> Text:
    """Return a remark on the layout's pipeline bubble, and why layouts with stages or context parallelism that fit are
    slower."""
    said = Text("", "")
    if (bubble := cell.variant(best).value("bubble_share")) is not None:
        said = say(" Its stages idle for {} of a step (bubble).", "其流水线气泡占单步的 {}。", percent(bubble))
    for name in fitting_layouts(cell):
        strategy, own = Strategy.parse(name), cell.variant(name)
        if name == best or strategy.pipeline * strategy.context == 1:
            continue
        reasons = []
        if (bubble := own.value("bubble_share")) is not None:
            reasons.append(say("a bubble of {}", "气泡占 {}", percent(bubble)))
        if strategy.context > 1:
            sent = sum(Passes.of(own).communication)
            reasons.append(say("{} ms of communication", "通信 {} ms", ms(sent)))
        said = say("{} {} fits as well, with {}.", "{}{} 也放得下，但{}。", said, layout_name(name), listed(reasons))
    return said


def _step(cell: CellView, name: str) -> Text:
    """Return the time of a step from predicted kernels, or else from matmuls at the GPU's peak rate."""
    predicted = rank_time(cell, name)
    times, work = predicted or Passes.of(cell.variant(name)), Text("matmuls at the peak rate", "峰值速率的矩阵乘")
    if predicted:
        work = Text("kernels (predicted)", "内核（预测）")
    shortest, longest = (number(s * 1e3, 0 if s >= 0.1 else 1) for s in (times.overlapped, times.sequential))
    if shortest != longest:
        return say(
            "{} to {} ms, with and without overlap of communication and {}",
            "{} 到 {} ms（通信与{}从完全重叠到完全不重叠）",
            *(shortest, longest, work),
        )
    if predicted:
        return Text(f"{shortest} ms")
    return say("at least {} ms ({})", "至少 {} ms（{}）", shortest, work)


# -- where nothing fits -----------------------------------------------------------------------------------------------


def _nothing_fits(cell: CellView) -> Text:
    said = _why_nothing_fits(cell)
    change = _smallest_change(cell.config)
    if change is None:
        return say("{} Take a smaller model or a shorter context.", "{}请使用更小的模型或更短的上下文。", said)
    said = say("{} The smallest change with which one fits: {}", "{}使其放得下的最小改动：{}", said, change)
    return say("{}\n{}", "{}\n{}", said, _on_these_gpus(cell)) if change.startswith("--gpu") else said


def _why_nothing_fits(cell: CellView) -> Text:
    possible = possible_layouts(cell)
    if not possible:
        name, why = next(iter(impossible_layouts(cell.config).items()))
        return say(
            "No layout fits: {} is impossible, because {}.", "没有布局放得下：{} 不可行（{}）。", layout_name(name), why
        )
    least = min(possible, key=lambda name: total(cell, name))
    sizes = (total(cell, least), usable_bytes(cell.get("gpu_memory")))
    return say(
        "No layout fits: the smallest, {}, needs {} GiB on each GPU, and {} GiB are usable.",
        "没有布局放得下：最小的 {} 每张 GPU 需要 {} GiB，而可用 {} GiB。",
        layout_name(least),
        *(number(size / GIB, 1) for size in sizes),
    )


def _on_these_gpus(cell: CellView) -> Text:
    """Return the flags with which a layout fits on the GPUs that were asked for, or that there are none."""
    gpus = f"{cell.get('gpus'):,}"
    flags = _shorter_context(cell.config)
    if gpus == "1":
        lines = (
            [say("On this one a shorter context fits: {}", "在这一张上可用更短的上下文：{}", flags)] if flags else []
        )
        if is_training(cell.config):
            lines.append(
                Text(
                    "cs336 optimize also tries the host's memory and, with --allow bf16_state, less optimizer state.",
                    "cs336 optimize 还会尝试主机内存；加 --allow bf16_state 则尝试更小的优化器状态。",
                )
            )
        if lines:
            return listed(lines, ("\n", "\n"))
        return Text("On this one only a smaller model fits.", "在这一张上只有更小的模型才放得下。")
    if flags:
        return say("On these {} a shorter context fits: {}", "在这 {} 张 GPU 上可用更短的上下文：{}", gpus, flags)
    return say(
        "On these {} no batch, context or recomputation is small enough; only a smaller model fits.",
        "在这 {} 张 GPU 上，任何批次、上下文或重算都不够小，只有更小的模型才放得下。",
        gpus,
    )


def _shorter_context(config: Mapping[str, Any]) -> str | None:
    """Return the flags of the longest halved context with which one of the usual layouts fits."""
    every = {**_SAVING, "batch_size": 1}
    length = RunConfig.of(config).model.context_length // 2
    while length:
        shorter = {**config, "model": {**config["model"], "context_length": length}}
        shorter["strategies"] = _usual(shorter)
        for names in (("batch_size",), tuple(every)):
            flags = {name: every[name] for name in names if config.get(name) != every[name]}
            if found := _smallest_fitting({**shorter, **flags}):
                layout = {"strategy": found} if config["gpus"] > 1 else {}
                return _as_flags({**flags, "context_length": length, **layout})
        length //= 2
    return None


def _as_flags(values: Mapping[str, Any]) -> str:
    return " ".join(f"--{name} {_FLAGS.get(value, value)}" for name, value in values.items())


def _smallest_change(config: Mapping[str, Any]) -> str | None:
    """Return the flags with which a layout fits: flags without cost first, then those that cost time, then more or
    larger GPUs."""
    for flags in _changes(config):
        if _smallest_fitting({**config, **flags}) is not None:
            return _as_flags(flags)
    return _other_layout(config) or _more_gpus(config) or _larger_gpu(config)


_SAVING = {"attention": "auto", "fast": "kernels,loss", "checkpoint_blocks": 1}
"""Settings of a step that save memory, the fastest first."""
_FLAGS = {"kernels,loss": "on"}
"""Values of settings as flags spell them."""


def _changes(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings that save memory, one by one and together; then smaller batches without and with all of these
    settings."""
    saving = {name: value for name, value in _SAVING.items() if config.get(name) != value}
    yield from ({name: value} for name, value in saving.items())
    yield saving
    if config.get("checkpoint_blocks") in (0, 1):
        yield from ({**saving, "checkpoint_blocks": blocks} for blocks in LARGER_GROUPS)
    yield from ({**more, "batch_size": _largest_batch({**config, **more})} for more in ({}, saving))


def _largest_batch(config: Mapping[str, Any]) -> int:
    """Return the largest batch with which a layout fits, below that of `config`; 1 if none does."""
    fits, too_large = 1, config["batch_size"]
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if _smallest_fitting({**config, "batch_size": middle}) is None:
            too_large = middle
        else:
            fits = middle
    return fits


def _smallest_fitting(config: Mapping[str, Any]) -> str | None:
    """Return the layout that fits with the least memory, or None."""
    try:
        impossible = impossible_layouts(config)
        possible = [plan for plan in plans(config) if plan.strategy.name not in impossible]
        found = {plan.strategy.name: needed_memory(config, plan) for plan in possible if plan_fits(config, plan)}
    except UserError:  # settings that do not go together
        return None
    return min(found, key=lambda name: found[name]) if found else None


def _other_layout(config: Mapping[str, Any]) -> str | None:
    """Return a layout that was not asked for, on the same GPUs."""
    fitting = _smallest_fitting({**config, "strategies": _usual(config)})
    return f"--strategy {fitting}" if fitting else None


def _usual(config: Mapping[str, Any]) -> list[str]:
    """Return the usual layouts that may be advised: of a training step those that `cs336 train` has."""
    names = usual_layouts(config["gpus"], RunConfig.of(config).model, config["count"], config["node"])
    return [name for name in names if _may_be_advised(config, Strategy.parse(name))]


def _may_be_advised(config: Mapping[str, Any], strategy: Strategy) -> bool:
    return not is_training(config) or nearest_trained(strategy) == strategy


def _more_gpus(config: Mapping[str, Any]) -> str | None:
    """Return the fewest GPUs on which a layout fits, of those asked for and of the usual ones that `cs336 train`
    has."""
    needed: dict[str, int] = {}
    model = RunConfig.of(config).model
    was_asked = config["strategies"] != usual_layouts(config["gpus"], model, config["count"], config["node"])
    asked = config["strategies"] if was_asked else _usual(config)
    usual = (name for name in STRATEGIES if _may_be_advised(config, Strategy.parse(name)))
    for strategy in map(Strategy.parse, (*asked, *usual)):
        own = {**config, "gpus": strategy.group * strategy.replicate, "strategies": [strategy.name]}
        if strategy.pipeline > model.num_layers or impossible_layouts(own):
            continue
        (plan,) = plans(own)
        fewest = fewest_gpus(own, plan)
        if fewest is not None and config["gpus"] < fewest <= MOST_GPUS:
            needed[strategy.name] = fewest
    if not needed:
        return None
    best = min(needed, key=lambda name: needed[name])
    return f"--gpus {needed[best]} --strategy {best}"


def _larger_gpu(config: Mapping[str, Any]) -> str | None:
    """Return the known GPU with the least memory on which a layout fits."""
    by_memory = sorted(CARDS, key=lambda name: (gpu_bytes(name), CARDS[name].link is None))
    fitting = (name for name in by_memory if _smallest_fitting({**config, "gpu_memory": gpu_bytes(name)}))
    return next((f"--gpu {name}" for name in fitting), None)

"""What each experiment shows, in sentences computed from its cells, English and Chinese at once.

A sentence is a function of the cells of one machine that answers a `Text`, or None where the data do not say it.
Numbers are formatted once and put into both languages by `say`. Missing metrics, failed cells and odd values cost
sentences, never an exception: a report must come out of whatever a run left behind.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, TypeVar

from cs336_systems.config import FAST_PARTS, MODES
from cs336_systems.kernel_classes import MATMUL, OUTPUT, SCORES, SOFTMAX
from cs336_systems.record import BUS_FACTOR, GIB, MIB, steady_from
from cs336_systems.report import parallel
from cs336_systems.report.attention import OURS, Source
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Text
from cs336_systems.report.kernels import SOFTMAX_FLOPS, kind_seconds, phases_of, rows_of
from cs336_systems.report.layout import FIELDS, as_text, gib, kernel_ms, ms, number, percent, row_name, varying
from cs336_systems.report.words import in_chinese, settings_in_chinese

MOST = 3
"""Sentences for one machine."""

Cells = Sequence[CellView]
Sentence = Callable[[Cells], Text | None]
Given = TypeVar("Given")
Answer = TypeVar("Answer")


def findings(experiment: str, cells: Sequence[CellView]) -> list[Text]:
    """Up to three sentences for each machine; none of an experiment that is not known or of which nothing went well."""
    machines: dict[str, list[CellView]] = {}
    for cell in cells:
        machine = _safely(lambda cell: cell.machine, cell) if cell.metrics else None
        if machine:
            machines.setdefault(machine, []).append(cell)
    found = []
    for machine, chosen in machines.items():
        texts = [text for make in _SENTENCES.get(experiment, ()) if (text := _safely(make, chosen))][:MOST]
        found += [say("{}: {}", "{}：{}", machine, text) for text in texts] if len(machines) > 1 else texts
    return found


_ODD = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
"""What data of another shape than expected can lead to."""


def _safely(make: Callable[[Given], Answer], given: Given) -> Answer | None:
    try:
        return make(given)
    except _ODD:
        return None


# -- words ------------------------------------------------------------------------------------------------------------


def say(en: str, zh: str, *values: str | Text) -> Text:
    """One template for each language, the same values in both; a value that is a word brings both languages."""
    texts = [value if isinstance(value, Text) else Text(value) for value in values]
    return Text(en.format(*(text.en for text in texts)), zh.format(*(text.in_("zh") for text in texts)))


def _listed(values: Iterable[str | Text]) -> Text:
    texts = [value if isinstance(value, Text) else Text(value) for value in values]
    return Text(", ".join(text.en for text in texts), "、".join(text.in_("zh") for text in texts))


def _and(first: Text | None, second: Text | None) -> Text | None:
    """Two halves of a sentence, where both can be said."""
    if first is None or second is None:
        return first or second
    return say("{}; {}", "{}；{}", first, second)


def _end(text: Text | None) -> Text | None:
    """Begins with a capital, unless with a name, and ends with a full stop."""
    if text is None:
        return None
    first = text.en.split(maxsplit=1)[0].rstrip(",:;")
    en = text.en[:1].upper() + text.en[1:] if first.isalpha() else text.en
    # A bracket of Chinese has its space built in.
    return Text(f"{en}.", re.sub(r"(?<=）) (?=[\u4e00-\u9fff])", "", f"{text.in_('zh')}。"))


def _sentence(make: Sentence) -> Sentence:
    return lambda cells: _end(make(cells))


def _word(text: str) -> Text:
    return Text(text, in_chinese(text))


MODE_WORDS = {
    "inference": Text("inference", "推理"),
    "forward": Text("forward", "前向"),
    "forward-backward": Text("forward and backward", "前向加后向"),
    "train-step": Text("training step", "训练步"),
}


def _in_mode(mode: Any) -> Text:
    found = MODE_WORDS.get(str(mode), Text("step", "一步"))
    return Text(f"a {found.en}", found.zh) if found.en.endswith("step") else found


def _many(ratio: float) -> str:
    """As many digits as tell it from 1."""
    return number(ratio, 0 if ratio >= 10 else 1 if ratio >= 1.15 else 2)


# -- cells ------------------------------------------------------------------------------------------------------------


def _value(cell: CellView, metric: str) -> float | None:
    """The mean, where it is a number above 0: nothing that is measured here can be less."""
    found = _safely(lambda cell: cell.value(metric), cell)
    return found if found is not None and isfinite(found) and found > 0 else None


def _median(cell: CellView, metric: str) -> float | None:
    samples = cell.metrics[metric].numbers if metric in cell.metrics else []
    found = statistics.median(samples) if samples else 0.0
    return found if isfinite(found) and found > 0 else None


def _with(cells: Iterable[CellView], *metrics: str) -> list[CellView]:
    """Those that went well and have all of these."""
    return [cell for cell in cells if cell.ok and all(_value(cell, metric) for metric in metrics)]


def _scale(cell: CellView) -> float:
    width, layers = cell.get("d_model"), cell.get("num_layers")
    return width * width * layers if isinstance(width, int) and isinstance(layers, int) else 0


def _size(cell: CellView) -> str:
    return as_text(cell.get("size")) or cell.name or "?"


def _naming(cells: Cells) -> Callable[[CellView], Text]:
    """What a cell's row is called among these."""
    shown = varying(cells)

    def name(cell: CellView) -> Text:
        text = row_name(cell, shown) or _size(cell)
        return Text(text, settings_in_chinese(text))

    return name


def _settings(cell: CellView, *without: str) -> tuple[str, ...]:
    return tuple(as_text(cell.get(name)) for name in FIELDS if name not in without)


def _pairs(cells: Cells, field: str, baseline: Any, metric: str = "step_time") -> list[tuple[CellView, CellView]]:
    """(cell, the one that differs from it only in having the baseline), by size."""
    fine = sorted(_with(cells, metric), key=_scale)
    bases = {_settings(cell, field): cell for cell in fine if cell.get(field) == baseline}
    own = [cell for cell in fine if cell.get(field) != baseline]
    return [(cell, bases[key]) for cell in own if (key := _settings(cell, field)) in bases]


def _speed_up(pair: tuple[CellView, CellView], metric: str = "step_time") -> float:
    cell, base = pair
    return (_value(base, metric) or 0.0) / (_value(cell, metric) or 1.0)


def _range(values: Sequence[float], show: Callable[[float], str]) -> Text:
    least, most = show(min(values)), show(max(values))
    return Text(least) if least == most else say("{} to {}", "{} 到 {}", least, most)


def _extremes(found: Sequence[tuple[float, Text]], show: Callable[[float], str]) -> Text:
    """The least and the most, each with its name."""
    (least, least_name), (most, most_name) = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
    if len(found) == 1:
        return say("{} ({})", "{}（{}）", show(least), least_name)
    return say("{} ({}) to {} ({})", "{}（{}）到 {}（{}）", show(least), least_name, show(most), most_name)


# -- steps ------------------------------------------------------------------------------------------------------------


def _longest_mode(cells: Cells) -> list[CellView]:
    """Whole training steps where there are any, by size."""
    fine = sorted(_with(cells, "step_time"), key=_scale)
    modes = [cell.get("mode") for cell in fine]
    mode = next((mode for mode in reversed(MODES) if mode in modes), None)
    return [cell for cell in fine if cell.get("mode") == mode]


def _step(cells: Cells) -> Text | None:
    fine = _longest_mode(cells)
    if not fine:
        return None
    large = fine[-1]
    small = next(cell for cell in fine if _settings(cell, "size") == _settings(large, "size"))
    if _scale(small) < _scale(large):
        return _and(_by_size(small, large, _naming(fine)), _backward(large))
    first = min(fine, key=lambda cell: _value(cell, "step_time") or 0.0)
    return _and(_by_speed(first, fine), _backward(first))


def _backward(cell: CellView) -> Text | None:
    forward, backward = (_value(cell, f"{phase}_time") for phase in ("forward", "backward"))
    if not forward or not backward:
        return None
    return say("backward takes {} times forward", "后向是前向的 {} 倍", _many(backward / forward))


def _by_size(small: CellView, large: CellView, name: Callable[[CellView], Text]) -> Text:
    times = [_value(cell, "step_time") or 0.0 for cell in (large, small)]
    return say(
        "{0}'s {1} takes {2} ms, {3} times {4}'s ({5} ms)",
        "{0} 的{1}为 {2} ms，是 {4}（{5} ms）的 {3} 倍",
        *(name(large), MODE_WORDS.get(str(large.get("mode")), Text("step", "一步")), ms(times[0])),
        *(_many(times[0] / times[1]), name(small), ms(times[1])),
    )


def _by_speed(first: CellView, fine: Cells) -> Text:
    last = max(fine, key=lambda cell: _value(cell, "step_time") or 0.0)
    times = [_value(cell, "step_time") or 0.0 for cell in (first, last)]
    if len(fine) == 1:
        rate = number(first.tokens_per_second, 0)
        return say(
            "a step of {} takes {} ms: {} tokens/s", "{} 每步 {} ms：{} tokens/s", first.name, ms(times[0]), rate
        )
    name = _naming(fine)
    return say(
        "of {0} configurations {1} is the fastest with {2} ms a step, {3} times as fast as {4} ({5} ms)",
        "{0} 个配置中 {1} 最快，每步 {2} ms，速度是 {4}（{5} ms）的 {3} 倍",
        *(str(len(fine)), name(first), ms(times[0]), _many(times[1] / times[0]), name(last), ms(times[1])),
    )


def _mfu(cells: Cells) -> Text | None:
    fine = _longest_mode(cells)
    name = _naming(fine)
    found = [(cell.mfu, name(cell)) for cell in fine if cell.mfu and isfinite(cell.mfu)]
    return say("MFU: {}", "MFU 为 {}", _extremes(found, percent)) if found else None


def _prediction(cells: Cells) -> Text | None:
    fine = _with(cells, "peak_memory", "predicted_memory")
    if not fine:
        return None
    worst = max(fine, key=_off)
    values = [percent(_off(worst), 2), *(gib(_value(worst, name)) for name in ("predicted_memory", "peak_memory"))]
    if len(fine) == 1:
        return say(
            "the predicted peak is off by {}: {} GiB, measured {}", "预测的峰值误差 {}：{} GiB，实测 {}", *values
        )
    return say(
        "the worst of {0} predicted peaks is off by {2} ({1}: {3} GiB, measured {4})",
        "{0} 个峰值预测的最大误差为 {2}（{1}：{3} GiB，实测 {4}）",
        str(len(fine)),
        _naming(fine)(worst),
        *values,
    )


def _off(cell: CellView) -> float:
    return abs(cell.memory_error or 0.0)


def _first_step(cells: Cells) -> Text | None:
    """Of every size that was run without warm-up, against its run with the most."""
    fine = sorted(_with(cells, "step_time"), key=_scale)
    said = []
    for cold in (cell for cell in fine if cell.get("warmup_steps") == 0):
        steady = _median(_warmest(cold, fine), "step_time")
        first = cold.metrics["step_time"].numbers[0]
        if steady and isfinite(first):
            values = (_size(cold), _many(first / steady), ms(first), ms(steady))
            said.append(
                say("{1} times as long for {0} ({2} against {3} ms)", "{0} 为 {1} 倍（{2} 与 {3} ms）", *values)
            )
    if not said:
        return None
    return say(
        "without warm-up the first step takes, against a steady one, {}",
        "不预热时首步与稳定一步之比：{}",
        _listed(said),
    )


def _warmest(cell: CellView, cells: Cells) -> CellView:
    """The run of the same with the most warm-up steps."""
    same = [other for other in cells if _settings(other, "warmup_steps") == _settings(cell, "warmup_steps")]
    return max(same, key=lambda other: other.get("warmup_steps"))


def _warm_mean(cells: Cells) -> Text | None:
    """What the cold first step does to the mean, where it does most."""
    fine = _with(cells, "step_time")
    pairs = [(_warmest(cell, fine), cell) for cell in fine if cell.get("warmup_steps") == 0]
    warm, cold = max(pairs, key=_speed_up)
    if warm is cold:
        return None
    means = [_value(cell, "step_time") or 0.0 for cell in (cold, warm)]
    return say(
        "it puts the mean of {0} off by {1}: {2} ms, after {4} warm-up steps {3} ms",
        "它使 {0} 的均值偏差 {1}：{2} ms，预热 {4} 步后为 {3} ms",
        *(_size(cold), percent(means[0] / means[1] - 1, 0), ms(means[0]), ms(means[1]), str(warm.get("warmup_steps"))),
    )


def _steady(cells: Cells) -> Text | None:
    fine = _with(cells, "step_time")
    found = []
    for cell in fine:
        steps = [r for name in ("warmup_time", "step_time") if name in cell.metrics for r in cell.metrics[name].numbers]
        found.append((steady_from(steps), cell))
    known = [(first + 1, cell) for first, cell in found if first is not None]
    if not known:
        return None
    latest, cell = max(known, key=lambda pair: pair[0])
    return say(
        "of {} runs {} settle, the last from step {} on ({})",
        "{} 次运行中 {} 次稳定，最晚从第 {} 步起（{}）",
        *(str(len(found)), str(len(known)), str(latest), _naming(fine)(cell)),
    )


def _precision(cells: Cells) -> Text | None:
    pairs = _pairs(cells, "precision", "fp32")
    said = None
    for precision in dict.fromkeys(cell.get("precision") for cell, _ in pairs):
        chosen = [pair for pair in pairs if pair[0].get("precision") == precision]
        own = say("{} speeds up {}", "{} 的加速：{}", precision, _speed_ups(chosen))
        said = _and(said, _with_memory(own, chosen, "fp32"))
    return said


def _speed_ups(pairs: Sequence[tuple[CellView, CellView]]) -> Text:
    """Of the largest size and the smallest."""
    name = _naming([cell for cell, _ in pairs])
    chosen = [pairs[-1], *([pairs[0]] if len(pairs) > 1 else [])]
    return _listed(say("{} {}x", "{} {} 倍", name(pair[0]), _many(_speed_up(pair))) for pair in chosen)


def _with_memory(said: Text, pairs: Sequence[tuple[CellView, CellView]], base: str) -> Text:
    ratios = [1 / _speed_up(pair, "peak_memory") for pair in pairs if len(_with(pair, "peak_memory")) == 2]
    if not ratios:
        return said
    times = _range(ratios, "{:.2f}".format)
    return say("{0}, with {1} times the memory of {2}", "{0}，显存为 {2} 的 {1} 倍", said, times, base)


def _compile(cells: Cells) -> Text | None:
    pairs = _pairs(cells, "compile", False)
    if not pairs:
        return None
    return _with_memory(
        say("torch.compile speeds up {}", "torch.compile 的加速：{}", _speed_ups(pairs)), pairs, "eager"
    )


def _compile_cost(cells: Cells) -> Text | None:
    pairs = [pair for pair in _pairs(cells, "compile", False) if _value(pair[0], "compile_time")]
    if not pairs:
        return None
    worst, _ = max(pairs, key=lambda pair: _value(pair[0], "compile_time") or 0.0)
    said = say(
        "compiling takes up to {} s ({})",
        "编译最多用 {} s（{}）",
        *(number(_value(worst, "compile_time"), 1), _size(worst)),
    )
    cell, base = pairs[-1]
    saved = (_value(base, "step_time") or 0.0) - (_value(cell, "step_time") or 0.0)
    if saved <= 0:
        return said
    steps = number((_value(cell, "compile_time") or 0.0) / saved, 0)
    return _and(said, say("for {} {} steps earn it back", "{} 需 {} 步才能收回", _size(cell), steps))


# -- the fast step ----------------------------------------------------------------------------------------------------


def _works(cells: Cells) -> list[list[CellView]]:
    """Cells of the same model, context and batch together, the smallest first."""
    found: dict[tuple, list[CellView]] = {}
    for cell in sorted(_with(cells, "step_time"), key=_scale):
        found.setdefault(_settings(cell, "fast", "compile", "model_factory"), []).append(cell)
    return list(found.values())


def _fast(work: Cells) -> CellView | None:
    return next((cell for cell in work if cell.get("fast") == "on"), None)


def _rival(work: Cells) -> tuple[Text, CellView] | None:
    """What the fast step is compared with: another's model, else the plain step."""
    for cell in work:
        if cell.get("model_factory"):
            name = as_text(cell.get("model_factory"))
            llama = Text("the compiled Llama of transformers", "编译后的 transformers Llama")
            return (llama if name.startswith("llama:") and cell.get("compile") else Text(name)), cell
    plain = [cell for cell in work if cell.get("fast") == "off" and not cell.get("compile")]
    return (Text("the plain step", "普通的一步"), plain[0]) if plain else None


def _all_parts(cells: Cells) -> Text | None:
    work = next((work for work in _works(cells) if _fast(work) and _rival(work)), [])
    fast, rival = _fast(work), _rival(work)
    if fast is None or rival is None:
        return None
    name, other = rival
    times = [_value(cell, "step_time") or 0.0 for cell in (fast, other)]
    said = say(
        "all parts together take {0} ms for {1}, {2}x less than {3} ({4} ms)",
        "{1} 全部启用时每步 {0} ms，速度是{3}（{4} ms）的 {2} 倍",
        *(ms(times[0]), _size(fast), _many(times[1] / times[0]), name, ms(times[1])),
    )
    memory = [_value(cell, "peak_memory") for cell in (fast, other)]
    if not all(memory):
        return said
    return say("{}, with {} GiB against {}", "{}，显存 {} GiB，后者 {}", said, *map(gib, memory))


def _other_works(cells: Cells) -> Text | None:
    """The same comparison for all but the first."""
    said = []
    chosen = [work for work in _works(cells) if _fast(work) and _rival(work)][1:]
    for work in chosen:
        fast, rival = _fast(work), _rival(work)
        if fast and rival:
            shape = f"{_size(fast)} {fast.get('batch_size')} x {fast.get('context_length')}"
            times = [_value(cell, "step_time") or 0.0 for cell in (fast, rival[1])]
            said.append(
                say("{1}x for {0} ({2} ms)", "{0} 为 {1} 倍（{2} ms）", shape, _many(times[1] / times[0]), ms(times[0]))
            )
    return say("for larger work it is {}", "更大的工作量下，{}", _listed(said)) if said else None


def _missed_part(cells: Cells) -> Text | None:
    """Each part left out alone: what the step then takes."""
    for work in _works(cells):
        fast = _fast(work)
        without: dict[str, float] = {}
        for cell in work:
            left = [part for part in FAST_PARTS if part not in str(cell.get("fast")).split(",")]
            if len(left) == 1:
                without[left[0]] = _value(cell, "step_time") or 0.0
        if fast and without:
            ranked = sorted(without, key=lambda part: -without[part])
            each = _listed(say("{} {} ms", "{} {} ms", part, ms(without[part])) for part in ranked)
            return say("of {} with one part left out, a step takes: {}", "{} 每步，缺某一部分时：{}", _size(fast), each)
    return None


# -- clocks and kernels -----------------------------------------------------------------------------------------------


def _do_bench(cells: Cells) -> Text | None:
    found = []
    for cell in sorted((cell for cell in cells if cell.ok), key=_scale):
        for phase in ("forward", "backward", "step"):
            wall, other = (_value(cell, name) for name in (f"{phase}_time", f"do_bench_{phase}_time"))
            if wall and other:
                found.append((abs(wall / other - 1), say("{} {}", "{} {}", _size(cell), _word(phase)), cell))
    if not found:
        return None
    off, name, _ = max(found, key=lambda row: row[0])
    said = say(
        "the clock and do_bench differ by {} at most ({})", "墙钟与 do_bench 最多相差 {}（{}）", percent(off, 2), name
    )
    largest = found[-1][2]
    own = [off for off, _, cell in found if cell is largest]
    if len(own) == len(found):
        return said
    return _and(said, say("for {} by {}", "{} 最多 {}", _size(largest), percent(max(own), 2)))


def _matmul_share(cells: Cells) -> Text | None:
    said = []
    fine = [cell for cell in cells if cell.ok]
    for mode in dict.fromkeys(cell.get("mode") for cell in fine):
        chosen = [cell for cell in fine if cell.get("mode") == mode]
        name = _naming(chosen)
        shares = [(share, name(cell)) for cell in chosen if (share := _shares(cell).get(MATMUL))]
        if shares:
            said.append(say("{1} in {0}", "{0}中 {1}", _in_mode(mode), _extremes(shares, percent)))
    return say("matrix products take, of kernel time, {}", "矩阵乘占内核时间：{}", _listed(said)) if said else None


def _shares(cell: CellView) -> Mapping[str, float]:
    """Kind -> share of a step's kernel time."""
    seconds = kind_seconds(cell, phases_of(cell))
    total = sum(seconds.values())
    return {kind: found / total for kind, found in seconds.items()} if total else {}


def _other_kinds(cells: Cells) -> Text | None:
    """The most that each other kind takes of a step, where that is not little."""
    fine = [cell for cell in cells if cell.ok]
    mode = next((mode for mode in reversed(MODES) if any(cell.get("mode") == mode for cell in fine)), None)
    chosen = [cell for cell in fine if cell.get("mode") == mode]
    most: dict[str, tuple[float, CellView]] = {}
    for cell in chosen:
        for kind, share in _shares(cell).items():
            if kind != MATMUL and share > max(0.02, most.get(kind, (0.0, cell))[0]):
                most[kind] = share, cell
    name = _naming(chosen)
    each = [
        say("{} up to {} ({})", "{}最多 {}（{}）", _word(kind), percent(share), name(cell))
        for kind, (share, cell) in sorted(most.items(), key=lambda item: -item[1][0])[:3]
    ]
    return say("what else counts in {}: {}", "{}中其余的类别：{}", _in_mode(mode), _listed(each)) if each else None


def _idle(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    name = _naming(fine)
    found = []
    for cell in fine:
        events, busy = _value(cell, "forward_event_time"), _value(cell, "busy_time: forward")
        if events and busy:
            found.append((max(0.0, 1 - busy / events), name(cell)))
    return say("in forward the GPU is idle for {}", "前向中 GPU 空闲 {}", _extremes(found, percent)) if found else None


def _attention_ratio(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    name = _naming(fine)
    times, flops = [], []
    for cell in fine:
        parts = _attention_parts(cell)
        if parts[SCORES, True] and parts[SOFTMAX, False]:
            times.append((parts[SCORES, True] / parts[SOFTMAX, False], name(cell)))
            flops.append(2 * cell.get("d_model") / cell.get("num_heads") / SOFTMAX_FLOPS)
    if not times:
        return None
    return say(
        "the scores' matmul has {} times the FLOPs of softmax, but takes only {} times as long",
        "scores 矩阵乘的 FLOPs 是 softmax 的 {} 倍，时间却只有 {} 倍",
        *(_range(flops, "{:.1f}".format), _extremes(times, "{:.2f}".format)),
    )


def _attention_parts(cell: CellView) -> dict[tuple[str, bool], float]:
    """(part, whether it is a matmul) -> seconds in forward; softmax has no matmul."""
    found = {(part, matmul): 0.0 for part in (SCORES, SOFTMAX, OUTPUT) for matmul in (True, False)}
    for part, kind, seconds in rows_of(cell, "part", "forward"):
        found[part, kind == MATMUL] += seconds
    return found


def _around_matmuls(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    name = _naming(fine)
    shares = []
    for cell in fine:
        parts = _attention_parts(cell)
        rest = sum(seconds for (_, matmul), seconds in parts.items() if not matmul)
        if rest:
            shares.append((rest / sum(parts.values()), name(cell)))
    if not shares:
        return None
    return say(
        "scale, mask and softmax take {} of the time of attention",
        "缩放、掩码与 softmax 占注意力时间的 {}",
        _extremes(shares, lambda share: percent(share, 0)),
    )


def _filled(cells: Cells) -> Text | None:
    """How much of forward and backward kernels fill."""
    found = []
    for cell in sorted((cell for cell in cells if cell.ok), key=_scale):
        pairs = [
            (_value(cell, f"busy_time: {phase}"), _value(cell, f"{phase}_event_time"))
            for phase in ("forward", "backward")
        ]
        busy = [(kernels, events) for kernels, events in pairs if kernels and events]
        if busy:
            found.append((sum(row[0] for row in busy) / sum(row[1] for row in busy), Text(_size(cell))))
    if not found:
        return None
    return say(
        "kernels fill {} of forward and backward by CUDA events: the rest is the GPU waiting for the host",
        "以 CUDA event 计，内核占前向与后向的 {}：其余是 GPU 在等主机",
        _extremes(found, percent),
    )


def _profiled(cells: Cells) -> Text | None:
    found = [
        ((_value(cell, "profiled_step_time") or 0.0) / (_value(cell, "step_time") or 1.0), Text(_size(cell)))
        for cell in _with(cells, "profiled_step_time", "step_time")
    ]
    if not found:
        return None
    show = "{:.2f}".format
    return say("a step that is profiled takes {} times as long", "被分析时一步为 {} 倍长", _extremes(found, show))


def _nsys(cells: Cells) -> Text | None:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        for phase in phases_of(cell):
            theirs, ours = _value(cell, f"nsys_busy_time: {phase}"), _value(cell, f"busy_time: {phase}")
            if theirs and ours:
                found.append((abs(ours / theirs - 1), say("{} {}", "{} {}", _size(cell), _word(phase))))
    if not found:
        return None
    off, name = max(found, key=lambda pair: pair[0])
    return say(
        "torch.profiler and nsys differ by {} at most ({})",
        "torch.profiler 与 nsys 最多相差 {}（{}）",
        percent(off, 2),
        name,
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def _savers(cells: Cells) -> Text | None:
    """Predictions of what saves memory, apart from the plain ones."""
    fine = _with(cells, "peak_memory", "predicted_memory")
    saving = [cell for cell in fine if cell.get("attention") != "reference" or cell.get("checkpoint_blocks")]
    plain = [cell for cell in fine if cell not in saving]
    if not saving or not plain:
        return None
    return say(
        "those with fused attention or checkpointing ({}) are off by {} at most, the plain ones ({}) by {}",
        "使用融合注意力或检查点的（{} 个）最大误差 {}，普通的（{} 个）{}",
        *(str(len(saving)), percent(max(map(_off, saving)), 2), str(len(plain)), percent(max(map(_off, plain)), 2)),
    )


def _composition(cells: Cells) -> Text | None:
    fine = _with(cells, "peak_memory")
    highest = max(fine, key=lambda cell: _value(cell, "peak_memory") or 0.0)
    peak = _value(highest, "peak_memory") or 1.0
    parts = sorted(highest.rows("part_memory", 2), key=lambda part: -part[1])[:3]
    if not parts:
        return None
    shares = _listed(say("{} {}", "{} {}", percent(size / peak, 0), _word(str(label))) for label, size in parts)
    return say(
        "at the highest peak, {} GiB ({}), are {}",
        "最高的峰值 {} GiB（{}）中：{}",
        *(gib(peak), _naming(fine)(highest), shares),
    )


def _largest_block(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    blocks = [(row, cell) for cell in fine for row in cell.rows("largest_blocks", 5)[:1]]
    if not blocks:
        return None
    (size, label, _, what, line), cell = max(blocks, key=lambda pair: pair[0][0])
    made = say(", made at {}", "，由 {} 产生", str(line)) if line else Text("")
    return say(
        "the largest block of a step is {} MiB of {}: {}{} ({})",
        "一步中最大的块为 {} MiB 的{}：{}{}（{}）",
        *(number(size / MIB, 1), _word(str(label)), str(what), made, _naming(fine)(cell)),
    )


def _least_memory(cells: Cells) -> Text | None:
    said = None
    for precision in dict.fromkeys(cell.get("precision") for cell in cells):
        chosen = [cell for cell in cells if cell.get("precision") == precision]
        said = _and(said, _best_group(str(precision), chosen))
    return said


def _best_group(precision: str, cells: Cells) -> Text | None:
    fine = [cell for cell in _with(cells, "peak_memory") if cell.get("checkpoint_blocks")]
    if not fine:
        return None
    least = min(_value(cell, "peak_memory") or 0.0 for cell in fine)
    # The simplest of those that are equal to a thousandth.
    near = [cell for cell in fine if (_value(cell, "peak_memory") or 0.0) <= 1.001 * least]
    best = min(near, key=lambda cell: (cell.get("inner") or 0, cell.get("checkpoint_blocks")))
    said = say(
        "in {} groups of {} need the least memory, {} GiB",
        "{} 下每组 {} 块最省显存，{} GiB",
        *(precision, str(best.get("checkpoint_blocks")), gib(_value(best, "peak_memory"))),
    )
    whole = _without_checkpoints(cells)
    return say("{}, against {}", "{}，{}", said, whole) if whole else said


def _without_checkpoints(cells: Cells) -> Text | None:
    for cell in (cell for cell in cells if not cell.get("checkpoint_blocks")):
        if peak := _value(cell, "peak_memory"):
            return say("{} without", "不重计算为 {}", gib(peak))
        if needed := re.match(r"oom: needs ([\d.,]+) GiB", cell.status):
            return say("{} without, which do not fit", "不重计算为 {}，放不下", needed[1])
    return None


def _recompute_time(cells: Cells) -> Text | None:
    """What recomputing costs against none, and nesting against the same groups without it."""
    fine = _with(cells, "step_time")
    flat = {_settings(cell): cell for cell in fine if not cell.get("inner")}
    nested = [_over(cell, base) for cell in fine if cell.get("inner") and (base := flat.get(_settings(cell)))]
    grouped = [_over(cell, base) for cell, base in _pairs(list(flat.values()), "checkpoint_blocks", 0)]
    said = None
    for found, en, zh in (
        (grouped, "recomputing makes a step {} times as long", "重计算使单步时间为 {} 倍"),
        (nested, "nesting groups once more makes a step {} times as long", "组内再嵌套一层使单步时间为 {} 倍"),
    ):
        said = _and(said, say(en, zh, _range(found, "{:.2f}".format))) if found else said
    return said


def _over(cell: CellView, base: CellView) -> float:
    return 1 / _speed_up((cell, base))


def _traced_prediction(cells: Cells) -> Text | None:
    found = [
        abs((_value(cell, "predicted_by_tracing_memory") or 0.0) / (_value(cell, "peak_memory") or 1.0) - 1)
        for cell in _with(cells, "peak_memory", "predicted_by_tracing_memory")
    ]
    if not found:
        return None
    return say(
        "{} peaks predicted by tracing are off by {} at most",
        "{} 个由追踪预测的峰值最大误差为 {}",
        *(str(len(found)), percent(max(found), 2)),
    )


def _kept(cells: Cells) -> Text | None:
    fine = _with(cells, "saved_memory")
    plain = [cell for cell in fine if _way(cell).en == "attention by the formula"]
    if not plain:
        return None
    base = plain[0]
    others = [cell for cell in fine if cell is not base and cell.get("precision") == base.get("precision")]
    whole = _value(base, "saved_memory") or 1.0
    each = [
        say("{} {} ({})", "{} {}（{}）", _way(cell), number(kept / MIB, 1), percent(kept / whole, 0))
        for cell in others
        if (kept := _value(cell, "saved_memory"))
    ]
    said = say(
        "of {} in {} attention by the formula keeps {} MiB for backward",
        "{}在 {} 下，公式注意力为后向保留 {} MiB",
        *(_blocks(base.get("num_layers")), str(base.get("precision")), number(whole / MIB, 1)),
    )
    return say("{}, {}", "{}，{}", said, _listed(each)) if each else said


def _blocks(count: Any) -> Text:
    return Text(f"{count} block" if count == 1 else f"{count} blocks", f"{count} 个块")


def _way(cell: CellView) -> Text:
    if cell.get("checkpoint_blocks"):
        return Text("checkpointed", "检查点")
    if cell.get("compile"):
        return Text("compiled", "编译")
    if cell.get("attention") == "reference":
        return Text("attention by the formula", "公式注意力")
    return Text("fused attention", "融合注意力")


def _largest_kept(cells: Cells) -> Text | None:
    fine = _with(cells, "saved_memory")
    rows = [(row, cell) for cell in fine for row in cell.rows("largest_saved", 4)[:1]]
    if not rows:
        return None
    (size, _, what, line), _ = max(rows, key=lambda pair: pair[0][0])
    return say(
        "the largest is {} with {} MiB, made at {}",
        "最大的是 {}，{} MiB，由 {} 产生",
        *(str(what), number(size / MIB, 1), str(line)),
    )


def _model_parts(cells: Cells) -> Text | None:
    """What the largest model needs, from its configuration alone."""
    fine = sorted(_with(cells, "predicted_memory"), key=lambda cell: _value(cell, "predicted_memory") or 0.0)
    cell = fine[-1]
    peak = _value(cell, "predicted_memory") or 1.0
    metrics = {"parameters": "parameter", "gradients": "gradient", "optimizer state": "optimizer"}
    sizes = {label: size for label, part in metrics.items() if (size := _value(cell, f"{part}_memory"))}
    said = say("{} needs {} GiB", "{} 需要 {} GiB", _naming(fine)(cell), gib(peak))
    if not sizes:
        return said
    parts = _listed(say("{} {}", "{} {}", _word(label), gib(size)) for label, size in sizes.items())
    return say("{}: {}, and what forward keeps", "{}：{}，以及前向保留的部分", said, parts)


def _model_range(cells: Cells) -> Text | None:
    fine = _with(cells, "predicted_memory")
    if len(fine) < 2:
        return None
    least = min(fine, key=lambda cell: _value(cell, "predicted_memory") or 0.0)
    return say(
        "of {} configurations {} needs the least, {} GiB",
        "{} 个配置中 {} 需要最少，{} GiB",
        *(str(len(fine)), _naming(fine)(least), gib(_value(least, "predicted_memory"))),
    )


# -- attention --------------------------------------------------------------------------------------------------------


def _longest(cells: Cells) -> list[CellView]:
    """Those with the most tokens and, of these, the widest heads."""
    shape = max((cell.get("seq_len"), cell.get("head_dim")) for cell in cells)
    return [cell for cell in cells if (cell.get("seq_len"), cell.get("head_dim")) == shape]


def _by_formula(cells: Cells) -> Text | None:
    fine = _with(cells, "forward_time", "backward_time")
    by_name = {cell.get("implementation"): cell for cell in _longest(fine)}
    cell = by_name.get("reference") or next(iter(by_name.values()))
    times = [kernel_ms(_value(cell, f"{phase}_time")) for phase in ("forward", "backward")]
    said = say(
        "at {} tokens, d {}, forward takes {} ms and backward {}",
        "{} 个 token、d {} 时前向 {} ms，后向 {}",
        *(str(cell.get("seq_len")), str(cell.get("head_dim")), *times),
    )
    kept = _value(cell, "memory_before_backward")
    return _and(said, say("{} GiB are held before backward", "后向之前占用 {} GiB", gib(kept))) if kept else said


def _by_formula_compiled(cells: Cells) -> Text | None:
    pairs = _pairs(cells, "implementation", "reference", "backward_time")
    if not pairs:
        return None
    longest = _longest([cell for cell, _ in pairs])
    cell, base = chosen = next(pair for pair in pairs if pair[0] in longest)
    ratios = [_many(_speed_up(chosen, f"{phase}_time")) for phase in ("forward", "backward")]
    said = say(
        "{}, forward is {}x and backward {}x as fast",
        "{} 的前向速度为 {} 倍，后向 {} 倍",
        *(str(cell.get("implementation")), *ratios),
    )
    peaks = [_value(found, "peak_memory") for found in (cell, base)]
    if not all(peaks):
        return said
    return _and(said, say("its peak is {} GiB against {}", "峰值 {} GiB，原为 {}", *map(gib, peaks)))


def _out_of_memory(cells: Cells) -> Text | None:
    failed = [cell for cell in cells if cell.status.startswith("oom")]
    if not failed:
        return None
    least = min(failed, key=lambda cell: (cell.get("seq_len") or 0, cell.get("head_dim") or 0))
    return say(
        "{} of {} do not fit in memory, the shortest of {} tokens",
        "{} 个（共 {} 个）显存不足，最短的为 {} 个 token",
        *(str(len(failed)), str(len(cells)), str(least.get("seq_len"))),
    )


Times = dict[str, float]
"""Implementation -> seconds."""


def _flash_times(cells: Cells) -> dict[tuple[int, int], Times]:
    """(head dimension, tokens) -> forward and backward of each implementation."""
    found: dict[tuple[int, int], Times] = {}
    for cell in cells:
        seconds = _median(cell, "forward_backward_time") if cell.ok else None
        if seconds:
            found.setdefault((cell.get("head_dim"), cell.get("seq_len")), {})[cell.get("implementation")] = seconds
    return dict(sorted(found.items()))


def _flash(cells: Cells, which: int) -> Text | None:
    """Of the first or the second precision: where ours is the fastest, and how fast at the greatest length."""
    precision = list(dict.fromkeys(cell.get("precision") for cell in cells))[which]
    times = _flash_times([cell for cell in cells if cell.get("precision") == precision])
    ours = next(name for name in (OURS, "flash_torch") if any(name in found for found in times.values()))
    times = {shape: found for shape, found in times.items() if ours in found and len(found) > 1}
    if not times:
        return None
    return say("{}: {}", "{}：{}", str(precision), _and(_wins(times, ours), _longest_lead(times, ours)) or "")


def _wins(times: Mapping[tuple[int, int], Times], ours: str) -> Text:
    ahead = {shape: min(found, key=lambda name: found[name]) == ours for shape, found in times.items()}
    said = say(
        "{0} is the fastest of {1} in {2} of {3} shapes",
        "{0} 在 {3} 个形状中有 {2} 个是 {1} 种实现里最快的",
        *(ours, str(max(map(len, times.values()))), str(sum(ahead.values())), str(len(times))),
    )
    each = [
        say("from {0} tokens on with d {1}", "d {1} 从 {0} 个 token 起", str(start), str(dim))
        for dim in dict.fromkeys(dim for dim, _ in times)
        if (start := _ahead_from(ahead, dim))
    ]
    return say("{}: {}", "{}：{}", said, _listed(each)) if each else said


def _ahead_from(ahead: Mapping[tuple[int, int], bool], dim: int) -> int | None:
    """The length from which on ours is always first."""
    start = None
    for (found, length), is_first in ahead.items():
        if found == dim:
            start = (start or length) if is_first else None
    return start


SHOWN_RIVALS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa", "reference")
"""Those that a sentence has room for."""


def _longest_lead(times: Mapping[tuple[int, int], Times], ours: str) -> Text | None:
    """Against others at the greatest length, over all head dimensions."""
    length = max(length for _, length in times)
    chosen = [found for (_, seq), found in times.items() if seq == length]
    each = []
    for name in SHOWN_RIVALS:
        ratios = [found[name] / found[ours] for found in chosen if name in found]
        if ratios:
            each.append(say("{0}x that of {1}", "{1} 的 {0} 倍", _range(ratios, _many), name))
    where = (str(length), _listed(each))
    return say("at {} tokens its speed is {}", "{} 个 token 时速度是 {}", *where) if each else None


def _flash_memory(cells: Cells) -> Text | None:
    longest = _longest(_with(cells, "peak_memory"))
    where = [str(longest[0].get(name)) for name in ("seq_len", "head_dim", "precision")]
    same = [cell for cell in longest if str(cell.get("precision")) == where[-1]]
    by_name = {cell.get("implementation"): _value(cell, "peak_memory") for cell in same}
    ours, formula = by_name.get(OURS) or by_name.get("flash_torch"), by_name.get("reference")
    if not ours or not formula:
        return None
    return say(
        "at {} tokens, d {}, {}, it needs {} GiB, the formula {}",
        "{} 个 token、d {}、{} 时需要 {} GiB，按公式则需要 {}",
        *(*where, gib(ours), gib(formula)),
    )


def _rival_times(cell: CellView, metric: str) -> Times:
    sources = {name: Source(cell, f"{name}_") for name in cell.get("implementations") or ()}
    found = {name: source.median(metric) for name, source in sources.items() if not source.failure}
    return {name: seconds for name, seconds in found.items() if seconds and isfinite(seconds)}


def _rivals(cells: Cells) -> Text | None:
    """Against the best of the others, forward and backward together."""
    fine = [cell for cell in cells if cell.ok]
    leads = []
    for cell in fine:
        times = _rival_times(cell, "forward_backward_time")
        others = [name for name in times if name != OURS]
        if OURS in times and others:
            best = min(others, key=lambda name: times[name])
            name = f"{cell.get('batch_size')} x {cell.get('heads')} x {cell.get('seq_len')} x {cell.get('head_dim')}"
            leads.append((times[best] / times[OURS], Text(f"{name}, {best}")))
    if not leads:
        return None
    return say(
        "{0} is ahead of the best rival in {1} of {2} shapes, forward and backward: {3} times as fast",
        "前向加后向，{0} 在 {2} 个形状中有 {1} 个快于最快的对手：速度为 {3} 倍",
        *(OURS, str(sum(lead > 1 for lead, _ in leads)), str(len(leads)), _extremes(leads, "{:.2f}".format)),
    )


def _each_rival(cells: Cells) -> Text | None:
    ratios: dict[str, list[float]] = {}
    for cell in (cell for cell in cells if cell.ok):
        times = _rival_times(cell, "forward_backward_time")
        for name in (name for name in times if name != OURS and OURS in times):
            ratios.setdefault(name, []).append(times[name] / times[OURS])
    each = [
        say("{} in {} of {} (at best {}x)", "{} {}/{} 个（最多 {} 倍）", name, *_won(found), _many(max(found)))
        for name, found in ratios.items()
    ]
    return say("it is ahead of {}", "分别快于 {}", _listed(each)) if each else None


def _won(ratios: Sequence[float]) -> tuple[str, str]:
    return str(sum(ratio > 1 for ratio in ratios)), str(len(ratios))


def _rivals_forward(cells: Cells) -> Text | None:
    leads = []
    for cell in (cell for cell in cells if cell.ok):
        times = _rival_times(cell, "forward_time")
        others = [seconds for name, seconds in times.items() if name != OURS]
        if OURS in times and others:
            leads.append(min(others) / times[OURS])
    if not leads:
        return None
    return say(
        "forward alone is ahead of the best in {} of {}: {} times as fast",
        "单独的前向快于最快对手的有 {}/{} 个：速度为 {} 倍",
        *(*_won(leads), _range(leads, "{:.2f}".format)),
    )


def _leaderboard(cells: Cells) -> Text | None:
    times = {
        str(cell.get("implementation")): _value(cell, "leaderboard_time") or 0.0
        for cell in _with(cells, "leaderboard_time")
    }
    if OURS not in times:
        return None
    ours = times.pop(OURS)
    said = say("{} takes {} ms", "{} 为 {} ms", OURS, kernel_ms(ours))
    each = [
        say("{0}x that of {1} ({2} ms)", "{1}（{2} ms）的 {0} 倍", _many(seconds / ours), name, kernel_ms(seconds))
        for name, seconds in times.items()
    ]
    return say("{}; its speed is {}", "{}；速度是 {}", said, _listed(each)) if each else said


# -- several ranks ----------------------------------------------------------------------------------------------------


def _link(cell: CellView) -> Text:
    """How the ranks talk; Gloo between processes of one machine must not be taken for a network."""
    ranks, backend, device = (str(cell.get(name)) for name in ("ranks", "backend", "device"))
    said = say("{} ranks, {} on {}", "{} 个 rank、{}（{}）", ranks, backend, device)
    if backend == "gloo":
        said = say("{} ranks of one machine through Gloo ({})", "一台机器上 {} 个 rank、经 Gloo（{}）", ranks, device)
    link = cell.get("link")
    if not link:
        return said
    values = (f"{link[1] / 1e9:g}", f"{link[0] * 1e3:g}")
    return say("{}, emulated network of {} GB/s and {} ms", "{}，模拟 {} GB/s、{} ms 的网络", said, *values)


def _per_link(*facts: Callable[[CellView], Text | None]) -> tuple[Sentence, ...]:
    """A sentence for each way the ranks talk; those between GPUs come first."""

    def sentence(cells: Cells, place: int) -> Text | None:
        fine = sorted((cell for cell in cells if cell.ok), key=lambda cell: cell.get("backend") != "nccl")
        cell = fine[place]
        said = None
        for fact in facts:
            said = _and(said, _safely(fact, cell))
        return say("{}: {}", "{}：{}", _link(cell), said) if said else None

    return tuple(partial(sentence, place=place) for place in range(MOST))


def _largest_message(cell: CellView) -> Text | None:
    name = "all_reduce" if "all_reduce" in cell.get("collectives") else cell.get("collectives")[0]
    size, seconds = max(parallel.points(cell, name))
    bus = size / seconds / 1e9 * BUS_FACTOR[name](cell.get("ranks"))
    return say(
        "{} of {} MB takes {} ms, {} GB/s over the busiest link",
        "{} 传 {} MB 用 {} ms，最忙的链路 {} GB/s",
        *(name, f"{size / 1e6:g}", ms(seconds), number(bus)),
    )


def _fitted(cell: CellView) -> Text | None:
    rows = {name: parallel.fit(parallel.points(cell, name)) for name in cell.get("collectives")}
    rates = [(1e-9 / per_byte, Text(name)) for name, (_, per_byte, _) in rows.items() if per_byte]
    latencies = _range([latency * 1e6 for latency, _, _ in rows.values()], lambda latency: number(latency, 0))
    if not rates:
        return None
    return say(
        "fitted bandwidth in GB/s: {}; latency {} us",
        "拟合的带宽（GB/s）：{}；延迟 {} us",
        *(_extremes(rates, number), latencies),
    )


def _averaging(cell: CellView) -> Text | None:
    names = [name for name in cell.get("arrangements") if name not in ("none", "torch DDP")]
    times = {name: seconds for name in names if (seconds := _median(cell, f"{name}: step_time"))}
    best = min(times, key=lambda name: times[name])
    said = say(
        "{} is the fastest of {}, {} ms a step",
        "{} 是 {} 种中最快的，每步 {} ms",
        best,
        str(len(times)),
        ms(times[best]),
    )
    if "naive" in times and best != "naive":
        values = (_many(times["naive"] / times[best]), ms(times["naive"]))
        said = say("{}, {} times as fast as naive ({} ms)", "{}，速度是 naive 的 {} 倍（{} ms）", said, *values)
    if theirs := _median(cell, "torch DDP: step_time"):
        said = say("{}; torch DDP takes {} ms", "{}；torch DDP 为 {} ms", said, ms(theirs))
    return said


def _hidden(cell: CellView) -> Text | None:
    found = {
        name: 1 - exposed / alone
        for name, alone, exposed in parallel.exposures(cell)
        if name != "none" and alone and exposed is not None and isfinite(exposed / alone)
    }
    if not found:
        return None
    most, least = max(found, key=lambda name: found[name]), min(found, key=lambda name: found[name])
    return say(
        "of communication {} hides {}, {} {}",
        "通信中 {} 掩盖 {}，{} 掩盖 {}",
        *(most, percent(found[most], 0), least, percent(found[least], 0)),
    )


def _buckets(cell: CellView) -> Text | None:
    rows = parallel.bucket_rows(cell)
    predicted = min(rows, key=lambda row: row.predicted)
    measured = min(rows, key=lambda row: row.measured)
    return say(
        "the best bucket is {} MB predicted ({} ms exposed) and {} MB measured ({} ms)",
        "最好的桶预测为 {} MB（未掩盖 {} ms），实测 {} MB（{} ms）",
        *(f"{predicted.size / MIB:g}", ms(predicted.predicted), f"{measured.size / MIB:g}", ms(measured.measured)),
    )


def _misjudged(cell: CellView) -> Text | None:
    rows = [row for row in parallel.bucket_rows(cell) if row.measured > 0 and row.predicted > 0]
    worst = max(rows, key=lambda row: abs(row.predicted / row.measured - 1))
    return say(
        "of {} sizes the prediction is worst for {} MB: {} ms, measured {}",
        "{} 种大小中预测最差的是 {} MB：{} ms，实测 {}",
        *(str(len(rows)), f"{worst.size / MIB:g}", ms(worst.predicted), ms(worst.measured)),
    )


def _held(cell: CellView, name: str) -> float:
    sizes = [_value(cell, f"{name}: {part}_memory") for part in ("parameter", "gradient", "optimizer")]
    return sum(size or 0.0 for size in sizes)


def _sharded(cell: CellView) -> Text | None:
    """Ours against plain averaging, and torch's own beside it."""
    names = cell.get("arrangements")
    ours = "fsdp" if "fsdp" in names else "sharded"
    theirs = next((name for name in ("torch fully_shard", "torch ZeRO") if name in names), None)
    base, held = _held(cell, "ddp"), _held(cell, ours)
    if not base or not held:
        return None
    said = say(
        "{0} holds {1} MiB on a rank, {2} less than ddp ({3})",
        "{0} 在每个 rank 上占 {1} MiB，比 ddp（{3}）少 {2}",
        *(ours, number(held / MIB, 1), percent(1 - held / base, 0), number(base / MIB, 1)),
    )
    steps = [_median(cell, f"{name}: step_time") for name in (ours, "ddp", theirs or "")]
    if steps[0] and steps[1]:
        cost = (ms(steps[0]), _many(steps[0] / steps[1]))
        said = say("{}, and takes {} ms a step, {} times as long", "{}，每步 {} ms，时间是其 {} 倍", said, *cost)
    if theirs and steps[2]:
        values = (theirs, number(_held(cell, theirs) / MIB, 1), ms(steps[2]))
        said = say("{}; {} {} MiB and {} ms", "{}；{} 为 {} MiB、{} ms", said, *values)
    return said


def _layouts(cells: Cells) -> Text | None:
    """Of the whole model, where it was counted, on each cluster."""
    said = None
    for cell in _whole_models(cells)[:MOST]:
        said = _and(said, _safely(_layout, cell))
    return said


def _whole_models(cells: Cells) -> list[CellView]:
    fine = [cell for cell in cells if cell.ok]
    return [cell for cell in fine if cell.get("count") == "transformer"] or fine


def _layout(cell: CellView) -> Text:
    names = list(cell.get("strategies"))
    fitting = [name for name in names if cell.value(f"{name}: fits")]
    only = Text("", "") if cell.get("count") == "transformer" else Text(" (feed-forward only)", "（仅前馈）")
    said = say(
        "of {0} layouts of {1}{2} on {3} x {4} {5} fit",
        "{1}{2} 在 {3} x {4} 上的 {0} 种布局中 {5} 种放得下",
        *(
            str(len(names)),
            str(cell.get("size")),
            only,
            f"{cell.get('gpus'):,}",
            str(cell.get("gpu")),
            str(len(fitting)),
        ),
    )
    if not fitting:
        return said
    best = min(fitting, key=lambda name: _plan_seconds(cell, name))
    return say(
        "{}: {} has the shortest step, {} ms, with {} GiB on a GPU",
        "{}：{} 的一步最短，{} ms，每张 GPU {} GiB",
        *(said, best, ms(_plan_seconds(cell, best)), number(_plan_bytes(cell, best) / GIB, 1)),
    )


def _plan_seconds(cell: CellView, name: str) -> float:
    """With every message beside products."""
    return sum(
        max(cell.value(f"{name}: {during}_{what}_time") or 0.0 for what in ("compute", "communication"))
        for during in ("forward", "backward")
    )


def _plan_bytes(cell: CellView, name: str) -> float:
    return sum(cell.value(f"{name}: {part}_memory") or 0.0 for part in parallel.PLAN_PARTS.values())


def _waits(cells: Cells) -> Text | None:
    """Which layouts are bound by messages, on the largest cluster."""
    cell = max(_whole_models(cells), key=lambda cell: cell.get("gpus"))
    late = [name for name in cell.get("strategies") if _is_late(cell, name)]
    where = f"{cell.get('gpus'):,}"
    if not late:
        return say("on {} GPUs no layout waits for messages", "{} 张 GPU 上没有布局在等通信", where)
    return say("on {} GPUs these wait for messages: {}", "{} 张 GPU 上等待通信的有：{}", where, _listed(late))


def _is_late(cell: CellView, name: str) -> bool:
    return any(
        (cell.value(f"{name}: {during}_communication_time") or 0.0)
        > (cell.value(f"{name}: {during}_compute_time") or 0.0)
        for during in ("forward", "backward")
    )


# -- small experiments ------------------------------------------------------------------------------------------------


def _sums(cells: Cells) -> Text | None:
    fine = _with(cells, "sum")
    said = []
    for cell in fine:
        exact = cell.get("value") * cell.get("count")
        total = _value(cell, "sum") or 0.0
        values = (f"{cell.get('accumulator')} += {cell.get('term')}", f"{total:.4f}", f"{total / exact - 1:+.3%}")
        said.append((abs(total / exact - 1), say("{} gives {} ({})", "{} 得 {}（{}）", *values)))
    if not said:
        return None
    count, value = str(fine[0].get("count")), str(fine[0].get("value"))
    ranked = [text for _, text in sorted(said, key=lambda pair: -pair[0])]
    return say("{} added {} times, the worst first: {}", "{} 相加 {} 次，最差在前：{}", value, count, _listed(ranked))


def _dtypes(cells: Cells) -> Text | None:
    """What stays in float32, by model; types under which the same stays are named together."""
    found: dict[tuple, list[CellView]] = {}
    for cell in (cell for cell in cells if cell.ok):
        names = [name for name in cell.metrics if name.startswith("dtype of ")]
        full = tuple(name for name in names if "float32" in map(str, cell.metrics[name].samples))
        if names:
            found.setdefault((str(cell.get("model")), len(names), full), []).append(cell)
    said = None
    for (model, count, full), chosen in found.items():
        kept = _listed(_word(name.removeprefix("dtype of ")) for name in full)
        own = say(
            "under autocast to {0}, {3} of {1} tensors of the {2} model are float32: {4}",
            "{0} autocast 下，{2} 模型的 {1} 个张量中 {3} 个为 float32：{4}",
            *("/".join(str(cell.get("autocast")) for cell in chosen), str(count), model, str(len(full)), kept),
        )
        said = _and(said, own)
    return said


_SENTENCES: dict[str, tuple[Sentence, ...]] = {
    experiment: tuple(map(_sentence, sentences))
    for experiment, sentences in {
        "bench": (_step, _mfu, _prediction),
        "end_to_end": (_step, _mfu, _prediction),
        "warmup": (_first_step, _warm_mean, _steady),
        "precision": (_precision,),
        "compile": (_compile, _compile_cost),
        "fast_step": (_all_parts, _other_works, _missed_part),
        "peak_memory": (_prediction, _savers),
        "timing_agreement": (_do_bench,),
        "kernels": (_matmul_share, _other_kinds, _idle),
        "attention_ops": (_attention_ratio, _around_matmuls),
        "profiler_agreement": (_filled, _profiled, _nsys),
        "memory": (_prediction, _composition, _largest_block),
        "checkpointing": (_least_memory, _recompute_time, _traced_prediction),
        "saved_tensors": (_kept, _largest_kept),
        "pytorch_attention": (_by_formula, _by_formula_compiled, _out_of_memory),
        "flash": (partial(_flash, which=0), partial(_flash, which=1), _flash_memory),
        "attention_rivals": (_rivals, _each_rival, _rivals_forward),
        "flash_leaderboard": (_leaderboard,),
        "collectives": _per_link(_largest_message, _fitted),
        "ddp": _per_link(_averaging, _hidden),
        "bucket_model": _per_link(_buckets, _misjudged),
        "optimizer_sharding": _per_link(_sharded),
        "fsdp": _per_link(_sharded),
        "parallel_plan": (_layouts, _waits),
        "memory_model": (_model_parts, _model_range),
        "accumulation": (_sums,),
        "autocast_dtypes": (_dtypes,),
    }.items()
}

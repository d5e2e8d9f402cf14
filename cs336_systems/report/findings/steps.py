"""Sentences on steps: their phases, warm-up, precision, compilation, the fast step; and on what precision does."""

from collections.abc import Callable, Sequence
from math import isfinite

from cs336_systems.config import FAST_PARTS, MODES
from cs336_systems.record import steady_from
from cs336_systems.report.cells import CellView
from cs336_systems.report.findings.memory import prediction
from cs336_systems.report.findings.phrases import (
    MODE_WORDS,
    Cells,
    Sentence,
    extremes,
    having,
    listed,
    median_of,
    naming,
    pairs_of,
    say,
    scale_of,
    settings_of,
    size_of,
    span,
    speed_up,
    times_text,
    together,
    value_of,
    word,
)
from cs336_systems.report.rows import as_text, gib, ms, number, percent
from cs336_systems.text import Text

# -- steps -------------------------------------------------------------------------------------------------------------


def _longest_mode(cells: Cells) -> list[CellView]:
    """Whole training steps where there are any, by size."""
    fine = sorted(having(cells, "step_time"), key=scale_of)
    modes = [cell.get("mode") for cell in fine]
    mode = next((mode for mode in reversed(MODES) if mode in modes), None)
    return [cell for cell in fine if cell.get("mode") == mode]


def _step(cells: Cells) -> Text | None:
    fine = _longest_mode(cells)
    if not fine:
        return None
    large = fine[-1]
    small = next(cell for cell in fine if settings_of(cell, "size") == settings_of(large, "size"))
    if scale_of(small) < scale_of(large):
        return together(_by_size(small, large, naming(fine)), _backward(large))
    first = min(fine, key=lambda cell: value_of(cell, "step_time") or 0.0)
    return together(_by_speed(first, fine), _backward(first))


def _backward(cell: CellView) -> Text | None:
    forward, backward = (value_of(cell, f"{phase}_time") for phase in ("forward", "backward"))
    if not forward or not backward:
        return None
    return say("backward takes {} times forward", "后向是前向的 {} 倍", times_text(backward / forward))


def _by_size(small: CellView, large: CellView, name: Callable[[CellView], Text]) -> Text:
    times = [value_of(cell, "step_time") or 0.0 for cell in (large, small)]
    return say(
        "{0}'s {1} takes {2} ms, {3} times {4}'s ({5} ms)",
        "{0} 的{1}为 {2} ms，是 {4}（{5} ms）的 {3} 倍",
        *(name(large), MODE_WORDS.get(str(large.get("mode")), Text("step", "一步")), ms(times[0])),
        *(times_text(times[0] / times[1]), name(small), ms(times[1])),
    )


def _by_speed(first: CellView, fine: Cells) -> Text:
    last = max(fine, key=lambda cell: value_of(cell, "step_time") or 0.0)
    times = [value_of(cell, "step_time") or 0.0 for cell in (first, last)]
    if len(fine) == 1:
        rate = number(first.tokens_per_second, 0)
        return say(
            "a step of {} takes {} ms: {} tokens/s", "{} 每步 {} ms：{} tokens/s", first.name, ms(times[0]), rate
        )
    name = naming(fine)
    return say(
        "of {0} configurations {1} is the fastest with {2} ms a step, {3} times as fast as {4} ({5} ms)",
        "{0} 个配置中 {1} 最快，每步 {2} ms，速度是 {4}（{5} ms）的 {3} 倍",
        *(str(len(fine)), name(first), ms(times[0]), times_text(times[1] / times[0]), name(last), ms(times[1])),
    )


def _mfu(cells: Cells) -> Text | None:
    fine = _longest_mode(cells)
    name = naming(fine)
    found = [(cell.mfu, name(cell)) for cell in fine if cell.mfu and isfinite(cell.mfu)]
    return say("MFU: {}", "MFU 为 {}", extremes(found, percent)) if found else None


def _first_step(cells: Cells) -> Text | None:
    """Of every size that was run without warm-up, against its run with the most."""
    fine = sorted(having(cells, "step_time"), key=scale_of)
    said = []
    for cold in (cell for cell in fine if cell.get("warmup_steps") == 0):
        steady = median_of(_warmest(cold, fine), "step_time")
        first = cold.metrics["step_time"].numbers[0]
        if steady and isfinite(first):
            values = (size_of(cold), times_text(first / steady), ms(first), ms(steady))
            said.append(
                say("{1} times as long for {0} ({2} against {3} ms)", "{0} 为 {1} 倍（{2} 与 {3} ms）", *values)
            )
    if not said:
        return None
    return say(
        "without warm-up the first step takes, against a steady one, {}",
        "不预热时首步与稳定一步之比：{}",
        listed(said),
    )


def _warmest(cell: CellView, cells: Cells) -> CellView:
    """The run of the same with the most warm-up steps."""
    same = [other for other in cells if settings_of(other, "warmup_steps") == settings_of(cell, "warmup_steps")]
    return max(same, key=lambda other: other.get("warmup_steps"))


def _warm_mean(cells: Cells) -> Text | None:
    """What the cold first step does to the mean, where it does most."""
    fine = having(cells, "step_time")
    pairs = [(_warmest(cell, fine), cell) for cell in fine if cell.get("warmup_steps") == 0]
    warm, cold = max(pairs, key=speed_up)
    if warm is cold:
        return None
    means = [value_of(cell, "step_time") or 0.0 for cell in (cold, warm)]
    return say(
        "it puts the mean of {0} off by {1}: {2} ms, after {4} warm-up steps {3} ms",
        "它使 {0} 的均值偏差 {1}：{2} ms，预热 {4} 步后为 {3} ms",
        *(
            size_of(cold),
            percent(means[0] / means[1] - 1, 0),
            ms(means[0]),
            ms(means[1]),
            str(warm.get("warmup_steps")),
        ),
    )


def _steady(cells: Cells) -> Text | None:
    fine = having(cells, "step_time")
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
        *(str(len(found)), str(len(known)), str(latest), naming(fine)(cell)),
    )


def _precision(cells: Cells) -> Text | None:
    pairs = pairs_of(cells, "precision", "fp32")
    said = None
    for precision in dict.fromkeys(cell.get("precision") for cell, _ in pairs):
        chosen = [pair for pair in pairs if pair[0].get("precision") == precision]
        own = say("{} speeds up {}", "{} 的加速：{}", precision, _speed_ups(chosen))
        said = together(said, _with_memory(own, chosen, "fp32"))
    return said


def _speed_ups(pairs: Sequence[tuple[CellView, CellView]]) -> Text:
    """Of the largest size and the smallest."""
    name = naming([cell for cell, _ in pairs])
    chosen = [pairs[-1], *([pairs[0]] if len(pairs) > 1 else [])]
    return listed(say("{} {}x", "{} {} 倍", name(pair[0]), times_text(speed_up(pair))) for pair in chosen)


def _with_memory(said: Text, pairs: Sequence[tuple[CellView, CellView]], base: str) -> Text:
    ratios = [1 / speed_up(pair, "peak_memory") for pair in pairs if len(having(pair, "peak_memory")) == 2]
    if not ratios:
        return said
    times = span(ratios, "{:.2f}".format)
    return say("{0}, with {1} times the memory of {2}", "{0}，显存为 {2} 的 {1} 倍", said, times, base)


def _compile(cells: Cells) -> Text | None:
    pairs = pairs_of(cells, "compile", False)
    if not pairs:
        return None
    return _with_memory(
        say("torch.compile speeds up {}", "torch.compile 的加速：{}", _speed_ups(pairs)), pairs, "eager"
    )


def _compile_cost(cells: Cells) -> Text | None:
    pairs = [pair for pair in pairs_of(cells, "compile", False) if value_of(pair[0], "compile_time")]
    if not pairs:
        return None
    worst, _ = max(pairs, key=lambda pair: value_of(pair[0], "compile_time") or 0.0)
    said = say(
        "compiling takes up to {} s ({})",
        "编译最多用 {} s（{}）",
        *(number(value_of(worst, "compile_time"), 1), size_of(worst)),
    )
    cell, base = pairs[-1]
    saved = (value_of(base, "step_time") or 0.0) - (value_of(cell, "step_time") or 0.0)
    if saved <= 0:
        return said
    steps = number((value_of(cell, "compile_time") or 0.0) / saved, 0)
    return together(said, say("for {} {} steps earn it back", "{} 需 {} 步才能收回", size_of(cell), steps))


# -- the fast step -----------------------------------------------------------------------------------------------------


def _works(cells: Cells) -> list[list[CellView]]:
    """Cells of the same model, context and batch together, the smallest first."""
    found: dict[tuple, list[CellView]] = {}
    for cell in sorted(having(cells, "step_time"), key=scale_of):
        found.setdefault(settings_of(cell, "fast", "compile", "model_factory"), []).append(cell)
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
    times = [value_of(cell, "step_time") or 0.0 for cell in (fast, other)]
    said = say(
        "all parts together take {0} ms for {1}, {2}x less than {3} ({4} ms)",
        "{1} 全部启用时每步 {0} ms，速度是{3}（{4} ms）的 {2} 倍",
        *(ms(times[0]), size_of(fast), times_text(times[1] / times[0]), name, ms(times[1])),
    )
    memory = [value_of(cell, "peak_memory") for cell in (fast, other)]
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
            shape = f"{size_of(fast)} {fast.get('batch_size')} x {fast.get('context_length')}"
            times = [value_of(cell, "step_time") or 0.0 for cell in (fast, rival[1])]
            said.append(
                say(
                    "{1}x for {0} ({2} ms)",
                    "{0} 为 {1} 倍（{2} ms）",
                    shape,
                    times_text(times[1] / times[0]),
                    ms(times[0]),
                )
            )
    return say("for larger work it is {}", "更大的工作量下，{}", listed(said)) if said else None


def _missed_part(cells: Cells) -> Text | None:
    """Each part left out alone: what the step then takes."""
    for work in _works(cells):
        fast = _fast(work)
        without: dict[str, float] = {}
        for cell in work:
            left = [part for part in FAST_PARTS if part not in str(cell.get("fast")).split(",")]
            if len(left) == 1:
                without[left[0]] = value_of(cell, "step_time") or 0.0
        if fast and without:
            ranked = sorted(without, key=lambda part: -without[part])
            each = listed(say("{} {} ms", "{} {} ms", part, ms(without[part])) for part in ranked)
            return say(
                "of {} with one part left out, a step takes: {}", "{} 每步，缺某一部分时：{}", size_of(fast), each
            )
    return None


# -- small experiments -------------------------------------------------------------------------------------------------


def _sums(cells: Cells) -> Text | None:
    fine = having(cells, "sum")
    said = []
    for cell in fine:
        exact = cell.get("value") * cell.get("count")
        total = value_of(cell, "sum") or 0.0
        values = (f"{cell.get('accumulator')} += {cell.get('term')}", f"{total:.4f}", f"{total / exact - 1:+.3%}")
        said.append((abs(total / exact - 1), say("{} gives {} ({})", "{} 得 {}（{}）", *values)))
    if not said:
        return None
    count, value = str(fine[0].get("count")), str(fine[0].get("value"))
    ranked = [text for _, text in sorted(said, key=lambda pair: -pair[0])]
    return say("{} added {} times, the worst first: {}", "{} 相加 {} 次，最差在前：{}", value, count, listed(ranked))


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
        kept = listed(word(name.removeprefix("dtype of ")) for name in full)
        own = say(
            "under autocast to {0}, {3} of {1} tensors of the {2} model are float32: {4}",
            "{0} autocast 下，{2} 模型的 {1} 个张量中 {3} 个为 float32：{4}",
            *("/".join(str(cell.get("autocast")) for cell in chosen), str(count), model, str(len(full)), kept),
        )
        said = together(said, own)
    return said


SENTENCES: dict[str, tuple[Sentence, ...]] = {
    "bench": (_step, _mfu, prediction),
    "end_to_end": (_step, _mfu, prediction),
    "warmup": (_first_step, _warm_mean, _steady),
    "precision": (_precision,),
    "compile": (_compile, _compile_cost),
    "fast_step": (_all_parts, _other_works, _missed_part),
    "accumulation": (_sums,),
    "autocast_dtypes": (_dtypes,),
}

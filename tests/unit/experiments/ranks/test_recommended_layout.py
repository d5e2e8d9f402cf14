"""The recommendation of a plan: the layout that it names fits and is no slower; the change that it names is enough."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.cli import main
from cs336_systems.experiments.ranks.plan_cells import Passes, PlanArguments, fitting_layouts, planned, total
from cs336_systems.experiments.ranks.recommended_layout import SAME, best_layout, recommendation
from cs336_systems.predict.fit import usable_bytes

GPUS = st.sampled_from([1, 2, 4, 8, 16, 64, 1024])
CARDS = st.sampled_from(["4090", "a100", "h100", "h200", "t4"])


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from(["small", "xl", "2.7B", "xxl"]),
    gpus=GPUS,
    gpu=CARDS,
    context=st.sampled_from([128, 1024, 8192]),
    batch=st.integers(1, 64),
    checkpoint=st.sampled_from([0, 1, 4]),
)
def test_any_plan_has_a_recommendation(size, gpus, gpu, context, batch, checkpoint):
    arguments = PlanArguments(
        size=size,
        gpus=gpus,
        gpu=gpu,
        context_length=context,
        batch_size=batch,
        checkpoint_blocks=checkpoint,
        precision="fp16",
    )
    cell = planned(arguments)
    said, fitting = recommendation(cell), fitting_layouts(cell)
    assert said.en.startswith("Recommended: " if fitting else "No layout fits: ")
    assert said.zh
    if fitting:
        best, _ = best_layout(cell, fitting)
        assert total(cell, best) <= usable_bytes(cell.get("gpu_memory"))
        seconds = {name: Passes.of(cell.variant(name)).overlapped for name in fitting}
        assert seconds[best] <= SAME * min(seconds.values())


ON_4090 = "--size 2.7B --gpus 8 --gpu 4090"
SHARDED = f"{ON_4090} --strategy zero3,zero3+tp8"
WHERE_NOTHING_FITS = {
    "--fast": f"{SHARDED} --context_length 4096 --checkpoint_blocks 0",
    "--checkpoint_blocks": f"{SHARDED} --context_length 16384 --checkpoint_blocks 0",
    "--batch_size": f"{SHARDED} --context_length 1024 --batch_size 64",
    "--strategy": f"{ON_4090} --strategy dp",
    "--gpus": "--size xxl --gpus 2 --gpu 4090",
    "--gpu": f"{ON_4090} --context_length 400000",
}
"""The flag that helps first -> a command line without a layout that fits."""


def advice(flags, capsys):
    assert main(["plan", *flags]) == 0
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("flag", WHERE_NOTHING_FITS)
def test_the_smallest_change_is_enough(flag, capsys):
    """The flags that it names, put into the command line, give a plan in which a layout fits."""
    given = WHERE_NOTHING_FITS[flag].split()
    said = advice(given, capsys)
    assert said.startswith("No layout fits")
    changes = said.split("fits: ")[-1].split()
    assert flag in changes
    pairs = [words[place : place + 2] for words in (given, changes) for place in range(0, len(words), 2)]
    merged = [word for pair in dict(pairs).items() for word in pair]
    assert advice(merged, capsys).startswith("Recommended: ")


def test_a_smaller_batch_is_the_largest_that_fits(capsys):
    given = WHERE_NOTHING_FITS["--batch_size"].split()
    batch = int(advice(given, capsys).split()[-1])
    assert advice([*given[:-1], str(batch + 1)], capsys).startswith("No layout fits")


def test_nothing_helps():
    said = recommendation(planned(PlanArguments(size="xxl", gpus=8, gpu="h100", context_length=10_000_000)))
    assert said.en.endswith("Take a smaller model or a shorter context.")


@pytest.mark.parametrize(
    ("fields", "layout", "reason"),
    [
        ({"size": "2.7B", "gpus": 1, "gpu": "h100"}, "DP", "one GPU"),
        ({"size": "2.7B", "gpus": 16, "gpu": "a100", "context_length": 2048}, "ZeRO-2", "the most room"),
        ({"size": "xxl"}, "ZeRO-3", "shortest step"),
        ({"size": "2.7B", "gpus": 4, "gpu": "4090", "strategy": ("dp", "zero3")}, "ZeRO-3", "only layout"),
    ],
    ids=str,
)
def test_the_reason_is_given(fields, layout, reason):
    said = recommendation(planned(PlanArguments(**fields))).en
    assert said.startswith(f"Recommended: {layout}, because ")
    assert reason in said


@pytest.mark.parametrize("format", ["terminal", "md", "csv", "latex"])
def test_tables_for_programs_stay_tables(format, capsys):
    assert main(["plan", "--size", "small", "--gpus", "2", "--format", format]) == 0
    printed = capsys.readouterr()
    text, other = (printed.out, printed.err) if format in ("terminal", "md") else (printed.err, printed.out)
    assert "Recommended: " in text
    assert "Recommended: " not in other


def test_long_contexts_are_split_over_gpus():
    """One sequence of 100,000 tokens does not fit on one GPU; a quarter of it does."""
    arguments = PlanArguments(size="2.7B", gpus=8, gpu="4090", context_length=100_000)
    cell = planned(arguments)
    assert fitting_layouts(cell) == ["zero3+cp4"]
    assert recommendation(cell).en.startswith("Recommended: ZeRO-3 + CP 4, because it is the only layout that fits")


def test_layouts_with_stages_are_told_with_their_bubble():
    cell = planned(
        PlanArguments(size="2.7B", gpus=64, gpu="h200", context_length=8192, strategy=("zero1", "zero1+tp2+pp4"))
    )
    said = recommendation(cell)
    assert said.en.startswith("Recommended: ZeRO-1, ")
    bubble = "27.3%"  # 3 of 8 + 3 micro batches
    assert f"ZeRO-1 + TP 2 + PP 4 fits as well, with a bubble of {bubble}." in said.en
    assert bubble in said.zh
    alone = recommendation(
        planned(PlanArguments(size="2.7B", gpus=64, gpu="h200", context_length=8192, strategy=("zero1+tp2+pp4",)))
    )
    assert f"idle for {bubble} of a step" in alone.en

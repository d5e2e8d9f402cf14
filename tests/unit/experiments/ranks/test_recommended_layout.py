"""The recommendation of a plan: the layout that it names fits and is no slower; the change that it names is enough."""

import dataclasses
import re
import shlex
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cs336_systems.cli import main
from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments.ranks.layout_commands import DATA, SHARED_DATA, is_trained, nearest_trained
from cs336_systems.experiments.ranks.layout_times import rank_time
from cs336_systems.experiments.ranks.plan_cells import (
    Passes,
    PlanArguments,
    fitting_layouts,
    plan_config,
    planned,
    plans,
    run_of,
    total,
)
from cs336_systems.experiments.ranks.recommended_layout import SAME, best_layout, command, recommendation
from cs336_systems.flags import Parser, add_flags, read_flags
from cs336_systems.predict.fit import FitArguments, fit_tables, usable_bytes
from cs336_systems.predict.strategy import Strategy
from cs336_systems.train.cluster.job import LaunchArguments, checked
from cs336_systems.train.settings import TrainSettings

GPUS = st.sampled_from([1, 2, 4, 8, 16, 64, 1024])
CARDS = st.sampled_from(["4090", "a100", "h100", "h200", "t4"])


@settings(max_examples=25, deadline=None)
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
        best, _ = best_layout(cell)
        assert total(cell, best) <= usable_bytes(cell.get("gpu_memory"))
        trained = [name for name in fitting if is_trained(cell.config, name)] or fitting
        seconds = {name: Passes.of(cell.variant(name)).overlapped for name in trained}
        assert seconds[best] <= SAME * min(seconds.values())


def test_predicted_steps_are_compared_as_a_whole():
    """DP communicates less, but its ranks update all weights."""
    arguments = {"size": "qwen2.5/1.5B", "context_length": 4096, "batch_size": 8, "checkpoint_blocks": 0, "gpus": 8}
    cell = planned(PlanArguments(**arguments, gpu="h100", fast="on"))
    times = {name: rank_time(cell, name).overlapped for name in ("dp", "zero1", "zero3")}
    assert times["dp"] > SAME * times["zero1"]
    assert times[best_layout(cell)[0]] <= SAME * min(times.values())
    few = PlanArguments(size="small", gpus=8, gpu="h200", fast="on", batch_size=8, strategy=("dp", "zero3"))
    assert best_layout(planned(few))[0] == "dp"


def test_a_predicted_step_wins_a_tie():
    """Launches bound the steps with TP 2, which are not predicted: they count as no faster than the others."""
    arguments = {"size": "medium", "gpus": 8, "gpu": "h200", "fast": "on", "batch_size": 8, "micro_batches": 2}
    cell = planned(PlanArguments(**arguments, strategy=("dp", "zero3+tp2", "tp2")))
    assert rank_time(cell, "zero3+tp2") is rank_time(cell, "dp+tp2") is None
    assert best_layout(cell)[0] == "dp"


def tokens_seconds(cell, name):
    time = rank_time(cell, name) or Passes.of(cell.variant(name))
    return time.overlapped / RunConfig.of(cell.config).tokens


@pytest.mark.parametrize("fast", ["on", "off"])
def test_unused_memory_is_remarked_on_with_what_it_would_give(fast):
    """The flags that the line names fit, and a token takes the share of the time that it says."""
    given = {"size": "qwen2.5/1.5B", "context_length": 4096, "gpus": 8, "gpu": "h100", "fast": fast}
    cell = planned(PlanArguments(**given))
    best, _ = best_layout(cell)
    found = re.fullmatch(
        r"[\d.]+ GiB of each GPU are unused: with (.*?)(?: \(\d+ times.*\))? a token takes ([\d.]+) of the time\.",
        recommendation(cell).en.splitlines()[1],
    )
    assert found
    words = found[1].split()
    flags = {name.removeprefix("--"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    larger = planned(PlanArguments(**given, **flags, strategy=(best,)))
    assert fitting_layouts(larger) == [best]
    assert tokens_seconds(larger, best) / tokens_seconds(cell, best) == pytest.approx(float(found[2]), abs=0.006)


def test_memory_that_is_used_is_not_remarked_on():
    full = {"size": "qwen2.5/1.5B", "context_length": 4096, "gpus": 8, "gpu": "h100", "batch_size": 8, "fast": "on"}
    for fields in ({**full, "checkpoint_blocks": 0}, {"size": "small", "mode": "forward", "gpus": 2}):
        assert "unused" not in recommendation(planned(PlanArguments(**fields))).en


def test_one_gpu_has_one_layout_and_larger_settings_are_named():
    """Its memory is free to use: a faster setting is named however little of it is left."""
    found = planned(PlanArguments(size="llama3/8B", context_length=8192, gpus=1, gpu="h200"))
    assert found.get("strategies") == ["dp"]
    assert found.variant("dp").value("smallest_cluster") == 1
    assert "--checkpoint_blocks 0 a token takes 0.78" in recommendation(found).en
    none = planned(PlanArguments(size="qwen2.5/7B", context_length=8192, gpus=1, gpu="h100"))
    assert "--gpus 2 --strategy zero3\ncs336 optimize also tries" in recommendation(none).en


def test_layouts_that_train_does_not_have_are_no_advice():
    """ZeRO-2 would need the fewest GPUs."""
    cell = planned(PlanArguments(size="qwen2.5/7B", context_length=128, gpus=1, gpu="h100", fast="off"))
    assert "zero2" not in recommendation(cell).en


def test_no_advice_names_a_layout_that_train_does_not_have():
    """Nor the usual layouts of these GPUs, of which ZeRO-1 + TP 8 + PP 2 is one."""
    arguments = PlanArguments(size="llama3/8B", context_length=16_384, gpus=16, gpu="12GB", tflops=100)
    named = re.findall(r"--strategy (\S+)", recommendation(planned(arguments)).en)
    assert len(named) == 2
    assert all(nearest_trained(Strategy.parse(name)) == Strategy.parse(name) for name in named)


def test_one_gpu_is_told_of_a_shorter_context_and_of_optimize(capsys):
    """`optimize` is for training steps."""
    given = {"size": "llama3/1B", "gpus": 1, "gpu": "4090"}
    said = recommendation(planned(PlanArguments(context_length=131_072, **given))).en
    shorter = int(re.search(r"\nOn this one a shorter context fits: --context_length (\d+)\ncs336 optimize", said)[1])
    assert fitting_layouts(planned(PlanArguments(context_length=shorter, **given)))
    forward = recommendation(planned(PlanArguments(context_length=131_072, mode="forward", **given))).en
    assert "a shorter context fits" in forward
    assert "cs336 optimize" not in forward


@pytest.mark.parametrize(("gpu", "gpus"), [("4090", 16), ("h100", 2)])
def test_fit_and_plan_agree_on_the_number_of_gpus(gpu, gpus):
    fields = {"gpu": gpu, "precision": "bf16", "attention": "auto", "fast": "on"}
    (table,) = fit_tables(FitArguments(sizes=("llama3/8B",), context_lengths=(8192,), **fields))
    assert f"would fit on {gpus} GPUs by ZeRO-3" in table.plain().notes[-1]
    plan = PlanArguments(size="llama3/8B", context_length=8192, gpu=gpu, strategy=("zero3",))
    assert [len(fitting_layouts(planned(dataclasses.replace(plan, gpus=count)))) for count in (gpus // 2, gpus)] == [
        0,
        1,
    ]


def test_the_fast_step_is_the_default_of_what_it_can_run():
    found = {
        (mode, count): plan_config(PlanArguments(size="small", gpus=2, mode=mode, count=count)).get("fast", "off")
        for mode, count in (("train-step", "transformer"), ("forward", "transformer"), ("train-step", "feed-forward"))
    }
    assert list(found.values()) == ["kernels,loss", "off", "off"]


# -- the command that runs it -----------------------------------------------------------------------------------------


def parsed(command: str) -> tuple[TrainSettings, int]:
    """The settings of a printed command, checked as `cs336 train` and `cs336 launch` do, and the number of ranks."""
    words = shlex.split(command)
    ranks = int(words[2]) if words[0] == "torchrun" else 1
    if words[1] == "launch":
        parser = Parser(prog="launch")
        add_flags(parser, LaunchArguments)
        job = checked(read_flags(LaunchArguments, parser.parse_args(words[2:])))
        ranks = job.world_size
    parser = Parser(prog="train")
    add_flags(parser, TrainSettings)
    own = [DATA if word == SHARED_DATA else word for word in words[words.index("train") + 1 :]]
    trained = read_flags(TrainSettings, parser.parse_args(own))
    trained.require_ranks(ranks)
    trained.run_config("cuda", ranks)
    return trained, ranks


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_printed_command_runs_the_planned_work(data, elsewhere):
    """Its flags are accepted for that number of ranks; model, sequences and micro batches are those of the plan."""
    (elsewhere / DATA).write_bytes(bytes(4096))
    gpus = data.draw(st.sampled_from([1, 2, 4, 8, 12, 16, 64]))
    axes = [("dp", "zero1", "zero2", "zero3"), ("", "tp2", "tp4"), ("", "cp2", "ring2"), ("", "pp2", "pp2x2", "pp2x4")]
    layout = "+".join(filter(None, (data.draw(st.sampled_from(axis)) for axis in axes)))
    arguments = {
        "size": data.draw(st.sampled_from(["small", "2.7B", "llama3/8B", "qwen3/0.6B"])),
        "context_length": data.draw(st.sampled_from([None, 256, 250, 2048])),
        "num_layers": data.draw(st.sampled_from([None, 6])),
        "num_kv_heads": data.draw(st.sampled_from([None, 4])),
        "tied_embeddings": data.draw(st.sampled_from([None, False])),
        "batch_size": data.draw(st.integers(1, 4)),
        "fast": data.draw(st.sampled_from(["off", "on"])),
        "checkpoint_blocks": data.draw(st.sampled_from([0, 1])),
        "micro_batches": data.draw(st.sampled_from([0, 2, 4])),
    }
    try:
        cell = planned(PlanArguments(**arguments, gpus=gpus, gpu="h200", strategy=(layout,)))
    except UserError:  # a plan that is refused has no command
        return
    said = command(cell)
    if said is None or "cannot run" in said.en:
        assert said is None or not is_trained(cell.config, cell.get("strategies")[0])
        return
    trained, ranks = parsed(said.en.split(": ")[-1])
    run = RunConfig.of(cell.config)
    if ranks > 1 and run.fast != "off":  # a small step runs without what would not save time
        assert trained.run_config("cuda", ranks).fast in (
            "off",
            run_of(cell.config, nearest_trained(Strategy.parse(layout))).fast,
        )
    assert (trained.model, ranks) == (run.model, gpus)
    assert trained.data.batch_size == run.batch_size * gpus
    nearest = nearest_trained(Strategy.parse(layout))
    (plan,) = plans({**cell.config, "strategies": [nearest.name]})
    shares = trained.parallel.data_place(0, ranks)[1]
    assert trained.data.micro_batches(shares) == plan.micro_batches
    assert (trained.parallel.tp, trained.parallel.cp, trained.parallel.pp) == (
        nearest.tensor,
        nearest.context,
        nearest.pipeline,
    )


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("dp", {"wrapper": "ddp", "engine": "ours"}),
        ("zero1", {"wrapper": "ddp-sharded"}),
        ("zero2", {"wrapper": "fsdp"}),
        ("zero3", {"wrapper": "fsdp"}),
        ("zero3+replicate2", {"engine": "torch", "dp_replicate": 2, "dp_shard": 8}),
        ("dp+tp4", {"engine": "torch", "dp_replicate": 4, "dp_shard": 1, "tp": 4}),
        ("zero1+tp4+pp2", {"dp_shard": 2, "tp": 4, "pp": 2, "pp_schedule": "1f1b"}),
        ("zero3+pp2x2", {"dp_shard": 8, "pp": 2, "pp_schedule": "interleaved"}),
        ("zero3+ring4", {"dp_shard": 4, "cp": 4}),
    ],
)
def test_the_command_of_a_layout(layout, flags, elsewhere):
    """ZeRO-2, ring attention and ZeRO-1 with split layers are not in `cs336 train`: the nearest is named as such."""
    (elsewhere / DATA).write_bytes(bytes(4096))
    said = command(planned(PlanArguments(size="2.7B", gpus=16, gpu="h200", fast="off", strategy=(layout,))))
    trained, ranks = parsed(said.en.split(": ")[-1])
    assert ranks == 16
    assert {name: getattr(trained.parallel, name) for name in flags} == flags
    is_own = nearest_trained(Strategy.parse(layout)) == Strategy.parse(layout)
    assert ("does not have" in said.en) is not is_own
    assert said.zh.endswith(said.en.split(": ")[-1])


def test_plans_without_a_command():
    """A part of a model, or of a step; a pipeline that `cs336 train` refuses says why."""
    assert command(planned(PlanArguments(size="small", gpus=2, count="feed-forward"))) is None
    assert command(planned(PlanArguments(size="small", gpus=2, mode="forward"))) is None
    cell = planned(PlanArguments(size="qwen3/0.6B", gpus=4, context_length=512, strategy=("dp+pp2",)))
    assert command(cell) is None
    assert "tied embeddings" in recommendation(cell).en


# -- where nothing fits -----------------------------------------------------------------------------------------------

ON_4090 = "--size 2.7B --gpus 8 --gpu 4090"
SHARDED = f"{ON_4090} --strategy zero3,zero3+tp8"
SPLIT = f"{ON_4090} --strategy dp+tp8,zero3+tp8"
WHERE_NOTHING_FITS = {
    "--fast": "--size 2.7B --gpus 8 --gpu h100 --context_length 2048 --batch_size 6 --strategy zero1 "
    "--checkpoint_blocks 0 --fast off",
    "--checkpoint_blocks": f"{SHARDED} --context_length 16384 --checkpoint_blocks 0",
    "--batch_size": f"{SHARDED} --context_length 1024 --batch_size 64",
    "--strategy": f"{ON_4090} --strategy dp",
    "zero3+tp4": "--size qwen2.5/7B --gpus 8 --gpu h100 --strategy zero3+tp8",
    "--gpus": "--size xxl --gpus 2 --gpu 4090",
    "--gpu": f"{ON_4090} --context_length 400000",
}
"""The flag that helps first -> a command line without a layout that fits."""


def advice(flags, capsys):
    assert main(["plan", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith(("Recommended: ", "No layout fits")))


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


def test_the_fast_step_is_not_offered_to_layouts_that_run_without_it(capsys):
    """Ranks that split layers have no fused kernels: `--fast on` changes nothing, and is not named."""
    given = f"{SPLIT} --context_length 4096 --checkpoint_blocks 0"
    off, on = (advice([*given.split(), "--fast", fast], capsys) for fast in ("off", "on"))
    assert off == on
    assert off.startswith("No layout fits")
    assert "--fast" not in off


def test_a_smaller_batch_is_the_largest_that_fits(capsys):
    given = WHERE_NOTHING_FITS["--batch_size"].split()
    batch = int(advice(given, capsys).split()[-1])
    assert advice([*given[:-1], str(batch + 1)], capsys).startswith("No layout fits")


@pytest.mark.parametrize("layout", ["dp+tp8", "zero3+tp8", "zero3+cp2", "zero3+cp8"])
def test_layouts_that_cannot_split_the_model_are_never_recommended(layout):
    """28 heads and a sequence of 500 tokens do not divide among these ranks; memory is enough."""
    fields = {"size": "qwen2.5/7B", "num_layers": 6, "context_length": 500, "gpus": 8, "gpu": "h200"}
    alone = planned(PlanArguments(**fields, strategy=(layout,)))
    possible = layout == "zero3+cp2"  # 500 is a multiple of 4
    assert fitting_layouts(alone) == ([layout] if possible else [])
    if not possible:
        said = recommendation(alone)
        assert said.en.startswith("No layout fits: ")
        assert " is impossible, because --" in said.en
        assert "--strategy " in said.en
        both = planned(PlanArguments(**fields, strategy=(layout, "zero1")))
        assert best_layout(both)[0] == "zero1"


def test_a_shorter_context_on_the_same_gpus_is_named(capsys):
    """The flags of that line fit; where no context is short enough, the line says so."""
    words = ["--size", "2.7B", "--gpus", "4", "--gpu", "4090", "--context_length", "200000"]
    assert main(["plan", *words]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("On these 4 ")]
    flags = line.split("fits: ")[1].split()
    assert advice([*words[:-2], *flags], capsys).startswith("Recommended: ")
    longer = [str(int(word) * 2) if before == "--context_length" else word for before, word in pairwise(["", *flags])]
    assert advice([*words[:-2], *longer], capsys).startswith("No layout fits")
    none = recommendation(planned(PlanArguments(size="qwen2.5/7B", gpus=4, gpu="4090")))
    assert none.en.endswith("only a smaller model fits.")


def test_a_step_has_its_size_and_the_flags_that_set_it(capsys):
    assert main(["plan", "--size", "small", "--gpus", "4", "--batch_size", "2"]) == 0
    assert "A step has 4,096 tokens: 4 GPUs x --batch_size 2 x --context_length 512;" in capsys.readouterr().out


def test_nothing_helps():
    said = recommendation(planned(PlanArguments(size="xxl", gpus=8, gpu="h100", context_length=10_000_000)))
    assert said.en.endswith("Take a smaller model or a shorter context.")


@pytest.mark.parametrize(
    ("fields", "layout", "reason"),
    [
        ({"size": "2.7B", "gpus": 1, "gpu": "h100"}, "DP", "one GPU"),
        ({"size": "2.7B", "gpus": 16, "gpu": "a100", "context_length": 2048}, "DP", "that cs336 train supports"),
        ({"size": "2.7B", "gpus": 4, "gpu": "4090"}, "DP + TP 4", "the most room"),
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
    """One sequence of 100,000 tokens does not fit on one GPU; a quarter of it does, and an eighth."""
    arguments = PlanArguments(size="2.7B", gpus=8, gpu="4090", context_length=100_000)
    cell = planned(arguments)
    assert fitting_layouts(cell) == ["zero3+cp4", "zero3+cp8"]
    assert recommendation(cell).en.startswith("Recommended: ZeRO-3 + CP 4, because ")
    assert "zero3+cp16" in planned(dataclasses.replace(arguments, gpus=64, context_length=131_072)).get("strategies")
    assert "zero3+cp8" not in planned(dataclasses.replace(arguments, context_length=16_384)).get("strategies")


def test_larger_recomputed_groups_come_before_more_gpus():
    arguments = PlanArguments(
        size="qwen2.5/7B", gpus=8, gpu="h100", context_length=131_072, fast="on", strategy=("zero3+cp4", "zero3+cp4")
    )
    cell = planned(arguments)
    assert cell.get("strategies") == ["zero3+cp4"]
    assert "The smallest change with which one fits: --checkpoint_blocks 2" in recommendation(cell).en
    assert not fitting_layouts(cell)
    assert fitting_layouts(planned(dataclasses.replace(arguments, checkpoint_blocks=2))) == ["zero3+cp4"]


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

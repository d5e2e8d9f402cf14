"""`cs336 optimize`: its flags, tables and commands, and what it does where there is a GPU."""

import dataclasses
import math
import shlex

import pytest

from cs336_systems.cli import COMMANDS, main
from cs336_systems.config import RunConfig
from cs336_systems.experiments.steps import optimize_command
from cs336_systems.experiments.steps.optimize_command import (
    OptimizeArguments,
    Search,
    advice,
    bench_command,
    choices_table,
    fastest_table,
    measured_table,
    search_for,
    task_of,
    train_command,
)
from cs336_systems.experiments.steps.optimized_steps import OPTIMIZE, chosen_of
from cs336_systems.flags import Parser, add_flags, read_flags
from cs336_systems.predict.optimize import KEEP, Candidate
from cs336_systems.predict.training_cost import Cost
from cs336_systems.record import GIB
from cs336_systems.report.cells import group
from cs336_systems.text import LANGUAGES
from tests.helpers import refused
from tests.unit.experiments.scripted_worker import MACHINE
from tests.unit.experiments.steps.samples import SAMPLES, way

SMALL = OptimizeArguments(size="small", context_length=512, tokens_per_step=8192)
NAMES = ("model", "batch_size", "precision", "attention", "checkpoint_blocks", "memory_budget", "optimizer_state",
         "max_grad_norm", "fast_parts")  # fmt: skip


def search_of(**fields):
    return Search(task_of(dataclasses.replace(SMALL, **fields)))


def same(one: RunConfig, other: RunConfig) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in NAMES)


def parsed(line: str):
    """The arguments of a command line."""
    program, command, *words = shlex.split(line)
    assert program == "cs336"
    parser = Parser()
    add_flags(parser, COMMANDS[command].arguments)
    return read_flags(COMMANDS[command].arguments, parser.parse_args(words))


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "fields"),
    [
        (Candidate(4, 4), {}),
        (Candidate(2, 8, 3, "bf16"), {"max_grad_norm": 0.0}),
        (Candidate(8, 2, graph=False), {"size": "qwen2.5/0.5B", "max_grad_norm": 0.5}),
        (Candidate(16, 1, budget="3.50GiB"), {"size": "", "d_model": 512, "num_heads": 8, "vocab_size": 8000}),
        (Candidate(1, 16), {"size": "qwen3/0.6B", "rope_theta": 5e5, "tied_embeddings": False}),
        (Candidate(4, 4), {"precision": "fp8"}),
    ],
)
def test_commands_lead_back_to_the_configuration(candidate, fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    task = task_of(dataclasses.replace(SMALL, **fields))
    run = task.run_config(candidate)
    settings = parsed(train_command(run, task.sequences))
    assert same(settings.run_config("cuda", 1), run)
    assert settings.data.micro_batches(1) == candidate.micro_batches
    assert settings.data.batch_size == task.sequences
    (benched,) = parsed(bench_command(run)).configs("cuda")
    assert same(benched, run)


def test_every_candidate_of_the_table_has_commands_that_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    search = search_of(memory="2.2GiB", allow=("bf16_state",))
    assert {found.candidate.activations for found in search.ranked} >= {"keep", "recompute"}
    for found in search.ranked:
        run = search.task.run_config(found.candidate)
        assert same(parsed(train_command(run, search.task.sequences)).run_config("cuda", 1), run)


def test_a_peak_close_to_the_capacity_sets_the_allocator_up():
    search = search_of()
    best = search.ranked[0]
    assert "expandable_segments" not in advice(search, best).en
    tight = dataclasses.replace(search.task, capacity=search.peak_of(best) * 1.01 + 0.6 * GIB)
    search.task = tight
    for line in advice(search, best).en.splitlines():
        assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True cs336" in line


@pytest.mark.parametrize(
    ("gpus", "layout", "parallel"),
    [
        (2, "dp", {"wrapper": "ddp"}),
        (8, "zero1", {"wrapper": "ddp-sharded"}),
        (16, "zero3", {"engine": "torch", "dp_shard": 16}),
    ],
)
def test_commands_of_several_gpus_lead_back_to_the_configuration(gpus, layout, parallel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    search = search_for(dataclasses.replace(SMALL, gpus=gpus, tokens_per_step=512 * 64))
    found = next(one for one in search.ranked if one.candidate.layout == layout)
    line = advice(search, found, node=8).en.removeprefix("Train with it: ")
    starts = {2: "torchrun --nproc_per_node 2 -m cs336_systems train ", 8: "torchrun --nproc_per_node 8 -m "}
    assert line.startswith(starts.get(gpus, "cs336 launch --slurm --nodes 2 --gpus_per_node 8 -- train "))
    settings = parsed(f"cs336 train {line.split(' train ')[1].replace('/shared/tokens.bin', 'tokens.bin')}")
    settings.require_ranks(gpus)
    assert {name: getattr(settings.parallel, name) for name in parallel} == parallel
    assert settings.data.micro_batches(gpus) == found.candidate.micro_batches
    run = settings.run_config("cuda", gpus)
    assert (run.batch_size, run.checkpoint_blocks) == (found.candidate.micro_batch, found.candidate.group)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"gpu": "h2000"}, ("--gpu", "h2000", "h200")),
        ({"gpu": "a100"}, ("--gpu", "a100-sxm4-80gb")),
        ({"gpu": "v100"}, ("--gpu", "bf16")),
        ({"tokens_per_step": 10_000}, ("--tokens_per_step 10,000", "9,728 or 10,240")),
        ({"tokens_per_step": 100}, ("--tokens_per_step 100", "512")),
        ({"tokens_per_step": -512}, ("--tokens_per_step -512", "512")),
        ({"tokens_per_step": 512 * 10**9}, ("--tokens_per_step", "at most 51,200,000,000")),
        ({"memory": "much"}, ("--memory", "much", "60GiB")),
        ({"memory": "60"}, ("--memory '60' has no unit; use 60GiB or 60GB",)),
        ({"host_memory": "60"}, ("--host_memory '60' has no unit; use 60GiB or 60GB",)),
        ({"gpu": "b200"}, ("--gpu 'b200'", "memory bandwidth", "cs336 calibrate")),
        ({"allow": ("fp8",)}, ("--allow 'fp8'", "--precision fp8")),
        ({"host_memory": "0GiB"}, ("--host_memory", "0GiB")),
        ({"gpus": 3}, ("--tokens_per_step 8,192", "16 sequences", "3 GPUs", "9,216")),
        ({"gpus": 0}, ("--gpus", "0")),
        ({"gpus": 2, "allow": ("bf16_state",)}, ("--allow", "one GPU")),
        ({"gpus": 2, "precision": "fp8"}, ("--precision fp8", "one GPU", "--parallel ddp or ddp-sharded")),
        ({"gpus": 10**7, "tokens_per_step": 512 * 10**7}, ("--gpus 10,000,000", "at most 1,000,000")),
        ({"gpu": "a100-sxm4-80gb", "precision": "fp8"}, ("no matmuls in fp8", "--precision bf16")),
        ({"gpus": 2, "host_memory": "8GiB"}, ("--host_memory", "one GPU")),
        ({"allow": ("bf16_stat",)}, ("--allow", "did you mean 'bf16_state'")),
    ],
)
def test_a_mistake_is_one_line_with_the_value_and_the_way_out(fields, named):
    with refused(*named):
        task_of(dataclasses.replace(SMALL, **fields))


@pytest.mark.parametrize(
    ("line", "named", "ways"),
    [
        (
            "--size llama3/8B --gpu h100 --tokens_per_step 65536",
            "H100 has 78.2 GiB",
            ("--allow bf16_state", "--gpus 2", "--gpu h200"),
        ),
        (
            "--size llama3/8B --gpu h100 --gpus 2 --context_length 32768 --tokens_per_step 524288",
            "H100 has 77.1 GiB",
            ("--context_length 16384", "--gpus 4", "--gpu h100nvl"),
        ),
        (
            "--size small --memory 1500MiB --tokens_per_step 8192",
            "--memory leaves 1.5 GiB",
            ("--memory 1.8GiB", "--allow bf16_state", "--gpus 2"),
        ),
    ],
)
def test_where_nothing_fits_only_ways_out_that_are_predicted_to_are_named(line, named, ways, capsys):
    """Weights, gradients and state of the first are too large: no context is short enough."""
    words = ["optimize", "--no_measure", *line.split()]
    assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{named}; use {', '.join(ways)} or a smaller model" in said
    assert "nothing fits" in said
    for flags in ways:
        name, value = flags.split()
        before = words.index(name) if name in words else len(words)
        assert main([*words[:before], name, value, *words[before + 2 :]]) == 0, flags


# -- output -----------------------------------------------------------------------------------------------------------


def test_the_command_prints_tables_and_a_command(capsys):
    assert main(["optimize", "--size", "small", "--tokens_per_step", "8192", "--no_measure", "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert "cs336 train --data tokens.bin --size small" in out
    assert "candidates" in err


def test_days_and_money_are_those_of_all_gpus(capsys):
    words = ["optimize", "--size", "small", "--tokens_per_step", "16384", "--gpus", "2", "--no_measure"]
    assert main([*words, "--train_tokens", "3B", "--price", "2/h"]) == 0
    assert "days and cost: 3,000,000,000 tokens, 2 a GPU hour" in capsys.readouterr().out
    assert main([*words, "--price", "2"]) == 2
    assert "--train_tokens" in capsys.readouterr().err
    search = search_for(dataclasses.replace(SMALL, gpus=2))
    best = search.ranked[:1]
    table = fastest_table(search, best, Cost(3e9, 2.0))
    assert [column.name.en for column in table.columns[-2:]] == ["days", "cost"]
    days = 3e9 / search.task.tokens * best[0].seconds / 86_400
    assert [float(text) for text in table.rows[0][-2:]] == pytest.approx([days, days * 24 * 2 * 2], rel=0.05)


@pytest.mark.parametrize(("gpu", "is_guessed"), [("h100", True), ("h200", False)])
@pytest.mark.parametrize("gpus", [1, 2])
def test_rates_of_a_data_sheet_are_remarked_on(gpus, gpu, is_guessed):
    search = search_for(dataclasses.replace(SMALL, gpus=gpus, gpu=gpu))
    notes = [note.en for note in fastest_table(search, search.ranked[:1]).notes]
    assert any("data sheet, within 25%" in note for note in notes) == is_guessed


def test_the_counts_of_a_choice_are_explained():
    search = search_of()
    chosen = search.ranked[0]
    count, size = chosen.candidate.micro_batches, chosen.candidate.micro_batch
    note = f"{count} x {size}: micro batches x sequences in each"
    assert note in [note.en for note in choices_table(search, chosen).notes]


def test_memory_may_be_given_in_mebibytes():
    assert task_of(dataclasses.replace(SMALL, memory="2560MiB")).memory == 2.5 * GIB


@pytest.mark.parametrize(("gpus", "error"), [(1, "0.5%"), (2, "2%")])
def test_the_margin_of_the_memory_is_named(gpus, error):
    search = search_for(dataclasses.replace(SMALL, gpus=gpus))
    notes = [note.en for note in fastest_table(search, search.ranked).notes]
    assert any(note.endswith(f"and {error} to the model's error") for note in notes)


def test_tables_have_ten_rows_at_most_the_fastest_first():
    search = search_of(tokens_per_step=512 * 96)
    table = fastest_table(search, search.ranked[:10])
    times = [float(row[5].replace(",", "")) for row in table.rows]
    assert len(times) == 10
    assert times == sorted(times)


@pytest.mark.parametrize(
    "fields",
    [{}, {"memory": "2GiB"}, {"gpu": "4090", "allow": ("bf16_state",)}, {"gpus": 2}, {"gpus": 2, "gpu": "l40"}],
)
def test_both_languages_have_the_same_rows(fields):
    search = search_for(dataclasses.replace(SMALL, **fields))
    for table in (fastest_table(search, search.ranked), choices_table(search, search.ranked[0])):
        plain = [table.plain(language) for language in LANGUAGES]
        assert len(plain[0].rows) == len(plain[1].rows)
        assert all("None" not in text for one in plain for row in one.rows for text in row)


def test_what_changes_the_numerics_is_marked():
    search = search_of()
    rows = {row[0].en: row for row in choices_table(search, search.ranked[0]).rows}
    assert "--allow bf16_state" in rows["bf16 weights and moments"][-1].en


# -- measurement ------------------------------------------------------------------------------------------------------


@pytest.fixture
def h200(scripted, monkeypatch):
    """A stand-in for a machine with an H200, on which the second candidate turns out to be the fastest."""
    environment = dataclasses.replace(MACHINE, gpu="NVIDIA H200", gpu_memory=150 * GIB)
    scripted.device, scripted.environment = "cuda", environment
    times = [0.3, 0.1, 0.2]

    def answer(request):
        metrics = [["step_time", "s", [times[len(scripted.asked) - 1]], ""], ["peak_memory", "B", [GIB], ""]]
        machine = dataclasses.asdict(environment)
        return {"event": "measured", "metrics": metrics, "environment": machine, "seconds": 1.0}

    scripted.answer = staticmethod(answer)
    monkeypatch.setattr(optimize_command.shutil, "which", lambda name: f"/usr/bin/{name}")
    return scripted


def test_the_best_three_are_measured_and_the_fastest_is_recommended(h200, tmp_path, capsys):
    arguments = dataclasses.replace(SMALL, output=str(tmp_path / "records.jsonl"))
    optimize_command.optimize(arguments)
    search = Search(task_of(SMALL))
    best = search.ranked[:3]
    asked = [request["config"] for request in h200.asked]
    assert [(config["batch_size"], config["micro_batches"]) for config in asked] == [
        (found.candidate.micro_batch, found.candidate.micro_batches) for found in best
    ]
    second = search.task.run_config(best[1].candidate)
    assert train_command(second, search.task.sequences) in capsys.readouterr().out


def test_candidates_that_fail_are_not_recommended(h200, tmp_path, capsys):
    h200.answer = staticmethod(lambda request: {"event": "failure", "status": "oom"})
    optimize_command.optimize(dataclasses.replace(SMALL, output=str(tmp_path / "records.jsonl")))
    search = Search(task_of(SMALL))
    first = search.task.run_config(search.ranked[0].candidate)
    out = capsys.readouterr().out
    assert train_command(first, search.task.sequences) in out
    assert "oom" in out


def test_another_card_is_not_measured(h200, tmp_path, capsys):
    optimize_command.optimize(dataclasses.replace(SMALL, gpu="h100", output=str(tmp_path / "records.jsonl")))
    assert not h200.asked
    assert "not measured" in capsys.readouterr().err


def test_a_machine_without_a_gpu_starts_no_process(scripted, monkeypatch, capsys):
    monkeypatch.setattr(optimize_command.shutil, "which", lambda name: None)
    optimize_command.optimize(SMALL)
    assert not scripted.asked
    assert "not measured" in capsys.readouterr().err


def test_long_steps_are_measured_a_few_times():
    task = task_of(SMALL)
    (found, *_) = Search(task).ranked
    assert optimize_command._timed_config(task, found._replace(seconds=60.0))["num_steps"] == 1
    assert optimize_command._timed_config(task, found._replace(seconds=1e-3))["num_steps"] == 50


def test_the_table_of_measurements_shows_both(h200, tmp_path):
    search = search_of()
    measured = [optimize_command.Measured(found, 2 * found.seconds, GIB, "ok") for found in search.ranked[:2]] + [
        optimize_command.Measured(search.ranked[2], math.inf, None, "oom: out of memory")
    ]
    rows = measured_table(search, measured).rows
    assert [row[3] for row in rows] == ["-50.0%", "-50.0%", ""]
    assert rows[2][2] == "oom"


# -- the experiment ---------------------------------------------------------------------------------------------------


def test_at_least_80_ways_are_measured():
    cells = list(OPTIMIZE.grid("course", RunConfig(device="cuda")))
    assert len(cells) >= 80
    assert {cell["micro_batches"] * cell["batch_size"] for cell in cells} == {64}


def test_regret_is_against_the_fastest_that_fits():
    cells = group(SAMPLES["optimized_steps"])
    best, fastest = chosen_of(cells, None)
    assert [cell.get("batch_size") for cell in best] == [64, 32, 16]
    assert fastest.get("batch_size") == 32
    best, fastest = chosen_of(cells, 8 * GIB)
    assert [cell.get("batch_size") for cell in best] == [16, 8, 64]
    assert fastest.get("batch_size") == 16
    assert chosen_of(group(way(64, 0.4, 0.4, 60)), None) is None


def test_findings_name_the_regret_and_the_seconds():
    regret, spent, accuracy = (finding(group(SAMPLES["optimized_steps"])) for finding in OPTIMIZE.findings)
    assert "0.5%" in regret.en
    assert "8 ways" in spent.en
    assert "8 predicted" in accuracy.en


def test_fp8_is_shown_beside_a_choice_that_keeps_all_and_gives_what_it_says():
    search, own = search_of(), search_of(precision="fp8")
    rows = {row[0].en: row for row in choices_table(search, search.ranked[0]).rows}
    fp8 = rows["matmuls in FP8"]
    assert fp8[3].startswith("-")
    assert "--precision fp8" in fp8[-1].en
    same_way = next(found for found in own.ranked if found.candidate == search.ranked[0].candidate)
    assert fp8[2] == f"{1e3 * same_way.seconds:,.2f}"
    assert "fp8" in fastest_table(own, own.ranked).title.en
    assert not own.groups, "FP8 has no recomputed groups"
    assert "matmuls in FP8" not in {row[0].en for row in choices_table(own, own.ranked[0]).rows}
    assert any("FP8, 1,979 TFLOP/s" in note.en for note in fastest_table(own, own.ranked).notes)
    assert not any("MFU in FP8" in note.en for note in fastest_table(search, search.ranked).notes)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"gpu": "a100-sxm4-80gb"}, "A100-SXM4-80GB has no FP8"),
        ({"d_model": 776, "num_heads": 4, "size": "", "vocab_size": 8000}, "multiples of 16, got d_model 776"),
    ],
)
def test_a_step_without_fp8_says_why(fields, why):
    search = search_of(**fields)
    table = choices_table(search, search.ranked[0])
    assert "matmuls in FP8" not in {row[0].en for row in table.rows}
    (note,) = [note for note in table.notes if note.en.startswith("no prediction of matmuls in FP8: ")]
    assert note.en.endswith(why)
    assert note.zh != note.en


def test_a_choice_that_offloads_or_recomputes_has_its_best_in_fp8():
    """FP8 has no recomputed groups: in the place of the chosen candidate stands the best of a search in FP8."""
    search, own = (search_of(size="medium", memory="8GiB", precision=precision) for precision in ("bf16", "fp8"))
    chosen = search.ranked[0]
    assert chosen.candidate.activations != KEEP
    (fp8,) = [row for row in choices_table(search, chosen).rows if row[0].en == "matmuls in FP8"]
    assert fp8[2] == f"{1e3 * own.ranked[0].seconds:,.2f}"

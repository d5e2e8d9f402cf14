"""The settings of training: flags, their flat form, and mistakes that are reported in one line."""

import dataclasses
import math
from contextlib import nullcontext

import numpy as np
import pytest

from cs336_systems.cli import main
from cs336_systems.config import UserError
from cs336_systems.flags import build, flags_of
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.train.settings import TrainSettings
from tests.distributed.train_cases import argv_of, fields, text_of
from tests.helpers import assert_refused


@pytest.fixture
def output(tmp_path):
    (tmp_path / "short.txt").write_bytes(text_of(330))
    return tmp_path / "output"


def settings_of(output, **changes) -> TrainSettings:
    return build(TrainSettings, fields(output, **changes))


INVALID = [
    ("data", "", "--data"),
    ("data", "missing.txt", "missing.txt"),
    ("data", ".", r"'\.'"),
    ("steps", 0, "steps.*0"),
    ("batch_size", 0, "batch_size.*0"),
    ("micro_batch_size", -1, "micro_batch_size.*-1"),
    *(("learning_rate", value, f"learning_rate.*{value}") for value in (0.0, -1.0, math.nan, math.inf)),
    ("warmup_steps", 8, "warmup_steps.*8"),
    ("warmup_steps", -1, "warmup_steps.*-1"),
    *(
        ("validation_share", value, f"validation_share must be above 0 and below 1, got {value}")
        for value in (0.0, 1.0, math.nan)
    ),
    ("final_share", 1.5, r"final_share must be at least 0 and at most 1, got 1\.5"),
    ("max_grad_norm", -1.0, "max_grad_norm.*-1"),
    ("weight_decay", -0.5, r"weight_decay.*-0\.5"),
    ("beta1", 1.0, r"beta1.*1\.0"),
    ("beta2", -0.1, r"beta2.*-0\.1"),
    ("rank_timeout", 0.5, r"rank_timeout.*0\.5"),
    *((name, 0, f"{name}.*0") for name in ("save_every", "keep", "eval_batches", "most_skipped", "loss_scale_growth")),
    *((name, -1, f"{name}.*-1") for name in ("keep_every", "eval_every", "sample_tokens", "checkpoint_blocks")),
    ("size", "huge", "'huge'"),
    ("d_model", 6, "6 / 2 = 3"),
    ("num_layers", 0, "num_layers.*0"),
]


@pytest.mark.parametrize(("name", "value", "named"), INVALID, ids=lambda value: str(value))
def test_an_invalid_value(name, value, named, output):
    with pytest.raises(UserError, match=named) as caught:
        build(TrainSettings, {**fields(output), name: value})
    assert "\n" not in str(caught.value)


TORCH = {"engine": "torch", "parallel": "ddp"}
NOT_WITH_THIS_ENGINE = [
    ({"parallel": "ddp", "tp": 2}, "--tp 2 needs --engine torch"),
    ({"parallel": "fsdp", "dp_shard": 0}, "--dp_shard 0 needs --engine torch"),
    ({**TORCH, "parallel": "fsdp"}, "--parallel fsdp.*--dp_shard"),
    ({**TORCH, "tp": 0}, "--tp.*0"),
    ({**TORCH, "dp_replicate": -1}, "--dp_replicate.*-1"),
    ({**TORCH, "compile": True, "optimizer_state": "bf16"}, "--compile and --optimizer_state need --engine ours"),
    ({**TORCH, "memory_budget": "1GiB"}, "--memory_budget needs --engine ours"),
    ({**TORCH, "optimizer_state": "bf16"}, "--optimizer_state needs --engine ours"),
    ({**TORCH, "tp": 4}, "--num_heads 2 .*--tp 4"),
    ({**TORCH, "tp": 2, "context_length": 15}, "--context_length 15 .*--tp 2"),
    ({**TORCH, "tp": 2, "d_ff": 33}, "--d_ff 33 .*--tp 2"),
    ({**TORCH, "cp": 0}, "--cp.*0"),
    ({"parallel": "ddp", "cp": 2}, "--cp 2 needs --engine torch"),
    ({**TORCH, "cp": 2, "tp": 2, "context_length": 12}, "--context_length 12 .*--cp 2 x --tp 2 = 8"),
    ({"parallel": "ddp", "pp": 2}, "--pp 2 needs --engine torch"),
    ({**TORCH, "pp": 0}, "--pp.*0"),
    ({**TORCH, "pp_schedule": "interleaved"}, "--pp_schedule interleaved needs a pipeline"),
    ({**TORCH, "pp": 2, "num_layers": 1}, "--num_layers 1 .* 2 stages"),
    ({**TORCH, "pp": 2, "pp_schedule": "interleaved", "num_layers": 3}, "--num_layers 3 .* 4 stages"),
]


@pytest.mark.parametrize(("flags", "named"), NOT_WITH_THIS_ENGINE, ids=lambda value: str(value))
def test_flags_that_an_engine_does_not_have(flags, named, output):
    with pytest.raises(UserError, match=named) as caught:
        settings_of(output, **flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({}, 1, Mesh()),
        ({"dp_shard": 0}, 1, Mesh()),
        ({"dp_shard": 0}, 8, Mesh(dp_shard=8)),
        ({"dp_shard": 0, "tp": 2}, 8, Mesh(dp_shard=4, tp=2)),
        ({"dp_shard": 0, "cp": 2, "tp": 2}, 8, Mesh(dp_shard=2, cp=2, tp=2)),
        ({"dp_shard": 2, "dp_replicate": 4}, 8, Mesh(dp_replicate=4, dp_shard=2)),
        ({"dp_shard": 0, "pp": 2, "tp": 2}, 8, Mesh(pp=2, dp_shard=2, tp=2)),
        ({"pp": 2}, 4, "--pp 2 needs 2 ranks, and there are 4; --dp_shard 0 uses"),
        ({}, 2, "--dp_shard 1 needs 1 rank, and there are 2;"),
        ({"tp": 2}, 1, "--tp 2 needs 2 ranks, and there is 1;"),
        ({"dp_shard": 0, "tp": 2}, 3, "--dp_shard 0 x --tp 2 needs a multiple of 2 ranks, and there are 3"),
        (
            {"dp_shard": 0, "dp_replicate": 8},
            4,
            "--dp_replicate 8 x --dp_shard 0 needs a multiple of 8 ranks, and there are 4",
        ),
    ],
)
def test_axes_multiply_to_the_ranks(given, ranks, expected, output):
    """Ranks that differ in their place on the data axes alone compute different sequences."""
    parallel = settings_of(output, **TORCH, num_layers=2, **given).parallel
    if isinstance(expected, Mesh):
        assert parallel.axes(ranks) == expected
        shares = expected.dp_replicate * expected.dp_shard
        places = [expected.place(rank) for rank in range(ranks)]
        wanted = [(place.dp_replicate * expected.dp_shard + place.dp_shard, shares) for place in places]
        assert [parallel.data_place(rank, ranks) for rank in range(ranks)] == wanted
    else:
        with pytest.raises(UserError, match=expected):
            parallel.axes(ranks)


def test_one_process_is_told_how_several_are_started(output):
    parallel = settings_of(output, **TORCH, tp=2, cp=2, dp_shard=0).parallel
    command = "torchrun --nproc_per_node 4 -m cs336_systems train"
    with pytest.raises(
        UserError, match=f"--cp 2 x --tp 2 needs 4 ranks, and this is 1 process; start them .* {command}"
    ):
        parallel.require_processes(1)
    parallel.require_processes(2)
    settings_of(output, **TORCH, dp_shard=0).parallel.require_processes(1)
    settings_of(output).parallel.require_processes(1)


@pytest.mark.parametrize(
    ("schedule", "ranks", "possible"),
    [("1f1b", 2, {2, 3, 4, 5, 6}), ("1f1b", 4, {4, 5, 6}), ("interleaved", 2, {1, 2, 3, 4, 6})],
)
def test_the_micro_batches_that_a_pipeline_can_run(schedule, ranks, possible, output):
    parallel = settings_of(output, **TORCH, pp=ranks, pp_schedule=schedule, num_layers=8).parallel
    for count in range(1, 7):
        with nullcontext() if count in possible else pytest.raises(UserError, match=f"got {count};|run {count} micro"):
            parallel.require_micro_batches(count)


def test_the_fast_step_is_off_with_the_engine_of_torch(output):
    assert settings_of(output, **TORCH, fast="on").run_config("cuda", 1).fast_parts == set()


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (21, 2), (199, 19), (200, 20), (9000, 20)])
def test_the_default_warmup_is_a_tenth_of_the_steps_at_most_20(steps, warmup, output):
    given = {name: value for name, value in fields(output, steps=steps).items() if name != "warmup_steps"}
    settings = build(TrainSettings, given)
    assert settings.optimizer.lr_warmup_steps == settings.to_dict()["warmup_steps"] == warmup


FLAT_FORM = """
    async_save attention batch_size beta1 beta2 checkpoint_blocks compile context_length cp d_ff d_head d_model
    data device dp_replicate dp_shard engine eval_batches eval_every fast final_share find_nan fp8_check_every
    init keep keep_best keep_every learning_rate log_every loss_scale_growth max_grad_norm memory_budget
    micro_batch_size most_skipped norm_eps num_heads num_kv_heads num_layers optimizer_state output pack
    parallel pp pp_schedule precision qk_norm qkv_bias rank_timeout replay_every resume_from rope_scaling
    rope_theta sample_prompt sample_tokens save_every seed size steps tensorboard tied_embeddings tp
    validation_share vocab_size warmup_steps weight_decay
"""
"""The names of the flat form, which the manifests of checkpoints hold. To rename or remove one makes older checkpoints
unreadable; add new ones here."""


def test_flags_have_the_names_of_the_flat_form(output):
    settings = settings_of(output, final_share=0.25, checkpoint_blocks=2, most_skipped=3)
    names = [found.name for found in flags_of(TrainSettings)]
    assert sorted(names) == FLAT_FORM.split()
    flat = settings.to_dict()
    assert flat.keys() == {*names, "model"}
    assert (flat["final_share"], flat["warmup_steps"], flat["checkpoint_blocks"]) == (0.25, 1, 2)
    assert (settings.optimizer.min_lr_share, settings.optimizer.lr_warmup_steps) == (0.25, 1)
    assert (settings.compute.recompute_blocks, settings.optimizer.max_skipped) == (2, 3)
    assert flat["model"]["vocab_size"] == 256
    assert build(TrainSettings, {name: flat[name] for name in names}) == settings


def test_help_names_the_minimum_learning_rate(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "minimum learning rate, as a share of the peak" in help_text
    assert "width of the residual stream (default: the size's)" in help_text


def test_text_has_bytes_for_tokens(output):
    model = settings_of(output).model
    assert (model.vocab_size, model.d_model, model.context_length) == (256, 16, 16)
    (output.parent / "t.bin").write_bytes(b"\0\0")
    assert build(TrainSettings, {"data": str(output.parent / "t.bin")}).model.vocab_size == 10_000


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "expected"),
    [(8, 8, 1, 1), (8, 2, 2, 2), (12, 1, 4, 3), (4, 8, 4, 1), (8, 8, 3, "8"), (2, 1, 4, "2"), (12, 5, 1, "5")],
)
def test_micro_batches(batch, micro, ranks, expected, output):
    data = settings_of(output, batch_size=batch, micro_batch_size=micro).data
    if isinstance(expected, int):
        assert data.micro_batches(ranks) == expected
    else:
        with pytest.raises(UserError, match=expected):
            data.micro_batches(ranks)


FAST_PARTS = [
    ("none", 1, "on", {"kernels", "loss", "optimizer"}),
    ("ddp", 1, "on", {"kernels", "loss", "optimizer"}),
    ("ddp", 2, "on", set()),
    ("ddp", 2, "kernels,loss", {"kernels", "loss"}),
    ("ddp-sharded", 2, "kernels", {"kernels"}),
    ("fsdp", 2, "on", set()),
    ("none", 1, None, set()),
    ("ddp", 2, "optimizer", "optimizer is not available with 2 ranks"),
    ("fsdp", 2, "loss", "loss is not available with 2 ranks"),
    ("none", 1, "graph", "needs a CUDA GPU"),
    ("none", 1, "everything", "everything"),
    ({**TORCH, "dp_shard": 2}, 2, "kernels,loss", {"kernels", "loss"}),
    ({**TORCH, "dp_shard": 0}, 1, "on", set()),
    ({**TORCH, "dp_shard": 0}, 1, "optimizer", "optimizer is not available"),
    ({**TORCH, "cp": 2}, 2, "on", set()),
    ({**TORCH, "tp": 2}, 2, "kernels", "kernels is not available with 2 ranks and --engine torch .*--tp 2"),
]


@pytest.mark.parametrize(("parallel", "ranks", "fast", "expected"), FAST_PARTS)
def test_available_parts_of_the_fast_step(parallel, ranks, fast, expected, output):
    flags = parallel if isinstance(parallel, dict) else {"parallel": parallel}
    settings = settings_of(output, **flags, fast=fast)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            settings.run_config("cpu", ranks)
    else:
        assert settings.run_config("cpu", ranks).fast_parts == expected


def test_a_gpu_runs_the_fast_step_by_default(output):
    settings = settings_of(output, precision="bf16")
    assert settings.run_config("cuda", 1).fast_parts == {"kernels", "loss", "optimizer", "graph"}
    assert settings.run_config("cuda", 2).fast_parts == set()  # small: bound by launches
    large = settings_of(output, precision="bf16", parallel="ddp", d_model=4096, context_length=2048)
    assert large.run_config("cuda", 2).fast_parts == {"kernels", "loss"}
    sharded = settings_of(output, precision="bf16", **TORCH, dp_shard=0, d_model=4096, context_length=2048)
    assert sharded.run_config("cuda", 2).fast_parts == {"kernels", "loss"}
    with pytest.raises(UserError, match="needs the optimizer"):
        settings_of(output, fast="graph").run_config("cuda", 1)


def test_a_bf16_optimizer_state_needs_the_packed_optimizer(output):
    settings = settings_of(output, precision="bf16", optimizer_state="bf16", fast="on")
    assert settings.run_config("cpu", 1).optimizer_state == "bf16"
    for refused, ranks in (
        (settings, 2),
        (dataclasses.replace(settings, compute=dataclasses.replace(settings.compute, fast="off")), 1),
        (settings_of(output, precision="fp32", optimizer_state="bf16", fast="on"), 1),
    ):
        with pytest.raises(UserError, match="optimizer_state bf16 needs precision bf16 or fp8 and the optimizer"):
            refused.run_config("cpu", ranks)


MISTAKES = [
    ("data", None, "--data"),
    ("data", "missing.txt", "'missing.txt'"),
    ("data", "tiny.txt", "tiny.txt"),
    ("data", "matrix.npy", "matrix.npy"),
    ("vocab_size", 100, "100"),
    ("output", "in-the-way.txt/below", "in-the-way.txt/below"),
    ("parallel", "magic", "'magic'"),
    ("precision", "fp7", "'fp7'"),
    ("device", "tpu", "'tpu'"),
    ("steps", 0, "steps"),
    ("micro_batch_size", 3, "micro_batch_size 3"),
    ("attention", "flash_triton", "flash_triton"),
]


@pytest.mark.parametrize(("name", "value", "named"), MISTAKES, ids=lambda value: str(value))
def test_a_mistake_on_the_command_line(name, value, named, elsewhere, capfd):
    (elsewhere / "text.txt").write_bytes(text_of(1000))
    (elsewhere / "tiny.txt").write_bytes(b"too short")
    (elsewhere / "in-the-way.txt").write_bytes(b"in the way")
    np.save(elsewhere / "matrix.npy", np.zeros((100, 100), int))
    given = {**fields(elsewhere / "output", data="text.txt"), "output": "output", name: value}
    given = {name: value for name, value in given.items() if value is not None}
    assert_refused(argv_of(given), [named], capfd)

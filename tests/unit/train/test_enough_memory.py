"""Runs that cannot fit are refused by prediction; runs that may fit never are."""

import dataclasses

import pytest
import torch

from cs336_systems.cli import main
from cs336_systems.config import UserError
from cs336_systems.flags import build
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.engine_memory import engine_estimate, engine_peak
from cs336_systems.predict.fit import FIT_MARGIN
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.record import GIB
from cs336_systems.train import enough_memory
from cs336_systems.train.enough_memory import Memory, ran_out, require_batch, require_memory
from cs336_systems.train.loop import Trainer
from cs336_systems.train.settings import TrainSettings
from tests.helpers import assert_refused

XL = {"size": "xl", "context_length": 512, "batch_size": 8}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x" * 100)
    return str(path)


def gpu(gib, ranks=1):
    return Memory(gib * GIB, "this GPU", ranks)


def refusal(data, memory, world_size=1, device="cuda", **flags):
    """Return why the run is refused, or ""."""
    settings = build(TrainSettings, {"data": data, **flags})
    try:
        require_batch(settings, world_size, memory)
        require_memory(settings, device, world_size, memory)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "flags", [{}, {"precision": "bf16"}, {"precision": "bf16", "fast": "off"}, {"fast": "off", "checkpoint_blocks": 1}]
)
def test_the_limit_is_the_predicted_peak_of_one_rank(flags, data):
    run = build(TrainSettings, {"data": data, **XL, **flags}).run_config("cuda", 1)
    peak = max(estimate(run).peak, building_peak(run).peak)
    assert refusal(data, gpu(1.001 * peak / FIT_MARGIN / GIB), **XL, **flags) == ""
    assert "this GPU has" in refusal(data, gpu(0.999 * peak / FIT_MARGIN / GIB), **XL, **flags)


def test_a_refusal_names_the_need_the_memory_and_a_way_out_that_fits(data):
    flags = {**XL, "batch_size": 64, "micro_batch_size": 64, "precision": "bf16"}
    message = refusal(data, gpu(80), **flags)
    assert "needs 92.8 GiB of memory, and this GPU has 80.0 GiB (predicted, not tried)" in message
    size = int(message.rsplit("it is predicted to fit with --micro_batch_size ", 1)[1])
    assert 1 <= size < 64
    assert refusal(data, gpu(80), **{**flags, "micro_batch_size": size}) == ""
    assert "\n" not in message


def test_recomputation_is_named_where_smaller_micro_batches_are_not_enough(data):
    flags = {**XL, "batch_size": 1, "context_length": 8192, "precision": "bf16", "fast": "off"}
    message = refusal(data, gpu(48), **flags)
    assert message.endswith("it is predicted to fit with --checkpoint_blocks 1")
    assert refusal(data, gpu(48), **flags, checkpoint_blocks=1) == ""


SPLIT = {"size": "2.7B", "precision": "bf16", "engine": "torch", "context_length": 4096}


@pytest.mark.parametrize("fast", ["off", "kernels,loss"])
def test_ranks_that_shard_weights_have_the_peak_of_the_engine(fast, data):
    flags = {**SPLIT, "dp_shard": 4, "batch_size": 16, "fast": fast}
    run = dataclasses.replace(build(TrainSettings, {"data": data, **flags}).run_config("cuda", 4), batch_size=4)
    assert run.fast == fast
    peak = engine_estimate(run, Mesh(dp_shard=4)).peak
    assert refusal(data, gpu(1.001 * peak / FIT_MARGIN / GIB), 4, **flags) == ""
    assert "memory, and this GPU" in refusal(data, gpu(0.999 * peak / FIT_MARGIN / GIB), 4, **flags)


@pytest.mark.parametrize("axes", [{"tp": 4}, {"tp": 2, "dp_shard": 2}, {"tp": 2, "dp_replicate": 2}])
@pytest.mark.parametrize("blocks", [0, 1])
def test_ranks_that_split_layers_have_the_peak_of_the_engine(axes, blocks, data):
    """One micro batch of 8 sequences on each group of `tp` ranks."""
    batch = 8 * 4 // axes["tp"]
    flags = {**SPLIT, **axes, "batch_size": batch, "checkpoint_blocks": blocks}
    run = build(TrainSettings, {"data": data, **flags}).run_config("cuda", 4)
    share = dataclasses.replace(run, batch_size=8 // axes["tp"])
    peak = engine_estimate(share, Mesh(**axes)).peak
    assert refusal(data, gpu(1.001 * peak / FIT_MARGIN / GIB), 4, **flags) == ""
    assert "memory, and this GPU" in refusal(data, gpu(0.999 * peak / FIT_MARGIN / GIB), 4, **flags)


def test_recomputation_is_named_for_ranks_that_split_layers(data):
    """Also for several micro batches, whose gradients add up."""
    flags = {**SPLIT, "tp": 4, "batch_size": 32}
    message = refusal(data, gpu(20), 4, **flags)
    assert message.endswith("it is predicted to fit with --checkpoint_blocks 1")
    assert "needs at least" in message
    assert refusal(data, gpu(20), 4, **flags, checkpoint_blocks=1) == ""


def test_a_micro_batch_of_fewer_sequences_than_ranks_has_a_prediction(data):
    """One sequence that `tp` or `cp` ranks share."""
    for axes in ({"tp": 4}, {"cp": 4}, {"cp": 2, "tp": 2}):
        flags = {**SPLIT, **axes, "batch_size": 4, "micro_batch_size": 1, "checkpoint_blocks": 1}
        run = build(TrainSettings, {"data": data, **flags}).run_config("cuda", 4)
        mesh = Mesh(**axes)
        micro_batches = 1 if "cp" not in axes else 4  # shards of gradients add up
        peak = engine_peak(run, mesh, micro_batches, 1)
        assert refusal(data, gpu(1.001 * peak / FIT_MARGIN / GIB), 4, **flags) == ""
        assert "memory, and this GPU" in refusal(data, gpu(0.999 * peak / FIT_MARGIN / GIB), 4, **flags)


@pytest.mark.parametrize(
    ("flags", "device", "advice"),
    [
        ({"size": "2.7B"}, "cpu", "use a smaller --size; cs336 memory shows what a step needs"),
        (
            {"size": "2.7B"},
            "cuda",
            "use a smaller --size or more ranks with --parallel fsdp; cs336 fit shows what fits",
        ),
        ({"size": "2.7B", "engine": "torch"}, "cuda", "use a smaller --size; cs336 fit shows what fits"),
        (
            {"size": "2.7B", "precision": "fp8", "context_length": 16384},
            "cuda",
            "smaller --size or --memory_budget auto or more ranks with --parallel fsdp; cs336 fit shows what fits",
        ),
    ],
)
def test_other_ways_out(flags, device, advice, data):
    assert refusal(data, gpu(45 if "precision" in flags else 10), device=device, **flags).endswith(advice)


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ({"parallel": "fsdp"}, 1 / 4),
        ({"engine": "torch", "dp_shard": 4, "precision": "fp16"}, 1 / 4),
        ({"engine": "torch", "dp_shard": 2, "dp_replicate": 2, "precision": "fp16"}, 1 / 2),
        ({"engine": "torch", "dp_shard": 2, "tp": 2, "num_heads": 20, "precision": "fp16"}, 1 / 4),
        ({"engine": "torch", "dp_shard": 2, "cp": 2, "attention": "reference"}, 1 / 4),
        ({"engine": "torch", "dp_shard": 2, "pp": 2, "micro_batch_size": 1}, 1 / 4),
        ({"memory_budget": "auto"}, 1),
        ({"compile": True, "fast": "off"}, 1),
    ],
    ids=str,
)
def test_only_what_a_rank_certainly_holds_counts_where_nothing_is_predicted(flags, share, data):
    settings = build(TrainSettings, {"data": data, **XL, **flags})
    held = 16 * share * settings.model.parameters
    assert refusal(data, gpu(held / GIB), 4, **XL, **flags) == ""
    assert "needs at least" in refusal(data, gpu(held / 1.05 / GIB), 4, **XL, **flags)


def test_ranks_shard_the_state_of_the_optimizer_or_nothing(data):
    settings = build(TrainSettings, {"data": data, **XL})
    run = dataclasses.replace(settings.run_config("cuda", 4), batch_size=2)
    peak, moments = estimate(run).peak, 8 * settings.model.parameters
    for parallel, need in (("ddp", peak), ("ddp-sharded", peak - 0.75 * moments)):
        assert refusal(data, gpu(1.001 * need / FIT_MARGIN / GIB), 4, **XL, parallel=parallel) == ""
        assert refusal(data, gpu(0.999 * need / FIT_MARGIN / GIB), 4, **XL, parallel=parallel) != ""


def test_ranks_of_one_machine_share_its_memory(data):
    message = refusal(data, Memory(60 * GIB, "this machine", 2), 2, "cpu", **XL)
    assert "for the 2 ranks of this machine" in message
    assert message.endswith("use a smaller --size or --parallel fsdp; cs336 memory shows what a step needs")
    assert refusal(data, Memory(60 * GIB, "this machine"), 2, "cpu", **XL) == ""


def test_tokens_of_a_batch_count_and_are_shared_by_ranks(data):
    batch = {"batch_size": 2**26, "micro_batch_size": 8, "context_length": 256}  # 128 GiB
    assert "--batch_size 67108864: the tokens of a step alone need 128.0 GiB" in refusal(data, gpu(100), **batch)
    assert refusal(data, gpu(129), **batch) == ""
    assert refusal(data, gpu(100), 2, **batch) == ""


def test_a_batch_that_no_machine_holds_is_refused_without_a_machine(data):
    require_batch(build(TrainSettings, {"data": data, "batch_size": 2**30, "context_length": 128}), 1)
    too_large = build(TrainSettings, {"data": data, "batch_size": 2**31, "context_length": 128})
    with pytest.raises(UserError, match=r"need 2,048\.0 GiB of memory, and no machine has that; use a smaller --batch"):
        require_batch(too_large, 1)
    require_batch(too_large, 2)


def test_an_absurd_batch_is_refused_before_its_micro_batches_are_counted(data, elsewhere, capfd):
    """Neither is a multiple of 8; the second is not for several ranks, either."""
    named = ["--batch_size 99999999999999999999: the tokens of a step alone need", "use a smaller --batch_size"]
    words = ["train", "--data", data, "--device", "cpu", "--batch_size", "9" * 20]
    assert_refused(words, named, capfd)
    words = ["launch", "--slurm", "--", *words, "--output", "/shared/run"]
    assert_refused(words, [named[0], "no machine has that"], capfd)
    words = ["train", "--data", data, "--micro_batch_size", "9" * 20]
    assert_refused(words, ["--micro_batch_size must be at most 2147483647, got 9999"], capfd)


def test_the_check_needs_no_search_for_a_model_that_is_much_too_large(data, monkeypatch):
    calls = []
    monkeypatch.setattr(enough_memory, "estimate", lambda run: calls.append(run) or estimate(run))
    assert refusal(data, gpu(80), num_layers=1000, d_model=8192, num_heads=8, fast="off")
    assert len(calls) <= 2


def test_gradients_of_earlier_micro_batches_count_where_weights_are_sharded(data):
    flags = {**SPLIT, "dp_shard": 4, "batch_size": 16, "micro_batch_size": 1, "fast": "off"}
    run = dataclasses.replace(build(TrainSettings, {"data": data, **flags}).run_config("cuda", 4), batch_size=1)
    first, later = (engine_peak(run, Mesh(dp_shard=4), count) for count in (1, 4))
    assert later > 1.01 * first
    message = refusal(data, gpu(0.999 * later / FIT_MARGIN / GIB), 4, **flags)
    assert "needs" in message
    assert "at least" not in message
    assert refusal(data, gpu(1.001 * later / FIT_MARGIN / GIB), 4, **flags) == ""


def ran_out_of(data, memory, **flags):
    return str(ran_out(build(TrainSettings, {"data": data, **XL, **flags}), "cuda", 1, memory))


def test_a_step_that_ran_out_of_memory_names_a_way_out(data):
    flags = {"batch_size": 64, "micro_batch_size": 64, "precision": "bf16"}
    message = ran_out_of(data, gpu(92), **flags)
    assert message.startswith(
        "out of memory: a step of this model is predicted to need 92.8 GiB of memory, and this GPU"
    )
    assert message.endswith("it is predicted to fit with --micro_batch_size 32")


def test_other_programs_are_named_where_the_step_should_have_fitted(data):
    message = ran_out_of(data, gpu(139), batch_size=8, micro_batch_size=8, precision="bf16")
    assert "other programs may use it, too: nvidia-smi lists them" in message
    assert message.endswith("it is predicted to fit with --micro_batch_size 4")


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        ({"compile": True, "fast": "off"}, "--micro_batch_size 4 or --checkpoint_blocks 1 or a smaller --size"),
        ({"memory_budget": "auto"}, "--micro_batch_size 4 or a smaller --size"),
        ({"compile": True, "fast": "off", "micro_batch_size": 1, "checkpoint_blocks": 1}, "a smaller --size"),
    ],
    ids=str,
)
def test_ways_to_try_where_nothing_is_predicted(flags, ways, data):
    message = ran_out_of(data, gpu(80), **{"micro_batch_size": 8, **flags})
    assert message == f"out of memory: what a step needs is not predicted here, and this GPU has 80.0 GiB; try {ways}"


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_gpu_out_of_memory_is_one_line(is_saved, data, elsewhere, capfd, monkeypatch):
    """Before the first checkpoint the settings are wrong; later the run may be resumed."""

    def fail(trainer):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.16 GiB.")

    words = ["train", "--data", data, "--size", "tiny", "--device", "cpu", "--context_length", "16", "--steps", "1"]
    words += ["--validation_share", "0.5", "--output", "out"]
    if is_saved:
        assert main(words) == 0
        words[words.index("--steps") + 1] = "2"
    capfd.readouterr()
    monkeypatch.setattr(Trainer, "run", fail)
    assert main(words) == (1 if is_saved else 2)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "memory" in line]
    assert line.startswith("cs336 train: out of memory: a step of this model is predicted to need 0.")
    assert line.endswith("; the same command resumes from the last checkpoint") == is_saved

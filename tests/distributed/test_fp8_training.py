"""Training runs in FP8: resumed to the bit, gone on in another precision, and with blocks that return to bf16."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from cs336_systems import record
from cs336_systems.cli import main
from cs336_systems.flags import build
from cs336_systems.kernels.fused.fp8_run import TENSORS
from cs336_systems.parallel.launch import spawn
from cs336_systems.train import fp8_watch
from cs336_systems.train.loop import STOPPED, Trainer
from cs336_systems.train.settings import TrainSettings
from tests.distributed.train_cases import Run, fields, losses_of, perform, perform_all, text_of

FP8 = {"precision": "fp8", "d_model": 32, "num_layers": 2, "fp8_check_every": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    (folder / "short.txt").write_bytes(text_of(330))
    return folder


def done(settings, **changes):
    found = perform(Run({**settings, **changes}))
    assert (found.crash, found.error, found.code) == ("", "", 0)
    return found


def test_a_stopped_run_goes_on_to_the_bit(place, alone):
    whole = done(fields(place / "whole", **FP8))
    settings = fields(place / "parts", **FP8)
    for stop in (2, 5):
        assert perform(Run(settings, stop_after=stop)).code == STOPPED
    parts = done(settings)
    assert parts.resumed_at == 5
    assert all(torch.equal(parts.weights[name], value) for name, value in whole.weights.items())
    assert losses_of(settings["output"])[-1] < losses_of(settings["output"])[0]


@pytest.mark.parametrize(("first", "then"), [("bf16", "fp8"), ("fp8", "bf16")])
def test_a_run_goes_on_in_another_precision(place, alone, first, then):
    settings = fields(place / f"{first}-{then}", **FP8, fast="on")
    expected = done({**settings, "output": str(place / f"{first}-{then}-alone"), "precision": first})
    assert perform(Run({**settings, "precision": first}, stop_after=4)).code == STOPPED
    found = done({**settings, "precision": then})
    assert found.resumed_at == 4
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=0, atol=0.03)


def test_checked_steps_are_recorded(place, alone):
    settings = fields(place / "checked", **FP8)
    done(settings)
    records = record.load(Path(settings["output"]) / record.RECORDS).records
    found = {(item.config["first_step"], item.metric): item for item in records if item.metric.startswith("fp8 lost")}
    assert found.keys() == {(step, f"fp8 lost: {tensor}") for step in (3, 6) for tensor in TENSORS}
    for item in found.values():
        assert item.config["blocks"] == "0,1"
        assert len(item.samples) == 2
        assert all(0 <= share < 0.5 for share in item.samples)


def test_inspect_shows_what_was_lost(place, alone, capsys):
    settings = fields(place / "inspected", **FP8)
    done(settings)
    capsys.readouterr()
    path = Path(settings["output"]) / record.RECORDS
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(tensor in shown for tensor in TENSORS)
    assert "2 steps were checked" in shown
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "fp8 lost" not in line))
    assert main(["inspect", str(path)]) == 2
    assert "has no records of a training run in FP8" in capsys.readouterr().err


def test_a_block_that_loses_too_much_returns_to_bf16_and_stays_there(place, alone):
    settings = fields(place / "lossy", **FP8)
    shares_of = fp8_watch.Fp8Blocks.shares_of

    def planted(blocks, counts):
        return [s._replace(share=0.6) if s[:2] == (1, "gated") else s for s in shares_of(blocks, counts)]

    with mock.patch.object(fp8_watch.Fp8Blocks, "shares_of", planted):
        stopped = perform(Run(settings, stop_after=4))
    assert "step 3: block 1 returns to bf16: FP8 lost 60% of its tensor 'gated'" in stopped.printed
    trainer = Trainer(build(TrainSettings, settings), alone)
    trainer.resume()
    assert trainer.progress.bf16_blocks == (1,)
    assert trainer.step.model.fp8.numbers == {0}
    assert trainer.run() == 0


def test_what_fp8_cannot_train_is_refused(place, alone):
    settings = fields(place / "wide", **FP8, fast="on")
    assert perform(Run({**settings, "precision": "fp32"}, stop_after=2)).code == STOPPED
    assert "precision was fp32 and is fp8" in perform(Run(settings)).error
    found = perform(Run(fields(place / "engine", **{**FP8, "parallel": "ddp", "engine": "torch"})))
    assert "--precision fp8 needs whole layers on every GPU, which --engine torch does not keep" in found.error
    found = perform(Run(fields(place / "slow", **FP8, fast="off")))
    assert "needs the kernels of the fast step, got --fast off" in found.error


@pytest.mark.xdist_group("ranks")
def test_two_ranks_train_as_one_and_count_together(place, alone):
    """Scales of rows are the same on any number of ranks. Those of weight gradients are of a rank's own rows: elements
    near 0 may differ."""
    whole = fields(place / "one", **FP8, micro_batch_size=4)
    done(whole)
    runs = {
        parallel: Run(fields(place / f"two-{parallel}", **FP8, parallel=parallel))
        for parallel in ("ddp", "ddp-sharded")
    }
    runs["fsdp"] = Run(fields(place / "two-fsdp", **FP8, parallel="fsdp"))
    by_rank = spawn(perform_all, 2, runs, timeout=300)
    for found in by_rank:
        assert "which --parallel fsdp does not keep; use --parallel ddp" in found["fsdp"].error
        for parallel in ("ddp", "ddp-sharded"):
            assert (found[parallel].crash, found[parallel].error, found[parallel].code) == ("", "", 0)
    expected = shares_in(whole["output"])
    assert len(expected) == 2 * len(TENSORS)
    for parallel in ("ddp", "ddp-sharded"):
        output = runs[parallel].fields["output"]
        assert losses_of(output) == pytest.approx(losses_of(whole["output"]), rel=5e-3)
        shares = shares_in(output)
        assert shares.keys() == expected.keys()
        # In the first checked step the weights are nearly the same, and so are counts of all ranks together.
        for name in (name for name in expected if name[0] == 3 and "weight" in name[1]):
            assert shares[name] == pytest.approx(expected[name], abs=0.02)


def shares_in(output):
    """The shares of lost elements by step and metric, one for each block."""
    records = record.load(Path(output) / record.RECORDS).records
    return {
        (item.config["first_step"], item.metric): item.samples for item in records if item.metric.startswith("fp8 lost")
    }

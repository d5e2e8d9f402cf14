"""The records of a training run: what they hold, and a disk that fails for a while."""

import dataclasses
import errno
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from cs336_systems import record
from cs336_systems.flags import build
from cs336_systems.kernels.fused.fp8_blocks import LostShare
from cs336_systems.parallel.launch import Rank
from cs336_systems.train.run_log import RunLog
from cs336_systems.train.settings import TrainSettings
from tests.distributed.train_cases import fields, text_of


def run_log(folder, **more):
    (folder / "short.txt").write_bytes(text_of(330))
    settings = build(TrainSettings, fields(folder / "output", **more))
    return RunLog(settings, Rank(0, 1, torch.device("cpu")), settings.run_config("cpu", 1))


def test_starts_and_saves_are_written_with_the_next_steps(tmp_path):
    path = tmp_path / "output" / record.RECORDS
    log = run_log(tmp_path)
    log.start(4)
    log.saved(5, 0.5)
    assert not path.exists()  # nothing of its own is written for them
    log.step(5, 2.0, 1.0, 1e-3, 0.1)
    log.flush()
    found = {item.metric: (item.config["first_step"], item.samples[0]) for item in record.load(path).records}
    assert found["ranks"] == (5, 1.0)
    assert found["flops"][1] > 0
    assert found["save_time"] == (5, 0.5)
    assert found["loss"] == (5, 2.0)
    assert found["elapsed_time"][1] > 0
    assert "peak_memory" not in found  # of a GPU only
    log.saved(6, 0.5)
    log.flush()
    assert [item.config["first_step"] for item in record.load(path).records if item.metric == "save_time"] == [5, 6]


class Board:
    """Stands in for TensorBoard's writer, which need not be installed."""

    def __init__(self, folder):
        self.added, self.flushed = [], []

    def add_scalar(self, name, value, step):
        self.added.append((name, value, step))

    def flush(self):
        self.flushed = [*self.added]


def test_tensorboard_has_all_that_records_have(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    log = run_log(tmp_path, tensorboard=True)
    log.start(0)
    log.saved(1, 0.5)
    log.fp8(1, [LostShare(block, tensor, block / 8) for block in (0, 3) for tensor in ("input", "weight")])
    log.step(1, 2.0, 1.0, 1e-3, 0.1)
    log.step(2, 1.5, 1.0, 1e-3, 0.1)
    log.evaluation(2, 1.75)
    log.flush()
    records = record.load(tmp_path / "output" / record.RECORDS).records
    board = log._board
    assert board.flushed == board.added
    assert {name.split("/")[0] for name, _, _ in board.added} == {item.metric for item in records}
    assert Counter(value for _, value, _ in board.added) == Counter(x for item in records for x in item.samples)
    assert [(value, step) for name, value, step in board.added if name == "loss"] == [(2.0, 1), (1.5, 2)]
    assert ("fp8 lost: input/block 3", 0.375, 1) in board.added


def test_every_start_is_kept(tmp_path):
    """Also several from the same step: a record of the same cell would replace the one before."""
    path = tmp_path / "output" / record.RECORDS
    for second in range(3):
        log = run_log(tmp_path)
        log._environment = dataclasses.replace(log._environment, utc=f"2026-01-01T00:00:0{second}+00:00")
        log.start(0)
        log.step(1, 2.0, 1.0, 1e-3, 0.1)
        log.flush()
    records = record.load(path).records
    assert len([item for item in records if item.metric == "ranks"]) == 3
    assert len([item for item in records if item.metric == "loss"]) == 1


def test_records_of_a_full_disk_are_written_when_there_is_room(tmp_path, monkeypatch):
    log = run_log(tmp_path)
    path = tmp_path / "output" / record.RECORDS
    log.evaluation(1, 3.0)
    path.write_bytes(path.read_bytes() + b'{"experiment":"tra')  # a run that was killed

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(record, "append_lines", full)
        with pytest.warns(UserWarning, match="No space left on device; training continues"):
            log.evaluation(2, 2.0)
    log.evaluation(3, 1.0)
    loaded = record.load(path)
    assert [item.samples for item in loaded.records] == [(3.0,), (2.0,), (1.0,)]
    assert loaded.remarks == []

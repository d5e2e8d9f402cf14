"""The records of a training run on a disk that fails for a while."""

import errno

import pytest
import torch

from cs336_systems import record
from cs336_systems.flags import build
from cs336_systems.parallel.launch import Rank
from cs336_systems.train.run_log import RunLog
from cs336_systems.train.settings import TrainSettings
from tests.distributed.train_cases import fields, text_of


def test_records_of_a_full_disk_are_written_when_there_is_room(tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_bytes(text_of(330))
    settings = build(TrainSettings, fields(tmp_path / "output"))
    log = RunLog(settings, Rank(0, 1, torch.device("cpu")), settings.run_config("cpu", 1))
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

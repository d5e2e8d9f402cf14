"""Fixtures of the commands: a folder of their own, and no worker process."""

import pytest

from tests.helpers import CPU_ONLY


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def no_worker(monkeypatch):
    def start(*_):
        pytest.fail("a worker was started for a configuration that cannot be run")

    monkeypatch.setattr("cs336_systems.experiments.runner.Worker", start)

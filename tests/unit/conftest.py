"""Fixtures of the commands: a folder of their own, and no worker process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked_python import Interpreter, start_server
from tests.helpers import CPU_ONLY


@pytest.fixture(autouse=True, scope="session")
def shipped_profiles_only(tmp_path_factory) -> Iterator[None]:
    """Let predictions be those of the profiles in the package, not of one that this machine was calibrated to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory) -> Iterator[Path]:
    """A program to start in place of Python, which imports nothing: for tests in the group of the ranks, which have a
    process with torch to fork from."""
    start_server()
    with Interpreter(tmp_path_factory.mktemp("python")) as python:
        yield python.path

"""GPU tests are skipped, with the reason, where there is no GPU. A file's tests share a worker."""

import gc
import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

FOLDER = Path(__file__).parent

# Before torch is imported: two threads on a shared core spend their time waiting for each other.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give tests of a file that are in no other group to one worker, which makes the fixtures of the file once. With
    `-m gpu` a test goes to any worker: those spend their time in compilers and oracles, and have few fixtures."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            group = super()._split_scope(nodeid)
            return group if group != nodeid or config.getoption("markexpr") == "gpu" else nodeid.split("::")[0]

    return ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Let every other worker import the unit tests from the last to the first: each rewrites and compiles the
    assertions of half of the modules, and finds the others compiled. It saves 6 s in a fresh clone."""
    worker = getattr(session.config, "workerinput", {}).get("workerid", "gw0")
    if int(worker.removeprefix("gw")) % 2 and session.config.args == session.config.getini("testpaths"):
        for path in sorted((FOLDER / "unit").rglob("test_*.py"), reverse=True):
            with suppress(Exception, pytest.skip.Exception):  # collection reports it
                importlib.import_module(".".join(path.relative_to(FOLDER.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items):
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish():
    """Garbage collections pass over what the tests have in common, a million objects of torch and of the tests: a third
    of a second each."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # optimizers and traces import it
    freeze()


def pytest_runtest_protocol(item, nextitem):
    """In a worker of xdist, report a test by one message instead of five: a set-up or teardown that has passed in no
    time says nothing. Each message costs half a millisecond, and there are 9,000 tests."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.duration > 0.1:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """... and over what the tests of earlier files have left: modules, caches, compiled functions."""
    if item.path != getattr(item.config, "frozen_before", None):
        item.config.frozen_before = item.path
        freeze()


def freeze():
    gc.collect()
    gc.freeze()

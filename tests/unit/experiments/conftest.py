"""The fixture of the stand-in for the worker process."""

import pytest

from cs336_systems.experiments import runner as runner_module
from tests.unit.experiments.scripted_worker import Scripted, measured


@pytest.fixture
def scripted(monkeypatch):
    kind = type("Scripted", (Scripted,), {"asked": []})
    kind.answer = staticmethod(lambda request: measured(len(kind.asked)))
    monkeypatch.setattr(runner_module, "Worker", kind)
    return kind

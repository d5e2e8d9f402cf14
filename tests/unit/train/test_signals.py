"""Signals that ask a training run to stop."""

import os
import signal

import pytest

from cs336_systems.train import loop


@pytest.fixture
def exits(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_signal_that_comes_twice_is_one_request(exits, monkeypatch):
    times = iter([10.0, 10.2, 12.0])
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(times))
    with loop._Signals() as signals:
        assert not signals.stop
        signal.raise_signal(signal.SIGUSR1)
        assert signals.stop
        signal.raise_signal(signal.SIGTERM)  # passed on by a launcher
        assert exits == []
        signal.raise_signal(signal.SIGTERM)
    assert exits == [128 + signal.SIGTERM]


def test_handlers_are_put_back(exits):
    before = signal.getsignal(signal.SIGTERM)
    with loop._Signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before

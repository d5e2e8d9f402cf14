"""A stand-in for the worker process, where no real measurement is needed, and the runner that asks it."""

import dataclasses

from cs336_systems.experiments.runner import Outcome, Runner, gather
from cs336_systems.record import Environment

MACHINE = Environment(cpu="a processor", memory=16 * 2**30, torch="2.0", python="3.11", utc="2025-01-01T00:00:00+00:00")


class Scripted:
    """A worker that measures nothing. `asked` holds the requests to all of its kind; `answer` may be replaced."""

    asked: list[dict]
    device, environment = "cpu", MACHINE

    def __init__(self, variables=None):
        self.used = False
        self.variables = dict(variables or {})
        environment = dataclasses.asdict(self.environment)
        self.machine = {"event": "ready", "device": self.device, "environment": environment}

    def ask(self, request, timeout):
        self.used = True
        self.asked.append(request)
        return self.answer(request)

    def stop(self):
        pass


def measured(seconds):
    metrics = [["step_time", "s", [seconds, seconds], ""], ["step_time", "s", [7.0], "rival"]]
    environment = dataclasses.asdict(MACHINE)
    return {"event": "measured", "metrics": metrics, "environment": environment, "seconds": seconds}


def run(path, *requests, **options) -> Outcome:
    with Runner(path, quiet=True, **options) as runner:
        return runner.run(gather(requests))

"""The examples run as their docstrings say."""

import sys
from pathlib import Path

import pytest

from cs336_systems import record
from tests.helpers import ROOT, clean_env, entries, execute, tiny_config
from tests.unit.measure.test_trace_replay import Script

EXAMPLES = ROOT / "examples"


def run_example(name: str, *words: str | Path, cwd: Path, python: str | Path = sys.executable):
    env = clean_env(PYTHONPATH=str(ROOT))
    return execute(python, EXAMPLES / name, *words, cwd=cwd, env=env)


def test_every_example_has_a_test():
    named = Path(__file__).read_text() + (ROOT / "tests/distributed/test_course_adapters.py").read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.stem not in named] == []


@pytest.mark.xdist_group("ranks")
def test_benchmark_your_module(tmp_path, forked_python):
    done = run_example("benchmark_your_module.py", cwd=tmp_path, python=forked_python)
    assert done.returncode == 0, done.stderr
    values = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert {"forward", "backward", "optimizer", "step", "peak"} <= values.keys()
    assert values["step"] >= values["backward"] > 0


@pytest.mark.xdist_group("ranks")
def test_train_data_parallel(tmp_path, forked_python):
    done = run_example("train_data_parallel.py", cwd=tmp_path, python=forked_python)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    losses = [float(text) for text in line.removeprefix("2 ranks, losses: ").split(", ")]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("factor", "code"), [(1.01, 0), (1.2, 1)], ids=["as fast", "slower"])
def test_regression_gate(factor, code, tmp_path):
    steps = (0.100, 0.101, 0.099, 0.100, 0.102, 0.098, 0.100, 0.101, 0.099, 0.100)
    for name, scale in (("before", 1.0), ("after", factor)):
        metrics = {"step_time": tuple(scale * seconds for seconds in steps)}
        record.append(tmp_path / f"{name}.jsonl", entries("bench", tiny_config(), metrics, "ok", record.Environment()))
    done = run_example("regression_gate.py", "before.jsonl", "after.jsonl", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert ("slower by more than 5%" in done.stderr) == bool(code)


def test_predict_a_switch(tmp_path):
    """Two traces that differ in nothing but the time of attention predict one another exactly."""
    for name, seconds in (("slow", 300), ("fast", 100)):
        script = Script()
        script.kernel("sgemm_nn", 10, 100, launch=0)
        script.kernel("flash_fwd", 111, seconds, launch=2)
        script.kernel("adam", 112 + seconds, 50, launch=4)
        script.call("cudaDeviceSynchronize", 10, 160 + seconds)
        script.write(tmp_path).rename(tmp_path / f"{name}.json")
    done = run_example("predict_a_switch.py", "slow.json", "fast.json", "attention", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "by attention=0.1ms/1" in done.stdout
    assert "predicted 0.27 ms, recorded 0.27 ms" in done.stdout
    assert done.stdout.count("error +0.00%") + done.stdout.count("error -0.00%") == 2

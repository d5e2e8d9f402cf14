"""That remembered results are those of the very same compilation, or none."""

import json

import pytest

from tests.unit.kernels import compiled


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "FILE", tmp_path / "compiled.json")
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    (tmp_path / "kernel.py").write_text("first")
    return compiled.FILE


def ask(requests, seen, *, stack=0, version="1", sample=False):
    def compile_all(chosen):
        seen.extend(chosen)
        return [{"request": request, "stack": stack} for request in chosen]

    return compiled.results(requests, ["kernel.py"], version, compile_all, sample=sample)


def remember(memory):
    memory.write_text(json.dumps(compiled.used))


def test_only_what_is_new_is_compiled(memory):
    first, again = [], []
    ask([1, 2], first)
    remember(memory)
    found = ask([2, 3, 1], again)
    assert (first, again) == ([1, 2], [3])
    assert [result["request"] for result in found] == [2, 3, 1]


@pytest.mark.parametrize("change", ["source", "version"])
def test_nothing_is_remembered_of_another_source_or_version(memory, change):
    ask([1, 2], [])
    remember(memory)
    if change == "source":
        (memory.parent / "kernel.py").write_text("second")
    seen = []
    ask([1, 2], seen, version="2" if change == "version" else "1")
    assert seen == [1, 2]


def test_a_sample_finds_what_is_not_true(memory):
    ask([1, 2, 3], [])
    remember(memory)
    seen = []
    ask([1, 2, 3], seen, sample=True)
    assert len(seen) == 1
    with pytest.raises(AssertionError, match="is not true"):
        ask([1, 2, 3], [], stack=8, sample=True)

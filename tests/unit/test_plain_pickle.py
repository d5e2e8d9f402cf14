"""Pickles that are read without running them."""

import collections
import contextlib
import pickle

import pytest

from cs336_systems.files import LimitError
from cs336_systems.plain_pickle import DEEPEST, PERSISTENT, Made, Name, load_plain
from tests.unit.hostile_files import HOSTILE_CODE


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_survives_pickling(protocol):
    shared = ["shared", 1]
    data = {
        "a": [None, True, False, 0, 255, 65535, -1, 2**40, 1.5, "模型", "x" * 300],
        "b": (1, (), (2, 3, 4)),
    }
    data |= {"c": shared, "d": shared, "e": {}, "f": [], "g": list(range(300)), "h": tuple(range(10))}
    assert load_plain(pickle.dumps(data, protocol)) == data


class Pickler(pickle.Pickler):
    """Writes complex numbers as persistent ids, as torch writes storages."""

    def persistent_id(self, obj):
        return ("storage", 7) if type(obj) is complex else None


class Thing:
    """An instance has a state; it is a key as well."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_names_stay_names(protocol, tmp_path):
    path = tmp_path / "x"
    with path.open("wb") as file:
        Pickler(file, protocol).dump([Thing, {Thing(3): collections.OrderedDict()}, 1j])
    thing = f"{__name__}.Thing"
    names = {thing, "collections.OrderedDict", PERSISTENT}
    named, pairs, persistent = load_plain(path.read_bytes(), names)
    ((key, value),) = pairs.items()
    assert (type(named), named) == (Name, thing)
    assert (type(key), key.made_by, key.arguments, key.state) == (Made, thing, (), {"value": 3})
    assert (value.made_by, value.arguments) == ("collections.OrderedDict", ())
    assert (persistent.made_by, persistent.arguments) == (PERSISTENT, ("storage", 7))
    for name in names:
        with pytest.raises(ValueError, match=f"it names {name}"):
            load_plain(path.read_bytes(), names - {name})


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (pickle.dumps({1, 2}), "EMPTY_SET"),
        (pickle.dumps({1: 2}), "a key that is not a text"),
        (pickle.dumps(collections.OrderedDict), "it names collections.OrderedDict"),
        (pickle.dumps(1) + b"x", "more than one"),
        (b"\x80\x04K\x01K\x02.", "more than one"),
        (b"\x80\x04(K\x01.", "more than one"),
        (b".", "no value"),
        (b"", "ends too early"),
        (b"\x80\x04h\x05.", "not there"),
        (b"\x80\x04]\x94j\xff\xff\xff\xff.", "not there"),
        (b"\x80\x04\x85.", "not there"),
        (b"\x80\x04K\x01K\x01R.", "calls a value"),
        (b"\x80\x04K\x01}b.", "gives a state to a value"),
        (b"\x80\x04K\x01K\x01\x93.", "a name that is not a text"),
        (b"\x80\x04K\x01K\x01a.", "items of a int"),
        (b"\x80\x04}(K\x01u.", "belong to no dictionary"),
        (b"\x80\x04}(\x8c\x01aK\x01\x8c\x01aK\x02u.", "twice"),
        (b"\x80\x04]q\x05.", "is numbered 5"),
        (b"\x80\x04\x8c\x05a.", "ends after the file"),
        (b"\x80\x04" + b"(" * (DEEPEST + 1), "levels deep"),
        (b"(dK\x01.", "the instruction DICT"),
        (b"\xff.", "the instruction 0xff"),
    ],
)
def test_other_pickles_are_refused(data, problem):
    with pytest.raises(ValueError, match=problem):
        load_plain(data)


@pytest.mark.parametrize("data", HOSTILE_CODE)
def test_nothing_is_called(data, tmp_path, monkeypatch):
    """Even where the names are allowed."""
    monkeypatch.chdir(tmp_path)
    functions = {f"{module}.{name}" for module in ("os", "posix", "builtins") for name in ("system", "eval", "exec")}
    with contextlib.suppress(ValueError):
        load_plain(data, {*functions, "builtins.getattr", "builtins.object", PERSISTENT})
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_instructions():
    data = pickle.dumps(list(range(100)))
    assert len(load_plain(data, most=200)) == 100
    with pytest.raises(LimitError, match="more than 100 instructions"):
        load_plain(data, most=100)

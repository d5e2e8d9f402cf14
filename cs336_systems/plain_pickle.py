"""Reads pickles without running them: plain data, and names of classes and functions that stay names.

Plain data are texts, numbers, lists, tuples, and dictionaries with texts as keys. Python's own unpickler is a machine
that calls what a file names. `find_class` can refuse names; it cannot limit memory (6 bytes let it allocate 16 GB for
its memo) or time (keys with equal hashes). Here other instructions do not exist. Standard library only.
"""

import struct
from collections.abc import Callable, Set
from typing import Any

from cs336_systems.files import LimitError

DEEPEST = 100
"""Maximum levels of nesting; real files have up to 6."""
PERSISTENT = "persistent_load"
"""Name of the function that a pickle calls to look up persistent ids."""
_uint4, _int4, _float8 = (struct.Struct(form).unpack_from for form in ("<I", "<i", ">d"))


class Name(str):
    """A class or function that a pickle names."""


class Made:
    """An object in a pickle: the class or function that would make it, its arguments, and the state given to it."""

    def __init__(self, made_by: str, arguments: Any):
        self.made_by, self.arguments, self.state = made_by, arguments, None


def load_plain(data: bytes, names: Set[str] = frozenset(), *, most: int | None = None) -> Any:
    """Return the value of a pickle of protocol 2 or later; raise ValueError for one that holds more than plain data.

    It may have `names`, such as "torch.Size", and what they would make; both come back as `Name` and `Made`. `most`:
    instructions beyond which LimitError is raised; a million take 0.3 s.
    """
    try:
        return _load(data, names, len(data) + 1 if most is None else most)
    except (IndexError, struct.error):
        raise ValueError("it ends too early, or uses a value that is not there") from None


def _load(data: bytes, names: Set[str], most: int) -> Any:
    stack: list[Any] = []
    outer: list[list[Any]] = []
    """Stacks below the open marks."""
    memo: list[Any] = []
    at = 0
    for _ in range(most):
        code = data[at]
        at += 1
        if code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[_uint4(data, at)[0]])
            at += 4
        elif code == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif code == 0x4D:  # BININT2
            stack.append(data[at] | data[at + 1] << 8)
            at += 2
        elif code == 0x4A:  # BININT
            stack.append(_int4(data, at)[0])
            at += 4
        elif code == 0x8A:  # LONG1
            end = at + 1 + data[at]
            stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
            at = end
        elif code == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif code == 0x28:  # MARK
            if len(outer) == DEEPEST:
                raise ValueError(f"it is nested more than {DEEPEST} levels deep")
            outer.append(stack)
            stack = []
        elif code in _SIMPLE:
            stack.append(_SIMPLE[code]())
        elif code in _CLOSING:
            found, stack = stack, outer.pop()
            _CLOSING[code](stack, found)
        elif code in _LENGTHS:
            size, read = _LENGTHS[code]
            length = int.from_bytes(data[at : at + size], "little")
            at += size + length
            if at > len(data):
                raise ValueError("a text ends after the file")
            stack.append(read(data[at - length : at]))
        elif code == 0x2E:  # STOP
            if len(stack) != 1 or outer or at != len(data):
                raise ValueError("it has no value, or more than one")
            return stack[0]
        else:
            at = _rare(code, data, at, stack, memo, names)
    raise LimitError(f"it has more than {most:,} instructions")


def _rare(code: int, data: bytes, at: int, stack: list[Any], memo: list[Any], names: Set[str]) -> int:
    """Execute an instruction that is rare, or refuse it; return the position after it."""
    match code:
        case 0x80:  # PROTO
            return at + 1
        case 0x95:  # FRAME
            return at + 8
        case 0x47:  # BINFLOAT
            stack.append(_float8(data, at)[0])
            return at + 8
        case 0x61:  # APPEND
            items = _taken(stack, 1)
            _extend(stack, items)
        case 0x73:  # SETITEM
            items = _taken(stack, 2)
            _update(stack, items)
        case 0x85 | 0x86 | 0x87:  # TUPLE1, TUPLE2, TUPLE3
            stack.append(tuple(_taken(stack, code - 0x84)))
        case 0x71:  # BINPUT
            _memoize(memo, data[at], stack[-1])
            return at + 1
        case 0x72:  # LONG_BINPUT
            _memoize(memo, _uint4(data, at)[0], stack[-1])
            return at + 4
        case _:
            return _make(code, data, at, stack, names)
    return at


def _taken(stack: list[Any], count: int) -> list[Any]:
    """Pop the last values off the stack."""
    taken = stack[-count:]
    if len(taken) < count:
        raise IndexError
    del stack[-count:]
    return taken


def _memoize(memo: list[Any], index: int, value: Any) -> None:
    """Store a value under the next index; picklers count them."""
    if index != len(memo):
        raise ValueError(f"value {len(memo)} is numbered {index}")
    memo.append(value)


def _extend(stack: list[Any], found: list[Any]) -> None:
    if type(stack[-1]) is not list:
        raise ValueError(f"items of a {type(stack[-1]).__name__}")
    stack[-1].extend(found)


def _update(stack: list[Any], found: list[Any]) -> None:
    target, keys = stack[-1], found[::2]
    if type(target) is not dict or len(found) % 2:
        raise ValueError("keys and values that belong to no dictionary")
    if not _KEYS.issuperset(map(type, keys)):
        raise ValueError("a key that is not a text")
    count = len(target) + len(keys)
    target.update(zip(keys, found[1::2], strict=True))
    if len(target) != count:
        raise ValueError("a key that is there twice")


def _tuple(stack: list[Any], found: list[Any]) -> None:
    stack.append(tuple(found))


def _make(code: int, data: bytes, at: int, stack: list[Any], names: Set[str]) -> int:
    """Execute an instruction that names a class or function, or applies one; return the position after it."""
    match code:
        case 0x63:  # GLOBAL
            lines = data[at : at + 400].split(b"\n", 2)
            stack.append(_named(b".".join(lines[:2]).decode(errors="replace"), names))
            return at + len(lines[0]) + len(lines[1]) + 2
        case 0x93:  # STACK_GLOBAL
            module, name = _taken(stack, 2)
            if type(module) is not str or type(name) is not str:
                raise ValueError("it has a name that is not a text")
            stack.append(_named(f"{module}.{name}", names))
        case 0x52 | 0x81:  # REDUCE, NEWOBJ
            made_by, arguments = _taken(stack, 2)
            if type(made_by) is not Name:
                raise ValueError("it calls a value")
            stack.append(Made(made_by, arguments))
        case 0x51:  # BINPERSID
            stack.append(Made(_named(PERSISTENT, names), stack.pop()))
        case 0x62:  # BUILD
            state = stack.pop()
            if type(stack[-1]) is not Made:
                raise ValueError("it gives a state to a value")
            stack[-1].state = state
        case _:
            import pickletools

            name = next((known.name for known in pickletools.opcodes if known.code == chr(code)), hex(code))
            raise ValueError(f"it has the instruction {name}, which plain data does not need")
    return at


def _named(name: str, names: Set[str]) -> Name:
    if name not in names:
        raise ValueError(f"it names {name[:160]}")
    return Name(name)


_KEYS = frozenset({str, Made})
"""Types of keys, whose hashes a file cannot choose: those of texts are random, that of an object is its address."""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_SIMPLE: dict[int, Callable[[], Any]] = {
    0x4E: lambda: None,
    0x88: lambda: True,
    0x89: lambda: False,
    0x5D: list,
    0x7D: dict,
    0x29: tuple,
}
"""NONE, NEWTRUE, NEWFALSE, EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE."""
_CLOSING = {0x65: _extend, 0x75: _update, 0x74: _tuple}
"""APPENDS, SETITEMS, TUPLE: what a mark opened."""
_LENGTHS: dict[int, tuple[int, Callable[[bytes], str | bytes]]] = {
    0x8C: (1, _text),
    0x58: (4, _text),
    0x8D: (8, _text),
    0x43: (1, bytes),
    0x42: (4, bytes),
}
"""SHORT_BINUNICODE, BINUNICODE, BINUNICODE8, SHORT_BINBYTES, BINBYTES: bytes of the length, and the type."""

"""Reads pickles of plain data without running them: texts, numbers, lists, tuples and dictionaries with texts as keys.

Python's own unpickler is a machine that calls what a file names. `find_class` can refuse names; it cannot limit memory
(6 bytes let it allocate 16 GB for its memo) or time (keys with equal hashes). Here other instructions do not exist.
"""

import struct
from collections.abc import Callable
from typing import Any, NoReturn

from cs336_systems.files import LimitError, limit

MOST_INSTRUCTIONS = 16_000_000
"""An event of a snapshot has about 25, and MOST_ITEMS are read; this many take 4 s."""
DEEPEST = 100
"""Levels of nesting; a snapshot has 6."""
_NAMED_INSTRUCTIONS = {
    b"\x81": "NEWOBJ",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
    b"\x92": "NEWOBJ_EX",
    b"P": "PERSID",
    b"Q": "BINPERSID",
    b"R": "REDUCE",
    b"b": "BUILD",
    b"o": "OBJ",
}
_int4, _float8 = (struct.Struct(form).unpack_from for form in ("<i", ">d"))


def load_plain(data: bytes) -> Any:
    """Return the value of a pickle of protocol 2 or later; raise ValueError for one that holds more than plain data."""
    stack: list[Any] = []
    outer: list[list[Any]] = []
    """Stacks below the open marks."""
    memo: list[Any] = []
    at = 0
    for _ in range(limit(MOST_INSTRUCTIONS)):
        code = data[at]
        at += 1
        if code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[_int4(data, at)[0]])
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
                raise EOFError("a text ends after the file")
            stack.append(read(data[at - length : at]))
        elif code == 0x2E:  # STOP
            return stack.pop()
        else:
            at = _rare(code, data, at, stack, memo)
    raise LimitError(f"it has more than {limit(MOST_INSTRUCTIONS):,} instructions")


def _rare(code: int, data: bytes, at: int, stack: list[Any], memo: list[Any]) -> int:
    """Carry out an instruction that is rare, or refuse it; return the position after it."""
    match code:
        case 0x80:  # PROTO
            return at + 1
        case 0x95:  # FRAME
            return at + 8
        case 0x47:  # BINFLOAT
            stack.append(_float8(data, at)[0])
            return at + 8
        case 0x61:  # APPEND
            found = [stack.pop()]
            _extend(stack, found)
        case 0x73:  # SETITEM
            found = [stack.pop(-2), stack.pop()]
            _update(stack, found)
        case 0x85 | 0x86 | 0x87:  # TUPLE1, TUPLE2, TUPLE3
            size = code - 0x84
            found = stack[-size:]
            if len(found) < size:
                raise IndexError("a tuple of nothing")
            stack[-size:] = [tuple(found)]
        case 0x71:  # BINPUT
            _memoize(memo, data[at], stack[-1])
            return at + 1
        case 0x72:  # LONG_BINPUT
            _memoize(memo, _int4(data, at)[0], stack[-1])
            return at + 4
        case _:
            _refuse(code, data, at, stack)
    return at


def _memoize(memo: list[Any], index: int, value: Any) -> None:
    """Remember a value under the next index; picklers count them."""
    if index != len(memo):
        raise ValueError(f"value {len(memo)} is numbered {index}")
    memo.append(value)


def _extend(stack: list[Any], found: list[Any]) -> None:
    if type(stack[-1]) is not list:
        raise TypeError(f"items of a {type(stack[-1]).__name__}")
    stack[-1].extend(found)


def _update(stack: list[Any], found: list[Any]) -> None:
    if type(stack[-1]) is not dict or len(found) % 2:
        raise TypeError("keys and values that belong to no dictionary")
    keys = found[::2]
    if not set(map(type, keys)) <= {str}:
        raise TypeError("a key that is not a text")
    stack[-1].update(zip(keys, found[1::2], strict=True))


def _tuple(stack: list[Any], found: list[Any]) -> None:
    stack.append(tuple(found))


def _refuse(code: int, data: bytes, at: int, stack: list[Any]) -> NoReturn:
    """Raise for an instruction that plain data does not have, with the name that it would import, if any."""
    instruction = bytes([code])
    if instruction in b"ci":  # GLOBAL, INST
        module, name = (line[:80].decode(errors="replace") for line in data[at : at + 400].split(b"\n", 2)[:2])
        raise ValueError(f"it names {module}.{name}")
    if instruction == b"\x93":  # STACK_GLOBAL
        raise ValueError(f"it names {stack[-2]!s:.80}.{stack[-1]!s:.80}")
    name = _NAMED_INSTRUCTIONS.get(instruction, f"0x{code:02x}")
    raise ValueError(f"it has the instruction {name}, which plain data does not need")


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

"""Dataclass fields as command-line flags, on argparse: `--context_length` and `--context-length` both work.

A field that is itself a dataclass contributes the flags of its fields. Every mistake is one line on standard error and
exit code 2. Standard library only, so `--help` answers at once.
"""

import argparse
import dataclasses
import sys
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, NamedTuple, NoReturn


class Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any):
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**defaults, **kwargs})

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


class Flag(NamedTuple):
    """A field that is a flag, its type, and the name of the flag."""

    spec: dataclasses.Field
    hint: Any
    name: str


def renamed(name: str, spec: Any) -> Any:
    """Return the field `spec` with a flag of another name than its own."""
    return dataclasses.field(default=spec.default, metadata={**spec.metadata, "flag": name})


def flags_of(arguments: type) -> Iterator[Flag]:
    """Yield the flags of a dataclass and of the dataclasses nested in it."""
    hints = typing.get_type_hints(arguments)
    for spec in dataclasses.fields(arguments):
        if dataclasses.is_dataclass(hints[spec.name]):
            yield from flags_of(hints[spec.name])
        else:
            yield Flag(spec, hints[spec.name], spec.metadata.get("flag", spec.name))


def add_flags(parser: argparse.ArgumentParser, arguments: type) -> None:
    """Add one flag for each field of the dataclass.

    `metadata` holds `help`, `choices`, `short` (one letter), `positional` for operands, and `flag` for another name.
    """
    for found in flags_of(arguments):
        _add_flag(parser, *found)


def _add_flag(parser: argparse.ArgumentParser, spec: dataclasses.Field, hint: Any, name: str) -> None:
    help_text = spec.metadata.get("help", "")
    choices = spec.metadata.get("choices")
    if spec.metadata.get("positional"):
        nargs = "*" if typing.get_origin(hint) is tuple else None
        parser.add_argument(name, nargs=nargs, metavar=spec.metadata.get("metavar"), help=help_text)
        return
    names = [f"--{name}", f"--{name.replace('_', '-')}"]
    names = names[:1] if names[0] == names[1] else names
    names += [spec.metadata["short"]] if "short" in spec.metadata else []
    if hint is bool:
        parser.add_argument(*names, action="store_true", default=None, help=help_text)
        return
    default = spec.default if spec.default not in (None, "", ()) else None
    if default is not None:
        help_text += f" (default: {default})"
    kind = _item_type(hint)
    repeated = typing.get_origin(hint) is tuple
    parser.add_argument(
        *names,
        type=_comma_list(kind) if repeated else kind,
        choices=choices if not repeated else None,
        metavar=None if choices and not repeated else ("A,B,..." if repeated else name.upper()),
        default=None,
        help=help_text,
    )


def _item_type(hint: Any) -> Any:
    """Return int for `int`, `int | None` and `tuple[int, ...]`."""
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint


def _comma_list(kind: type) -> Any:
    def parse(text: str) -> tuple:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())

    parse.__name__ = f"comma-separated {kind.__name__}"
    return parse


def read_flags(arguments: type, namespace: argparse.Namespace) -> Any:
    """Return the dataclass with the values given on the command line; other fields keep their defaults."""
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    return build(arguments, {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def build(arguments: type, values: Mapping[str, Any]) -> Any:
    """Return the dataclass, nested ones included, with `values` by the names of flags."""
    hints, given = typing.get_type_hints(arguments), {}
    for spec in dataclasses.fields(arguments):
        if dataclasses.is_dataclass(hints[spec.name]):
            given[spec.name] = build(hints[spec.name], values)
        elif (name := spec.metadata.get("flag", spec.name)) in values:
            given[spec.name] = values[name]
    return arguments(**given)


def flat(settings: Any) -> dict[str, Any]:
    """Return the values of a dataclass and of those nested in it, by the names of flags."""
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(settings):
        value = getattr(settings, spec.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {spec.metadata.get("flag", spec.name): value}
    return found

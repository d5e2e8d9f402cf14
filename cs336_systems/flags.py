"""Dataclass fields as command-line flags, on argparse: `--context_length` and `--context-length` both work.

Every mistake is one line on standard error and exit code 2. Standard library only, so `--help` answers at once.
"""

import argparse
import dataclasses
import sys
import typing
from types import UnionType
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any):
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**defaults, **kwargs})

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def add_flags(parser: argparse.ArgumentParser, arguments: type) -> None:
    """One flag for each field of the dataclass.

    `metadata` holds `help`, `choices`, `short` (one letter), and `positional` for operands.
    """
    hints = typing.get_type_hints(arguments)
    for spec in dataclasses.fields(arguments):
        _add_flag(parser, spec, hints[spec.name])


def _add_flag(parser: argparse.ArgumentParser, spec: dataclasses.Field, hint: Any) -> None:
    help_text = spec.metadata.get("help", "")
    choices = spec.metadata.get("choices")
    if spec.metadata.get("positional"):
        nargs = "*" if typing.get_origin(hint) is tuple else None
        parser.add_argument(spec.name, nargs=nargs, metavar=spec.metadata.get("metavar"), help=help_text)
        return
    names = [f"--{spec.name}", f"--{spec.name.replace('_', '-')}"]
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
        metavar=None if choices and not repeated else ("A,B,..." if repeated else spec.name.upper()),
        default=None,
        help=help_text,
    )


def _item_type(hint: Any) -> Any:
    """int of `int`, of `int | None` and of `tuple[int, ...]`."""
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
    """The dataclass with what was given on the command line; fields not given keep their defaults."""
    given = {}
    for spec in dataclasses.fields(arguments):
        value = getattr(namespace, spec.name, None)
        if value is not None:
            given[spec.name] = tuple(value) if isinstance(value, list) else value
    return arguments(**given)

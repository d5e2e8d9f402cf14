"""Dataclass fields as command-line flags, on argparse: `--context_length` and `--context-length` both work.

A field that is itself a dataclass contributes the flags of its fields. Every mistake is one line on standard error and
exit code 2. Standard library only, so `--help` answers at once.
"""

import argparse
import dataclasses
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, NamedTuple, NoReturn

from cs336_systems.config import UserError, nearest
from cs336_systems.text import printable

LONGEST_WORD = 300
"""Maximum characters of a word in an error message; the middle of longer words is left out."""

NEGATIVE = re.compile(r"-\.?\d")
"""The beginning of a value such as -5GiB or -1e-3, which argparse would take for a flag."""

USUAL_NAMES = {
    **dict.fromkeys(("tokens", "dataset", "train_data", "train_file", "input"), ("data",)),
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), ("learning_rate",)),
    **dict.fromkeys(("max_steps", "iters", "max_iters", "num_steps", "train_steps"), ("steps", "num_steps")),
    **dict.fromkeys(("seq_len", "seqlen", "sequence_length", "max_seq_len", "block_size"), ("context_length",)),
    **dict.fromkeys(("out", "out_dir", "output_dir", "save_dir"), ("output",)),
    **dict.fromkeys(("layers", "n_layers", "n_layer"), ("num_layers",)),
    **dict.fromkeys(("heads", "n_heads", "n_head"), ("num_heads",)),
    **dict.fromkeys(("dim", "hidden_size", "n_embd"), ("d_model",)),
    **dict.fromkeys(("per_device_train_batch_size", "device_batch_size"), ("micro_batch_size", "batch_size")),
    **dict.fromkeys(("grad_clip", "clip_grad", "clip_grad_norm"), ("max_grad_norm",)),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), ("checkpoint_blocks",)),
    **dict.fromkeys(("dtype", "bf16", "fp16", "amp"), ("precision",)),
    **dict.fromkeys(("model", "model_size", "model_name"), ("size",)),
    **dict.fromkeys(("pretrained", "init_from", "weights", "checkpoint", "model_name_or_path"), ("init",)),
    **dict.fromkeys(("save_steps", "save_interval", "ckpt_every"), ("save_every",)),
    **dict.fromkeys(("eval_steps", "eval_interval"), ("eval_every",)),
    **dict.fromkeys(("wd",), ("weight_decay",)),
    **dict.fromkeys(("fsdp", "ddp", "zero"), ("parallel",)),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "load"), ("resume_from",)),
}
"""Flag names in other trainers, without dashes, and ours; the first that the command has is suggested."""


def one_line(message: str) -> str:
    """Return a message as one line of printable characters, with very long words shortened."""
    text = printable(" ".join(message.split()))
    half = LONGEST_WORD // 2
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: f"{word[0][:half]}...{word[0][-half:]}", text)


class Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any):
        defaults: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**(defaults | kwargs))
        self._negative_number_matcher = NEGATIVE

    def error(self, message: str) -> NoReturn:
        line = one_line(message + self._suggestion(message))
        print(f"{self.prog}: {line}; see {self.prog} --help", file=sys.stderr)
        mistake = SystemExit(2)
        mistake.add_note(line)
        raise mistake

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print, and let errors of the stream propagate, which argparse would ignore."""
        (file or sys.stderr).write(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here, because a subcommand knows which of its flags is similar."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _suggestion(self, message: str) -> str:
        """Return the known name that is nearest to an unknown one in the message."""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            return nearest(choice[1], re.findall(r"[^\s',]+", choice[2]))
        if flag := re.match(r"unrecognized arguments: (-+[^\s=]+)", message):
            return self._usual(flag[1]) or nearest(flag[1], self._option_string_actions)
        return ""

    def _usual(self, flag: str) -> str:
        """Return our name for a flag of other trainers; "" if this command has no such flag."""
        ours = [f"--{name}" for name in USUAL_NAMES.get(flag.lstrip("-").replace("-", "_").lower(), ())]
        found = next((name for name in ours if name in self._option_string_actions), "")
        if found == "--resume_from":
            return f" (the same command resumes by itself; {found!r} goes back to a checkpoint)"
        return f" (did you mean {found!r}?)" if found else ""


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

    `metadata` holds `help`, `choices`, `short` (one letter), `positional` for operands, `flag` for another name,
    `excludes` for flags that must not be given with it, `may_be_empty` for texts, and `repeatable` for a tuple of which
    each value has a flag of its own.
    """
    for found in flags_of(arguments):
        _add_flag(parser, *found)


def _add_flag(parser: argparse.ArgumentParser, spec: dataclasses.Field, hint: Any, name: str) -> None:
    help_text = spec.metadata.get("help", "")
    choices = spec.metadata.get("choices")
    if spec.metadata.get("positional"):
        nargs = "*" if typing.get_origin(hint) is tuple else "?" if spec.default is None else None
        metavar = spec.metadata.get("metavar")
        kind = str if spec.metadata.get("may_be_empty") else _text
        parser.add_argument(name, nargs=nargs, metavar=metavar, help=help_text, type=kind, choices=choices)
        return
    names = [f"--{name}", f"--{name.replace('_', '-')}"]
    names = names[:1] if names[0] == names[1] else names
    names += [spec.metadata["short"]] if "short" in spec.metadata else []
    if hint is bool:
        parser.add_argument(*names, action="store_true", default=None, help=help_text)
        return
    if _item_type(hint) is bool:  # None is neither
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, help=help_text)
        return
    default = spec.default if spec.default not in (None, "", ()) else None
    if default is not None:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        help_text += f" (default: {shown})"
    kind = _item_type(hint)
    if kind is str and not spec.metadata.get("may_be_empty"):
        kind = _text
    if kind is int:
        kind = _whole
    if spec.metadata.get("repeatable"):
        metavar = spec.metadata.get("metavar")
        parser.add_argument(*names, action="append", type=kind, metavar=metavar, default=None, help=help_text)
        return
    repeated = typing.get_origin(hint) is tuple
    parser.add_argument(
        *names,
        action=_StoreOnce if repeated else "store",
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


def _text(value: str) -> str:
    if not value:
        raise argparse.ArgumentTypeError("the value is empty")
    return value


def _whole(text: str) -> int:
    if found := re.fullmatch(r"(\d+)([kKmM])i?", text):
        power = "km".index(found[2].lower()) + 1
        decimal, binary = (int(found[1]) * base**power for base in (1000, 1024))
        raise argparse.ArgumentTypeError(f"{text!r} may be {decimal} or {binary}; write the whole number")
    return int(text)


_whole.__name__ = int.__name__


def _comma_list(kind: Any) -> Any:
    def parse(text: str) -> tuple:
        found = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} names nothing")
        return found

    parse.__name__ = f"comma-separated {kind.__name__.replace('_text', 'str')}"
    return parse


class _StoreOnce(argparse.Action):
    """Refuses a list that is given twice: the second would replace the first."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if (before := getattr(namespace, self.dest)) is not None:
            together = ",".join(map(str, (*before, *values)))
            raise argparse.ArgumentError(self, f"given twice; write one list: {option_string} {together}")
        setattr(namespace, self.dest, values)


def read_flags(arguments: type, namespace: argparse.Namespace) -> Any:
    """Return the dataclass with the values given on the command line; other fields keep their defaults."""
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    shown = {
        found.name: str(given.get(found.name)) if found.spec.metadata.get("positional") else f"--{found.name}"
        for found in flags_of(arguments)
    }
    for found in flags_of(arguments):
        for other in found.spec.metadata.get("excludes", ()):
            if found.name in given and other in given:
                raise UserError(f"{shown[found.name]} and {shown[other]} exclude each other; leave one out")
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

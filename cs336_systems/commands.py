"""Runs a command: flags into a dataclass, mistakes into one line and exit code 2."""

import sys
from collections.abc import Callable
from typing import Any

from cs336_systems.config import UserError
from cs336_systems.flags import Parser, add_flags, read_flags


def run_command(
    program: str, manual: str | None, arguments: type, function: Callable[[Any], int], argv: list[str] | None
) -> int:
    parser = Parser(prog=program, description=manual)
    add_flags(parser, arguments)
    return guarded(program, lambda: function(read_flags(arguments, parser.parse_args(argv))))


def guarded(program: str, run: Callable[[], int]) -> int:
    """The exit code of `run`: 2 for the user's mistakes, 130 for Ctrl-C."""
    try:
        return run()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: stopped; what was measured is kept, the same command goes on from there", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        sys.stderr.close()
        return 0

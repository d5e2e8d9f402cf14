"""Runs a command: parses flags into a dataclass, and reports user errors in one line with exit code 2."""

import io
import os
import sys
from collections.abc import Callable
from typing import Any

from cs336_systems.config import UserError
from cs336_systems.flags import Parser, add_flags, read_flags


def run_command(
    program: str, manual: str | None, arguments: type, function: Callable[[Any], int | None], argv: list[str] | None
) -> int:
    parser = Parser(prog=program, description=manual)
    add_flags(parser, arguments)
    return guarded(program, lambda: function(read_flags(arguments, parser.parse_args(argv))))


def guarded(program: str, run: Callable[[], int | None]) -> int:
    """Call `run` and return its exit code (None: 0); 2 for user errors, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # unsupported characters become question marks
    try:
        code = run() or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: stopped; measurements so far are kept, and the same command resumes", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of standard output has exited, as in `| head`; discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

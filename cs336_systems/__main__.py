"""`python -m cs336_systems` is `cs336`. From its first line on Ctrl-C ends it with one line, also during imports."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the signal's number."""


def exit_on_interrupt(program: str) -> None:
    """End this process on Ctrl-C, at once and with one line.

    An exception would not do: raised inside an import or a destructor it is turned into another error, or ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{program}: stopped\n".encode())
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores Ctrl-C
        signal.signal(signal.SIGINT, stop)


def main() -> int:
    exit_on_interrupt("cs336")
    from cs336_systems.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

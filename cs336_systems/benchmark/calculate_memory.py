"""The course's path to the memory calculator: `python cs336_systems/benchmark/calculate_memory.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":  # run by path: this folder would come first and its files hide standard modules
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from cs336_systems.__main__ import exit_on_interrupt

    exit_on_interrupt("calculate_memory.py")

from cs336_systems.commands import run_command
from cs336_systems.experiments.memory.calculator import CalculateArguments, calculate
from cs336_systems.experiments.memory.calculator import __doc__ as manual


def main(argv: list[str] | None = None) -> int:
    return run_command("calculate_memory.py", manual, CalculateArguments, calculate, argv)


if __name__ == "__main__":
    sys.exit(main())

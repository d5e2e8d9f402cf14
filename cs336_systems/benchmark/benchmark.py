"""The course's path to `cs336 bench`: `python cs336_systems/benchmark/benchmark.py --d_model 768 ...`."""

import sys
from pathlib import Path

if __name__ == "__main__":  # run by path: this folder would come first and its files hide standard modules
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from cs336_systems.__main__ import exit_on_interrupt

    exit_on_interrupt("benchmark.py")

from cs336_systems.commands import run_command
from cs336_systems.experiments.bench_command import BenchArguments, bench
from cs336_systems.experiments.bench_command import __doc__ as manual


def main(argv: list[str] | None = None) -> int:
    return run_command("benchmark.py", manual, BenchArguments, bench, argv)


if __name__ == "__main__":
    sys.exit(main())

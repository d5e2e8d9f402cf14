"""A regression gate: fail when a change makes a step slower, beyond noise.

    python examples/regression_gate.py before/records.jsonl after/records.jsonl

Exit code 1 if some row is slower by more than 5% with all of its confidence interval. On the command line:
`cs336 compare before/records.jsonl after/records.jsonl --fail_if_slower 5%`.
"""

import sys

from cs336_systems.record import load
from cs336_systems.report.compare import compare
from cs336_systems.report.compare_output import on_screen

LIMIT = 5.0
"""Percent."""


def gate(before: str, after: str) -> int:
    comparison = compare(load(before).records, load(after).records, files=(before, after))
    print(on_screen(comparison, sys.stdout))
    slower = comparison.slower_by(LIMIT)
    for row in slower:
        print(f"slower by more than {LIMIT:g}%: {row.name.en}", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(gate(*sys.argv[1:3]))

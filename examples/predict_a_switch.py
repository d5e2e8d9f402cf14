"""Predict one trace from another: does `cs336 inspect --what_if` foresee a switch of implementations?

    cs336 profile --only kernels --attention reference --output runs/reference
    cs336 profile --only kernels --attention sdpa --output runs/sdpa
    python examples/predict_a_switch.py runs/reference/files/*/trace.json.gz runs/sdpa/files/*/trace.json.gz attention

Each trace is replayed with the times that the named kernels take in the other one, and the predicted step is compared
with the recorded step of the other. Names are those of `--what_if`; `elementwise+copy,optimizer` are two groups.
"""

import sys
from pathlib import Path

from cs336_systems.config import UserError
from cs336_systems.measure.readers.nsys import read_nsys
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.measure.readers.trace_graph import graph_of
from cs336_systems.measure.readers.trace_replay import Graph
from cs336_systems.measure.readers.what_if import outcome, parse_scenario


def graph_from(path: Path) -> Graph:
    return graph_of(read_nsys(path) if path.suffix == ".sqlite" else read_chrome(path))


def seconds_of(graph: Graph, name: str) -> float:
    """Return the seconds of the named kernels in a step; 0 where the trace has none."""
    try:
        return outcome(graph, graph.replay(), parse_scenario(f"{name}=1")).selected
    except UserError:
        return 0.0


def predicted(graph: Graph, other: Graph, names: list[str]) -> tuple[str, float]:
    """Return the scenario that makes one trace like the other, and its step in seconds."""
    present = [name for name in names if seconds_of(graph, name)]
    text = ",".join(f"{name}={seconds_of(other, name) * 1e3:.6g}ms" for name in present)
    return text, outcome(graph, graph.replay(), parse_scenario(text)).step


def main(first: str, second: str, names: str) -> None:
    graphs = {path: graph_from(Path(path)) for path in (first, second)}
    for source, target in ((first, second), (second, first)):
        text, step = predicted(graphs[source], graphs[target], names.split(","))
        recorded = graphs[target].replay().span / graphs[target].steps
        print(f"from {source} by {text}:")
        print(f"  predicted {step * 1e3:.2f} ms, recorded {recorded * 1e3:.2f} ms, error {step / recorded - 1:+.2%}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: predict_a_switch.py TRACE TRACE NAME,...")
    main(*sys.argv[1:])

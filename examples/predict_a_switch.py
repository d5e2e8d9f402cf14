"""Predict one trace from another: does `cs336 inspect --what_if` foresee a switch of implementations?

    cs336 profile --only kernels --attention reference --output runs/reference
    cs336 profile --only kernels --attention sdpa --output runs/sdpa
    python examples/predict_a_switch.py runs/reference/files/*/trace.json.gz runs/sdpa/files/*/trace.json.gz attention

Each trace is replayed with the time and the number that the named kernels have in the other one, and the predicted step
is compared with the recorded step of the other. Names are those of `--what_if`; `elementwise+copy,optimizer` are two
groups.
"""

import sys
from pathlib import Path

from cs336_systems.config import UserError
from cs336_systems.measure.readers.nsys import read_nsys
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.measure.readers.trace_graph import graph_of
from cs336_systems.measure.readers.trace_replay import Graph
from cs336_systems.measure.readers.what_if import Selection, outcome, parse_scenario, selections


def graph_from(path: Path) -> Graph:
    return graph_of(read_nsys(path) if path.suffix == ".sqlite" else read_chrome(path))


def kernels_of(graph: Graph, name: str) -> Selection | None:
    """Return time and number of the named kernels in a step; None where the trace has none."""
    try:
        return selections(graph, [name])[0]
    except UserError:
        return None


def predicted(graph: Graph, other: Graph, names: list[str]) -> tuple[str, float]:
    """Return the scenario that makes one trace like the other, and its step in seconds."""
    settings = []
    for name in names:
        found = kernels_of(other, name)
        if kernels_of(graph, name):
            settings.append(f"{name}={found.seconds * 1e3:.6g}ms/{found.kernels}" if found else f"{name}=0")
    text = ",".join(settings)
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

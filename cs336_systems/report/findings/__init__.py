"""What each experiment shows, in sentences computed from its cells, English and Chinese at once.

A sentence is a function of the cells of one machine that answers a `Text`, or None where the data do not say it.
Numbers are formatted once and put into both languages by `say`. Missing metrics, failed cells and odd values cost
sentences, never an exception: a report must come out of whatever a run left behind.
"""

from collections.abc import Sequence

from cs336_systems.report.cells import CellView
from cs336_systems.report.findings import attention, kernels, memory, ranks, steps
from cs336_systems.report.findings.phrases import MOST, Sentence, safely, say, sentence
from cs336_systems.text import Text


def findings(experiment: str, cells: Sequence[CellView]) -> list[Text]:
    """Up to three sentences for each machine; none of an experiment that is not known or of which nothing went well."""
    machines: dict[str, list[CellView]] = {}
    for cell in cells:
        machine = safely(lambda cell: cell.machine, cell) if cell.metrics else None
        if machine:
            machines.setdefault(machine, []).append(cell)
    found = []
    for machine, chosen in machines.items():
        texts = [text for make in _SENTENCES.get(experiment, ()) if (text := safely(make, chosen))][:MOST]
        found += [say("{}: {}", "{}：{}", machine, text) for text in texts] if len(machines) > 1 else texts
    return found


_SENTENCES: dict[str, tuple[Sentence, ...]] = {
    experiment: tuple(map(sentence, sentences))
    for room in (steps, kernels, memory, attention, ranks)
    for experiment, sentences in room.SENTENCES.items()
}

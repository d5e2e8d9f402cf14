"""Columns that depend on what was measured."""

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import GIB, Environment
from cs336_systems.report.sections import tables
from tests.helpers import entries, tiny_config

STEP = {
    "step_time": (0.1, 0.1),
    "forward_time": (0.05, 0.05),
    "peak_memory": (GIB,),
    "predicted_memory": (GIB,),
    "peak_phase": ("forward",),
    "traced_step_time": (0.2,),
}


@pytest.mark.parametrize("experiment", ["end_to_end", "peak_memory", "memory"])
@pytest.mark.parametrize("reserved", [None, 3 * GIB], ids=["not measured", "measured"])
def test_reserved_memory_is_shown_where_it_was_measured(experiment, reserved):
    metrics = STEP if reserved is None else {**STEP, "reserved_memory": (reserved,)}
    records = entries(experiment, tiny_config(), metrics, "ok", Environment())
    text = "\n".join(table.render("md") for table in tables(records, catalogue()))
    assert ("reserved (GiB)" in text) == ("3.00" in text) == (reserved is not None)

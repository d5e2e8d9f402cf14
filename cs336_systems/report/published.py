"""Published figures of the same work, as columns of reference with their GPU named.

published.json holds tables of write-ups of the course's assignment, limited to those that state GPU, batch, context and
precision. They are means without samples, on unstated software: a scale, not a measurement. `columns` of a table are
fields of the configuration and metrics; times are divided by `per_second`, memory is multiplied by `bytes`. A row
without values ran out of memory.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cs336_systems.config import RunConfig, model_config
from cs336_systems.record import CELL_TIME, Environment, Record

PUBLISHED = "published"
"""Name of the run under which these records are shown."""


def published() -> list[Record]:
    tables = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return [record for table in tables for row in table["rows"] for record in _records(table, row)]


def _records(table: Mapping[str, Any], row: list[Any]) -> Iterator[Record]:
    fields = dict(table["config"])
    values: dict[str, tuple[str, float]] = {}
    for column, value in zip(table["columns"], row, strict=True):
        if not column.endswith(("_time", "_memory", "_before_backward")):
            fields[column] = value
        elif value is not None:
            time = column.endswith("_time")
            values[column] = ("s", value / table["per_second"]) if time else ("B", value * table["bytes"])
    if "size" in fields:  # a training step; attention alone has no model
        model = model_config(fields.pop("size"), context_length=fields.pop("context_length"))
        fields = RunConfig(model, **fields).to_dict()
    environment = Environment(gpu=table["gpu"])
    for metric, (unit, value) in values.items():
        yield Record(table["experiment"], fields, metric, unit, (value,), environment=environment)
    status = "ok" if values else "oom"
    yield Record(table["experiment"], fields, CELL_TIME, "s", (), status, environment)

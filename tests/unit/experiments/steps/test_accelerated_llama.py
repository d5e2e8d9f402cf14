"""The experiment `accelerate`: its table with failures, and its instrument on a model of two layers."""

import pytest

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import MissingError, require_package, run_config
from tests.unit.experiments.steps.samples import accelerated
from tests.unit.report.step_cells import OOM, notes, rows, tables


def test_speed_ups_and_memory_are_those_over_transformers():
    times = {"plain": 0.4, "liger": 0.32, "ours": 0.2}
    (table,) = tables(accelerated("2.7B", times, failed="compiled"))
    headings = ("implementation", "step (ms)", "speed-up", "peak (GiB)", "memory", "loss, difference")
    assert rows(table, *headings) == [
        ("transformers", "402.00", "1.00x", "60.00", "1.00x", "+0.000%"),
        ("torch.compile", "error", "", "", "", ""),
        ("Liger", "321.60", "1.25x", "56.00", "0.93x", "+0.010%"),
        ("ours", "201.00", "2.00x", "52.00", "0.87x", "+0.019%"),
    ]
    assert any("it does not run here" in note for note in notes(table))


def test_a_cell_without_memory_has_its_verdict():
    (table,) = tables(accelerated("2.7B", {}, failed="ours", status=OOM))
    assert "OOM" in table.rows[0]


def test_a_missing_package_is_named():
    require_package("accelerate", "torch")
    with pytest.raises(MissingError, match="pip install no_such_package"):
        require_package("accelerate", "no_such_package")


@pytest.mark.xdist_group("transformers")
def test_the_instrument_compares_implementations_on_the_same_weights():
    pytest.importorskip("transformers", reason="needs transformers")
    from cs336_systems.experiments.steps.measure_accelerate import measure_accelerate

    config = run_config(RunConfig(device="cpu", batch_size=2), "tiny", 16)
    config["model"] |= {"vocab_size": 50, "num_layers": 2, "d_model": 32, "d_ff": 48, "num_heads": 2}
    names = ["plain", "ours", "packed", "liger"]  # the last one is not installed
    found = measure_accelerate({**config, "size": "", "implementations": names, "rounds": 2})
    by_name = {(metric.variant, metric.name): metric.samples for metric in found}
    assert by_name["liger", "status"][0].startswith("ModuleNotFoundError")
    for name in names[:3]:
        assert by_name[name, "loss"][0] == pytest.approx(by_name["plain", "loss"][0], rel=1e-5)
        assert len(by_name[name, "step_time"]) == 4
    assert by_name["ours", "gradient_norm"][0] == pytest.approx(by_name["plain", "gradient_norm"][0], rel=1e-5)

"""Peak memory of random families of models: closed form, trace, and what an H200 has measured."""

import json

import pytest

from cs336_systems.measure.memory_trace import predict_by_tracing
from cs336_systems.predict.memory_model import estimate
from tests.helpers import ROOT
from tests.unit.predict.family_cases import family_config

MEASURED = {int(seed): peak for seed, peak in json.loads((ROOT / "results/h200/family_peaks.json").read_text()).items()}
"""Peak bytes of a step of `family_config(seed, scale=8)`."""
TRACED = (5, 11, 17, 30)
"""Plain and fast steps, tied and not, with biases and norms of heads, recomputed and not."""


def test_closed_forms_agree_with_an_h200():
    assert len(MEASURED) == 40
    errors = {seed: estimate(family_config(seed, scale=8)).peak / peak - 1 for seed, peak in MEASURED.items()}
    assert {seed: round(error, 4) for seed, error in errors.items() if abs(error) > 0.02} == {}


@pytest.mark.parametrize("seed", TRACED)
def test_traces_agree_with_an_h200(seed):
    pytest.importorskip("triton")
    assert predict_by_tracing(family_config(seed, scale=8)).peak == pytest.approx(MEASURED[seed], rel=0.01)

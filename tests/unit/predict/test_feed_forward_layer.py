"""One feed-forward layer in closed form, against the messages of `plan` and against a search."""

import math

import pytest

from cs336_systems.predict import feed_forward_layer as closed
from cs336_systems.predict.parallel_model import Cluster, Plan, Workload
from cs336_systems.predict.strategy import Strategy

LAYER = closed.Layer(tokens=65_536, width=4096, inner=11_008, flops=989e12, bandwidth=450e9)
SMALL = closed.Layer(tokens=512, width=64, inner=96, flops=1e9, bandwidth=2e9)
STRATEGIES = {"DP": Strategy(), "FSDP": Strategy(stage=3)}


def plan(layer, devices, strategy):
    """The plan of `cs336 plan` for the same layer: tokens are those of one device."""
    tokens, parameters = layer.tokens / devices, 3 * layer.width * layer.inner
    work = Workload(
        blocks=1, matrices=parameters, looked_up=0, replicated=0, largest=layer.width * layer.inner, width=2,
        has_copies=False, tokens=tokens, stream=tokens * layer.width * 2, forward=2.0 * tokens * parameters,
        backward=4.0 * tokens * parameters, activations=0.0, reductions=1, recomputed=0,
    )  # fmt: skip
    return Plan(work, Cluster(devices, 1e15, layer.flops, devices, layer.bandwidth, layer.bandwidth), strategy)


@pytest.mark.parametrize("layer", [LAYER, SMALL])
@pytest.mark.parametrize("devices", [1, 2, 8, 64])
@pytest.mark.parametrize("layout", closed.LAYOUTS)
def test_bytes_and_times_are_those_of_the_messages_of_plan(layer, devices, layout):
    expected = plan(layer, devices, STRATEGIES.get(layout) or Strategy(tensor=devices))
    for during in ("forward", "backward"):
        cost = closed.LAYOUTS[layout](layer, devices, during)
        sent = sum(message.sent for message in expected.collectives if message.during == during)
        assert cost.sent == pytest.approx(sent)
        assert cost.communication == pytest.approx(expected.communication(during))
        assert cost.compute == pytest.approx(expected.compute(during))
        assert cost.flops == layer.work(during) / devices


@pytest.mark.parametrize("layer", [LAYER, SMALL])
@pytest.mark.parametrize(
    ("layout", "during"),
    [("DP", "backward"), ("FSDP", "forward"), ("FSDP", "backward"), ("TP", "forward"), ("TP", "backward")],
)
def test_the_largest_number_of_devices_is_the_last_whose_communication_is_hidden(layer, layout, during):
    most = math.floor(closed.most_devices(layer, layout, during) + 1e-9)
    hidden = [
        cost.communication <= cost.compute * (1 + 1e-9)
        for cost in (closed.LAYOUTS[layout](layer, devices, during) for devices in (most, most + 1))
    ]
    assert hidden == [True, False]


def test_data_parallel_forward_has_no_limit():
    assert closed.most_devices(LAYER, "DP", "forward") == math.inf
    assert closed.data_parallel(LAYER, 64, "forward").sent == 0


@pytest.mark.parametrize("devices", [2, 8, 64])
def test_a_split_has_the_messages_of_plan(devices):
    for one in closed.splits(LAYER, devices):
        expected = plan(LAYER, devices, Strategy(stage=3, tensor=one.tensor))
        messages = [message for message in expected.collectives if message.during == "forward"]
        times = {message.purpose: expected.seconds(message) for message in messages}
        assert one.gather == pytest.approx(times.get("weights", 0.0))
        assert one.reduce == pytest.approx(times.get("activations", 0.0))
        assert one.overlapped <= one.in_turn <= one.compute + one.gather + one.reduce


def test_splits_are_all_of_them():
    found = [(one.sharded, one.tensor) for one in closed.splits(LAYER, 12)]
    assert found == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]


@pytest.mark.parametrize("tokens", [16_384, 262_144, 1_048_576])
def test_the_best_tensor_degree_is_near_the_one_found_by_search(tokens):
    layer = closed.Layer(tokens, 4096, 11_008, 989e12, 450e9)
    found = min(closed.splits(layer, 4096), key=lambda one: one.gather + one.reduce)
    degree = min(max(closed.best_tensor_degree(layer, 4096), 1), 4096)
    assert found.tensor / 2 <= degree <= 2 * found.tensor


@pytest.mark.parametrize("devices", [2, 3, 16])
def test_whole_tensors_round_the_ring_take_half_as_many_times_as_there_are_devices(devices):
    usual, whole = (way(1e9, devices, 1e9) for way in (closed.ring, closed.ring_of_whole_tensors))
    assert whole / usual == pytest.approx(devices / 2)

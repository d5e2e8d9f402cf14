"""Whole blocks that are kept, recomputed or offloaded: gradients, memory, and the plans for a budget."""

import dataclasses
import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.measure import block_planner
from cs336_systems.measure.block_planner import BlockCosts, block_costs, build_step, plan_blocks
from cs336_systems.measure.memory_trace import measure_peak, predict_by_tracing
from cs336_systems.model import TransformerLM
from cs336_systems.predict.activation_plan import KEEP, OFFLOAD, RECOMPUTE
from cs336_systems.predict.memory_planner import Rates
from cs336_systems.record import GIB
from cs336_systems.step import block_memory
from cs336_systems.step.block_memory import BlockMemory, find_blocks
from cs336_systems.step.memory_budget import machine_limits
from cs336_systems.step.train_step import TrainStep
from tests.helpers import refused

SHAPE = ModelConfig(vocab_size=61, context_length=12, d_model=24, num_layers=4, num_heads=3, d_ff=40)
MIXED = (OFFLOAD, OFFLOAD, RECOMPUTE, KEEP)


class Layer(nn.Module):
    """A block of a user: dropout, two inputs, one of them by name, two outputs, a table that is no parameter."""

    def __init__(self, width):
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.register_buffer("table", torch.rand(4096, width))

    def forward(self, x, total, *, scale):
        y = F.dropout(F.gelu(self.enter(x)), 0.3, training=self.training)
        left, right = y.chunk(2, -1)
        x = x + self.leave(torch.cat((left.sigmoid() * right, right * scale), -1)) * self.table[: x.shape[1]]
        return x, total + x.square().mean()


class Own(nn.Module):
    def __init__(self, layers=4, width=24, vocab_size=61):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width)])
        self.mixed = nn.ModuleList([nn.Linear(width, width), *[nn.Identity()] * 9])
        self.blocks = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        x, total = self.embed(tokens), torch.zeros(())
        for block in self.blocks:
            x, total = block(x, total, scale=0.5)
        return self.head(self.norms[0](x)) + 0.01 * total


def build(vocab_size, d_model, num_layers, **_):
    """Build a user's model: what `model_factory` names."""
    return Own(num_layers, d_model, vocab_size)


def no_blocks(vocab_size, d_model, **_):
    return nn.Sequential(nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size))


OWN = "tests.unit.step.test_block_memory:build"


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    """These models are small: offload everything."""
    monkeypatch.setattr(block_memory, "SMALLEST", 256)


def plain_model():
    torch.manual_seed(0)
    return TransformerLM(SHAPE, attention="reference")


def own_model():
    torch.manual_seed(0)
    return Own()


MODELS = {"plain": plain_model, "own": own_model}


def results_of(model, seed=0, precision=torch.float32, length=12):
    model.zero_grad()
    torch.manual_seed(seed)
    tokens = torch.randint(61, (2, length))
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        logits = model(tokens)
    logits.float().square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_plan_changes_a_bit(make, precision):
    expected = results_of(make(), precision=precision)
    for plan in itertools.islice(itertools.product((KEEP, RECOMPUTE, OFFLOAD), repeat=4), 0, None, 16):
        model = make()
        memory = BlockMemory(model, plan)
        for _ in range(2):
            assert_same(results_of(model, precision=precision), expected)
        assert (memory.host.nbytes > 0) == (OFFLOAD in plan)


@pytest.mark.parametrize("frozen", ["embed", "blocks.1", "blocks", "head"])
def test_frozen_weights(frozen):
    models = [own_model(), own_model()]
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    BlockMemory(models[1], MIXED)
    for seed in range(2):
        assert_same(results_of(models[1], seed), results_of(models[0], seed))


def test_evaluation_between_forward_and_backward_and_other_lengths():
    model, plain = own_model(), own_model()
    memory = BlockMemory(model, MIXED)
    for length in (5, 12, 7):
        torch.manual_seed(length)
        tokens = torch.randint(61, (3, length))
        states = []
        for each in (model, plain):
            torch.manual_seed(1)
            logits = each(tokens)
            with torch.no_grad():
                states.append(each.eval()(tokens[:1, :4]))
            each.train().zero_grad()
            logits.square().mean().backward()
        assert torch.equal(*states)
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert not memory.host._sent
    assert not memory.host._fetched


def test_a_block_that_runs_twice():
    class Looped(Own):
        def forward(self, tokens):
            x, total = self.embed(tokens), torch.zeros(())
            for block in (*self.blocks, *self.blocks):
                x, total = block(x, total, scale=0.5)
            return self.head(x) + 0.01 * total

    expected = results_of(_seeded(Looped))
    model = _seeded(Looped)
    BlockMemory(model, MIXED)
    assert_same(results_of(model), expected)


def _seeded(kind):
    torch.manual_seed(0)
    return kind()


def test_two_backward_passes_of_one_graph():
    grads = []
    for plan in (None, MIXED):
        model = own_model()
        if plan:
            BlockMemory(model, plan)
        torch.manual_seed(1)
        loss = model(torch.zeros(1, 12, dtype=torch.long)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert_same(*grads)


def test_backward_after_a_later_forward_pass_is_refused():
    model, tokens = own_model(), torch.zeros(1, 12, dtype=torch.long)
    BlockMemory(model, MIXED)
    first, second = model(tokens).sum(), model(tokens).sum()
    with pytest.raises(RuntimeError, match="later forward pass"):
        first.backward()
    second.backward()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_storage_is_copied_once_and_weights_never():
    """The two chunks are saved as views of one storage."""
    model = own_model()
    memory = BlockMemory(model, (OFFLOAD, KEEP, KEEP, KEEP))
    sent = []
    send = memory.host.send
    memory.host.send = lambda key, tensor: sent.append(tensor) or send(key, tensor)
    logits = model(torch.zeros(2, 12, dtype=torch.long))
    addresses = [tensor.data_ptr() for tensor in sent]
    assert len(addresses) == len(set(addresses)) > 4
    fixed = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not fixed & set(addresses)
    assert memory.offloaded_bytes[0] == sum(tensor.nbytes for tensor in sent) == memory.host.nbytes
    assert memory.offloaded_bytes[1:] == [0, 0, 0]
    del logits
    assert memory.offloaded_bytes == [0] * 4


def test_nothing_is_left_of_a_dropped_graph_and_host_memory_is_reused():
    model = own_model()
    memory = BlockMemory(model, MIXED)
    results_of(model)
    nbytes, stored = memory.host.nbytes, []
    send = memory.host.send
    memory.host.send = lambda key, tensor: stored.append(weakref.ref(tensor.untyped_storage())) or send(key, tensor)
    logits = model(torch.zeros(2, 12, dtype=torch.long))
    del logits
    gc.collect()
    assert stored
    assert all(reference() is None for reference in stored)
    results_of(model)
    assert memory.host.nbytes == nbytes > 0


def test_tensors_of_a_block_are_fetched_one_block_ahead(monkeypatch):
    model, events = own_model(), []
    memory = BlockMemory(model, (OFFLOAD, OFFLOAD, RECOMPUTE, KEEP))
    fetch, take = memory.host.fetch, memory.host.take
    monkeypatch.setattr(
        memory.host, "fetch", lambda keys: [events.append(("fetch", key[0])) or fetch([key]) for key in keys]
    )
    monkeypatch.setattr(memory.host, "take", lambda key: events.append(("take", key[0])) or take(key))
    results_of(model)
    assert events.index(("fetch", 1)) < events.index(("take", 1))
    assert events.index(("fetch", 0)) < events.index(("take", 1)) < events.index(("take", 0))


LARGE = ModelConfig(vocab_size=64, context_length=64, d_model=32, num_layers=3, num_heads=2, d_ff=128)


def config_of(**fields):
    return RunConfig(model=LARGE, batch_size=8, **fields)


def with_budget(config, size):
    return dataclasses.replace(config, memory_budget=f"{size / GIB:.6f}GiB")


@pytest.mark.parametrize("fields", [{}, {"model_factory": OWN}], ids=["plain", "own"])
def test_the_measured_peak_is_within_the_budget_and_as_predicted(fields):
    config = config_of(**fields)
    most = predict_by_tracing(config).peak
    config = with_budget(config, 0.75 * most)
    step = build_step(config)
    batch = step.random_batch()
    step(*batch)
    measured = measure_peak(step, batch)
    planned = plan_blocks(config, *machine_limits(config))
    assert measured <= planned.budget <= 0.75 * most + 2**10
    assert measured == pytest.approx(planned.estimate.peak, rel=0.02)
    assert {KEEP, RECOMPUTE} == set(planned.plan)


def test_losses_within_a_budget_are_those_without():
    config, losses = config_of(model_factory=OWN), []
    for within in (config, with_budget(config, 0.75 * predict_by_tracing(config).peak)):
        step = build_step(within)
        torch.manual_seed(1)
        losses.append([step(*step.random_batch()).item() for _ in range(2)])
    assert losses[0] == losses[1]


# -- plans ------------------------------------------------------------------------------------------------------------


def on_gpu(**fields):
    return config_of(device="cuda", **{"precision": "bf16", "attention": "sdpa", **fields})


def test_costs_of_a_block():
    costs = block_costs(on_gpu(model_factory=OWN))
    rows, width = 8 * 64, 32
    assert (costs.blocks, costs.inputs) == (3, 4 * rows * width + 4)
    assert costs.flops == 2 * rows * width * 3 * width * 2
    assert costs.saved > 10 * 2 * rows * width


def test_offloading_lowers_the_traced_peak():
    config = on_gpu(model_factory=OWN, precision="fp32")
    peaks = [
        predict_by_tracing(config, lambda step, plan=plan: BlockMemory(step.model, plan) and None).peak
        for plan in ((KEEP,) * 3, (OFFLOAD, KEEP, KEEP))
    ]
    assert peaks[0] - peaks[1] == pytest.approx(block_costs(config).saved, rel=0.35)


def test_the_cheaper_choice_comes_first():
    costs, rates = BlockCosts(blocks=4, saved=1000, inputs=100, flops=10**6), Rates(1e6, 1e6, 1e3)
    assert block_planner._offloading_is_cheaper(costs, rates)  # the copy takes as long as the forward pass beside it
    assert not block_planner._offloading_is_cheaper(costs, rates._replace(host=400))
    assert not block_planner._offloading_is_cheaper(costs._replace(flops=10**5), rates)


@pytest.mark.parametrize("host_limit", [math.inf, 0.0])
def test_a_plan_on_a_gpu_offloads_where_the_host_has_room(host_limit):
    config = on_gpu(model_factory=OWN)
    rates, costs = Rates.of(None)._replace(host=1e15), block_costs(config)
    planned = plan_blocks(config, predict_by_tracing(config).peak - 1, rates, host_limit)
    first, saved = (OFFLOAD, costs.saved) if host_limit else (RECOMPUTE, 0)
    assert planned.plan == (first, KEEP, KEEP)
    assert planned.host_bytes == saved


def test_too_small_a_budget_names_the_least_that_works():
    config = config_of(model_factory=OWN)
    with refused("not enough", "needs at least"):
        plan_blocks(config, 1000, Rates.of(None))
    least = predict_by_tracing(config, lambda step: BlockMemory(step.model, (RECOMPUTE,) * 3) and None).peak
    assert plan_blocks(config, least, Rates.of(None)).estimate.peak <= least


@pytest.mark.parametrize("blocks", [2, 3, 7, 40])
@pytest.mark.parametrize("budget", [0.05, 0.3, 0.95])
def test_the_search_finds_the_first_that_fits_with_few_traces(blocks, budget):
    def peak(number):
        asked.append(number)
        return 1000 - 800 * number / blocks + (7 if number % 3 else 0)

    asked: list[int] = []
    limit = 1000 * budget
    found = block_planner._first_within(limit, peak, blocks + 1)
    if budget == 0.05:
        assert found is None
    else:
        assert peak(found) <= limit < peak(found - 1)
        assert len(set(asked)) <= 8


@pytest.mark.parametrize("offloads_first", [False, True])
@pytest.mark.parametrize("most", [0, 2, 4])
def test_the_chain_of_plans(most, offloads_first):
    plans = block_planner._chain(5, most, offloads_first=offloads_first)
    assert plans[0] == (KEEP,) * 5
    assert all(len(plan) == 5 and plan.count(OFFLOAD) <= most and plan[-1] != OFFLOAD for plan in plans)
    assert plans[-1] == (OFFLOAD,) * most + (RECOMPUTE,) * (5 - most)
    assert len(set(plans)) == len(plans)


def test_blocks_are_the_longest_list_of_one_class():
    model = own_model()
    assert find_blocks(model) == list(model.blocks)
    with refused("memory_budget", "Sequential", "nn.ModuleList"):
        find_blocks(no_blocks(61, 8))


def test_a_model_without_blocks_is_refused():
    config = config_of(model_factory="tests.unit.step.test_block_memory:no_blocks", memory_budget="1GiB")
    with refused("memory_budget", "ModuleList"):
        build_step(config)


def test_training_steps_need_the_plan():
    with pytest.raises(AssertionError, match="block_planner"):
        TrainStep.build(config_of(memory_budget="1GiB"))
    assert math.isfinite(build_step(config_of(memory_budget="100GiB")).launch([(torch.zeros(1, 3).long(),) * 2]))

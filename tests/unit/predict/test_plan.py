"""Predicted parallel layouts, compared with the bytes that the wrappers hold and send, and with published answers."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.cli import main
from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.experiments.ranks.layouts import tables_of
from cs336_systems.experiments.ranks.measure_ranks import measure_arrangements
from cs336_systems.experiments.ranks.plan_cells import STRATEGIES, PlanArguments, plan_config, plans
from cs336_systems.parallel import fsdp
from cs336_systems.predict import parallel_model
from cs336_systems.predict.gpus import CARDS
from cs336_systems.predict.parallel_model import Cluster, Plan, Workload, feed_forward, transformer
from cs336_systems.predict.strategy import Strategy
from cs336_systems.record import GIB, MIB

MODEL = ModelConfig(vocab_size=96, context_length=8, d_model=16, num_layers=3, num_heads=2, d_ff=32)
TENSORS = 9 * MODEL.num_layers + 3
FLAG = 4
"""Bytes that buckets carry for each parameter, to mark which were used."""


def cluster(gpus: int, **fields) -> Cluster:
    return Cluster(**{"gpus": gpus, "memory": 80e9, "flops": 1e15, "node": 8, "link": 4e11, "network": 5e10, **fields})


def plan(strategy: str, gpus: int, config: RunConfig, **fields) -> Plan:
    return Plan(transformer(config), cluster(gpus, **fields), Strategy.parse(strategy))


# -- compared with the wrappers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    run = RunConfig(model=MODEL, batch_size=2, warmup_steps=0, num_steps=1)
    own = {"ranks": 2, "backend": "gloo", "arrangements": ["bucketed 25", "sharded", "fsdp"], "rounds": 1, "link": None}
    metrics = measure_arrangements({**run.to_dict(), **own})
    return run, {f"{metric.variant}: {metric.name}": metric.samples for metric in metrics}


def sent(found: dict, arrangement: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name, size in zip(found[f"{arrangement}: message"], found[f"{arrangement}: message_size"], strict=True):
        totals[name] = totals.get(name, 0) + size
    return totals


def planned(found: Plan) -> dict[str, float]:
    totals: dict[str, float] = {}
    for collective in found.collectives:
        totals[collective.name] = totals.get(collective.name, 0) + collective.nbytes
    return totals


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("arrangement", "strategy"), [("bucketed 25", "dp"), ("sharded", "zero1"), ("fsdp", "fsdp")])
def test_bytes_equal_those_of_the_wrappers(measured, arrangement, strategy):
    run, found = measured
    expected = plan(strategy, 2, run)
    for part in ("parameter", "gradient"):
        assert found[f"{arrangement}: {part}_memory"] == [expected.memory[part]], part
    step_counts = 4 * TENSORS  # AdamW has one per tensor
    state = found[f"{arrangement}: optimizer_memory"][0]
    assert expected.memory["optimizer"] <= state <= 1.1 * expected.memory["optimizer"] + step_counts

    real, predicted = sent(found, arrangement), planned(expected)
    if strategy == "zero1":  # the broadcasts of all owners together are an all-gather
        real["all_gather"] = real.pop("broadcast")
    flags = FLAG * (2 * MODEL.num_layers + 1 if strategy == "fsdp" else TENSORS)
    assert real == {**predicted, "all_reduce": predicted["all_reduce"] + flags}


def test_prefetch_depths_are_those_of_fsdp():
    assert (parallel_model.GATHERED_AHEAD, parallel_model.SCATTERED_AT_ONCE) == (fsdp.AHEAD, fsdp.SCATTERS)


# -- compared with published answers ----------------------------------------------------------------------------------

XXL = {"d_model": 16384, "d_ff": 53248, "num_layers": 126, "num_heads": 128}


def test_handout_model_on_one_device():
    """Weights, gradients and Adam's two moments in fp32: 16 bytes for each of 2.2e11 parameters."""
    run = RunConfig(model=ModelConfig(**XXL, context_length=1), batch_size=1, precision="bf16")
    found = Plan(feed_forward(run), cluster(1), Strategy())
    parameters = 126 * 2 * 16384 * 53248
    assert sum(found.memory[part] for part in ("parameter", "gradient", "optimizer")) == 16 * parameters
    assert found.memory["activation"] == 126 * 2 * (16384 + 53248)
    assert found.collectives == []
    assert found.hidden == found.exposed


def test_fsdp_is_compute_bound_from_the_ratio_of_rates_on():
    """The Scaling Book: compute-bound from C / W tokens per device on, for any model."""
    run = RunConfig(model=ModelConfig(**XXL, context_length=4096), batch_size=1, precision="bf16")
    found = Plan(feed_forward(run), cluster(4096, node=1), Strategy(stage=3))
    assert found.least_tokens == pytest.approx(1e15 / 5e10 * 4095 / 4096)


def test_handout_mesh():
    """16 x 4 devices of 4.6e14 FLOP/s, 1.8e11 B/s an axis, two axes for the weights: solved by hand for forward, with
    (n - 1) / n of an array sent and the collectives in sequence."""
    run = RunConfig(model=ModelConfig(**XXL, context_length=1024), batch_size=1, precision="bf16")
    mesh = cluster(64, node=4, flops=4.6e14, link=1.8e11, network=3.6e11)
    found = Plan(feed_forward(run), mesh, Strategy(stage=3, tensor=4))
    d_ff, per_axis = 53248, 1.8e11
    compute = d_ff / 4.6e14  # per token on each device, over 4 d_model
    activations = 4 * (3 / 4) / per_axis
    weights = (15 / 16) * d_ff / (4 * 2 * per_axis)
    assert found.least_tokens == pytest.approx(weights / (compute - activations))
    assert 300 < found.least_tokens < 400


def test_zero_stages_send_what_the_paper_says():
    """In units of the parameters, for many ranks: 2 for data parallel and stage 2, 3 for stages 3 and, here, 1."""
    run = RunConfig(model=ModelConfig(**XXL), precision="bf16")
    work = feed_forward(run)
    units = {
        stage: sum(m.sent for m in Plan(work, cluster(10_000), Strategy(stage)).collectives) / (2 * work.parameters)
        for stage in range(4)
    }
    assert units == {stage: pytest.approx(expected, rel=1e-3) for stage, expected in enumerate((2, 3, 2, 3))}


# -- invariants -------------------------------------------------------------------------------------------------------

workloads = st.builds(
    Workload,
    blocks=st.integers(1, 100),
    matrices=st.integers(1, 10**12),
    looked_up=st.just(0),
    replicated=st.integers(0, 10**6),
    largest=st.integers(1, 10**6),
    width=st.sampled_from([2, 4]),
    has_copies=st.booleans(),
    tokens=st.integers(1, 10**6),
    stream=st.integers(1, 10**9),
    forward=st.floats(1e6, 1e18),
    backward=st.floats(1e6, 1e18),
    activations=st.floats(0, 1e11),
    reductions=st.integers(1, 300),
    recomputed=st.integers(0, 300),
)
strategies = st.builds(Strategy, stage=st.integers(0, 3), tensor=st.sampled_from([1, 2, 8, 16]))


@given(workloads, strategies, st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_one_replica_less_than_the_smallest_cluster_does_not_fit(work, strategy, replicas):
    needed = Plan(work, cluster(replicas * strategy.tensor), strategy).smallest_cluster
    if needed is None:
        assert not Plan(work, cluster(10**9 * strategy.tensor), strategy).fits
        return
    slack = 1 + 1e-9
    assert Plan(work, cluster(needed), strategy).total <= 80e9 * slack
    if needed > strategy.tensor:
        assert Plan(work, cluster(needed - strategy.tensor), strategy).total * slack > 80e9


@given(workloads, strategies, st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_compute_exceeds_communication_from_least_tokens_on(work, strategy, replicas):
    found = Plan(work, cluster(replicas * strategy.tensor), strategy)
    least = found.least_tokens
    if not least:
        return
    scale = least / work.tokens

    def scaled(by: float) -> Plan:
        grown = dataclasses.replace(
            work,
            tokens=work.tokens * by,
            stream=work.stream * by,
            forward=work.forward * by,
            backward=work.backward * by,
        )
        return Plan(grown, found.cluster, strategy)

    for during in ("forward", "backward"):
        enough = scaled(scale * 1.001)
        assert enough.communication(during) <= enough.compute(during)
    few = scaled(scale * 0.999)
    assert any(few.communication(during) > few.compute(during) for during in ("forward", "backward"))


@given(workloads, strategies)
@settings(max_examples=60, deadline=None)
def test_one_replica_sends_nothing_and_more_hold_less(work, strategy):
    alone = Plan(work, cluster(strategy.tensor), strategy)
    assert all(collective.grows for collective in alone.collectives), "a single replica only splits layers"
    more = Plan(work, cluster(8 * strategy.tensor), strategy)
    assert more.total <= alone.total
    assert alone.hidden <= alone.exposed


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", CARDS)
def test_every_card_can_be_planned_for(card):
    precision = "bf16" if CARDS[card].peaks.bf16 else "fp16"
    config = plan_config(PlanArguments(gpu=card, precision=precision))
    assert config["flops"] > 1e13
    assert ("assumed" in config) == (CARDS[card].link is None)


def test_flags_for_one_gpu_say_so_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("memory-budget MEMORY_BUDGET", "optimizer-state {fp32,bf16}", "update-in-backward"):
        about = shown.split(f"--{name} ")[1].split(" --")[0]
        assert "for one GPU" in about, name


def test_an_unknown_interconnect_is_assumed_and_said():
    config = plan_config(PlanArguments(size="small", gpu="l40s", gpus=4))
    assert (config["link"], config["network"], config["assumed"]) == (25e9, 3e9, ["link", "network"])
    assert any(
        "PCIe 4.0 x16" in note.en for note in tables_of(PlanArguments(size="small", gpu="l40s", gpus=4))[1].notes
    )
    given = plan_config(PlanArguments(size="small", gpu="24GiB", tflops=100, link=50, network=12))
    assert "assumed" not in given


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpu": "24GiB"}, "--tflops"),
        ({"gpu": "v100"}, "has no bf16"),
        ({"gpu": "3060"}, "unknown --gpu '3060'"),
        ({"fast": "optimizer"}, "one GPU"),
        ({"memory_budget": "auto"}, "--memory_budget is for one GPU"),
        ({"num_layers": 5_000}, "at most 2,000"),
        ({"num_layers": 1_000_000}, "at most 10000"),
        ({"gpus": 4, "strategy": ("tp8",)}, "groups of 8"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_said(wrong, message):
    with pytest.raises(UserError, match=message):
        plans(plan_config(PlanArguments(**wrong)))


@pytest.mark.parametrize(
    ("gpus", "tensor"), [(1, None), (3, None), (4, "tp4"), (6, "tp2"), (8, "tp8"), (12, "tp4"), (1024, "tp8")]
)
def test_any_number_of_gpus_has_a_plan(gpus, tensor):
    """Layouts that nobody asked for are adapted to the number of GPUs, or left out."""
    config = plan_config(PlanArguments(size="medium", gpus=gpus, gpu="4090"))
    layouts = [name for name in config["strategies"] if "tp" in name and "pp" not in name]
    assert layouts == ([f"dp+{tensor}", f"zero3+{tensor}"] if tensor else [])
    assert ("left_out" in config) == (gpus not in (1, 1024))  # on one GPU all layouts are the same step
    assert len(plans(config)) == len(config["strategies"])
    assert len(STRATEGIES) == 8


@pytest.mark.parametrize(("count", "tensor"), [("transformer", 4), ("feed-forward", 8)])
def test_usual_layouts_divide_the_model(count, tensor):
    """A model of 28 heads gets TP 4, one of 25 heads none."""
    config = plan_config(PlanArguments(size="qwen2.5/7B", gpus=8, gpu="h100", count=count))
    assert [name for name in config["strategies"] if "tp" in name] == [f"dp+tp{tensor}", f"zero3+tp{tensor}"]
    odd = plan_config(PlanArguments(size="xl", gpus=8, gpu="h100"))
    assert not [name for name in odd["strategies"] if "tp" in name]


def test_the_fast_step_keeps_fewer_activations():
    def activations(**fields):
        found = plans(plan_config(PlanArguments(size="medium", gpus=8, context_length=1024, **fields)))
        return found[0].memory["activation"]

    for group in (0, 4):
        assert activations(fast="on", checkpoint_blocks=group) < activations(fast="off", checkpoint_blocks=group)


@pytest.mark.parametrize(
    ("strategy", "fused"),
    [
        ("dp", True),
        ("zero1", True),
        ("zero3", True),
        ("zero3+replicate2", True),
        ("zero1+tp2", False),
        ("zero3+cp2", False),
        ("dp+pp2", False),
    ],
)
def test_layouts_have_the_activations_with_which_their_ranks_run(strategy, fused):
    """Ranks that split layers, sequences or stages have no fused kernels."""
    arguments = PlanArguments(size="large", gpus=8, context_length=1024, checkpoint_blocks=0, strategy=(strategy,))
    on, off = (plans(plan_config(dataclasses.replace(arguments, fast=fast)))[0].total for fast in ("on", "off"))
    assert (on < off) is fused
    notes = [note.en for note in tables_of(dataclasses.replace(arguments, fast="on"))[0].notes]
    assert any(note.startswith("without the fused kernels and loss") for note in notes) is not fused


def test_the_table_has_a_row_for_each_strategy(capsys):
    flags = "--size small --gpus 16 --gpu 4090 --fast off --strategy dp,fsdp,tp2,zero1+tp4"
    assert main(["plan", *flags.split()]) == 0
    shown = capsys.readouterr().out
    for name in ("DP", "ZeRO-3", "DP + TP 2", "ZeRO-1 + TP 4"):
        assert shown.count(f"\n{name}  ") == 2, name
    assert "165 TFLOP/s, 25 GB/s in a node of 8" in shown


@pytest.mark.parametrize(
    "name",
    [
        "dp",
        "zero1",
        "zero3",
        "dp+tp2",
        "zero3+tp8",
        "zero1+tp8+cp2+pp4",
        "dp+ring4",
        "zero2+pp4x2",
        "zero3+replicate2+tp2",
    ],
)
def test_a_layout_can_be_given_as_the_tables_write_it(name):
    strategy = Strategy.parse(name)
    assert (strategy.name, Strategy.parse(strategy.title)) == (name, strategy)


def test_rates_can_be_given():
    arguments = PlanArguments(gpu="95GB", tflops=460, link=180, network=90, gpus=4, strategy=("zero3",))
    (found,) = plans(plan_config(arguments))
    assert found.cluster == Cluster(4, found.cluster.memory, 4.6e14, 8, 1.8e11, 9e10)
    assert 90 * GIB * 0.9 < found.cluster.memory < 95e9 - 500 * MIB


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"gpu": "95GB"}, "--tflops"),
        ({"gpu": "t4"}, "--precision"),
        ({"gpu": "tpu"}, "'tpu'"),
        ({"gpus": 0}, "--gpus must be at least 1, got 0"),
        ({"gpus": 10**11}, "--gpus 100,000,000,000 is too large for a prediction: at most 1,000,000"),
        ({"precision": "fp8"}, "one GPU only.* --parallel ddp or ddp-sharded"),
        ({"node": 0}, "--node"),
        ({"strategy": ("zero4",)}, "'zero4'"),
        ({"strategy": ("tp0",)}, "'tp0'"),
        ({"gpus": 12, "strategy": ("zero3+tp8",)}, "12 GPUs"),
        ({"tflops": -1.0}, "--tflops"),
        ({"link": 0.0}, "--link"),
        ({"strategy": ()}, "--strategy"),
        ({"strategy": ("dp+replicate2",)}, "replicate2 is for zero3"),
        ({"strategy": ("pp1x2",)}, "chunks need stages"),
        ({"gpus": 8, "strategy": ("zero3+replicate3",)}, "8 replicas"),
        ({"size": "tiny", "strategy": ("pp8",)}, "4 layers are too few"),
        ({"strategy": ("pp4x2",), "micro_batches": 3}, "3 micro batches are not a multiple of the 4 stages"),
        ({"micro_batches": -1}, "--micro_batches"),
    ],
)
def test_invalid_arguments_are_named(arguments, named):
    with pytest.raises(UserError, match=named):
        plans(plan_config(PlanArguments(**arguments)))

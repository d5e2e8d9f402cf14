"""Hand-made cells of the experiments with several ranks."""

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.experiments.ranks.feed_forward_costs import measure_costs
from cs336_systems.record import GIB, MIB, Metric
from cs336_systems.report.cells import CellView
from cs336_systems.report.sections import charts_of


def arrangement_cell(experiment, milliseconds, *, link=None, backend="gloo", metrics=()):
    """`milliseconds`: step time by arrangement. Communication alone takes 200 ms, backward 100."""
    config = RunConfig(model=model_config("small"), size="small", device="cuda").to_dict()
    config |= {"ranks": 2, "backend": backend, "arrangements": list(milliseconds), "link": link, "rounds": 3}
    found = [Metric("backward_time", "s", [0.1] * 3, "none")]
    for name, value in milliseconds.items():
        shares = {"sharded": (1, 1, 2), "fsdp": (2, 2, 2)}.get(name, (1, 1, 1))
        parts = {"parameter": 100, "gradient": 8 if name == "none" else 100, "optimizer": 200}
        found += [Metric("step_time", "s", [value / 1e3] * 3, name), Metric("weight_error", "1", [0.0], name)]
        found += [Metric("communication_time", "s", [0.2] * 3, name)] if name != "none" else []
        for (part, whole), share in zip(parts.items(), shares, strict=True):
            found.append(Metric(f"{part}_memory", "B", [whole / share * MIB], name))
    return CellView.of(experiment, config, [*found, *metrics])


def collective_cell(sizes=(10**6, 10**8), *, ranks=2, backend="gloo", latency=1e-3, rate=1e-9):
    config = {"backend": backend, "device": "cpu", "ranks": ranks, "collectives": ["all_reduce"], "sizes": list(sizes)}
    times = [Metric("time", "s", [latency + rate * size] * 3, f"all_reduce {size}") for size in sizes]
    return CellView.of("collectives", config, times)


def plan_cell(gpus=1024, count="transformer", fits=True):
    config = RunConfig(model=model_config("small"), size="xxl", device="cuda").to_dict()
    config |= {"gpus": gpus, "gpu": "h100", "node": 8, "flops": 1e15, "link": 4e11, "network": 5e10}
    config |= {"strategies": ["dp", "zero3"], "count": count, "gpu_memory": 80 * GIB}
    metrics = []
    for name, held, sends in (("dp", 90, 0.1), ("zero3", 10, 0.5)):
        metrics += [
            Metric(f"{part}_memory", "B", [held * GIB], name) for part in ("parameter", "gradient", "optimizer")
        ]
        for during in ("forward", "backward"):
            metrics.append(Metric(f"{during}_compute_time", "s", [0.2], name))
            metrics.append(Metric(f"{during}_communication_time", "s", [sends], name))
        metrics.append(Metric("fits", "1", [int(fits and name == "zero3")], name))
    return CellView.of("parallel_plan", config, metrics)


def layer_cell():
    config = {"gpu": "H100", "tokens": 65_536, "width": 4096, "inner": 11_008, "devices": 64}
    config |= {"flops": 1e15, "bandwidth": 5e11}
    return CellView.of("feed_forward_costs", config, measure_costs(config))


SAMPLES = {
    "feed_forward_costs": [layer_cell()],
    "collectives": [collective_cell()],
    "ddp": [arrangement_cell("ddp", {"none": 100, "naive": 400, "bucketed 1": 200, "torch DDP": 250})],
    "bucket_model": [
        arrangement_cell("bucket_model", {"none": 100, "bucketed 1": 130, "bucketed 4": 200}, link=[1e-3, 1e8])
    ],
    "optimizer_sharding": [arrangement_cell("optimizer_sharding", {"ddp": 200, "sharded": 300})],
    "fsdp": [arrangement_cell("fsdp", {"ddp": 200, "fsdp": 100, "torch fully_shard": 150})],
    "parallel_plan": [plan_cell(), plan_cell(64, fits=False), plan_cell(16384, "feed-forward")],
}


def tables(cells):
    return catalogue()[cells[0].experiment].tables(cells)


def charts(*cells):
    return charts_of(catalogue()[cells[0].experiment], cells)

"""Which charts cells give: what is in them, in which order, and that both writers can draw them."""

import itertools
import math
import re
from dataclasses import replace

import pytest

<<<<<<< HEAD
from cs336_systems import record
from cs336_systems.record import CELL_TIME, GIB, Environment, Record
from cs336_systems.report.cells import CellView, group
=======
from cs336_systems.experiments.ranks.layouts import PlanArguments, measure_plan, plan_config
from cs336_systems.record import BUS_FACTOR, CELL_TIME, GIB, MIB, Environment, Record
from cs336_systems.report.cells import CellView
>>>>>>> wt-attention
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.charts import charts
from cs336_systems.report.document import Chart, Limit, Point, Series
from cs336_systems.report.figures import pictures
from cs336_systems.report.picture import save
from cs336_systems.report.web.svg import svg
from cs336_systems.text import Text
from tests.golden.docs_images import CHARTS, FOLDER, drawn
from tests.golden.report_goldens import some_records
from tests.helpers import ROOT
from tests.unit.report.page_cases import EVIL, HAS, STEP, Page, hostile_charts, stacked

H200 = Environment(gpu="NVIDIA H200", gpu_count=1)


def cell(experiment, config, rows, environment=H200, status="ok"):
    config = {"device": "cuda", **config}
    whole = [*rows, (CELL_TIME, "s", [1.0])]
    found = {m: Record(experiment, config, m, unit, tuple(s), status, environment) for m, unit, s in whole}
    return CellView(experiment, config, found)


def values(series):
    return {point.x: point.y for point in series.points}


# -- profiles ---------------------------------------------------------------------------------------------------------


def profiled(size, **seconds):
    """A cell of `kernels`: phase -> milliseconds of matmul and of copies."""
    rows = [
        (f"kind_table: {phase}", "1", ["matmul", 2, matmul / 1e3, "copy", 1, copy / 1e3])
        for phase, (matmul, copy) in seconds.items()
    ]
    return cell("kernels", {"size": size, "context_length": 512, "mode": "train-step"}, rows)


def test_kernels_of_one_cell_have_a_bar_for_each_phase():
    (chart,) = charts("kernels", [profiled("small", forward=(3, 1), backward=(9, 1), optimizer=(0, 0))])
    matmul, copy = chart.series
    assert values(matmul) == {"forward, 4.0 ms": 75.0, "backward, 10.0 ms": 90.0}
    assert values(copy) == pytest.approx({"forward, 4.0 ms": 25.0, "backward, 10.0 ms": 10.0})
    assert "small" in chart.title.en


def test_kernels_of_several_cells_have_a_bar_each():
    (chart,) = charts("kernels", [profiled("small", forward=(3, 1)), profiled("xl", forward=(9, 1), backward=(9, 1))])
    assert values(chart.series[0]) == {"small, 4.0 ms": 75.0, "xl, 20.0 ms": 90.0}
    assert charts("kernels", [profiled("small", forward=(0, 0))]) == []
    assert charts("kernels", []) == []


def test_small_parts_of_memory_are_one_part_and_nothing_is_lost():
    parts = ["weights", 60 * GIB, "a", GIB / 10, "b", GIB / 5]
    metrics = [("part_memory", "B", parts), ("predicted_memory", "B", [61 * GIB])]
    (chart,) = charts("memory", [cell("memory", {"size": "small"}, metrics)])
    weights, other, predicted = chart.series
    assert [s.name.en for s in chart.series] == ["weights", "other", "predicted peak"]
    assert sum(values(s)["small"] for s in (weights, other)) == pytest.approx(60.3)
    assert values(predicted) == {"small": 61.0}
    assert chart.on_bars(predicted)
    assert charts("memory", [cell("memory", {"size": "small"}, [])]) == []


def test_predicted_peaks_stand_on_their_own_bars():
    def one(precision, blocks, inner, peak, predicted):
        config = {"size": "xl", "precision": precision, "checkpoint_blocks": blocks, "inner": inner}
        sizes = {"peak_memory": peak, "predicted_by_tracing_memory": predicted, "step_time": 0.5}
        return cell(
            "checkpointing", config, [(n, "B", [v * (1 if n == "step_time" else GIB)]) for n, v in sizes.items()]
        )

    cells = [one("fp32", 0, 0, 30, 31), one("fp32", 4, 1, 10, 11), one("bf16", 0, 0, 20, 21), one("bf16", 2, 0, 8, 9)]
    peaks, times = charts("checkpointing", cells)
    assert [(s.name.en, s.drawn, s.over) for s in peaks.series] == [
        ("fp32", "both", None),
        ("bf16", "both", None),
        ("fp32: predicted", "marks", 0),
        ("bf16: predicted", "marks", 1),
    ]
    assert values(peaks.series[3]) == {"none": 21.0, "2": 9.0}
    assert values(peaks.series[2]) == {"none": 31.0, "4/1": 11.0}
    assert len(times.series) == 2


# -- steps ------------------------------------------------------------------------------------------------------------


def test_the_rival_stands_where_its_time_puts_it():
    def one(seconds, fast="off", factory=None):
        config = {"size": "small", "batch_size": 4, "context_length": 512, "fast": fast, "model_factory": factory}
        return cell("fast_step", config, [("step_time", "s", [seconds, seconds])])

    llama = "cs336_systems.experiments.steps.llama:build"
    (chart,) = charts("fast_step", [one(0.03), one(0.005, "on"), one(0.02, factory=llama), one(0.01, "graph")])
    assert chart.places == ["none", "Llama of transformers", "graph", "all"]
    tops = [(float(e["y"]), e["data-label"]) for e in Page(svg(chart)).all("rect") if "data-label" in e]
    assert [name for _, name in sorted(tops)] == chart.places


<<<<<<< HEAD
# -- attention --------------------------------------------------------------------------------------------------------


def attended(implementation="flash_triton", length=1024, dim=64, seconds=1e-3, environment=H200, **fields):
    sizes = {"batch_size": 2, "heads": 4, "seq_len": length, "head_dim": dim, "is_causal": False, "precision": "bf16"}
    config = {**sizes, "implementation": implementation, **fields}
    flops = 14 * 2 * 4 * length**2 * dim
    return cell("flash", config, [("forward_backward_time", "s", [seconds]), ("flops", "FLOP", [flops])], environment)


def roofline(*cells):
    return {chart.name: chart for chart in charts("flash", cells)}.get("flash-roofline")


def test_the_intensity_counts_what_must_be_moved():
    chart = roofline(attended("flash_triton"), attended("reference"), attended("compiled"))
    fused, reference, compiled = (series.points[0] for series in chart.series[:3])
    flops, tensor, scores = 14 * 8 * 1024**2 * 64, 8 * 1024 * 64 * 2, 8 * 1024**2 * 2
    assert fused.x == pytest.approx(flops / (8 * tensor))
    assert reference.x == compiled.x == pytest.approx(flops / (8 * tensor + 8 * scores))
    assert fused.y == pytest.approx(flops / 1e-3 / 1e12)
    assert fused.name == "2 x 4 x 1024 x 64"
    assert (chart.log_x, chart.log_y) == (True, True)
    full = roofline(attended("flash_triton", precision="fp32"))
    assert full.series[0].points[0].x == pytest.approx(fused.x / 2)


def test_the_roof_is_the_least_of_peak_and_bandwidth():
    *_, roof = roofline(attended(length=32), attended(length=65536)).series
    assert roof.dashed
    assert "989 TFLOP/s, 4.8 TB/s" in roof.name.en
    ridge = 989.4 / 4.8
    for point in roof.points:
        assert point.y == pytest.approx(min(989.4, 4.8 * point.x))
    assert [point.x for point in roof.points][1] == pytest.approx(ridge)
    assert [roof.points[0].x, roof.points[-1].x] == pytest.approx([28, 57344])
    only = roofline(attended(length=65536)).series[-1]
    assert len(only.points) == 3  # both of its parts are in view


@pytest.mark.parametrize("gpu", ["NVIDIA RTX 9999", "NVIDIA B200", None])
def test_no_roof_of_a_gpu_that_is_not_known(gpu):
    chart = roofline(attended(environment=Environment(gpu=gpu)))
    assert [series.name.en for series in chart.series] == ["flash_triton"]


def test_no_roofline_of_a_cpu_or_of_nothing():
    assert roofline(attended(device="cpu")) is None
    assert roofline(attended(heads=None)) is None
    assert roofline(replace(attended(), metrics={})) is None
    assert roofline() is None


def test_every_shape_of_the_rivals_is_a_point():
    def one(length, causal):
        config = {"batch_size": 1, "heads": 16, "seq_len": length, "head_dim": 64, "is_causal": causal}
        config |= {"precision": "bf16", "implementations": ["flash_triton", "flex"]}
        times = [(f"{name}_forward_backward_time", "s", [1e-3]) for name in config["implementations"]]
        return cell("attention_rivals", config, [*times[: 1 if length == 512 else 2], ("flops", "FLOP", [1e12])])

    bars, roof = charts("attention_rivals", [one(512, False), one(1024, True), one(2048, False)])
    assert (bars.name, roof.name) == ("attention-rivals-1", "attention-rivals-roofline")
    assert [len(series.points) for series in roof.series] == [3, 2, 3]
    assert roof.series[1].points[0].name == "1 x 16 x 1024 x 64 causal"


def test_no_implementation_on_the_h200_is_above_the_roof():
    cells = group(
        r for r in record.load(ROOT / "results/h200/records.jsonl").records if "FLOP" in r.unit or "time" in r.metric
    )
    for experiment in ("flash", "attention_rivals"):
        found = charts(experiment, [one for one in cells if one.experiment == experiment])
        (chart,) = [chart for chart in found if chart.name.endswith("roofline")]
        for series in chart.series[:-1]:
            assert all(0 < point.y < min(989.4, 4.8 * point.x) for point in series.points)
        assert sum(len(series.points) for series in chart.series[:-1]) > 25
=======
# -- ranks ------------------------------------------------------------------------------------------------------------


def collective(sizes, latency=2e-5, rate=1e-10):
    config = {"ranks": 4, "backend": "nccl", "collectives": ["all_reduce"], "sizes": sizes}
    times = [(f"all_reduce {size}: time", "s", [latency + rate * size]) for size in sizes]
    return cell("collectives", config, times)


def test_the_fit_is_a_smooth_curve_through_points_that_lie_on_it():
    (chart,) = charts("collectives", [collective([10**k for k in range(3, 9)])])
    seen, fit = chart.series
    assert (seen.drawn, fit.drawn, fit.dashed, fit.over) == ("marks", "line", True, 0)
    assert len(fit.points) > 40
    assert [fit.points[0].x, fit.points[-1].x] == pytest.approx([1e-3, 100])
    for point in [*seen.points, *fit.points]:
        size = point.x * 1e6
        assert point.y == pytest.approx(size / (2e-5 + 1e-10 * size) / 1e9 * BUS_FACTOR["all_reduce"](4), rel=1e-6)
    (chart,) = charts("collectives", [collective([1000])])
    assert len(chart.series) == 1


def ddp(arrangements=("none", "naive", "torch DDP")):
    config = {"size": "small", "ranks": 2, "backend": "gloo", "arrangements": list(arrangements), "link": None}
    rows = []
    for name in arrangements:
        rows += [(f"{name}: step_time", "s", [0.01 if name == "none" else 0.015] * 3)]
        rows += [(f"{name}: phase", "1", ["forward", "backward"])]
        rows += [(f"{name}: phase_start", "s", [0.0, 0.004]), (f"{name}: phase_end", "s", [0.004, 0.010])]
        if name == "naive":
            rows += [("naive: communication_time", "s", [0.006]), ("naive: message", "1", ["all_reduce"] * 2)]
            rows += [("naive: message_start", "s", [0.010, 0.012]), ("naive: message_end", "s", [0.012, 0.015])]
    return cell("ddp", config, rows)


def test_exposed_communication_and_lanes():
    exposed, lanes = charts("ddp", [ddp()])
    assert [values(series) for series in exposed.series] == [
        {"naive": 6.0},
        {"naive": pytest.approx(5.0), "torch DDP": pytest.approx(5.0)},
    ]
    assert lanes.kind == "spans"
    assert lanes.name == "ddp-lanes"
    assert [(series.name.en, series.lane) for series in lanes.series] == [
        ("forward", 0),
        ("backward", 0),
        ("all-reduce", 1),
    ]
    spans = [(p.x, p.start, p.y) for series in lanes.series for p in series.points]
    assert spans == [("naive", 0, 4), ("naive", 4, 10), ("naive", 10, 12), ("naive", 12, 15)]  # the others sent nothing


def test_charts_of_several_cells_have_names_of_their_own():
    found = charts("ddp", [ddp(), ddp(["none", "naive"]), ddp(["naive"])])
    names = [chart.name for chart in found]
    assert len(set(names)) == len(names) == 6
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)
    assert names[:2] == ["ddp-1", "ddp-lanes"]
    assert [chart.name for chart in charts("ddp", [ddp(["none"])])] == []


def test_bucket_model_and_sharding():
    arrangements = ["none", "bucketed 1", "bucketed 25"]
    config = {"size": "small", "ranks": 2, "backend": "gloo", "arrangements": arrangements, "link": [1e-3, 1e9]}
    rows = [("none: backward_time", "s", [0.01]), ("none: gradient_memory", "B", [100 * MIB])]
    rows += [(f"{name}: step_time", "s", [0.02 + 0.01 * place]) for place, name in enumerate(arrangements)]
    (chart,) = charts("bucket_model", [cell("bucket_model", config, rows)])
    assert [(series.name.en, series.dashed) for series in chart.series] == [
        ("measured", False),
        ("predicted", True),
        ("S / (n w) + n o", True),
    ]
    assert values(chart.series[0]) == {1.0: pytest.approx(10.0), 25.0: pytest.approx(20.0)}
    config = {"size": "small", "ranks": 2, "backend": "gloo", "arrangements": ["ddp", "fsdp"], "link": None}
    sizes = {"ddp": (4, 4, 8), "fsdp": (2, 2, 4)}
    rows = [
        (f"{name}: {part}_memory", "B", [size * MIB])
        for name, all_sizes in sizes.items()
        for part, size in zip(("parameter", "gradient", "optimizer"), all_sizes, strict=True)
    ]
    (chart,) = charts("fsdp", [cell("fsdp", config, rows)])
    assert [values(series) for series in chart.series] == [{"ddp": a, "fsdp": a / 2} for a in (4, 4, 8)]


def test_a_plan_shows_what_one_gpu_has():
    config = plan_config(
        PlanArguments(size="xl", gpus=8, gpu="24GiB", tflops=100, link=25, network=3, strategy=("dp", "zero3"))
    )
    (chart,) = charts("parallel_plan", [CellView.of("parallel_plan", config, measure_plan(config))])
    assert chart.limit == Limit(24.0, Text("what one 24GiB has", "一张 24GiB 的显存"))
    totals = [sum(values(series)[name] for series in chart.series) for name in ("dp", "zero3")]
    assert totals[0] > totals[1] > 0
>>>>>>> wt-attention


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_all_charts_of_the_records_become_pictures():
    found = pictures(some_records())
    names = [one.name for one in found]
    assert {"ddp-1", "ddp-lanes", "kernels-1", "memory-1", "fast-step-1", "flash-roofline", "fsdp-1"} <= set(names)
    assert len(set(names)) == len(names)
    assert not [name for name in names if name.startswith("bench")]


def plain(name, kind, *series, **fields):
    return Chart(name, Text(fields.pop("title", "t")), kind, Text("$x_$"), Text("$"), series, **fields)


def with_one(x, y, **fields):
    return Series(Text("$$"), [Point(x, y)], **fields)


ODD = {
    "nothing": plain("nothing", "lines"),
    "no spans": plain("no-spans", "spans", with_one("a", math.nan)),
    "steps": STEP,
    "beyond": stacked(12_345.0, 36.0, 8.0),
    "no limit": stacked(8.0, limit=Limit(math.nan, Text("l"))),
    "over nothing": plain("over", "bars", with_one("x", 4.0), with_one("x", 4.0, drawn="marks", over=7), limit=HAS),
    "only marks": plain("marks", "stacked", with_one("x", 4.0, drawn="marks")),
    "one point": plain("one", "lines", with_one(1, 2.0, drawn="marks"), log_x=True, log_y=True),
    "dollars": plain("dollars", "bars", with_one("$^$", 1.0), with_one("$^$", 2.0), title=r"$\frac$"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_charts_become_pictures(name, tmp_path):
    (path,) = save([picture(ODD[name], "en")], tmp_path, ("svg",))
    assert "</svg>" in path.read_text(encoding="utf-8")


def test_hostile_names_become_pictures(tmp_path):
    """Half a character can be in no file; all else can."""
    clean = EVIL.encode("utf-8", "replace").decode("utf-8")
    for number, hostile in enumerate(hostile_charts()):
        text = Text(clean)
        points = [replace(point, x=float(place) if hostile.kind == "lines" else f"{clean}{place}")
                  for place, point in enumerate(hostile.series[0].points)]  # fmt: skip
        parts = [replace(one, name=text, points=points) for one in hostile.series]
        odd = replace(hostile, name=f"c{number}", title=text, x=text, y=text, series=parts, limit=Limit(2.0, text))
        (path,) = save([picture(odd)], tmp_path, ("svg",))
        assert "<script>" not in path.read_text(encoding="utf-8")


def test_a_picture_shows_limit_lanes_and_what_goes_beyond(tmp_path):
    plan, lanes = save([picture(ODD["beyond"]), picture(STEP)], tmp_path, ("svg",))
    text = plan.read_text(encoding="utf-8")
    assert "→ 12,345" in text
    assert HAS.text.en in text
    assert all(f">{name}<" in lanes.read_text(encoding="utf-8") for name in ("naive", "flat", "all-reduce", "0"))


def test_the_pictures_of_the_documents_are_there_and_come_from_charts():
    assert [one.name for one in drawn()] == list(CHARTS)
    for page in ("README.md", "README.zh-CN.md"):
        for file in re.findall(r"docs/images/([\w.-]+)\.png", (ROOT / page).read_text(encoding="utf-8")):
            assert (FOLDER / f"{file}.png").stat().st_size > 5000
            assert file in CHARTS or file.startswith("timeline")
    assert all((FOLDER / f"{file}.png").exists() for file in CHARTS)


def test_both_writers_have_the_same_kinds():
    kinds = Chart.__annotations__["kind"].__args__
    for kind, sideways in itertools.product(kinds, (False, True)):
        one = replace(STEP, kind=kind, horizontal=sideways)
        assert svg(one).startswith("<svg")
        assert picture(one).size[0] > 0

"""Names for readers and the colours of categories."""

import pytest

from cs336_systems.config import COURSE_SIZES, model_config
from cs336_systems.report.document import Chart, Series
from cs336_systems.report.names import (
    COLORS,
    IMPLEMENTATIONS,
    color_of_name,
    implementation_name,
    parallel_name,
    size_name,
)
from cs336_systems.text import Text


def test_implementations_have_names():
    assert implementation_name("sdpa_cudnn") == Text("cuDNN")
    assert implementation_name("flash_hopper").in_("zh") == "本项目，Hopper"
    assert implementation_name("unheard_of") == Text("unheard_of")
    assert implementation_name(None).en == "None"
    assert not [name.en for name in IMPLEMENTATIONS.values() if "_" in name.en]
    assert len({name.en for name in IMPLEMENTATIONS.values()}) == len(IMPLEMENTATIONS)


def test_every_implementation_has_a_colour_of_its_own():
    colors = {color_of_name(name.en) for key, name in IMPLEMENTATIONS.items() if key != "auto"}
    assert None not in colors
    assert colors <= set(range(COLORS))
    # FlashAttention-2 is in other charts than the last one, and no chart has two kinds of Hopper kernels.
    shared = ("auto", "flash_hopper", "flash_hopper_repeatable", "torch_varlen")
    distinct = [name for key, name in IMPLEMENTATIONS.items() if key not in shared]
    assert len({color_of_name(name.en) for name in distinct}) == len(distinct)
    assert color_of_name("ours") == color_of_name("ours, Hopper")  # the same kernel, chosen and named
    assert color_of_name("unheard of") is None


def custom(name, layers=None):
    model = model_config(name)
    return f"{model.d_model}/{model.d_ff}/{layers or model.num_layers}/{model.num_heads}"


@pytest.mark.parametrize("name", COURSE_SIZES)
def test_the_shape_of_a_size_has_its_name(name):
    assert size_name(name) == Text(name)
    assert size_name(custom(name)) == Text(name)
    assert size_name(custom(name, 1)) == Text(f"{name}, 1 block", f"{name}，1 块")
    assert size_name(custom(name, 5)).en == f"{name}, 5 blocks"


def test_another_shape_is_named_by_its_width():
    assert size_name("7/8/1/1") == Text("width 7, 1 block", "宽度 7，1 块")


@pytest.mark.parametrize("size", ["tiny", None, "1/2/3"])
def test_other_sizes_keep_their_name(size):
    assert size_name(size) == Text(str(size))


def colors(*names):
    chart = Chart("c", Text("t"), "bars", Text("x"), Text("y"), [Series(Text(name), []) for name in names])
    return [chart.color_of(index) for index in range(len(names))]


def test_a_category_has_the_same_colour_in_every_chart():
    assert colors("cuDNN", "ours") == colors("ours", "cuDNN")[::-1]
    fixed, first, second = colors("backward", "some", "others")
    assert (fixed, first, second) == (color_of_name("backward"), 0, 2)  # others take what is free


@pytest.mark.parametrize(
    ("settings", "ranks", "name"),
    [
        ({"parallel": "fsdp", "engine": "ours", "tp": 1}, 2, "fsdp"),
        ({"parallel": "fsdp"}, 2, "fsdp"),
        ({}, 1, ""),
        ({"parallel": "ddp", "engine": "torch", "tp": 2, "dp_shard": 1}, 2, "torch, tp 2"),
        ({"parallel": "ddp", "engine": "torch", "tp": 2, "dp_shard": 0}, 8, "torch, dp_shard 4 x tp 2"),
        ({"parallel": "ddp", "engine": "torch", "tp": 0, "dp_shard": 0, "cp": "?"}, 1, "torch, tp 0"),
        ({"parallel": "ddp", "engine": "torch", "dp_shard": 1}, 1, "torch"),
    ],
)
def test_names_of_how_ranks_share_the_work(settings, ranks, name):
    assert parallel_name(settings, ranks) == name

"""A report as large and as varied as a real one, for the tests of its page."""

import random

from cs336_systems.report.document import Chart, Document, Link, Point, Section, Series
from cs336_systems.table import Column, Table
from cs336_systems.text import Text

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OOM = Text("out of memory", "显存不足")


def chinese(english: str) -> str:
    known = {
        "model": "模型",
        "step time": "单步时间",
        "machine": "机器",
        "Attention forward and backward": "注意力的前向与反向",
        "means of 10 steps": "10 步的平均值",
    }
    return known.get(english, english)


def scaling_chart(name="attention-time"):
    """Lines on two logarithmic axes: error bars, a fitted line, and lengths at which memory ran out."""

    def times(factor, limit=99):
        for i, length in enumerate(LENGTHS):
            if i >= limit:
                yield Point(length, float("nan"), note=OOM)
            else:
                y = factor * (0.05 + (length / 2048) ** 2)
                yield Point(length, y, std=y * 0.08, n=10)

    series = [
        Series(Text("PyTorch", "PyTorch 朴素实现"), list(times(4.0, 6))),
        Series(Text("compiled", "编译后"), list(times(2.2, 7))),
        Series(Text("FlashAttention-2 (Triton)", "FlashAttention-2(Triton)"), list(times(0.6))),
        Series(
            Text("quadratic fit", "二次拟合"), [Point(n, 0.6 * (0.05 + (n / 2048) ** 2)) for n in LENGTHS], dashed=True
        ),
    ]
    title = Text("Attention, forward and backward, by sequence length", "注意力前向加反向的时间随序列长度的变化")
    return Chart(
        name,
        title,
        "lines",
        Text("sequence length", "序列长度"),
        Text("time (ms)", "时间(毫秒)"),
        series,
        log_x=True,
        log_y=True,
    )


def loss_chart(name="loss", steps=120):
    draw = random.Random(1)
    series = [
        Series(
            Text(f"learning rate {rate}", f"学习率 {rate}"),
            [
                Point(step, 3 + 7 / (1 + step * rate * 40) + draw.uniform(-0.05, 0.05))
                for step in range(0, steps * 10, 10)
            ],
        )
        for rate in (1e-3, 3e-4)
    ]
    return Chart(
        name,
        Text("Training loss", "训练损失"),
        "lines",
        Text("step", "步"),
        Text("loss (nats per token)", "损失(nat/词元)"),
        series,
    )


def step_chart(name="step-time"):
    sizes = ("small", "medium", "large", "xl", "2.7B")
    series = [
        Series(
            Text(f"{precision}, {mode[0]}", f"{precision},{mode[1]}"),
            [Point(size, base * (2 + i) ** 1.6, std=base * 0.4 * (i + 1), n=10) for i, size in enumerate(sizes[:-1])]
            + [Point("2.7B", float("nan"), note=OOM) if precision == "float32" else Point("2.7B", base * 25, n=10)],
        )
        for base, precision, mode in (
            (12.0, "float32", ("eager", "即时执行")),
            (9.0, "float32", ("compiled", "编译")),
            (5.0, "bfloat16", ("eager", "即时执行")),
            (3.6, "bfloat16", ("compiled", "编译")),
        )
    ]
    series.append(
        Series(
            Text("bound by memory traffic", "显存带宽下界"),
            [Point(s, 2.0 * (i + 2)) for i, s in enumerate(sizes)],
            True,
        )
    )
    return Chart(
        name,
        Text("Time of a step by model size", "各模型规模的单步时间"),
        "bars",
        Text("model", "模型"),
        Text("step time (ms)", "单步时间(毫秒)"),
        series,
    )


def memory_chart(name="memory", horizontal=False):
    parts = (
        ("parameters", "参数"),
        ("gradients", "梯度"),
        ("optimizer state", "优化器状态"),
        ("activations", "激活值"),
        ("logits and loss", "logits 与损失"),
        ("temporary", "临时张量"),
    )
    names = (
        "one GPU, float32",
        "DDP over 4 GPUs with buckets of 25 MB",
        "optimizer state sharding",
        "FSDP with mixed precision and activation checkpointing in every block",
    )
    series = [
        Series(
            Text(*part),
            [Point(name, (1.2 + i) * (0.9 if j % 2 else 1.6) / (1 + k * 0.5)) for k, name in enumerate(names)],
        )
        for j, (i, part) in enumerate(enumerate(parts))
    ]
    return Chart(
        name,
        Text("Memory at the peak by what it holds", "显存峰值的组成"),
        "stacked",
        Text("method", "方法"),
        Text("memory (GiB)", "显存(GiB)"),
        series,
        horizontal=horizontal,
    )


def kernel_chart(name="kernels"):
    names = [
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast>",
        "softmax",
        "融合的层归一化与残差相加(前向)",
        "adamw",
    ]
    return Chart(
        name,
        Text("Where the time of a step goes", "一步的时间花在哪些内核上"),
        "bars",
        Text("kernel", "内核"),
        Text("time (ms)", "时间(毫秒)"),
        [
            Series(Text("forward", "前向"), [Point(n, 30 / (i + 1), std=1.5, n=10) for i, n in enumerate(names)]),
            Series(
                Text("backward", "反向"), [Point(n, 55 / (i + 1) ** 1.3, std=2.5, n=10) for i, n in enumerate(names)]
            ),
        ],
        horizontal=True,
    )


def many_bars(name="ranks", count=28):
    points = [Point(f"rank {i} on host {i // 8}", 10 + i % 5, std=0.5) for i in range(count)]
    return Chart(
        name,
        Text("Time that ranks wait", "各进程的等待时间"),
        "bars",
        Text("rank", "进程"),
        Text("wait (ms)", "等待(毫秒)"),
        [Series(Text("all-reduce"), points)],
    )


def step_table(rows=12):
    columns = [
        Column("model", numeric=False),
        Column("context"),
        Column("step time", "ms"),
        Column("speed-up"),
        Column("share"),
        Column("tokens per second"),
        Column("peak memory", "GiB"),
        Column("model FLOPs utilization"),
    ]
    draw = random.Random(2)
    sizes = ("small", "medium", "large", "xl", "2.7B")
    cells = [
        [
            f"{sizes[i % 5]}, float32",
            str(LENGTHS[i % 8]),
            f"{draw.uniform(5, 900):,.1f} ± {draw.uniform(0.1, 4):.1f}",
            f"{draw.uniform(0.9, 12):.2f}x",
            f"{draw.uniform(0, 100):.1f}%",
            "" if i % 7 == 3 else f"{draw.uniform(1e3, 2e6):,.1f}",
            "out of memory" if i % 7 == 3 else f"{draw.uniform(1, 130):.2f}",
            f"{draw.uniform(10, 60):.1f}%",
        ]
        for i in range(rows)
    ]
    return Table("Attention forward and backward", columns, cells, ["means of 10 steps", "x against eager"])


def sample() -> Document:
    sections = [
        Section(
            "step-time",
            Text("Time of a training step", "训练一步的时间"),
            Text("How long does a step take, and what makes it faster?", "一步需要多久?什么能让它更快?"),
            [
                Text(
                    "bfloat16 is 2.4x as fast as float32 at xl.", "在 xl 规模下,bfloat16 的速度是 float32 的 2.4 倍。"
                ),
                Text("Compiling saves 24% of the time at every size.", "编译在各规模上都节省 24% 的时间。"),
            ],
            [step_table()],
            [step_chart("step-chart"), loss_chart()],
            [Link(Text("trace", "时间线"), "traces/step.html"), Link(Text("guide"), "https://example.org/guide")],
        ),
        Section(
            "attention",
            Text("Attention", "注意力"),
            Text("At which length does the naive one run out of memory?", "朴素实现在多长的序列上耗尽显存?"),
            [Text("PyTorch runs out of memory at 8192.", "PyTorch 在 8192 处显存不足。")],
            [step_table(30)],
            [scaling_chart(), kernel_chart(), many_bars()],
        ),
        Section(
            "memory",
            Text("Memory", "显存"),
            Text("What holds the memory at the peak?", "峰值时显存被什么占用?"),
            (),
            [step_table(450)],
            [memory_chart("memory-across", horizontal=True), memory_chart("memory-up")],
        ),
    ]
    facts = {"machine": "NVIDIA H200, 139.8 GiB", "torch": "2.11.0+cu128", "driver": "570.1", "commit": "0123abc"}
    missing = {"ddp-overlap": "cs336 run ddp-overlap --preset course", "zero": "cs336 run zero --preset course"}
    remarks = [Text("2 lines could not be read.", "有 2 行无法读取。")]
    return Document(Text("Where time and memory go", "时间与显存花在哪里"), facts, sections, missing, remarks)


def many_tables() -> Document:
    """Sections with one table, two short ones, a tall one before others, and one far wider than a window."""

    def numbered(title: str, rows: int, columns: int = 4) -> Table:
        heads = [Column("group", numeric=False), *(Column(f"column {i}", "ms") for i in range(1, columns))]
        cells = [[f"group {i // 5}", *(f"{title} {i}.{j}" for j in range(1, columns))] for i in range(rows)]
        return Table(f"{title} · NVIDIA H200, batch {rows}", heads, cells)

    def section(name: str, *tables: Table) -> Section:
        finding = Text(f"{name} is 2 times as fast.", f"{name} 快 2 倍。")
        return Section(name, Text(f"About {name}", f"关于 {name}"), Text("Why?", "为什么？"), [finding], tables)

    sections = [
        section("flash", numbered("tall", 40), *(numbered(title, 20) for title in ("forward", "backward", "peak"))),
        section("two", numbered("one", 5), numbered("other", 15)),
        section("three", numbered("first", 3), numbered("second", 3), numbered("last", 30)),
        section("wide", numbered("wide", 60, columns=40)),
    ]
    nothing_found = Section("silent", Text("Silent", "无话"), Text("Why?", "为什么？"), tables=[numbered("silent", 2)])
    return Document(Text("Many tables", "许多表"), sections=[*sections, nothing_found])

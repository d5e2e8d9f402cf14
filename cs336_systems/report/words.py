"""The report's words: title and question of every experiment, and the Chinese of what tables say.

Tables are made in English. `in_chinese` translates their headings, titles and remarks by exact phrases and by patterns
that keep every value; what it does not know stays English, so that a new table is readable before it has a translation.
"""

import re
from collections.abc import Callable
from itertools import islice

from cs336_systems.text import Text

TITLES = {
    "end_to_end": Text("Time of a step by size", "各规模一步的时间"),
    "warmup": Text("Warm-up", "预热"),
    "precision": Text("Precision", "精度"),
    "compile": Text("torch.compile", "torch.compile"),
    "fast_step": Text("The fast step", "最快的训练步"),
    "peak_memory": Text("Peak memory, predicted and measured", "峰值显存：预测与实测"),
    "timing_agreement": Text("Agreement of timers", "计时的一致性"),
    "kernels": Text("Kernels by phase and kind", "各阶段、各类内核"),
    "attention_ops": Text("Inside attention", "注意力内部"),
    "profiler_agreement": Text("Agreement of profilers", "性能分析器的一致性"),
    "memory": Text("What the peak is made of", "峰值由什么组成"),
    "checkpointing": Text("Recomputing activations", "激活重计算"),
    "saved_tensors": Text("Tensors kept for backward", "为后向保存的张量"),
    "pytorch_attention": Text("Attention by the formula", "按公式计算的注意力"),
    "flash": Text("Attention implementations side by side", "各种注意力实现并列"),
    "attention_rivals": Text("Attention in turns against the best others", "与最好的其他注意力轮流比较"),
    "flash_leaderboard": Text("The course's leaderboard", "课程排行榜"),
    "attention_step": Text("A training step by its attention", "不同注意力下的训练步"),
    "collectives": Text("Collectives", "集合通信"),
    "ddp": Text("Averaging gradients", "梯度平均"),
    "bucket_model": Text("Bucket size", "桶的大小"),
    "optimizer_sharding": Text("Sharded optimizer", "分片优化器"),
    "fsdp": Text("Sharding everything", "全部分片"),
    "parallel_plan": Text("Layouts of a large model on a cluster", "大模型在集群上的并行布局"),
    "memory_model": Text("Memory from the configuration alone", "仅由配置算出的显存"),
    "accumulation": Text("Adding up in low precision", "低精度下的累加"),
    "autocast_dtypes": Text("Types under autocast", "autocast 下的类型"),
    "bench": Text("Single configurations", "单个配置"),
}

QUESTIONS = {
    "end_to_end": Text(
        "How long do forward, backward and the optimizer take, by size?", "各规模的前向、后向和优化器各要多久？"
    ),
    "warmup": Text("What do too few warm-up steps do to the numbers?", "预热步数太少会怎样影响数字？"),
    "precision": Text("What does lower precision give, in time and memory?", "降低精度在时间和显存上带来什么？"),
    "compile": Text("What does torch.compile give, and cost?", "torch.compile 带来什么，代价是什么？"),
    "fast_step": Text("What does each part of the fast step give?", "最快训练步的每个部分各带来什么？"),
    "peak_memory": Text("Does the predicted peak agree with the measured one?", "预测的峰值与实测是否一致？"),
    "timing_agreement": Text(
        "Does another timer give the same times for the same work?", "换一个计时器，同样的工作是否得到同样的时间？"
    ),
    "kernels": Text("Which kernels take the time, by phase and kind?", "按阶段和类别，时间花在哪些内核上？"),
    "attention_ops": Text(
        "Inside attention, what takes the time and what the FLOPs?", "注意力内部，时间花在哪里，FLOPs 花在哪里？"
    ),
    "profiler_agreement": Text(
        "Do the profiler, CUDA events and the clock agree, and what is the gap?",
        "性能分析器、CUDA event 与时钟是否一致，差在哪里？",
    ),
    "memory": Text(
        "What is memory made of at its peak, and which line made it?", "峰值处的显存由什么组成，是哪一行代码产生的？"
    ),
    "checkpointing": Text(
        "How many blocks should be recomputed together, predicted and measured?", "应当几块一组重计算，预测与实测如何？"
    ),
    "saved_tensors": Text("What does forward keep for backward?", "前向为后向保留了什么？"),
    "pytorch_attention": Text(
        "What does attention by the formula cost, eager and compiled?", "按公式计算的注意力，eager 与编译各要多少代价？"
    ),
    "flash": Text(
        "How fast is each attention, how much memory, how exact?", "每种注意力实现有多快，用多少显存，有多精确？"
    ),
    "attention_rivals": Text(
        "Is our kernel faster than the best others, measured in turns?",
        "轮流测量时，我们的内核是否比最好的其他实现更快？",
    ),
    "flash_leaderboard": Text(
        "How fast is attention as the course's leaderboard timed it?", "按课程排行榜的计时方式，注意力有多快？"
    ),
    "attention_step": Text("What does a faster attention give to a training step?", "更快的注意力能给训练步带来多少？"),
    "collectives": Text(
        "How long does a collective take, and what does the link give?", "一次集合通信要多久，链路能给多少带宽？"
    ),
    "ddp": Text(
        "What does averaging gradients cost, and how much of it is hidden?", "梯度平均的代价是多少，其中多少被掩盖？"
    ),
    "bucket_model": Text("Which bucket size is best, predicted and measured?", "桶取多大最好，预测与实测如何？"),
    "optimizer_sharding": Text(
        "What does an optimizer with its state shared out save, and cost?",
        "把优化器状态分到各 rank 节省什么，代价是什么？",
    ),
    "fsdp": Text("What does sharding everything save, and cost?", "全部分片节省什么，代价是什么？"),
    "parallel_plan": Text(
        "Which layout fits a large model on a cluster, and what does it wait for?",
        "哪种布局能把大模型放进集群，它在等待什么？",
    ),
    "memory_model": Text(
        "What needs how much memory, before a GPU is paid for?", "付钱租 GPU 之前：什么需要多少显存？"
    ),
    "accumulation": Text("Where does precision get lost when adding up?", "累加时精度在哪里丢失？"),
    "autocast_dtypes": Text("Which dtype has what under autocast?", "autocast 下什么是哪种类型？"),
    "bench": Text("How long does a step take, and how much memory?", "一步要多久，用多少显存？"),
}

NAMES = frozenset(
    {"MFU", "TFLOP/s", "tokens/s", "n", "d", "seq", "context", "batch", "algbw", "busbw", "nsys", "do_bench"}
    | {"torch.profiler", "rank", "token", "softmax", "off", "on", "auto", "reference", "sdpa", "flash_triton"}
    | {"flash_hopper", "flash_torch", "compiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "inference"}
    | {"flash_attention_4"}
    | {"forward-backward", "train-step", "fp32", "tf32", "bf16", "fp16", "gloo", "nccl", "cuda", "cpu"}
)
"""Terms and names that Chinese text uses as they are; `compiled` is one where it names an implementation."""

# Of headings, of a step's parts and of what lies in memory. A heading's unit is no part of it.
PHRASES = {
    # what tells rows apart
    "size": "规模",
    "model": "模型",
    "vocabulary": "词表",
    "mode": "模式",
    "precision": "精度",
    "attention": "注意力",
    "checkpoint": "检查点",
    "fast": "fast 部分",
    "warm-up": "预热",
    "heads": "头数",
    "causal": "因果",
    "implementation": "实现",
    "cell": "配置",
    "metric": "指标",
    "unit": "单位",
    "status": "状态",
    "yes": "是",
    "no": "否",
    # phases, statistics
    "phase": "阶段",
    "all": "合计",
    "forward": "前向",
    "loss": "损失",
    "backward": "后向",
    "sync": "同步",
    "optimizer": "优化器",
    "step": "单步",
    "mean": "均值",
    "median": "中位数",
    "std": "标准差",
    "min": "最小",
    "max": "最大",
    "total": "总计",
    "instances": "次数",
    "share": "占比",
    "error": "误差",
    "name": "名称",
    "time": "时间",
    # steps
    "backward / forward": "后向 / 前向",
    "peak": "峰值",
    "predicted": "预测",
    "measured": "实测",
    "traced": "追踪",
    "first step": "首步",
    "steady from step": "从第几步起稳定",
    "speed-up": "加速",
    "memory": "显存",
    "compile time": "编译时间",
    "graph breaks": "图中断",
    "of the best matmul": "占最快矩阵乘",
    "wall clock": "墙钟",
    "CUDA events": "CUDA event 计时",
    "wall over do_bench": "墙钟相对 do_bench",
    # kernels
    "wall": "墙钟",
    "kernels": "内核",
    "kernel": "内核",
    "GPU idle": "GPU 空闲",
    "launches": "启动次数",
    "matmul": "矩阵乘",
    "elementwise": "逐元素",
    "softmax/reduction": "softmax/归约",
    "copy": "拷贝",
    "communication": "通信",
    "other": "其他",
    "unknown": "未知",
    "of": "范围",
    "kind": "类别",
    "forward and backward": "前向加后向",
    "leaderboard": "排行榜",
    "memory before backward": "后向之前的显存",
    "peak memory": "峰值显存",
    "scores matmul": "scores 矩阵乘",
    "scale and mask": "缩放与掩码",
    "final matmul": "最后的矩阵乘",
    "matmul / softmax, time": "矩阵乘 / softmax，时间",
    "matmul / softmax, FLOPs": "矩阵乘 / softmax，FLOPs",
    "events, queued": "CUDA event（排队）",
    "kernels over queued events": "内核相对排队的 event",
    "launch-bound": "等待启动",
    "step, profiled": "单步，分析时",
    # memory
    "peak in": "峰值所在阶段",
    "parts / measured": "各部分 / 实测",
    "unlabelled": "无标签",
    "label": "标签",
    "module": "模块",
    "made by": "产生者",
    "line": "代码行",
    "what": "内容",
    "with the allocator's history": "记录分配器历史",
    "followed block by block": "逐块跟踪",
    "group": "组",
    "inside it": "组内",
    "over none": "相对不重计算",
    "traced, error": "追踪，误差",
    "kept": "保留",
    "tensors": "张量数",
    "parameters, too": "另有参数",
    "parameters": "参数",
    "gradients": "梯度",
    "optimizer state": "优化器状态",
    "activations": "激活",
    "weight casts": "权重的低精度副本",
    "logits and loss": "logits 与损失",
    "logits, loss": "logits、损失",
    "temporary": "临时",
    "workspace": "工作区",
    "buffers": "缓冲区",
    "inputs": "输入",
    "allocator rounding": "分配器取整",
    "peak, traced": "峰值，追踪",
    "per block": "每块",
    "residual tensor": "残差张量",
    # attention
    "before backward": "后向之前",
    "forward speed-up": "前向加速",
    "backward speed-up": "后向加速",
    "std of tenths": "十等份的标准差",
    "best rival / ours": "最快对手 / 我们",
    # several ranks
    "ranks": "rank 数",
    "link": "链路",
    "collective": "集合通信",
    "latency": "延迟",
    "bandwidth": "带宽",
    "largest misfit": "最大拟合误差",
    "arrangement": "方案",
    "exposed": "未掩盖",
    "hidden": "被掩盖",
    "over torch DDP": "相对 torch DDP",
    "weights off by": "权重偏差",
    "bucket": "桶",
    "buckets": "桶数",
    "predicted exposed": "未掩盖，预测",
    "measured exposed": "未掩盖，实测",
    "by the formula": "按公式",
    "update": "更新",
    "state": "状态",
    "together": "合计",
    "formula": "公式",
    "over ideal state": "相对理想状态",
    "init": "初始",
    "before update": "更新前",
    "after update": "更新后",
    "strategy": "布局",
    "weights": "权重",
    "working": "工作副本",
    "fits": "放得下",
    "GPUs needed": "所需 GPU",
    "sent": "发送",
    "products": "矩阵乘",
    "forward sends": "前向通信",
    "backward sends": "后向通信",
    "tokens needed": "所需 token",
    "waits for": "等待",
    # small experiments
    "accumulator": "累加器",
    "term": "加数",
    "one term is": "加数的值",
    "sum": "和",
    "tensor": "张量",
}

# What a table holds: between the experiment's name and the machine in its title.
SUBJECTS = {
    "time by phase": "各阶段时间",
    "throughput and memory": "吞吐与显存",
    "mean ± std by warm-up steps": "各预热步数下的均值 ± 标准差",
    "time and memory against fp32": "时间与显存，与 fp32 相比",
    "eager against torch.compile": "eager 与 torch.compile 对比",
    "the step by what is switched on": "按启用部分比较训练步",
    "predicted peak against measured": "预测峰值与实测对比",
    "predicted peak against measured, saving memory": "预测峰值与实测对比，节省显存时",
    "the same work by three clocks (means)": "三种时钟测同样的工作（均值）",
    "time by kind of kernel": "各类内核的时间",
    "share of kernel time by mode": "各模式下内核时间的占比",
    "the kernel that takes most": "耗时最多的内核",
    "inside attention, forward": "注意力内部，前向",
    "the same phases by four clocks": "四种时钟测同样的阶段",
    "attention by the formula (mean ± std)": "按公式计算的注意力（均值 ± 标准差）",
    "forward and backward (ms)": "前向加后向（ms）",
    "forward (ms)": "前向（ms）",
    "backward (ms)": "后向（ms）",
    "forward and backward, from a CUDA graph (ms)": "前向加后向，由 CUDA graph 重放（ms）",
    "forward and backward (TFLOP/s)": "前向加后向（TFLOP/s）",
    "peak memory (GiB)": "峰值显存（GiB）",
    "largest error against float64": "相对 float64 的最大误差",
    "the course's leaderboard": "课程排行榜",
    "as nccl-tests show them": "与 nccl-tests 相同的列",
    "latency and bandwidth": "延迟与带宽",
    "averaging gradients": "梯度平均",
    "which bucket size": "桶的大小",
    "memory and time": "显存与时间",
    "bytes on each GPU": "每张 GPU 上的字节数",
    "bytes sent, and what a step waits for": "发送的字节数，以及一步在等待什么",
    "the peak": "峰值",
    "what the peak is made of": "峰值由什么组成",
    "the largest blocks": "最大的块",
    "how much slower a step is under each instrument": "每种仪器使一步变慢多少",
    "blocks recomputed together": "一起重计算的块",
    "kept for backward": "为后向保留",
    "the five largest": "最大的五个",
    "predicted for a CUDA GPU, none needed": "对 CUDA GPU 的预测，无需 GPU",
    "0.01 added a thousand times": "0.01 相加一千次",
}

# Remarks whose words never change; those of the referee are without the rows they concern.
REMARKS = {
    "means": "均值",
    "medians": "中位数",
    "published: from write-ups of the course's assignment, on software they do not name": (
        "已发表：来自课程作业的报告，所用软件未注明"
    ),
    "interrupted before it ended; run the same command again": "结束前被中断；请再次运行同一条命令",
    "TF32 was on in an fp32 row": "fp32 行里开着 TF32",
    "a CPU has no TF32: this is fp32 again": "CPU 没有 TF32：这仍是 fp32",
    "another process was using the GPU": "GPU 上有别的进程",
    "the GPU's own time exceeds the wall clock's: the timing did not wait for the GPU": (
        "GPU 自己的时间超过墙钟：计时没有等待 GPU"
    ),
    "far more memory than one graph needs: were two alive?": "显存远多于一个计算图所需：是否有两个同时存在？",
    "forward alone is slower than forward and backward together": "单独的前向比前向加后向还慢",
    "speed-up: over reference, the same formula run eagerly": "加速：相对 reference，即 eager 下的同一公式",
    "forward, sum and backward as the course timed them; mean of do_bench": (
        "按课程的方式对前向、求和与后向计时；do_bench 的均值"
    ),
    "kept are the means of ten equal parts of the run: std is that of these": (
        "保留的是整个运行十等份各自的均值：标准差由它们算出"
    ),
    "* best of its row": "* 为该行最好",
    "training step": "训练步",
    "medians of steps of one model on one batch, its attention changed in turns": (
        "同一模型、同一批数据上各步的中位数，注意力轮流更换"
    ),
    "times: medians, on a GPU of do_bench": "时间：中位数；GPU 上来自 do_bench",
    "times: medians over rounds of each round's median of do_bench, the implementations in turns": (
        "时间：各轮 do_bench 中位数的中位数，各实现轮流测量"
    ),
    "no GPU: operators of the CPU stand in for kernels, each with the time it spent in no other": (
        "没有 GPU：以 CPU 算子代替内核，每个只计不在其他算子中的时间"
    ),
    "wall: without the profiler; kernels: their times added up, of one step; shares are of these": (
        "墙钟：不带分析器；内核：一步之内各内核时间之和；占比以此为准"
    ),
    "GPU idle: share of the phase, by CUDA events without the profiler, in which no kernel ran": (
        "GPU 空闲：不带分析器、以 CUDA event 计，阶段中没有内核运行的占比"
    ),
    "of all blocks, in one forward pass; ratios: the scores' matmul over softmax": (
        "一次前向中所有块之和；比值：scores 矩阵乘比 softmax"
    ),
    "queued: nothing is synchronised between phases, and the host launches ahead, as in training": (
        "排队：阶段之间不同步，主机提前启动，与训练时一样"
    ),
    "torch.profiler, nsys: time in which at least one kernel ran, in profiled steps; empty: nsys is not installed": (
        "torch.profiler、nsys：分析的步中至少有一个内核在运行的时间；空：未安装 nsys"
    ),
    "launch-bound: events less kernels: the GPU waits for the host to launch the next one": (
        "等待启动：CUDA event 减去内核：GPU 在等主机启动下一个"
    ),
    "step, profiled: how much longer a step takes while it is profiled": "单步，分析时：被分析时一步变慢多少",
    "measured: without instruments; predicted: from the configuration; traced: from its operators, no GPU": (
        "实测：不带仪器；预测：仅由配置；追踪：由其算子，无需 GPU"
    ),
    "memory that several operators keep counts once; parameters would be there anyway": (
        "多个算子共同保留的内存只计一次；参数本来就在"
    ),
    "size: the whole array; time: median of the slowest rank; algbw: size over time; busbw: over the busiest link": (
        "大小：整个数组；时间：最慢 rank 的中位数；algbw：大小除以时间；busbw：以最忙的链路计"
    ),
    "time = latency + size / bandwidth, fitted to relative errors; latency is that of the whole collective": (
        "时间 = 延迟 + 大小 / 带宽，按相对误差拟合；延迟是整个集合通信的"
    ),
    "Gloo between processes of one machine stands in for a network: no GPU-to-GPU figures": (
        "以一台机器上进程间的 Gloo 代替网络：并非 GPU 之间的通信数字"
    ),
    "medians; communication: averaging and nothing else; exposed: step less that of no wrapper, in pairs": (
        "中位数；通信：只做平均；未掩盖：单步减去不封装的单步，成对比较"
    ),
    "hidden: 1 - exposed / communication; below 0 where sending takes cores away from backward": (
        "被掩盖：1 - 未掩盖 / 通信；通信占用后向的核时会低于 0"
    ),
    "predicted: gradients come evenly over backward, a bucket is sent when it is full, one after another": (
        "预测：梯度在后向中均匀产生，桶满即发送，一个接一个"
    ),
    "by the formula: last bucket + overheads, S / (n w) + n o, as if all else were hidden": (
        "按公式：最后一个桶 + 各次开销，S / (n w) + n o，假定其余全被掩盖"
    ),
    "medians; memory on the fullest rank, before the update; formula: what is sharded divided by ranks": (
        "中位数；显存为最满的 rank 在更新之前的；公式：被分片的部分除以 rank 数"
    ),
    "init, before and after the update, peak of the step: by CUDA's allocator, activations included": (
        "初始、更新前后、单步峰值：来自 CUDA 分配器，含激活"
    ),
    "working: low-precision copies of weights, or the few that are gathered at a time": (
        "工作副本：权重的低精度副本，或同一时刻收集起来的少数权重"
    ),
    "GPUs needed: the fewest on which it fits with as many sequences on each; -: no number is enough": (
        "所需 GPU：每张序列数不变时放得下的最少张数；-：多少都不够"
    ),
    "step: with every message beside products, and with none": "单步：通信全部与矩阵乘同时进行，以及全不同时进行",
    "tokens needed: on each GPU, for products to take longer than messages; -: no number is enough": (
        "所需 token：每张 GPU 上使矩阵乘长于通信的 token 数；-：多少都不够"
    ),
    "fp16 accumulator: near 10 its steps are 2^-7 = 0.0078, so each 0.01 is rounded as it is added, and it drifts": (
        "fp16 累加器：在 10 附近步长为 2^-7 = 0.0078，每个 0.01 相加时都被舍入，和逐渐偏离"
    ),
    "fp32 accumulator with fp16 terms: only 0.01 itself is rounded, to 0.0100021; the error stays in proportion": (
        "fp32 累加器、fp16 加数：只有 0.01 本身被舍入为 0.0100021；误差保持比例"
    ),
    "power cap": "功率上限",
    "hardware slowdown": "硬件降速",
    "thermal": "温度",
    "thermal (software)": "温度（软件）",
    "thermal (hardware)": "温度（硬件）",
    "power brake": "外部限电",
    "oom: out of memory": "显存不足",
}

_EVERY = {**PHRASES, **SUBJECTS, **REMARKS}


def in_chinese(text: str) -> str:
    """A heading, a title or a remark in Chinese, with its values as they are; what is not known stays English."""
    if text in NAMES:
        return text
    if text in _EVERY:
        return _EVERY[text]
    return _pattern(text) or _title(text) or _heading(text) or _about_rows(text) or text


# -- patterns ---------------------------------------------------------------------------------------------------------

Translate = Callable[[str], str]


def settings_in_chinese(text: str) -> str:
    """Settings in the order in which they stand: "context 512, attention reference", "small warm-up 0"."""
    return "，".join(_SETTING.sub(_one_setting, part) for part in text.split(", "))


_SETTING = re.compile(
    r"\b(vocabulary|checkpoint|compiled|warm-up|heads|causal|attention)"
    r" (yes|no|off|none|auto|reference|sdpa\w*|flash_\w+|[\d,]+)(?![\w/])"
)


def _one_setting(found: re.Match[str]) -> str:
    name, value = found.groups()
    return f"{'编译' if name == 'compiled' else PHRASES[name]} {PHRASES.get(value, value)}"


def _rows(text: str) -> str:
    """The rows that a remark concerns."""
    if text == "all rows":
        return "所有行"
    listed, more, count = text.partition(" and ")
    found = re.fullmatch(r"(\d+) more", count)
    if more and found:
        return f"{settings_in_chinese(listed)} 及另外 {found[1]} 行"
    return settings_in_chinese(text)


def _names(text: str) -> str:
    return "、".join(in_chinese(part) for part in text.split(", "))


def _group(text: str) -> str:
    """Of recomputed blocks."""
    if text == "none":
        return "不重计算"
    return re.sub(r"^(\d+) with (\d+) inside$", r"\1（组内 \2）", text)


def _same(text: str) -> str:
    return text


_PATTERNS: tuple[tuple[re.Pattern[str], str, tuple[Translate, ...]], ...] = tuple(
    (re.compile(pattern), template, how)
    for pattern, template, how in (
        # titles
        (r"(\w+): (\w+), by name · (.+)", "{}：{}，按名称 · {}", (_same, in_chinese, settings_in_chinese)),
        (r"autocast_dtypes: (\w+) model on (\w+)", "autocast_dtypes：{} 模型，{}", (_same, _same)),
        (
            r"(.+), emulated network of (\S+) GB/s and (\S+) ms",
            "{}，模拟 {} GB/s、{} ms 的网络",
            (in_chinese, _same, _same),
        ),
        (r"(.+), side by side", "{}，并列", (in_chinese,)),
        # headings
        (r"(.+) · published", "{} · 已发表", (_same,)),
        (r"autocast (\w+)", "{} autocast 下", (_same,)),
        (r"(\S+) output", "{} 的输出", (_same,)),
        # the referee
        (
            r"(\d+)% of the hardware's peak: impossible, so the precision or the clock is not what it says",
            "达到硬件峰值的 {}%：不可能，精度或时钟与所说不符",
            (_same,),
        ),
        (
            r"the first measured step is far above the rest \(cold\): add (.+)",
            "第一个测量步远高于其余（冷启动）：加上 {}",
            (_same,),
        ),
        (
            r"the first measured step is far above the rest \(cold\): (\d+) warm-up steps were too few",
            "第一个测量步远高于其余（冷启动）：{} 步预热太少",
            (_same,),
        ),
        (
            r"step times vary by more than (\S+) and never settle: look for other load on the machine",
            "单步时间变动超过 {}，一直不稳定：检查机器上的其他负载",
            (_same,),
        ),
        (
            r"step times vary by more than (\S+) \(std / mean\): compare medians, or take more steps",
            "单步时间变动超过 {}（标准差 / 均值）：比较中位数，或多测几步",
            (_same,),
        ),
        (r"the GPU held its clocks down \((.+)\)", "GPU 降频（{}）", (_names,)),
        (r"results of (\d+) machines in one table: (.+)", "一张表中有 {} 台机器的结果：{}", (_same, _same)),
        (
            r"oom: needs (\S+) GiB of (\S+) GiB \(predicted, not tried\)",
            "显存不足：需要 {} GiB，共有 {} GiB（预测，未尝试）",
            (_same, _same),
        ),
        (r"oom: needs (\S+) GiB of (\S+) GiB", "显存不足：需要 {} GiB，共有 {} GiB", (_same, _same)),
        (r"oom: (.+)", "显存不足：{}", (_same,)),
        (r"error: crashed \((.+?)\)(.*)", "出错：崩溃（{}）{}", (_same, _same)),
        (r"error: timeout after (\S+) s", "超时：超过 {} s", (_same,)),
        (
            r"error: \w+: wrong result: (\w+) off by (\S+), more than (\S+) in (\w+)",
            "结果错误：{} 偏差 {}，超过 {}（{}）",
            (_same, _same, _same, _same),
        ),
        (r"error: (.+)", "出错：{}", (_same,)),
        # tables
        (r"least and most in ms, (.+?): (.+)", "最小与最大（毫秒），{}：{}", (settings_in_chinese, _same)),
        (r"worst of (\d+): (\S+) \((.+)\)", "{} 个中最差：{}（{}）", (_same, _same, settings_in_chinese)),
        (
            r"of all kernel time (\S+) is of a known kind and (\S+) in a phase",
            "全部内核时间中 {} 属于已知类别，{} 属于某个阶段",
            (_same, _same),
        ),
        (
            r"FLOPs: (\d+) head_dim for a score, (\d+) for its softmax: bytes, not FLOPs, are what softmax waits for",
            "FLOPs：每个 score {} head_dim，其 softmax {}：softmax 等的是字节而不是 FLOPs",
            (_same, _same),
        ),
        (
            r"(compiled|flex|compiled and flex): compiled once with dynamic shapes",
            "{}：以动态形状编译一次",
            (lambda text: text.replace(" and ", " 与 "),),
        ),
        (
            r"(flex|compiled and flex): compiled once with dynamic shapes; "
            r"flex is faster compiled for one shape \((.+)\)",
            "{}：以动态形状编译一次；flex 为单个形状编译时更快（{}）",
            (lambda text: text.replace(" and ", " 与 "), _same),
        ),
        (
            r"least memory, flat: groups of (.+) predicted, (.+) measured",
            "显存最少（不嵌套）：预测每组 {}，实测 {}",
            (_group, _group),
        ),
        (
            r"least memory, of all: groups of (.+) predicted, (.+) measured",
            "显存最少（全部）：预测每组 {}，实测 {}",
            (_group, _group),
        ),
        (
            r"best bucket: (\S+) MB predicted, (\S+) MB measured; sqrt\(S w o\) = (\S+) MB",
            "最好的桶：预测 {} MB，实测 {} MB；sqrt(S w o) = {} MB",
            (_same, _same, _same),
        ),
        (
            r"(\S+) TFLOP/s, (\S+) GB/s in a node of (\S+), (\S+) GB/s of each GPU to other nodes; "
            r"sent: by each in a step",
            "{} TFLOP/s，{} GB/s（{} 张 GPU 的节点内），每张 GPU 到其他节点 {} GB/s；发送：每张每步",
            (_same, _same, _same, _same),
        ),
        (
            r"(.+): the last line is torn \(a run was interrupted while writing\); left out",
            "{}：最后一行不完整（写入时被中断）；已略去",
            (_same,),
        ),
    )
)


def _pattern(text: str) -> str | None:
    for pattern, template, how in _PATTERNS:
        if found := pattern.fullmatch(text):
            return template.format(*(translate(value) for translate, value in zip(how, found.groups(), strict=True)))
    return None


def _title(text: str) -> str | None:
    """`experiment: what · machine, settings`; without a machine where the work is the same on all."""
    found = re.fullmatch(r"(\w+): (.+?)( · .+)?", text)
    what = in_chinese(found[2]) if found and found[1] in TITLES else None
    if found is None or what is None or what == found[2]:
        return None
    return f"{found[1]}：{what}{_where(found[3] or '')}"


def _where(text: str) -> str:
    text = re.sub(r"\b(\d+) ranks, (\w+), (\w+)", r"\1 个 rank, \2, \3", text)
    text = re.sub(r"batch (\d+) on each rank", r"每个 rank batch \1", text)
    text = re.sub(r"([\d,]+) tokens on each", r"每张 \1 个 token", text)
    text = re.sub(r" · (\S+)( \(.+? only\))? on ([\d,]+) x (\S+?)(?=,|$)", _cluster, text)
    return settings_in_chinese(text)


def _cluster(found: re.Match[str]) -> str:
    model, counted, gpus, gpu = found.groups()
    only = "（仅前馈）" if counted == " (feed-forward only)" else f"{counted or ''} "
    return f" · {model}{only}在 {gpus} x {gpu} 上"


def _heading(text: str) -> str | None:
    """`name (unit)`, or several known names with commas between."""
    found = re.fullmatch(r"(.+) \(([\w/%]+)\)", text)
    if found:
        return f"{PHRASES[found[1]]} ({found[2]})" if found[1] in PHRASES else None
    parts = text.split(", ")
    known = len(parts) > 1 and all(part in PHRASES or part in NAMES for part in parts)
    return "，".join(PHRASES.get(part, part) for part in parts) if known else None


def _about_rows(text: str) -> str | None:
    """The referee's `rows: what is off`. Rows' names may hold a colon, so the first few are tried."""
    for found in islice(re.finditer(": ", text), 8):
        said = text[found.end() :]
        translated = REMARKS.get(said) or _pattern(said)
        if translated:
            return f"{_rows(text[: found.start()])}：{translated}"
    return None

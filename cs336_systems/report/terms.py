"""Headings and phrases shared by several topics; a topic's own words are written where it uses them."""

from cs336_systems.text import Text

# phases and statistics
PHASE = Text("phase", "阶段")
FORWARD = Text("forward", "前向")
LOSS = Text("loss", "损失")
BACKWARD = Text("backward", "反向")
SYNC = Text("sync", "同步")
OPTIMIZER = Text("optimizer", "优化器")
STEP = Text("step", "单步")
FORWARD_AND_BACKWARD = Text("forward and backward", "前向加反向")
PHASE_NAMES = {
    "forward": FORWARD,
    "loss": LOSS,
    "backward": BACKWARD,
    "sync": SYNC,
    "optimizer": OPTIMIZER,
}


def phase_name(phase: str) -> Text:
    return STEP if phase == "step" else PHASE_NAMES.get(phase) or Text(phase)


MODE_WORDS = {
    "inference": Text("inference", "推理"),
    "forward": FORWARD,
    "forward-backward": FORWARD_AND_BACKWARD,
    "train-step": Text("training step", "训练步"),
}
KERNEL_KINDS = {
    "matmul": Text("matmuls", "矩阵乘"),
    "attention": Text("attention kernels", "注意力内核"),
    "pass": Text("passes over memory", "访存内核"),
    "small": Text("small kernels", "小内核"),
}
MEAN = Text("mean", "均值")
MEDIAN = Text("median", "中位数")
STD = Text("std", "标准差")
MIN = Text("min", "最小")
MAX = Text("max", "最大")
COUNT = Text("n", "样本数")
TOTAL = Text("total", "总计")
SHARE = Text("share", "占比")
ERROR = Text("error", "误差")
NAME = Text("name", "名称")
TIME = Text("time", "时间")
STATUS = Text("status", "状态")
MS = Text("ms")

# time and rates
TOKENS_PER_SECOND = Text("tokens/s")
TFLOPS = Text("TFLOP/s")
MFU = Text("MFU")
PREDICTED_STEP = Text("predicted step", "预测单步")
TIME_ERROR = Text("time error", "时间误差")
SPEED_UP = Text("speed-up", "加速")

# memory
MEMORY = Text("memory", "显存")
PEAK = Text("peak", "峰值")
RESERVED = Text("reserved", "已预留")
PEAK_MEMORY = Text("peak memory", "峰值显存")
PREDICTED = Text("predicted", "预测")
MEASURED = Text("measured", "实测")
TRACED = Text("traced", "追踪")
RECORDED = Text("recorded", "记录值")
PEAK_IN = Text("peak in", "峰值所在阶段")
PARAMETERS = Text("parameters", "参数")
GRADIENTS = Text("gradients", "梯度")
OPTIMIZER_STATE = Text("optimizer state", "优化器状态")
ACTIVATIONS = Text("activations", "激活")
MODULE = Text("module", "模块")
LINE = Text("line", "代码行")
GIB_TEXT = Text("GiB")

SIZE = Text("size", "规模")
BYTES = Text("size", "大小")
KERNEL = Text("kernel", "内核")
KIND = Text("kind", "类别")
OUT_OF_MEMORY = Text("out of memory", "显存不足")

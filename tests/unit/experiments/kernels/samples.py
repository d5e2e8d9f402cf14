"""Hand-made records of the experiments on kernels."""

from cs336_systems.record import Record
from tests.unit.report.step_cells import cell


def profiled(
    experiment="kernels",
    size="small",
    mode="inference",
    *,
    matmul=0.008,
    other=0.002,
    softmax=0.001,
    status="ok",
    context=512,
    **metrics,
) -> list[Record]:
    """A forward of 10 ms kernels in 20 ms; attention: 3 ms scores, 1 ms mask, some softmax, 2 ms output."""
    parts = ("attention scores", "matmul", 0.003, "attention scores", "elementwise", 0.001)
    parts += ("attention softmax", "softmax/reduction", softmax, "attention output", "matmul", 0.002)
    recorded = {
        "kind_table: forward": ("matmul", 100.0, matmul, "elementwise", 50.0, other),
        "part_table: forward": parts,
        "kernel_table: forward": ("gemm", 100.0, matmul, 8e-5, 7e-5, 9e-5, "add", 50.0, other, 4e-5, 3e-5, 5e-5),
        "kernel_time": (matmul + other,),
        "busy_time: forward": (matmul + other,),
        "forward_event_time": (0.02,),
        "profiled_step_time": (0.15,),
        "kernels_on_gpu": (1.0,),
    }
    return cell(experiment, size=size, mode=mode, context=context, status=status, metrics={**recorded, **metrics})


SAMPLES: dict[str, list[Record]] = {
    "kernels": profiled()
    + profiled(mode="train-step")
    + profiled(size="2.7B", matmul=0.018, forward_event_time=(0.019,))
    + profiled(size="2.7B", mode="train-step", matmul=0.009, other=0.001),
    "attention_ops": profiled("attention_ops") + profiled("attention_ops", "2.7B", softmax=0.002),
    "profiler_agreement": profiled("profiler_agreement"),
}

"""FLOPs as torch.utils.flop_counter counts them: for user models, and to check the closed form."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten
# torch's counter lacks the CPU's fused attention operators; its own formulas apply to them.
_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def count_flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        run()
    return counter.get_total_flops()

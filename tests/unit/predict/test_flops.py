"""The closed form of FLOPs equals torch's counter, exactly."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.config import MODES, ModelConfig, RunConfig, model_config
from cs336_systems.measure.flop_counter import count_flops
from cs336_systems.measure.memory_trace import as_on_cuda
from cs336_systems.model import TransformerLM
from cs336_systems.predict.flops import executed_flops, forward_flops, model_flops
from cs336_systems.step.train_step import TrainStep

ODD = ModelConfig(vocab_size=101, context_length=33, d_model=48, num_layers=3, num_heads=4, d_ff=80)
DEEP = ModelConfig(vocab_size=64, context_length=16, d_model=32, num_layers=5, num_heads=8, d_ff=48)


def counted(config: RunConfig) -> int:
    step = TrainStep.build(config)
    batch = step.random_batch()
    return count_flops(lambda: step(*batch))


@pytest.mark.parametrize(("model", "batch_size"), [(ODD, 3), (DEEP, 1)], ids=["odd", "deep"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_executed_flops_equal_the_counter(model, batch_size, mode, attention):
    config = RunConfig(model=model, batch_size=batch_size, mode=mode, attention=attention)
    assert executed_flops(config) == counted(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_kernels_by_torchs_own_counter(dtype, monkeypatch):
    """On a GPU attention is the efficient (fp32) or the flash (bf16) operator, for which torch has formulas."""
    monkeypatch.setattr(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
    shape = ModelConfig(vocab_size=128, context_length=64, d_model=64, num_layers=2, num_heads=4, d_ff=96)
    with FakeTensorMode(), as_on_cuda(), FlopCounterMode(display=False) as counter:
        torch.set_default_dtype(dtype)
        try:
            model = TransformerLM(shape, attention="sdpa")
        finally:
            torch.set_default_dtype(torch.float32)
        model(torch.zeros(3, 64, dtype=torch.long)).sum().backward()
    config = RunConfig(model=shape, batch_size=3, attention="sdpa", mode="forward-backward")
    assert executed_flops(config) == counter.get_total_flops()


@pytest.mark.parametrize("group", [1, 2, 4, 5, 9])
def test_recomputation_is_executed_but_not_model_flops(group):
    config = RunConfig(model=DEEP, batch_size=2, checkpoint_blocks=group)
    assert executed_flops(config) == counted(config)
    assert model_flops(config) == 3 * forward_flops(config) < executed_flops(config)


def test_2_7b_takes_about_six_flops_per_parameter_and_token():
    config = RunConfig(model=model_config("2.7B"))
    assert 6 < model_flops(config) / (config.model.linear_parameters * config.tokens) < 6.3

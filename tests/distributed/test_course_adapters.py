"""examples/course_adapters.py, used as the course's tests use it: two ranks train as one process on the whole batch."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples import course_adapters as adapters


def _toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _train(
    model: nn.Module, inputs: Tensor, targets: Tensor, after: Callable[[nn.Module, torch.optim.Optimizer], None]
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(inputs), targets).backward()
        after(model, optimizer)
        optimizer.step()


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)


def _bucketed(module: nn.Module) -> nn.Module:
    return adapters.get_ddp_bucketed(module, bucket_size_mb=0.0001)


WRAPPERS = {
    "2025 individual": (
        adapters.get_ddp_individual_parameters,
        adapters.ddp_individual_parameters_on_after_backward,
    ),
    "2025 bucketed": (_bucketed, adapters.ddp_bucketed_on_after_backward),
    "2026 ddp": (adapters.get_ddp, adapters.ddp_on_after_backward),
    "2026 fsdp": (adapters.get_fsdp, adapters.fsdp_on_after_backward),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_train_as_one_process(name: str) -> None:
    wrap, after = WRAPPERS[name]
    whole = _toy()
    wrapped = wrap(copy.deepcopy(whole))
    inputs, targets = _batch()
    _train(whole, inputs, targets, lambda model, optimizer: None)
    rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    _train(wrapped, inputs[rows], targets[rows], after)
    if name == "2026 fsdp":
        weights = adapters.fsdp_gather_full_params(wrapped)
    else:
        weights = dict(wrapped.module.named_parameters())
    for key, weight in whole.named_parameters():
        torch.testing.assert_close(weights[key], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.ranks(2)
def test_sharded_optimizer_updates_as_the_plain_one() -> None:
    plain, sharded = _toy(), _toy()
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=0.1),
        adapters.get_sharded_optimizer(sharded.parameters(), torch.optim.AdamW, lr=0.1),
    ]
    inputs, targets = _batch()
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_attention_functions_take_the_course_arguments() -> None:
    function = adapters.get_flashattention_autograd_function_pytorch()
    q, k, v = (torch.randn(2, 16, 8, requires_grad=True) for _ in range(3))
    out = function.apply(q, k, v, True)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected)
    assert issubclass(adapters.get_flashattention_autograd_function_triton(), torch.autograd.Function)

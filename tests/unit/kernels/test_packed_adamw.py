"""PackedAdamW against torch.optim.AdamW that is fed the same gradients, and fp32 weights in two halves."""

import copy
import io
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cs336_systems.config import ModelConfig
from cs336_systems.kernels.fused import nodes as fused
from cs336_systems.kernels.fused import pointwise
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.model import TransformerLM
from tests.unit.kernels.attention_cases import poisoned_memory

SHAPES = [(7, 5), (3,), (), (1, 1), (130, 3), (2, 3, 4), (129,)]
OPTIONS = [
    {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 2e-2, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.5},
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NONE = pytest.mark.parametrize("to_none", [True, False], ids=["to_none", "to_zero"])


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters():
    return [nn.Parameter(random(*shape, seed=number)) for number, shape in enumerate(SHAPES)]


def groups_of(parameters):
    parts = (parameters[:3], parameters[3:5], parameters[5:])
    return [{"params": part, **options} for part, options in zip(parts, OPTIONS, strict=True)]


class Pair:
    """The optimizer under test, and torch's over fp32 copies of the same weights."""

    def __init__(self, dtype=torch.float32, max_grad_norm=0.0, check_finite=False):
        self.ours, self.plain = parameters(), parameters()
        with poisoned_memory():
            self.packed = PackedAdamW(
                groups_of(self.ours), dtype=dtype, max_grad_norm=max_grad_norm, check_finite=check_finite
            )
        self.adamw = torch.optim.AdamW(groups_of(self.plain))
        self.max_grad_norm = max_grad_norm
        self.norm = None

    def gradients(self, number, size=1.0):
        """As exact as the parameters are: what autograd gives both."""
        drawn = [size * random(*p.shape, seed=100 * number + i) for i, p in enumerate(self.ours)]
        return [g.to(p.dtype) for g, p in zip(drawn, self.ours, strict=True)]

    def backward(self, gradients):
        for parameters in (self.ours, self.plain):
            loss = sum((p * g.to(p.dtype)).sum().float() for p, g in zip(parameters, gradients, strict=True))
            with poisoned_memory():
                loss.backward()

    def update(self):
        if self.max_grad_norm:
            self.norm = nn.utils.clip_grad_norm_(self.plain, self.max_grad_norm)
        self.packed.step()
        self.adamw.step()

    def step(self, number, size=1.0, to_none=True):
        self.backward(self.gradients(number, size))
        self.update()
        self.packed.zero_grad(to_none)
        self.adamw.zero_grad(to_none)

    def set_rates(self, factor):
        for optimizer in (self.packed, self.adamw):
            for group, options in zip(optimizer.param_groups, OPTIONS, strict=True):
                group["lr"] = options["lr"] * factor

    def masters(self):
        masters = self.packed.masters()
        return [masters[p] for p in self.ours]

    def check(self, limit=1e-6):
        for ours, plain in zip(self.masters(), self.plain, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, plain.detach(), rtol=limit, atol=limit)
        for p, master in zip(self.ours, self.masters(), strict=True):
            assert_nearest(p.detach(), master)


def assert_nearest(rounded, master):
    """No other number of its kind is nearer; of two equally near ones either will do."""
    error, least = (rounded.float() - master).abs(), (master.to(rounded.dtype).float() - master).abs()
    assert bool((error <= least).all())


def bits(x):
    return x.detach().clone().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def everything(pair):
    state = pair.packed.state_dict()["state"]
    tensors = [*pair.ours, *pair.masters(), *(x for values in state.values() for x in values.values())]
    return [bits(x.reshape(-1)) for x in tensors]


def saved(state):
    """As another process gets it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Against torch


@NONE
@DTYPES
def test_several_groups(dtype, to_none):
    pair = Pair(dtype)
    assert all(torch.equal(*two) for two in zip(pair.masters(), parameters(), strict=True))
    for number in range(20):
        pair.set_rates(1 - number / 30)
        pair.step(number, to_none=to_none)
        assert pair.packed.grad_norm is None
    pair.check()
    expected = [dtype if len(shape) > 1 else torch.float32 for shape in SHAPES]
    assert [p.dtype for p in pair.ours] == expected
    assert [p.shape for p in pair.ours] == [torch.Size(shape) for shape in SHAPES]


@DTYPES
def test_a_step_too_small_for_bf16_is_not_lost(dtype):
    pair = Pair(dtype)
    pair.set_rates(1e-3)
    for number in range(20):
        pair.step(number)
    pair.check()


@pytest.mark.parametrize("params", ["list", "generator", "one_group"])
def test_defaults_are_those_of_torch(params):
    ours, plain = parameters(), parameters()
    given = {"list": ours, "generator": iter(ours), "one_group": [{"params": ours}]}[params]
    packed, adamw = PackedAdamW(given, dtype=torch.float32), torch.optim.AdamW(plain)
    for number in range(5):
        for group in (ours, plain):
            sum((p * random(*p.shape, seed=number)).sum() for p in group).backward()
        for optimizer in (packed, adamw):
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_parameters_that_are_not_contiguous():
    ours = [nn.Parameter(random(6, 4, seed=1).T), nn.Parameter(random(1, 5, seed=2).expand(3, 5).clone()[:, ::2])]
    before = [p.detach().clone() for p in ours]
    packed = PackedAdamW(ours, dtype=torch.float32)
    assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))
    plain = [nn.Parameter(b) for b in before]
    adamw = torch.optim.AdamW(plain)
    for group in (ours, plain):
        sum((p * random(*p.shape, seed=3)).sum() for p in group).backward()
    packed.step()
    adamw.step()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# Norm, clipping, values that are not finite


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0], ids=["below", "about", "above"])
@DTYPES
def test_clipping(dtype, size):
    pair = Pair(dtype, max_grad_norm=2.0)
    for number in range(10):
        pair.step(number, size / 10 if number % 2 else size)
        torch.testing.assert_close(pair.packed.grad_norm.cpu(), pair.norm, rtol=1e-5, atol=0)
    pair.check()


@DTYPES
def test_norm_without_clipping(dtype):
    pair = Pair(dtype, check_finite=True)
    for number in range(5):
        pair.backward(pair.gradients(number))
        expected = nn.utils.get_total_norm([p.grad for p in pair.plain])
        pair.update()
        torch.testing.assert_close(pair.packed.grad_norm.cpu(), expected, rtol=1e-5, atol=0)
        pair.packed.zero_grad()
        pair.adamw.zero_grad()
    pair.check()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("options", [{"check_finite": True}, {"max_grad_norm": 1.0}], ids=["check_finite", "clipping"])
@DTYPES
def test_a_gradient_that_is_not_finite(dtype, options, bad):
    pair = Pair(dtype, **options)
    for number in range(3):
        pair.step(number)
    for place in (0, 1, 4, 6):
        before = everything(pair)
        gradients = pair.gradients(50)
        gradients[place].view(-1)[-1] = bad
        pair.backward(gradients)
        pair.packed.step()
        assert not pair.packed.grad_norm.isfinite()
        pair.packed.zero_grad()
        pair.adamw.zero_grad()
        assert all(torch.equal(*two) for two in zip(before, everything(pair), strict=True))
    for number in range(3, 6):
        pair.step(number)
    pair.check()


def test_the_first_gradient_is_not_finite():
    pair = Pair(check_finite=True)
    gradients = pair.gradients(0)
    gradients[0][0, 0] = math.nan
    pair.backward(gradients)
    pair.packed.step()
    pair.packed.zero_grad()
    pair.adamw.zero_grad()
    for number in range(3):
        pair.step(number)
    pair.check()


def test_without_a_check_nothing_is_checked():
    pair = Pair()
    gradients = pair.gradients(0)
    gradients[0][0, 0] = math.nan
    pair.backward(gradients)
    pair.update()
    assert pair.packed.grad_norm is None
    assert pair.ours[0][0, 0].isnan()
    assert int(pair.packed.state_dict()["state"][0]["step"]) == 1


# State


@DTYPES
def test_goes_on_in_torch(dtype):
    pair = Pair(dtype)
    for number in range(5):
        pair.step(number)
    pair.set_rates(0.5)
    other = [nn.Parameter(master.clone()) for master in pair.masters()]
    adamw = torch.optim.AdamW(groups_of(other))
    adamw.load_state_dict(saved(pair.packed.state_dict()))
    rates = [group["lr"] for group in adamw.param_groups]
    assert rates == [group["lr"] for group in pair.packed.param_groups]
    for number in range(5, 10):
        for p, g in zip(other, pair.gradients(number), strict=True):
            p.grad = g.float()
        adamw.step()
        pair.step(number)
    pair.check()
    steps = [values["step"].item() for values in adamw.state_dict()["state"].values()]
    assert steps == [10] * len(SHAPES)
    for ours, theirs in zip(pair.masters(), other, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


@DTYPES
def test_goes_on_from_torch(dtype):
    first, second = Pair(dtype), Pair(dtype)
    for number in range(5):
        first.step(number)
    first.set_rates(0.5)
    second.step(77)
    second.packed.load_state_dict(saved(first.adamw.state_dict()))
    second.packed.load_masters({ours: plain.detach() for ours, plain in zip(second.ours, first.plain, strict=True)})
    rates = [group["lr"] for group in second.packed.param_groups]
    assert rates == [group["lr"] for group in first.adamw.param_groups]
    second.plain, second.adamw = first.plain, first.adamw
    second.check(0)
    for number in range(5, 10):
        second.step(number)
    second.check()


@DTYPES
def test_goes_on_to_the_bit(dtype):
    first, second = Pair(dtype), Pair(dtype)
    for number in range(5):
        first.step(number)
    second.step(77)
    state, masters = saved(first.packed.state_dict()), first.masters()
    second.packed.load_state_dict(state)
    second.packed.load_masters(dict(zip(second.ours, masters, strict=True)))
    for number in range(5, 8):
        for two in zip(everything(first), everything(second), strict=True):
            assert torch.equal(*two)
        first.step(number)
        second.step(number)
    for two in zip(everything(first), everything(second), strict=True):
        assert torch.equal(*two)


def test_a_loaded_state_is_a_copy():
    first, second = Pair(), Pair()
    first.step(0)
    state = copy.deepcopy(first.packed.state_dict())
    kept = copy.deepcopy(state)
    second.packed.load_state_dict(state)
    second.step(1)
    for number, values in kept["state"].items():
        assert all(torch.equal(x, state["state"][number][name]) for name, x in values.items())


@DTYPES
def test_loading_the_masters_changes_nothing(dtype):
    pair = Pair(dtype)
    for number in range(3):
        pair.step(number)
    before = everything(pair)
    pair.packed.load_masters(pair.packed.masters())
    assert all(torch.equal(*two) for two in zip(before, everything(pair), strict=True))


# How gradients come


@NONE
@DTYPES
def test_two_backward_calls_add_up(dtype, to_none):
    """With powers of 2, so that no rounding depends on the order."""
    pair = Pair(dtype)
    for number in range(4):
        gradients = [torch.full_like(g, 2.0**-number).copysign(g) for g in pair.gradients(number)]
        pair.backward(gradients)
        pair.backward([2 * g for g in gradients])
        assert all(torch.equal(p.grad, 3 * g) for p, g in zip(pair.ours, gradients, strict=True))
        pair.update()
        pair.packed.zero_grad(to_none)
        pair.adamw.zero_grad(to_none)
        assert all((p.grad is None) if to_none else not p.grad.any() for p in pair.ours)
    pair.check()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("number", range(len(SHAPES)), ids=map(str, SHAPES))
def test_a_missing_gradient(number, steps):
    pair = Pair(torch.bfloat16)
    for step in range(steps):
        pair.step(step)
    before = everything(pair)
    (sum((p * 2).sum().float() for i, p in enumerate(pair.ours) if i != number)).backward()
    with pytest.raises(RuntimeError) as caught:
        pair.packed.step()
    assert "\n" not in str(caught.value)
    assert all(torch.equal(*two) for two in zip(before, everything(pair), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, None], ids=str)
def test_an_unknown_dtype(dtype):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        PackedAdamW(parameters(), dtype=dtype)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 4), (3,)], ids=str)
@DTYPES
def test_fp64_parameters(dtype, shape):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        PackedAdamW([*parameters(), nn.Parameter(torch.zeros(shape, dtype=torch.float64))], dtype=dtype)
    assert "\n" not in str(caught.value)


class Plain(nn.Module):
    """What no fused part writes the gradients of."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.inner, self.head = nn.Linear(6, 9), nn.Linear(9, 11)

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(self.norm(self.embedding(tokens)))))


def plain_model():
    model = Plain()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(random(*p.shape, seed=number) * 0.5)
    return model


def tokens_of(vocabulary, *shape, seed):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed, autocast=False):
    tokens, targets = tokens_of(11, 4, 5, seed=seed), tokens_of(11, 4, 5, seed=seed + 100)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


@NONE
def test_a_model_without_fused_parts(to_none):
    ours, plain = plain_model(), plain_model()
    packed = PackedAdamW(ours.parameters(), lr=1e-2, dtype=torch.float32, max_grad_norm=0.5)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(20):
        losses = []
        for model, optimizer in ((ours, packed), (plain, adamw)):
            loss = loss_of(model, number)
            loss.backward()
            losses.append(loss.item())
            if optimizer is adamw:
                nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(to_none)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_model_without_fused_parts_in_bf16():
    ours, plain = plain_model(), plain_model()
    packed = PackedAdamW(ours.parameters(), lr=1e-2)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = {}
    for name, model, optimizer in (("ours", ours, packed), ("plain", plain, adamw)):
        losses[name] = []
        for _ in range(20):
            loss = loss_of(model, 0, autocast=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["plain"], rel=2e-2)
    assert losses["plain"][-1] < 0.8 * losses["plain"][0]
    masters = packed.masters()
    for p in ours.parameters():
        assert_nearest(p.detach(), masters[p])


SHAPE = ModelConfig(vocab_size=61, context_length=12, d_model=24, num_layers=3, num_heads=3, d_ff=40)


def fused_model(checkpoint_blocks=0):
    model = TransformerLM(SHAPE, attention="reference", checkpoint_blocks=checkpoint_blocks, fused=True)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(random(*p.shape, seed=number) * 0.3 + (p.dim() == 1))
    return model


@pytest.mark.parametrize(
    ("order", "checkpoint_blocks"),
    [("packing", 0), ("packing", 2), ("module", 0), ("reversed", 0), ("two_groups", 0)],
)
@DTYPES
def test_gradients_of_a_fused_model(dtype, order, checkpoint_blocks):
    """Those that products write themselves and those that autograd adds up, over two backward calls."""
    model, plain = fused_model(checkpoint_blocks), fused_model()
    ordered = model.in_packing_order() if order == "packing" else list(model.parameters())
    given = ordered[::-1] if order == "reversed" else ordered
    if order == "two_groups":
        given = [{"params": [p for i, p in enumerate(ordered) if i % 2 == odd]} for odd in (0, 1)]
    optimizer = PackedAdamW(given, dtype=dtype)
    if dtype == torch.bfloat16:
        with torch.no_grad():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.copy_(q)
    plain.double()
    drops = (optimizer.zero_grad, lambda: optimizer.zero_grad(False), model.zero_grad, optimizer.zero_grad)
    for drop in drops:
        for number in range(2):
            tokens, targets = (tokens_of(61, 2, 12, seed=10 * number + i) for i in range(2))
            with poisoned_memory():
                (3 * model(tokens, targets)).backward()
                model(tokens, targets)  # what nobody differentiates leaves no gradient
            logits = plain(tokens).flatten(0, 1)
            (3 * nn.functional.cross_entropy(logits, targets.flatten())).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            error = (p.grad.double() - q.grad).norm() / q.grad.norm()
            assert error < (1e-5 if dtype == torch.float32 else 0.05), name
            assert (p.grad.dtype, p.grad.shape) == (p.dtype, p.shape)
        drop()
        plain.zero_grad()


@DTYPES
def test_weights_that_are_packed_together_are_one_matrix(dtype):
    config = ModelConfig(vocab_size=61, context_length=12, d_model=32, num_layers=2, num_heads=2, d_ff=64)
    model = TransformerLM(config, fused=True)
    optimizer = PackedAdamW(model.in_packing_order(), dtype=dtype)
    for block in model.layers:
        attn, ffn = block.attn, block.ffn
        for together in ((attn.q_proj, attn.k_proj, attn.v_proj), (ffn.w1, ffn.w3)):
            parts = [module.weight.detach() for module in together]
            joined = fused.joined(parts, dtype)
            assert joined.data_ptr() == parts[0].data_ptr()
            assert torch.equal(joined, torch.cat(parts))
    assert optimizer.param_groups


@DTYPES
def test_one_weight_in_two_products(dtype):
    weight, x = nn.Parameter(random(8, 8, seed=0) / 3), random(5, 8, seed=1).to(dtype)
    optimizer = PackedAdamW([weight], dtype=dtype)
    plain = nn.Parameter(weight.detach().double())
    for to_none in (True, False, True):
        fused.linear(fused.linear(x, weight), weight).float().square().sum().backward()
        ((x.double() @ plain.T) @ plain.T).square().sum().backward()
        error = (weight.grad.double() - plain.grad).norm() / plain.grad.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
        optimizer.zero_grad(to_none)
        plain.grad = None


@DTYPES
def test_a_weight_of_a_fused_and_of_a_plain_product(dtype):
    """One writes the gradient where it belongs, the other leaves it to autograd; in either order."""
    x = random(5, 8, seed=1).to(dtype)
    for first, second in ((fused.linear, nn.functional.linear), (nn.functional.linear, fused.linear)):
        weight = nn.Parameter(random(8, 8, seed=0) / 3)
        optimizer = PackedAdamW([weight], dtype=dtype)
        plain = nn.Parameter(weight.detach().double())
        for to_none in (True, False, True):
            second(first(x, weight), weight).float().square().sum().backward()
            ((x.double() @ plain.T) @ plain.T).square().sum().backward()
            error = (weight.grad.double() - plain.grad).norm() / plain.grad.norm()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)
            optimizer.zero_grad(to_none)
            plain.grad = None


def test_gradients_set_by_hand():
    pair = Pair()
    for number in range(3):
        for parameters in (pair.ours, pair.plain):
            for p, g in zip(parameters, pair.gradients(number), strict=True):
                p.grad = g.clone()
        pair.update()
        pair.packed.zero_grad()
    pair.check()


def test_gradients_changed_in_place():
    pair = Pair()
    for number in range(3):
        pair.backward(pair.gradients(number))
        for parameters in (pair.ours, pair.plain):
            for p in parameters:
                p.grad.mul_(0.25).add_(0.1)
        pair.update()
        pair.packed.zero_grad()
        pair.adamw.zero_grad()
    pair.check()


# How it is called


def test_closures():
    ours, plain = plain_model(), plain_model()
    packed = PackedAdamW(ours.parameters(), lr=1e-2, dtype=torch.float32)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(5):
        losses = []
        for model, optimizer in ((ours, packed), (plain, adamw)):

            def closure(model=model, optimizer=optimizer, number=number):
                optimizer.zero_grad()
                loss = loss_of(model, number)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_closure_returns_what_it_returns():
    pair = Pair()
    pair.backward(pair.gradients(0))
    assert pair.packed.step(lambda: "loss") == "loss"
    pair.backward(pair.gradients(1))
    assert pair.packed.step() is None


SCHEDULERS = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [1e-2, 3e-2, 2e-2], total_steps=12, cycle_momentum=False
    ),
    "one_cycle_with_momentum": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_schedulers(make):
    pair = Pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [make(optimizer) for optimizer in (pair.packed, pair.adamw)]
        for number in range(10):
            pair.step(number)
            for scheduler in schedulers:
                scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    pair.check()


def test_hooks_and_repr():
    pair, calls = Pair(), []
    pair.packed.register_step_post_hook(lambda *_: calls.append("after"))
    pair.step(0)
    assert calls == ["after"]
    assert "PackedAdamW" in repr(pair.packed)


# fp32 in two halves


def whole(patterns):
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def halves(x):
    weights, rest = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    pointwise.split_(x, weights, rest)
    return weights, rest


MAGNITUDES = {
    "zero": 0,
    "smallest denormal": 1,
    "denormal": 0x00001234,
    "denormal tie": 0x00008000,
    "denormal below a tie": 0x00007FFF,
    "largest denormal": 0x007FFFFF,
    "smallest normal": 0x00800000,
    "one": 0x3F800000,
    "tie above an even number": 0x3F808000,
    "tie above an odd number": 0x3F818000,
    "below a tie": 0x3F807FFF,
    "above a tie": 0x3F808001,
    "carry into the exponent": 0x3FFFFFFF,
    "tie into the exponent": 0x3FFF8000,
    "largest of bf16": 0x7F7F0000,
    "largest that rounds to it": 0x7F7F7FFF,
    "tie below infinity": 0x7F7F8000,
    "largest": 0x7F7FFFFF,
    "infinity": 0x7F800000,
}


@pytest.mark.parametrize("negative", [False, True], ids=["plus", "minus"])
@pytest.mark.parametrize("pattern", MAGNITUDES.values(), ids=list(MAGNITUDES))
def test_special_numbers_in_halves(pattern, negative):
    x = whole([pattern | negative << 31])
    weights, rest = halves(x)
    assert torch.equal(bits(pointwise.united(weights, rest)), bits(x))
    assert math.copysign(1, weights.item()) == (-1 if negative else 1)
    if pattern < 0x7F7F8000 or pattern == 0x7F800000:
        assert (bits(weights).item() & 0xFFFF) == (pattern + 0x8000) >> 16 | negative << 15


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_bit_is_lost(patterns):
    x = whole(patterns)
    assert torch.equal(bits(pointwise.united(*halves(x))), bits(x))


def test_random_bits_in_halves():
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator)
    patterns = torch.cat([patterns, patterns & ~0xFFFF | 0x8000, patterns & ~0x7F800000])
    x = patterns.to(torch.int32).view(torch.float32)
    weights, rest = halves(x)
    assert torch.equal(bits(pointwise.united(weights, rest)), bits(x))
    finite = x.abs() <= torch.finfo(torch.bfloat16).max
    assert_nearest(weights[finite], x[finite])
    ties = finite & ((patterns & 0xFFFF) == 0x8000)
    assert ties.sum() > 1 << 17
    assert bool((weights[ties].float().abs() > x[ties].abs()).all())

"""PackedAdamW against torch.optim.AdamW on the same gradients, and fp32 weights stored in two halves."""

import copy
import dataclasses
import io
import math
import re
import warnings

import pytest
import torch
from torch import nn

from cs336_systems.kernels.fused import nodes as fused
from cs336_systems.kernels.fused import pointwise
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.model import TransformerLM
from cs336_systems.step.initialise import initialise
from tests.unit.kernels.attention_cases import poisoned_memory
from tests.unit.kernels.fused_cases import SHAPE, model_of, targets_of

SHAPES = [(7, 5), (3,), (), (1, 1), (130, 3), (2, 3, 4), (129,)]
OPTIONS = [
    {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 2e-2, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.5},
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TO_NONE = pytest.mark.parametrize("to_none", [True, False], ids=["to_none", "to_zero"])


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

    def gradients(self, number, size=1.0):
        """Return random gradients in the precision of the parameters."""
        drawn = [size * random(*p.shape, seed=100 * number + i) for i, p in enumerate(self.ours)]
        return [g.to(p.dtype) for g, p in zip(drawn, self.ours, strict=True)]

    def backward(self, gradients):
        for parameters in (self.ours, self.plain):
            loss = sum((p * g.to(p.dtype)).sum().float() for p, g in zip(parameters, gradients, strict=True))
            with poisoned_memory():
                loss.backward()

    def update(self):
        """Update both, and compare the norms."""
        expected = nn.utils.clip_grad_norm_(self.plain, self.max_grad_norm or math.inf)
        self.packed.step()
        self.adamw.step()
        if self.packed.grad_norm is not None:
            torch.testing.assert_close(self.packed.grad_norm, expected, rtol=1e-5, atol=0)

    def drop(self, to_none=True):
        self.packed.zero_grad(to_none)
        self.adamw.zero_grad(to_none)

    def step(self, number, size=1.0, to_none=True):
        self.backward(self.gradients(number, size))
        self.update()
        self.drop(to_none)

    def set_rates(self, factor):
        for optimizer in (self.packed, self.adamw):
            for group, options in zip(optimizer.param_groups, OPTIONS, strict=True):
                group["lr"] = options["lr"] * factor

    def masters(self):
        masters = self.packed.masters()
        return [masters[p] for p in self.ours]

    def check(self, limit=1e-6):
        for p, ours, plain in zip(self.ours, self.masters(), self.plain, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, plain.detach(), rtol=limit, atol=limit)
            assert_nearest(p.detach(), ours)

    def everything(self):
        """Return the bits of weights, masters and state."""
        state = self.packed.state_dict()["state"]
        tensors = [*self.ours, *self.masters(), *(x for values in state.values() for x in values.values())]
        return [bits(x.reshape(-1)) for x in tensors]


def assert_nearest(rounded, master):
    """No other number of its dtype is nearer; of two equally near ones either is right."""
    error, least = (rounded.float() - master).abs(), (master.to(rounded.dtype).float() - master).abs()
    assert bool((error <= least).all())


def assert_equal(found, expected):
    assert all(torch.equal(*two) for two in zip(found, expected, strict=True))


def bits(x):
    return x.detach().clone().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def saved(state):
    """Return the state as another process loads it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- against torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1.0, 1e-3], ids=["rate", "too small for bf16"])
@TO_NONE
@DTYPES
def test_several_groups(dtype, to_none, rate):
    pair = Pair(dtype)
    assert_equal(pair.masters(), parameters())
    for number in range(15):
        pair.set_rates(rate * (1 - number / 30))
        pair.step(number, to_none=to_none)
        assert pair.packed.grad_norm is None
    pair.check()
    assert [p.dtype for p in pair.ours] == [dtype if len(shape) > 1 else torch.float32 for shape in SHAPES]
    assert [p.shape for p in pair.ours] == [torch.Size(shape) for shape in SHAPES]


def test_defaults_are_those_of_torch():
    """Parameters come from an iterator, and some are not contiguous."""
    ours = [*parameters(), nn.Parameter(random(6, 4, seed=1).T), nn.Parameter(random(3, 5, seed=2)[:, ::2])]
    plain = [nn.Parameter(p.detach().clone()) for p in ours]
    packed, adamw = PackedAdamW(iter(ours), dtype=torch.float32), torch.optim.AdamW(plain)
    assert_equal(ours, plain)
    for number in range(5):
        for group in (ours, plain):
            sum((p * random(*p.shape, seed=number)).sum() for p in group).backward()
        for optimizer in (packed, adamw):
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "size"),
    [({"max_grad_norm": 2.0}, size) for size in (1e-3, 1.0, 100.0)] + [({"check_finite": True}, 1.0)],
    ids=["below the limit", "about the limit", "above the limit", "norm without clipping"],
)
@DTYPES
def test_norm_and_clipping(dtype, options, size):
    pair = Pair(dtype, **options)
    for number in range(6):
        pair.step(number, size / 10 if number % 2 else size)
        assert pair.packed.grad_norm is not None
    pair.check()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("options", [{"check_finite": True}, {"max_grad_norm": 1.0}], ids=["check_finite", "clipping"])
@pytest.mark.parametrize("steps", [0, 2], ids=["first", "third"])
@DTYPES
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, steps, options, bad):
    pair = Pair(dtype, **options)
    for number in range(steps):
        pair.step(number)
    for index in (0, 1, 6):
        before = pair.everything()
        gradients = pair.gradients(50)
        gradients[index].view(-1)[-1] = bad
        pair.backward(gradients)
        pair.packed.step()
        assert not pair.packed.grad_norm.isfinite()
        pair.drop()
        assert_equal(pair.everything(), before)
    for number in range(steps, steps + 2):
        pair.step(number)
    pair.check()


def test_without_a_check_a_non_finite_gradient_is_applied():
    pair = Pair()
    gradients = pair.gradients(0)
    gradients[0][0, 0] = math.nan
    pair.backward(gradients)
    pair.packed.step()
    assert pair.packed.grad_norm is None
    assert pair.ours[0][0, 0].isnan()
    assert int(pair.packed.state_dict()["state"][0]["step"]) == 1


# -- state ------------------------------------------------------------------------------------------------------------


@DTYPES
def test_torch_resumes_its_state(dtype):
    pair = Pair(dtype)
    for number in range(5):
        pair.step(number)
    pair.set_rates(0.5)
    pair.plain = [nn.Parameter(master.clone()) for master in pair.masters()]
    pair.adamw = torch.optim.AdamW(groups_of(pair.plain))
    pair.adamw.load_state_dict(saved(pair.packed.state_dict()))
    assert [g["lr"] for g in pair.adamw.param_groups] == [g["lr"] for g in pair.packed.param_groups]
    for number in range(5, 10):
        pair.step(number)
    pair.check()
    assert [state["step"].item() for state in pair.adamw.state_dict()["state"].values()] == [10] * len(SHAPES)


@DTYPES
def test_it_resumes_the_state_of_torch(dtype):
    first, second = Pair(dtype), Pair(dtype)
    for number in range(5):
        first.step(number)
    first.set_rates(0.5)
    second.step(77)
    second.packed.load_state_dict(saved(first.adamw.state_dict()))
    second.packed.load_masters({ours: plain.detach() for ours, plain in zip(second.ours, first.plain, strict=True)})
    assert [g["lr"] for g in second.packed.param_groups] == [g["lr"] for g in first.adamw.param_groups]
    second.plain, second.adamw = first.plain, first.adamw
    second.check(0)
    for number in range(5, 10):
        second.step(number)
    second.check()


@DTYPES
def test_it_resumes_its_own_state_to_the_bit(dtype):
    """Loading copies the state, and loading a pair's own masters changes nothing."""
    first, second = Pair(dtype), Pair(dtype)
    for number in range(5):
        first.step(number)
    second.step(77)
    state = saved(first.packed.state_dict())
    kept = copy.deepcopy(state)
    second.packed.load_state_dict(state)
    second.packed.load_masters(dict(zip(second.ours, first.masters(), strict=True)))
    before = first.everything()
    first.packed.load_masters(first.packed.masters())
    assert_equal(first.everything(), before)
    for number in range(5, 8):
        assert_equal(second.everything(), first.everything())
        first.step(number)
        second.step(number)
    for number, values in kept["state"].items():
        assert all(torch.equal(x, state["state"][number][name]) for name, x in values.items())


# -- state in bf16 ----------------------------------------------------------------------------------------------------


def bf16_state(**options):
    given = parameters()
    return given, PackedAdamW(groups_of(given), state_dtype=torch.bfloat16, **options)


def set_gradients(parameters, seed):
    for number, p in enumerate(parameters):
        p.grad = random(*p.shape, seed=100 * seed + number).to(p.dtype)


def test_a_bf16_state_is_updated_as_torch_updates_bf16_parameters():
    """torch's fused AdamW also computes in fp32 and rounds once; gains of norms stay fp32 here."""
    ours, packed = bf16_state()
    plain = [nn.Parameter(p.detach().clone()) for p in ours]
    adamw = torch.optim.AdamW(groups_of(plain), fused=True)
    for number in range(20):
        for group, options in zip([*packed.param_groups, *adamw.param_groups], OPTIONS * 2, strict=True):
            group["lr"] = options["lr"] * (1 - number / 40)
        for mine, optimizer in ((ours, packed), (plain, adamw)):
            set_gradients(mine, number)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours, plain, strict=True):
        limit = {"rtol": 2**-7, "atol": 0.0} if p.dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
        assert p.dtype == q.dtype == (torch.bfloat16 if p.dim() > 1 else torch.float32)
        torch.testing.assert_close(p.detach(), q.detach(), **limit)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(packed.state[p][name], adamw.state[q][name], **limit)
            assert packed.state[p][name].dtype == p.dtype


def rounded(x):
    """fp64 numbers rounded to bf16, ties to even, by their bits."""
    bits_ = x.float().view(torch.int32)
    return ((bits_ + 0x7FFF + ((bits_ >> 16) & 1)) & ~0xFFFF).view(torch.float32).double()


def test_a_bf16_state_is_the_fp64_update_rounded_to_nearest():
    rate, beta1, beta2, eps, decay = 3e-3, 0.9, 0.95, 1e-8, 0.1
    weight = nn.Parameter(random(64, 40, seed=1))
    options = {"lr": rate, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    packed = PackedAdamW([weight], state_dtype=torch.bfloat16, **options)
    whole = weight.detach().double()
    mean, square = torch.zeros_like(whole), torch.zeros_like(whole)
    differ = 0
    for number in range(1, 11):
        gradient = random(64, 40, seed=number).bfloat16()
        weight.grad = gradient.clone()
        packed.step()
        packed.zero_grad()
        wide_mean = beta1 * mean + (1 - beta1) * gradient.double()
        wide_square = beta2 * square + (1 - beta2) * gradient.double() ** 2
        step = wide_mean / (1 - beta1**number) / ((wide_square / (1 - beta2**number)).sqrt() + eps)
        expected = [rounded(x) for x in (whole * (1 - rate * decay) - rate * step, wide_mean, wide_square)]
        found = [x.detach().double() for x in (weight, *(packed.state[weight][n] for n in ("exp_avg", "exp_avg_sq")))]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-8)  # one step of bf16
            differ += int((ours != theirs).sum())
        whole, mean, square = found
    assert differ < 0.001 * 30 * weight.numel()  # an fp32 result close to the middle of two bf16 numbers


def test_a_bf16_state_takes_8_bytes_a_parameter():
    """With fp32 masters and moments: 14."""
    for options, expected in (({}, 14), ({"state_dtype": torch.bfloat16}, 8)):
        weight = nn.Parameter(random(64, 64, seed=1))
        packed = PackedAdamW([weight], **options)
        assert sum(tensor.nbytes for _, tensor, _ in packed.flat) == expected * weight.numel()
        assert bool(packed.unlisted_state) == (expected == 14)


@pytest.mark.parametrize("options", [{"check_finite": True}, {"max_grad_norm": 1.0}], ids=["check_finite", "clipping"])
def test_a_gradient_that_is_not_finite_leaves_a_bf16_state(options):
    ours, packed = bf16_state(**options)
    set_gradients(ours, 1)
    packed.step()
    before = [bits(tensor) for kind, tensor, _ in packed.flat if kind != "gradient"]
    set_gradients(ours, 2)
    ours[0].grad[0, 0] = math.nan
    packed.step()
    assert_equal([bits(tensor) for kind, tensor, _ in packed.flat if kind != "gradient"], before)


@pytest.mark.parametrize("wide_first", [True, False], ids=["fp32 to bf16", "bf16 to fp32"])
def test_weights_and_moments_load_from_the_other_precision(wide_first):
    """They are rounded once on the way to bf16, and kept as they are on the way to fp32."""
    first, second = Pair(torch.bfloat16), bf16_state()
    wide = (first.ours, first.packed)
    (source, one), (target, other) = (wide, second) if wide_first else (second, wide)
    for number in range(3):
        for parameters_, optimizer in ((source, one), (target, other)):
            set_gradients(parameters_, number + 10 * (optimizer is other))
            optimizer.step()
    masters = one.masters()
    other.load_masters({mine: masters[theirs] for mine, theirs in zip(target, source, strict=True)})
    other.load_state_dict(saved(one.state_dict()))
    loaded = other.masters()
    for mine, theirs in zip(target, source, strict=True):
        for found, expected in (
            (loaded[mine], masters[theirs]),
            *((other.state[mine][name], one.state[theirs][name]) for name in ("exp_avg", "exp_avg_sq")),
        ):
            rounds = wide_first and mine.dim() > 1
            assert torch.equal(found.float(), (expected.bfloat16() if rounds else expected).float())
    assert other.state_dict()["state"][0]["step"] == 3


def test_a_state_of_an_unknown_dtype():
    with pytest.raises(ValueError, match=r"state of torch\.bfloat16 weights in torch\.float32 or torch\.bfloat16, not"):
        PackedAdamW(parameters(), state_dtype=torch.float16)
    for given in (torch.bfloat16, torch.int8, "float32"):
        with pytest.raises(ValueError, match=rf"state of torch\.float32 weights in torch\.float32, not {given!r}$"):
            PackedAdamW(parameters(), dtype=torch.float32, state_dtype=given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: "x"}, f"{name} must be a number, got 'x'")
            for name in ("lr", "eps", "weight_decay", "max_grad_norm")
        ),
        ({"lr": None}, "lr must be a number, got None"),
        ({"betas": 0.9}, "betas must be two numbers, got 0.9"),
        ({"betas": (0.9,)}, "betas must be two numbers, got (0.9,)"),
        ({"betas": (0.9, "x")}, "each of betas must be a number, got 'x'"),
    ],
)
def test_an_option_of_another_type(options, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        PackedAdamW(parameters(), **options)


# -- update in backward -----------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Two blocks of equal shape, each a fused matmul, a plain one and a gain, and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = self.block(0), self.block(10)
        self.head = nn.Parameter(random(7, 8, seed=20))

    def block(self, seed):
        matrices = [nn.Parameter(random(8, 8, seed=seed + i) / 3) for i in range(2)]
        return nn.ParameterList([*matrices, nn.Parameter(random(8, seed=seed + 2))])

    def forward(self, x):
        for fused_weight, plain_weight, gain in (self.first, self.second):
            x = torch.tanh(nn.functional.linear(fused.linear(x, fused_weight), plain_weight) * gain.to(x.dtype))
        return nn.functional.linear(x, self.head).float().square().sum()

    @property
    def groups(self):
        return [list(self.first), list(self.second), [self.head]]


def in_backward(dtype, state_dtype=torch.float32):
    model = Chain()
    options = {"dtype": dtype, "state_dtype": state_dtype, "update_in_backward": model.groups}
    return model, PackedAdamW(model.parameters(), lr=1e-2, **options)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32 state", "bf16 state"])
@DTYPES
def test_an_update_in_backward_equals_the_ordinary_one_to_the_bit(dtype, state_dtype):
    state_dtype = torch.float32 if dtype == torch.float32 else state_dtype
    plain = Chain()
    optimizers = {plain: PackedAdamW(plain.parameters(), lr=1e-2, dtype=dtype, state_dtype=state_dtype)}
    optimizers |= [in_backward(dtype, state_dtype)]
    for number in range(5):
        for model, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
            with poisoned_memory():
                model(random(5, 8, seed=number).to(dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [[bits(tensor) for kind, tensor, _ in o.flat if kind != "gradient"] for o in optimizers.values()]
    assert_equal(*found)
    assert [o.state_dict()["state"][0]["step"] for o in optimizers.values()] == [5, 5]


@DTYPES
def test_gradients_of_groups_share_memory(dtype):
    """Their memory is that of the largest group, and nothing is left in `grad`."""
    model, optimizer = in_backward(dtype)
    memories = {p.grad_memory.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(memories) == (1 if dtype == torch.float32 else 2)  # gains are fp32
    for p, q in zip(model.first, model.second, strict=True):
        assert p.grad_memory.data_ptr() == q.grad_memory.data_ptr()
    assert not any(kind == "gradient" for kind, _, _ in optimizer.flat)
    model(random(5, 8, seed=1).to(dtype)).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_without_gradient_is_found_by_the_step():
    model, optimizer = in_backward(torch.float32)
    (model.head.square().sum()).backward()
    with pytest.raises(RuntimeError, match="got no gradient"):
        optimizer.step()


def test_a_second_backward_pass_before_the_step():
    model, _optimizer = in_backward(torch.float32)
    model(random(5, 8, seed=1)).backward()
    with pytest.raises(RuntimeError, match="one backward pass per step"):
        model(random(5, 8, seed=2)).backward()


@pytest.mark.parametrize("options", [{"check_finite": True}, {"max_grad_norm": 1.0}])
def test_an_update_in_backward_excludes_what_needs_the_norm(options):
    model = Chain()
    with pytest.raises(ValueError, match="knows no norm"):
        PackedAdamW(model.parameters(), update_in_backward=model.groups, **options)
    with pytest.raises(ValueError, match="must name all parameters"):
        PackedAdamW(model.parameters(), update_in_backward=model.groups[:2])


# -- how gradients arrive ---------------------------------------------------------------------------------------------


@TO_NONE
@DTYPES
def test_two_backward_passes_accumulate(dtype, to_none):
    """Gradients are powers of 2, so that no rounding depends on the order."""
    pair = Pair(dtype)
    for number in range(4):
        gradients = [torch.full_like(g, 2.0**-number).copysign(g) for g in pair.gradients(number)]
        pair.backward(gradients)
        pair.backward([2 * g for g in gradients])
        assert_equal([p.grad for p in pair.ours], [3 * g for g in gradients])
        pair.update()
        pair.drop(to_none)
        assert all((p.grad is None) if to_none else not p.grad.any() for p in pair.ours)
    pair.check()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("number", [0, 2, 6], ids=lambda number: str(SHAPES[number]))
def test_a_missing_gradient(number, steps):
    pair = Pair(torch.bfloat16)
    for step in range(steps):
        pair.step(step)
    before = pair.everything()
    (sum((p * 2).sum().float() for i, p in enumerate(pair.ours) if i != number)).backward()
    with pytest.raises(RuntimeError, match="got no gradient"):
        pair.packed.step()
    assert_equal(pair.everything(), before)


@pytest.mark.parametrize("way", ["assigned", "changed in place"])
def test_gradients_of_the_caller(way):
    pair = Pair()
    for number in range(3):
        pair.backward(pair.gradients(number))
        for parameters in (pair.ours, pair.plain):
            for p, g in zip(parameters, pair.gradients(number + 50), strict=True):
                if way == "assigned":
                    p.grad = g.clone()
                else:
                    p.grad.mul_(0.25).add_(0.1)
        pair.update()
        pair.drop()
    pair.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, None], ids=str)
def test_an_unknown_dtype(dtype):
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        PackedAdamW(parameters(), dtype=dtype)


@pytest.mark.parametrize("shape", [(3, 4), (3,)], ids=str)
@DTYPES
def test_fp64_parameters(dtype, shape):
    with pytest.raises(ValueError, match="parameters in fp32"):
        PackedAdamW([*parameters(), nn.Parameter(torch.zeros(shape, dtype=torch.float64))], dtype=dtype)


def test_parameters_that_are_bf16_before():
    """Masters begin with the rounded values, and vectors stay bf16, too."""
    ours = [nn.Parameter(p.detach().bfloat16()) for p in parameters()]
    wide = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer, reference = PackedAdamW(ours, lr=1e-2), torch.optim.AdamW(wide, lr=1e-2)
    for step in range(3):
        for own, other in zip(ours, wide, strict=True):
            own.grad = torch.full_like(own, 0.5 + step)
            other.grad = torch.full_like(other, 0.5 + step)
        optimizer.step()
        reference.step()
    masters = optimizer.masters()
    for own, other in zip(ours, wide, strict=True):
        assert own.dtype == torch.bfloat16
        assert torch.allclose(masters[own], other, rtol=1e-6, atol=1e-7)


# -- models -----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A model without fused kernels."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.inner, self.head = nn.Linear(6, 9), nn.Linear(9, 11)
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(random(*p.shape, seed=number) * 0.5)

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(self.norm(self.embedding(tokens)))))


def loss_of(model, seed, autocast=False):
    tokens, targets = targets_of(11, 4, 5, seed=seed), targets_of(11, 4, 5, seed=seed + 100)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


@pytest.mark.parametrize("with_closure", [False, True], ids=["step", "closure"])
@DTYPES
def test_a_model_without_fused_kernels(dtype, with_closure):
    losses = []
    for optimizer_cls, options in ((PackedAdamW, {"dtype": dtype}), (torch.optim.AdamW, {})):
        model, of_model = Plain(), []
        optimizer = optimizer_cls(model.parameters(), lr=1e-2, **options)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0, autocast=dtype == torch.bfloat16)
            loss.backward()
            return loss

        for _ in range(15):
            of_model.append((optimizer.step(closure) if with_closure else closure()).item())
            if not with_closure:
                assert optimizer.step() is None
        losses.append(of_model)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if dtype == torch.float32 else 2e-2)
    assert losses[1][-1] < 0.85 * losses[1][0]


def fused_model(checkpoint_blocks=0):
    model = model_of(checkpoint_blocks, fused=True)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(random(*p.shape, seed=number) * 0.3 + (p.dim() == 1))
    return model


@pytest.mark.parametrize(
    ("order", "recompute_blocks"),
    [("packing", 0), ("packing", 2), ("module", 0), ("reversed", 0), ("two_groups", 0)],
)
@DTYPES
def test_gradients_of_a_fused_model(dtype, order, recompute_blocks):
    """Matmuls write some gradients in place, autograd accumulates others, over two backward passes."""
    model, plain = fused_model(recompute_blocks), fused_model()
    ordered = model.in_packing_order() if order == "packing" else list(model.parameters())
    given = ordered[::-1] if order == "reversed" else ordered
    if order == "two_groups":
        given = [{"params": [p for i, p in enumerate(ordered) if i % 2 == odd]} for odd in (0, 1)]
    optimizer = PackedAdamW(given, dtype=dtype)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    plain.double()
    for drop in (optimizer.zero_grad, lambda: optimizer.zero_grad(False), model.zero_grad):
        for number in range(2):
            tokens, targets = (targets_of(61, 2, 12, seed=10 * number + i) for i in range(2))
            with poisoned_memory():
                (3 * model(tokens, targets)).backward()
                model(tokens, targets)  # without backward it leaves no gradient
            logits = plain(tokens).flatten(0, 1)
            (3 * nn.functional.cross_entropy(logits, targets.flatten())).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            error = (p.grad.double() - q.grad).norm() / q.grad.norm()
            assert error < (1e-5 if dtype == torch.float32 else 0.05), name
            assert (p.grad.dtype, p.grad.shape) == (p.dtype, p.shape)
        drop()
        plain.zero_grad()


@DTYPES
def test_a_model_built_on_the_meta_device_has_the_weights_of_one_built_in_memory(dtype):
    torch.manual_seed(3)
    plain = TransformerLM(SHAPE, fused=True)
    expected = PackedAdamW(plain.in_packing_order(), dtype=dtype).masters()
    with torch.device("meta"):
        model = TransformerLM(SHAPE, fused=True)
    objects = list(model.parameters())
    optimizer = PackedAdamW(model.in_packing_order(), dtype=dtype, device=torch.device("cpu"))
    torch.manual_seed(3)
    initialise(model, optimizer.device, optimizer.load_master)
    found = optimizer.masters()
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found[mine], expected[theirs])
        assert (mine.dtype, mine.requires_grad, mine.is_leaf) == (theirs.dtype, True, True)
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), plain.buffers(), strict=True))
    tokens = torch.randint(SHAPE.vocab_size, (2, SHAPE.context_length))
    assert torch.equal(model(tokens, tokens), plain(tokens, tokens))


def test_parameters_on_the_meta_device_need_a_device():
    with torch.device("meta"):
        model = TransformerLM(SHAPE, fused=True)
    with pytest.raises(ValueError, match="need the `device`"):
        PackedAdamW(model.in_packing_order())


@DTYPES
def test_weights_packed_together_are_one_matrix(dtype):
    """Their sizes are multiples of the alignment here."""
    model = TransformerLM(dataclasses.replace(SHAPE, d_model=32, num_heads=2, d_ff=64), fused=True)
    optimizer = PackedAdamW(model.in_packing_order(), dtype=dtype)
    for block in model.layers:
        attn, ffn = block.attn, block.ffn
        for together in ((attn.q_proj, attn.k_proj, attn.v_proj), (ffn.w1, ffn.w3)):
            parts = [module.weight.detach() for module in together]
            joined = fused.joined(parts, dtype)
            assert joined.data_ptr() == parts[0].data_ptr()
            assert torch.equal(joined, torch.cat(parts))
    assert optimizer.param_groups


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (fused.linear, fused.linear),
        (fused.linear, nn.functional.linear),
        (nn.functional.linear, fused.linear),
    ],
    ids=["fused twice", "fused then plain", "plain then fused"],
)
@DTYPES
def test_one_weight_in_two_matmuls(dtype, first, second):
    """A fused matmul writes the gradient in place, a plain one leaves it to autograd."""
    weight, x = nn.Parameter(random(8, 8, seed=0) / 3), random(5, 8, seed=1).to(dtype)
    optimizer = PackedAdamW([weight], dtype=dtype)
    plain = nn.Parameter(weight.detach().double())
    for to_none in (True, False, True):
        second(first(x, weight), weight).float().square().sum().backward()
        ((x.double() @ plain.T) @ plain.T).square().sum().backward()
        error = (weight.grad.double() - plain.grad).norm() / plain.grad.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
        optimizer.zero_grad(to_none)
        plain.grad = None


SCHEDULERS = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-2, 2e-2], total_steps=12),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_schedulers_and_hooks(make):
    pair, calls = Pair(), []
    pair.packed.register_step_post_hook(lambda *_: calls.append("after"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [make(optimizer) for optimizer in (pair.packed, pair.adamw)]
        for number in range(10):
            pair.step(number)
            for scheduler in schedulers:
                scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    assert calls == ["after"] * 10
    assert "PackedAdamW" in repr(pair.packed)
    pair.check()


# -- fp32 in two halves -----------------------------------------------------------------------------------------------


def from_bits(patterns):
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def halves(x):
    weights, low = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    pointwise.split_(x, weights, low)
    return weights, low


MAGNITUDES = {
    "zero": 0,
    "smallest denormal": 1,
    "denormal tie": 0x00008000,
    "below a denormal tie": 0x00007FFF,
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
    x = from_bits([pattern | negative << 31])
    weights, low = halves(x)
    assert torch.equal(bits(pointwise.united(weights, low)), bits(x))
    assert math.copysign(1, weights.item()) == (-1 if negative else 1)
    if pattern < 0x7F7F8000 or pattern == 0x7F800000:
        assert (bits(weights).item() & 0xFFFF) == (pattern + 0x8000) >> 16 | negative << 15


def test_random_bits_in_halves():
    """Rounding to the nearest chooses the value away from zero in a tie."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator)
    patterns = torch.cat([patterns, patterns & ~0xFFFF | 0x8000, patterns & ~0x7F800000])
    x = patterns.to(torch.int32).view(torch.float32)
    weights, low = halves(x)
    assert torch.equal(bits(pointwise.united(weights, low)), bits(x))
    finite = x.abs() <= torch.finfo(torch.bfloat16).max
    assert_nearest(weights[finite], x[finite])
    ties = finite & ((patterns & 0xFFFF) == 0x8000)
    assert ties.sum() > 1 << 15
    assert bool((weights[ties].float().abs() > x[ties].abs()).all())

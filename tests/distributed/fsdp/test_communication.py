"""Collectives of the fully sharded wrapper, weights in memory, low precision, and Transformers."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.parallel import FSDP, clip_grad_norm_, gather_full_params
from cs336_systems.parallel.fsdp import AHEAD
from tests.distributed.compare import assert_close, assert_same_on_all_ranks, everywhere, rank, world
from tests.distributed.fsdp.models import (
    ROWS,
    VOCABULARY,
    WATCH,
    Linear,
    Pair,
    Stack,
    Tied,
    floats,
    is_sharded,
    loss_of,
    padded,
    part,
    rows,
    seeded,
    sgd,
    sharded_names,
    tokens,
)

pytestmark = pytest.mark.ranks(2)
low_precision = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])

CONFIG = ModelConfig(vocab_size=30, context_length=6, d_model=16, num_layers=2, num_heads=2, d_ff=28)


def transformer(**options: Any) -> TransformerLM:
    return TransformerLM(CONFIG, attention="reference", **options)


def text(step: int) -> Tensor:
    return tokens(step, CONFIG.vocab_size, CONFIG.context_length)


def language_loss(out: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(out.float().flatten(0, -2), batch.roll(-1, dims=-1).flatten())


# -- collectives and memory -------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_number_and_size_of_collectives(dtype):
    """A Linear's weight is gathered twice, an Embedding's once; each gradient is scattered once."""
    whole = seeded(transformer)
    linears = [m.weight for m in whole.modules() if isinstance(m, nn.Linear)]
    (embedding,) = (m.weight for m in whole.modules() if isinstance(m, nn.Embedding))
    forward = sorted(map(padded, [*linears, embedding]))
    both = sorted(map(padded, [*linears, *linears, embedding]))
    replicated = sum(p.nbytes for p in whole.parameters() if p.dim() == 1)
    size = 4 if dtype is None else 2
    wrapped = FSDP(seeded(transformer), dtype)
    for step in range(2):
        batch = part(text(step))
        wrapped.zero_grad()
        WATCH.clear()
        out = WATCH.forward(f"step {step}", wrapped, batch)
        with WATCH.passes():
            language_loss(out, batch).backward()
            wrapped.finish_gradient_synchronization()
        assert WATCH.elements("gather") == both
        assert WATCH.nbytes("gather") == size * sum(both)
        assert WATCH.elements("scatter") == forward
        assert WATCH.nbytes("scatter") == size * sum(forward)
        assert WATCH.nbytes("reduce") <= replicated + 40  # gradients, and a flag for each
        WATCH.assert_nothing_left(f"step {step}")
        WATCH.clear()
        with torch.no_grad():
            WATCH.forward("no_grad", wrapped, batch)
        assert WATCH.elements("gather") == forward
        assert len(WATCH.events) == len(forward)


@pytest.mark.parametrize(
    ("make", "scatters"),
    [
        (partial(Stack, frozen=["layers.1.weight", "layers.1.bias", "layers.2.weight"]), 4),
        (Tied, 2),
        (partial(Stack, 2, [0, 1, 0]), 4),
    ],
    ids=["frozen", "tied", "used_twice"],
)
def test_each_gradient_is_scattered_once(make, scatters):
    pair = Pair(make)
    for step in range(2):
        WATCH.clear()
        pair.zero_grad()
        pair.backward(step)
        pair.finish(f"step {step}")
        assert len(WATCH.of("scatter")) == scatters


class Chain(nn.Module):
    """Layers of different sizes, which record when they run."""

    WIDTHS = (5, 10, 15, 20, 25, 30, 35)  # no batch has so many rows

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(self.WIDTHS, self.WIDTHS[1:], strict=False)
        self.layers = nn.ModuleList(Linear(d_in, d_out) for d_in, d_out in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.ranks(2, 3)
def test_next_weights_are_prefetched():
    """From the second step on the next layer's weight is under way before a layer runs, and at most AHEAD are."""
    pair = Pair(Chain, inputs=partial(floats, width=Chain.WIDTHS[0]))
    weights = [layer.weight for layer in pair.whole.layers]
    for step in range(3):
        pair.zero_grad()
        WATCH.clear()
        loss = pair.forward(step)
        events = [(event.what, event.elements) for event in WATCH.events]
        runs = [events.index(("run", weight.numel())) for weight in weights]
        gathers = [events.index(("gather", padded(weight))) for weight in weights]
        assert len(events) == 2 * len(weights)
        assert runs == sorted(runs)
        for i, at in enumerate(runs):
            assert gathers[i] < at, events
            assert not step or i + 1 == len(runs) or gathers[i + 1] < at, f"layer {i + 1} was late: {events}"
            assert all(gather > at for gather in gathers[i + AHEAD + 1 :]), events
        pair.backward_of(*loss)
        pair.finish(f"step {step}")
        pair.step(f"step {step}")


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_full_weights_in_memory_at_a_time(reentrant):
    """In backward as well; observed from hooks of the modules and of their outputs."""
    pair = Pair(partial(Stack, 6, reentrant=reentrant))
    found: list[int] = []

    def look(*_: Any) -> None:
        if WATCH.active:
            found.append(WATCH.in_memory())

    def look_later(module: nn.Module, args: Any, out: Tensor) -> None:
        look()
        if out.requires_grad:
            out.register_hook(look)

    for module in pair.module.modules():
        if is_sharded(module):
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look_later)
    for step in range(2):
        WATCH.clear()
        found.clear()
        pair.train(1, start=step)
        assert len(found) >= 24
        assert 1 <= max(found) <= 1 + AHEAD, found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_autograd_saves_no_full_weight(dtype):
    """Neither the weight nor a cast copy of it."""
    wrapped = FSDP(seeded(Chain), dtype)
    shapes = {tuple(layer.weight.shape) for layer in seeded(Chain).layers}
    shapes |= {shape[::-1] for shape in shapes}
    for step in range(2):
        kept: list[torch.UntypedStorage] = []

        def pack(tensor: Tensor, kept: list[torch.UntypedStorage] = kept) -> Tensor:
            if tuple(tensor.shape) in shapes:
                kept.append(tensor.untyped_storage())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = wrapped(part(floats(step, Chain.WIDTHS[0])))
        assert kept
        assert sum(storage.nbytes() for storage in kept) == 0
        loss_of(out).backward()
        wrapped.finish_gradient_synchronization()
        assert all(p.grad.isfinite().all() for p in wrapped.parameters())


# -- compute_dtype ----------------------------------------------------------------------------------------------------


class Low(nn.Module):
    """Norms and sums in float32, matmuls in the dtype of the Linears."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.first = nn.Linear(6, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 7, bias=bias)
        self.head = Linear(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        first = self.first(input=embedded)  # inputs given by name are cast, too
        x = self.norm(first.float())
        second = self.second(x)
        out = self.head(x + second.float())
        self.dtypes = [embedded.dtype, first.dtype, second.dtype, out.dtype]
        return out


def cast(module: nn.Module, dtype: torch.dtype) -> Any:
    """The reference: casts in the forward of each module of one process."""
    for inner in module.modules():
        if isinstance(inner, nn.Embedding):
            inner.forward = lambda input, m=inner: F.embedding(input, m.weight.to(dtype))
        elif is_sharded(inner):
            inner.forward = lambda input, m=inner: F.linear(
                input.to(dtype), m.weight.to(dtype), None if getattr(m, "bias", None) is None else m.bias.to(dtype)
            )
    return module


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bias", [False, True])
@low_precision
def test_training_in_compute_dtype(dtype, bias):
    """Weights and gradients stay in float32. The batch of each rank is rounded for itself, as in the reference."""
    eps, lr, make = torch.finfo(dtype).eps, 0.1, partial(Low, bias=bias)
    whole, wrapped = cast(seeded(make), dtype), FSDP(seeded(make, rank()), compute_dtype=dtype)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model in (whole, wrapped)]
    names, slack = sharded_names(whole), dict.fromkeys(dict(whole.named_parameters()), 0.0)
    for step in range(3):
        batch = tokens(step)
        wrapped.zero_grad()
        out = WATCH.forward(f"step {step}", wrapped, part(batch))
        expected = whole(part(batch)).detach()
        assert_close(f"step {step}: forward", out.detach(), expected, 4 * eps * float(expected.abs().max()))
        assert wrapped.module.dtypes == [dtype] * 4
        loss_of(out).backward()
        wrapped.finish_gradient_synchronization()
        gradients = []
        for of_rank in range(world()):
            whole.zero_grad()
            loss_of(whole(part(batch, of_rank))).backward()
            gradients.append([p.grad.clone() for p in whole.parameters()])
        for (name, p), by_rank in zip(whole.named_parameters(), zip(*gradients, strict=True), strict=True):
            p.grad = torch.stack(by_rank).mean(0)
            largest = float(torch.stack(by_rank).abs().max())
            assert largest > 1e-3
            bound = (4 if step == 0 else 16) * eps * largest
            expected = rows(p.grad) if name in names else p.grad
            assert_close(f"step {step}: {name}", wrapped.module.get_parameter(name).grad, expected, bound)
            slack[name] += lr * bound
        for optimizer in optimizers:
            optimizer.step()
        gathered = gather_full_params(wrapped)
        for name, p in whole.named_parameters():
            assert_close(f"step {step}: {name}", gathered[name], p.detach(), slack[name])
    assert_same_on_all_ranks("weight", gathered.values())


@pytest.mark.parametrize("make", [Low, partial(Tied, bias=False)], ids=["low", "tied"])
@low_precision
def test_forward_in_compute_dtype_is_exact(dtype, make):
    wrapped, reference = FSDP(seeded(make, rank()), dtype), cast(seeded(make), dtype)
    batch = part(tokens(0))
    for _ in range(2):
        assert_close("forward", wrapped(batch).detach(), reference(batch).detach())


# -- a Transformer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_blocks", [0, 1])
def test_transformer(checkpoint_blocks):
    """Twelve steps with clipping, with and without recomputed blocks."""
    whole = seeded(transformer)
    wrapped = FSDP(seeded(partial(transformer, checkpoint_blocks=checkpoint_blocks), rank()))
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4) for model in (whole, wrapped)
    ]
    losses = []
    for step in range(12):
        batch = text(step % 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = language_loss(whole(batch), batch)
        expected.backward()
        loss = language_loss(wrapped(part(batch)), part(batch))
        loss.backward()
        wrapped.finish_gradient_synchronization()
        norms = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5), clip_grad_norm_(wrapped, 0.5)
        assert torch.allclose(*norms, rtol=1e-5), norms
        losses.append(expected.item())
        assert_close(f"step {step}: loss", torch.stack(everywhere(loss.detach())).mean(), expected.detach(), 1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[9] < losses[0]
    gathered = gather_full_params(wrapped)
    for name, p in whole.named_parameters():
        assert_close(f"after training: {name}", gathered[name], p.detach(), 1e-5)


def test_transformer_from_the_meta_device():
    """Values as wide as those of a model that is built whole, equal on all ranks; then it trains like that model."""
    with torch.device("meta"):
        module = transformer()
    wrapped = FSDP(module)
    assert all(t.device.type == "cpu" for t in (*module.parameters(), *module.buffers()))
    whole = seeded(transformer, 1)
    names = sharded_names(whole)
    gathered = gather_full_params(wrapped)
    assert_same_on_all_ranks("parameter", gathered.values())
    assert_same_on_all_ranks("buffer", module.buffers())
    for name, fresh in whole.named_parameters():
        found, full = module.get_parameter(name), gathered[name]
        assert found.shape == (rows(fresh).shape if name in names else fresh.shape)
        assert found.requires_grad
        if name in names:
            assert len(full.unique(dim=0)) == len(full), f"{name} has equal rows"
            assert 0.8 < float(full.std() / fresh.std()) < 1.25, name
        else:
            assert_close(name, full, torch.ones_like(fresh))
    whole.load_state_dict(gathered)
    optimizers = sgd(whole), sgd(wrapped)
    for step in range(2):
        for optimizer, model, batch in zip(optimizers, (whole, wrapped), (text(step), part(text(step))), strict=True):
            optimizer.zero_grad()
            language_loss(model(batch), batch).backward()
            if model is wrapped:
                wrapped.finish_gradient_synchronization()
            optimizer.step()
    gathered = gather_full_params(wrapped)
    for name, p in whole.named_parameters():
        assert_close(f"trained {name}", gathered[name], p.detach(), 1e-6)


class Homemade(nn.Module):
    """Has no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


HOMEMADE = {
    "1.0.gain": lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(Homemade())),
    "2.weight": lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), Linear(3, 3)),
}


@pytest.mark.parametrize("name", HOMEMADE)
def test_meta_device_without_reset_parameters(name):
    with torch.device("meta"):
        module = HOMEMADE[name]()
    with pytest.raises(ValueError, match=rf"'{name}' is on the meta device.*reset_parameters"):
        FSDP(module)


def test_tied_weights_from_the_meta_device():
    with torch.device("meta"):
        module = Tied()
    wrapped = FSDP(module)
    assert len(list(wrapped.parameters())) == 4
    full = gather_full_params(wrapped)
    assert_close("tied", full["head.weight"], full["embed.weight"])
    assert full["head.weight"].std() > 0.1
    assert wrapped(part(torch.arange(ROWS) % VOCABULARY)).isfinite().all()
    bound = 1 / 6**0.5  # of torch's Linear
    assert bound / 3 < full["mix.weight"].abs().max() <= bound

"""Cheap launches, without a GPU: encoded descriptors, launch arguments, memory for results, resolved calls."""

from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from cs336_systems.kernels import attention
from cs336_systems.kernels.flash import operators as flash_ops
from cs336_systems.kernels.flash import strides as layout

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


class Descriptor:
    """The fields of a tensor descriptor that the code reads."""

    def __init__(self, base, shape, strides, block_shape):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape


def described(t, **fields):
    from cs336_systems.kernels.triton_compat import TensorDescription

    return TensorDescription(Descriptor, t, [8, 8], **fields)


@pytest.fixture
def driver():
    """Triton's driver with an encoder that counts its calls: the real one calls CUDA."""
    found = pytest.importorskip("triton.backends.nvidia.driver")
    encode = mock.Mock(side_effect=lambda arg, metadata: [("map", arg.base.data_ptr(), metadata), *arg.shape])
    with mock.patch.object(found, "make_tensordesc_arg", encode):
        yield found


def wrapped(driver, signature, kinds, raw):
    """A launcher as Triton makes it for a kernel of that signature."""
    return SimpleNamespace(launch=driver.wrap_handle_tensordesc(raw, signature, kinds))


SIGNATURE = {"x": "tensordesc<fp32[8,8]>", "n": "i32", "y": "tensordesc<fp32[8,8]>"}


@needs_triton
def test_a_descriptor_is_encoded_once_for_each_address(driver):
    from cs336_systems.kernels.triton_compat import _without_encoding

    raw, x, y = mock.Mock(), torch.zeros(16, 8), torch.zeros(16, 8)
    descriptions, kinds = [described(x), described(y)], ["kind of x", "kind of y"]
    theirs = wrapped(driver, SIGNATURE, kinds, raw)
    ours = _without_encoding(theirs, descriptions, SimpleNamespace(tensordesc_meta=kinds))
    assert ours.launch is raw, "the launcher below Triton's encoding"
    assert theirs.launch is not raw, "other kernels share the class, not the object"
    for _ in range(3):
        assert descriptions[0].encoded(x) == [("map", x.data_ptr(), "kind of x"), 16, 8]
        assert descriptions[1].encoded(y) == [("map", y.data_ptr(), "kind of y"), 16, 8]
    assert driver.make_tensordesc_arg.call_count == 2
    assert descriptions[0].encoded(y)[0] == ("map", y.data_ptr(), "kind of x")
    assert driver.make_tensordesc_arg.call_count == 3


@needs_triton
def test_an_unknown_launcher_encodes_descriptors_itself(driver):
    from cs336_systems.kernels.triton_compat import _without_encoding

    x = torch.zeros(16, 8)
    one = {"x": "tensordesc<fp32[8,8]>"}
    for launcher, kinds in (
        (SimpleNamespace(launch=print), ["kind"]),  # no such closure
        (SimpleNamespace(), ["kind"]),
        (wrapped(driver, one, ["kind"], print), None),
        (wrapped(driver, one, ["kind"], print), ["kind", "too many"]),
        (wrapped(driver, one, [None], print), [None]),  # lowered to pointers
    ):
        description = described(x)
        assert _without_encoding(launcher, [description], SimpleNamespace(tensordesc_meta=kinds)) is launcher
        (passed,) = description.encoded(x)
        assert isinstance(passed, Descriptor)
        assert passed.base is x


FIXED = ("code", "packed", None, None, None)
SCRATCH = {"global_scratch_size": 0, "profile_scratch_size": 0}


class Triton36Launcher:
    """Passes the kernel's arguments one by one, after the constants."""

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, False, False, None, None, *arguments)


@needs_triton
@pytest.mark.parametrize("version", ["3.6", "installed"])
def test_direct_launch_passes_the_arguments_of_tritons_launcher(version):
    from triton.backends.nvidia.driver import CudaLauncher

    from cs336_systems.kernels.triton_compat import _direct

    raw = mock.Mock()
    if version == "3.6":
        launcher = Triton36Launcher(raw)
    else:
        launcher = object.__new__(CudaLauncher)
        fields = ("num_ctas", "global_scratch_align", "profile_scratch_align", "launch_cooperative_grid", "launch_pdl")
        vars(launcher).update(
            SCRATCH, launch=raw, arg_annotations="kinds", kernel_signature="ii", **dict.fromkeys(fields)
        )
    launcher(7, 1, 1, "stream", *FIXED, 1, 2, 3)
    expected = raw.call_args
    raw.reset_mock()
    launch = _direct(launcher, SimpleNamespace(**SCRATCH), 7, FIXED)
    assert launch is not None
    raw.assert_not_called()
    launch.function(*launch.arguments("stream", (1, 2, 3)))
    assert raw.call_args == expected


@needs_triton
def test_an_unknown_launcher_is_called_itself():
    from cs336_systems.kernels.triton_compat import _direct, launch_of

    def run(*arguments):
        called.append(arguments)

    called = []
    run.launch = print
    for launcher, metadata in (
        (run, SCRATCH),  # does not pass its arguments on
        (Triton36Launcher(print), {**SCRATCH, "global_scratch_size": 8}),
        (Triton36Launcher(print), {}),
        (SimpleNamespace(), SCRATCH),
    ):
        assert _direct(launcher, SimpleNamespace(**metadata), 7, FIXED) is None
    called.clear()
    metadata = SimpleNamespace(**SCRATCH)
    compiled = SimpleNamespace(run=run, function="code", packed_metadata="packed", metadata=metadata)
    launch = launch_of(compiled, 7, None)
    called.clear()
    launch.function(*launch.arguments("stream", (1, 2, 3)))
    assert called == [(7, 1, 1, "stream", *FIXED, 1, 2, 3)]


def plan_of(launch, descriptors=None):
    from cs336_systems.kernels.flash.launch_plan import Plan

    return Plan(None, 7, None, (), descriptors, ("before",), ("after",), {}, launch)


@pytest.fixture
def stream():
    with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=5, create=True) as found:
        yield found


@needs_triton
@pytest.mark.parametrize("as_tuple", [False, True], ids=["one by one", "as a tuple"])
def test_cached_arguments_depend_on_tensors_numbers_and_stream(as_tuple, stream):
    from cs336_systems.kernels.triton_compat import Launch

    called = []
    plan = plan_of(Launch(lambda *arguments: called.append(arguments), 7, ("code",), as_tuple))
    x, y = torch.zeros(4), torch.zeros(4)
    for current in (5, 6, 5):
        stream.return_value = current
        for tensors, pointers, number in (((x,), (y, None), 0.5), ((y,), (x, None), 0.5), ((x,), (y, None), 0.25)):
            plan(tensors, pointers, number)
            own = (tensors[0].data_ptr(), pointers[0].data_ptr(), None, "before", number, "after")
            assert called.pop() == (7, 1, 1, current, "code", *((own,) if as_tuple else own))
    assert len(plan.cache) == 6


@needs_triton
def test_a_plan_caches_no_tensor(driver, stream):
    """Arguments hold tensors if Triton encodes the descriptors."""
    from cs336_systems.kernels.triton_compat import Launch, launch_of

    x = torch.zeros(16, 8)
    descriptions = [described(x)]
    metadata = SimpleNamespace(**SCRATCH, tensordesc_meta=None)
    launcher = Triton36Launcher(print)
    compiled = SimpleNamespace(run=launcher, function="code", packed_metadata="packed", metadata=metadata)
    assert not launch_of(compiled, 7, descriptions).takes_addresses
    called = []
    plan = plan_of(Launch(lambda *arguments: called.append(arguments), 7, (), takes_addresses=False), descriptions)
    plan((x,), ())
    assert called[0][4].base is x
    assert not plan.cache


@needs_triton
def test_a_description_of_a_part_starts_at_its_offset():
    whole = torch.arange(64.0)
    part = described(whole[16:48].view(4, 8), start=16)
    assert torch.equal(part(whole).base, whole[16:48].view(4, 8))
    moved = torch.arange(100.0)[10:]
    assert torch.equal(part(moved).base, moved[16:48].view(4, 8))


B, H, R, D = 2, 3, 5, 8
TENSORS = {
    "contiguous": torch.empty(B, H, R, D),
    "rows outermost": torch.empty(B, R, H, D).transpose(1, 2),
    "a part of q, k and v": torch.empty(B, R, 3, H, D).select(2, 1).transpose(1, 2),
    "columns apart": torch.empty(B, H, D, R).mT,
    "expanded": torch.empty(1, H, 1, D).expand(B, H, R, D),
    "one head": torch.empty(B, R, 1, D).transpose(1, 2),
    "heads outermost": torch.empty(H, B, R, D).transpose(0, 1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_results_have_the_layout_of_empty_like(name):
    t = TENSORS[name]
    found = layout.Results(t, t, t)
    for made in (found.like_q(t), *found.gradients(t, t, t)):
        expected = layout.empty_like(t)
        assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
    lse = found.logsumexp()
    assert lse.shape == t.shape[:3]
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()


def test_no_graph_without_gradients():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    with_graph = attention(q.clone().requires_grad_(), k, v, impl="flash_torch")
    with mock.patch.object(flash_ops, "_apply", side_effect=AssertionError("a graph")):
        with pytest.raises(AssertionError, match="a graph"):
            attention(q.clone().requires_grad_(), k, v, impl="flash_torch")
        plain = attention(q, k, v, impl="flash_torch")
        with torch.no_grad():
            under_no_grad, lse = attention(q.clone().requires_grad_(), k, v, impl="flash_torch", return_lse=True)
    assert with_graph.requires_grad
    assert not plain.requires_grad
    assert torch.equal(plain, with_graph)
    assert torch.equal(under_no_grad, with_graph)
    assert lse.shape == (1, 2, 16)


@pytest.mark.parametrize("impl", ["sdpa", "flash_torch", "reference"])
def test_a_resolved_call_gives_the_same_every_time(impl):
    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64) for _ in range(3))
    for scale in (0.5, -0.5, 0.0):
        fields = {"is_causal": True, "scale": scale}
        expected = attention(q, k, v, impl="reference", **fields)
        for _ in range(3):
            torch.testing.assert_close(attention(q, k, v, impl=impl, **fields), expected)


def test_calls_are_resolved_for_each_layout():
    """Kernels are compiled for strides and alignment: a call resolved for one layout must not serve another."""
    base = torch.randn(3, 2, 4, 16, 8)
    expected = attention(*base, impl="reference", is_causal=True)
    transposed = base.transpose(2, 3).contiguous().transpose(2, 3)
    shifted = torch.empty(base.numel() + 1)[1:].view_as(base).copy_(base)
    kinds = {layout.layout_key(*tensors) for tensors in (base, transposed, shifted, base.clone())}
    assert len(kinds) == 3
    for tensors in (base, transposed, shifted, base):
        for impl in ("flash_torch", "sdpa", "auto"):
            torch.testing.assert_close(attention(*tensors, impl=impl, is_causal=True), expected)


@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_resolved_calls_follow_the_dtype_of_autocast(scale):
    """With either dtype, for tensors that need the cast, those that do not, and a mixture."""
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            for tensors in ((q, k, v), (q.to(dtype), k.to(dtype), v.to(dtype)), (q, k.to(dtype), v)):
                for _ in range(2):
                    assert attention(*tensors, scale=scale, impl="flash_torch").dtype == dtype
    assert attention(q, k, v, scale=scale, impl="flash_torch").dtype == torch.float32


def test_vmap_raises_torchs_own_error():
    q, k, v = (torch.randn(3, 1, 2, 16, 8) for _ in range(3))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.vmap(lambda q, k, v: attention(q, k, v, impl="flash_torch"))(q, k, v)

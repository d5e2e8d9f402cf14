"""Results on tensors without memory: from the cache they are those of torch."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cs336_systems.measure import fake_results

aten = torch.ops.aten
CALLS = {
    "view": (aten.view.default, [[6, 4]], {}),
    "slice": (aten.slice.Tensor, [0, 1, 3], {}),
    "last column": (aten.select.int, [1, 5], {}),
    "t": (aten.t.default, [], {}),
    "unsafe view": (aten._unsafe_view.default, [[24]], {}),
    "cast": (aten._to_copy.default, [], {"dtype": torch.bfloat16}),
    "sum": (aten.sum.dim_IntList, [[1], True], {}),
    "by a number": (aten.mul.Tensor, [2], {}),
    "by a fraction": (aten.mul.Tensor, [2.5], {}),
    "in place": (aten.add_.Tensor, [1], {}),
    "view in place": (aten.t_.default, [], {}),
    "view of the same shape in place": (aten.as_strided_.default, [[4, 6], [6, 1]], {}),
    "several": (aten.split.Tensor, [2], {}),
    "several new": (aten.max.dim, [1], {}),
    "like": (aten.empty_like.default, [], {"memory_format": torch.preserve_format}),
    "number": (aten.sym_size.int, [0], {}),
}


@pytest.fixture(autouse=True)
def no_results(monkeypatch):
    monkeypatch.setattr(fake_results, "_RESULTS", {})


def described(result, argument):
    tensors = [result] if isinstance(result, FakeTensor) else result
    if not isinstance(tensors, list | tuple):
        return result
    return [
        (
            type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device,
            tensor.untyped_storage().nbytes(), tensor is argument,
            tensor.untyped_storage()._cdata == argument.untyped_storage()._cdata,
        )
        for tensor in tensors
    ]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_stored_result_is_that_of_torch(name):
    func, args, kwargs = CALLS[name]
    with FakeTensorMode():
        for make in (partial(torch.empty, 4, 6), partial(torch.empty, 4, 6, dtype=torch.int64)):
            tensors = [make() for _ in range(4)]
            expected = described(func(tensors[0], *args, **kwargs), tensors[0])
            found = [described(fake_results.call(func, (tensor, *args), kwargs), tensor) for tensor in tensors[1:]]
            assert found == [expected] * 3


def test_what_is_written_in_place_is_the_argument_itself():
    with FakeTensorMode():
        for _ in range(3):
            a, b, out = (torch.empty(4, 4) for _ in range(3))
            assert fake_results.call(aten.copy_.default, (a, b), {}) is a
            assert fake_results.call(aten.mm.out, (a, b), {"out": out}) is out
    assert None not in fake_results._RESULTS.values()


def test_a_replaced_storage_is_replaced_every_time():
    with FakeTensorMode():
        for _ in range(3):
            a, b = torch.empty(4), torch.empty(4)
            fake_results.call(aten.set_.source_Tensor, (a, b), {})
            assert a.untyped_storage()._cdata == b.untyped_storage()._cdata


def test_new_tensors_are_those_of_torch():
    for dtype in (torch.float32, torch.float64):
        with FakeTensorMode() as mode, fake_results.CachedResults():
            torch.set_default_dtype(dtype)
            try:
                first, second = torch.empty(2, 3), torch.empty(2, 3)
                views = torch.ones(6, 2).split(2)
            finally:
                torch.set_default_dtype(torch.float32)
        assert first.dtype == second.dtype == dtype
        assert first.device.type == "cpu"
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        assert {type(first), type(second), *map(type, views)} == {FakeTensor}
        assert {first.fake_mode, second.fake_mode} == {mode}
        assert len({view.untyped_storage()._cdata for view in views}) == 1
    with fake_results.CachedResults():
        assert torch.zeros(2).tolist() == [0, 0], "no mode: real tensors"


def test_results_are_stored_once_for_equal_arguments():
    with FakeTensorMode():
        for columns, dtype in [(6, torch.float32), (6, torch.float32), (5, torch.float32), (6, torch.float16)]:
            fake_results.call(aten.mul.Tensor, (torch.empty(4, columns, dtype=dtype), 2), {})
        fake_results.call(aten.mul.Tensor, (torch.empty(6, 4).t(), 2), {})
        fake_results.call(aten.mul.Tensor, (torch.empty(8, 6)[4:], True), {})
    assert len(fake_results._RESULTS) == 5
    assert None not in fake_results._RESULTS.values()


def test_a_view_has_the_storage_of_its_own_argument():
    with FakeTensorMode():
        first, second = torch.empty(4, 6), torch.empty(4, 6)
        views = [fake_results.call(aten.t.default, (tensor,), {}) for tensor in (first, second)]
    for tensor, view in zip((first, second), views, strict=True):
        assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_another_mode_makes_tensors_of_its_own():
    modes = []
    for _ in range(2):
        with FakeTensorMode() as mode:
            found = fake_results.call(aten.mul.Tensor, (torch.empty(4), 2), {})
            modes.append((found.fake_mode, mode))
    assert all(found is mode for found, mode in modes)


def test_tensors_with_memory_are_computed():
    for value in (1.0, 2.0):
        assert fake_results.call(aten.mul.Tensor, (torch.full((2,), value), 2), {}).tolist() == [2 * value] * 2
    assert not fake_results._RESULTS


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(fake_results, "LIMIT", 3)
    with FakeTensorMode():
        for number in range(1, 9):
            fake_results.call(aten.mul.Tensor, (torch.empty(number), 2), {})
    assert 0 < len(fake_results._RESULTS) <= 3


def test_other_values_have_other_results():
    with FakeTensorMode():
        tensor = torch.empty(4, 6)
        found = [fake_results.call(aten.slice.Tensor, (tensor, 0, first, 4), {}) for first in (1, 3, 1)]
        casts = [
            fake_results.call(aten._to_copy.default, (tensor,), {"dtype": dtype})
            for dtype in (torch.float16, torch.float64)
        ]
    assert [(len(view), view.storage_offset()) for view in found] == [(3, 6), (1, 18), (3, 6)]
    assert [cast.dtype for cast in casts] == [torch.float16, torch.float64]


def test_tensors_of_two_modes_are_refused_as_by_torch():
    with FakeTensorMode():
        other = torch.empty(4)
    with FakeTensorMode():
        one = torch.empty(4)
        fake_results.call(aten.mul.Tensor, (one, one), {})
        with pytest.raises(AssertionError, match="Mixing fake modes"):
            fake_results.call(aten.mul.Tensor, (one, other), {})

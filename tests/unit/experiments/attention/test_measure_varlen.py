"""The instrument of attention_varlen on a CPU."""

import sys
from types import ModuleType

import pytest
import torch

from cs336_systems.experiments.attention import measure_varlen as instrument
from cs336_systems.predict.attention_model import AttentionShape
from tests.unit.experiments.attention.attention_cells import attention_config

CPU = torch.device("cpu")
NAMES = ["flash_torch", "reference", "padded"]


def config(mix="mixed", tokens=300, names=NAMES, **fields):
    found = attention_config(size=(1, 2, tokens, 8), mix=mix, implementations=names, rounds=1, **fields)
    del found["implementation"]
    return found


@pytest.fixture(autouse=True)
def short_documents(monkeypatch):
    monkeypatch.setattr(instrument, "MIXED_MEDIAN", 40)
    monkeypatch.setattr(instrument, "SHORT_MEAN", 12)
    instrument._exact.cache_clear()


@pytest.mark.parametrize("mix", ["short", "mixed", "giant"])
def test_documents_fill_the_tokens(mix):
    lengths = instrument.document_lengths(mix, 4096, 0)
    assert sum(lengths) == 4096
    assert min(lengths) >= 1
    assert lengths == instrument.document_lengths(mix, 4096, 0) != instrument.document_lengths(mix, 4096, 1)
    assert (max(lengths) == 2048) == (mix == "giant")


def test_flops_of_visible_pairs_alone():
    shape = AttentionShape(1, 2, 5, 8, is_causal=True, precision="fp32")
    assert instrument.visible_flops([2, 3], shape) == 14 * (3 + 6) * 2 * 8
    full = AttentionShape(1, 2, 5, 8, is_causal=False, precision="fp32")
    assert instrument.visible_flops([2, 3], full) == 14 * (4 + 9) * 2 * 8


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_implementation_is_checked_and_timed(is_causal):
    metrics = instrument.measure_varlen(config(is_causal=is_causal))
    found = {(m.variant, m.name): m.samples for m in metrics}
    refused = [] if is_causal else ["padded"]  # documents would see the padding
    assert [name for name, metric in found if metric == "status"] == refused
    for name in set(NAMES) - set(refused):
        assert found[name, "forward_time"][0] > 0
        assert found[name, "forward_backward_time"][0] > 0
        assert found[name, "error_dk"][0] < 1e-5


def test_a_wrong_result_is_reported_and_does_not_end_the_others(monkeypatch):
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "padded", lambda *_: lambda q, k, v: q + k + v)
    metrics = instrument.measure_varlen(config())
    assert [(m.variant, "wrong result" in m.samples[0]) for m in metrics if m.name == "status"] == [("padded", True)]
    assert [m for m in metrics if m.variant == "flash_torch" and m.name == "forward_time"]


def test_too_much_padding_is_not_tried():
    with pytest.raises(ValueError, match="padding would make 5600 tokens of 155"):
        instrument._padded([100, *[1] * 55], True, CPU)


def test_options_by_introspection(monkeypatch):
    """FlashAttention-4's and PyTorch's functions have changed their parameters between versions."""
    seen = {}

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, causal=False):
        seen.update(offsets=cu_seqlens_q.tolist(), causal=causal)
        return q, None

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        seen.update(longest=max_q, window=window_size)
        return query

    for name, function in (("flash_attn.cute", flash_attn_varlen_func), ("torch.nn.attention.varlen", varlen_attn)):
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    q = torch.zeros(5, 2, 8)
    assert instrument._flash_attention_4([2, 3], True, CPU)(q, q, q) is q
    assert instrument._torch_varlen([2, 3], True, CPU)(q, q, q) is q
    assert seen == {"offsets": [0, 2, 5], "causal": True, "longest": 3, "window": (-1, 0)}

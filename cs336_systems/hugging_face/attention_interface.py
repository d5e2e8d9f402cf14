"""This project's attention as an implementation of transformers: `attn_implementation="cs336"`.

    register_attention()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cs336")

Causal attention and sliding windows, with grouped heads, run on `kernels.attention`: over whole sequences and, where
transformers passes their offsets (`cu_seq_lens_q`), over packed documents. Padding, and documents that are marked by
positions alone, arrive as a mask, which goes to torch's SDPA with one warning; so does dropout. Keys of a cache go to
SDPA without one.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.config import UserError
from cs336_systems.kernels import attention
from cs336_systems.kernels.flash.band import Band, visible
from cs336_systems.kernels.flash.dispatch import MAX_HEAD_DIM

NAME = "cs336"
OLDEST = (5, 17)
"""The oldest version of transformers that is tested."""
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments of other models' attention that are not supported."""

_warned: set[str] = set()


def require_transformers() -> None:
    """Raise a UserError where transformers is missing or too old."""
    try:
        import transformers
    except ImportError:
        raise UserError("accelerate needs the package transformers; pip install transformers") from None
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UserError(f"transformers {version} is too old; pip install 'transformers>={needed}'")


def register_attention() -> str:
    """Make `attn_implementation="cs336"` known to transformers; return that name."""
    require_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    return NAME


def attention_mask(**options: Any) -> Tensor | None:
    """Return the mask that SDPA needs, or None if the mask is causal or a sliding window over whole sequences.

    SDPA needs a mask for a window. The kernels do not: transformers passes them `sliding_window`.
    """
    from transformers.masking_utils import sdpa_mask

    if options.get("allow_is_causal_skip", True) and options["q_length"] == options["kv_length"]:
        options["local_size"] = None
    return sdpa_mask(**options)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention of (batch, heads, rows, dim) as transformers calls it; return (batch, rows, heads, dim)."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    rows, keys = query.shape[2], key.shape[2]
    has_window = bool(is_causal) and sliding_window is not None and sliding_window < keys
    left = sliding_window - 1 if has_window and sliding_window is not None else None
    packed = _offsets(query, key, options)
    problem = _problem(query, attention_mask if packed is None else None, dropout, options)
    if problem is None and rows == keys:
        window = None if left is None else (left, None)
        call: dict[str, Any] = {"is_causal": bool(is_causal), "scale": scaling, "window": window}
        if packed is not None:
            rows_first = (x[0].transpose(0, 1) for x in (query, key, value))
            return attention(*rows_first, cu_seqlens_q=packed, **call)[None].contiguous(), None
        return attention(query, key, value, **call).transpose(1, 2).contiguous(), None
    if packed is not None and attention_mask is None:
        raise UserError(
            f"attention over packed documents with {problem} needs the documents' positions; pass position_ids, too"
        )
    if problem is not None and module.training:
        _warn_once(f"attention with {problem} uses torch's SDPA: the kernels of cs336_systems do not support it")
    if attention_mask is None and left is not None and rows == keys:
        attention_mask = visible(Band(-left, 0), slice(0, rows), slice(0, keys), query.device)[None, None]
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
    )


def _offsets(query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor | None:
    """Return the offsets of packed documents: the first row of each and the end of the last, if the batch is one
    sequence of documents. They are FlashAttention's arguments in transformers; those of the keys are equal without a
    cache."""
    offsets = options.get("cu_seq_lens_q")
    if offsets is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        return None
    return offsets.to(query.device, torch.int32)


def _problem(query: Tensor, mask: Tensor | None, dropout: float, options: dict[str, Any]) -> str | None:
    """Return why the kernels cannot take a call; None if they can."""
    if mask is not None:
        return "a mask (padding, or documents without cu_seq_lens_q)"
    if dropout:
        return f"dropout {dropout}"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"head dim {query.shape[3]}"
    return next((name for name in UNKNOWN if options.get(name) is not None), None)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)

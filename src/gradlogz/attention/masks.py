"""Masks, windows and segments, converted to the one form that the kernels take.

    is_causal           a query sees the keys up to its own position; the queries are the last m keys (bottom right)
    window=(l, r)       a query sees l keys before its own position and r after it; None is no limit
    segments [b, n]     a query sees the keys of its own segment: packed documents, without an n x n mask
    attn_mask           bool, True = attend; or float, added to the logits; or a mask object of torch
    bias                float, added to the logits; may be combined with a bool mask

Read next: ../kernels/attention/scoring.py, which defines the visible keys.
"""

import math
from operator import index
from typing import Any, SupportsIndex

import torch

from .._errors import InputNotImplementedError, InputTypeError, InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor
from ..kernels.attention.scoring import Sight


def dense(block_mask: Any, m: int, n: int) -> Bool[Tensor, "b h m n"]:
    """Bool mask equal to a BlockMask of torch's flex_attention; 1 along dimensions that share it."""
    from torch.nn.attention.flex_attention import create_mask

    b, h = block_mask.shape[:2]
    blocks = block_mask.to_dense().bool()
    rows, columns = block_mask.BLOCK_SIZE
    in_blocks = blocks.repeat_interleave(rows, -2)[..., :m, :].repeat_interleave(columns, -1)[..., :n]
    return in_blocks & create_mask(block_mask.mask_mod, b, h, m, n, device=str(blocks.device))


def band(
    is_causal: bool, window: tuple[SupportsIndex | None, SupportsIndex | None] | None
) -> tuple[int | None, int | None]:
    """Numbers (left, right) of keys that a query sees before and after its own position; None is no limit."""
    left, right = (None, None) if window is None else _window(window)
    return left, 0 if is_causal else right


def causal_alignment(attn_mask: object) -> str | None:
    """Keys with which a causal mask object of torch (CausalBias) aligns the queries: "first", "last", else None."""
    if type(attn_mask).__name__ != "CausalBias":
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return None
    return "last" if attn_mask.variant == CausalVariant.LOWER_RIGHT else "first"


def causal(alignment: str, key: Tensor, value: Tensor, m: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys, values and options of `attend` for a causal mask that aligns m queries with the first or the last keys."""
    n = key.shape[-2]
    if alignment == "first" and m > n:
        return key, value, {"window": (None, m - n)}
    if alignment == "first":
        key, value = key[..., :m, :], value[..., :m, :]
    return key, value, {"is_causal": True}


def is_mask_object(attn_mask: object) -> bool:
    """Return whether a mask is an object of torch: a CausalBias of SDPA or a BlockMask of flex_attention."""
    return type(attn_mask).__name__ in ("CausalBias", "BlockMask")


def without_mask_objects(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Replace a mask object of torch among the options of `attend`: a BlockMask by a tensor, a CausalBias by a band.

    The memory of a CausalBias is never written.
    """
    attn_mask: Any = options.get("attn_mask")
    if not is_mask_object(attn_mask):
        return key, value, options
    m, n = query.shape[-2], key.shape[-2]
    alignment = causal_alignment(attn_mask)
    made_for = tuple(attn_mask.shape[-2:]) if alignment is None else (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if made_for != (m, n):
        problem = f"attn_mask must be for {m} queries and {n} keys, got {made_for[0]} and {made_for[1]}"
        remedy = "Make it with the numbers of queries and keys of this call."
        raise InputValueError("attend", "attn_mask", problem, remedy)
    if alignment is None:
        return key, value, options | {"attn_mask": dense(attn_mask, m, n)}
    others = options.get("is_causal") or any(options.get(name) is not None for name in ("bias", "segments", "window"))
    if alignment == "first" and m != n and others:
        problem = "attn_mask (causal, aligned with the first key) cannot be combined with other masks if m != n"
        raise InputNotImplementedError("attend", "attn_mask", problem, "Pass a bool tensor, or causal_lower_right.")
    key, value, band_of_mask = causal(alignment, key, value, m)
    return key, value, options | {"attn_mask": None} | band_of_mask


def _window(window: tuple[SupportsIndex | None, SupportsIndex | None]) -> tuple[int | None, int | None]:
    if not (isinstance(window, tuple | list) and len(window) == 2):
        remedy = "Write window=(W - 1, 0) for Hugging Face's sliding_window=W."
        raise InputTypeError("attend", "window", f"window must be a pair (left, right), got {window!r}", remedy)
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, SupportsIndex) or side < 0):  # type: ignore[operator]
            remedy = "Count the keys on each side without the query's own position; use None for no limit."
            raise InputValueError(
                "attend", "window", f"window must contain integers >= 0 or None, got {window!r}", remedy
            )
    left, right = (None if side is None else index(side) for side in window)
    return left, right


def sight(
    attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
    bias: Float[Tensor, "..."] | None,
    segments: Int[Tensor, "..."] | None,
    *,
    lead: torch.Size,
    size: tuple[int, int, int],
    like: Tensor,
) -> Sight:
    """Mask, bias and segments for logits [*lead, h, m, n], with size 1 along dimensions that share them."""
    if attn_mask is None and bias is None and segments is None:
        return Sight()
    mask = None
    if attn_mask is not None:
        _check_tensor("attn_mask", attn_mask, like)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        elif attn_mask.is_floating_point():
            wide = torch.promote_types(like.dtype, torch.float32)  # a sum of half-precision numbers needs more bits
            bias = attn_mask if bias is None else attn_mask.to(wide) + _floating("bias", bias, like).to(wide)
        else:
            remedy = "Convert it with attn_mask.bool() (True = attend), or to the dtype of query if it is additive."
            raise InputTypeError(
                "attend", "attn_mask", f"attn_mask must be bool or floating-point, got {attn_mask.dtype}", remedy
            )
    if bias is not None:
        bias = _arranged("attn_mask or bias", _floating("bias", bias, like), lead, size)
        if bias.dtype not in (like.dtype, torch.float32):
            bias = bias.to(like.dtype)
    if mask is not None:
        mask = _arranged("attn_mask", mask, lead, size)
    return Sight(bias, mask, None if segments is None else _segments(segments, lead, size, like))


def _floating(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    _check_tensor(name, tensor, like)
    if not tensor.is_floating_point():
        remedy = f"Pass a bool mask as attn_mask, or convert with {name}.to(query.dtype)."
        raise InputTypeError("attend", name, f"{name} must be a floating-point tensor, got {tensor.dtype}", remedy)
    return tensor


def _check_tensor(name: str, tensor: Tensor, like: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        fact, remedy = type(tensor).__name__, "Pass a tensor, or for attn_mask a CausalBias or BlockMask of torch."
        raise InputTypeError("attend", name, f"{name} must be a tensor, got {fact}", remedy)
    if tensor.device != like.device:
        remedy = f"Move it with {name}.to(query.device)."
        raise InputValueError("attend", name, f"{name} is on {tensor.device}, but query is on {like.device}", remedy)


def _arranged(name: str, tensor: Tensor, lead: torch.Size, size: tuple[int, int, int]) -> Tensor:
    """Reshape a tensor that broadcasts against [*lead, h, m, n] to [#b, #h, #m, n]."""
    target = (*lead, *size)
    if tensor.ndim > len(target):
        too_many = tensor.ndim - len(target)
        if all(s == 1 for s in tensor.shape[:too_many]):
            tensor = tensor.reshape(tensor.shape[too_many:])
    shape = (1,) * (len(target) - tensor.ndim) + tuple(tensor.shape)
    if not broadcasts(shape, target):
        condition = f"{name} must broadcast against {target} (batch, heads, queries, keys)"
        remedy = "Pass a padding mask [b, n] as mask[:, None, None, :], and a mask [b, m, n] as mask[:, None]."
        raise InputValueError("attend", name, f"{condition}, got shape {shape_of(tensor)}", remedy)
    tensor = tensor.reshape(shape).expand(*shape[:-1], size[-1])
    if all(s == 1 for s in shape[:-3]):
        return tensor.reshape(1, *tensor.shape[-3:])
    return tensor.expand(*lead, *tensor.shape[-3:]).reshape(math.prod(lead), *tensor.shape[-3:])


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether every size is 1 or that of the target."""
    return len(shape) == len(target) and all(s == 1 or s == w for s, w in zip(shape, target, strict=True))


def _segments(segments: Tensor, lead: torch.Size, size: tuple[int, int, int], like: Tensor) -> Tensor:
    """Segments of the keys, [#b, n]; the queries are the last m keys."""
    _check_tensor("segments", segments, like)
    _, m, n = size
    if segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool:
        remedy = "Number the documents, for example 0 0 0 1 1 2."
        raise InputTypeError("attend", "segments", f"segments must be integers, got {segments.dtype}", remedy)
    target = (*lead, n)
    shape = (1,) * (len(target) - segments.ndim) + tuple(segments.shape)
    if not broadcasts(shape, target) or shape[-1] != n:
        condition = f"segments must broadcast against {target} (batch, keys)"
        remedy = "Pass one integer for each key, shared by all heads."
        raise InputValueError("attend", "segments", f"{condition}, got shape {shape_of(segments)}", remedy)
    if m > n:
        remedy = "The queries are the last keys; for cross-attention between packed sequences pass an attn_mask."
        raise InputValueError(
            "attend",
            "segments",
            f"segments needs at most as many queries as keys, but there are {m} queries and {n} keys",
            remedy,
        )
    segments = segments.reshape(shape)
    if all(s == 1 for s in shape[:-1]):
        return segments.reshape(1, n)
    return segments.expand(target).reshape(math.prod(lead), n)


def documents(boundaries: Int[Tensor, " boundaries"], tokens: int) -> Int[Tensor, " tokens"]:
    """Number of the document of each token, found on the device."""
    positions = torch.arange(tokens, device=boundaries.device, dtype=boundaries.dtype)
    return torch.searchsorted(boundaries[1:].contiguous(), positions, right=True)

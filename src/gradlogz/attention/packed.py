"""Attention over packed documents, with the signature of flash-attn's variable-length function.

    query [total_q, h, d], key [total_k, hk, d], value [total_k, hk, v]       documents one after another
    cu_seqlens = [0, 3, 3, 10]                                                boundaries: lengths 3, 0 and 7

Each document attends to itself. The document of a token is the number of boundaries up to its position, found on the
device, so that nothing waits for a GPU. If queries and keys have other boundaries (cross-attention), the queries become
positions after the keys whose own keys are hidden, since `attend` reads the segment of a query at its position.

Read next: masks.py (segments), functional.py (attend).
"""

from typing import Literal, SupportsIndex

import torch
from torch.nn.functional import pad

from .._errors import InputNotImplementedError, InputTypeError, InputValueError, shape_of
from .._typing import Float, Int, Tensor
from . import masks
from .functional import attend
from .result import Attention


def attend_varlen(
    query: Float[Tensor, "tq h d"],
    key: Float[Tensor, "tk hk d"],
    value: Float[Tensor, "tk hk v"],
    cu_seqlens_q: Int[Tensor, " boundaries"],
    cu_seqlens_k: Int[Tensor, " boundaries"],
    max_seqlen_q: int | None = None,  # noqa: ARG001
    max_seqlen_k: int | None = None,  # noqa: ARG001
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    softcap: float | None = None,
    window: tuple[SupportsIndex | None, SupportsIndex | None] | None = None,
    statistics: Literal["none", "scalar", "moments"] = "scalar",
) -> Attention:
    """Attention of each packed document to its own keys: output [tq, h, v], statistics [h, tq].

    The first arguments are those of flash-attn's `flash_attn_varlen_func`, the options those of `attend`. Groups of
    query heads share key heads if there are fewer of them. Queries of a document without keys have output 0.

    Args:
        cu_seqlens_q: positions at which the documents begin, and the end of the last. Tokens after it are a further
            document.
        cu_seqlens_k: those of the keys. With `is_causal` or `window` they must equal those of the queries; if it is
            the same tensor they are not compared, which on a GPU would wait for it.
        max_seqlen_q: longest document, not needed: accepted so that calls of flash-attn's function need no change.
        max_seqlen_k: likewise.

    Law: tests/laws/test_packed_documents_attend_to_themselves.py.

    >>> import torch
    >>> q = torch.randn(10, 4, 8)
    >>> boundaries = torch.tensor([0, 3, 10])
    >>> attend_varlen(q, q, q, boundaries, boundaries).output.shape
    torch.Size([10, 4, 8])
    """
    _check(query, key, value, cu_seqlens_q, cu_seqlens_k)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    segments, mask = masks.documents(cu_seqlens_k, len(key)), None
    if not _equal(query, key, cu_seqlens_q, cu_seqlens_k):
        if is_causal or window is not None:
            problem = "cu_seqlens_q must equal cu_seqlens_k with is_causal or window"
            remedy = "Pass queries for all keys, or call attend for each document."
            raise InputNotImplementedError("attend_varlen", "cu_seqlens_q", problem, remedy)
        segments = torch.cat((segments, masks.documents(cu_seqlens_q, len(query))))
        mask = torch.arange(len(segments), device=query.device) < len(key)
        k, v = (pad(t, (0, 0, 0, len(query))) for t in (k, v))
    result = attend(
        q, k, v, attn_mask=mask, segments=segments, dropout_p=dropout_p, is_causal=is_causal, scale=scale, sinks=sinks,
        softcap=softcap, window=window, statistics=statistics, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    rows = (None if t is None else t.squeeze(0) for t in result[1:])
    return Attention(result.output.squeeze(0).transpose(0, 1), *rows)  # type: ignore[arg-type]


def _equal(query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Return whether queries and keys have the same boundaries."""
    if len(query) != len(key):
        return False
    return cu_seqlens_q is cu_seqlens_k or torch.equal(cu_seqlens_q, cu_seqlens_k)


def _check(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor) or t.ndim != 3:
            fact = f"shape {shape_of(t)}" if isinstance(t, Tensor) else type(t).__name__
            remedy = "Concatenate the documents; for a batch of equal lengths call attend."
            raise InputValueError("attend_varlen", name, f"{name} must be [tokens, heads, size], got {fact}", remedy)
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            fact = str(t.dtype) if isinstance(t, Tensor) else type(t).__name__
            problem = f"{name} must be a tensor of int32 or int64, got {fact}"
            raise InputTypeError("attend_varlen", name, problem, "Pass the positions at which documents begin.")
        if t.ndim != 1 or len(t) < 2 or t.device != query.device:
            problem = f"{name} must be [documents + 1] on {query.device}, got shape {shape_of(t)} on {t.device}"
            raise InputValueError("attend_varlen", name, problem, "Begin with 0 and end with the number of tokens.")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        fact = f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        problem = f"cu_seqlens_q and cu_seqlens_k must have equally many documents, got {fact}"
        raise InputValueError("attend_varlen", "cu_seqlens_k", problem, "Repeat a boundary for an empty document.")

"""Scaled dot-product attention that reports its own statistics.

    s_mn   = <q_m, k_n> scale + bias_mn               the logit, -inf where masked
    G_m    = log sum_n exp s_mn                       log_normalizer                    [shim22, Eq. 5]
    output = sum_n p_mn v_n,  p = exp(s - G)          the gradient of G in omega        [theory 3.9]
    H_m    = G_m - sum_n p_mn s_mn                    entropy                           [theory 3.5]

Read next: result.py (the fields), masks.py (which keys a query sees), ../kernels/attention/operator.py (the
derivatives).
"""

import math
import sys
from collections.abc import Collection
from functools import lru_cache
from typing import Literal, SupportsIndex

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from .._errors import InputNotImplementedError, InputTypeError, InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor
from ..kernels.attention.dropout import Dropout
from ..kernels.attention.operator import attention, eager, eager_way
from ..kernels.attention.reference import Statistics, StatisticsAndMean
from ..kernels.attention.scoring import Scoring, Sight
from . import masks
from .result import Attention
from .row_fields import check_fields, with_fields

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EVERYTHING = Sight()
SDPA = torch._C._nn.scaled_dot_product_attention  # the original, even if this is imported while torch replaces it


def attend(
    query: Float[Tensor, "*bq m d"],
    key: Float[Tensor, "*bk n d"],
    value: Float[Tensor, "*bv n v"],
    *,
    attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Float[Tensor, "..."] | None = None,
    softcap: float | None = None,
    window: tuple[SupportsIndex | None, SupportsIndex | None] | None = None,
    segments: Int[Tensor, "..."] | None = None,
    statistics: Literal["none", "scalar", "moments"] = "scalar",
    fields: Collection[str] = (),
) -> Attention:
    """softmax(<q, k> scale) v with the log normaliser, entropy, logit mean, variance and maximum of every row.

    Arguments and output are those of `torch.nn.functional.scaled_dot_product_attention`; all options are keyword-only.
    The statistics need no second pass, and memory is linear in the number of tokens. All results are twice
    differentiable, in forward and reverse mode and under vmap; under torch.compile once, in reverse mode. The
    statistics of half-precision inputs are float32.

    Differences from scaled_dot_product_attention (SDPA):
      - `is_causal` aligns the last query with the last key (decoding with a cache); SDPA aligns the first ones. The
        two agree when there are as many queries as keys. `is_causal` may be combined with a mask.
      - A row that sees no key has output 0, never NaN, and gradient 0; `Attention.seen` is False there.
      - Dropout acts on the output alone: the statistics are those of the weights before dropout.

    Args:
        attn_mask: bool (True = attend) or added to the logits; broadcasts against [*b, h, m, n]. Also the objects of
            torch.nn.attention.bias, and a BlockMask of flex_attention, which is converted to a tensor.
        bias: added to the logits; may be combined with a bool mask. Only its gradient needs memory of size m x n.
        scale: 1 / sqrt(d) by default.
        enable_gqa: groups of query heads share the heads of key and value (dimension -3).
        sinks: one extra logit per query head, [h] or [*b, h], with value 0: it takes weight and enters every
            statistic; -inf disables it.
        softcap: logits become softcap tanh(logit / softcap), before bias and mask.
        window: (left, right), the number of keys that a query sees before and after its own position, which is not
            counted; None is no limit. Hugging Face's sliding_window=W is (W - 1, 0).
        segments: an integer for each key, [*b, n]; a query sees only keys of its own segment. Query i has the segment
            of key n - m + i.
        statistics: "none" computes output and log normaliser only; "moments" adds key_mean, key_variance and
            value_variance. Fields that are not computed are None. The variances of keys and values are computed about
            the average of all keys, and lose digits for rows whose mean is far from it.
        fields: names of further fields, in one more pass over the logits: "max_key", "min_logit" and
            "first_key_weight".

    Law: tests/agreement/test_attend_agrees_with_sdpa.py, tests/laws/test_attend_is_the_empirical_measure.py.

    >>> import torch
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(2, 4, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    >>> a = attend(q, k, v)
    >>> torch.allclose(a.output, scaled_dot_product_attention(q, k, v))
    True
    >>> torch.allclose(a.log_normalizer, (q @ k.mT / 8**0.5).logsumexp(-1))
    True
    """
    if has_torch_function((query, key, value)):  # tensor subclasses, and interceptions of a model
        return handle_torch_function(
            attend, (query, key, value), query, key, value, attn_mask=attn_mask, bias=bias, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, sinks=sinks, softcap=softcap, window=window,
            segments=segments, statistics=statistics, fields=fields,
        )  # fmt: skip
    if functional.scaled_dot_product_attention is not SDPA:
        _refuse_context_parallel()
    if attn_mask is not None and masks.is_mask_object(attn_mask):
        key, value, options = masks.without_mask_objects(query, key, value, {
            "attn_mask": attn_mask, "bias": bias, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
            "enable_gqa": enable_gqa, "sinks": sinks, "softcap": softcap, "window": window, "segments": segments,
            "statistics": statistics, "fields": fields,
        })  # fmt: skip
        return attend(query, key, value, **options)
    left, right = (None, 0 if is_causal else None) if window is None else masks.band(is_causal, window)
    if (
        attn_mask is bias is segments is sinks is None
        and dropout_p == 0.0
        and not fields
        and (statistics == "scalar" or statistics == "none")
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (way := eager_way((query, key, value))) != "other"
        and query.dtype is key.dtype is value.dtype
        and query.device == key.device == value.device
        and not query.is_nested
        and not torch._C._is_any_autocast_enabled()
    ):  # fast path: with few tokens, the general checks take longer than the kernel
        shapes = query.shape, key.shape, value.shape
        plain = _plain_scoring(query.dtype, shapes, bool(enable_gqa), scale, softcap, left, right)
        if plain is not None:
            rows = eager(
                query, key, value, EVERYTHING, plain, None,
                statistics=statistics == "scalar", differentiable=way == "reverse",
            )  # fmt: skip
            return Attention(*rows[:2]) if statistics == "none" else _scalars(rows, query, key, EVERYTHING)
    _check(query, key, value, dropout_p, statistics)
    check_fields(fields)
    _check_number("scale", scale)
    _check_number("softcap", softcap)
    autocast = _autocast(query)
    if autocast and query.dtype != torch.float64:  # as it casts the inputs of SDPA
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    lead, (q, k, v) = _four_dimensional(query, key, value, enable_gqa)
    (_, h, m, d), n = q.shape, k.shape[2]
    sight = masks.sight(attn_mask, bias, segments, lead=lead, size=(h, m, n), like=query)
    scoring = Scoring(1 / math.sqrt(d) if scale is None else float(scale), softcap, left, right)
    dropout = None
    if dropout_p > 0:
        dropout = Dropout(float(dropout_p), torch.randint(1 << 62, (), device=query.device))
    if autocast:
        with torch.autocast(query.device.type, enabled=False):
            result = with_sinks(_statistics(q, k, v, sight, scoring, dropout, statistics), sinks, lead)
    else:
        result = with_sinks(_statistics(q, k, v, sight, scoring, dropout, statistics), sinks, lead)
    if fields:
        result = with_fields(result, fields, q, k, sight, scoring)
    if result.output.dtype is not query.dtype:
        result = Attention(result.output.to(query.dtype), *result[1:])
    if q is query:
        return result
    return _with_leading(result, () if query.ndim == key.ndim == value.ndim == 2 else (*lead, h), m)


@lru_cache(maxsize=1024)
def _plain_scoring(
    dtype: torch.dtype,
    shapes: tuple[torch.Size, torch.Size, torch.Size],
    enable_gqa: bool,
    scale: float | None,
    softcap: float | None,
    left: int | None,
    right: int | None,
) -> Scoring | None:
    """Scoring of a call without masks whose operands need no rearrangement; None if the general path must check it."""
    query_shape, key_shape, value_shape = shapes
    if dtype not in DTYPES or not len(query_shape) == len(key_shape) == len(value_shape) == 4:
        return None
    if query_shape[0] != key_shape[0] or key_shape[:3] != value_shape[:3] or query_shape[3] != key_shape[3]:
        return None
    (_, h, _, d), (_, hk, n, _) = query_shape, key_shape
    if not (d and n and hk) or (h % hk if enable_gqa else h != hk):
        return None
    scale = 1 / math.sqrt(d) if scale is None else scale
    if not math.isfinite(scale) or (softcap is not None and not 0 < softcap < math.inf):
        return None
    return Scoring(scale, softcap, left, right)


def _refuse_context_parallel() -> None:
    """Raise inside torch's context_parallel, which replaces SDPA: here each process would see its own keys only."""
    contexts = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if contexts is not None and functional.scaled_dot_product_attention in contexts._replaced_functions:
        problem = "attend sees only the keys of this process inside torch's context_parallel"
        remedy = "Call gradlogz.attention.ring_attend outside of it: it attends to the keys of all processes."
        raise InputNotImplementedError("attend", "key", problem, remedy)


def _statistics(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, scoring: Scoring, dropout: Dropout | None, statistics: str
) -> Attention:
    if statistics == "moments":
        return _moments(q, k, v, sight, scoring, dropout)
    result = attention(q, k, v, sight, scoring, dropout, statistics=statistics == "scalar")
    if statistics == "none":
        return Attention(result.output, result.log_normalizer)
    return _scalars(result, q, k, sight)


def _may_be_empty(q: Tensor, k: Tensor, sight: Sight) -> bool:
    """Return whether a row may see no key. Without masks and with m <= n, every query sees its own position."""
    bias, mask, segments = sight
    return bias is not None or mask is not None or segments is not None or q.shape[2] > k.shape[2]


def _scalars(rows: Statistics, q: Tensor, k: Tensor, sight: Sight) -> Attention:
    output, G, H, V, top = rows
    E = rows.mean_logit if isinstance(rows, StatisticsAndMean) else None
    if E is None:
        E = (G - H).masked_fill(G == -torch.inf, 0.0) if _may_be_empty(q, k, sight) else G - H
    return Attention(output, G, H, E, V, top)


def _moments(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scoring: Scoring, dropout: Dropout | None) -> Attention:
    """Statistics with moments, in one pass over the values [v, v^2, k, |k|^2], centred to save digits."""
    wide = torch.promote_types(q.dtype, torch.float32)
    center_k, center_v = (torch.nan_to_num(t.detach().to(wide).mean(-2, keepdim=True), 0.0, 0.0, 0.0) for t in (k, v))
    y = v.to(wide) - center_v
    values = [y, y.square()]
    if v is not k:  # otherwise the first two contain the rest
        x = k.to(wide) - center_k
        values += [x, x.square().sum(-1, keepdim=True)]
    result = attention(q.to(wide), k.to(wide), torch.cat(values, -1), sight, scoring)
    mean_v, square_v, *key_parts = result.output.split([t.shape[-1] for t in values], -1)
    value_variance = (square_v - mean_v.square()).clamp(min=0)
    mean_k, key_variance = mean_v, value_variance.sum(-1)
    if key_parts:
        mean_k, square_k = key_parts
        key_variance = (square_k.squeeze(-1) - mean_k.square().sum(-1)).clamp(min=0)

    group = q.shape[1] // max(1, k.shape[1])
    center_k, center_v = (c.repeat_interleave(group, 1) for c in (center_k, center_v))
    if _may_be_empty(q, k, sight):
        alive = (result.log_normalizer != -torch.inf).unsqueeze(-1)
        center_k, center_v = (torch.where(alive, c, 0.0) for c in (center_k, center_v))
    output = mean_v + center_v if dropout is None else attention(q, k, v, sight, scoring, dropout).output
    scalars = _scalars(result, q, k, sight)[1:6]
    return Attention(output, *scalars, mean_k + center_k, key_variance, value_variance)


def with_sinks(result: Attention, sinks: Tensor | None, lead: torch.Size) -> Attention:
    """Result [b, h, m] over the keys and one extra logit per head, whose value is 0; `lead` are the batch sizes."""
    return result if sinks is None else result.joined(_sink(sinks, result, lead))


def _sink(sinks: Tensor, like: Attention, lead: torch.Size) -> Attention:
    """Attention to a single key with this logit, whose key and value are 0."""
    h = like.log_normalizer.shape[1]
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        fact = f"{sinks.dtype}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise InputTypeError(
            "attend", "sinks", f"sinks must be a floating-point tensor, got {fact}", "Pass one logit per query head."
        )
    if sinks.device != like.output.device:
        remedy = "Move it with sinks.to(query.device)."
        raise InputValueError(
            "attend", "sinks", f"sinks is on {sinks.device}, but query is on {like.output.device}", remedy
        )
    if sinks.ndim == 0 or not masks.broadcasts((1,) * (len(lead) + 1 - sinks.ndim) + tuple(sinks.shape), (*lead, h)):
        condition = f"sinks must be [h] or [*b, h] with h={h} query heads"
        raise InputValueError(
            "attend", "sinks", f"{condition}, got shape {shape_of(sinks)}", "Pass one logit per query head."
        )
    per_head = sinks.to(like.log_normalizer.dtype).expand(*lead, h).reshape(math.prod(lead), h, 1)
    logit = per_head.expand_as(like.log_normalizer)
    zero, mean = torch.zeros_like(logit), logit.masked_fill(logit == -torch.inf, 0.0)
    return Attention(
        torch.zeros_like(like.output),
        logit,
        *(None if t is None else s for t, s in zip(like[2:6], (zero, mean, zero, logit), strict=True)),
        *(None if t is None else torch.zeros_like(t) for t in like[6:]),
    )


def _with_leading(result: Attention, lead: tuple[int, ...], m: int) -> Attention:
    """Restore the leading dimensions of the query."""
    return Attention(*(None if t is None else t.reshape(*lead, m, *t.shape[3:]) for t in result))  # type: ignore[arg-type]


def _four_dimensional(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[torch.Size, tuple[Tensor, Tensor, Tensor]]:
    """Return the leading dimensions, and query [b, h, m, d], key [b, hk, n, d] and value [b, hk, n, v]."""
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if len(q_shape) == len(k_shape) == len(v_shape) == 4 and q_shape[0] == k_shape[0] and k_shape[:2] == v_shape[:2]:
        h, key_heads = q_shape[1], k_shape[1]
        if h == key_heads or (enable_gqa and key_heads and h % key_heads == 0):
            lead = torch.Size(q_shape[:1])
            return lead, (query, key, value)  # the usual cases, in which nothing is to be done
    try:
        lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    except RuntimeError:
        fact = ", ".join(f"{name} {shape_of(t)}" for name, t in _named(query, key, value))
        remedy = "Make the dimensions before the heads equal, or 1."
        raise InputValueError(
            "attend", "query", f"the batch dimensions of query, key and value must broadcast, got {fact}", remedy
        ) from None
    heads = [1 if t.ndim < 3 else t.shape[-3] for t in (query, key, value)]
    key_heads = max(heads[1:])
    h = max(heads) if heads[0] == 1 else heads[0]
    if any(count not in (1, key_heads) for count in heads[1:]) or key_heads not in (1, h):
        shared = enable_gqa and heads[1] == heads[2] and key_heads and h % key_heads == 0
        if not shared:
            fact = f"{heads[0]}, {heads[1]} and {heads[2]} heads in query, key and value"
            condition = (
                "the number of key heads must divide that of query heads"
                if enable_gqa
                else "the numbers of heads must be equal"
            )
            remedy = "Use a number of query heads that is a multiple of the number of key heads."
            if not enable_gqa:
                remedy = "Pass enable_gqa=True if groups share key heads; tensors are [*b, heads, tokens, size]."
            raise InputValueError("attend", "key", f"{condition}, got {fact}", remedy)
    head_counts = (h, key_heads, key_heads)
    arranged = []
    for t, count in zip((query, key, value), head_counts, strict=True):
        t = t if t.ndim >= 3 else t.unsqueeze(0)
        if t.shape[:-2] != (*lead, count):  # torch cannot trace views of dual numbers
            t = t.expand(*lead, count, *t.shape[-2:])
        arranged.append(t if t.ndim == 4 else t.reshape(math.prod(lead), *t.shape[-3:]))
    return lead, (arranged[0], arranged[1], arranged[2])


def _named(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[str, Tensor], ...]:
    return ("query", query), ("key", key), ("value", value)


def _autocast(tensor: Tensor) -> bool:
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False  # the cheapest test first
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def _check_number(name: str, number: float | None) -> None:
    """Check that scale or softcap is a number: a tensor would silently get no gradient."""
    if number is None:
        return
    if isinstance(number, Tensor):
        remedy = "For a learned temperature pass query * scale and scale=1.0; a soft cap is fixed."
        raise InputTypeError("attend", name, f"{name} must be a number, got a tensor", remedy)
    if torch.compiler.is_compiling():  # it may be symbolic
        return
    if not isinstance(number, float | int) or not math.isfinite(number) or (name == "softcap" and number <= 0):
        condition = "softcap must be positive and finite" if name == "softcap" else "scale must be a finite number"
        raise InputValueError("attend", name, f"{condition}, got {number!r}", f"Leave {name} out for its default.")


def _check(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, statistics: str) -> None:
    """Check the arguments before anything is computed."""
    if not _alike(query, key, value):
        _check_tensors(query, key, value)
    (*_, d), (*_, n, key_size), (*_, value_tokens, _) = query.shape, key.shape, value.shape
    if d != key_size or d == 0:
        condition = f"the last dimension of key must be d={d} > 0, as in query"
        raise InputValueError("attend", "key", f"{condition}, got shape {shape_of(key)}", "Project one of them first.")
    if n != value_tokens:
        condition = f"value must have n={n} tokens, one for each key"
        raise InputValueError(
            "attend", "value", f"{condition}, got shape {shape_of(value)}", "Cut or pad one of them first."
        )
    if n == 0:
        remedy = "To hide all keys use a mask: such rows have output 0 and log normaliser -inf."
        raise InputValueError("attend", "key", f"key must have at least one token, got shape {shape_of(key)}", remedy)
    if not 0.0 <= dropout_p < 1.0:
        remedy = "Pass the probability of dropping a weight."
        raise InputValueError("attend", "dropout_p", f"dropout_p must be in [0, 1), got {dropout_p}", remedy)
    if statistics not in ("none", "scalar", "moments"):
        condition, remedy = 'statistics must be "none", "scalar" or "moments"', "Leave it out for scalar statistics."
        raise InputValueError("attend", "statistics", f"{condition}, got {statistics!r}", remedy)
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        problem = "attend cannot be exported, because torch.export supports only torch's own operators"
        remedy = "Export the model with scaled_dot_product_attention instead."
        raise InputNotImplementedError("attend", None, problem, remedy)


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether these are plain tensors of one dtype and device with enough dimensions: one cheap test."""
    return (
        type(query) is type(key) is type(value) is Tensor
        and query.dtype is key.dtype is value.dtype
        and query.dtype in DTYPES
        and query.device == key.device == value.device
        and query.ndim == key.ndim == value.ndim >= 2
        and not query.is_nested
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check type, dtype and dimensions of each tensor, and that dtypes and devices agree."""
    for name, t in _named(query, key, value):
        if not isinstance(t, Tensor):
            fact, remedy = type(t).__name__, "Wrap it in torch.as_tensor."
            raise InputTypeError("attend", name, f"{name} must be a tensor, got {fact}", remedy)
        if t.is_nested:
            remedy = "Pad it with torch.nested.to_padded_tensor and mask, or pack it and pass segments."
            raise InputTypeError("attend", name, f"{name} must be a plain tensor, but it is nested", remedy)
        if t.dtype not in DTYPES:
            remedy = "Convert it to float16, bfloat16, float32 or float64."
            raise InputTypeError("attend", name, f"{name} must be a floating-point tensor, got {t.dtype}", remedy)
        if t.ndim < 2:
            fact, remedy = f"shape {shape_of(t)}", "Add the missing dimensions with unsqueeze."
            raise InputValueError("attend", name, f"{name} must be [*b, tokens, features], got {fact}", remedy)
    if not query.dtype == key.dtype == value.dtype:
        castable = _autocast(query) and torch.float64 not in (query.dtype, key.dtype, value.dtype)
        if not castable:
            fact = ", ".join(f"{name} {t.dtype}" for name, t in _named(query, key, value))
            remedy = "Convert one of them with .to(dtype)."
            raise InputTypeError("attend", "query", f"query, key and value must share one dtype, got {fact}", remedy)
    if not query.device == key.device == value.device:
        fact = ", ".join(f"{name} on {t.device}" for name, t in _named(query, key, value))
        remedy = "Move one of them with .to(device)."
        raise InputValueError("attend", "query", f"query, key and value must be on one device, got {fact}", remedy)
